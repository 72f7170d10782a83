"""Whether spans hold rows, against a look at every token of every head, and what that costs."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from flexdilated.distributed.planner.spans import BranchHeads, Spans, have_rows, kept_below, portions, rows_of

Span = tuple[int, int, int, int, int, int, int]  # branch, first, tokens, residue, residues, place, places


def spans_of(found: list[Span], kept: list[BranchHeads]) -> Spans:
    """Spans of segments that begin at token 3."""
    branch, first, tokens, residue, residues, place, places = np.array(found, np.int64).reshape(-1, 7).T
    ranks = np.zeros_like(branch)
    return Spans(branch, ranks, ranks + 1, first, first + tokens, ranks + 3, residue, residues, place, places)


def rows(found: list[Span], kept: list[BranchHeads]) -> list[list[int]]:
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
def cases(draw: st.DrawFn) -> tuple[list[Span], list[BranchHeads]]:
    """Spans of two branches, long and short, of all offsets and heads and of some."""
    kept = []
    for _ in range(2):
        rate = draw(st.integers(1, 6))
        offsets = draw(st.lists(st.integers(0, rate - 1), min_size=1, max_size=4))
        kept.append(BranchHeads(rate, tuple(enumerate(offsets))))
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
def test_spans_have_rows_where_a_head_keeps_a_token(case: tuple[list[Span], list[BranchHeads]]) -> None:
    found, kept = case
    assert have_rows(spans_of(found, kept), kept) == any(rows(found, kept))


@given(cases())
def test_rows_of_a_head_are_the_tokens_that_it_keeps(case: tuple[list[Span], list[BranchHeads]]) -> None:
    found, (kept, _) = case
    found = [span for span in found if span[0] == 0]
    for place, (_, offset) in enumerate(kept.heads):
        chosen, first, count = rows_of(spans_of(found, [kept]), kept.rate, offset, place)
        listed = {int(i): [*range(a, a + kept.rate * n, kept.rate)] for i, a, n in zip(chosen, first, count)}
        alone = BranchHeads(kept.rate, tuple(head if at == place else (-1, -1) for at, head in enumerate(kept.heads)))
        assert listed == {i: tokens for i, tokens in enumerate(rows(found, [alone])) if tokens}


@given(st.lists(st.integers(0, 43), min_size=1), st.integers(1, 7), st.data())
def test_kept_below_counts(lengths: list[int], rate: int, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, rate - 1))
    expected = [len([p for p in range(length) if p % rate == offset]) for length in lengths]
    assert kept_below(np.array(lengths), rate, offset).tolist() == expected


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 20))
def test_portions_are_neighbours_of_not_much_more_than_the_most(sizes: list[int], most: int) -> None:
    found = list(portions(np.array(sizes, np.int64), most))
    assert [i for a, b in found for i in range(a, b)] == list(range(len(sizes)))
    assert all(a < b and sum(sizes[a : b - 1]) < most for a, b in found)
    assert len(found) <= 1 + sum(sizes) // most
