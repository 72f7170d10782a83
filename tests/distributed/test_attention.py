"""`dilated_attention` over real ranks against the oracle on the whole sequence, with all gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed.planner.plan import EXCHANGES
from tests.cases import differentiate, poisoned_memory, unshifted
from tests.distributed.cases import ShardedCase, arguments, assert_expected, cut, expected_of, random_case, results, shards, simple
from tests.distributed.processes import WORLD_SIZES, Ranks, exactly, one_size, several

RANDOM_CASES = 14


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
    assert any((case.plan().parts("heads").low > 0).any() for case, exchange in moving if exchange == "heads")


@several
@pytest.mark.parametrize(("exchange", "is_causal"), [("gather", True), ("ring", False), ("heads", True), ("heads", False)])
def test_every_exchange_moves_queries_too(ranks: Ranks, exchange: str, is_causal: bool) -> None:
    case = replace(cut(ranks.world_size, is_causal=is_causal), pattern=DilatedPattern.torchscale((9, 20), (3, 5)))
    ranks.run(check_oracle, case, exchange)


@one_size
@pytest.mark.parametrize(("is_causal", "zero_padding"), [(False, False), (True, True), (True, False)])
def test_one_head_is_computed_by_several_ranks(ranks: Ranks, is_causal: bool, zero_padding: bool) -> None:
    """Its queries are dealt to all of them; each gets the keys that these see, and delivers outputs to their owners."""
    case = simple(ranks.world_size, kv_heads=1, group=1, is_causal=is_causal, ignored=0.2)
    case = replace(case, pattern=unshifted(replace(case.pattern, zero_padding=zero_padding)))
    plan = case.plan()
    parts = plan.parts("heads")
    parts = parts.where(plan.all_segments.branch[parts.segment] == 1)
    assert len(parts.executor) == ranks.world_size or ranks.world_size < 3
    ranks.run(check_oracle, case, "heads")


def check_compiled(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    """By inductor: tests/distributed/test_compiled.py."""
    torch._dynamo.reset()
    given = arguments(case, rank, mesh, exchange=exchange)
    attend = torch.compile(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **given), fullgraph=True, backend="aot_eager")
    dlse = expected_of(case)["dlse"][:, :, case.shard(rank)]
    for _ in range(2):
        assert_expected(case, rank, differentiate(attend, *shards(case, rank), dlse))


@pytest.mark.slow
@exactly(3)  # each of the others sends to one rank and receives from another
@pytest.mark.parametrize(
    ("exchange", "options"),
    [
        ("gather", {"batch": 1, "borders": True}),
        ("ring", {"batch": 1, "borders": True, "ignored": 0.3}),
        ("heads", {"ignored": 0.3}),
    ],
    ids=["gather_documents", "ring_documents", "heads_mask"],
)
def test_compiled_exchange_equals_the_oracle(ranks: Ranks, exchange: str, options: dict[str, Any]) -> None:
    case = cut(ranks.world_size, **{name: value for name, value in options.items() if name != "borders"})
    if options.get("borders"):
        case = replace(case, borders=(0, 5, case.num_tokens - 2, case.num_tokens))
    ranks.run(check_compiled, case, exchange)


@pytest.mark.slow
@exactly(1)
def test_compiled_equals_the_oracle_on_a_mesh_of_one_rank(ranks: Ranks) -> None:
    ranks.run(check_compiled, cut(1, is_causal=True), "auto")
