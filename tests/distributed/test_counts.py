"""Rows between ranks against a set of every token of every head, and how much is looked at for them."""

import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from flexdilated.distributed import counts as counting
from flexdilated.distributed import lines, progressions
from flexdilated.distributed.counts import Counter, _names
from flexdilated.distributed.lines import Line
from flexdilated.distributed.spans import Kept, Spans

NUM_RANKS = 3
HEADS = (0, 1, 7, 8, 15, 16, 40, 63, 64, 65, 130)

WAYS_OF_LINES = ("count_between", "_count_cells", "_seen")

Span = tuple[int, ...]  # as the fields of `Spans`; without a period, it is the rate


def complete(found: list[Span], kept: list[Kept]) -> list[Span]:
    return [span if len(span) == 11 else (*span, kept[span[0]].rate) for span in found]


def spans_of(found: list[Span], kept: list[Kept]) -> Spans:
    return Spans(*np.array(complete(found, kept), np.int64).reshape(-1, 11).T)


def definition(found: list[Span], kept: list[Kept]) -> list[tuple[int, int, int]]:
    """(receiver, sender, rows) of the pairs of ranks that exchange any, ascending."""
    sets: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for branch, receiver, sender, first, end, origin, residue, residues, place, places, period in complete(found, kept):
        rate, heads = kept[branch]
        for head, offset in heads[place : place + places]:
            tokens = (token for token in range(first, end) if (token - origin) % period % rate == offset)
            if (offset - residue) % rate < residues:
                sets.setdefault((receiver, sender), set()).update((head, token) for token in tokens)
    return sorted((*pair, len(members)) for pair, members in sets.items() if members)


def count(counter: Counter, found: list[Span]) -> list[tuple[int, int, int]]:
    return list(zip(*(x.tolist() for x in counter.count(spans_of(found, list(counter._lines.kept))))))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Span], list[Kept]]:
    """Spans of up to three branches between ranks, of all offsets and heads or some; of one branch those of a head are disjoint."""
    kept = []
    for _ in range(draw(st.integers(1, 3))):
        rate = draw(st.integers(1, 7))
        heads = sorted(draw(st.sets(st.sampled_from(HEADS), min_size=1, max_size=5)))
        kept.append(Kept(rate, tuple((head, draw(st.integers(0, rate - 1))) for head in heads)))
    pairs = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=3, unique=True))
    found = []
    for branch, (rate, heads) in enumerate(kept):
        for pair in pairs:
            edges = sorted(draw(st.sets(st.integers(0, 70), max_size=6)))
            for first, end in zip(edges[::2], edges[1::2]):
                whole = draw(st.booleans())
                residues = rate if whole else draw(st.integers(1, rate))
                places = len(heads) if whole else draw(st.integers(1, len(heads)))
                place = draw(st.integers(0, len(heads) - places))
                residue = draw(st.integers(0, rate - 1))
                origin = draw(st.integers(-5, first))
                period = rate * draw(st.integers(1, 3)) + draw(st.integers(1, rate - 1)) if rate > 1 else end
                if 2 * period <= end - first and draw(st.booleans()):  # several whole segments
                    end -= (end - first) % period
                    found.append((branch, *pair, first, end, first, 0, rate, 0, len(heads), period))
                    continue
                if places == 1 or draw(st.booleans()):
                    found.append((branch, *pair, first, end, origin, residue, residues, place, places))
                    continue
                # Heads of one segment whose queries are dealt to ranks: some lack early tokens, or late ones.
                turn = draw(st.integers(1, places - 1))
                middle, other = draw(st.integers(first, end - 1)), draw(st.sampled_from((residues, rate)))
                found.append((branch, *pair, first, end, origin, residue, residues, place, turn))
                found.append((branch, *pair, middle, end, origin, residue, other, place + turn, places - turn))
    return found, kept


