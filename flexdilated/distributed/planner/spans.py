"""Intervals of tokens that ranks need of each other, and the rows that heads keep of them.

A span is an interval of neighbouring tokens of one segment. Each head keeps the tokens of its own offset, so one span describes all
heads. Within one branch the spans between two ranks are disjoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


class BranchHeads(NamedTuple):
    """The heads of one branch that are held here, with their offsets."""

    rate: int
    heads: tuple[tuple[int, int], ...]  # (head, offset), ascending


class Spans(NamedTuple):
    """Tokens that `receiver` gets from `sender`: one array entry per span, branch by branch and ascending in each pair of ranks.

    Token `t` has offset `(t - origin) % rate`. Only `residues` offsets from `residue` on, modulo the rate, take part, and only
    `places` heads of the branch from number `place` on.
    """

    branch: Integers
    receiver: Integers
    sender: Integers
    first: Integers
    end: Integers
    origin: Integers
    residue: Integers
    residues: Integers
    place: Integers
    places: Integers

    def where(self, chosen: Booleans | Integers | slice) -> Spans:
        return Spans(*(x[chosen] for x in self))

    @classmethod
    def joined(cls, parts: Sequence[Spans]) -> Spans:
        if not parts:
            return cls(*(np.empty(0, np.int64) for _ in cls._fields))
        return parts[0] if len(parts) == 1 else cls(*(np.concatenate(columns) for columns in zip(*parts)))


class Rows(NamedTuple):
    """Spans that hold rows of some head: the number of the span, the first kept token, and the number of rows."""

    span: Integers
    first: Integers
    rows: Integers


def rows_of(spans: Spans, rate: int | Integers, offset: int | Integers, place: int | Integers) -> Rows:
    """The rows of one head in spans of one branch.

    For several heads, `offset` and `place` are columns `(heads, 1)`; span `i` of head `h` then has number `h * len(spans) + i`.

    Args:
        spans: Spans of one branch.
        rate: Dilation rate of the branch.
        offset: Offset of the head.
        place: Number of the head among the heads of the branch.
    """
    first: Integers = spans.first + np.remainder(offset - (spans.first - spans.origin), rate)
    takes_part = (offset - spans.residue) % rate < spans.residues
    takes_part &= (spans.place <= place) & (place < spans.place + spans.places)
    found = np.flatnonzero(takes_part & (first < spans.end))
    rows: Integers = (spans.end - first - 1) // rate + 1
    return Rows(found, first.reshape(-1)[found], rows.reshape(-1)[found])


def have_rows(spans: Spans, kept: Sequence[BranchHeads]) -> bool:
    """Whether any head keeps any token of any span."""
    for branch, (rate, heads) in enumerate(kept):
        here = spans.where(spans.branch == branch)
        if not len(here.first) or not heads:
            continue
        # A span as long as the rate holds a token of every offset.
        if ((here.end - here.first >= rate) & (here.residues == rate)).any():
            return True
        place, offset = np.arange(len(heads))[:, None], np.array([offset for _, offset in heads])[:, None]
        if len(rows_of(here, rate, offset, place).rows):
            return True
    return False


def expanded(first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """The numbers of runs `first ... first + count`, run by run: the run of each number, and the number."""
    ends = np.cumsum(count)
    run = np.repeat(np.arange(len(count)), count)
    return run, np.arange(len(run)) + np.repeat(first - ends + count, count)


def portions(size: Integers, most: int) -> Iterator[tuple[int, int]]:
    """Cut entries of these sizes in runs `first ... end` of neighbours whose sizes add up to not much more than `most`."""
    turn = (np.cumsum(size) - size) // most
    return pairwise([0, *(np.flatnonzero(np.diff(turn)) + 1).tolist(), len(size)] if len(size) else [])


def kept_below(length: Integers, rate: int | Integers, offset: int | Integers) -> Integers:
    """The number of positions `offset, offset + rate, ...` below `length`."""
    return np.maximum(0, -((offset - length) // rate))
