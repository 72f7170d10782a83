"""Choosing a pattern: the goals are met, the budget is kept, the order is what it is said to be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from flexdilated import DilatedPattern
from flexdilated.analysis import balance, choose_pattern, count_rank_costs, count_uncovered, missing_residues, reachable
from flexdilated.analysis.choice import MEASURES, Goal, Measure
from flexdilated.draw.choices import draw_choices


def test_what_is_shown_meets_the_goals_within_the_budget() -> None:
    found = choose_pattern(307, 5, budget=200_000)
    assert found.goals == ("reach", "cover", "balance")
    assert [each.layers for each in found.shown] == sorted(each.layers or 0 for each in found.shown)
    for each in found.shown:
        assert each.cost == each.pairs == each.pattern.count_pairs(307, 5) <= 200_000
        assert each.layers is not None
        assert reachable(each.pattern, 307, 5, layers=each.layers).all()
        assert not reachable(each.pattern, 307, 5, layers=each.layers - 1).all()
        assert each.uncovered == count_uncovered(each.pattern, 307, 5) == 0
        assert not any(missing_residues(each.pattern, 5))
        assert each.imbalance == balance(each.pattern, 307, 5).imbalance <= 1.05
        assert each.why.endswith(".")
        assert not any(word in each.why for word in ("quality", "accura", "better"))
    first = found.shown[0]
    for other in found.tried:
        if other.within_budget:
            assert (first.layers, -first.window, first.cost) <= (other.layers, -other.window, other.cost)
    assert "tried" not in repr(found)  # hundreds of patterns, where a prompt shows the value
    assert min(other.cost for other in found.tried) == min(each.cost for each in found.shown)


def test_a_pattern_of_the_callers_is_placed_and_told_what_it_misses() -> None:
    local = DilatedPattern((32,), (1,))
    wide = DilatedPattern((64, 512), (1, 2))
    dense = DilatedPattern((512,), (1,))
    found = choose_pattern(512, 4, budget=500_000, patterns=[local, wide, dense])
    whys = {each.pattern: each.why for each in found.shown if each.is_given}
    assert whys[local] == "Yours. It misses: reach (every token sees every other)."
    assert whys[wide].startswith("Yours. It meets the goals for 78.6 % of the budget; 6 of those tried come before it.")
    assert whys[dense].startswith("Yours. It meets the goals at 2.1 times the budget.")
    assert found.shown[-1].pattern == local
    assert [each.within_budget for each in found.shown].index(False) == len(found.shown) - 2


def test_rows_that_no_head_keeps_are_told_and_never_come_first_where_coverage_is_a_goal() -> None:
    kept = choose_pattern(4099, 6, budget=10**7)
    assert all(each.within_budget and not each.partial for each in kept.shown)
    assert {rate for each in kept.tried for rate in each.pattern.dilation_rates} == {1, 2, 6}  # which 6 heads keep in whole
    for each in kept.tried:
        assert not any(missing_residues(each.pattern, 6))
    assert kept.shown[-1].pattern.dilation_rates[-1] == 6  # as many heads as rows: the cheapest that leaves none out
    short = choose_pattern(4099, 6, budget=2_000_000)
    nearest, *others = short.shown
    assert (nearest.within_budget, nearest.unmet, nearest.partial) == (False, (), ())
    assert nearest.why.startswith("None meets the goals within the budget; this one comes nearest, at ")
    assert others
    for each in others:
        assert (each.within_budget, each.unmet) == (True, ("cover",))
        assert each.partial == tuple(b for b, missing in zip(each.pattern.branches, missing_residues(each.pattern, 6)) if missing)
        rates = [str(branch.dilation_rate) for branch in each.partial]
        assert f" At rate{'s' * (len(rates) > 1)} {', '.join(rates)} no head keeps some of the rows of th" in each.why
    free = choose_pattern(4099, 6, budget=2_000_000, goals=["reach", "balance"])
    assert free.shown[0].partial
    assert "no head keeps some of the rows" in free.shown[0].why
    assert len(short.shown) <= 5
    assert len(choose_pattern(4099, 6, budget=2_000_000, most=1).shown) == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_who_gives_no_budget_gets_that_of_published_attention(is_causal: bool) -> None:
    for num_tokens, whose in ((2500, "as dense attention"), (8209, "as LongNet's published pattern")):
        found = choose_pattern(num_tokens, 4, is_causal=is_causal)
        dense = 4 * (num_tokens * (num_tokens + 1) // 2 if is_causal else num_tokens**2)
        longnet = DilatedPattern.longnet().count_pairs(num_tokens, 4, is_causal=is_causal)
        assert (found.budget, found.budget_of) == (min(dense, longnet), whose)
    options: dict[str, Any] = {"num_ranks": 3, "head_dim": 8, "dtype": "float32"}
    ways = count_rank_costs(DilatedPattern((131,), (1,)), 131, 3, 3, head_dim=8, dtype="float32", is_causal=is_causal)
    (way,) = (way for way in ways.values() if way.is_chosen)
    found = choose_pattern(131, 3, measure="memory", is_causal=is_causal, **options)
    assert (found.budget, found.budget_of) == (way.memory_bytes, "as dense attention")
    found = choose_pattern(131, 3, measure="traffic", is_causal=is_causal, **options)
    assert (found.budget, found.budget_of) == (way.both_bytes // 10, "a tenth of dense attention's")
    assert choose_pattern(131, 3, measure="traffic").budget == 1  # one rank receives nothing
    assert choose_pattern(131, 3, budget=7).budget_of is None


def test_fewer_layers_fewer_choices_and_a_budget_too_small_shows_the_nearest() -> None:
    few = choose_pattern(307, 5, budget=200_000, layers=2)
    assert {each.layers for each in few.tried} <= {1, 2}
    (nearest,) = choose_pattern(307, 5, budget=7).shown
    assert not nearest.within_budget
    assert nearest.why.startswith("None meets the goals within the budget; this one comes nearest, at ")
    only = choose_pattern(307, 5, budget=200_000, most=1)
    assert only.shown == choose_pattern(307, 5, budget=200_000).shown[:1]


@pytest.mark.parametrize("measure", ["memory", "traffic"])
def test_other_measures_are_the_planners(measure: Measure) -> None:
    found = choose_pattern(127, 3, budget=10**6, measure=measure, num_ranks=3, head_dim=8, dtype="float32")
    for each in found.shown:
        ways = count_rank_costs(each.pattern, 127, 3, 3, head_dim=8, dtype="float32")
        (way,) = (way for way in ways.values() if way.is_chosen)
        assert each.cost == (way.memory_bytes if measure == "memory" else way.both_bytes)


def test_causal_patterns_are_ordered_by_their_span() -> None:
    found = choose_pattern(1021, 3, budget=3 * 1021 * 300, is_causal=True)
    assert found.goals == ("cover", "balance")
    spans = [each.span for each in found.shown if each.layers is None and "cheapest" not in each.why]
    assert all(a > b for a, b in pairwise(spans))
    assert spans[0] == 1021


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_as_dear_as_dense_attention_is_shown(measure: Measure, is_causal: bool) -> None:
    found = choose_pattern(4099, 6, measure=measure, is_causal=is_causal, num_ranks=4)
    assert found.dense_pairs == 6 * (4099 * 4100 // 2 if is_causal else 4099**2)
    assert found.tried
    for each in found.tried:
        assert each.pairs < found.dense_pairs
        assert len(each.pattern.branches) > 1 or not is_causal  # a lone window sees nothing beyond itself
    given = DilatedPattern((4099,), (1,))  # of the caller's all the same
    mine = choose_pattern(4099, 6, measure=measure, is_causal=is_causal, num_ranks=4, patterns=[given])
    assert given in [each.pattern for each in mine.shown]


def test_one_token_and_one_head_have_an_answer() -> None:
    assert choose_pattern(1, 1, budget=1).shown[0].layers == 0


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_documents_cost_what_all_of_them_do_and_reach_as_far_as_the_longest(measure: Measure, is_causal: bool) -> None:
    documents = [61, 7, 0, 127, 61]
    options: dict[str, Any] = {"is_causal": is_causal, "document_lengths": documents}
    given = DilatedPattern((31, 128), (3, 3))  # of which two heads keep a part
    found = choose_pattern(256, 2, measure=measure, num_ranks=3, head_dim=8, patterns=[given], **options)
    assert found.document_lengths == (61, 7, 0, 127, 61)
    assert found.dense_pairs == 2 * sum(n * (n + 1) // 2 if is_causal else n * n for n in documents)
    for each in found.tried:
        assert each.pairs == sum(each.pattern.count_pairs(n, 2, is_causal=is_causal) for n in documents if n)
        assert each.span == min(127, max(each.pattern.segment_lengths))
        if measure != "pairs":
            ways = count_rank_costs(each.pattern, 256, 2, 3, head_dim=8, **options)
            (way,) = (way for way in ways.values() if way.is_chosen)
            assert each.cost == (way.memory_bytes if measure == "memory" else way.both_bytes)
        if not is_causal:
            assert each.layers is not None
            assert reachable(each.pattern, 127, 2, layers=each.layers).all()
            assert not reachable(each.pattern, 127, 2, layers=each.layers - 1).all()
    (mine,) = (each for each in found.shown if each.is_given)
    assert mine.uncovered == sum(count_uncovered(given, n, 2) for n in documents if n) > 0
    assert choose_pattern(127, 2, document_lengths=[127]) == choose_pattern(127, 2)


def test_a_causal_pattern_whose_borders_part_says_after_how_many_layers_it_reaches() -> None:
    mine = DilatedPattern((8, 9, 40), (1, 1, 4))
    found = choose_pattern(40, 4, is_causal=True, budget=10**6, patterns=[mine])
    (own,) = (each for each in found.shown if each.is_given)
    assert own.layers is not None
    assert reachable(mine, 40, 4, layers=own.layers, is_causal=True)[np.tril(np.ones((40, 40), np.bool_))].all()
    assert f" Every token has seen every earlier one after {own.layers} layers." in own.why
    assert all(each.layers is None for each in found.tried)


def test_rows_of_packed_documents_travel_less_than_those_of_one() -> None:
    pattern = DilatedPattern((64, 512), (1, 2))
    one = count_rank_costs(pattern, 512, 4, 4)["gather"]
    packed = count_rank_costs(pattern, 512, 4, 4, document_lengths=[128] * 4)["gather"]
    assert packed.both_bytes == 0 < one.both_bytes  # each document lies on one rank
    with pytest.raises(ValueError, match=r"^batch must be 1 with document_lengths, which pack a batch in one sequence, got 2"):
        count_rank_costs(pattern, 512, 4, 4, document_lengths=[128] * 4, batch=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"document_lengths": [5, 7]},
            "document_lengths must add up to num_tokens=11, each at least 0, got 12, the least 5",
        ),
        ({"budget": 0}, "budget must be at least 1, got 0"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"most": 0}, "most must be at least 1, got 0"),
        ({"goals": ["speed"]}, r"goals must be among \('reach', 'cover', 'balance'\), got 'speed'"),
        ({"goals": ["cover"], "layers": 3}, "layers must come with the goal 'reach', got 3"),
        (
            {"goals": ["reach"], "is_causal": True},
            r"goals must not hold 'reach' with is_causal=True, got \('reach',\); leave it out",
        ),
        ({"measure": "seconds"}, r"measure must be one of \('pairs', 'memory', 'traffic'\), got 'seconds'"),
        ({"dtype": "int8"}, r"dtype must be one of \('float32', .*, got 'int8'"),
    ],
)
def test_refuses_what_has_no_answer(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_pattern(11, 2, **{"budget": 99, **options})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_tokens must be at most 2\*\*40"):
        choose_pattern(2**40 + 1, 2, budget=99)


def test_rank_costs_are_those_of_the_plan_and_refuse_bad_numbers() -> None:
    ways = count_rank_costs(DilatedPattern.longnet(), 1_048_576, 12, 8)
    assert ways["gather"].both_bytes == 0
    assert ways["ring-all"].forward_bytes == 917_504 * 12 * 2 * 64 * 2
    assert "ulysses" not in ways
    assert [name for name, way in ways.items() if way.is_ours] == ["gather", "ring", "heads"]
    with pytest.raises(ValueError, match="group must be at least 1, got 0"):
        count_rank_costs(DilatedPattern((5,), (1,)), 11, 1, 1, group=0)
    with pytest.raises(ValueError, match="dtype must be one of"):
        count_rank_costs(DilatedPattern((5,), (1,)), 11, 1, 1, dtype="int8")


@pytest.mark.parametrize("goals", [None, ()])
def test_the_picture_has_a_legend_entry_for_everything_in_it(goals: tuple[Goal, ...] | None) -> None:
    found = choose_pattern(307, 5, budget=200_000, goals=goals, patterns=[DilatedPattern((64, 512), (1, 2))])
    figure = draw_choices(found)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    expected = {"never all" if each.layers is None else f"{each.layers} layer{'s' * (each.layers != 1)}" for each in found.tried}
    assert set(labels) == expected | {"budget", "yours"}
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == [str(i + 1) for i in range(len(found.shown))]
    assert (axes.get_xlabel(), axes.get_title()) == ("pairs", "307 tokens, 5 heads, not causal")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 1e6}, r"budget must be an integer, got 1000000\.0"),
        ({"layers": "2"}, "layers must be an integer, got '2'"),
        ({"most": 2.5}, r"most must be an integer, got 2\.5"),
        ({"head_dim": True}, "head_dim must be an integer, got True"),
        ({"num_ranks": 2.0}, r"num_ranks must be an integer, got 2\.0"),
        ({"is_causal": "no"}, "is_causal must be a bool, got 'no'"),
        ({"goals": "reach"}, "goals must be a sequence, got 'reach'; put one in a tuple"),
        ({"goals": 5}, "goals must be a sequence, got 5"),
        ({"patterns": DilatedPattern((4,), (1,))}, r"patterns must be a sequence, got DilatedPattern\(.*; put one in a tuple"),
    ],
)
def test_refuses_other_types_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        choose_pattern(11, 2, **options)  # type: ignore[arg-type]


def test_refuses_what_would_take_minutes_or_leave_64_bits() -> None:
    with pytest.raises(ValueError, match=r"^num_heads must be at most 1024, got 1025"):
        choose_pattern(11, 1025)
    with pytest.raises(ValueError, match=r"^num_ranks must be at most 64, got 65"):
        choose_pattern(11, 2, num_ranks=65, measure="traffic")
    with pytest.raises(ValueError, match=r"^head_dim must be at most 4096, got 1000"):
        choose_pattern(11, 2, head_dim=10**30, measure="memory")
    with pytest.raises(NotImplementedError, match=r"^dilation_rates must be at most 1048576 to list residues, got"):
        choose_pattern(11, 2, patterns=[DilatedPattern((2**40,), (2**39,))])


def test_takes_integers_of_numpy_and_names_a_goal_once() -> None:
    expected = choose_pattern(1009, 3, budget=10**6, goals=["cover"])
    found = choose_pattern(np.int16(1009), np.int8(3), budget=np.int32(10**6), goals=["cover", "cover"])  # type: ignore[arg-type]
    assert found == expected