SETS = {"SPREAD": 0}
WAYS: dict[str, tuple[dict[str, int], dict[str, int], dict[str, int]]] = {  # constants of counts, of progressions, of lines
    "some pairs at a time": ({"SPREAD": 99, "PROGRESSIONS": 3}, {}, {}),
    "as it is": ({}, {}, {}),
    "no names": (SETS | {"FEW": 0}, {}, {}),
    "some names": (SETS | {"FEW": 1}, {}, {}),
    "heads": ({"SPREAD": 99}, {}, {}),
    "some heads": ({"SPREAD": 99, "MOST": 1}, {}, {}),
    "none": ({"SPREAD": 99, "MOST": 0, "PROGRESSIONS": 1}, {}, {}),
    "short spans alone": ({}, {"LONGEST": 9}, {}),
    "one by one": (SETS, {}, {"DENSE": 0, "SHORT": 0, "MANY": 99}),
    "offsets together": (SETS, {}, {"DENSE": 0, "SHORT": 0, "MANY": 0, "SPARSE": 99}),
    "offsets of cells": (SETS, {}, {"DENSE": 0, "MANY": 1, "SPARSE": 9, "DIRECT": 0, "FEW": 99, "BLOCK": 7}),
    "together": (SETS, {}, {"SHORT": 99}),
    "some together": (SETS, {}, {"SHORT": 9, "BLOCK": 20}),
    "tiles": (SETS, {}, {"DENSE": 99, "SHORT": 0, "PIECE": 12}),
    "few tiles": (SETS, {}, {"DENSE": 99, "SHORT": 0, "PIECE": 1, "TILE": 5, "KEEP": 40}),
    "cells": (SETS, {}, {"DIRECT": 0, "FEW": 99}),
    "cells of tiles": (SETS, {}, {"DIRECT": 0, "FEW": 99, "DENSE": 99, "TILE": 12, "KEEP": 40, "BLOCK": 7}),
    "blocks": (SETS, {}, {"DIRECT": 0, "FEW": 0, "BLOCK": 7}),
    "blocks of tiles": (SETS, {}, {"DIRECT": 0, "FEW": 0, "BLOCK": 20, "DENSE": 99, "SHORT": 5}),
    "cells or blocks": (SETS, {}, {"DIRECT": 20, "FEW": 1, "BLOCK": 7, "KEEP": 0}),
}


@pytest.mark.parametrize("way", WAYS)
@given(case=cases())
def test_rows_are_the_different_tokens_of_heads_between_two_ranks(case: tuple[list[Span], list[Kept]], way: str) -> None:
    found, kept = case
    with ExitStack() as stack:
        for module, constants in zip((counting, progressions, lines), WAYS[way]):
            if constants:
                stack.enter_context(mock.patch.multiple(module, **constants))
        assert count(Counter(kept, NUM_RANKS), found) == definition(found, kept)


