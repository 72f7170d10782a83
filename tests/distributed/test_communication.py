"""What ranks send: as many bytes as the plan says, only to ranks that need them, and nothing where nothing is cut."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.core.lse import accumulated
from flexdilated.distributed.planner import cost_model
from flexdilated.distributed.planner.plan import EXCHANGES
from tests.cases import differentiate
from tests.distributed.cases import ShardedCase, arguments, assert_expected, cut, expected_of, random_case, results, shards, simple
from tests.distributed.processes import Ranks, at_least, one_size, several

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


def size_of(operations: list[dist.P2POp], kind: Callable[..., Any]) -> int:
    return sum(op.tensor.numel() * op.tensor.element_size() for op in operations if op.op is kind)


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


def counted_bytes(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Bytes received and sent, in the forward and in the backward."""
    given = arguments(case, rank, mesh, exchange=exchange)
    *inputs, dout = shards(case, rank, dtype)
    leaves = [x.detach().requires_grad_() for x in inputs]
    counts = []
    with recorded() as operations:
        out, _ = dilated_attention(*leaves, case.pattern, **given)
        counts.append((size_of(operations, dist.irecv), size_of(operations, dist.isend)))
        operations.clear()
        torch.autograd.grad(out, leaves, dout)
        counts.append((size_of(operations, dist.irecv), size_of(operations, dist.isend)))
    return counts


@several
@pytest.mark.parametrize(
    ("exchange", "dtype"), [("auto", torch.float64), ("gather", torch.bfloat16), ("ring", torch.float64), ("heads", torch.bfloat16)]
)
def test_bytes_on_the_transport_are_those_of_the_plan(ranks: Ranks, exchange: str, dtype: torch.dtype) -> None:
    size = ranks.world_size
    total = 0
    padded = replace(cut(size), pattern=DilatedPattern.torchscale((9, 20), (3, 5)))
    others = [random_case(7919 * size + number, size) for number in range(3)]
    for case in (cut(size), cut(size, ignored=0.2, is_causal=True), padded, *others):
        counts = ranks.run(counted_bytes, case, exchange, dtype)
        sizes = {"head_dim": case.head_dim, "itemsize": dtype.itemsize, "batch": case.batch}
        rest = {"masked": case.mask() is not None, "lse_size": accumulated(dtype).itemsize}
        plan = case.plan()
        chosen = (
            cost_model.choose(plan, budget=cost_model.default_budget(plan, **sizes), **sizes, **rest)
            if exchange == "auto"
            else exchange
        )
        for direction, planned in enumerate(cost_model.bytes_received(plan, chosen, **sizes, **rest)):
            received, sent = zip(*(count[direction] for count in counts))
            assert received == tuple(planned.tolist()), (case, direction)
            assert sum(sent) == sum(received)
            total += sum(received)
    assert total > 0


@one_size
def test_a_mesh_of_one_rank_is_the_plain_call(rank: int, mesh: DeviceMesh) -> None:
    mesh, case = DeviceMesh("cpu", [rank]), simple(1, batch=2, group=2, ignored=0.2, is_causal=True)
    options = {name: x for name, x in arguments(case, 0, mesh).items() if name not in ("mesh", "shard_lengths")}
    dlse = expected_of(case)["dlse"]
    alone = differentiate(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **options), *shards(case, 0), dlse)
    with silence():
        for a, e in zip(results(case, 0, mesh), alone, strict=True):
            assert torch.equal(a, e)
