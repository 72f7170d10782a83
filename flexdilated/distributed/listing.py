"""The rows that one rank exchanges, one by one: what a plan says in intervals and strides, listed for this rank alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.distributed.plan import ContextPlan
from flexdilated.distributed.spans import Integers, Spans, expanded, portions, rows_of

SPREAD = 64  # places in a table for each row, above which rows are sorted; else they are marked in it
MARKS = 1 << 24  # bytes of such a table
TOGETHER = 1 << 16  # spans, each of one head, that are looked at together
LOOKED = 32  # places in a table of numbers for each row, above which rows are searched for
LONG = 16  # rows of a progression, on average, from which each is marked by itself


class Runs(NamedTuple):
    """Arithmetic progressions of tokens that travel, one array entry each, and the group of heads that each is for."""

    group: Integers
    first: Integers
    stride: Integers
    rows: Integers

    def where(self, chosen: Integers | slice) -> Runs:
        return Runs(*(x[chosen] for x in self))

    def tokens(self, groups: int) -> tuple[Integers, ...]:
        """Of each group those of all its progressions, ascending, each once."""
        found = [np.empty(0, np.int64)] * groups
        low, high = np.full(groups, np.iinfo(np.int64).max), np.full(groups, -1)
        np.minimum.at(low, self.group, self.first)
        np.maximum.at(high, self.group, self.first + self.stride * (self.rows - 1))
        some = np.flatnonzero(low <= high)
        # The tokens of one group behind those of another, as far as each has any.
        ends = np.append(0, np.cumsum((high - low + 1)[some]))
        base = np.zeros(groups, np.int64)
        base[some] = ends[:-1] - low[some]
        borders = [0, *(np.flatnonzero(np.diff(ends[:-1] // MARKS)) + 1).tolist(), len(some)]
        for a, b in pairwise(borders if len(some) else []):
            chosen = self if b - a == len(some) else self.where((some[a] <= self.group) & (self.group <= some[b - 1]))
            places = chosen._places(base[chosen.group] + chosen.first - ends[a], int(ends[b] - ends[a]))
            stops = np.searchsorted(places, ends[a : b + 1] - ends[a]).tolist()
            for group, first, stop in zip(some[a:b].tolist(), stops, stops[1:]):
                found[group] = places[first:stop] + (ends[a] - base[group])
        return tuple(found)

    def _places(self, begin: Integers, size: int) -> Integers:
        """Numbers below a size, ascending and each once: of each progression those from where it begins on."""
        total = int(self.rows.sum())
        if total >= LONG * len(self.rows):
            seen = np.zeros(size, bool)
            for at, step, count in zip(begin.tolist(), self.stride.tolist(), self.rows.tolist()):
                seen[at : at + step * count : step] = True
            return np.flatnonzero(seen)
        run, number = expanded(np.zeros_like(self.rows), self.rows)
        found = begin[run] + number * self.stride[run]
        if size >= SPREAD * total:
            return np.unique(found)
        seen = np.zeros(size, bool)
        seen[found] = True
        return np.flatnonzero(seen)


@dataclass(frozen=True, eq=False)
class Message:
    """Rows that travel from or to a peer: head after head, ascending, and of each the tokens of its group, ascending."""

    peer: int
    heads: Integers  # those that have rows
    group: Integers  # of each of them
    tokens: tuple[Integers, ...]  # of each group, of the whole sequence

    @cached_property
    def counts(self) -> Integers:
        """Rows of each head."""
        return self._count[self.group]

    @cached_property
    def _count(self) -> Integers:
        """Rows of each group."""
        return np.array([len(tokens) for tokens in self.tokens], np.int64)

    @cached_property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def _begin(self) -> Integers:
        """Where each head begins."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def _numbers(self) -> tuple[Integers, Integers, Integers, Integers]:
        """Of each group its first token, what makes its tokens numbers that all groups share, and how many tokens come before; and
        the numbers of all, ascending: those of one group behind another's, as far as each reaches."""
        low = np.array([tokens[0] if len(tokens) else 0 for tokens in self.tokens], np.int64)
        width = np.array([tokens[-1] + 1 if len(tokens) else 0 for tokens in self.tokens], np.int64) - low
        base = np.cumsum(width) - width - low
        numbers = np.concatenate([at + tokens for at, tokens in zip(base.tolist(), self.tokens)])
        return low, base, np.cumsum(self._count) - self._count, numbers

    @cached_property
    def _table(self) -> NDArray[np.int32] | None:
        """Of each number its place, or -1; where they are too many, None."""
        numbers = self._numbers[3]
        size = int(numbers[-1]) + 1
        if size > LOOKED * len(numbers):
            return None
        table = np.full(size, -1, np.int32)
        table[numbers] = np.arange(len(numbers))
        return table

    def _found(self, asked: Integers) -> Integers:
        """The places of some numbers."""
        if self._table is not None:
            found = self._table[asked].astype(np.int64)
            travel = found >= 0
        else:
            numbers = self._numbers[3]
            found = np.searchsorted(numbers, asked)
            travel = numbers[np.minimum(found, len(numbers) - 1)] == asked
        assert travel.all(), "a row that does not travel"
        return found

    def places(self, heads: Integers, first: Integers, stride: int, rows: int) -> tuple[Integers, Integers, Integers]:
        """Where the rows `first, first + stride, ...` of some heads, a lane each, stand in the message.

        Returns:
            `(kinds, rows)` places from the first row of the head on; which of these is each lane's; where its head begins.
        """
        low, base, before, _ = self._numbers
        at = self.heads.searchsorted(heads)
        group = self.group[at]
        assert (low[group] <= first).all(), "a row that does not travel"
        lane, which = base[group] + first, np.arange(len(group))
        if len(self.tokens) < len(self.heads):
            lane, some, which = np.unique(lane, return_index=True, return_inverse=True)
            group = group[some]
        found = self._found(lane[:, None] + stride * np.arange(rows))
        # A row behind the last of its group would stand among those of the next.
        found = found - before[group][:, None]
        assert (found[:, -1] < self._count[group]).all(), "a row that does not travel"
        return found, which, self._begin[at]

    def blocks(self) -> Iterator[tuple[Integers, Integers, Integers]]:
        """Neighbouring heads of as many rows: these, `(kinds, rows)` tokens, and which of these is each head's."""
        borders = [0, *(np.flatnonzero(np.diff(self.counts)) + 1).tolist(), len(self.heads)]
        for a, b in pairwise(borders):
            # Most often neighbours differ.
            groups, which = self.group[a:b], np.arange(b - a)
            if len(self.tokens) < len(self.heads):
                groups, which = np.unique(groups, return_inverse=True)
            yield self.heads[a:b], np.stack([self.tokens[group] for group in groups.tolist()]), which


