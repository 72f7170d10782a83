"""Sets of heads along a line of tokens: how many different rows some spans hold, at a cost that tokens and spans bound.

An entry is a set of heads, one bit each: what a branch adds is its spans, or, where few spans are long, one common period of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.distributed.spans import Kept, Spans, expanded

Sets = NDArray[np.unsignedinteger]

WORDS: dict[int, type[np.unsignedinteger[Any]]] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}  # by heads of a set
WIDEST = max(WORDS)
BLOCK = 1 << 18  # tokens counted at once: a line of sets stays in a cache
TILE = 1 << 15  # tokens along which sets of heads are kept
DIRECT = 1 << 16  # tokens between two ranks that are always looked at
FEW = 4  # spans of a branch between two ranks, of which periods are looked for
MANY = 64  # that are looked at one by one
KINDS = 3  # offsets of heads that are added one by one
KEEP = 1 << 26  # bytes of them


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
    period: int


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


class Lines:
    """Counts rows along lines of sets, each of so many heads as some spans have."""

    def __init__(self, kept: Sequence[Kept]) -> None:
        self.kept, self._tiles = kept, Tiles()
        # Branch by branch its heads and their offsets, and where those of each branch stand.
        self.heads, self.offsets = np.array([one for each in kept for one in each.heads], np.int64).reshape(-1, 2).T
        self.start = np.cumsum([0, *(len(each.heads) for each in kept)])
        self._lines: dict[tuple[int, int], Line] = {}

    def count(self, spans: Spans) -> int:
        """Rows of spans, between two ranks."""
        place = self.start[spans.branch] + spans.place
        low, high = int(self.heads[place].min()), int(self.heads[place + spans.places - 1].max()) + 1
        return sum(self._line(*window).count(spans) for window in _windows(low, high))

    def _line(self, low: int, high: int) -> Line:
        if (low, high) not in self._lines:
            self._lines[low, high] = Line(self.kept, low, high, self._tiles)
        return self._lines[low, high]


def _windows(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Heads `low ... high` in as few and as narrow words as hold them; few different ones."""
    for bits in WORDS:
        first = low - low % (bits // 2)
        if high <= first + bits:
            yield first, first + bits
            return
    for first in range(low - low % WIDEST, high, WIDEST):
        yield first, first + WIDEST


class Tiles:
    """Sets of heads along some tokens, kept to be looked at again."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], Sets] = {}
        self._room = KEEP

    def get(self, key: tuple[int, ...], tokens: int, table: Callable[[], Sets]) -> Sets:
        """At least so many entries, of a table over and over."""
        tile = self._found.get(key)
        if tile is None or len(tile) < tokens:
            entries = table()
            tile = np.tile(entries, -(-tokens // len(entries)))
            if tile.nbytes > self._room:
                self._found, self._room = {}, KEEP
            self._room -= tile.nbytes
            self._found[key] = tile
        return tile


class Line:
    """Sets of heads along a line of tokens; heads `low ... high`, a bit each."""

    def __init__(self, kept: Sequence[Kept], low: int, high: int, tiles: Tiles) -> None:
        self.kept, self._window, self._tiles = kept, (low, high), tiles
        self.dtype = WORDS[high - low]
        self._heads = [
            [(place, offset, head - low) for place, (head, offset) in enumerate(heads) if low <= head < high] for _, heads in kept
        ]
        self._kinds: dict[tuple[int, ...], list[tuple[int, np.unsignedinteger[Any]]]] = {}

    def count(self, spans: Spans) -> int:
        """Rows of spans, between two ranks."""
        tokens, several = int(spans.end.max() - spans.first.min()), len(spans.first)
        if several > MANY * len(self.kept) or (tokens > DIRECT and several > FEW * len(self.kept)):
            return self._count_blocks(spans)
        found = [_Span(*values) for values in zip(*(x.tolist() for x in (spans.branch, *spans[3:])))]
        return self._count_directly(found) if tokens <= DIRECT else self._count_cells(found)

    def _count_directly(self, found: Sequence[_Span]) -> int:
        """Rows of spans that lie close, one by one."""
        low, high = min(span.first for span in found), max(span.end for span in found)
        seen = np.zeros(high - low, self.dtype)
        for span in found:
            self._add(seen[span.first - low : span.end - low], span, span.first)
        return _num_members(seen)

    def _count_cells(self, found: Sequence[_Span]) -> int:
        """Rows of a few spans: between two neighbouring ends of spans, a common period of what covers them is enough."""
        total = 0
        for a, b in pairwise(sorted({edge for span in found for edge in (span.first, span.end)})):
            covering = _joined([span for span in found if span.first <= a and b <= span.end])
            period = math.lcm(*(span.period for span in covering))
            repeats, rest = divmod(b - a, period) if 2 * period <= b - a else (0, b - a)
            total += repeats * self._cell(covering, a, period) if repeats else 0
            total += self._cell(covering, a, rest)
        return total

    def _cell(self, covering: Sequence[_Span], first: int, tokens: int) -> int:
        """Rows of the tokens from `first` on, all of them in each span."""
        total, end = 0, first + tokens if covering else first
        for begin in range(first, end, BLOCK):
            seen = np.zeros(min(BLOCK, end - begin), self.dtype)
            for span in covering:
                self._add(seen, span, begin)
            total += _num_members(seen)
        return total

    def _add(self, seen: Sets, span: _Span, first: int) -> None:
        """Add to each of the tokens from `first` on the heads of a span that keep it."""
        rate, whose = self.kept[span.branch].rate, (span.branch, span.place, span.places)
        phase, kinds = (first - span.origin) % span.period, self._kind(*whose)
        often = len(kinds) > KINDS and rate + len(seen) <= TILE if span.period == rate else span.period <= TILE
        if often and span.residues == rate:
            key = *self._window, *whose, span.period
            tile = self._tiles.get(key, span.period + len(seen), lambda: np.resize(self._table(*whose), span.period))
            seen |= tile[phase : phase + len(seen)]
            return
        length = phase + len(seen) if span.period == rate else span.period
        for begin in range(-phase, len(seen), length):
            segment, skipped = seen[max(0, begin) : begin + length], max(0, -begin)
            for offset, members in kinds:
                if (offset - span.residue) % rate < span.residues:
                    segment[(offset - skipped) % rate :: rate] |= members

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

    def _count_blocks(self, spans: Spans) -> int:
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
        rate, heads = self.kept[branch]
        # Spans of one branch are disjoint: no token is written twice.
        seen[at - begin] |= self._table(branch, 0, len(heads))[(at - spans.origin[run]) % spans.period[run] % rate]


if hasattr(np, "bitwise_count"):

    def _num_members(sets: Sets) -> int:
        """How many heads all sets hold together."""
        return int(np.bitwise_count(sets).sum(dtype=np.int64))

else:  # numpy before 2.0
    _MEMBERS = np.array([bin(x).count("1") for x in range(256)], np.uint8)

    def _num_members(sets: Sets) -> int:
        """How many heads all sets hold together."""
        return int(_MEMBERS[np.ascontiguousarray(sets).view(np.uint8)].sum(dtype=np.int64))