@pytest.mark.parametrize("num_heads", [8, 9, 16, 17, 32, 33, 64, 65, 128, 129])
def test_any_number_of_heads_is_counted_in_the_least_words(num_heads: int) -> None:
    kept = [Kept(3, tuple((head, head % 3) for head in range(num_heads)))]
    found = [(0, 1, 2, 0, 20, 0, 0, 3, 0, num_heads)]
    counter = Counter(kept, NUM_RANKS)
    assert count(counter, found) == definition(found, kept)
    bits = [8 * line.dtype().itemsize for line in counter._lines._lines.values()]
    assert bits == [64] * (num_heads // 64) + [next(n for n in (8, 16, 32, 64) if n >= num_heads % 64)] * (num_heads % 64 > 0)


def test_a_set_has_bits_for_the_heads_that_are_looked_at_alone() -> None:
    kept = [Kept(3, tuple((head, head % 3) for head in range(200))), Kept(4, ((7, 0), (99, 1), (150, 2)))]
    found = [(0, 1, 2, 0, 20, 0, 0, 3, 5, 4), (1, 1, 2, 0, 20, 0, 0, 4, 1, 2), (0, 1, 2, 4, 9, 0, 0, 3, 0, 1)]
    counter = Counter(kept, NUM_RANKS)
    with mock.patch.object(counting, "SPREAD", 0):
        assert count(counter, found) == definition(found, kept)
    assert list(counter._lines._lines) == [(0, 5, 6, 7, 8, 99, 150)]


def cut(found: list[Span], kept: list[Kept], borders: list[int], *, is_sent: bool) -> list[Span]:
    """The spans as those of one rank, cut where others' tokens begin; several whole segments stay with the first one's rank."""
    pieces = []
    for branch, _, _, first, end, *rest in complete(found, kept):
        edges = [first, *(edge for edge in borders if first < edge < end and rest[-1] == kept[branch].rate), end]
        for begin, stop in pairwise(edges):
            other = 1 + bisect_right(borders, begin)
            pieces.append((branch, *((other, 0) if is_sent else (0, other)), begin, stop, *rest))
    return pieces


@pytest.mark.parametrize(
    "constants", [{"SHORT": 256}, {"BLOCK": 20}, {"DIRECT": 20, "SHORT": 0}, {"DENSE": 99, "SHORT": 0, "PIECE": 5}], ids=str
)
@given(case=cases(), borders=st.sets(st.integers(1, 69), max_size=8), is_sent=st.booleans())
def test_tokens_of_several_ranks_one_behind_another_are_looked_at_together(
    case: tuple[list[Span], list[Kept]], borders: set[int], is_sent: bool, constants: dict[str, int]
) -> None:
    found, kept = case
    found = cut([span for span in found if span[1:3] == found[0][1:3]], kept, sorted(borders), is_sent=is_sent)
    with mock.patch.object(counting, "SPREAD", 0), mock.patch.multiple(lines, **constants):
        assert count(Counter(kept, 10), found) == definition(found, kept)


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_span_of_many_ranks_is_added_once(is_sent: bool) -> None:
    found = cut([(0, 1, 2, 3, 90, 3, 0, 4, 0, 2), (1, 1, 2, 3, 90, 3, 0, 6, 0, 1)], KEPT, [20, 31, 45, 60, 75], is_sent=is_sent)
    with mock.patch.object(lines.Line, "_add", autospec=True, side_effect=lines.Line._add) as add:
        assert len(list(looked_at(found, Counter(KEPT, 10), DIRECT=99, SHORT=0))) == 1
    assert add.call_count == 2


def pairs_of(ranges: list[tuple[int, int, int]]) -> tuple[np.ndarray, ...]:
    rank, low, high = np.array(ranges, np.int64).T
    return rank, low, high, np.arange(len(ranges))


@pytest.mark.parametrize(
    ("ranges", "together"),
    [
        ([(0, 0, 9), (0, 9, 20)], [[0, 1]]),
        ([(0, 9, 20), (0, 0, 9)], [[1, 0]]),
        ([(0, 0, 9), (1, 9, 20)], [[0], [1]]),
        ([(0, 0, 9), (0, 8, 20)], [[0], [1]]),  # one token of both
        ([(0, 0, 9), (0, 18, 27)], [[0, 1]]),
        ([(0, 0, 9), (0, 18, 26)], [[0], [1]]),  # more between them than there is
        ([(0, 0, 15), (0, 15, 30)], [[0, 1]]),
        ([(0, 0, 15), (0, 15, 31)], [[0], [1]]),  # longer than a block
        ([(0, 0, 15), (0, 15, 31), (0, 31, 45)], [[0], [1, 2]]),
    ],
)
def test_ranks_are_looked_at_together_where_little_lies_between(
    ranges: list[tuple[int, int, int]], together: list[list[int]]
) -> None:
    with mock.patch.object(lines, "BLOCK", 30):
        assert [pairs.tolist() for pairs in lines._behind(*pairs_of(ranges))] == together


@pytest.mark.parametrize("field", ["branch", "origin", "residue", "residues", "place", "places", "period"])
def test_spans_that_differ_are_not_one(field: str) -> None:
    first = (0, 0, 1, 3, 9, 3, 0, 4, 0, 2, 4)
    then = (0, 0, 2, 9, 15, 3, 0, 4, 0, 2, 4)
    both = spans_of([first, then], KEPT)
    assert [x.tolist() for x in both.continued()[3:5]] == [[3], [15]]
    other = both._replace(**{field: both._asdict()[field] + [0, 1]})
    assert [x.tolist() for x in other.continued()[3:5]] == [[3, 9], [9, 15]]
    apart = both._replace(first=np.array([3, 10]))
    assert [x.tolist() for x in apart.continued()[3:5]] == [[3, 10], [9, 15]]


def test_no_spans_and_no_heads_are_no_rows() -> None:
    assert count(Counter([Kept(3, ())], NUM_RANKS), []) == []
    assert count(Counter([Kept(3, ((0, 1),))], NUM_RANKS), [(0, 1, 2, 0, 1, 0, 0, 3, 0, 1)]) == []


KEPT = [Kept(4, ((0, 0), (1, 3))), Kept(6, ((0, 5), (1, 2)))]


def looked_at(found: list[Span], counter: Counter, **constants: int) -> Iterator[int]:
    """The tokens of every set that is made, where only periods of spans are looked at."""
    with (
        mock.patch.object(counting, "SPREAD", 0),
        mock.patch.multiple(lines, **{"DIRECT": 0, **constants}),
        mock.patch.object(lines, "_num_members", side_effect=lines._num_members) as members,
    ):
        assert count(counter, found) == definition(found, KEPT)
    return (len(call.args[0]) for call in members.call_args_list)


def test_of_a_long_span_one_period_is_looked_at_and_its_rest() -> None:
    both = [(0, 1, 2, 3, 127, 3, 0, 4, 0, 2), (1, 1, 2, 3, 127, 0, 0, 6, 0, 2)]
    assert list(looked_at(both, Counter(KEPT, NUM_RANKS))) == [12, 124 % 12]
    assert list(looked_at(both[:1], Counter(KEPT, NUM_RANKS))) == [4]
    assert list(looked_at([(0, 1, 2, 3, 10, 3, 0, 4, 0, 2)], Counter(KEPT, NUM_RANKS))) == [7]
    assert list(looked_at([(0, 1, 2, 3, 11, 3, 0, 4, 0, 2)], Counter(KEPT, NUM_RANKS))) == [4]


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 200])
def test_a_tile_is_of_periods_that_fit_a_piece_and_one_more(tokens: int) -> None:
    counter = Counter(KEPT, NUM_RANKS)
    found = [(0, 1, 2, 3, 3 + tokens, 1, 0, 4, 0, 2), (1, 1, 2, 3, 3 + tokens, 0, 0, 6, 0, 2)]
    looked_at(found, counter, PIECE=11, DENSE=99, DIRECT=999, SHORT=0)
    assert sorted(len(tile) for tile in counter._lines._tiles._found.values()) == [12, 12]


