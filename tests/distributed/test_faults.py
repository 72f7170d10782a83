"""Ranks that disagree, refuse, come late or are lost: an error on every rank, and a group in order after it."""

from __future__ import annotations

import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, dilated_attention
from tests.distributed.cases import (
    ShardedCase,
    arguments,
    check_sound,
    results,
    shards,
    simple,
)
from tests.distributed.processes import TIMEOUT, Ranks, several

LOST = timedelta(seconds=8)  # of a group that loses a rank
SHORT = timedelta(seconds=2)  # of the group where a rank is missing


def call(case: ShardedCase, rank: int, mesh: DeviceMesh, field: str | None, **options: Any) -> Tensor:
    """The output of this rank, which may be of another opinion about one field."""
    given = arguments(case, rank, mesh, **options)
    q, k, v, _ = shards(case, rank)
    pattern = case.pattern
    if field == "pattern.segment_lengths":
        pattern = DilatedPattern((8, 61), (1, 2))
    elif field == "shard_lengths":
        given["shard_lengths"] = (case.shard_lengths[0] + 1, *case.shard_lengths[1:])
    elif field == "num_kv_heads":
        q, k, v = (x[:, :, :2] for x in (q, k, v))
    elif field == "query_heads_per_kv_head":
        q = q.repeat(1, 1, 2, 1)
    elif field == "head_dim":
        q, k, v = (x[..., :2] for x in (q, k, v))
    elif field == "batch":
        q, k, v = (x.expand(2, -1, -1, -1) for x in (q, k, v))
    elif field == "dtype":
        q, k, v = (x.float() for x in (q, k, v))
    elif field == "masked":
        given["key_padding_mask"] = torch.zeros(q.shape[:2], dtype=torch.bool)
    elif field == "documents":
        given["cu_seqlens"] = torch.tensor([0, 3, case.num_tokens])
    elif field == "differentiable":
        q = q.clone().requires_grad_()
    elif field is not None:
        given[field] = {"is_causal": True, "exchange": "ring", "scale": 3.25, "dropout_p": 0.5}[field]
    return dilated_attention(q, k, v, pattern, **given)[0]


def check_disagreement(rank: int, mesh: DeviceMesh, field: str, usual: str, other: str, scale: float) -> None:
    case, odd = simple(mesh.size()), mesh.size() - 1
    with pytest.raises(ValueError, match=rf"^ranks must agree on (.*; on )?{field}, got ") as caught:
        call(case, rank, mesh, field if rank == odd else None, **({} if field == "scale" else {"scale": scale}))
    message = str(caught.value)
    assert f"{field}, got {usual}" in message, message
    assert f" and {other}" in message, message
    check_sound(case, rank, mesh)


@several
@pytest.mark.parametrize(
    ("field", "usual", "other"),
    [
        ("pattern.segment_lengths", "[8, 67]", "[8, 61]"),
        ("shard_lengths", "[11, 13", "[12, 13"),
        ("num_kv_heads", "3", "2"),
        ("query_heads_per_kv_head", "1", "2"),
        ("head_dim", "3", "2"),
        ("batch", "1", "2"),
        ("dtype", "'torch.float64'", "'torch.float32'"),
        ("masked", "False", "True"),
        ("documents", "'none'", "[[0, 3], [3, "),
        ("differentiable", "False", "True"),
        ("is_causal", "False", "True"),
        ("exchange", "'auto'", "'ring'"),
        ("scale", f"{3**-0.5!r}", "3.25"),
        ("dropout_p", "0.0", "0.5"),
    ],
)
def test_ranks_that_disagree_all_hear_both_values(ranks: Ranks, field: str, usual: str, other: str) -> None:
    ranks.run(check_disagreement, field, usual, other, 0.5 + len(field) / 128)


