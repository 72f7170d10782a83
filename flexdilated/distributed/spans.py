"""Runs of tokens that ranks need of each other, and how many different rows they hold: exact, at a bounded cost for any pattern.

A span is a run of neighbouring tokens of one segment. Each head keeps those of its own residue, so a span speaks for all heads at
once, and of one branch the spans between two ranks are disjoint. The union over branches is counted on a line of tokens whose
entries are sets of heads, one bit each: what a branch adds is its spans, or, where few spans are long, one common period of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Sets = NDArray[np.unsignedinteger]

WORD = 64  # heads counted at once
BLOCK = 1 << 18  # tokens counted at once: a line of sets stays in a cache
FEW = 4  # spans of a branch between two ranks that are looked at one by one


class Kept(NamedTuple):
    """What the heads held here keep of one branch."""

    rate: int
    heads: tuple[tuple[int, int], ...]  # (head, offset), ascending


class Spans(NamedTuple):
    """Tokens that `receiver` gets from `sender`, one array entry per span, branch by branch and ascending in each pair of ranks.

    Of token `t` the offset is `(t - origin) % rate`. Not all offsets need take part, but `residues` from `residue` on, modulo the
    rate; nor all heads of the branch, but `places` from `place` on.
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

    def where(self, chosen: Booleans | Integers) -> Spans:
        return Spans(*(x[chosen] for x in self))

    @classmethod
    def joined(cls, parts: Sequence[Spans]) -> Spans:
        if not parts:
            return cls(*(np.empty(0, np.int64) for _ in cls._fields))
        return cls(*(np.concatenate(columns) for columns in zip(*parts)))


class Rows(NamedTuple):
    """Of some spans those that hold rows of one offset: which, the first such token, and how many."""

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


