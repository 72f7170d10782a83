"""The kept costs of FlexAttention's kernels: of the tiles that the backend passes, spilling little, and as the page shows them."""

import json
from typing import Any

import pytest
import torch

from flexdilated.backends.flex.tiles import SCORED_TILES, TILES, tiles_of

pytest.importorskip("triton")

from benchmarks.lab import cubins, flex_cubins
from tests.backends.absent_gpu import SHARED_MEMORY

pytestmark = pytest.mark.lab

DIRECTIONS = ("forward", "backward")


def kept() -> list[dict[str, Any]]:
    return json.loads(flex_cubins.KEPT.read_text())


def passed_to(level: int, head_dim: int, layout: str) -> dict[str, int]:
    """Several branches in one call are a function of scores."""
    return tiles_of(divmod(level, 10), head_dim, torch.bfloat16, scored=layout == "fused")


def test_every_case_is_kept_once() -> None:
    names = (*flex_cubins.Config._fields, "direction")
    found = [tuple(entry[name] for name in names) for entry in kept()]
    cases = [(level, d, layout) for level in flex_cubins.LEVELS for d in flex_cubins.HEAD_DIMS for layout in flex_cubins.LAYOUTS]
    assert sorted(found) == sorted(
        (*case, by, direction) for case in cases for by in flex_cubins.CHOOSERS for direction in DIRECTIONS
    )


def test_kept_costs_are_those_of_the_tiles_that_are_passed() -> None:
    for entry in kept():
        passed = passed_to(entry["level"], entry["head_dim"], entry["layout"])
        prefix = "fwd_" if entry["direction"] == "forward" else "bwd_"
        own = {name.removeprefix(prefix): value for name, value in passed.items() if name.startswith(prefix)}
        if own and entry["tiles_by"] == "flexdilated":
            assert [own["num_warps"], own["num_stages"]] == [entry["num_warps"], entry["num_stages"]]
            assert [own[name] for name in flex_cubins.BLOCKS if name in own] == entry["blocks"]


def test_what_is_passed_fits_and_spills_less_than_torchs_choice() -> None:
    by = {tuple(e[name] for name in (*flex_cubins.Config._fields, "direction")): e for e in kept()}
    for (level, head_dim, layout, chooser, direction), entry in by.items():
        if chooser == "flexdilated":
            assert entry["shared"] <= SHARED_MEMORY[level]
            assert entry["spills"] <= by[level, head_dim, layout, "torch", direction]["spills"]


def test_the_page_shows_what_is_kept() -> None:
    shown = cubins.PAGE.read_text().split(flex_cubins.BORDERS[0])[1].split(flex_cubins.BORDERS[1])[0]
    assert shown.strip() == flex_cubins.table(kept())


def test_faults_are_named() -> None:
    config = flex_cubins.Config(80, 64, "packed", "flexdilated")
    cost = flex_cubins.Cost("backward", [32, 64], 4, 2, 255, 7, 0, 1 << 20)
    said = " ".join(flex_cubins.faults(config, cost, 6))
    assert "spills 7 stores, more than the 6 kept" in said
    assert "takes 1048576 bytes of shared memory, more than 166912" in said
    assert "is not kept: --write keeps it" in " ".join(flex_cubins.faults(config, cost, None))


def test_sizes_divide_the_blocks_of_masks() -> None:
    for options in (options for table in (TILES, SCORED_TILES) for by_size in table.values() for options in by_size):
        assert all(128 % size == 0 for name, size in options.items() if "BLOCK" in name)