def test_tiles_are_forgotten_before_they_hold_more_than_is_kept() -> None:
    """Of 8 entries each; a second one's stand beside them, a third's do not."""
    made: list[int] = []

    def period(number: int) -> np.ndarray:
        made.append(number)
        return np.array([number, 0], np.uint8)

    with mock.patch.multiple(lines, KEEP=17, PIECE=7):
        tiles = lines.Tiles()
        for number in (0, 1, 1, 0, 2, 2, 0):
            tile = tiles.get((number,), lambda number=number: period(number))
            assert tile.tolist() == [number, 0] * 4
        assert made == [0, 1, 2, 0]


def test_heads_that_lie_alike_share_a_tile() -> None:
    """Whichever heads they are: the first of each set, with the same offset."""
    kept = [Kept(4, tuple((head, 1) for head in range(90)))]
    counter = Counter(kept, NUM_RANKS)
    found = [(0, 0, 1, 0, 50, 0, 0, 4, 3, 1), (0, 1, 2, 0, 60, 0, 0, 4, 70, 1), (0, 2, 0, 0, 60, 0, 0, 4, 0, 70)]
    with mock.patch.object(counting, "SPREAD", 0), mock.patch.multiple(lines, SHORT=0, DENSE=99):
        assert count(counter, found) == definition(found, kept)
    assert len(counter._lines._lines) == 4
    assert len(counter._lines._tiles._found) == 3


@pytest.mark.parametrize(
    ("change", "joined"),
    [
        ({}, 1),
        ({"branch": 1}, 2),
        ({"origin": 1}, 2),
        ({"residue": 1}, 2),
        ({"residues": 3}, 2),
        ({"place": 3}, 2),
        ({"place": 1}, 2),
    ],
)
def test_neighbouring_heads_of_one_segment_are_looked_at_together(change: dict[str, int], joined: int) -> None:
    span = lines._Span(branch=0, first=0, end=9, origin=0, residue=0, residues=4, place=0, places=2, period=4)
    other = span._replace(**{"place": 2, "places": 3, **change})
    found = lines._joined([span, other])
    assert found == ([span._replace(places=5)] if joined == 1 else [span, other])
    assert lines._joined([]) == []


