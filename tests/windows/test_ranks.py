"""Windows over ranks: outputs, gradients and bytes against the oracle, rows and pairs against integers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from flexdilated import DilatedPattern
from flexdilated.backends.dense.windows import band_blocks
from flexdilated.core.pieces import UNBOUNDED
from flexdilated.distributed.planner import cost_model, message_rows
from flexdilated.distributed.planner.plan import EXCHANGES, ContextPlan
from tests.backends.mods import Mods
from tests.distributed import functions, simulation
from tests.distributed.cases import ShardedCase, random_case


def drawn(seed: int, num_ranks: int) -> ShardedCase:
    """A random case with a window, alone or beside segments."""
    rng = random.Random(seed)
    case = random_case(seed, num_ranks, longest=70)
    window = rng.choice([2, 3, rng.randint(1, 20), rng.randint(1, 20), case.num_tokens + 5])
    alone = DilatedPattern(window=window, detach_weights=case.pattern.detach_weights)
    return replace(case, pattern=alone if rng.random() < 0.3 else replace(case.pattern, window=window))


def of(window: int, shard_lengths: tuple[int, ...], **options: object) -> ShardedCase:
    """A window beside segments of rate 2, whose gradient takes the weights of branches as constants on request."""
    pattern = DilatedPattern((12,), (2,), window=window, detach_weights=bool(options.pop("detach_weights", False)))
    return ShardedCase(pattern, shard_lengths=shard_lengths, group=2, **options)  # type: ignore[arg-type]


EDGES = {
    "of the query alone": of(1, (7, 5, 11)),
    "over shards shorter than it, some empty": of(9, (3, 0, 2, 1, 0, 5, 3, 11), is_causal=True),
    "of documents that end where shards do": of(5, (7, 5, 11), borders=(0, 7, 7, 12, 23)),
    "of documents in several shards": of(6, (4, 3, 0, 9), is_causal=True, borders=(0, 2, 11, 16)),
    "whose weights are constant, causal": of(7, (3, 17, 2, 5), detach_weights=True, is_causal=True),
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
    for seed in range(4):
        case = drawn(seed, 2 + seed % 3)
        alone = DilatedPattern(window=4, detach_weights=True)
        case = replace(case, pattern=replace(case.pattern, zero_padding=False) if seed else alone)
        functions.check(case, Mods(("table", "alibi", None)[seed % 3], ("thirds", None)[seed % 2], seed), exchange, backend)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_backward_of_a_window_drops_what_the_forward_dropped(exchange: str) -> None:
    """The output is linear in the values: the products of both with their gradients are equal."""
    case = of(6, (9, 4, 12), detach_weights=True)
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


def seen(plan: ContextPlan, rank: int) -> list[tuple[int, int]]:
    """The tokens of the pairs of a window whose queries a rank holds."""
    window = plan.pattern.window
    assert window is not None
    return [
        (i, j)
        for first, tokens in plan.documents
        for i in range(max(first, plan.borders[rank]), min(first + tokens, plan.borders[rank + 1]))
        for j in range(first, i + 1 if plan.is_causal else first + tokens)
        if abs(i - j) < window
    ]


def test_rows_and_pairs_of_a_window_are_added_to_those_of_segments() -> None:
    for seed in range(15):
        case = drawn(seed, 2 + seed % 5)
        plan, pairs = case.plan(), cost_model.pairs(case.plan(), "gather")
        others = replace(case, pattern=replace(case.pattern, window=None)).plan() if case.pattern.segment_lengths else None
        for rank in range(plan.num_ranks):
            held, (found, expected) = range(*plan.borders[rank : rank + 2]), (set(), set())
            for each, into in ((plan, found), (others, expected)):
                for message in () if each is None else message_rows.messages(each, "gather", "kv", rank, sent=False):
                    into.update((h, t) for h, tokens in zip(message.heads.tolist(), message.tokens) for t in tokens.tolist())
            window = seen(plan, rank)
            assert found == expected | {(head, j) for _, j in window if j not in held for head in range(case.kv_heads)}
            pairs[rank] -= len(window) * case.kv_heads
        assert pairs.tolist() == (0 * pairs if others is None else cost_model.pairs(others, "gather")).tolist()
        assert plan.is_local == (not plan.spans("gather", "kv").first.size)
