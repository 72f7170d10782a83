"""Patterns under a budget: what is proposed, in which order, and what is refused."""

import re
from itertools import combinations

import numpy as np
import pytest
from matplotlib.text import Text

from flexdilated import DilatedPattern, choose_pattern
from flexdilated.analysis import Choice, reachable
from flexdilated.draw.choices import RADIUS, draw_choices

GROUPED = DilatedPattern.grouped((4, 8), (1, 2))
BEST = DilatedPattern((16, 512), (1, 4))  # of the experiments with 512 tokens and 8 heads


def branches(choices: tuple[Choice, ...]) -> list[list[tuple[int, int]]]:
    return [[tuple(branch) for branch in each.pattern.branches] for each in choices]


@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "budget", "expected"),
    [
        (
            512,
            8,
            0.1,
            [[(16, 1), (512, 4)], [(32, 1), (512, 8)], [(512, 8), (16,), (4,)], [(24, 1), (120, 4), (144, 4)]],
        ),
        (8192, 8, 0.1, [[(8192, 4), (128,), (4,)], [(256, 1), (8192, 4)], [(8192, 8), (256,), (4,)], [(512, 1), (8192, 8)]]),
        (2**20, 12, 0.003, [[(32, 1), (5824, 2), (5856, 2)], [(128, 1), (11648, 3), (11776, 3)]]),
        (4096, 1, 0.1, [[(4096, 1)]]),
        (1, 1, 0.1, [[(1, 1)]]),
        (8192, 8, 1.0, [[(8192, 1)], [(8192, 2), (3072,), (4,)], [(6144, 1), (8192, 2)]]),
    ],
)
def test_proposals_in_their_order(num_tokens: int, num_kv_heads: int, budget: float, expected: list[list[tuple[int, int]]]) -> None:
    assert branches(choose_pattern(num_tokens, num_kv_heads, budget=budget, is_causal=True).shown)[: len(expected)] == expected


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "budget"), [(61, 3, 0.5), (1000, 8, 0.2), (8191, 12, 0.01), (2**33, 9, 1e-5)]
)
def test_all_that_is_tried_is_connected_and_counted_exactly(
    num_tokens: int, num_kv_heads: int, budget: float, is_causal: bool
) -> None:
    found = choose_pattern(num_tokens, num_kv_heads, budget=budget, is_causal=is_causal)
    assert {each.pattern for each in found.shown} <= {each.pattern for each in found.tried}
    for each in found.tried:
        assert each.pattern.crosses_boundaries(num_tokens, num_kv_heads)
        assert each.pairs == each.pattern.count_pairs(num_tokens, num_kv_heads, is_causal=is_causal)
        assert each.is_within_budget == (each.share <= budget)
        assert each.share <= 1.0
    dense = DilatedPattern((num_tokens,), (1,)).count_pairs(num_tokens, num_kv_heads, is_causal=is_causal)
    assert found.shown[0].share == found.shown[0].pairs / dense


def test_the_cheapest_is_shown_where_none_is_within_the_budget() -> None:
    (only,) = choose_pattern(4096, 8, budget=1e-9).shown
    assert " It is the cheapest: budget=0.0109 would do. A branch over the whole sequence fits budget=" in only.why
    assert choose_pattern(4096, 8, budget=0.0109).shown[0].pattern == only.pattern
    assert not only.is_within_budget
    assert only.pairs == min(each.pairs for each in choose_pattern(4096, 8).tried)


def test_your_patterns_come_last_and_say_what_is_wrong_with_them() -> None:
    mine = (DilatedPattern((64, 256), (1, 4)), BEST, DilatedPattern((64, 512), (1, 16)))
    found = choose_pattern(512, 8, is_causal=True, patterns=mine, most=1)
    assert [each.is_given for each in found.shown] == [False, True, True, True]
    parted, best, missing = found.shown[1:]
    assert " Not connected: not all information from tokens 0 to 255 reaches the tokens from 256 on;" in parted.why
    assert " At rate 16, some tokens are kept by no head; use rates that divide the 8 key/value heads. " in missing.why
    for choice in found.shown[1:]:
        share, *sentences = choice.pattern.describe(512, 8, is_causal=True).splitlines()
        assert (f"{100 * choice.share:.3g} % of dense attention.", choice.why) == (share, " ".join(sentences))
    assert best.why.endswith(" Connected: causal information crosses all boundaries.")


def test_sentences() -> None:
    window, two, *_, three = choose_pattern(512, 8).shown
    far = "In each head, 1 in 4 of all 512 tokens also read each other; groups of 2 key/value heads keep the same tokens."
    assert window.why == f"Each token reads itself and 7 tokens on each side. {far}"
    assert two.why == f"Each token reads its segment of 16 tokens. {far}"
    assert three.why == (
        "Each token reads its segment of 24 tokens. In each head, 1 in 4 tokens of each segment of 120 or 144 also read "
        "each other; groups of 2 key/value heads keep the same tokens. No segment is as long as the sequence: a token has "
        "seen all tokens after 8 layers."
    )


