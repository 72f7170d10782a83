"""`dilated_attention` over real ranks: against the oracle on the whole sequence, its bytes against the plan, and its faults."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.backends.merge import accumulated
from flexdilated.distributed import cost
from flexdilated.distributed.agreement import Ledger
from flexdilated.distributed.plan import EXCHANGES
from tests.cases import dense_attention, differentiate, poisoned_memory
from tests.distributed.cases import ShardedCase, random_case
from tests.distributed.processes import TIMEOUT, Ranks
from tests.tolerances import EXACT, HALF_LSE, SINGLE, assert_twice_naive

# Descending: pytest gathers the tests of a process set by the place of its parameter, which `at_least` must not move.
WORLD_SIZES = sorted((int(size) for size in os.environ.get("FLEXDILATED_WORLD_SIZES", "1,2,3,4").split(",")), reverse=True)
NAMES = ("out", "lse", "dq", "dk", "dv")
LENGTHS = (11, 13, 0, 17, 7, 3, 19, 5)
RANDOM_CASES = 25
LOST = timedelta(seconds=15)  # of a group that loses a rank
SHORT = timedelta(seconds=2)  # of the group where a rank is missing


@pytest.fixture(scope="module", params=WORLD_SIZES, ids="{}_ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """One set of processes for all tests of a world size."""
    ranks = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.kill()


def at_least(size: int) -> pytest.MarkDecorator:
    """The world sizes of a test that needs so many ranks."""
    return pytest.mark.parametrize("ranks", [n for n in WORLD_SIZES if n >= size], indirect=True, ids="{}_ranks".format)


several = at_least(2)


# -- what ranks do ------------------------------------------------------------------------------------------------------------


def cut(size: int, **options: Any) -> ShardedCase:
    """Uneven shards, one of them empty, and segments that lie inside them, across one border and across all."""
    return ShardedCase(DilatedPattern((8, 24, 71), (1, 2, 3)), LENGTHS[:size], batch=options.pop("batch", 2), group=2, **options)


@lru_cache(maxsize=8)
def expected_of(case: ShardedCase) -> dict[str, Tensor]:
    return case.expected()


def arguments(case: ShardedCase, rank: int, mesh: DeviceMesh, **options: Any) -> dict[str, Any]:
    """The keyword arguments of this rank's call."""
    mask = case.mask()
    is_even = len(set(case.shard_lengths)) == 1
    return {
        "is_causal": case.is_causal,
        "scale": case.scale,
        "key_padding_mask": None if mask is None else mask[:, case.shard(rank)],
        "cu_seqlens": case.cu_seqlens(),
        "mesh": mesh,
        "shard_lengths": None if is_even else case.shard_lengths,
        "return_lse": True,
        **options,
    }


def shards(case: ShardedCase, rank: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and dout of this rank: views, as the caller may hold them."""
    given = case.tensors(dtype)
    return [given[name][:, case.shard(rank)] for name in ("q", "k", "v", "dout")]


def results(
    case: ShardedCase, rank: int, mesh: DeviceMesh, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Tensor, ...]:
    """`out, lse, dq, dk, dv` of this rank."""
    given = arguments(case, rank, mesh, **options)
    dlse = expected_of(case)["dlse"][:, :, case.shard(rank)].to(accumulated(dtype))
    return differentiate(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **given), *shards(case, rank, dtype), dlse)


def assert_expected(case: ShardedCase, rank: int, actual: tuple[Tensor, ...], **tolerance: float) -> None:
    for name, a in zip(NAMES, actual, strict=True):
        e = expected_of(case)[name]
        e = e[:, :, case.shard(rank)] if name == "lse" else e[:, case.shard(rank)]
        torch.testing.assert_close(a.double(), e, **(tolerance or EXACT), msg=lambda text, name=name: f"{name}: {text}")


# -- the oracle ---------------------------------------------------------------------------------------------------------------


def drawn(number: int, size: int) -> tuple[ShardedCase, str]:
    """A case and its exchange; every fourth has equal shards, which need not be declared."""
    case = random_case(7919 * size + number, size)
    if number % 4 == 3:
        length = -(-case.num_tokens // size)
        borders = case.borders and (*case.borders[:-1], length * size)
        case = replace(case, shard_lengths=(length,) * size, borders=borders)
    return case, ("auto", *EXCHANGES)[number // 4 % 4]


def check_oracle(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    with poisoned_memory():
        assert_expected(case, rank, results(case, rank, mesh, exchange=exchange))


@pytest.mark.parametrize("number", range(RANDOM_CASES))
def test_ranks_give_what_one_gives_with_all_gradients(ranks: Ranks, number: int) -> None:
    ranks.run(check_oracle, *drawn(number, ranks.world_size))


@pytest.mark.parametrize("size", [size for size in WORLD_SIZES if size > 1])
def test_drawn_cases_cover_the_options(size: int) -> None:
    cases = [drawn(number, size) for number in range(RANDOM_CASES)]
    moving = [(case, exchange) for case, exchange in cases if not case.plan().is_local]
    assert {exchange for _, exchange in moving} == {"auto", *EXCHANGES}
    assert len(moving) > RANDOM_CASES // 3
    for holds in (
        lambda case: case.is_causal,
        lambda case: case.ignored,
        lambda case: case.borders,
        lambda case: case.group > 1,
        lambda case: size == 2 or 0 in case.shard_lengths,  # of two ranks, an empty one leaves nothing to move
        lambda case: len(set(case.shard_lengths)) == 1,
        lambda case: case.pattern.zero_padding,
        lambda case: case.pattern.detach_weights,
        lambda case: case.pattern.heads == "grouped",
        lambda case: case.pattern.offsets == "interleaved",
    ):
        assert any(holds(case) for case, _ in moving)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_exchange_moves_queries_too(ranks: Ranks, exchange: str, is_causal: bool) -> None:
    """torchscale's rows shift, so that outputs belong to other ranks than their queries."""
    case = replace(cut(ranks.world_size, is_causal=is_causal), pattern=DilatedPattern.torchscale((7, 16), (3, 5)))
    ranks.run(check_oracle, case, exchange)


def check_compiled(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str, backend: str) -> None:
    torch._dynamo.reset()
    given = arguments(case, rank, mesh, exchange=exchange)
    attend = torch.compile(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **given), fullgraph=True, backend=backend)
    dlse = expected_of(case)["dlse"][:, :, case.shard(rank)]
    for _ in range(2):
        assert_expected(case, rank, differentiate(attend, *shards(case, rank), dlse))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "options", "backend"),
    [
        ("gather", {"ignored": 0.3, "is_causal": True}, "aot_eager"),
        ("gather", {"batch": 1, "borders": True}, "inductor"),
        ("ring", {"batch": 1, "borders": True, "ignored": 0.3}, "aot_eager"),
        ("heads", {"ignored": 0.3}, "aot_eager"),
        ("heads", {"batch": 1, "borders": True}, "aot_eager"),
        ("auto", {"is_causal": True}, "aot_eager"),
    ],
    ids=["gather_mask", "gather_documents", "ring_documents", "heads_mask", "heads_documents", "auto"],
)
def test_compiled_equals_the_oracle(ranks: Ranks, exchange: str, options: dict[str, Any], backend: str) -> None:
    case = cut(ranks.world_size, **{name: value for name, value in options.items() if name != "borders"})
    if options.get("borders"):
        case = replace(case, borders=(0, 5, case.num_tokens - 2, case.num_tokens))
    ranks.run(check_compiled, case, exchange, backend)


