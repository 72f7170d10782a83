"""Slides over processes: who encodes which, and the same numbers as one process gives."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from flexdilated.hub.gigapath import create_model
from flexdilated.hub.slides.ranks import spread
from tests.hub.slides.tools import GRIDS, IN_CHANS, draw_tiles, write_trident
from tests.tolerances import SINGLE


def test_spread_gives_each_slide_to_one_rank_and_balances_them() -> None:
    sizes = {f"s{i}": int(size) for i, size in enumerate(10 ** (4 * torch.rand(97)))}
    for ranks in (1, 2, 3, 7):
        shares = spread(sizes, ranks)
        assert sorted(name for share in shares for name in share) == sorted(sizes)
        for share in shares:
            assert all(list(sizes).index(a) < list(sizes).index(b) for a, b in pairwise(share))
        loads = [sum(sizes[name] for name in share) for share in shares]
        # The bound of the rule (Graham 1969): 4/3 of the best, which is no less than the mean or the largest.
        assert max(loads) <= 4 / 3 * max(sum(loads) / ranks, max(sizes.values()))
    assert spread({"a": 1, "b": 1, "c": 2}, 2) == [["c"], ["a", "b"]]  # the largest first
    assert spread({"a": 0, "b": 0, "c": 0, "d": 0}, 2) == [["a", "c"], ["b", "d"]]


PROGRAM = """
from flexdilated.cli import main
from flexdilated.hub.gigapath import ARCHITECTURES
ARCHITECTURES["tiny"] = (64, 2)
main()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_of_torchrun_write_what_one_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share the two largest slides, encode the others alone, and name the one that is bad."""
    from flexdilated.hub.gigapath import ARCHITECTURES

    monkeypatch.setitem(ARCHITECTURES, "tiny", (64, 2))
    for i, count in enumerate((53, 1, 131, 17, 200)):
        write_trident(tmp_path / "slides", f"s{i}", *draw_tiles(count, seed=i))
    x, coords = draw_tiles(150)
    x[149] = torch.nan  # in the last rank's shard
    write_trident(tmp_path / "slides", "bad", x, coords)
    (tmp_path / "run.py").write_text(PROGRAM)
    torch.save({"model": create_model(None, "tiny", IN_CHANS, slide_ngrids=GRIDS).state_dict()}, tmp_path / "weights.pth")
    fixed = ["--arch=tiny", f"--in-chans={IN_CHANS}", f"--slide-ngrids={GRIDS}", "--device=cpu", "--weights=weights.pth", "--tiles"]
    one = [sys.executable, "run.py", "encode-slides", "slides", *fixed, "--output=one.h5"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "run.py"]
    two = [*torchrun, "encode-slides", "slides", *fixed, "--output=two.h5", "--split-above=100"]
    for command in (one, two):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
        assert done.stderr.count("error: 'slides/bad.h5' embeddings must be finite, got nan in tile 149") == 1
        assert "encoded 5 slides of 402 tiles" in done.stdout
    again = subprocess.run(two, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 1  # torchrun's own
    assert again.stderr.count("error: --output must not exist, got 'two.h5'") == 1
    assert "RuntimeError" not in again.stderr
    with h5py.File(tmp_path / "one.h5") as alone, h5py.File(tmp_path / "two.h5") as shared:
        assert list(shared["names"]) == list(alone["names"]) == [b"s0", b"s1", b"s2", b"s3", b"s4"]
        np.testing.assert_allclose(shared["embeddings"], alone["embeddings"], **SINGLE)
        for name in alone["tiles"]:
            np.testing.assert_allclose(shared["tiles"][name]["embeddings"], alone["tiles"][name]["embeddings"], **SINGLE)
        assert list(shared["failed/names"]) == [b"bad"]
