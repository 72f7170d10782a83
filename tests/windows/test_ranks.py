"""Windows over ranks: outputs, gradients and bytes against the oracle, rows and pairs against integers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern
from flexdilated.backends.dense.windows import band_blocks
from flexdilated.core.pieces import UNBOUNDED
from flexdilated.distributed.planner import cost_model, message_rows
from flexdilated.distributed.planner.plan import EXCHANGES, KINDS, ContextPlan
from flexdilated.reference import joined_rows
from tests.backends.mods import Mods
from tests.distributed import functions, simulation
from tests.distributed.cases import ShardedCase, random_case


def drawn(seed: int, num_ranks: int) -> ShardedCase:
    """A random case with a window, global tokens or both, alone or beside segments."""
    rng = random.Random(seed)
    case = random_case(seed, num_ranks, longest=70)
    window = rng.choice([2, 3, rng.randint(1, 20), rng.randint(1, 20), case.num_tokens + 5])
    first = rng.choice([0, 0, 1, rng.randint(1, 9), rng.randint(1, 30), case.num_tokens + 5])
    near: dict[str, Any] = {"window": None if first and rng.random() < 0.3 else window, "global_tokens": first}
    beside = replace(case.pattern, zero_padding=False, detach_weights=False, **near)
    return replace(case, pattern=DilatedPattern(**near) if rng.random() < 0.3 else beside)


def of(window: int | None, shard_lengths: tuple[int, ...], *, global_tokens: int = 0, **options: Any) -> ShardedCase:
    """Near pairs beside segments of rate 2."""
    pattern = DilatedPattern((12,), (2,), window=window, global_tokens=global_tokens)
    return ShardedCase(pattern, shard_lengths=shard_lengths, group=2, **options)


EDGES = {
    "of the query alone": of(1, (7, 5, 11)),
    "over shards shorter than it, some empty": of(9, (3, 0, 2, 1, 0, 5, 3, 11), is_causal=True),
    "of documents that end where shards do": of(5, (7, 5, 11), borders=(0, 7, 7, 12, 23)),
    "of documents in several shards": of(6, (4, 3, 0, 9), is_causal=True, borders=(0, 2, 11, 16)),
    "beside global tokens of several shards": of(4, (3, 0, 2, 17, 5), global_tokens=7, ignored=0.2),
    "beside global tokens of several shards, causal": of(7, (3, 17, 2, 5), global_tokens=21, is_causal=True),
    "beside global tokens of documents": of(3, (3, 0, 17, 5), global_tokens=4, borders=(0, 6, 6, 18, 25)),
    "over shards shorter than it, beside global tokens": of(9, (3, 0, 2, 1, 0, 5, 3, 11), global_tokens=2),
    "none, and all tokens global": of(None, (5, 7, 0, 3), global_tokens=99),
    "as long as a shard": of(8, (8, 8, 8), ignored=0.5),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_windows_over_ranks(edge: str, exchange: str) -> None:
    simulation.check(EDGES[edge], exchange)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_windows_over_more_ranks_give_what_one_gives(exchange: str) -> None:
    for seed in range(6):
        simulation.check(drawn(seed, 4 + seed % 2), exchange)


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("exchange", functions.EXCHANGES)
def test_functions_see_positions_of_windows_over_ranks(exchange: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "flex":
        functions.emulate(monkeypatch)
    monkeypatch.setattr("flexdilated.distributed.runtime.score_mod.MOST_CHUNK", 3)  # queries of a task: several chunks
    for seed in range(5):
        case = drawn(seed, 2 + seed % 3) if seed else EDGES["over shards shorter than it, beside global tokens"]
        functions.check(case, Mods(("table", "alibi", None)[seed % 3], ("thirds", None)[seed % 2], seed), exchange, backend)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_backward_of_near_pairs_drops_what_the_forward_dropped(exchange: str) -> None:
    """The output is linear in the values: the products of both with their gradients are equal."""
    case = of(6, (9, 4, 12), global_tokens=3)
    found, *_ = simulation.simulate(case, exchange, dropout_p=0.4, seed=5)
    given = case.named()
    torch.testing.assert_close((found["out"] * given["dout"]).sum(), (found["dv"] * given["v"]).sum())
    assert not torch.allclose(found["out"], case.expected()["out"])


def test_kernel_calls_of_a_band_are_its_pairs_and_no_row_without_a_key() -> None:
    rng = random.Random(3)
    for _ in range(150):
        queries, keys = (sorted(rng.choices(range(24), k=2)) for _ in range(2))
        low, high = rng.choice([-UNBOUNDED, rng.randint(-9, 2)]), rng.choice([UNBOUNDED, rng.randint(2, 9)])
        found: Counter[tuple[int, int]] = Counter()
        for block in band_blocks((queries[0], queries[1]), (keys[0], keys[1]), (low, high)):
            pairs = [
                (i, j)
                for row, i in enumerate(range(block.rows.start, block.rows.stop))
                for column, j in enumerate(range(block.columns.start, block.columns.stop))
                if not (block.is_causal and column > row)
                and not (block.band and not block.band[0] <= column - row <= block.band[1])
            ]
            assert {i for i, _ in pairs} == set(range(block.rows.start, block.rows.stop))
            found.update(pairs)
        assert found == Counter((i, j) for i in range(*queries) for j in range(*keys) if low <= j - i <= high)


def far_executors(plan: ContextPlan, branch: int, head: int, exchange: str) -> dict[int, int]:
    """The rank that computes the pairs of a query of cut segments, where it is another than the query's."""
    parts, found = plan.parts(exchange), {}
    for number, place, places, rank, low, high in zip(*(column.tolist() for column in parts)):
        segment = plan.all_segments.where(number)
        if segment.branch == branch and head in [held for held, _ in plan.branch_heads[branch].heads[place : place + places]]:
            found |= dict.fromkeys(range(int(segment.token) + low, int(segment.token) + high), rank)
    return found


