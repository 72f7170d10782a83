"""Who computes heads of cut segments: by units of work, one after another, to the rank that has the least."""

import math
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from flexdilated import DilatedPattern
from flexdilated.distributed.planner import cost_model, load_balance
from flexdilated.distributed.planner.plan import ContextPlan, context_plan
from tests.distributed.plans import MILLION, owner, plan_of, plans


def one_by_one(pairs: list[int], most: list[int], total: int) -> list[int]:
    """Each unit of work to the rank that has the least, of those that may take more."""
    taken = [0] * len(pairs)
    for _ in range(total):
        rank = min((r for r in range(len(pairs)) if taken[r] < most[r]), key=lambda r: pairs[r] + taken[r])
        taken[rank] += 1
    return taken


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=2, max_size=7), st.integers(1, 80))
@example([(0, 1), (0, 1), (0, 1)], 1)  # less than one unit each
@example([(0, 9), (60, 1)], 40)  # all of it to the first
@example([(0, 9), (50, 1)], 80)  # the one with the least takes no more than five quarters of its part
def test_shares_are_those_of_units_that_go_to_the_rank_with_the_least(ranks: list[tuple[int, int]], total: int) -> None:
    pairs, tokens = (list(column) for column in zip(*ranks))
    most = [math.ceil(Fraction(5 * (total + 1) * held, 4 * sum(tokens))) for held in tokens]
    expected = one_by_one(pairs, most, total + 1)
    level = max(pair + share for pair, share in zip(pairs, expected) if share)
    # The others are filled to the level of the last unit.
    filled = [min(limit, max(0, level - pair)) for pair, limit in zip(pairs, most)]
    assert load_balance._shares(pairs, tokens, total) == filled
    assert all(0 <= share - unit <= 1 for share, unit in zip(filled, expected))


def test_a_rank_with_one_of_many_tokens_takes_a_unit_at_least() -> None:
    assert load_balance._shares([0, 500], [1, 1 << 28], 1000) == [1, 1000]


@given(st.lists(st.integers(0, 50), min_size=2, max_size=6).filter(any), st.integers(1, 5), st.integers(1, 300), st.booleans())
@example([1, 1], 1, 300, True)
@example([1, 63], 1, 300, False)  # less than a 32nd
def test_intervals_end_where_their_share_of_the_pairs_does(parts: list[int], heads: int, asked: int, is_causal: bool) -> None:
    """Within a row, but for what would be less than a 32nd of the queries that a rank takes of a head."""
    ends = load_balance._ends(np.array(parts), heads, asked, is_causal=is_causal)
    assert ends == sorted(ends)
    assert ends[-1] == heads * asked
    done = 0
    for share, end in zip(parts, ends):
        done += share
        exact = Fraction(done * heads, sum(parts))  # heads, and a part of one
        place, rest = int(exact), float(exact - int(exact))
        row = asked * (math.sqrt(rest) if is_causal else rest)
        least = 32 * math.ceil(len(parts) / heads)
        small = min(row, asked - row) < asked / least + 0.5
        at = end - place * asked
        assert abs(at - row) <= 0.5 + 1e-9 or (small and at in (0, asked))
        assert at % asked == 0 or least * min(at, asked - at) >= asked


@given(plans())
def test_ranks_take_parts_of_segments_that_they_hold_tokens_of(plan: ContextPlan) -> None:
    parts = plan.parts("heads")
    for index, _, places, rank, low, high in zip(*(x.tolist() for x in parts.where(plan.assigned[parts.segment]))):
        start, tokens = int(plan.all_segments.token[index]), int(plan.all_segments.size[index])
        assert places == 1 or (low, high) == (0, tokens)
        assert rank in {owner(plan, token) for token in range(start, start + tokens)}


@pytest.mark.parametrize("is_causal", [False, True])
def test_narrow_segments_are_dealt_before_the_wide_ones_that_level_them(is_causal: bool) -> None:
    ratios = []
    for lengths in ((320, 640), (640, 320)):
        plan = plan_of(DilatedPattern(lengths, (1, 1)), 640, 10, 8, is_causal=is_causal)
        assert plan.assigned.all()
        pairs = cost_model.pairs(plan, "heads")
        ratios.append(pairs.max() / pairs.mean())
    assert ratios[0] == ratios[1]
    assert ratios[0] < 1.03


@pytest.mark.parametrize("is_causal", [False, True])
def test_far_pairs_are_assigned_without_near_ones(is_causal: bool) -> None:
    plan = plan_of(DilatedPattern((6400,), (2,), window=900, global_tokens=50), 6400, 10, 4, is_causal=is_causal)
    pairs = cost_model.pairs(plan, "heads")
    assert plan.assigned.all()
    assert pairs.max() < 1.05 * pairs.mean()
    assert pairs.sum() == plan.pattern.count_pairs(6400, 4, is_causal=is_causal)


def test_one_causal_head_over_many_ranks_is_cut_by_its_queries() -> None:
    plan = plan_of(DilatedPattern((MILLION,), (16,)), MILLION, 16, 1, is_causal=True)
    parts = plan.parts("heads")
    assert parts.executor.tolist() == list(range(16))
    assert parts.low.tolist() == [0, *parts.high[:-1].tolist()]
    rows = parts.high // 16
    assert np.abs(rows - np.rint(MILLION // 16 * np.sqrt(np.arange(1, 17) / 16))).max() <= 1
    assert cost_model.pairs(plan, "heads").max() < 1.001 * cost_model.pairs(plan, "heads").mean()
    assert context_plan(plan.pattern, plan.shard_lengths, 1, range(1), 1, plan.documents, True) is plan
