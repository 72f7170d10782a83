"""What ranks send: nothing but to ranks that need them, and nothing where nothing is cut."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed.planner.plan import EXCHANGES
from tests.cases import differentiate
from tests.distributed.cases import ShardedCase, arguments, assert_expected, expected_of, results, shards, simple
from tests.distributed.processes import Ranks, at_least, one_size

COLLECTIVES = (
    *("isend", "irecv", "send", "recv", "batch_isend_irecv", "all_reduce", "all_gather", "all_gather_into_tensor"),
    *("all_gather_object", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    "scatter_object_list",
)


@contextmanager
def silence() -> Iterator[None]:
    counted = dist.group.WORLD._get_sequence_number_for_group()
    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, side_effect=AssertionError(f"{name} was called")))
        yield
    assert dist.group.WORLD._get_sequence_number_for_group() == counted


@contextmanager
def recorded() -> Iterator[list[dist.P2POp]]:
    operations: list[dist.P2POp] = []
    send = dist.batch_isend_irecv

    def record(batch: list[dist.P2POp]) -> list[dist.Work]:
        assert batch
        operations.extend(batch)
        return send(batch)

    with mock.patch.object(dist, "batch_isend_irecv", record):
        yield operations


def check_silent(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    results(case, rank, mesh, exchange=exchange)  # the first time, all ranks compare the plan
    with silence():
        actual = results(case, rank, mesh, exchange=exchange)
    assert_expected(case, rank, actual)


@one_size
@pytest.mark.parametrize(("exchange", "is_even"), [("auto", True), ("gather", False), ("ring", True), ("heads", False)])
def test_segments_inside_shards_need_no_communication(ranks: Ranks, exchange: str, is_even: bool) -> None:
    lengths = (32,) * ranks.world_size if is_even else (16, 48, 0, 32, 16, 0, 16, 32)[: ranks.world_size]
    case = ShardedCase(DilatedPattern((4, 8, 16), (1, 2, 4)), shard_lengths=lengths, kv_heads=4, ignored=0.2)
    for each in (case, replace(case, pattern=DilatedPattern.torchscale((4, 16), (1, 4)), is_causal=True, ignored=None)):
        assert each.plan().is_local
        ranks.run(check_silent, each, exchange)


def check_idle(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    if rank >= 2:
        check_silent(rank, mesh, case, exchange)
        return
    results(case, rank, mesh, exchange=exchange)
    with recorded() as operations:
        assert_expected(case, rank, results(case, rank, mesh, exchange=exchange))
    assert {op.peer for op in operations} == {1 - rank}


@at_least(3)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_only_ranks_that_owe_each_other_rows_communicate(ranks: Ranks, exchange: str) -> None:
    case = ShardedCase(DilatedPattern((32,), (1,)), shard_lengths=(16,) * ranks.world_size)
    case = replace(case, borders=(0, 32, *range(48, case.num_tokens + 1, 16)))
    ranks.run(check_idle, case, exchange)


@one_size
def test_a_mesh_of_one_rank_is_the_plain_call(rank: int, mesh: DeviceMesh) -> None:
    mesh, case = DeviceMesh("cpu", [rank]), simple(1, batch=2, group=2, ignored=0.2, is_causal=True)
    options = {name: x for name, x in arguments(case, 0, mesh).items() if name not in ("mesh", "shard_lengths")}
    dlse = expected_of(case)["dlse"]
    alone = differentiate(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **options), *shards(case, 0), dlse)
    with silence():
        for a, e in zip(results(case, 0, mesh), alone, strict=True):
            assert torch.equal(a, e)