def computed(plan: ContextPlan, exchange: str) -> Iterator[tuple[int, int, int, int]]:
    """Every pair as the definition has it, with the rank that computes it: `(rank, head, query, key)`."""
    holder = [rank for rank, length in enumerate(plan.shard_lengths) for _ in range(length)]
    for branch in range(len(plan.pattern.branches)):
        for start, num_tokens in plan.documents:
            _, joined = joined_rows(plan.pattern, branch, num_tokens, plan.num_kv_heads, is_causal=plan.is_causal)
            for head in range(plan.num_kv_heads):
                ranks = far_executors(plan, branch, head, exchange) if branch < len(plan.lengths) else {}
                for i, j in joined[head].nonzero().tolist():
                    # Without causality, global tokens travel as queries.
                    is_at_key = branch >= len(plan.lengths) and not plan.is_causal and i < plan.pattern.global_tokens
                    rank = holder[start + j] if is_at_key else ranks.get(start + i, holder[start + i])
                    yield rank, head, start + i, start + j


@pytest.mark.parametrize("exchange", ["gather", "heads"])
def test_rows_and_pairs_are_those_that_the_definition_needs(exchange: str) -> None:
    # Queries in the middle have no far key.
    without_far_keys = replace(of(23, (13, 13, 14)), pattern=DilatedPattern((40,), (2,), window=23), group=1)
    for case in (without_far_keys, *(drawn(seed, 2 + seed % 5) for seed in range(40))):
        plan = case.plan()
        pairs = [0] * plan.num_ranks
        rows: dict[str, list[set[tuple[int, int]]]] = {kind: [set() for _ in pairs] for kind in KINDS}
        for rank, head, query, key in computed(plan, exchange):
            pairs[rank] += 1
            for kind, token in (("q", query), ("kv", key)):
                if token not in range(*plan.limits[rank : rank + 2]):
                    rows[kind][rank].add((head, token))
        assert cost_model.pairs(plan, exchange).tolist() == pairs
        for kind, rank in product(KINDS, range(plan.num_ranks)):
            found = {
                (head, token)
                for message in message_rows.messages(plan, exchange, kind, rank, sent=False)
                for head, tokens in zip(message.heads.tolist(), message.tokens)
                for token in tokens.tolist()
            }
            assert found == rows[kind][rank]
        assert exchange == "heads" or plan.is_local == (not any(map(len, rows["kv"] + rows["q"])))
