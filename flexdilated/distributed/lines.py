"""Sets of heads along a line of tokens: how many different rows spans hold.

An entry is a set of heads, one bit each: what a branch adds is its spans, or, where few spans are long, one common period of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.distributed.spans import Integers, Kept, Spans, expanded

Sets = NDArray[np.unsignedinteger]

WORDS: dict[int, type[np.unsignedinteger[Any]]] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}  # by heads of a set
WIDEST = max(WORDS)
BLOCK = 1 << 18  # tokens looked at together: a line of sets stays in a cache
TILE = 1 << 15  # tokens of a period along which sets of heads are kept
DIRECT = 1 << 16  # tokens between two ranks that are always looked at
FEW = 4  # spans of a branch between two ranks, of which periods are looked for
SHORT = 256  # tokens of spans, on average, that are looked at together
DENSE = 12  # heads' offsets for each byte and residue that are added one by one
MANY, SPARSE = 4, 4  # heads' offsets that are added as one block, and residues for each of them
PIECE = 1 << 13  # tokens of a tile, where several periods are no more
KEEP = 1 << 26  # bytes of tiles
SPAN = 1 << 16  # bytes of sets that are written in the time that it takes to begin a span


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


class Bound:
    """On what is written to count: bytes of sets, of which each span costs `SPAN` more."""

    def __init__(self, most: float) -> None:
        self.left = most

    def spend(self, spans: int, written: int) -> None:
        """Say what is to be written.

        Raises:
            _PassedError: If it is more than is left.
        """
        self.left -= spans * SPAN + written
        if self.left < 0:
            raise _PassedError


class _PassedError(Exception):
    """A bound is passed."""


class Lines:
    """Counts rows along lines of sets, each of so many heads as some spans have, within a bound."""

    def __init__(self, kept: Sequence[Kept], most: float = math.inf) -> None:
        self.kept, self._tiles, self._bound = kept, Tiles(), Bound(most)
        # Branch by branch its heads and their offsets, and where those of each branch stand.
        self.heads, self.offsets = np.array([one for each in kept for one in each.heads], np.int64).reshape(-1, 2).T
        self.start = np.cumsum([0, *(len(each.heads) for each in kept)])
        self._lines: dict[tuple[int, ...], Line] = {}

    @property
    def left(self) -> float:
        """What may still be written."""
        return self._bound.left

    def count(self, spans: Spans, size: Integers) -> Integers:
        """Rows of pairs of ranks that have so many spans each, one pair's after another's; -1 of those beyond the bound."""
        rows, start = np.full(len(size), -1, np.int64), np.cumsum(size) - size
        if len(size):
            with suppress(_PassedError):
                self._count(spans, size, start, rows)
        return rows

    def _count(self, spans: Spans, size: Integers, start: Integers, rows: Integers) -> None:
        """The same, one by one into `rows`."""
        low, high = np.minimum.reduceat(spans.first, start), np.maximum.reduceat(spans.end, start)
        near = high - low <= DIRECT
        for i in np.flatnonzero(~near).tolist():
            here = spans.where(slice(start[i], start[i] + size[i]))
            rows[i] = sum(line.count(here) for line in self._of_heads(here))
        ranks = (rank[start] for rank in (spans.receiver, spans.sender))
        # A rank receives of several, or sends to several, tokens that lie one behind another.
        for chosen in min((_behind(rank, low, high, np.flatnonzero(near)) for rank in ranks), key=len):
            here = spans.where(expanded(start[chosen], size[chosen])[1])
            here = here.continued() if len(chosen) > 1 else here
            rows[chosen] = sum(line.count_between(here, np.append(low[chosen], high[chosen[-1]])) for line in self._of_heads(here))

    def _of_heads(self, spans: Spans) -> Iterator[Line]:
        """Lines that hold all heads of some spans, as few and as narrow ones as do."""
        taken = np.zeros(int(self.heads.max()) + 1, bool)
        for place, places in set(zip((self.start[spans.branch] + spans.place).tolist(), spans.places.tolist())):
            taken[self.heads[place : place + places]] = True
        heads = np.flatnonzero(taken).tolist()
        for some in (tuple(heads[first : first + WIDEST]) for first in range(0, len(heads), WIDEST)):
            if some not in self._lines:
                self._lines[some] = Line(self.kept, some, self._tiles, self._bound)
            yield self._lines[some]


def _behind(rank: Integers, low: Integers, high: Integers, chosen: Integers) -> list[Integers]:
    """Pairs of ranks, some together: of one rank, with tokens one behind another's, and no farther than it has tokens."""
    order = chosen[np.lexsort((low[chosen], rank[chosen]))]
    rank, low, high = rank[order], low[order], high[order]
    gap = low[1:] - high[:-1]
    far = np.append(True, (rank[1:] != rank[:-1]) | (gap < 0) | (gap > (high - low)[1:]))
    found: list[list[int]] = []
    first = 0
    for pair, apart, begin, end in zip(order.tolist(), far.tolist(), low.tolist(), high.tolist()):
        if apart or end - first > BLOCK:
            found.append([])
            first = begin
        found[-1].append(pair)
    return [np.array(pairs, np.int64) for pairs in found]


