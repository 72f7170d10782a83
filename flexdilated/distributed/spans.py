"""Runs of tokens that ranks need of each other, and the rows that they hold.

A span is a run of neighbouring tokens of one segment. Each head keeps those of its own residue, so a span speaks for all heads at
once, and of one branch the spans between two ranks are disjoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


class Kept(NamedTuple):
    """What the heads held here keep of one branch."""

    rate: int
    heads: tuple[tuple[int, int], ...]  # (head, offset), ascending


class Spans(NamedTuple):
    """Tokens that `receiver` gets from `sender`, one array entry per span, branch by branch and ascending in each pair of ranks.

    Of token `t` the offset is `(t - origin) % period % rate`. Not all offsets need take part, but `residues` from `residue` on,
    modulo the rate; nor all heads of the branch, but `places` from `place` on. The period is the rate. But a span may hold several
    whole segments, from `origin` on, which all heads keep: then it is their length, which the rate does not divide.
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
    period: Integers

    def where(self, chosen: Booleans | Integers | slice) -> Spans:
        return Spans(*(x[chosen] for x in self))

    def merged(self) -> Spans:
        """The same, of neighbouring heads that take part in the same way one span."""
        first = firsts(self.place[1:] == (self.place + self.places)[:-1], [*self[:8], self.period])
        places = np.add.reduceat(self.places, first) if len(first) else first
        return self.where(first)._replace(places=places)

    def continued(self) -> Spans:
        """The same tokens of the same heads, branch by branch, whichever ranks'; spans that continue others are one with them."""
        spans = self.where(np.lexsort((self.first, *self[5:], self.branch)))
        first = firsts(spans.first[1:] == spans.end[:-1], [spans.branch, *spans[5:]])
        return spans.where(first)._replace(end=spans.end[np.append(first[1:], len(spans.first)) - 1])

    def alone(self, rates: Integers) -> Spans:
        """Each segment by itself, of branches of these rates."""
        rate = rates[self.branch]
        if (self.period == rate).all():
            return self
        several = np.where(self.period == rate, 1, (self.end - self.first) // self.period)
        which, number = expanded(np.zeros_like(several), several)
        each = self.where(which)
        moved = each._replace(
            first=each.first + number * each.period, origin=each.origin + number * each.period, period=rate[which]
        )
        return moved._replace(end=np.where(several[which] > 1, moved.first + each.period, each.end))

    @classmethod
    def joined(cls, parts: Sequence[Spans]) -> Spans:
        if not parts:
            return cls(*(np.empty(0, np.int64) for _ in cls._fields))
        return parts[0] if len(parts) == 1 else cls(*(np.concatenate(columns) for columns in zip(*parts)))


def firsts(joins: Booleans, columns: Sequence[Integers]) -> Integers:
    """The entries that are not one with those before them, which they join and equal in some columns."""
    for column in columns:
        joins = joins & (column[1:] == column[:-1])
    return np.flatnonzero(np.append(True, ~joins)[: len(columns[0])])


class Rows(NamedTuple):
    """Of some spans those that hold rows of one offset: which, the first such token, and how many. Of several, those of each."""

    chosen: Integers
    first: Integers
    rows: Integers


class Traffic(NamedTuple):
    """Rows that travel, per pair of ranks that exchange any: arrays of equal length, in ascending order of the pair."""

    receiver: Integers
    sender: Integers
    rows: Integers

    def received(self, num_ranks: int) -> Integers:
        """`(num_ranks,)` rows that each rank gets."""
        return np.bincount(self.receiver, self.rows, num_ranks).astype(np.int64)

    def reversed(self) -> Traffic:
        """The way back."""
        return Traffic(self.sender, self.receiver, self.rows)

    def ascending(self) -> Traffic:
        """The same, in the order of the pairs."""
        order = np.lexsort((self.sender, self.receiver))
        return Traffic(*(x[order] for x in self))

    def largest(self, num_ranks: int) -> Integers:
        """`(num_ranks,)` rows of the largest message that each rank gets."""
        most = np.zeros(num_ranks, np.int64)
        np.maximum.at(most, self.receiver, self.rows)
        return most


def expanded(first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """Of runs `first ... first + count`, run by run: which run, and which number."""
    ends = np.cumsum(count)
    run = np.repeat(np.arange(len(count)), count)
    return run, np.arange(len(run)) + np.repeat(first - ends + count, count)


def portions(size: Integers, most: int) -> Iterator[tuple[int, int]]:
    """Cut entries of such sizes in runs `first ... end` of neighbours, of not much more than `most` together."""
    turn = (np.cumsum(size) - size) // most
    return pairwise([0, *(np.flatnonzero(np.diff(turn)) + 1).tolist(), len(size)] if len(size) else [])


def rows_of(spans: Spans, rate: int | Integers, offset: int | Integers, place: int | Integers) -> Rows:
    """The rows of one head in spans of one segment each, of one branch: its offset, and its place among the heads of the branch.

    Offsets and places of several heads are columns, `(heads, 1)`: then spans are numbered on from one head to the next.
    """
    first: Integers = spans.first + np.remainder(offset - (spans.first - spans.origin), rate)
    takes_part = (offset - spans.residue) % rate < spans.residues
    takes_part &= (spans.place <= place) & (place < spans.place + spans.places)
    chosen = np.flatnonzero(takes_part & (first < spans.end))
    rows: Integers = (spans.end - first - 1) // rate + 1
    return Rows(chosen, first.reshape(-1)[chosen], rows.reshape(-1)[chosen])


def has_rows(spans: Spans, kept: Sequence[Kept]) -> bool:
    """Whether any head keeps any token of any span: no unions."""
    for branch, (rate, heads) in enumerate(kept):
        here = spans.where(spans.branch == branch)
        if not len(here.first):
            continue
        if ((here.end - here.first >= rate) & (here.residues == rate) & (here.places == len(heads))).any():
            return True
        distinct = {(offset, 0 if (here.places == len(heads)).all() else place) for place, (_, offset) in enumerate(heads)}
        if any(len(rows_of(here, rate, offset, place).rows) for offset, place in distinct):
            return True
    return False


def kept_below(length: Integers, rate: int | Integers, offset: int | Integers) -> Integers:
    """How many positions `offset, offset + rate, ...` lie below `length`."""
    return np.maximum(0, -((offset - length) // rate))