# -- checkpointing and dropout ------------------------------------------------------------------------------------------------


def check_checkpointing(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str, dropout_p: float) -> None:
    given = arguments(case, rank, mesh, exchange=exchange, dropout_p=dropout_p)
    dlse = expected_of(case)["dlse"][:, :, case.shard(rank)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return dilated_attention(q, k, v, case.pattern, **given)

    found = []
    for call in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=False)):
        torch.manual_seed(13)
        found.append(differentiate(call, *shards(case, rank), dlse))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@several
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_activation_checkpointing_changes_nothing(ranks: Ranks, exchange: str, dropout_p: float) -> None:
    ranks.run(check_checkpointing, cut(ranks.world_size, ignored=0.2), exchange, dropout_p)


DROPOUT_P = 0.3
BLOCK = 16  # tokens of a rank


def kept_weights(rank: int, mesh: DeviceMesh, exchange: str, is_local: bool) -> Tensor:
    """Which weights survive: `(B, H, keys, queries of this rank)` bool. Ranks have equal seeds and, where local, equal data."""
    width = BLOCK if is_local else BLOCK * mesh.size()
    q = torch.zeros(2, BLOCK, 4, width, dtype=torch.float64)
    v = torch.eye(width, dtype=torch.float64).expand(2, 4, width, width).transpose(1, 2)
    v = v if is_local else v[:, rank * BLOCK : (rank + 1) * BLOCK]
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        pattern = DilatedPattern((width,), (1,))
        out, lse = dilated_attention(q, q, v, pattern, dropout_p=DROPOUT_P, mesh=mesh, exchange=exchange, return_lse=True)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(width)), **EXACT)  # of the undropped weights
        drawn.append(out)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    kept = drawn[0] != 0
    torch.testing.assert_close(drawn[0], kept.double() / (width * (1 - DROPOUT_P)), **EXACT)
    return kept.permute(0, 2, 3, 1)


