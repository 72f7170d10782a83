"""The kept costs of compiled kernels: of the tiles that launches choose, within what a GPU has, and as the page shows them."""

from __future__ import annotations

import json

import pytest

from flexdilated.backends.triton.tiles import tiles_of

pytest.importorskip("triton")

from benchmarks import cubins


def kept() -> list[dict[str, object]]:
    return json.loads(cubins.KEPT.read_text())


def test_kept_costs_are_those_of_the_tiles_that_are_chosen() -> None:
    for entry in kept():
        level, dtype = divmod(entry["level"], 10), cubins.DTYPES[entry["dtype"]]
        assert list(tiles_of(entry["kernel"], level, entry["head_dim"], dtype)) == entry["tiles"], entry


def test_every_level_is_kept_at_the_usual_head_dims() -> None:
    found = {cubins.Config(*(entry[name] for name in cubins.Config._fields)) for entry in kept()}
    assert found <= set(cubins.configs(cubins.LEVELS, cubins.HEAD_DIMS, cubins.DTYPES, cubins.KERNELS))
    kernels = [name for name in cubins.KERNELS if name != "prepare"]
    assert set(cubins.configs(cubins.LEVELS, (64, 128), ["bf16"], kernels)) <= found


def test_nothing_kept_is_at_fault() -> None:
    for entry in kept():
        config = cubins.Config(*(entry[name] for name in cubins.Config._fields))
        cost = cubins.Cost(*(entry[name] for name in cubins.Cost._fields))
        assert not list(cubins.faults(config, cost, cost.spills))


def test_faults_are_named() -> None:
    config = cubins.Config("attend", 90, 64, "bf16", "causal")
    cost = cubins.Cost(cubins.Tiles(128, 64, 8, 3), 255, 7, 0, 1 << 20, 1024, "HMMA")
    said = " ".join(cubins.faults(config, cost, 6))
    assert "takes 1048576 bytes of shared memory, more than 232448" in said
    assert "takes 1024 columns of tensor memory, more than 512" in said
    assert "spills 7 stores, more than the 6 kept" in said
    assert "multiplies by HMMA, not HGMMA" in said


def test_the_page_shows_what_is_kept() -> None:
    shown = cubins.PAGE.read_text().split(cubins.BORDERS[0])[1].split(cubins.BORDERS[1])[0]
    assert shown.strip() == cubins.table(kept())