def test_sentences_of_causal_patterns_name_no_later_token() -> None:
    found = choose_pattern(512, 8, is_causal=True).shown
    assert all(" No token reads later tokens." in each.why for each in found)
    assert found[2].why.startswith("Each token reads a window of 16 tokens and the first 4. In each head, ")
    beyond = " No segment is as long as the sequence: "
    unseen = np.tril(~reachable(found[3].pattern, 512, 8, layers=64, is_causal=True))
    assert 0 < max(q - k for q, k in np.argwhere(unseen)) <= 6
    but = "a token has seen all earlier tokens after several layers, except perhaps some of the 6 tokens just before it."
    assert found[3].why.endswith(beyond + but)
    far = choose_pattern(2**33, 9, budget=1e-5).shown[0]
    assert beyond + "it takes several layers to see far tokens." in far.why
    dense = [choose_pattern(9, 1, budget=1.0, is_causal=is_causal).shown[0].why for is_causal in (False, True)]
    assert dense == [f"Dense attention: every token reads {what}." for what in ("all tokens", "itself and all tokens before it")]


MINE = (BEST, DilatedPattern((17, 512), (1, 4)), DilatedPattern((16, 500), (1, 4)))


@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "is_causal", "patterns"),
    [
        (512, 8, True, MINE),
        (4096, 4, True, ()),
        (65536, 12, False, (DilatedPattern.longnet(),)),
        (4096, 1, False, ()),
        (8192, 64, True, ()),
    ],
)
def test_numbers_in_the_picture_cover_nothing_and_lead_to_their_circles(
    num_tokens: int, num_kv_heads: int, is_causal: bool, patterns: tuple[DilatedPattern, ...]
) -> None:
    found = choose_pattern(num_tokens, num_kv_heads, is_causal=is_causal, patterns=patterns)
    figure = draw_choices(found)
    figure.canvas.draw()
    (axes,) = figure.axes
    numbers = axes.texts
    assert [text.get_text() for text in numbers] == [str(i + 1) for i in range(len(found.shown))]
    boxes = [Text.get_window_extent(text) for text in numbers]  # without the lines
    ticks = [label for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels() if label.get_text()]
    around = [axes.title, axes.xaxis.label, axes.yaxis.label, *figure.legends[0].get_texts(), *ticks]
    for a, b in combinations([*boxes, *(text.get_window_extent() for text in around)], 2):
        assert not a.overlaps(b) or (a not in boxes and b not in boxes)
    places = [(100 * each.share, max(1, each.local)) for each in found.shown]
    centers = axes.transData.transform(places)
    for text, box, place, center in zip(numbers, boxes, places, centers):
        assert text.xy == place
        vertices = text.arrow_patch.get_path().vertices  # the line ends at the rim of its own circle
        radius = RADIUS * figure.dpi / 72
        assert np.linalg.norm(vertices - center, axis=1).min() == pytest.approx(radius, rel=0.05)
        assert not any(box.contains(*other) for other in centers)


def test_the_legend_of_the_picture_names_far_rates() -> None:
    found = choose_pattern(512, 8, is_causal=True, patterns=MINE)
    labels = [text.get_text() for text in draw_choices(found).legends[0].get_texts()]
    assert labels == ["dense", "far rate 2", "far rate 4", "far rate 8", "window", "budget", "proposed, 1 = best", "yours"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_tokens": 0}, ValueError, "num_tokens must be at least 1, got 0"),
        ({"num_tokens": 2**40 + 1}, ValueError, f"num_tokens must be at most {2**40}, got {2**40 + 1}"),
        ({"num_kv_heads": 1025}, ValueError, "num_kv_heads must be at most 1024, got 1025"),
        ({"budget": 0.0}, ValueError, "budget must be in (0, 1], got 0.0; 0.1 or 10% is a tenth of the pairs of dense attention"),
        ({"budget": float("nan")}, ValueError, "budget must be in (0, 1], got nan"),
        ({"budget": "10%"}, TypeError, "budget must be a number, got '10%'"),
        ({"most": 0}, ValueError, "most must be at least 1, got 0"),
        ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
        ({"patterns": BEST}, TypeError, "patterns must be a sequence, got DilatedPattern"),
        ({"patterns": [5]}, TypeError, "pattern must be a DilatedPattern, got int"),
        ({"patterns": [GROUPED], "num_kv_heads": 1}, ValueError, "pattern must have at most one branch"),
    ],
)
def test_refuses(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^{re.escape(message)}"):
        choose_pattern(**{"num_tokens": 61, "num_kv_heads": 3, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "heads", "budget"), [(4096, 8, 0.01), (1000, 2, 0.2), (131072, 16, 0.003)])
def test_the_budget_of_a_branch_over_the_whole_sequence_is_said_where_none_fits(tokens: int, heads: int, budget: float) -> None:
    first = choose_pattern(tokens, heads, budget=budget, is_causal=True).shown[0]
    assert "No segment is as long as the sequence" in first.why
    fits = float(first.why.removesuffix(".").rpartition("fits budget=")[2])
    shown = choose_pattern(tokens, heads, budget=fits, is_causal=True, most=99).shown
    assert any(max(choice.pattern.segment_lengths) >= tokens for choice in shown)
