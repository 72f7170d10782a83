"""List the rows that one rank exchanges, message by message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.spans import Integers, Spans, expanded, portions, rows_of

SPREAD = 64  # with more tokens than so many per row, rows are sorted; else they are marked in a table of tokens
MARKS = 1 << 24  # bytes of such a table
TOGETHER = 1 << 16  # spans, each of one head, that are listed together
ROWS = 1 << 20  # rows, of several peers, that are listed together
LOOKED = 32  # with more tokens than so many per row, rows are found by a binary search; else in a table of tokens
LONG = 16  # progressions of so many rows on average are marked one by one


class Runs(NamedTuple):
    """Arithmetic progressions of tokens that travel, and the group of heads that each is for: arrays over progressions."""

    group: Integers
    first: Integers
    stride: Integers
    rows: Integers

    def where(self, chosen: Integers | slice) -> Runs:
        return Runs(*(x[chosen] for x in self))

    def tokens(self, groups: int) -> tuple[Integers, ...]:
        """Per group, the tokens of its progressions, ascending, each once."""
        found = [np.empty(0, np.int64)] * groups
        low, high = np.full(groups, np.iinfo(np.int64).max), np.full(groups, -1)
        np.minimum.at(low, self.group, self.first)
        np.maximum.at(high, self.group, self.first + self.stride * (self.rows - 1))
        some = np.flatnonzero(low <= high)
        # One line of numbers, on which the tokens of one group follow those of another.
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
        """The numbers below `size` that the progressions hold, ascending, each once, if they begin at `begin`."""
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
    """Rows that travel from or to a peer: head after head, ascending, and per head the tokens of its group, ascending."""

    peer: int
    heads: Integers  # heads that have rows
    group: Integers  # the group of each of these heads
    tokens: tuple[Integers, ...]  # per group, tokens of the whole sequence

    @cached_property
    def counts(self) -> Integers:
        """`(heads,)` rows of each head."""
        return self._count[self.group]

    @cached_property
    def _count(self) -> Integers:
        """`(groups,)` rows of each group."""
        return np.array([len(tokens) for tokens in self.tokens], np.int64)

    @cached_property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def _begin(self) -> Integers:
        """`(heads,)` place in the message of the first row of each head."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def _numbers(self) -> tuple[Integers, Integers, Integers, Integers]:
        """One line of numbers, on which the tokens of one group follow those of another.

        Per group its first token, what is added to a token to get its number, and the tokens of the groups before; and the numbers
        of all tokens, ascending.
        """
        low = np.array([tokens[0] if len(tokens) else 0 for tokens in self.tokens], np.int64)
        width = np.array([tokens[-1] + 1 if len(tokens) else 0 for tokens in self.tokens], np.int64) - low
        base = np.cumsum(width) - width - low
        numbers = np.concatenate([at + tokens for at, tokens in zip(base.tolist(), self.tokens)])
        return low, base, np.cumsum(self._count) - self._count, numbers

    @cached_property
    def _table(self) -> NDArray[np.int32] | None:
        """The place of each number, or -1; None if numbers are too many for a table."""
        numbers = self._numbers[3]
        size = int(numbers[-1]) + 1
        if size > LOOKED * len(numbers):
            return None
        table = np.full(size, -1, np.int32)
        table[numbers] = np.arange(len(numbers))
        return table

    def _found(self, asked: Integers) -> Integers:
        """The places of numbers among all that travel."""
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
        """Find rows `first, first + stride, ...` of some heads, one lane per head, in the message.

        Returns:
            `(kinds, rows)` places, counted from the first row of the head; the kind of each lane; the place where its head begins.
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
        # A row after the last of its group would be found among those of the next group.
        found = found - before[group][:, None]
        assert (found[:, -1] < self._count[group]).all(), "a row that does not travel"
        return found, which, self._begin[at]

    def blocks(self) -> Iterator[tuple[Integers, Integers, Integers]]:
        """Neighbouring heads with equal numbers of rows: the heads, `(kinds, rows)` tokens, and the kind of each head."""
        borders = [0, *(np.flatnonzero(np.diff(self.counts)) + 1).tolist(), len(self.heads)]
        for a, b in pairwise(borders):
            groups, which = self.group[a:b], np.arange(b - a)
            if len(self.tokens) < len(self.heads):
                groups, which = np.unique(groups, return_inverse=True)
            yield self.heads[a:b], np.stack([self.tokens[group] for group in groups.tolist()]), which


def messages(plan: ContextPlan, exchange: str, kind: str, rank: int, *, sent: bool) -> Iterator[Message]:
    """The messages that a rank sends or receives, one peer at a time: all together could hold the whole sequence."""
    alone = range(rank, rank + 1)
    spans = plan.spans(exchange, kind, senders=alone) if sent else plan.spans(exchange, kind, receivers=alone)
    if not len(spans.first):
        return
    # If heads are assigned to ranks, the receiver depends on the head. Else all heads of a class need the rows of its first head.
    groups = plan.classes.values()
    alike = [(head,) for heads in groups for head in heads] if exchange == "heads" else list(groups)
    peer, runs = _runs(plan, spans, [heads[0] for heads in alike], sent=sent)
    order = np.argsort(peer.astype(np.min_scalar_type(plan.num_ranks)), kind="stable")  # numpy sorts narrow integers by counting
    peer = peer[order]
    if not len(peer):
        return
    begin = np.append(0, np.flatnonzero(np.diff(peer)) + 1)  # where each peer begins
    peers, runs, end = peer[begin].tolist(), runs.where(order), np.append(begin[1:], len(peer))
    heads, of = np.array(sorted((head, number) for number, those in enumerate(alike) for head in those), np.int64).T
    # Some peers together: all rows of a rank could be the whole sequence, and a few rows of each of many peers take long.
    for a, b in portions(np.add.reduceat(runs.rows, begin), ROWS):
        here = runs.where(slice(begin[a], end[b - 1]))
        number = np.repeat(np.arange(b - a), (end - begin)[a:b])
        found = here._replace(group=number * len(alike) + here.group).tokens((b - a) * len(alike))
        for i in range(b - a):
            tokens = found[i * len(alike) : (i + 1) * len(alike)]
            has_rows = np.array([len(x) > 0 for x in tokens])[of]
            yield Message(peers[a + i], heads[has_rows], of[has_rows], tokens)


def _runs(plan: ContextPlan, spans: Spans, heads: Sequence[int], *, sent: bool) -> tuple[Integers, Runs]:
    """What travels for some heads, one of each group: the peer, and the progression. Those of two branches may overlap."""
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
