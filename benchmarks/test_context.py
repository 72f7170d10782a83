"""Attention over the ranks of a mesh: what travels, what a rank holds meanwhile, and what it costs beside the attention itself.

Rows are counted from the plan, per head, at the rank that receives the most; a row of keys with its values is one, a row of queries
or of outputs a half. Times, bytes and memory are those of processes of one thread each over gloo on this machine.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.attention import (
    Inputs,
    Results,
    assert_near,
    assert_rows_match_definition,
    forward,
    forward_backward,
    random_inputs,
    visible_keys,
)
from benchmarks.conftest import Sizes
from benchmarks.memory import Direction, _status
from benchmarks.ranks import GROUP_TIMEOUT, Ranks
from benchmarks.timing import Ratio, seconds, side_by_side
from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed import attention as ranks
from flexdilated.distributed.planner import cost_model
from flexdilated.distributed.planner.plan import EXCHANGES, ContextPlan, context_plan
from flexdilated.distributed.planner.row_counts import listed
from flexdilated.distributed.planner.tasks import local_pieces
from flexdilated.distributed.runtime import task_attention
from flexdilated.distributed.runtime.context import RankContext
from flexdilated.distributed.runtime.schedule import schedule
from tests.distributed.cases import executors

MILLION = 1 << 20
GIGAPATH = DilatedPattern(DilatedPattern.gigapath().segment_lengths, DilatedPattern.gigapath().dilation_rates)
PATTERNS = {"longnet": DilatedPattern.longnet(), "gigapath": GIGAPATH}
NUM_HEADS, HEAD_DIM = 8, 64  # of what ranks compute

# Below, the first is the size of a full run, the second of a quick one.
WIRE_TOKENS, WIRE_STEPS = (4096, 1024), (20, 3)
MEMORY_TOKENS, MEMORY_RATES = (4096, 1024), (16, 4)  # of each rank; of the segment that holds all tokens
PLANNING_TOKENS = (16384, 1024)  # of each rank
SIZE_1_TOKENS = ((512, 16384), (128, 1024))
SCALING_TOKENS = {"longnet": (8192, 1024), "gigapath": (32768, 2048)}

on_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="read from Linux's /proc")


def plan_of(pattern: DilatedPattern, shard_lengths: tuple[int, ...], num_kv_heads: int) -> ContextPlan:
    """One document, all heads, not causal."""
    return context_plan(pattern, shard_lengths, num_kv_heads, range(num_kv_heads), 1, ((0, sum(shard_lengths)),), False)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two processes."""
    with Ranks(2) as ranks:
        yield ranks


# -- what a rank is given, and whether what it computes is right ---------------------------------------------------------------