def messages(plan: ContextPlan, exchange: str, kind: str, rank: int, *, sent: bool) -> Iterator[Message]:
    """Peer by peer what a rank sends or receives. One at a time: the rows of all ranks together would be the whole sequence."""
    spans = plan.spans(exchange, kind, rank, sent=sent)
    if not len(spans.first):
        return
    # Where heads are dealt the receiver depends on the head, else heads of a class need the same rows: those of its first.
    groups = plan.classes.values()
    alike = [(head,) for heads in groups for head in heads] if exchange == "heads" else list(groups)
    peer, runs = _runs(plan, spans, [heads[0] for heads in alike], sent=sent)
    order = np.argsort(peer.astype(np.min_scalar_type(plan.num_ranks)), kind="stable")  # of narrow integers it counts
    peer = peer[order]
    if not len(peer):
        return
    borders = np.flatnonzero(np.diff(peer)) + 1
    heads, of = np.array(sorted((head, number) for number, those in enumerate(alike) for head in those), np.int64).T
    for number, some in zip(peer[np.append(0, borders)].tolist(), np.split(order, borders)):
        tokens = runs.where(some).tokens(len(alike))
        has_rows = np.array([len(x) > 0 for x in tokens])[of]
        yield Message(number, heads[has_rows], of[has_rows], tokens)


def _runs(plan: ContextPlan, spans: Spans, heads: Sequence[int], *, sent: bool) -> tuple[Integers, Runs]:
    """What travels of one span or more for some heads, each of a group: the peer, and what; those of two branches may overlap."""
    spans = spans.alone(plan.rates)
    start, those, offsets = plan.all_kept
    group = np.full(len(plan.within), -1)
    group[heads] = np.arange(len(heads))
    chosen = np.flatnonzero(group[those] >= 0)
    place = start[spans.branch] + spans.place
    first, end = np.searchsorted(chosen, place), np.searchsorted(chosen, place + spans.places)
    found = []
    for a, b in portions(end - first, TOGETHER):
        of, which = expanded(first[a:b], (end - first)[a:b])
        here, at = spans.where(slice(a, b)).where(of), chosen[which]
        rate = plan.rates[here.branch]
        some, begin, rows = rows_of(here, rate, offsets[at], here.place)
        found.append(((here.receiver if sent else here.sender)[some], group[those[at]][some], begin, rate[some], rows))
    peer, *columns = (np.concatenate(column) for column in zip(*found))
    return peer, Runs(*columns)