def test_pairs_whose_spans_lie_alike_are_counted_once() -> None:
    counter = Counter(KEPT, NUM_RANKS)
    here = (0, 1, 2, 3, 8, 3, 0, 4, 0, 2)
    far = (0, 2, 1, 103, 108, 3, 0, 4, 0, 2)  # 100 tokens on, in phase
    assert list(looked_at([here, far], counter)) == [5]
    assert list(looked_at([here, far], counter)) == []  # nor in a later call
    # Of several spans all are compared, not the first and its neighbours.
    two = [(0, a, b, 20, 24, 0, 0, 4, 0, 2) for a, b in ((0, 1), (0, 2), (1, 2))]
    ends = [(1, 0, 1, 30, 36, 0, 0, 6, 0, 2), (1, 0, 2, 30, 36, 0, 0, 6, 0, 2), (1, 1, 2, 30, 31, 0, 0, 6, 0, 2)]
    assert len(list(looked_at(two + ends, counter))) > 0
    others = [
        (1, 1, 0, 3, 8, 3, 0, 6, 0, 2),
        (0, 1, 0, 3, 8, 2, 0, 4, 0, 2),
        (0, 1, 0, 4, 9, 2, 0, 4, 0, 2),
        (0, 1, 0, 3, 8, 3, 1, 3, 0, 2),
        (0, 1, 0, 3, 8, 3, 0, 3, 0, 2),
        (0, 1, 0, 3, 8, 3, 0, 4, 1, 1),
        (0, 1, 0, 3, 8, 3, 0, 4, 0, 1),
        (0, 1, 0, 3, 9, 3, 0, 4, 0, 2),
    ]
    for other in others:
        assert len(list(looked_at([here, far, other], counter))) > 0


@given(st.lists(st.lists(st.sampled_from((-3, 0, 1, 5, 1 << 40, -(1 << 40))), min_size=4, max_size=4), min_size=1, max_size=6))
@example([[0, 1 << 40, 0, 1], [1 << 40, 0, 0, 1]])
@example([[0, (1 << 61) - 1, 0, 1], [0, 1, 0, 1]])
@example([[0, 1, 2, 3], [0, (1 << 61), 0, 1], [0, 1 << 61, 1, 5]])
@example([[0, 1 << 61, *[0] * 7], [0, 0, *(i << 40 for i in range(1, 8))]])  # 2 ** 61 * 8 is 0 in 64 bits
@example([[i << 40 for i in range(9)], [8, 1 << 61, *[0] * 7]])  # and 8 * (2 ** 61 + 1) is 8
@example([[0, 16, (1 << 30) - 1]] + 2 * [[0, 0, (1 << 30) - 1]])  # 16 * 2 ** 60
def test_names_are_equal_where_all_columns_are(columns: list[list[int]]) -> None:
    names = _names(np.array(columns, np.int64)).tolist()
    entries = list(zip(*columns))
    assert [[a == b for a in names] for b in names] == [[a == b for a in entries] for b in entries]


@pytest.mark.parametrize(
    ("tokens", "several", "way"),
    [
        (9, 1, "count_between"),
        (10, 9, "count_between"),
        (11, 2, "_count_cells"),
        (11, 3, "_seen"),  # of 1 of each branch a period is looked for
    ],
)
def test_how_spans_are_counted_depends_on_their_tokens_and_their_number(tokens: int, several: int, way: str) -> None:
    first = (0, 1, 2, 100, 101, 100, 0, 4, 0, 2)
    last = (1, 1, 2, 99 + tokens, 100 + tokens, 99 + tokens, 0, 6, 0, 2)
    found = [first] * (several - 1) + [last if several > 1 else (0, 1, 2, 100, 100 + tokens, 100, 0, 4, 0, 2)]
    ways = {each: mock.patch.object(Line, each, autospec=True, side_effect=getattr(Line, each)) for each in WAYS_OF_LINES}
    with mock.patch.multiple(lines, DIRECT=10, FEW=1), ExitStack() as stack:
        called = {each: stack.enter_context(patch) for each, patch in ways.items()}
        lines.Lines(KEPT).count(spans_of(found, KEPT), np.array([several]))
    expected = {"count_between", "_seen"} if way == "count_between" else {way}
    assert {each for each, call in called.items() if call.called} == expected


