"""How many different rows travel between ranks: exact, at a bounded cost for any pattern.

The union over branches is counted on a line of tokens whose entries are sets of heads, one bit each: what a branch adds is its
spans, or, where few spans are long, one common period of them. Pairs of ranks whose spans lie alike are counted once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.distributed.spans import Integers, Kept, Spans, Traffic, expanded

Sets = NDArray[np.unsignedinteger]

WORD = 64  # heads counted at once
BLOCK = 1 << 18  # tokens counted at once: a line of sets stays in a cache
LIMIT = 1 << 62  # of what 64 bits hold
TILE = 1 << 15  # tokens along which sets of heads are kept
KEEP = 1 << 26  # bytes of them
FEW = 4  # spans of a branch between two ranks that are looked at one by one


class Counter:
    """Counts the different (token, head) of pairs of ranks, the union over branches: pairs whose spans lie alike once."""

    def __init__(self, kept: Sequence[Kept], num_ranks: int) -> None:
        self.kept, self.num_ranks = kept, num_ranks
        num_heads = max((head + 1 for _, heads in kept for head, _ in heads), default=0)
        self._lines = [_Line(kept, low, min(num_heads, low + WORD)) for low in range(0, num_heads, WORD)]
        self._known: dict[bytes, int] = {}  # by what `_shapes` says of a pair

    def count(self, spans: Spans) -> Traffic:
        """The rows of some pairs of ranks, of which these are all spans."""
        pair = spans.receiver * self.num_ranks + spans.sender
        order = np.argsort(pair, kind="stable")
        spans, pair = spans.where(order), pair[order]
        start = np.flatnonzero(np.diff(pair, prepend=-1))
        size = np.diff(np.append(start, len(pair)))
        rows = np.zeros(len(start), np.int64)
        few = size <= FEW * len(self.kept)
        rows[few] = self._count_few(spans if few.all() else spans.where(np.repeat(few, size)), size[few])
        for i in np.flatnonzero(~few).tolist():
            here = slice(start[i], start[i] + size[i])
            rows[i] = sum(line.count_blocks(spans.where(here)) for line in self._lines)
        some = rows > 0
        pairs = pair[start[some]]
        return Traffic(pairs // self.num_ranks, pairs % self.num_ranks, rows[some])

    def _count_few(self, spans: Spans, size: Integers) -> Integers:
        """Rows of pairs of ranks that have so many spans each: one pair's after another's."""
        start = np.cumsum(size) - size
        rows = np.zeros(len(size), np.int64)
        shapes = _shapes(spans, self.kept, start, size)
        for many in np.unique(size):
            chosen = np.flatnonzero(size == many)
            tables = shapes[:, start[chosen][:, None] + np.arange(many)].transpose(1, 0, 2).reshape(len(chosen), -1)
            name = _names(tables.T)
            _, one, group = np.unique(name, return_index=True, return_inverse=True)
            counts = np.empty(len(one), np.int64)
            for i, at in enumerate(one.tolist()):
                key = tables[at].tobytes()
                found = self._known.get(key)
                if found is None:
                    here = slice(start[chosen[at]], start[chosen[at]] + many)
                    found = self._known[key] = sum(line.count_cells(spans.where(here)) for line in self._lines)
                counts[i] = found
            rows[chosen] = counts[group.reshape(-1)]
        return rows


def _shapes(spans: Spans, kept: Sequence[Kept], start: Integers, size: Integers) -> Integers:
    """`(8, spans)`: where each lies beside the others of its pair of ranks. Pairs of the same columns have as many rows."""
    base = np.repeat(np.minimum.reduceat(spans.first, start), size)
    rates = np.array([each.rate for each in kept], np.int64)[spans.branch]
    phase = (base - spans.origin) % rates
    return np.stack(
        [spans.branch, spans.first - base, spans.end - base, phase, spans.residue, spans.residues, spans.place, spans.places]
    )


def _names(columns: Integers) -> Integers:
    """A number for each entry of some columns: the same for those that are alike in all, and for no others."""
    name, extent = np.zeros(columns.shape[1], np.int64), 1
    for column in columns:
        low = int(column.min())
        wide = int(column.max()) - low + 1
        if wide == 1:
            continue
        if extent * wide >= LIMIT:
            values, name = np.unique(name, return_inverse=True)
            name, extent = name.reshape(-1), len(values)
        if extent * wide >= LIMIT:
            values, column = np.unique(column, return_inverse=True)
            column, low, wide = column.reshape(-1), 0, len(values)
        name, extent = name * wide + (column - low), extent * wide
    return name


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


def _joined(spans: list[_Span]) -> list[_Span]:
    """The same, of neighbouring heads of one segment in one piece; all hold the same tokens."""
    found: list[_Span] = []
    for span in spans:
        last = found[-1] if found else None
        if (
            last is not None
            and (last.branch, last.origin, last.residue, last.residues) == (span.branch, span.origin, span.residue, span.residues)
            and last.place + last.places == span.place
        ):
            found[-1] = last._replace(places=last.places + span.places)
        else:
            found.append(span)
    return found


class _Line:
    """Sets of heads along a line of tokens; heads `low ... high`, a bit each."""

    def __init__(self, kept: Sequence[Kept], low: int, high: int) -> None:
        self.kept = kept
        dtypes: tuple[type[np.unsignedinteger[Any]], ...] = (np.uint8, np.uint16, np.uint32, np.uint64)
        self.dtype = next(t for t in dtypes if np.dtype(t).itemsize * 8 >= high - low)
        self._heads = [
            [(place, offset, head - low) for place, (head, offset) in enumerate(heads) if low <= head < high] for _, heads in kept
        ]
        self._kinds: dict[tuple[int, ...], list[tuple[int, np.unsignedinteger[Any]]]] = {}
        self._tiles: dict[tuple[int, ...], Sets] = {}
        self._room = KEEP

    def count_cells(self, spans: Spans) -> int:
        """Rows of a few spans: between two neighbouring ends of spans, a common period of what covers them is enough."""
        columns = (spans.branch, *spans[3:])
        found = [_Span(*values) for values in zip(*(x.tolist() for x in columns))]
        total = 0
        for a, b in pairwise(sorted({edge for span in found for edge in (span.first, span.end)})):
            covering = _joined([span for span in found if span.first <= a and b <= span.end])
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
        rate = self.kept[span.branch].rate
        phase = (first - span.origin) % rate
        if span.residues == rate and rate + len(seen) <= TILE:
            tile = self._tile(span.branch, span.place, span.places, len(seen))
            seen |= tile[phase : phase + len(seen)]
            return
        for offset, members in self._kind(span.branch, span.place, span.places):
            if (offset - span.residue) % rate < span.residues:
                seen[(offset - phase) % rate :: rate] |= members

    def _tile(self, branch: int, place: int, places: int, tokens: int) -> Sets:
        """The sets of some heads along so many tokens from any residue on."""
        rate, key = self.kept[branch].rate, (branch, place, places)
        tile = self._tiles.get(key)
        if tile is None or len(tile) < rate + tokens:
            tile = np.tile(self._table(*key), 2 + tokens // rate)
            if tile.nbytes > self._room:
                self._tiles, self._room = {}, KEEP
            self._room -= tile.nbytes
            self._tiles[key] = tile
        return tile

    def _table(self, branch: int, place: int, places: int) -> Sets:
        """`(rate,)`: the heads, of some, that keep each residue."""
        table = np.zeros(self.kept[branch].rate, self.dtype)
        for offset, members in self._kind(branch, place, places):
            table[offset] = members
        return table

    def _kind(self, branch: int, place: int, places: int) -> list[tuple[int, np.unsignedinteger[Any]]]:
        """Different offsets of some heads of a branch, and who has them."""
        key = (branch, place, places)
        if key not in self._kinds:
            found: dict[int, int] = {}
            for at, offset, bit in self._heads[branch]:
                if place <= at < place + places:
                    found[offset] = found.get(offset, 0) | 1 << bit
            self._kinds[key] = [(offset, self.dtype(members)) for offset, members in found.items()]
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
        edges = [0, *(np.flatnonzero(np.diff(spans.branch)) + 1).tolist(), len(spans.branch)]
        for here in (spans.where(slice(*ends)) for ends in pairwise(edges)):
            branch = int(here.branch[0])
            rate, heads = self.kept[branch]
            whole = (here.residues == rate) & (here.places == len(heads))
            if whole.all():
                self._add_whole(seen, here, branch, begin)
                continue
            self._add_whole(seen, here.where(whole), branch, begin)
            rest = here.where(~whole)
            for values in zip(*(x.tolist() for x in (rest.branch, *rest[3:]))):
                span = _Span(*values)
                self._add(seen[span.first - begin : span.end - begin], span, span.first)
        return _num_members(seen)

    def _add_whole(self, seen: Sets, spans: Spans, branch: int, begin: int) -> None:
        """Add to the tokens from `begin` on all heads that keep them, of spans of one branch in which all take part."""
        run, at = expanded(spans.first, spans.end - spans.first)
        # Spans of one branch are disjoint: no token is written twice.
        seen[at - begin] |= self._table(branch, 0, len(self.kept[branch].heads))[(at - spans.origin[run]) % self.kept[branch].rate]


if hasattr(np, "bitwise_count"):

    def _num_members(sets: Sets) -> int:
        """How many heads all sets hold together."""
        return int(np.bitwise_count(sets).sum(dtype=np.int64))

else:  # numpy before 2.0
    _MEMBERS = np.array([bin(x).count("1") for x in range(256)], np.uint8)

    def _num_members(sets: Sets) -> int:
        """How many heads all sets hold together."""
        return int(_MEMBERS[np.ascontiguousarray(sets).view(np.uint8)].sum(dtype=np.int64))
