"""Random steps over ranks, with faults, naps and calls in other orders: each gives what one process gives, or an error on all."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed import gather_tokens, shard_sequence, shared_failures, underway, unshard_sequence
from flexdilated.distributed.ledger import LAST_PAUSE
from tests.distributed.processes import Ranks, several
from tests.distributed.test_steps import FaultError, bias
from tests.tolerances import EXACT

HEADS, HEAD_DIM = 4, 8
EXCHANGES = ("gather", "heads", "ring", "auto", "functions")
FAULTS = ("before", "between", "hook", "backward", "behind")
NAP = 3 * LAST_PAUSE  # seconds, at most: others begin to look for what has happened
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 12))]
LINES = {"atol": 1e-9, "rtol": 1e-9}  # of gradients through up to four layers


@dataclass(frozen=True)
class Layer:
    pattern: DilatedPattern
    exchange: str
    is_causal: bool
    is_checkpointed: bool


@dataclass(frozen=True)
class Program:
    """What all ranks do in a step."""

    shard_lengths: tuple[int, ...]
    layers: tuple[Layer, ...]
    batch: int
    kv_heads: int
    ignored: bool
    borders: tuple[int, ...] | None
    seed: int

    @property
    def num_tokens(self) -> int:
        return sum(self.shard_lengths)

    def inputs(self) -> tuple[list[Tensor], Tensor | None]:
        """q, k and v of the whole sequence, and which keys are ignored."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = self.batch, self.num_tokens
        given = [
            torch.randn(*shape, heads, HEAD_DIM, generator=generator, dtype=torch.float64)
            for heads in (HEADS, self.kv_heads, self.kv_heads)
        ]
        return given, torch.rand(shape, generator=generator) < 0.3 if self.ignored else None


def draw_pattern(draw: random.Random) -> DilatedPattern:
    lengths = [draw.randint(2, 60) for _ in range(draw.randint(1, 3))]
    rates = [draw.randint(1, min(length, 5)) for length in lengths]
    return DilatedPattern(
        tuple(lengths), tuple(rates), offsets=draw.choice(["blocked", "interleaved"]), detach_weights=draw.random() < 0.2
    )


def draw_program(draw: random.Random, size: int) -> Program:
    num_tokens = draw.randint(size, 90)
    cuts = sorted(draw.randrange(num_tokens + 1) for _ in range(size - 1))
    lengths = tuple(b - a for a, b in pairwise([0, *cuts, num_tokens]))  # some may be empty
    layers = [
        Layer(draw_pattern(draw), draw.choice(EXCHANGES), draw.random() < 0.5, draw.random() < 0.25)
        for _ in range(draw.randint(1, 4))
    ]
    borders = (0, *sorted(draw.randrange(num_tokens + 1) for _ in range(3)), num_tokens) if draw.random() < 0.4 else None
    batch, kv_heads = 1 if borders else 2, draw.choice([1, 2, 4])
    return Program(lengths, tuple(layers), batch, kv_heads, draw.random() < 0.25, borders, draw.randrange(1000))


def run(
    program: Program, given: list[Tensor], ignored: Tensor | None, mesh: DeviceMesh | None, between: Callable[[int], None]
) -> Tensor:
    """The output of all layers, in shards over a mesh."""
    out, k, v = given
    for number, layer in enumerate(program.layers):
        between(number)
        by_function = layer.exchange == "functions"
        options = {"is_causal": layer.is_causal, "key_padding_mask": ignored, "score_mod": bias if by_function else None}
        options["cu_seqlens"] = None if program.borders is None else torch.tensor(program.borders)
        if mesh is not None:
            exchange = "auto" if by_function else layer.exchange
            options |= {"mesh": mesh, "shard_lengths": program.shard_lengths, "exchange": exchange}

        def call(q: Tensor, k: Tensor, v: Tensor, layer: Layer = layer, options: dict[str, object] = options) -> Tensor:
            return dilated_attention(q, k, v, layer.pattern, **options)  # type: ignore[arg-type, return-value]

        out = checkpoint(call, out, k, v, use_reentrant=False) if layer.is_checkpointed else call(out, k, v)
    return out


def step(program: Program, mesh: DeviceMesh, fault: str | None, naps: random.Random) -> tuple[list[Tensor], Tensor]:
    """A step of one rank, which may fail: its inputs with their gradients, and its output."""

    def fail(place: str) -> None:
        if naps.random() < 0.3:
            time.sleep(NAP * naps.random())
        if fault == place:
            raise FaultError(place)

    with shared_failures(mesh):
        fail("before")
        whole, ignored = program.inputs()
        lengths = program.shard_lengths
        given = [x.clone().requires_grad_() for x in shard_sequence(whole, mesh, shard_lengths=lengths)]
        mine = None if ignored is None else shard_sequence(ignored, mesh, shard_lengths=lengths)
        last = len(program.layers) - 1
        out = run(program, given, mine, mesh, lambda number: fail("between" if number == last else ""))
        if program.seed % 3 == 0:
            assert unshard_sequence(out.detach(), mesh, shard_lengths=lengths).shape[1] == program.num_tokens
        if program.seed % 5 == 0:
            ends = torch.full((program.batch,), program.num_tokens - 1)
            gather_tokens(out.detach().flatten(2), ends, mesh, shard_lengths=lengths)
        if fault == "hook":
            out.register_hook(lambda _: fail("hook"))
        fail("backward")
        out.square().sum().backward()
        fail("behind")
    return given, out