def check_tiling(rank: int, mesh: DeviceMesh) -> None:
    case = simple(mesh.size())
    q, k, v, _ = shards(case, rank)

    def refuses(match: str, scale: float, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            dilated_attention(q, k, v, case.pattern, mesh=mesh, scale=scale, **options)

    one_more = (*case.shard_lengths[:-1], case.shard_lengths[-1] + 1)
    last = mesh.size() - 1
    error = rf"shard_lengths\[{last}\] must be the number of tokens of this rank={one_more[last] - 1}, got \(.*{one_more[last]}\)$"
    refuses(f"^{error}" if rank == last else f"^rank {last} refused: {error}", 1.25, shard_lengths=one_more)
    borders = torch.tensor([0, 3, case.num_tokens - 1])
    error = (
        rf"cu_seqlens must rise from 0 to the number of tokens={case.num_tokens} of all ranks, shard_lengths=\[.*\], got \[0, 3, "
    )
    refuses(f"^{error}", 1.5, shard_lengths=case.shard_lengths, cu_seqlens=borders)
    lengths = case.shard_lengths[:2]
    refuses(  # equal lengths are assumed where none are declared
        rf"^ranks must agree on shard_lengths, got .*\[{lengths[0]}, {lengths[0]}.* on rank 0 and .*\[{lengths[1]}, {lengths[1]}",
        1.75,
    )
    check_sound(case, rank, mesh)


@several
def test_shards_that_do_not_tile_are_refused_on_every_rank(ranks: Ranks) -> None:
    ranks.run(check_tiling)


def check_refusal(rank: int, mesh: DeviceMesh, options: dict[str, Any], match: str, scale: float) -> None:
    case = simple(mesh.size())
    error: type[Exception] = ValueError
    if rank == 1:
        error = TypeError if "dtype" in match or "number," in match else ValueError
    else:
        options, match = {}, f"rank 1 refused: {match}"
    with pytest.raises(error, match=f"^{match}"):
        call(case, rank, mesh, None, **{"scale": scale, **options})
    check_sound(case, rank, mesh)


@several
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"key_padding_mask": torch.zeros(1, 5, dtype=torch.bool)}, r"key_padding_mask must have shape \(B, N\)="),
        ({"scale": math.nan}, "scale must be finite, got nan"),
        ({"dropout_p": "0.5"}, "dropout_p must be a number, got '0.5'"),
        ({"cu_seqlens": torch.tensor([0, 3, 7])}, "cu_seqlens must rise from 0 to the number of tokens="),
        ({"exchange": "all"}, "exchange must be one of"),
        ({"shard_lengths": (3,)}, "shard_lengths must hold one length per rank of mesh="),
    ],
    ids=["mask", "scale", "dropout_p", "cu_seqlens", "exchange", "shard_lengths"],
)
def test_a_rank_that_refuses_its_arguments_stops_the_others(ranks: Ranks, options: dict[str, Any], match: str) -> None:
    """Long before the timeout of the group."""
    ranks.run(check_refusal, options, match, 2 + len(match) / 128, deadline=TIMEOUT.total_seconds() / 2)


def check_absence(rank: int, mesh: DeviceMesh) -> None:
    case, absent, group = simple(mesh.size()), mesh.size() - 1, mesh.get_group()
    told = dist.PrefixStore("told", group.get_group_store())
    group.set_timeout(SHORT)
    # On a busy machine others may be late too.
    message = rf"^ranks? .*{absent} must take part in dilated_attention over this mesh within {SHORT.total_seconds():g} s, "
    if rank == absent:
        told.wait([str(other) for other in range(absent)], TIMEOUT)
    with pytest.raises(TimeoutError, match=message):
        call(case, rank, mesh, None, scale=2.75)
    told.set(str(rank), "")
    group.set_timeout(TIMEOUT)
    check_sound(case, rank, mesh)


@several
@pytest.mark.slow
def test_a_late_rank_is_named_to_all(ranks: Ranks) -> None:
    ranks.run(check_absence, deadline=TIMEOUT.total_seconds())


# By the transport; a rank that ends for this reason ends others.
NAMED = r"^rank \d( or rank \d)* must exchange rows with this rank, but ended, stopped or made other calls of dilated_attention: "


def check_loss(rank: int, mesh: DeviceMesh, phase: str) -> None:
    """Rank 1 is lost: its process ends, or it refuses its arguments while the others hold an agreed plan and exchange rows, or it
    makes another call than they, agreed on too."""
    case = simple(mesh.size())
    check_sound(case, rank, mesh)
    if phase == "order":  # of two calls that differ in nothing that a message shows
        for scale in (0.5, 0.7):
            results(case, rank, mesh, scale=scale)
        with pytest.raises(RuntimeError, match=NAMED):
            results(case, rank, mesh, scale=0.5 if rank == 1 else 0.7)
        return
    mesh.get_group().set_timeout(SHORT)
    if rank != 1:
        error, told = (TimeoutError, "rank 1 must take part") if phase == "before" else (RuntimeError, NAMED)
        with pytest.raises(error, match=told):
            results(case, rank, mesh, scale=0.9 if phase == "before" else None)
    elif phase == "refusal":
        with pytest.raises(ValueError, match="scale must be finite"):
            results(case, rank, mesh, scale=math.inf)
        time.sleep(LOST.total_seconds() + 2.0)  # the end of a process would tell the others
    elif phase == "before":
        os._exit(1)
    else:
        calls = mock.Mock(side_effect=lambda batch: os._exit(1) if calls.call_count == end else send(batch))
        end, send = {"forward": 1, "backward": 2}[phase], dist.batch_isend_irecv
        with mock.patch.object(dist, "batch_isend_irecv", calls):
            results(case, rank, mesh, exchange="auto")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["before", "forward", "backward", "refusal", "order"])
def test_a_lost_rank_is_an_error_on_the_others(phase: str, tmp_path: Path) -> None:
    ranks = Ranks(3, tmp_path, timeout=LOST)  # the transport waits for as long as it was told at its start
    try:
        ranks.run(check_loss, phase, deadline=TIMEOUT.total_seconds(), ending=() if phase in ("refusal", "order") else (1,))
    finally:
        ranks.kill()
