"""Whether spans hold rows, against a look at every token of every head, and what that costs."""

from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from flexdilated.distributed import spans
from flexdilated.distributed.spans import Kept, Spans, has_rows, kept_below, portions, rows_of

Span = tuple[int, int, int, int, int, int, int]  # branch, first, tokens, residue, residues, place, places


def spans_of(found: list[Span], kept: list[Kept]) -> Spans:
    """Spans of segments that begin at token 3."""
    branch, first, tokens, residue, residues, place, places = np.array(found, np.int64).reshape(-1, 7).T
    ranks = np.zeros_like(branch)
    period = np.array([each.rate for each in kept], np.int64)[branch]
    return Spans(branch, ranks, ranks + 1, first, first + tokens, ranks + 3, residue, residues, place, places, period)


def rows(found: list[Span], kept: list[Kept]) -> list[list[int]]:
    """Of every span, the tokens that some head keeps, by the definition."""
    return [
        [
            token
            for token in range(first, first + tokens)
            for at, (_, offset) in enumerate(kept[branch].heads)
            if (token - 3) % kept[branch].rate == offset
            and (offset - residue) % kept[branch].rate < residues
            and place <= at < place + places
        ]
        for branch, first, tokens, residue, residues, place, places in found
    ]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Span], list[Kept]]:
    """Spans of two branches, long and short, of all offsets and heads and of some."""
    kept = []
    for _ in range(2):
        rate = draw(st.integers(1, 6))
        offsets = draw(st.lists(st.integers(0, rate - 1), min_size=1, max_size=4))
        kept.append(Kept(rate, tuple(enumerate(offsets))))
    found = []
    for _ in range(draw(st.integers(0, 4))):
        branch = draw(st.integers(0, 1))
        rate, heads = kept[branch]
        residues, places = draw(st.integers(1, rate) | st.just(rate)), draw(st.integers(1, len(heads)) | st.just(len(heads)))
        place = draw(st.integers(0, len(heads) - places))
        span = draw(st.integers(3, 20)), draw(st.integers(1, 8)), draw(st.integers(0, rate - 1)), residues
        found.append((branch, *span, place, places))
    return found, kept


@given(cases())
def test_spans_have_rows_where_a_head_keeps_a_token(case: tuple[list[Span], list[Kept]]) -> None:
    found, kept = case
    assert has_rows(spans_of(found, kept), kept) == any(rows(found, kept))


@given(cases())
def test_rows_of_a_head_are_the_tokens_that_it_keeps(case: tuple[list[Span], list[Kept]]) -> None:
    found, (kept, _) = case
    found = [span for span in found if span[0] == 0]
    for place, (_, offset) in enumerate(kept.heads):
        chosen, first, count = rows_of(spans_of(found, [kept]), kept.rate, offset, place)
        listed = {int(i): [*range(a, a + kept.rate * n, kept.rate)] for i, a, n in zip(chosen, first, count)}
        alone = Kept(kept.rate, tuple(head if at == place else (-1, -1) for at, head in enumerate(kept.heads)))
        assert listed == {i: tokens for i, tokens in enumerate(rows(found, [alone])) if tokens}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4), st.integers(4, 9))), st.integers(2, 7))
def test_whole_segments_in_one_span_are_taken_apart(found: list[tuple[int, int, int]], rate: int) -> None:
    """Beside a span of one segment that ends before it does."""
    found = [(first, several, period) for first, several, period in found if several == 1 or (period > rate and period % rate)]
    columns = [[], [], [], [], []]
    for number, (first, several, period) in enumerate(found):
        middle = period // 2 if several == 1 else 0
        for column, x in zip(columns, (number, first + middle, first + several * period, first, rate if several == 1 else period)):
            column.append(x)
    place, first, end, origin, period = (np.array(x, np.int64) for x in columns)
    same = np.zeros_like(place)
    made = Spans(same, same, same + 1, first, end, origin, same, same + rate, place, same + 1, period)
    alone = made.alone(np.array([rate]))
    assert alone.period.tolist() == [rate] * len(alone.first)
    expected = [
        (number, start + (step // 2 if several == 1 else 0), start + step, start)
        for number, (begin, several, step) in enumerate(found)
        for start in range(begin, begin + several * step, step)
    ]
    assert list(zip(alone.place.tolist(), alone.first.tolist(), alone.end.tolist(), alone.origin.tolist())) == expected


def test_neighbouring_heads_of_the_same_tokens_are_one_span() -> None:
    span = Spans(*(np.array([number], np.int64) for number in range(11)))  # places 9 from place 8 on
    others = [span._replace(place=np.array([17]), places=np.array([several])) for several in (1, 5)]
    columns = set(Spans._fields) - {"place", "places"}
    changed = [others[0]._replace(**{column: getattr(span, column) + 1}) for column in columns]
    apart = [span._replace(place=np.array([place])) for place in (7, 8, 16, 18, 26)]
    for other in others:
        (merged,) = zip(*Spans.joined([span, other]).merged())
        assert merged == (*range(9), 9 + int(other.places[0]), 10)
    third = others[1]._replace(place=np.array([18]))
    assert Spans.joined([span, others[0], third]).merged().places.tolist() == [15]
    for other in (*changed, *apart):
        both = Spans.joined([span, other])
        assert [x.tolist() for x in both.merged()] == [x.tolist() for x in both]
    assert len(Spans.joined([]).merged().first) == 0


@given(st.lists(st.integers(0, 43), min_size=1), st.integers(1, 7), st.data())
def test_kept_below_counts(lengths: list[int], rate: int, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, rate - 1))
    expected = [len([p for p in range(length) if p % rate == offset]) for length in lengths]
    assert kept_below(np.array(lengths), rate, offset).tolist() == expected


HEADS = [Kept(5, ((0, 4), (1, 4), (2, 2), (3, 2)))]
SHORT, LONG = (0, 3, 2, 0, 5, 0, 4), (0, 8, 5, 0, 5, 0, 4)  # tokens 3 and 4, of offsets 0 and 1; five tokens, one of each offset


@pytest.mark.parametrize(
    ("found", "expected", "looks"),
    [
        ([SHORT], False, 2),  # an offset of several heads is looked for once
        ([SHORT, LONG], True, 0),  # nor is it where a span is as long as the rate
        ([(0, 3, 2, 0, 5, 0, 3)], False, 4),  # but heads that take no part are another matter
        ([SHORT, (0, 8, 2, 0, 5, 3, 1)], False, 4),
        ([(0, 8, 5, 0, 2, 0, 4)], False, 2),  # and so are offsets
    ],
)
def test_few_offsets_are_looked_for(found: list[Span], expected: bool, looks: int) -> None:
    assert any(rows(found, HEADS)) == expected
    with mock.patch.object(spans, "rows_of", side_effect=rows_of) as looked:
        assert has_rows(spans_of(found, HEADS), HEADS) == expected
    assert looked.call_count == looks


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 20))
def test_portions_are_neighbours_of_not_much_more_than_the_most(sizes: list[int], most: int) -> None:
    found = list(portions(np.array(sizes, np.int64), most))
    assert [i for a, b in found for i in range(a, b)] == list(range(len(sizes)))
    assert all(a < b and sum(sizes[a : b - 1]) < most for a, b in found)
    assert len(found) <= 1 + sum(sizes) // most
