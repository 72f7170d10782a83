"""Slides over processes: who encodes which, and the same numbers as one process gives."""

import os
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist

from flexdilated.hub.gigapath import ARCHITECTURES, Architecture, create_model
from flexdilated.hub.slides.ranks import spread
from tests.commands import invoke, invoke_ranks
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


def name_an_architecture(_: int) -> None:
    ARCHITECTURES["tiny"] = Architecture(64, 2)


def lose_one(call: int, rank: int) -> None:
    """Rank 1 is killed when it comes to so many a collective of objects."""
    name_an_architecture(rank)
    calls, gather = [0], dist.all_gather_object

    def gathered(*arguments: Any, **options: Any) -> None:
        calls[0] += 1
        if rank == 1 and calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        gather(*arguments, **options)

    dist.all_gather_object = gathered


@pytest.mark.slow
@pytest.mark.ranks
def test_a_lost_rank_is_named_once_and_what_is_done_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "tiny", Architecture(64, 2))
    monkeypatch.chdir(tmp_path)
    for i in range(4):
        write_trident(tmp_path / "slides", f"s{i}", *draw_tiles(131, seed=i))
    torch.save({"model": create_model(None, "tiny", IN_CHANS, slide_ngrids=GRIDS).state_dict()}, tmp_path / "weights.pth")
    command = ["encode-slides", "slides", "--arch=tiny", f"--in-chans={IN_CHANS}", f"--slide-ngrids={GRIDS}", "--device=cpu"]
    command += ["--weights=weights.pth", "--output=two.h5", "--split-above=100"]
    found = invoke_ranks(3, tmp_path, *command, prepare=partial(lose_one, 3), ending=(1,))
    assert found[1] is None
    assert [found[rank][0] for rank in (0, 2)] == [2, 2]
    told = [line for rank in (0, 2) for line in found[rank][2].splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert told[0].startswith("error: rank 1 was lost while slides were encoded: ")
    assert told[0].endswith("; what is done is kept: the same command with --resume goes on")
    assert list(tmp_path.glob("two.h5.parts/part-*"))
    again = invoke_ranks(3, tmp_path, *command, "--resume", prepare=name_an_architecture)
    assert [code for code, _, _ in again] == [0, 0, 0]
    assert "wrote 4 slides to 'two.h5'" in again[0][1]
    assert "encoded 4 slides" not in again[0][1]


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_of_torchrun_write_what_one_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share the two largest slides, encode the others alone, and name the one that is bad."""
    monkeypatch.setitem(ARCHITECTURES, "tiny", Architecture(64, 2))
    monkeypatch.chdir(tmp_path)
    for i, count in enumerate((53, 1, 131, 17, 200)):
        write_trident(tmp_path / "slides", f"s{i}", *draw_tiles(count, seed=i))
    x, coords = draw_tiles(150)
    x[149] = torch.nan  # in the last rank's shard
    write_trident(tmp_path / "slides", "bad", x, coords)
    torch.save({"model": create_model(None, "tiny", IN_CHANS, slide_ngrids=GRIDS).state_dict()}, tmp_path / "weights.pth")
    fixed = ["--arch=tiny", f"--in-chans={IN_CHANS}", f"--slide-ngrids={GRIDS}", "--device=cpu", "--weights=weights.pth", "--tiles"]
    two = ["encode-slides", "slides", *fixed, "--output=two.h5", "--split-above=100"]
    alone = [invoke("encode-slides", "slides", *fixed, "--output=one.h5")]
    together = invoke_ranks(2, tmp_path, *two, prepare=name_an_architecture)
    for found in (alone, together):
        assert [code for code, _, _ in found] == [1, 0][: len(found)]
        errors = "".join(err for _, _, err in found)
        assert errors.count("error: 'slides/bad.h5' embeddings must be finite, got nan in tile 149") == 1
        assert "encoded 5 slides of 402 tiles" in found[0][1]
    again = invoke_ranks(2, tmp_path, *two, prepare=name_an_architecture)
    assert [code for code, _, _ in again] == [2, 2]
    assert "".join(err for _, _, err in again).count("error: --output must not exist, got 'two.h5'") == 1
    with h5py.File(tmp_path / "one.h5") as alone, h5py.File(tmp_path / "two.h5") as shared:
        assert list(shared["names"]) == list(alone["names"]) == [b"s0", b"s1", b"s2", b"s3", b"s4"]
        np.testing.assert_allclose(shared["embeddings"], alone["embeddings"], **SINGLE)
        for name in alone["tiles"]:
            np.testing.assert_allclose(shared["tiles"][name]["embeddings"], alone["tiles"][name]["embeddings"], **SINGLE)
        assert list(shared["failed/names"]) == [b"bad"]
