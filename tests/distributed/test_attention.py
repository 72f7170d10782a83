"""`dilated_attention` over real ranks against the oracle on the whole sequence, with all gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed.planner.plan import EXCHANGES
from tests.cases import differentiate, poisoned_memory
from tests.distributed.cases import ShardedCase, arguments, assert_expected, cut, expected_of, random_case, results, shards
from tests.distributed.processes import Ranks, exactly, several

RANDOM_CASES = 8


def drawn(number: int, size: int) -> tuple[ShardedCase, str]:
    """A case and its exchange; the last two have equal shards, which need not be declared."""
    case = random_case(7919 * size + number, size)
    if number > 5:
        length = -(-case.num_tokens // size)
        borders = case.borders and (*case.borders[:-1], length * size)
        case = replace(case, shard_lengths=(length,) * size, borders=borders)
    return case, ("auto", *EXCHANGES)[number % 4]


def check_oracle(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    with poisoned_memory():
        assert_expected(case, rank, results(case, rank, mesh, exchange=exchange))


@pytest.mark.parametrize("number", range(RANDOM_CASES))
def test_ranks_give_what_one_gives_with_all_gradients(ranks: Ranks, number: int) -> None:
    ranks.run(check_oracle, *drawn(number, ranks.world_size))


@several
@pytest.mark.parametrize(("exchange", "is_causal"), [("gather", True), ("ring", False), ("heads", True), ("heads", False)])
def test_every_exchange_moves_queries_too(ranks: Ranks, exchange: str, is_causal: bool) -> None:
    case = replace(cut(ranks.world_size, is_causal=is_causal), pattern=DilatedPattern.torchscale((9, 20), (3, 5)))
    ranks.run(check_oracle, case, exchange)


def check_compiled(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
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