def shard_inputs(rank: int, num_tokens: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """q, k, v, dout of a rank's shard: every rank can draw those of any other."""
    generator = torch.Generator().manual_seed(2307 + rank)
    k, v, q, dout = (torch.randn(1, num_tokens, NUM_HEADS, HEAD_DIM, dtype=dtype, generator=generator) for _ in range(4))
    return Inputs(q, k, v, dout)


def whole_inputs(shard_lengths: tuple[int, ...]) -> Inputs:
    """Those of all ranks, one after another."""
    shards = [shard_inputs(rank, length) for rank, length in enumerate(shard_lengths)]
    return Inputs(*(torch.cat(parts, dim=1) for parts in zip(*shards)))


def step(
    x: Inputs,
    pattern: DilatedPattern,
    mesh: DeviceMesh,
    exchange: str,
    shard_lengths: tuple[int, ...] | None = None,
    cu_seqlens: Tensor | None = None,
) -> Results:
    """A forward and its backward of this rank's shard."""
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    options: dict[str, Any] = {"shard_lengths": shard_lengths, "cu_seqlens": cu_seqlens, "backend": "sdpa"}
    out = dilated_attention(q, k, v, pattern, mesh=mesh, exchange=exchange, **options)
    return Results(out.detach(), *torch.autograd.grad(out, (q, k, v), x.dout))


def assert_shard_of(results: Results, expected: Results, rank: int, shard_lengths: tuple[int, ...]) -> None:
    """Output and gradients are this rank's part of those of one process."""
    start = sum(shard_lengths[:rank])
    for name, a, b in zip(Results._fields, results, expected):
        assert_near(a, b[:, start : start + shard_lengths[rank]].double(), a.dtype, name)


def assert_shard_rows_match_definition(
    x: Inputs, pattern: DilatedPattern, results: Results, rank: int, num_ranks: int, *, count: int = 8
) -> None:
    """Some rows of a shard, all equally long, equal one softmax over the keys of all ranks that the definition lists for them."""
    length = x.q.shape[1]
    compared: list[tuple[Tensor, ...]] = []
    for i in range(count):
        local, head = (i * length // count + 13 * i) % length, i % NUM_HEADS
        keys = torch.tensor(visible_keys(pattern, [0, num_ranks * length], rank * length + local, head, False, NUM_HEADS))
        q = x.q[0, local, head].double().requires_grad_(True)
        k, v = x.q.new_empty(2, len(keys), HEAD_DIM, dtype=torch.float64)
        for peer in keys.div(length, rounding_mode="floor").unique().tolist():
            peer_inputs = shard_inputs(peer, length)
            is_local = (keys >= peer * length) & (keys < (peer + 1) * length)
            k[is_local], v[is_local] = (t[0, keys[is_local] - peer * length, head].double() for t in (peer_inputs.k, peer_inputs.v))
        row = torch.softmax(k @ q * HEAD_DIM**-0.5, dim=0) @ v
        dq = torch.autograd.grad(row, q, x.dout[0, local, head].double())[0]
        compared.append((results.out[0, local, head], row.detach(), results.dq[0, local, head], dq))
    out, expected_out, dq, expected_dq = (torch.stack(rows) for rows in zip(*compared))
    assert_near(out, expected_out, x.q.dtype, "out")
    assert_near(dq, expected_dq, x.q.dtype, "dq")


# -- rows ---------------------------------------------------------------------------------------------------------------------


def received_rows(plan: ContextPlan, exchange: str) -> NDArray[np.float64]:
    """`(p,)` rows that each rank receives of each head, in the mean."""
    rows = listed(plan, exchange)
    kv, q, out = (rows[kind].received for kind in ("kv", "q", "out"))
    return (kv + (q + out) / 2) / len(plan.within)


def rows_of_definition(plan: ContextPlan, exchange: str) -> NDArray[np.float64]:
    """The same, marking token by token what a rank needs of every segment; only who computes assigned heads is the plan's word.

    For equal shards, all heads on every branch and no padding.
    """
    p, length = plan.num_ranks, plan.shard_lengths[0]
    needs_keys, needs_queries, sends = (
        np.zeros((p, plan.num_tokens), bool) for _ in range(3)
    )  # keys, queries; outputs that a rank sends
    rows = np.zeros(p)
    for head in plan.within:
        for marks in (needs_keys, needs_queries, sends):
            marks[:] = False
        for branch, (w, r) in enumerate(plan.pattern.branches):
            offset = plan.pattern.offset(branch, head, plan.num_kv_heads)
            cut = [s for s in range(0, plan.num_tokens, w) if s // length != (min(s + w, plan.num_tokens) - 1) // length]
            parts = executors(plan, branch, head) if exchange == "heads" else [[] for _ in cut]
            assert len(parts) == len(cut)
            for start, takers in zip(cut, parts):
                end = min(start + w, plan.num_tokens)
                rows_of_segment = slice(start + offset, end, r)
                for taker, low, high in takers:  # multiples of the rate, or the end
                    needs_keys[taker, rows_of_segment] = True
                    for marks in (needs_queries, sends):
                        marks[taker, start + low + offset : start + high : r] = True
                if takers:
                    continue
                for rank in range(start // length, (end - 1) // length + 1):
                    first = max(rank * length, start)
                    if first + (start + offset - first) % r < min((rank + 1) * length, end):  # it has a query there
                        needs_keys[rank, rows_of_segment] = True
        for marks in (needs_keys, needs_queries, sends):
            for rank in range(p):
                marks[rank, rank * length : (rank + 1) * length] = False
        # A token has one owner: it sends the token's keys and queries, and receives its outputs.
        rows += needs_keys.sum(axis=1) + needs_queries.sum(axis=1) / 2 + sends.reshape(p, p, length).sum(axis=(0, 2)) / 2
    return rows / len(plan.within)


@pytest.mark.parametrize(
    ("name", "num_ranks", "exchange", "target"),
    [
        ("longnet", 8, "gather", 0),
        ("longnet", 64, "gather", 1_366),
        ("gigapath", 8, "gather", 90_397),
        ("gigapath", 8, "heads", 48_261),
        ("gigapath", 64, "gather", 114_215),
        ("gigapath", 64, "heads", 18_227),
    ],
)
def test_rows_received(benchmark: Any, record: Callable[..., None], name: str, num_ranks: int, exchange: str, target: int) -> None:
    num_kv_heads, length = 16, MILLION // num_ranks

    def count() -> tuple[ContextPlan, NDArray[np.float64]]:
        context_plan.cache_clear()
        plan = plan_of(PATTERNS[name], (length,) * num_ranks, num_kv_heads)
        return plan, received_rows(plan, exchange)

    plan, rows = benchmark.pedantic(count, rounds=1)
    np.testing.assert_allclose(rows, rows_of_definition(plan, exchange), rtol=1e-12)
    where = f"{name}/{exchange}/N={MILLION}/p={num_ranks}"
    ratio = Ratio(f"context/rows received per head/{where}", rows.max(), target, "lower")
    if target == 0:  # nothing over nothing is no ratio
        share = (length + rows.max()) / length
        ratio = Ratio(f"context/rows held per head over its own/{where}", share, 1.0, "lower")
    record(ratio, shape=(1, MILLION, num_kv_heads, 0), dtype=torch.int64, ranks=num_ranks, rows=rows.max())


def drawn_pattern(number: int, least: int = 1, most: int = 64, branches: int = 24) -> DilatedPattern:
    """Branches of any rates between two, by chance."""
    draw = random.Random(number)
    lengths = tuple(int(math.exp(draw.uniform(math.log(2000), math.log(MILLION)))) for _ in range(branches))
    rates = tuple(draw.randint(least, most) for _ in lengths)
    return DilatedPattern(lengths, rates, offsets="interleaved", zero_padding=bool(number % 2))


# Rates that do not divide their segments, of which torchscale's rules move the outputs; and many branches of coprime rates.
COPRIME = (3, 5, 7, 9, 11, 13, 17, 19, 23, 29, 31, 37)
HARD = {
    "256/3": DilatedPattern((256,), (3,), zero_padding=True),
    "tiny": DilatedPattern(COPRIME, tuple(w - 1 for w in COPRIME), offsets="interleaved", zero_padding=True),
    "wide": DilatedPattern(tuple(MILLION - 1001 * i for i in range(12)), COPRIME, offsets="interleaved"),
    "whole": DilatedPattern(tuple(MILLION - 1009 * i for i in range(24)), (1,) * 24),
    "whole, odd": DilatedPattern(tuple(MILLION - 1009 * i for i in range(24)), 2 * COPRIME, offsets="interleaved"),
    "above a shard": DilatedPattern((MILLION,) * 24, (*range(97, 120), 500_001), offsets="interleaved", zero_padding=True),
    **{f"drawn {number}": drawn_pattern(number) for number in range(4)},
    "drawn, large rates": drawn_pattern(5, 97, 2000),
    "64 branches, whole": DilatedPattern(tuple(MILLION - 1009 * i for i in range(64)), (1,) * 64),
    **{f"256 branches, drawn {number}": drawn_pattern(number, branches=256) for number in range(2)},
    "256 branches, drawn, large rates": drawn_pattern(5, 97, 2000, 256),
    "256 branches, whole": DilatedPattern(tuple(MILLION - 1009 * i for i in range(256)), (1,) * 256),
    "256 branches, whole, odd": DilatedPattern(
        tuple(MILLION - 1009 * i for i in range(256)), tuple(3 + 2 * (i % 60) for i in range(256)), offsets="interleaved"
    ),
    "48 branches": DilatedPattern(tuple(4000 + 148 * i * i for i in range(48)), tuple(range(2, 50))),
}


@pytest.mark.parametrize("name", HARD)
def test_planning_is_bounded_for_any_pattern(benchmark: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice among exchanges, 64 ranks and 128 heads: look at the times. Upper bounds alone must take the same exchange."""
    sizes: dict[str, Any] = {"head_dim": HEAD_DIM, "itemsize": 2}

    def choose() -> tuple[ContextPlan, str]:
        context_plan.cache_clear()
        plan = plan_of(HARD[name], (MILLION // 64,) * 64, 128)
        return plan, cost_model.choose(plan, budget=cost_model.default_budget(plan, **sizes), **sizes)

    _, chosen = benchmark.pedantic(choose, rounds=1)
    monkeypatch.setattr(cost_model, "CHOICE", 0)
    assert choose()[1] == chosen


@pytest.mark.parametrize("count", [4, 64, 1000, 20_000])
@pytest.mark.parametrize("name", ["longnet", "gigapath"])
def test_planning_of_other_documents(benchmark: Any, name: str, count: int) -> None:
    """Plan, choice among exchanges and what a middle one of 8 ranks does, where each step has documents of its own: the times are
    those to look at."""
    drawn = [borders_of(MILLION, count, seed).tolist() for seed in range(6)]
    steps = iter([tuple((a, b - a) for a, b in pairwise(borders)) for borders in drawn])

    def prepare() -> int:
        spans = next(steps)
        plan = context_plan(PATTERNS[name], (MILLION // 8,) * 8, 16, range(16), 1, spans, False)
        budget = cost_model.default_budget(plan, head_dim=HEAD_DIM, itemsize=2)
        chosen = cost_model.choose(plan, budget=budget, head_dim=HEAD_DIM, itemsize=2)
        return len(schedule(plan, chosen, 3, torch.device("cpu")).tasks) + len(local_pieces(plan, 3))

    assert benchmark.pedantic(prepare, rounds=5, warmup_rounds=1)


# -- bytes --------------------------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """Bytes of one rank: given to the group's operations, and sent by its TCP connections, headers of gloo included."""

    submitted: int
    received: int
    sockets: int


def measure_bytes(mesh: DeviceMesh, shard_lengths: tuple[int, ...], pattern: DilatedPattern, exchange: str, steps: int) -> Sent:
    """Of `steps` steps after the first."""
    rank = mesh.get_local_rank()
    x = shard_inputs(rank, shard_lengths[rank])
    results = step(x, pattern, mesh, exchange, shard_lengths)  # connects, and agrees
    assert_shard_of(results, forward_backward(whole_inputs(shard_lengths), pattern), rank, shard_lengths)

    counted: Counter[str] = Counter()
    operation = dist.P2POp

    def counting(make: Any, message: Tensor, *arguments: Any) -> Any:
        counted[make.__name__] += message.nbytes
        return operation(make, message, *arguments)

    dist.barrier()
    before = socket_bytes_sent()
    with patch.object(dist, "P2POp", counting):
        for _ in range(steps):
            step(x, pattern, mesh, exchange, shard_lengths)
    dist.barrier()  # what this rank has sent may still wait in its kernel until the other has read
    return Sent(counted["isend"], counted["irecv"], socket_bytes_sent() - before)


def socket_bytes_sent() -> int:
    """Bytes that the TCP connections of this process have sent so far, by the kernel's count.

    Linux's `struct tcp_info` has `tcpi_bytes_sent` at byte 200 and `tcpi_bytes_retrans` at 208 since 4.19: what TCP carries,
    without the headers of TCP and IP.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))
        except FileNotFoundError:  # the listing's own
            continue
        with socket.socket(fileno=copy) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) < 216:
                raise OSError(f"tcp_info must hold 216 bytes, got {len(info)}")
            sent, retransmitted = struct.unpack_from("=QQ", info, 200)
            total += sent - retransmitted  # a busy machine is late with acknowledgements, even to itself
    return total


def loopback_bytes() -> int:
    """Bytes that have passed the loopback device, headers of TCP and IP included, whoever sent them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    raise OSError("/proc/net/dev must list lo, it does not")


@on_linux
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_bytes_sent(benchmark: Any, sizes: Sizes, record: Callable[..., None], pair: Ranks, exchange: str) -> None:
    """Headers are all that is sent besides the plan's rows. With equal shards on two ranks heads would never be assigned."""
    num_tokens, steps = WIRE_TOKENS[sizes.quick], WIRE_STEPS[sizes.quick]
    shard_lengths = (num_tokens // 4, num_tokens - num_tokens // 4)
    pattern = DilatedPattern((num_tokens // 16, num_tokens // 3, num_tokens), (1, 2, 4))
    plan = plan_of(pattern, shard_lengths, NUM_HEADS)
    moved = sum(cost_model.bytes_received(plan, exchange, head_dim=HEAD_DIM, itemsize=4))
    assert listed(plan, "heads")["out"].received.sum() > 0
    assert moved.min() > 0

    def measure() -> tuple[list[Sent], int]:
        pair(measure_bytes, shard_lengths, pattern, exchange, 0)
        without, within = [], []
        for _ in range(3):
            start = loopback_bytes()
            pair(measure_bytes, shard_lengths, pattern, exchange, 0)
            between = loopback_bytes()
            sent = pair(measure_bytes, shard_lengths, pattern, exchange, steps)
            without.append(between - start)
            within.append(loopback_bytes() - between)
        # Both begin with a step that is not counted; whoever else uses the loopback device only adds.
        return sent, min(within) - min(without)

    sent, loopback = benchmark.pedantic(measure, rounds=1)
    assert [rank.received for rank in sent] == [steps * n for n in moved]
    expected = steps * int(moved.sum())
    assert expected <= sum(rank.sockets for rank in sent)
    name = f"float32/{exchange}/N={num_tokens}/p=2"
    submitted, sockets = (sum(counts) / expected for counts in zip(*((rank.submitted, rank.sockets) for rank in sent)))
    record(
        Ratio(f"context/bytes given to the group over the plan's/{name}", submitted, 1.0, "lower"),
        Ratio(f"context/bytes sent by sockets over the plan's/{name}", sockets, 1.01, "lower"),
        Ratio(f"context/bytes on loopback over the plan's/{name}", loopback / expected, 1.05, "lower"),
        shape=(1, num_tokens, NUM_HEADS, HEAD_DIM),
        dtype=torch.float32,
        ranks=2,
        threads=1,
        bytes_per_step=int(moved.sum()),
    )


# -- memory -------------------------------------------------------------------------------------------------------------------


def measure_peak(mesh: DeviceMesh, num_tokens: int, pattern: DilatedPattern, exchange: str) -> int:
    """Bytes: the highest resident size of this rank during its first step with a plan, less that before its tensors existed.

    So it counts inputs, results, messages, everything temporary, and the plan, which stays.
    """
    rank, num_ranks = mesh.get_local_rank(), mesh.size()
    # Libraries, threads, connections to all ranks.
    step(shard_inputs(rank, 64), DilatedPattern((64 * num_ranks,), (1,)), mesh, exchange)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()

    Path("/proc/self/clear_refs").write_text("5")  # the highest size so far is forgotten
    before = _status("VmRSS")
    x = shard_inputs(rank, num_tokens)
    results = step(x, pattern, mesh, exchange)
    peak = _status("VmHWM") - before

    assert peak > 0.9 * sum(t.nbytes for t in (*x, *results) if t is not None)
    assert_shard_rows_match_definition(x, pattern, results, rank, num_ranks)
    return peak


@on_linux
def test_memory_over_ranks(benchmark: Any, sizes: Sizes, record: Callable[..., None]) -> None:
    """As many tokens on each of 2 and of 8 ranks, where every rank needs keys of all others."""
    num_tokens = MEMORY_TOKENS[sizes.quick]

    def measure() -> dict[tuple[str, int, int], int]:
        peaks = {}
        for num_ranks in (2, 8):
            with Ranks(num_ranks) as ranks:
                for widest in MEMORY_RATES:
                    lengths = (num_tokens // 4, num_tokens, num_ranks * num_tokens)
                    pattern = DilatedPattern(lengths, (1, math.isqrt(widest), widest))
                    plan = plan_of(pattern, (num_tokens,) * num_ranks, NUM_HEADS)
                    assert (listed(plan, "ring")["kv"].received > 0).all()
                    for exchange in ("ring", "gather"):
                        peaks[exchange, widest, num_ranks] = max(ranks(measure_peak, num_tokens, pattern, exchange))
        return peaks

    peaks = benchmark.pedantic(measure, rounds=1)
    tensor_bytes = 8 * num_tokens * NUM_HEADS * HEAD_DIM * 4
    ratios = []
    for exchange, target in (("ring", 1.10), ("gather", None)):
        for widest in MEMORY_RATES:
            growth = peaks[exchange, widest, 8] / peaks[exchange, widest, 2]
            where = f"{exchange}/widest rate {widest}/forward+backward/float32/N={num_tokens} on each"
            ratios.append(Ratio(f"context/memory of 8 ranks over 2/{where}", growth, target, "lower"))
    record(
        *ratios,
        shape=(1, num_tokens, NUM_HEADS, HEAD_DIM),
        dtype=torch.float32,
        threads=1,
        peak_bytes={f"{exchange}/widest rate {widest}/p={p}": peak for (exchange, widest, p), peak in peaks.items()},
        tensor_bytes=tensor_bytes,
    )


# -- planning -----------------------------------------------------------------------------------------------------------------


PLANNING = (
    (RankContext, "plan"),
    (RankContext, "fields"),
    (ranks, "compare"),
    (task_attention, "schedule"),
)  # where a step calls them


class Planned(NamedTuple):
    """Of one rank in five steps: seconds of each after the first, of them plan, comparison and schedule, and comparisons."""

    steps: list[float]
    planning: list[float]
    comparisons: int


def borders_of(num_tokens: int, count: int, seed: int) -> Tensor:
    """Documents of random lengths, packed."""
    inner = torch.randperm(num_tokens - 1, generator=torch.Generator().manual_seed(seed))[: count - 1] + 1
    return torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([num_tokens])])


def measure_planning(mesh: DeviceMesh, num_tokens: int, pattern: DilatedPattern, exchange: str, packed: bool) -> Planned:
    """What goes by before the first row is packed, forward and backward: all of it is found in caches after the first step,
    unless every step has documents of its own, packed."""
    rank = mesh.get_local_rank()
    x = shard_inputs(rank, num_tokens)
    spent: Counter[str] = Counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **options)
            spent[name] += time.perf_counter() - start
            return result

        return call

    results: list[Results] = []
    steps, planning = [], []
    with ExitStack() as stack:
        gather = stack.enter_context(patch.object(dist, "all_gather", side_effect=dist.all_gather))
        for module, name in PLANNING:
            stack.enter_context(patch.object(module, name, timed(name, getattr(module, name))))
        for number in range(5):
            results.clear()
            spent.clear()
            cu_seqlens = borders_of(mesh.size() * num_tokens, 16, number) if packed else None
            one_step = partial(step, x, pattern, mesh, exchange, cu_seqlens=cu_seqlens)
            dist.barrier()
            steps.append(seconds(lambda one_step=one_step: results.append(one_step())))
            assert set(spent) == {name for _, name in PLANNING}
            planning.append(sum(spent.values()))
    comparisons = gather.call_count
    assert comparisons > 0, "another benchmark has compared this plan before"
    if packed:
        lengths = (num_tokens,) * mesh.size()
        inputs = whole_inputs(lengths)
        assert_shard_of(results[0], forward_backward(inputs, pattern, cu_seqlens=cu_seqlens), rank, lengths)
    else:
        assert_shard_rows_match_definition(x, pattern, results[0], rank, mesh.size())
    return Planned(steps[1:], planning[1:], comparisons)


@pytest.mark.parametrize("packed", [False, True], ids=["alike", "packed"])
@pytest.mark.parametrize("exchange", ["gather", "auto"])
def test_planning(benchmark: Any, sizes: Sizes, record: Callable[..., None], pair: Ranks, exchange: str, packed: bool) -> None:
    """Of every step after the first, or of every step where each has other documents; and how often two ranks compare in five."""
    num_tokens = PLANNING_TOKENS[sizes.quick]
    pattern = PATTERNS["longnet"]
    assert not plan_of(pattern, (num_tokens, num_tokens), NUM_HEADS).is_local

    def measure() -> list[Planned]:
        return pair(measure_planning, num_tokens, pattern, exchange, packed)

    measured = benchmark.pedantic(measure, rounds=1)
    share = max(
        statistics.median(part / step_seconds for part, step_seconds in zip(rank.planning, rank.steps)) for rank in measured
    )
    name = f"{exchange}/float32/N={num_tokens} on each/p=2{'/16 documents, other ones in each' if packed else ''}"
    record(
        Ratio(f"context/planning over a step/{name}", share, 0.05, "lower"),
        Ratio(f"context/agreements in five steps/{name}", max(rank.comparisons for rank in measured), 5 if packed else 1, "lower"),
        shape=(1, num_tokens, NUM_HEADS, HEAD_DIM),
        dtype=torch.float32,
        ranks=2,
        threads=1,
        planning_seconds=max(statistics.median(rank.planning) for rank in measured),
    )


# -- one rank -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """The mesh of this process alone."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path_factory.mktemp('single') / 'rendezvous'}",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))["cp"]
    dist.destroy_process_group()


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("size", [0, 1], ids=["small", "large"])
def test_axis_of_size_1(
    benchmark: Any, sizes: Sizes, record: Callable[..., None], single: DeviceMesh, size: int, direction: Direction
) -> None:
    num_tokens = SIZE_1_TOKENS[sizes.quick][size]
    pattern = PATTERNS["longnet"]
    x = random_inputs(num_tokens, torch.float32)

    def divided() -> tuple[Tensor, ...]:
        if direction == "forward":
            return (dilated_attention(x.q, x.k, x.v, pattern, mesh=single, backend="sdpa"),)
        return step(x, pattern, single, "auto")

    def plain() -> object:
        return forward(x, pattern) if direction == "forward" else forward_backward(x, pattern)

    # Calls of a millisecond need many pairs to tell one in a hundred.
    rounds = 3 * sizes.rounds if size else 40 * sizes.rounds
    results, ratio = side_by_side(benchmark, divided, plain, rounds=rounds)
    assert_rows_match_definition(x, pattern, *results[:2])
    name = f"context/axis of size 1/{direction}/float32/N={num_tokens}"
    record(Ratio(name, ratio, 1.02, "lower"), shape=x.q.shape, dtype=torch.float32)


# -- two ranks for one problem ------------------------------------------------------------------------------------------------


def measure_scaling(mesh: DeviceMesh, num_tokens: int, pattern: DilatedPattern, rounds: int) -> list[dict[str, float]]:
    """Seconds of this rank by exchange, and as `"alone"` those of the first rank with the whole problem; one entry per round."""
    rank, num_ranks = mesh.get_local_rank(), mesh.size()
    shard_lengths = (num_tokens // num_ranks,) * num_ranks
    shard, inputs = shard_inputs(rank, shard_lengths[rank]), whole_inputs(shard_lengths)
    expected = forward_backward(inputs, pattern)
    for exchange in EXCHANGES:
        assert_shard_of(step(shard, pattern, mesh, exchange), expected, rank, shard_lengths)

    def alone() -> None:
        if rank == 0:  # the other waits without work
            forward_backward(inputs, pattern)

    def together(exchange: str) -> Callable[[], object]:
        return lambda: step(shard, pattern, mesh, exchange)

    functions = {"alone": alone} | {exchange: together(exchange) for exchange in EXCHANGES}
    measured = []
    for _ in range(rounds):
        times = {}
        for name, function in functions.items():
            dist.barrier()
            times[name] = seconds(function)
        measured.append(times)
    return measured


@pytest.mark.parametrize("name", PATTERNS)
def test_strong_scaling(benchmark: Any, sizes: Sizes, record: Callable[..., None], pair: Ranks, name: str) -> None:
    """How much faster two ranks of one thread are than one of them alone, forward and backward; for information.

    The pattern is scaled down until its widest segment holds all tokens. With equal shards on two ranks heads never travel
    less than rows, so there `"heads"` is `"gather"`.
    """
    num_tokens = SCALING_TOKENS[name][sizes.quick]
    scale = max(PATTERNS[name].segment_lengths) / num_tokens
    # Segments of GigaPath's slides become so short that only their number would be measured: not below 64 tokens.
    lengths = tuple(max(64, int(length / scale)) for length in PATTERNS[name].segment_lengths)
    pattern = DilatedPattern(lengths, PATTERNS[name].dilation_rates)

    def measure() -> list[list[dict[str, float]]]:
        return pair(measure_scaling, num_tokens, pattern, sizes.rounds)

    rounds = list(zip(*benchmark.pedantic(measure, rounds=1)))
    ratios = []
    for exchange in EXCHANGES:
        speedup = statistics.median(ranks[0]["alone"] / max(rank[exchange] for rank in ranks) for ranks in rounds)
        where = f"{name}/{exchange}/forward+backward/float32/N={num_tokens}"
        ratios.append(Ratio(f"context/speed-up of 2 ranks over 1/{where}", speedup, None, "higher"))
    record(
        *ratios,
        shape=(1, num_tokens, NUM_HEADS, HEAD_DIM),
        dtype=torch.float32,
        ranks=2,
        threads=1,
        segment_lengths=list(lengths),
        seconds_alone=statistics.median(ranks[0]["alone"] for ranks in rounds),
    )
