"""The sweep over tiles: what it forces is what is launched, and what is kept is what tiles.py takes."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern
from flexdilated.backends.triton.tiles import DESCRIBED, HALF, TileConfig

pytest.importorskip("triton")

from benchmarks import tiles
from flexdilated.backends.triton import launch

pytestmark = pytest.mark.lab

KEPT = Path(tiles.__file__).parent / "results" / "h200-tiles.json"


def test_tiles_are_timed_on_a_gpu_alone(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        tiles.main([])
    assert "tiles are timed on a CUDA device" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in triton's interpreter")
@pytest.mark.parametrize(
    ("kernel", "by"), [*((kernel, "device") for kernel in tiles.KERNELS), ("attend", "host"), ("differentiate_keys", "sums")]
)
def test_a_candidate_s_kernel_takes_its_tiles_and_no_other_kernel_does(kernel: str, by: str) -> None:
    asked = argparse.Namespace(kernels=[kernel], head_dims=[16], tiles=[16, 32, 2, 1], by=[by], causal=True)
    (candidate,) = tiles.candidates(asked)
    given: dict[str, set[tuple[TileConfig, bool]]] = {}

    def noted(kernel: Any, programs: int, arguments: Any, constants: dict[str, Any], chosen: TileConfig, on: Any) -> None:
        given.setdefault(kernel.__name__, set()).add((chosen, constants.get("DESCRIBED", False)))

    with tiles.forced(candidate, noted):
        tiles.call(candidate, tiles.inputs(16, 40, "cpu"), DilatedPattern((16, 32), (1, 2)))
    assert given[kernel] == {(candidate.tiles, True)}
    others = set().union(*(found for name, found in given.items() if name != kernel))
    assert (kernel == "attend") == (not others)
    assert ("differentiate_queries" in given) == (kernel != "attend" and by != "sums")
    assert candidate.tiles not in {found for found, _ in others}
    assert launch._tiles.__module__ == launch.__name__


def test_the_tiles_of_hopper_are_the_fastest_that_were_kept() -> None:
    """Or within a twentieth: kernels that differ by less are chosen by what they spill. Some spill too much since they changed."""
    best: dict[tuple[str, int, bool], dict[tuple[int, ...], list[float]]] = {}
    for m in json.loads(KEPT.read_text())["measurements"]:
        best.setdefault((m["kernel"], m["head_dim"], m["described"]), {}).setdefault(tuple(m["tiles"]), []).append(m["ms"])
    means = {key: {which: sum(ms) / len(ms) for which, ms in found.items()} for key, found in best.items()}
    for kernel in tiles.KERNELS:
        for size, head_dim in enumerate(tiles.HEAD_DIMS):
            pointers, described = HALF[kernel][90][size], DESCRIBED[kernel][90][size]
            by_pointers = means[kernel, head_dim, False]
            if (kernel, head_dim) not in (("attend", 256), ("differentiate_keys", 128), ("differentiate_queries", 256)):
                assert by_pointers[pointers[:4]] <= 1.05 * min(by_pointers.values())
            if described is not None and (kernel, head_dim) != ("attend", 256):
                by_descriptors = means[kernel, head_dim, True]
                assert described.described
                assert by_descriptors[described[:4]] <= 1.05 * min(by_descriptors.values())
                assert by_descriptors[described[:4]] < min(by_pointers.values())