class Tiles:
    """Sets of heads along some tokens, kept to be looked at again."""

    def __init__(self) -> None:
        self._names: dict[tuple[object, ...], int] = {}
        self._found: dict[tuple[int, int], Sets] = {}
        self._room = KEEP

    def name(self, of: tuple[object, ...]) -> int:
        """A number, one for all that is equal."""
        return self._names.setdefault(of, len(self._names))

    def get(self, key: tuple[int, int], period: Callable[[], Sets]) -> Sets:
        """A period over and over: as often as fits `PIECE` tokens or once, and once more."""
        tile = self._found.get(key)
        if tile is None:
            entries = period()
            tile = np.tile(entries, max(1, PIECE // len(entries)) + 1)
            if tile.nbytes > self._room:
                self._found, self._room = {}, KEEP
            self._room -= tile.nbytes
            self._found[key] = tile
        return tile


class Line:
    """Sets of heads along a line of tokens: a bit for each of some heads."""

    def __init__(self, kept: Sequence[Kept], heads: Sequence[int], tiles: Tiles, bound: Bound) -> None:
        self.kept, self._tiles, self._bound = kept, tiles, bound
        self.dtype = next(word for bits, word in WORDS.items() if len(heads) <= bits)
        self._rates = np.array([rate for rate, _ in kept], np.int64)
        self._places = np.array([len(heads) for _, heads in kept], np.int64)
        self._bits = {head: bit for bit, head in enumerate(heads)}
        self._found: dict[tuple[int, ...], _Whose] = {}

    def count_between(self, spans: Spans, borders: Integers) -> Integers:
        """Rows of spans, from each border to the next; all spans lie between the first and the last."""
        begin = int(borders[0])
        return _num_members(self._seen(spans, begin, int(borders[-1]) - begin), borders[:-1] - begin)

    def count(self, spans: Spans) -> int:
        """Rows of spans that reach far."""
        if len(spans.first) <= FEW * len(self.kept):
            return self._count_cells([_Span(*values) for values in zip(*(x.tolist() for x in (spans.branch, *spans[3:])))])
        total = 0
        low, high = int(spans.first.min()), int(spans.end.max())
        for begin in range(low, high, BLOCK):
            stop = min(high, begin + BLOCK)
            here = spans.where((spans.end > begin) & (spans.first < stop))
            here = here._replace(first=np.maximum(here.first, begin), end=np.minimum(here.end, stop))
            total += int(_num_members(self._seen(here, begin, stop - begin))[0])
        return total

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
            self._bound.spend(len(covering), len(covering) * seen.nbytes)
            for span in covering:
                self._add(seen, span, begin)
            total += int(_num_members(seen)[0])
        return total

    def _seen(self, spans: Spans, begin: int, tokens: int) -> Sets:
        """The sets of heads of some tokens, in which all spans lie."""
        seen = np.zeros(tokens, self.dtype)
        self._bound.spend(len(spans.first), int((spans.end - spans.first).sum()) * seen.itemsize)
        whole = (spans.residues == self._rates[spans.branch]) & (spans.places == self._places[spans.branch])
        of, tokens_of = spans.branch[whole], (spans.end - spans.first)[whole]
        short = np.bincount(of, tokens_of, len(self.kept)) < SHORT * np.bincount(of, minlength=len(self.kept))
        together = whole & short[spans.branch]
        if together.any():
            for branch in np.unique(spans.branch[together]):
                self._add_whole(seen, spans.where(together & (spans.branch == branch)), begin)
            spans = spans.where(~together)
        for values in zip(*(x.tolist() for x in (spans.branch, *spans[3:]))):
            span = _Span(*values)
            self._add(seen[span.first - begin : span.end - begin], span, span.first)
        return seen

    def _add_whole(self, seen: Sets, spans: Spans, begin: int) -> None:
        """Add to the tokens from `begin` on all heads that keep them, of spans of one branch in which all take part."""
        branch = int(spans.branch[0])
        rate, heads = self.kept[branch]
        run, at = expanded(spans.first, spans.end - spans.first)
        # Spans of one branch are disjoint: no token is written twice.
        table = self._whose(branch, 0, len(heads)).table()
        seen[at - begin] |= table[(at - spans.origin[run]) % spans.period[run] % rate]

    def _add(self, seen: Sets, span: _Span, first: int) -> None:
        """Add to each of the tokens from `first` on the heads of a span that keep it."""
        whose = self._whose(span.branch, span.place, span.places)
        rate, period = whose.rate, span.period
        phase = (first - span.origin) % period
        if (whose.is_dense or period != rate) and period <= TILE and span.residues == rate:
            tile = self._tiles.get((whose.name, period), lambda: np.resize(whose.table(), period))
            tile = tile[phase : phase + len(tile) - period]
            rows, rest = divmod(len(seen), len(tile))
            if rows:
                many = seen[: len(seen) - rest].reshape(rows, len(tile))
                many |= tile
            last = seen[len(seen) - rest :]
            last |= tile[:rest]
            return
        if period == rate == span.residues and whose.block is not None:
            _add_block(seen, *whose.block, rate, phase)
            return
        length = phase + len(seen) if period == rate else period
        for begin in range(-phase, len(seen), length):
            segment, skipped = seen[max(0, begin) : begin + length], max(0, -begin)
            for offset, members in zip(whose.offsets, whose.sets):
                if (offset - span.residue) % rate < span.residues:
                    segment[(offset - skipped) % rate :: rate] |= members

    def _whose(self, branch: int, place: int, places: int) -> _Whose:
        """What some heads of a branch keep."""
        key = (branch, place, places)
        found = self._found.get(key)
        if found is None:
            rate, heads = self.kept[branch]
            members: dict[int, int] = {}
            for head, offset in heads[place : place + places]:
                if head in self._bits:
                    members[offset] = members.get(offset, 0) | 1 << self._bits[head]
            sets = np.fromiter(members.values(), self.dtype, len(members))
            found = self._found[key] = _Whose(rate, [*members], sets, self._tiles.name((self.dtype, rate, *members.items())))
        return found


class _Whose:
    """Different offsets of some heads of a branch, and who has them.

    Args:
        rate: Of the branch.
        offsets: Each once.
        sets: The heads of each.
        name: Of all this, where tiles are kept.
    """

    def __init__(self, rate: int, offsets: Sequence[int], sets: Sets, name: int) -> None:
        self.rate, self.offsets, self.sets, self.name = rate, offsets, sets, name
        self.is_dense = rate > 1 and len(offsets) * DENSE > rate * sets.itemsize

    @cached_property
    def block(self) -> tuple[int, Sets] | None:
        """The first residue that a head keeps, and who keeps it and those behind it; none where most of those have no head."""
        low, high = (extreme(self.offsets, default=0) for extreme in (min, max))
        return (low, self.table()[low : high + 1].copy()) if MANY < high + 1 - low <= SPARSE * len(self.offsets) else None

    def table(self) -> Sets:
        """`(rate,)`: the heads that keep each residue."""
        table = np.zeros(self.rate, self.sets.dtype)
        table[self.offsets] = self.sets
        return table


def _add_block(seen: Sets, low: int, block: Sets, rate: int, phase: int) -> None:
    """Add to tokens, the first of which has the residue `phase`, what the residues from `low` on have, once in each period."""
    before = phase - low  # of the block, where the tokens begin inside it
    if 0 < before < len(block):
        first = seen[: len(block) - before]
        first |= block[before : before + len(first)]
    seen = seen[(low - phase) % rate :]
    rows = len(seen) // rate
    seen[: rows * rate].reshape(rows, rate)[:, : len(block)] |= block
    last = seen[rows * rate :][: len(block)]
    last |= block[: len(last)]


if hasattr(np, "bitwise_count"):

    def _num_members(sets: Sets, borders: Sequence[int] | Integers = (0,)) -> Integers:
        """How many heads the sets from each border to the next hold together."""
        return np.add.reduceat(np.bitwise_count(sets), borders, dtype=np.uint32).astype(np.int64)

else:  # numpy before 2.0
    _MEMBERS = np.array([bin(x).count("1") for x in range(256)], np.uint8)

    def _num_members(sets: Sets, borders: Sequence[int] | Integers = (0,)) -> Integers:
        """How many heads the sets from each border to the next hold together."""
        counts = np.add.reduceat(_MEMBERS[sets.view(np.uint8)], np.multiply(borders, sets.itemsize), dtype=np.uint32)
        return counts.astype(np.int64)