@pytest.mark.parametrize(("lengths", "whole", "together"), [((3, 4), True, 1), ((4, 4), True, 0), ((3, 4), False, 0)])
def test_short_spans_of_all_heads_are_added_together(lengths: tuple[int, int], whole: bool, together: int) -> None:
    """Below 4 tokens on average."""
    first = (0, 1, 2, 3, 3 + lengths[0], 3, 0, 4, 0, 2 if whole else 1)
    found = [first, (0, 1, 2, 20, 20 + lengths[1], 20, 0, 4 if whole else 3, 0, 2), (1, 1, 2, 0, 30, 0, 0, 6, 0, 2)]
    with mock.patch.object(Line, "_add_whole", autospec=True, side_effect=Line._add_whole) as add:
        list(looked_at(found, Counter(KEPT, NUM_RANKS), DIRECT=99, SHORT=4))
    assert add.call_count == together


@pytest.mark.parametrize(
    ("kinds", "rate", "itemsize", "made"), [(2, 5, 1, 1), (2, 6, 1, 0), (1, 2, 1, 1), (1, 3, 1, 0), (3, 4, 2, 1), (3, 5, 2, 0)]
)
def test_tiles_are_made_where_heads_have_many_offsets_for_their_rate(kinds: int, rate: int, itemsize: int, made: int) -> None:
    heads = tuple((head, head) for head in range(kinds))
    kept = [Kept(rate, heads), Kept(1, tuple((head, 0) for head in range(100, 100 + 8 * itemsize - kinds)))]
    line = Line(kept, [head for each in kept for head, _ in each.heads], lines.Tiles(), lines.Bound(math.inf))
    seen = np.zeros(50, line.dtype)
    assert seen.itemsize == itemsize
    with mock.patch.object(lines, "DENSE", 3):
        line._add(seen, lines._Span(0, 0, 50, 0, 0, rate, 0, kinds, rate), 0)
    assert len(line._tiles._found) == made
    assert seen.tolist() == [1 << token % rate if token % rate < kinds else 0 for token in range(50)]


@pytest.mark.parametrize(("period", "tokens", "made"), [(13, 90, 0), (13, 5, 0), (12, 5, 1), (11, 90, 1)])
def test_segments_longer_than_a_tile_are_added_one_by_one(period: int, tokens: int, made: int) -> None:
    """Of several whole segments in one span, seen from anywhere in one of them."""
    line = Line(KEPT, (0, 1), lines.Tiles(), lines.Bound(math.inf))
    span = lines._Span(branch=0, first=0, end=999, origin=2, residue=0, residues=4, place=0, places=2, period=period)
    for begin in range(2, 30):
        seen = np.zeros(tokens, np.uint8)
        with mock.patch.object(lines, "TILE", 12):
            line._add(seen, span, begin)
        offsets = [(token - 2) % period % 4 for token in range(begin, begin + tokens)]
        assert seen.tolist() == [{0: 1, 3: 2}.get(offset, 0) for offset in offsets]
    assert len(line._tiles._found) == made


@pytest.mark.parametrize("tokens", [7, 8, 21])
def test_a_block_of_tokens_holds_what_lies_in_it(tokens: int) -> None:
    found = [(0, 1, 2, 3, 3 + tokens, 3, 0, 4, 0, 2)]
    sizes = list(looked_at(found, Counter(KEPT, NUM_RANKS), DIRECT=0, FEW=0, BLOCK=7))
    assert sizes == [min(7, tokens - i) for i in range(0, tokens, 7)]


# -- about how many ----------------------------------------------------------------------------------------------------------


def about(found: list[Span], kept: list[Kept]) -> list[tuple[int, int, int]]:
    counter = Counter(kept, NUM_RANKS, most=0)
    with mock.patch.object(counting, "SPREAD", 0):
        rows = count(counter, found)
    assert not counter.is_exact
    return rows


HALVES = [Kept(2, ((0, 0), (1, 1))), Kept(2, ((0, 1), (1, 0)))]
COPRIME = [Kept(4, ((0, 0), (1, 3))), Kept(7, ((0, 5), (1, 2)))]
EVERY = [Kept(1, ((0, 0), (1, 0), (2, 0))), Kept(3, ((0, 0), (1, 1), (2, 2)))]