def rows_of(spans: Spans, rate: int, offset: int, place: int) -> Rows:
    """The rows of one head in spans of one branch: its offset, and its place among the heads of the branch."""
    first = spans.first + (offset - (spans.first - spans.origin)) % rate
    takes_part = (offset - spans.residue) % rate < spans.residues
    takes_part &= (spans.place <= place) & (place < spans.place + spans.places)
    chosen = np.flatnonzero(takes_part & (first < spans.end))
    return Rows(chosen, first[chosen], (spans.end[chosen] - first[chosen] - 1) // rate + 1)


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


def count_rows(spans: Spans, kept: Sequence[Kept], num_ranks: int) -> Traffic:
    """The number of different (token, head) per pair of ranks: the union over branches."""
    pair = spans.receiver * num_ranks + spans.sender
    order = np.argsort(pair, kind="stable")
    spans = spans.where(order)
    pairs, start, size = np.unique(pair[order], return_index=True, return_counts=True)
    rows = np.zeros(len(pairs), np.int64)
    few = size <= FEW * len(kept)
    groups = [*_alike(spans, kept, start, size, few), *((np.array([i]), i) for i in np.flatnonzero(~few))]
    num_heads = 1 + max((head for _, heads in kept for head, _ in heads), default=-1)
    for low in range(0, num_heads, WORD):
        line = _Line(kept, low, min(num_heads, low + WORD))
        for members, i in groups:
            here = spans.where(slice(start[i], start[i] + size[i]))  # type: ignore[arg-type]
            rows[members] += line.count_cells(here) if few[i] else line.count_blocks(here)
    some = rows > 0
    return Traffic(pairs[some] // num_ranks, pairs[some] % num_ranks, rows[some])


def _alike(
    spans: Spans, kept: Sequence[Kept], start: Integers, size: Integers, few: Booleans
) -> Iterator[tuple[Integers, np.int64]]:
    """The pairs of ranks with few spans, in groups of the same ones, and one pair of each: many ranks may need the same rows."""
    rates, heads = (np.array(x, np.int64)[spans.branch] for x in ([k.rate for k in kept], [len(k.heads) for k in kept]))
    _, first = np.unique(spans.first, return_inverse=True)
    _, end = np.unique(spans.end, return_inverse=True)
    # Its place tells a span's segment. One that speaks for some offsets or heads alone is like no other.
    name = (first * (len(end) + 1) + end) * len(kept) + spans.branch
    whole = (spans.residues == rates) & (spans.places == heads)
    name = np.where(whole, name, -1 - np.arange(len(name)))
    for many in np.unique(size[few]):
        chosen = np.flatnonzero(size == many)
        names = name[start[chosen][:, None] + np.arange(many)]
        _, one, group = np.unique(names, axis=0, return_index=True, return_inverse=True)
        group = group.reshape(-1)
        order = np.argsort(group, kind="stable")
        borders = np.searchsorted(group[order], np.arange(len(one) + 1))
        for i, (a, b) in enumerate(pairwise(borders)):
            yield chosen[order[a:b]], chosen[one[i]]


class _Span(NamedTuple):
    """One entry of `Spans`, without the ranks."""

    branch: int
    first: int
    end: int
    origin: int
    residue: int
    residues: int
    place: int
    places: int


class _Line:
    """Sets of heads along a line of tokens; heads `low ... high`, a bit each."""

    def __init__(self, kept: Sequence[Kept], low: int, high: int) -> None:
        self.kept = kept
        dtypes: tuple[type[np.unsignedinteger[Any]], ...] = (np.uint8, np.uint16, np.uint32, np.uint64)
        self.dtype = next(t for t in dtypes if np.dtype(t).itemsize * 8 >= high - low)
        self._heads = [
            [(place, offset, head - low) for place, (head, offset) in enumerate(heads) if low <= head < high] for _, heads in kept
        ]
        self._kinds: dict[tuple[int, ...], tuple[Integers, Sets]] = {}
        self._tiles: dict[int, Sets] = {}

    def count_cells(self, spans: Spans) -> int:
        """Rows of a few spans: between two neighbouring ends of spans, a common period of what covers them is enough."""
        columns = (spans.branch, *spans[3:])
        found = [_Span(*values) for values in zip(*(x.tolist() for x in columns))]
        total = 0
        for a, b in pairwise(sorted({edge for span in found for edge in (span.first, span.end)})):
            covering = [span for span in found if span.first <= a and b <= span.end]
            period = math.lcm(*(self.kept[span.branch].rate for span in covering))
            repeats, rest = divmod(b - a, period) if 2 * period <= b - a else (0, b - a)
            total += repeats * self._cell(covering, a, period) if repeats else 0
            total += self._cell(covering, a, rest)
        return total

    def _cell(self, covering: Sequence[_Span], first: int, tokens: int) -> int:
        """Rows of the tokens from `first` on, all of them in each span."""
        if not covering or not tokens:
            return 0
        seen = np.zeros(tokens, self.dtype)
        for span in covering:
            self._add(seen, span, first)
        return _num_members(seen)

    def _add(self, seen: Sets, span: _Span, first: int) -> None:
        """Add to each of the tokens from `first` on the heads of a span that keep it."""
        rate, heads = self.kept[span.branch]
        phase = (first - span.origin) % rate
        is_whole = span.residues == rate and span.places == len(heads)
        if is_whole and rate < len(seen):
            tile = self._tiles.get(span.branch)
            if tile is None or len(tile) < rate + len(seen):
                tile = self._tiles[span.branch] = np.tile(self._table(span.branch), 2 + len(seen) // rate)
            seen |= tile[phase : phase + len(seen)]
            return
        offsets, sets = self._kind(span.branch, span.place, span.places)
        if not is_whole:
            takes_part = (offsets - span.residue) % rate < span.residues
            offsets, sets = offsets[takes_part], sets[takes_part]
        at = (offsets - phase) % rate
        if rate < len(seen):
            for begin, members in zip(at, sets):
                seen[begin::rate] |= members
        else:
            seen[at[at < len(seen)]] |= sets[at < len(seen)]

    def _table(self, branch: int) -> Sets:
        """`(rate,)`: the heads that keep each residue."""
        rate, heads = self.kept[branch]
        table = np.zeros(rate, self.dtype)
        offsets, sets = self._kind(branch, 0, len(heads))
        table[offsets] = sets
        return table

    def _kind(self, branch: int, place: int, places: int) -> tuple[Integers, Sets]:
        """Different offsets of some heads of a branch, and who has them."""
        key = (branch, place, places)
        if key not in self._kinds:
            found: dict[int, int] = {}
            for at, offset, bit in self._heads[branch]:
                if place <= at < place + places:
                    found[offset] = found.get(offset, 0) | 1 << bit
            self._kinds[key] = np.array(list(found), np.int64), np.array(list(found.values()), self.dtype)
        return self._kinds[key]

    def count_blocks(self, spans: Spans) -> int:
        """Rows of any number of spans, a block of tokens at a time."""
        low, high = int(spans.first.min()), int(spans.end.max())
        total = 0
        for begin in range(low, high, BLOCK):
            stop = min(high, begin + BLOCK)
            here = spans
            if high - low > BLOCK:
                here = spans.where((spans.end > begin) & (spans.first < stop))
                here = here._replace(first=np.maximum(here.first, begin), end=np.minimum(here.end, stop))
            total += self._block(here, begin, stop - begin) if len(here.first) else 0
        return total

    def _block(self, spans: Spans, begin: int, tokens: int) -> int:
        seen = np.zeros(tokens, self.dtype)
        for branch in np.unique(spans.branch):
            rate, heads = self.kept[branch]
            here = spans.where(spans.branch == branch)
            whole = (here.residues == rate) & (here.places == len(heads))
            every = here.where(whole)
            run, at = expanded(every.first, every.end - every.first)
            # Spans of one branch are disjoint: no token is written twice.
            seen[at - begin] |= self._table(branch)[(at - every.origin[run]) % rate]
            rest = here.where(~whole)
            for values in zip(*(x.tolist() for x in (rest.branch, *rest[3:]))):
                span = _Span(*values)
                self._add(seen[span.first - begin : span.end - begin], span, span.first)
        return _num_members(seen)


if hasattr(np, "bitwise_count"):

    def _num_members(sets: Sets) -> int:
        """How many heads all sets hold together."""
        return int(np.bitwise_count(sets).sum(dtype=np.int64))

else:  # numpy before 2.0
    _MEMBERS = np.array([bin(x).count("1") for x in range(256)], np.uint8)

    def _num_members(sets: Sets) -> int:
        """How many heads all sets hold together."""
        return int(_MEMBERS[np.ascontiguousarray(sets).view(np.uint8)].sum(dtype=np.int64))


def kept_below(length: Integers, rate: int, offset: int) -> Integers:
    """How many positions `offset, offset + rate, ...` lie below `length`."""
    return np.maximum(0, -((offset - length) // rate))
