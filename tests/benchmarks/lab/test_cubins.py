"""The kept costs of compiled kernels: of the tiles that launches choose, within what a GPU has, and as the page shows them."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from benchmarks.lab import cubins

pytestmark = pytest.mark.lab


def test_ceilings_are_of_what_is_compiled() -> None:
    found, keys = cubins.ceilings(), [config.key for config in cubins.configs()]
    assert list(found) == [key for key in keys if key in found]
    for level in (80, 90):
        for config in cubins.configs([level], cubins.USUAL_HEAD_DIMS, ["bf16"]):
            assert config.kernel in cubins.PASSES or found[config.key].keys() >= {"3.6.0", "3.7.1"}, config


def test_faults_are_named() -> None:
    config = cubins.Config("attend", 90, 64, "bf16", "causal")
    cost = cubins.Cost(cubins.TileConfig(128, 64, 8, 3), 255, 7, 0, 1 << 20, 1024, "HMMA", 2, 1)
    said = " ".join(cubins.faults(config, cost, 6))
    assert "takes 1048576 bytes of shared memory, more than 232448" in said
    assert "takes 1024 columns of tensor memory, more than 512" in said
    assert "spills 7 stores, more than the 6 kept" in said
    assert "multiplies by HMMA, not HGMMA" in said
    assert "waits for every product in 2 loops" in said
    assert "overwrites operands of products in flight in 1 loops" in said
    assert "is not kept: --write keeps it" in " ".join(cubins.faults(config, cost, None))


LOOP = """
    %c1 = arith.constant 1 : i32
    %free = arith.divsi %a, %b : i32
    %some = arith.maxsi %b, %c1 : i32
    %out:2 = scf.for %i = %c0 to %b step %c1 iter_args(%x = %a) -> (i32) {
      %g = arith.divsi %i, DIVISOR : i32
      scf.if %p {
        %h = arith.remsi %i, DIVISOR : i32
      }
    }
    %also = arith.remui %a, %b : i32
"""


@pytest.mark.parametrize(("divisor", "number"), [("%some", 0), ("%c1", 0), ("%b", 2), ("%x", 2)])
def test_divisions_by_what_may_be_0_are_found_in_loops(divisor: str, number: int) -> None:
    assert len(cubins.zero_divisors(LOOP.replace("DIVISOR", divisor))) == number


def test_no_loop_of_the_kernels_divides_by_what_may_be_0() -> None:
    """Under grouped heads; by the compiler itself, which conftest.py has replaced by an interpreter here."""
    asked = ["--levels", "90", "--head-dims", "128", "--dtypes", "bf16", "--asked", cubins.GROUPED, "mask, group of 4"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.lab.cubins", *asked, "--kernels", "differentiate_keys", "attend"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "AssertionError" not in done.stderr, done.stderr
    assert done.stdout.count(cubins.GROUPED) == 3, done.stderr
    assert done.stdout.count("differentiate_keys") == 2, done.stderr


PLANTED = """
from benchmarks.lab import cubins
config = cubins.Config("attend", 90, 64, "bf16", cubins.AHEAD)
assert not cubins.cost_of(config).spills
cubins.ASKED[cubins.AHEAD] = {"CAUSAL": False}
cubins.cost_of(config)
"""


def test_a_form_whose_exp2_waits_for_products_is_found() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PLANTED], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr.rstrip().endswith("no exp2 is issued while products are in flight"), done.stderr
    assert done.stderr.count("line 6, in <module>") == 1


def test_the_page_shows_what_is_kept() -> None:
    shown = cubins.PAGE.read_text().split(cubins.BORDERS[0])[1].split(cubins.BORDERS[1])[0]
    assert shown.strip() == cubins.table(cubins.ceilings())