def assert_as_one_process(program: Program, rank: int, given: list[Tensor], out: Tensor) -> None:
    whole, ignored = program.inputs()
    whole = [x.requires_grad_() for x in whole]
    expected = run(program, whole, ignored, None, lambda _: None)
    expected.square().sum().backward()
    begin = sum(program.shard_lengths[:rank])
    here = slice(begin, begin + program.shard_lengths[rank])
    torch.testing.assert_close(out, expected[:, here], **EXACT)
    for mine, of_all in zip(given, whole, strict=True):
        assert of_all.grad is not None
        torch.testing.assert_close(mine.grad, of_all.grad[:, here], **LINES)


def check_steps(rank: int, mesh: DeviceMesh, seed: int, count: int) -> None:
    """Two of three steps are healthy, behind whichever has failed."""
    draw, naps = random.Random(f"{seed}"), random.Random(f"{seed} {rank}")
    for _ in range(count):
        program, failing = draw_program(draw, mesh.size()), draw.randrange(mesh.size())
        fault = draw.choice(FAULTS) if draw.random() < 0.35 else None
        fails = fault if failing == rank else None
        match = rf"^{fault}$" if fails else rf"rank {failing} refused: FaultError: {fault}$"
        with nullcontext() if fault is None else pytest.raises(FaultError if fails else ValueError, match=match):
            given, out = step(program, mesh, fails, naps)
        if fault is None:
            assert_as_one_process(program, rank, given, out)
    settle(mesh)


def settle(mesh: DeviceMesh) -> None:
    """End what a last step may have left on its way: other tests count the threads of these processes."""
    with shared_failures(mesh):
        pass
    assert not underway.underway(mesh.get_group()).open


@several
@pytest.mark.parametrize("seed", SEEDS)
def test_random_steps_give_what_one_process_gives_or_an_error_on_all_ranks(ranks: Ranks, seed: int) -> None:
    ranks.run(check_steps, seed, 6, deadline=300.0)


def step_in_order(
    calls: Sequence[tuple[DilatedPattern, str]],
    given: Sequence[Tensor],
    mesh: DeviceMesh,
    orders: tuple[Sequence[int], Sequence[int]],
    naps: random.Random,
) -> list[Tensor]:
    """Each call's output and gradient of its input, where calls and backwards are made in some orders."""
    inputs = [shard_sequence(given[i], mesh).clone().requires_grad_() for i in range(len(calls))]
    outs: dict[int, Tensor] = {}
    with shared_failures(mesh):
        for i in orders[0]:
            time.sleep(NAP * naps.random() * (naps.random() < 0.3))
            pattern, exchange = calls[i]
            out = dilated_attention(inputs[i], inputs[i], inputs[i], pattern, mesh=mesh, exchange=exchange)
            assert isinstance(out, Tensor)
            outs[i] = out
        for i in orders[1]:
            time.sleep(NAP * naps.random() * (naps.random() < 0.3))
            outs[i].square().sum().backward()
    found: list[Tensor] = []
    for i, each in enumerate(inputs):
        assert each.grad is not None
        found += [outs[i], each.grad]
    return found


def check_orders(rank: int, mesh: DeviceMesh, seed: int, count: int) -> None:
    """Known calls that one rank makes in another order, forwards or backwards: all hear it soon, or all have what they ought to."""
    draw, naps, size, length = random.Random(f"{seed}"), random.Random(f"{seed} {rank}"), mesh.size(), 12
    patterns = [DilatedPattern(*each) for each in (((length * size,), (1,)), ((8, 24), (1, 2)), ((30, length * size), (3, 4)))]
    kinds = [(pattern, exchange) for pattern in patterns for exchange in ("gather", "heads", "ring")]
    for _ in range(count):
        calls = draw.sample(kinds, draw.randint(2, 4))
        given = [
            torch.randn(1, length * size, 2, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(4)
        ]
        usual, odd, forwards = list(range(len(calls))), draw.randrange(size), draw.random() < 0.5
        order = draw.sample(usual, len(usual))
        step_in_order(calls, given, mesh, (usual, usual), naps)  # all plans are known now
        mine = order if rank == odd else usual
        error = None
        try:
            found = step_in_order(calls, given, mesh, (mine, usual) if forwards else (usual, mine), naps)
        except ValueError as raised:
            error = str(raised)
        heard: list[str | None] = [None] * size
        dist.all_gather_object(heard, error, group=mesh.get_group())
        assert len({each is None for each in heard}) == 1, heard
        if error is not None:
            assert order != usual, error
            assert "ranks must make the same calls in the same order" in error
            continue
        wanted: list[Tensor] = []
        for i, (pattern, _) in enumerate(calls):
            whole = given[i].clone().requires_grad_()
            out = dilated_attention(whole, whole, whole, pattern)
            assert isinstance(out, Tensor)
            out.square().sum().backward()
            assert whole.grad is not None
            wanted += [out, whole.grad]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, shard_sequence(other, mesh), **LINES)
    settle(mesh)


def check_orders_beside_a_pool(rank: int, mesh: DeviceMesh, seed: int, count: int) -> None:
    """The same where every other rank has a thread that waits for work, as compilers leave one."""
    with ThreadPoolExecutor(1) as pool:
        if (rank + seed) % 2:
            pool.submit(int).result()
        check_orders(rank, mesh, seed, count)


@several
@pytest.mark.parametrize("seed", SEEDS)
def test_calls_of_random_steps_in_another_order_are_heard_by_all_ranks_or_harmless(ranks: Ranks, seed: int) -> None:
    ranks.run(check_orders_beside_a_pool, seed, 4, deadline=300.0)