@several
@pytest.mark.parametrize("is_local", [False, True], ids=["cut", "local"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_dropout_drops_its_share_independently_on_every_rank(ranks: Ranks, exchange: str, is_local: bool) -> None:
    kept = torch.stack(ranks.run(kept_weights, exchange, is_local))  # (ranks, B, H, keys, BLOCK)
    blocks = kept.unflatten(3, (-1, BLOCK)).flatten(0, 3).flatten(1).double()  # one per pair of ranks, sequence and head
    num_blocks, size = blocks.shape
    share = 1 - DROPOUT_P
    deviations = 6.0
    assert abs(blocks.mean().item() - share) < deviations * math.sqrt(share * (1 - share) / blocks.numel())
    alike = (blocks @ blocks.T + (1 - blocks) @ (1 - blocks).T) / size  # the share of places where two blocks agree
    chance = share**2 + (1 - share) ** 2
    others = alike[~torch.eye(num_blocks, dtype=torch.bool)]
    assert (others - chance).abs().max().item() < deviations * math.sqrt(chance * (1 - chance) / size)


def directional(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> tuple[float, float]:
    """This rank's terms of the derivative along a random direction: by differences, and by its gradients."""
    given = arguments(case, rank, mesh, exchange=exchange, dropout_p=DROPOUT_P)
    *inputs, dout = shards(case, rank)
    dlse = expected_of(case)["dlse"][:, :, case.shard(rank)]
    along = shards(replace(case, seed=case.seed + 1), rank)[:3]
    step = 1e-5

    def loss(sign: float) -> float:
        torch.manual_seed(rank)
        moved = [x + sign * step * t for x, t in zip(inputs, along)]
        out, lse = dilated_attention(*moved, case.pattern, **given)
        return ((out * dout).sum() + (lse * dlse)[dlse != 0].sum()).item()

    torch.manual_seed(rank)
    grads = differentiate(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **given), *inputs, dout, dlse)[2:]
    return (loss(1.0) - loss(-1.0)) / (2 * step), sum((g * t).sum().item() for g, t in zip(grads, along))


@several
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "ignored": 0.2}], ids=["plain", "causal_mask"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_gradients_under_dropout_are_those_of_the_same_masks(ranks: Ranks, exchange: str, options: dict[str, Any]) -> None:
    differences, products = zip(*ranks.run(directional, cut(ranks.world_size, **options), exchange))
    torch.testing.assert_close(torch.tensor(sum(products)), torch.tensor(sum(differences)), **SINGLE)


# -- low precision ------------------------------------------------------------------------------------------------------------

HALF_CASES = {  # no empty row, for plain PyTorch to compute
    "three": ShardedCase(DilatedPattern((31, 101, 257), (1, 3, 7)), (263,), batch=2, kv_heads=7, head_dim=24),
    "gqa": ShardedCase(DilatedPattern((67, 263), (1, 5)), (211,), batch=2, kv_heads=2, group=3, head_dim=48, is_causal=True),
}


def divided(case: ShardedCase, size: int) -> ShardedCase:
    """The case in shards of random lengths."""
    rng = random.Random(size)
    borders = [0, *sorted(rng.randint(0, case.num_tokens) for _ in range(size - 1)), case.num_tokens]
    return replace(case, shard_lengths=tuple(b - a for a, b in pairwise(borders)))


def results_alone(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    given = arguments(case, rank, mesh, exchange=exchange)
    return differentiate(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **given), *shards(case, rank, dtype))


@lru_cache(maxsize=4)
def naive_and_expected(name: str, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Plain PyTorch in the dtype, and the oracle, from the same rounded inputs."""
    case = HALF_CASES[name]
    given = [case.tensors(dtype)[x] for x in ("q", "k", "v", "dout")]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = dense_attention(q, k, v, case.pattern, is_causal=case.is_causal)
        return out, out

    def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return reference.dilated_attention(q, k, v, case.pattern, is_causal=case.is_causal)

    return differentiate(plain, *given), differentiate(exact, *(x.double() for x in given))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALF_CASES)
def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch(
    ranks: Ranks, name: str, dtype: torch.dtype, exchange: str
) -> None:
    parts = ranks.run(results_alone, divided(HALF_CASES[name], ranks.world_size), exchange, dtype)
    naive, expected = naive_and_expected(name, dtype)
    for i, result in enumerate(NAMES):
        actual = torch.cat([part[i] for part in parts], dim=2 if result == "lse" else 1)
        if result == "lse":
            torch.testing.assert_close(actual.double(), expected[i], **HALF_LSE)
        else:
            assert actual.dtype == dtype
            assert_twice_naive(actual, naive[i], expected[i])


def check_single(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    actual = results(case, rank, mesh, torch.float32, exchange=exchange)
    assert all(x.dtype == torch.float32 for x in actual)
    assert_expected(case, rank, actual, **SINGLE)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_float32_equals_the_oracle(ranks: Ranks, exchange: str) -> None:
    case = replace(cut(ranks.world_size, ignored=0.2), pattern=DilatedPattern.torchscale((7, 16, 41), (1, 5, 3)))
    ranks.run(check_single, case, exchange)


def check_autocast(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str, dtype: torch.dtype) -> None:
    given = arguments(case, rank, mesh, exchange=exchange)
    *inputs, dout = shards(case, rank, torch.float32)
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.autocast("cpu", dtype):
        out, lse = dilated_attention(*leaves, case.pattern, **given)
    whole = [case.tensors(torch.float32)[name] for name in "qkv"]
    with torch.autocast("cpu", dtype):
        out_alone, lse_alone = dilated_attention(*whole, case.pattern, is_causal=case.is_causal, return_lse=True)
    assert (out.dtype, lse.dtype) == (out_alone.dtype, lse_alone.dtype) == (dtype, torch.float32)
    grads = torch.autograd.grad(out, leaves, dout.to(dtype))
    assert all(x.dtype == torch.float32 for x in grads)
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel):
            results = []
            for autocast, cast in ((True, leaves), (False, [x.to(dtype).requires_grad_() for x in inputs])):
                with torch.autocast("cpu", dtype, enabled=autocast):
                    out, lse = dilated_attention(*cast, case.pattern, **given)
                    results.append((out, lse, *(x.to(dtype) for x in torch.autograd.grad(out, cast, dout.to(dtype)))))
        assert all(torch.equal(a, e) for a, e in zip(*results))
    with torch.autocast("cpu", dtype):
        exact = dilated_attention(*shards(case, rank)[:3], case.pattern, **given)[0]
    assert exact.dtype == torch.float64


@several
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_autocast_gives_the_dtypes_of_one_rank(ranks: Ranks, exchange: str, dtype: torch.dtype) -> None:
    ranks.run(check_autocast, cut(ranks.world_size, is_causal=True), exchange, dtype)


# -- communication ------------------------------------------------------------------------------------------------------------

COLLECTIVES = (
    "isend",
    "irecv",
    "send",
    "recv",
    "batch_isend_irecv",
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


@contextmanager
def silence() -> Iterator[None]:
    """Whatever communicates inside fails."""
    counted = dist.group.WORLD._get_sequence_number_for_group()
    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, side_effect=AssertionError(f"{name} was called")))
        yield
    assert dist.group.WORLD._get_sequence_number_for_group() == counted


@contextmanager
def recorded() -> Iterator[list[dist.P2POp]]:
    """The point-to-point operations of this rank."""
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
    with silence():
        actual = results(case, rank, mesh, exchange=exchange)
    assert_expected(case, rank, actual)


@pytest.mark.parametrize("exchange", ["auto", *EXCHANGES])
@pytest.mark.parametrize("is_even", [False, True], ids=["uneven", "even"])
def test_segments_inside_shards_need_no_communication(ranks: Ranks, exchange: str, is_even: bool) -> None:
    lengths = (32,) * ranks.world_size if is_even else (16, 48, 0, 32, 16, 0, 16, 32)[: ranks.world_size]
    case = ShardedCase(DilatedPattern((4, 8, 16), (1, 2, 4)), lengths, kv_heads=4, ignored=0.2)
    for each in (case, replace(case, pattern=DilatedPattern.torchscale((4, 16), (1, 4)), is_causal=True, ignored=0.0)):
        assert each.plan().is_local
        ranks.run(check_silent, each, exchange)


def check_idle(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    if rank >= 2:
        check_silent(rank, mesh, case, exchange)
        return
    with recorded() as operations:
        assert_expected(case, rank, results(case, rank, mesh, exchange=exchange))
    assert {op.peer for op in operations} == {1 - rank}


@at_least(3)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_only_ranks_that_owe_each_other_rows_communicate(ranks: Ranks, exchange: str) -> None:
    """One segment is cut: that of the first two ranks."""
    case = ShardedCase(DilatedPattern((32,), (1,)), (16,) * ranks.world_size)
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
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("exchange", ["auto", *EXCHANGES])
def test_bytes_on_the_transport_are_those_of_the_plan(ranks: Ranks, exchange: str, dtype: torch.dtype) -> None:
    size = ranks.world_size
    total = 0
    shifted = replace(cut(size), pattern=DilatedPattern.torchscale((7, 16), (3, 5)))
    others = [random_case(7919 * size + number, size) for number in range(5)]
    for case in (cut(size), cut(size, ignored=0.2, is_causal=True), shifted, *others):
        counts = ranks.run(counted_bytes, case, exchange, dtype)
        sizes = {"head_dim": case.head_dim, "itemsize": dtype.itemsize, "batch": case.batch}
        rest = {"masked": case.mask() is not None, "lse_size": accumulated(dtype).itemsize}
        plan = case.plan()
        chosen = cost.choose(plan, budget=cost.default_budget(plan, **sizes), **sizes, **rest) if exchange == "auto" else exchange
        for direction, planned in enumerate(cost.bytes_received(plan, chosen, **sizes, **rest)):
            received, sent = zip(*(count[direction] for count in counts))
            assert received == tuple(planned.tolist()), (case, direction)
            assert sum(sent) == sum(received)
            total += sum(received)
    assert total > 0


def count_rounds(rank: int, mesh: DeviceMesh, case: ShardedCase) -> list[int]:
    """Rounds of agreement after each of five steps."""
    rounds = []
    with mock.patch.object(Ledger, "_enter", autospec=True, side_effect=Ledger._enter) as enter:
        for _ in range(5):
            results(case, rank, mesh, scale=0.7)
            rounds.append(enter.call_count)
        results(case, rank, mesh, scale=0.9)
        rounds.append(enter.call_count)
    return rounds


@several
def test_ranks_agree_once_per_plan(ranks: Ranks) -> None:
    assert ranks.run(count_rounds, cut(ranks.world_size)) == [[1, 1, 1, 1, 1, 2]] * ranks.world_size


# -- DTensors -----------------------------------------------------------------------------------------------------------------

TOKENS, HEADS = [Shard(1)], [Shard(2)]


def placed(value: Any) -> str:
    """Placements, or another parameter, in the name of a test."""
    if not isinstance(value, list):
        return str(value)
    return "_".join(("batch", "tokens", "heads")[p.dim % 4] if isinstance(p, Shard) else "replicated" for p in value)


@lru_cache(maxsize=2)
def grid(size: int) -> DeviceMesh:
    """Ranks in two axes of two or more where their number allows it."""
    rows = 2 if size % 2 == 0 else 1
    return init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("rows", "columns"))


def scattered(x: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(x, mesh, placements)


def check_dtensors(
    rank: int, mesh: DeviceMesh, case: ShardedCase, placements: list[Placement], masking: str | None, exchange: str, compiled: bool
) -> None:
    mesh = grid(mesh.size()) if len(placements) == 2 else mesh
    given, expected, mask = case.tensors(), expected_of(case), case.mask()
    options: dict[str, Any] = {"is_causal": case.is_causal, "cu_seqlens": case.cu_seqlens(), "exchange": exchange}
    leaves = [scattered(given[name], mesh, placements).requires_grad_() for name in "qkv"]
    held = leaves[0].placements  # dims counted from the front
    if mask is not None:
        own = [p if p.is_shard(0) or p.is_shard(1) else Replicate() for p in held]
        local = scattered(mask.byte(), mesh, own).to_local().bool()
        options["key_padding_mask"] = {
            "plain": local,
            "dtensor": DTensor.from_local(local, mesh, own, run_check=False, shape=mask.shape, stride=mask.stride()),
            "replicated": DTensor.from_local(mask, mesh, [Replicate()] * mesh.ndim, run_check=False),
        }[masking]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return dilated_attention(q, k, v, case.pattern, return_lse=True, **options)

    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out, lse = attend(*leaves)
    assert out.placements == held
    assert out.shape == given["q"].shape
    assert out.stride() == given["q"].stride()
    moved = {0: 0, 1: 2, 2: 1}
    assert lse.placements == tuple(Shard(moved[p.dim]) if isinstance(p, Shard) else p for p in held)
    weights = scattered(given["dout"], mesh, placements), scattered(expected["dlse"], mesh, lse.placements)
    grads = torch.autograd.grad((out, lse), leaves, weights)
    for name, x in zip(NAMES, (out, lse, *grads), strict=True):
        torch.testing.assert_close(x.full_tensor().detach(), expected[name], **EXACT, msg=lambda t, name=name: f"{name}: {t}")
    alone = dilated_attention(*leaves, case.pattern, **options)
    assert torch.equal(alone.full_tensor(), out.full_tensor())


def dtensor_case(**options: Any) -> ShardedCase:
    """Offsets differ from head to head; heads divide among 2, 3, 4 and 8 ranks, tokens among none, batch among 2."""
    return ShardedCase(DilatedPattern((8, 13, 41), (1, 3, 5)), (41,), kv_heads=24, group=2, **{"batch": 2, **options})


@pytest.mark.parametrize(
    ("placements", "exchange", "masking"),
    [
        (TOKENS, "gather", "plain"),
        (TOKENS, "ring", "dtensor"),
        (TOKENS, "heads", None),
        ([Shard(-3)], "auto", "replicated"),
        (HEADS, "auto", "plain"),
        (HEADS, "auto", "dtensor"),
        ([Replicate()], "auto", "dtensor"),
        ([Shard(2), Shard(1)], "gather", "dtensor"),
        ([Shard(1), Shard(2)], "heads", "plain"),
        ([Shard(0), Shard(1)], "ring", "plain"),
        ([Replicate(), Shard(1)], "heads", "replicated"),
        ([Shard(0), Shard(2)], "auto", "dtensor"),
    ],
    ids=placed,
)
def test_dtensors_give_what_their_whole_gives(
    ranks: Ranks, placements: list[Placement], exchange: str, masking: str | None
) -> None:
    case = dtensor_case(is_causal=masking == "plain", ignored=0.2 if masking else 0.0)
    ranks.run(check_dtensors, case, placements, masking, exchange, False)


@several
@pytest.mark.parametrize("placements", [TOKENS, [Shard(2), Shard(1)], [Shard(0), Shard(1)]], ids=placed)
def test_dtensors_whose_parts_may_be_empty(ranks: Ranks, placements: list[Placement]) -> None:
    """As `torch.chunk` cuts 5 tokens among 4 ranks: 2, 2, 1 and none."""
    ranks.run(check_dtensors, replace(dtensor_case(), shard_lengths=(5,)), placements, None, "auto", False)


@several
def test_dtensors_with_documents(ranks: Ranks) -> None:
    ranks.run(check_dtensors, dtensor_case(batch=1, borders=(0, 3, 30, 41)), [Shard(2), Shard(1)], None, "auto", False)


@several
@pytest.mark.slow
@pytest.mark.parametrize("masking", [None, "plain"])
@pytest.mark.parametrize("placements", [TOKENS, HEADS, [Shard(2), Shard(1)]], ids=placed)
def test_compiled_dtensors_give_what_their_whole_gives(ranks: Ranks, placements: list[Placement], masking: str | None) -> None:
    ranks.run(check_dtensors, dtensor_case(ignored=0.2 if masking else 0.0), placements, masking, "auto", True)


def check_heads_beside_tokens(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    """DTensors say how heads are shared; `mesh` says that their tokens are a shard."""
    two = grid(mesh.size())
    rows, columns = two["rows"], two["columns"]
    place = rows.get_local_rank()
    here = case.shard(place)
    options = arguments(case, place, rows, exchange=exchange)
    *inputs, dout = shards(case, place)
    leaves = [scattered(x.contiguous(), columns, HEADS).requires_grad_() for x in inputs]
    out, lse = dilated_attention(*leaves, case.pattern, **options)
    expected = expected_of(case)
    weights = (
        scattered(dout.contiguous(), columns, HEADS),
        scattered(expected["dlse"][:, :, here].contiguous(), columns, [Shard(1)]),
    )
    grads = torch.autograd.grad((out, lse), leaves, weights)
    assert_expected(case, place, tuple(x.full_tensor().detach() for x in (out, lse, *grads)))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_dtensors_of_heads_beside_a_mesh_of_tokens(ranks: Ranks, exchange: str) -> None:
    rows = 2 if ranks.world_size % 2 == 0 else 1
    case = dtensor_case(ignored=0.2)
    ranks.run(check_heads_beside_tokens, replace(case, shard_lengths=(17, 24) if rows == 2 else (41,)), exchange)


def check_dtensor_refusals(rank: int, mesh: DeviceMesh) -> None:
    size = mesh.size()
    two = grid(size)
    given = replace(dtensor_case(), kv_heads=size).tensors()
    plain = [given[name] for name in "qkv"]
    pattern = DilatedPattern((8,), (3,))

    def refuses(error: type[Exception], match: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
        with pytest.raises(error, match=match):
            dilated_attention(q, k, v, pattern, **options)

    def all_of(placements: list[Placement], mesh: DeviceMesh = mesh) -> list[DTensor]:
        return [scattered(x, mesh, placements) for x in plain]

    q, k, v = all_of(TOKENS)
    refuses(TypeError, r"^k must be a DTensor where q, k or v is one, got Tensor$", q, plain[1], v)
    refuses(TypeError, r"^q must be a DTensor where q, k or v is one, got Tensor$", plain[0], k, v)
    refuses(ValueError, r"^mesh must be None for DTensors sharded on tokens, .* got a value$", q, k, v, mesh=mesh)
    refuses(ValueError, r"^shard_lengths must be None for DTensors sharded on tokens, .* got a value$", q, k, v, shard_lengths=[41])
    refuses(
        ValueError, r"^v must have the mesh and placements of q=.*Shard\(dim=1\).*, got .*Shard\(dim=2\)", q, k, all_of(HEADS)[2]
    )
    refuses(ValueError, r"^exchange must be one of .*, got 'all'$", q, k, v, exchange="all")
    refuses(
        NotImplementedError, r"backend 'reference' cannot run this .*shards", q, k, v, backend="reference"
    ) if size > 1 else None
    partial = [DTensor.from_local(x, mesh, [Partial()], run_check=False) for x in plain]
    refuses(NotImplementedError, r"^q must be replicated or sharded on dim 0 .*, got P.*redistribute it first$", *partial)
    refuses(NotImplementedError, r"^q must be replicated or sharded on dim 0 .*, got S(hard)?\(.*3.*", *all_of([Shard(3)]))
    refuses(NotImplementedError, r"^q must be sharded on the tokens by at most one axis", *all_of([Shard(1), Shard(1)], two))
    if size > 1:
        odd = [scattered(x[:, :, : size - 1], mesh, HEADS) for x in (plain[1], plain[1], plain[2])]
        refuses(NotImplementedError, rf"^heads must be a multiple of the ranks that share them={size}, got {size - 1} and", *odd)
    assert dilated_attention(*all_of(HEADS), pattern).full_tensor().shape == plain[0].shape


def test_dtensors_that_are_refused(ranks: Ranks) -> None:
    ranks.run(check_dtensor_refusals)


# -- faults -------------------------------------------------------------------------------------------------------------------


def simple(size: int, **options: Any) -> ShardedCase:
    """Segments that lie in all shards, none of them empty."""
    return ShardedCase(DilatedPattern((8, 67), (1, 2)), (11, 13, 7, 5, 3, 9, 2, 4)[:size], **options)


def call(case: ShardedCase, rank: int, mesh: DeviceMesh, field: str | None, **options: Any) -> Tensor:
    """The output of this rank, which may be of another opinion about one field."""
    given = arguments(case, rank, mesh, **options)
    q, k, v, _ = shards(case, rank)
    pattern = case.pattern
    if field == "pattern":
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


def check_sound(case: ShardedCase, rank: int, mesh: DeviceMesh) -> None:
    """What came before left the group in order."""
    assert_expected(case, rank, results(case, rank, mesh))


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
        ("pattern", "{'segment_lengths': [8, 67], 'dilation_rates'", "{'segment_lengths': [8, 61], 'dilation_rates'"),
        ("shard_lengths", "[11, 13", "[12, 13"),
        ("num_kv_heads", "3", "2"),
        ("query_heads_per_kv_head", "1", "2"),
        ("head_dim", "3", "2"),
        ("batch", "1", "2"),
        ("dtype", "'torch.float64'", "'torch.float32'"),
        ("masked", "False", "True"),
        ("documents", "[[0, ", "[[0, 3], [3, "),
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
    error = rf"cu_seqlens must rise from 0 to the number of tokens={case.num_tokens}, got \[0, 3, {case.num_tokens - 1}\]$"
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
    group.set_timeout(SHORT)
    message = f"^rank {absent} must take part in dilated_attention over this mesh within {SHORT.total_seconds():g} s, it did not"
    if rank == absent:
        time.sleep(SHORT.total_seconds() + 1.0)
    with pytest.raises(TimeoutError, match=message):
        call(case, rank, mesh, None, scale=2.75)
    group.set_timeout(TIMEOUT)
    check_sound(case, rank, mesh)


@several
@pytest.mark.slow
def test_a_late_rank_is_named_to_all(ranks: Ranks) -> None:
    ranks.run(check_absence, deadline=TIMEOUT.total_seconds())


def check_loss(rank: int, mesh: DeviceMesh, phase: str) -> None:
    """Rank 1 is lost: its process ends, or it refuses its arguments while the others hold an agreed plan and exchange rows, or it
    makes another call than they, agreed on too."""
    case = simple(mesh.size())
    check_sound(case, rank, mesh)
    if phase == "order":  # of two calls that differ in nothing that a message shows
        for scale in (0.5, 0.7):
            results(case, rank, mesh, scale=scale)
        with pytest.raises(RuntimeError):
            results(case, rank, mesh, scale=0.5 if rank == 1 else 0.7)
        return
    mesh.get_group().set_timeout(SHORT)
    if rank != 1:
        error = TimeoutError if phase == "before" else RuntimeError  # of the transport
        with pytest.raises(error):
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


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["before", "forward", "backward", "refusal", "order"])
def test_a_lost_rank_is_an_error_on_the_others(phase: str, tmp_path: Path) -> None:
    ranks = Ranks(3, tmp_path, timeout=LOST)  # the transport waits for as long as it was told at its start
    try:
        ranks.run(check_loss, phase, deadline=TIMEOUT.total_seconds(), ending=() if phase in ("refusal", "order") else (1,))
    finally:
        ranks.kill()


def visible(case: ShardedCase) -> Tensor:
    """`(B, queries, H, keys)` bool: who may see whom, by the oracle."""
    given, n = case.tensors(), case.num_tokens
    v = torch.eye(n, dtype=torch.float64)[None, :, None].expand(case.batch, n, case.kv_heads, n)
    options = {"is_causal": case.is_causal, "cu_seqlens": case.cu_seqlens(), "key_padding_mask": case.mask()}
    return reference.dilated_attention(given["q"], given["k"], v, case.pattern, **options)[0] > 0


def check_nan(rank: int, mesh: DeviceMesh, case: ShardedCase, name: str, exchange: str) -> None:
    """One row of rank 1 is NaN: of q, k or v."""
    token, head, here = case.shard(1).start + 2, 1, case.shard(rank)
    # Kernels multiply what the causal mask hides by 0, which NaN survives, on one rank too: v forwards, k backwards.
    seen, near = visible(case), visible(replace(case, is_causal=False))
    least, most = (torch.zeros(case.batch, case.num_tokens, case.kv_heads, dtype=torch.bool) for _ in range(2))
    if name == "q":  # aten's CPU kernel takes a row of NaN scores as one without keys
        most[0, token, head] = True
    else:
        least[0, :, head] = seen[0, :, head, token]
        most[0, :, head] = (near if name == "v" else seen)[0, :, head, token]
        assert least.any()
    assert not most.all()
    met = (near & most[..., None]).any(dim=1).transpose(1, 2)[:, here]  # keys of a row with NaN
    touched = most.clone()
    if name != "q":
        touched[0, :, head] = near[0, :, head, token]
    most, touched = most[:, here], touched[:, here]
    given = case.tensors()
    given[name][0, token, head] = torch.nan
    given["dlse"] = expected_of(case)["dlse"]
    options = arguments(case, rank, mesh, exchange=exchange)
    inputs = [given[x][:, here] for x in ("q", "k", "v", "dout")]
    out, lse, dq, dk, dv = differentiate(
        lambda q, k, v: dilated_attention(q, k, v, case.pattern, **options), *inputs, given["dlse"][:, :, here]
    )
    assert out.isnan().any(dim=-1)[least[:, here]].all()
    if name == "k":
        assert lse.transpose(1, 2).isnan()[least[:, here]].all()
    expected = {key: x[:, :, here].transpose(1, 2) if key == "lse" else x[:, here] for key, x in expected_of(case).items()}
    finite = (("out", out, most), ("lse", lse.transpose(1, 2), most), ("dq", dq, touched), ("dk", dk, met), ("dv", dv, met))
    for key, x, rows in finite:
        torch.testing.assert_close(x[~rows], expected[key][~rows], **EXACT)


@several
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_of_one_rank_stays_in_the_rows_that_may_see_it(ranks: Ranks, name: str, is_causal: bool, exchange: str) -> None:
    case = replace(simple(ranks.world_size, batch=2, is_causal=is_causal), pattern=DilatedPattern((5, 22), (1, 3)))
    ranks.run(check_nan, case, name, exchange)


def check_ignored(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    options = arguments(case, rank, mesh, exchange=exchange)
    q, k, v, dout = (x.clone() for x in shards(case, rank))
    k[options["key_padding_mask"]] = torch.nan
    v[options["key_padding_mask"]] = torch.inf
    dlse = expected_of(case)["dlse"][:, :, case.shard(rank)]
    attend = lambda q, k, v: dilated_attention(q, k, v, case.pattern, **options)  # noqa: E731
    assert_expected(case, rank, differentiate(attend, q, k, v, dout, dlse))


@several
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["whole", "causal"])
def test_what_ignored_keys_of_any_rank_hold_has_no_effect(ranks: Ranks, options: dict[str, Any], exchange: str) -> None:
    for pattern in (DilatedPattern((5, 22), (1, 3)), DilatedPattern.torchscale((7, 16), (3, 5))):
        ranks.run(check_ignored, replace(cut(ranks.world_size, ignored=0.3, **options), pattern=pattern), exchange)


# -- bad input ----------------------------------------------------------------------------------------------------------------


def check_bad_input(rank: int, mesh: DeviceMesh) -> None:
    size = mesh.size()
    case = simple(size)
    q, k, v, _ = shards(case, rank)
    usual = {"mesh": mesh, "shard_lengths": case.shard_lengths}

    def refuses(error: type[Exception], match: str, q: Tensor = q, k: Tensor = k, v: Tensor = v, **options: Any) -> None:
        with pytest.raises(error, match=f"^{match}"):
            dilated_attention(q, k, v, case.pattern, **{**usual, **options})

    refuses(TypeError, "mesh must be a DeviceMesh, got ProcessGroup$", mesh=mesh.get_group())
    refuses(TypeError, "mesh must be a DeviceMesh, got str$", mesh="cp")
    sizes = rf"\({grid(size).size(0)}, {grid(size).size(1)}\)"
    refuses(
        ValueError,
        rf"mesh must be 1-D, got dims \('rows', 'columns'\) of sizes {sizes}; give one axis, as mesh\['columns'\]$",
        mesh=grid(size),
    )
    refuses(ValueError, r"exchange must be one of \('auto', 'gather', 'ring', 'heads'\), got 'all'$", exchange="all")
    lengths = case.shard_lengths
    refuses(ValueError, rf"shard_lengths must hold one length per rank of mesh={size}, got \(.*\)$", shard_lengths=(*lengths, 0))
    refuses(ValueError, rf"shard_lengths must hold one length per rank of mesh={size}, got \(\)$", shard_lengths=())
    refuses(ValueError, r"shard_lengths must not be negative, got \(-1", shard_lengths=(-1, *lengths[1:]))
    nothing = tuple(x[:, :0] for x in (q, k, v))
    refuses(ValueError, r"shard_lengths must hold at least 1 token in all, got \(0", *nothing, shard_lengths=(0,) * size)
    refuses(TypeError, r"shard_lengths must hold integers, got \(11\.0", shard_lengths=(11.0, *lengths[1:]))
    refuses(TypeError, r"shard_lengths must hold integers, got \(True", shard_lengths=(True, *lengths[1:]))
    refuses(
        ValueError,
        rf"shard_lengths\[{rank}\] must be the number of tokens of this rank={lengths[rank]}, got \(.*{lengths[rank] + 1}.*\)$",
        shard_lengths=tuple(n + 1 for n in lengths),
    )
    refuses(ValueError, "q must be on the device of mesh=cpu, got meta$", *(x.to("meta") for x in (q, k, v)))
    refuses(ValueError, "k must be on the device of q=cpu, got meta$", k=k.to("meta"))
    refuses(ValueError, "k must have a number of heads that divides that of q=3, got 2$", k=k[:, :, :2], v=v[:, :, :2])
    refuses(ValueError, "v must have as many heads as k=3, got 2$", v=v[:, :, :2])
    refuses(ValueError, "backend must be one of .*, got 'ring'$", backend="ring")
    score_mod = lambda score, b, h, i, j: score + 1.0  # noqa: E731
    mask_mod = lambda b, h, i, j: j != 2  # noqa: E731
    if size > 1:
        text = (
            "backend 'reference' cannot run this on .*: it computes whole sequences of all heads, not shards; use backend='sdpa'$"
        )
        refuses(NotImplementedError, text, backend="reference")
        refuses(NotImplementedError, "backend 'flex' cannot run this on", backend="flex")
        refuses(NotImplementedError, ".*shards have no score_mod or mask_mod", score_mod=score_mod)
        refuses(NotImplementedError, ".*shards have no score_mod or mask_mod", mask_mod=mask_mod, backend="sdpa")
        turned = DeviceMesh("cpu", list(reversed(range(size))))
        refuses(ValueError, r"mesh must list its ranks in ascending order, got \[", mesh=turned)
        alone = DeviceMesh("cpu", [0])
        if rank:
            refuses(ValueError, rf"mesh must hold this rank, got rank {rank} and ranks \[0\]$", mesh=alone)
        else:
            out = dilated_attention(q, k, v, case.pattern, mesh=alone)
            assert torch.equal(out, dilated_attention(q, k, v, case.pattern))
        unnamed = DeviceMesh("cpu", torch.arange(size).reshape(1, size))
        refuses(ValueError, rf"mesh must be 1-D, got dims None of sizes \(1, {size}\); give one axis$", mesh=unnamed)
    else:
        for options in ({"backend": "reference"}, {"backend": "sdpa"}, {"score_mod": score_mod}, {"mask_mod": mask_mod}):
            for exchange in ("auto", *EXCHANGES):
                actual = dilated_attention(q, k, v, case.pattern, return_lse=True, exchange=exchange, **usual, **options)
                expected = dilated_attention(q, k, v, case.pattern, return_lse=True, **options)
                assert all(torch.equal(a, e) for a, e in zip(actual, expected))
    check_sound(case, rank, mesh)


def test_bad_input_is_one_error_on_every_rank(ranks: Ranks) -> None:
    ranks.run(check_bad_input)


def check_plain(rank: int, mesh: DeviceMesh, case: ShardedCase) -> None:
    options = {name: x for name, x in arguments(case, rank, mesh).items() if name not in ("mesh", "shard_lengths")}
    dlse = expected_of(case)["dlse"]
    alone = differentiate(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **options), *shards(case, rank), dlse)
    with silence():
        for a, e in zip(results(case, rank, mesh), alone, strict=True):
            assert torch.equal(a, e)


@pytest.mark.skipif(1 not in WORLD_SIZES, reason="one rank is not among FLEXDILATED_WORLD_SIZES")
def test_a_mesh_of_one_rank_is_the_plain_call(tmp_path: Path) -> None:
    ranks = Ranks(1, tmp_path)
    ranks.run(check_plain, simple(1, batch=2, group=2, ignored=0.2, is_causal=True))
    ranks.kill()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"exchange": "ring"}, "exchange must come with mesh, got 'ring' and no mesh"),
        ({"exchange": "all"}, r"exchange must be one of \('auto', 'gather', 'ring', 'heads'\), got 'all'"),
        ({"shard_lengths": [5, 2]}, r"shard_lengths must come with mesh, got \(5, 2\) and no mesh"),
    ],
)
def test_arguments_of_a_mesh_without_one_are_refused(options: dict[str, Any], match: str) -> None:
    q = torch.ones(1, 7, 3, 5)
    with pytest.raises(ValueError, match=f"^{match}$"):
        dilated_attention(q, q, q, DilatedPattern((3,), (1,)), **options)
    assert dilated_attention(q, q, q, DilatedPattern((3,), (1,)), exchange="auto", shard_lengths=None).shape == q.shape


# -- the processes themselves -------------------------------------------------------------------------------------------------


def fail_on_the_last(rank: int, mesh: DeviceMesh, how: str) -> int:
    if rank == mesh.size() - 1:
        if how == "raises":
            raise ValueError("planted")
        if how == "ends":
            os._exit(3)
        time.sleep(60.0 if how == "sleeps" else 0.0)
    return rank


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "deadline", "match"),
    [
        ("raises", 60.0, r"(?s)rank 1 of 2: Traceback.*ValueError: planted"),
        ("ends", 60.0, r"rank 1 of 2: the process ended"),
        ("sleeps", 5.0, r"(?s)^rank 1 of 2: not done within 5.0 s\nTimeout.*in fail_on_the_last"),
    ],
    ids=["raises", "ends", "sleeps"],
)
def test_a_rank_that_fails_fails_the_test(how: str, deadline: float, match: str, tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path)
    try:
        assert ranks.run(fail_on_the_last, "is well") == [0, 1]
        with pytest.raises(AssertionError, match=match):
            ranks.run(fail_on_the_last, how, deadline=deadline)
        with pytest.raises(AssertionError, match=r"rank 1 of 2: must end, gave 1"):
            ranks.run(fail_on_the_last, "is well", ending=(1,))
    finally:
        ranks.kill()