@pytest.mark.parametrize(
    ("found", "kept", "rows"),
    [
        ([(0, 1, 2, 3, 23, 3, 0, 4, 0, 2)], COPRIME, 10),  # 2 of 4 over 20 tokens
        ([(0, 1, 2, 3, 23, 3, 1, 2, 0, 2)], COPRIME, 5),  # half of the offsets take part
        ([(0, 1, 2, 3, 23, 3, 0, 4, 1, 1)], COPRIME, 5),  # one head
        ([(0, 1, 2, 3, 31, 3, 0, 4, 0, 2), (1, 1, 2, 3, 31, 0, 0, 7, 0, 2)], COPRIME, 14 + 8 - 2),  # of coprime rates exact
        ([(0, 1, 2, 3, 31, 3, 0, 4, 0, 2), (1, 1, 2, 31, 45, 0, 0, 7, 0, 2)], COPRIME, 14 + 4),  # one behind the other
        ([(0, 1, 2, 3, 31, 3, 0, 4, 0, 2), (1, 1, 2, 17, 45, 0, 0, 7, 0, 2)], COPRIME, 14 + 8 - 1),  # half of each in the other
        ([(0, 1, 2, 0, 9, 0, 0, 1, 0, 3), (1, 1, 2, 0, 9, 0, 0, 3, 0, 3)], EVERY, 27),  # all of all
        ([(0, 1, 2, 0, 9, 0, 0, 1, 0, 1), (1, 1, 2, 9, 18, 0, 0, 3, 0, 3)], EVERY, 9 + 9),  # all of one head alone
        ([(0, 1, 2, 0, 8, 0, 0, 2, 0, 2), (1, 1, 2, 0, 8, 0, 0, 2, 0, 2)], HALVES, 12),  # 16: that they miss each other is unseen
        ([(0, 1, 2, 0, 8, 0, 0, 2, 0, 2), (0, 2, 1, 0, 8, 0, 0, 2, 0, 2)], HALVES, 8),  # of other ranks
    ],
)
def test_beyond_the_bound_branches_are_taken_for_independent(found: list[Span], kept: list[Kept], rows: int) -> None:
    assert {each[2] for each in about(found, kept)} == {rows}


@given(cases())
def test_an_estimate_has_at_most_all_rows_of_all_branches_and_those_of_one(case: tuple[list[Span], list[Kept]]) -> None:
    found, kept = case
    # Of spans of all offsets: how many heads have some of them is estimated too.
    found = [span for span in found if span[7] == kept[span[0]].rate]
    estimates = {each[:2]: each[2] for each in about(found, kept)} if found else {}
    for pair in {span[1:3] for span in found}:
        shares = [0.0] * len(kept)
        for branch, _, _, first, end, _, _, _, _, places, _ in complete([span for span in found if span[1:3] == pair], kept):
            shares[branch] += (end - first) * places / kept[branch].rate
        assert max(shares) - 0.51 <= estimates.get(pair, 0) <= sum(shares) + 0.51


@given(cases(), st.integers(0, 1 << 18))
def test_within_the_bound_counts_are_exact_and_beyond_it_they_say_that_they_are_not(
    case: tuple[list[Span], list[Kept]], most: int
) -> None:
    found, kept = case
    exact, counter = definition(found, kept), Counter(kept, NUM_RANKS, most)
    with mock.patch.object(counting, "SPREAD", 0), mock.patch.object(lines, "DIRECT", 0), mock.patch.object(lines, "BLOCK", 9):
        rows = count(counter, found)
        again = count(Counter(kept, NUM_RANKS, most), found)
    assert rows == again  # on every rank
    assert rows == exact or not counter.is_exact


@pytest.mark.parametrize("constants", [{"DIRECT": 0, "FEW": 99}, {"DIRECT": 0, "FEW": 0, "BLOCK": 64}, {"DIRECT": 999}], ids=str)
def test_every_way_of_counting_keeps_to_the_bound(constants: dict[str, int]) -> None:
    found = [(branch, 1, 2, 3 + branch, 200 + branch, 3, 0, rate, 0, 2) for branch, (rate, _) in enumerate(COPRIME)]
    spent = []
    with mock.patch.object(counting, "SPREAD", 0), mock.patch.multiple(lines, SPAN=1000, **constants):
        for most in (10**9, 0):
            counter = Counter(COPRIME, NUM_RANKS, most)
            count(counter, found)
            spent.append(most - counter._lines._bound.left)
            assert counter.is_exact == (most > 0)
    # All is spent that was written, and begun; what is beyond the bound is noticed at once.
    assert spent[0] >= 2 * 1000 + 2 * 197
    assert spent[1] <= 3 * 1000 + 2 * 197
