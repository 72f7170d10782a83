"""Layers of long sequences whose segments do not nest: what a token has seen is a run of tokens between two ragged fronts.

One token is followed exactly, by the segments and residues that hold a token it has seen; behind the fronts nothing is left to look
at. All tokens are bounded from above by runs that are surely whole. Where both meet, the number is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexdilated.analysis.lattice import Integers, Together, borders

MAX_FOLLOWED = 2**13  # layers that one token is followed through
MAX_STEPS = 2**20  # layers that a bound is followed through
MOST_RESIDUES = 64  # modulo the least common multiple of the rates: a bit each

Bits = NDArray[np.uint64]


def layers_of_hull(branches: Sequence[Together], num_tokens: int) -> int | None:
    """The layers before which the first token cannot have seen the last: a lower bound. None is never."""
    end, layers = 1, 0
    while end < num_tokens:
        further = max(_last_kept(branch, end - 1, num_tokens) + 1 for branch in branches)
        if further <= end:
            return None
        end, layers = further, layers + 1
    return layers


def _last_kept(branch: Together, token: int, num_tokens: int) -> int:
    """Of the segment of a token."""
    start = token // branch.length * branch.length
    size = min(branch.length, num_tokens - start)
    kept = (start + offset + (size - 1 - offset) // branch.rate * branch.rate for offset in branch.offsets if offset < size)
    return max(kept, default=-1)


def layers_at_most(branches: Sequence[Together], num_tokens: int) -> int | None:
    """The layers after which every token has surely seen every other, or None: this bound does not tell.

    After two layers a token has seen the whole segments at rate 1 that lie in a segment around it, of a branch that keeps all
    residues. Of a segment of which a run of `rate` tokens has been seen, the next layer sees the rest, or what some head keeps of
    it, and the layer after that the whole segments at rate 1 in it.
    """
    window = max((branch.length for branch in branches if branch.rate == 1), default=0)
    useful = [branch for branch in branches if branch.rate <= window]
    if not useful:
        return None
    token = borders(tuple(branch.length for branch in branches), num_tokens)
    low: Integers = token // window * window
    high: Integers = np.minimum(low + window, num_tokens)
    for branch in useful:
        if branch.is_complete:
            start = token // branch.length * branch.length
            first, stop = -(-start // window) * window, np.minimum(start + branch.length, num_tokens)
            last = np.where((stop == num_tokens) & (stop % window >= branch.rate), stop, stop // window * window)
            low = np.where(first < last, np.minimum(low, first), low)
            high = np.where(first < last, np.maximum(high, last), high)
    if int((high - low).min()) < max(branch.rate for branch in useful):
        return None
    # The token that has seen least to its right, and the one to its left: who has seen more never falls behind.
    right = _layers_to(num_tokens, int(high.min()), lambda end: _ends(useful, end, window, num_tokens))
    left = _layers_to(0, -int(low.max()), lambda begin: _begins(useful, -begin, window, num_tokens))
    return None if right is None or left is None else 2 + max(right, left)


def _layers_to(goal: int, at: int, further: Callable[[int], tuple[int, int]]) -> int | None:
    """Layers until a run that ends at `at` ends at the goal; `further` says where it ends after one layer, and after two."""
    layers, later = 0, at
    while at < goal:
        soon, in_two = further(at)
        before, at, later = at, max(at, soon, later), max(later, in_two)
        if at == before == max(at, later) or layers == MAX_STEPS:
            return None
        layers += 1
    return layers


def _ends(useful: Sequence[Together], end: int, window: int, num_tokens: int) -> tuple[int, int]:
    soon = later = end
    for branch in useful:
        if (end - 1) % branch.length + 1 < branch.rate:
            continue
        stop = min((end - 1) // branch.length * branch.length + branch.length, num_tokens)
        # What is left behind the last whole segment at rate 1 may hold a row too.
        whole = stop if stop == num_tokens and stop % window >= branch.rate else stop // window * window
        soon, later = (max(soon, stop), later) if branch.is_complete else (soon, max(later, whole))
    return soon, later


def _begins(useful: Sequence[Together], begin: int, window: int, num_tokens: int) -> tuple[int, int]:
    """As `_ends`, to the left; below 0, so that more is further."""
    soon = later = begin
    for branch in useful:
        start = begin // branch.length * branch.length
        if min(start + branch.length, num_tokens) - begin < branch.rate:
            continue
        soon, later = (min(soon, start), later) if branch.is_complete else (soon, min(later, -(-start // window) * window))
    return -soon, -later


def layers_of(branches: Sequence[Together], num_tokens: int, source: int) -> int | None:
    """After how many layers one token has seen every other, exactly; None is never. Every token must be kept by some branch.

    Raises:
        NotImplementedError: If the rates have a least common multiple above 64, or there are too many segments.
    """
    period = math.lcm(*(branch.rate for branch in branches))
    if period > MOST_RESIDUES:
        raise NotImplementedError(f"dilation_rates must have a least common multiple of at most {MOST_RESIDUES}, got {period}")
    return _Fronts(branches, num_tokens, period).layers(source)


class _Fronts:
    """Cells between the borders of segments, and of every segment the residues of which a token has been seen: they light up.

    Bits of a cell are tokens modulo the period, those of a segment are offsets.
    """

    def __init__(self, branches: Sequence[Together], num_tokens: int, period: int) -> None:
        self.branches, self.period = branches, period
        self.every = np.uint64((1 << period) - 1)
        start = borders(tuple(branch.length for branch in branches), num_tokens)
        size = np.minimum(np.diff(start, append=num_tokens), period).astype(np.uint64)
        some = (np.uint64(1) << (size % np.uint64(MOST_RESIDUES))) - np.uint64(1)
        self.there = self._turned(np.where(size == period, self.every, some), start)
        self.start, self.cells = start, len(start)
        self.segment = [start // branch.length for branch in branches]
        # The first cell of each segment, and behind the last one the end.
        self.first = [np.append(np.flatnonzero(np.diff(s, prepend=-1)), len(start)) for s in self.segment]
        self.kept = [np.uint64(sum(1 << offset for offset in branch.offsets)) for branch in branches]
        self.repeated = [np.uint64(sum(1 << at for at in range(0, period, branch.rate))) for branch in branches]

    def _turned(self, bits: Any, by: Any) -> Any:
        """Bits `i` become bits `i + by`, modulo the period."""
        left = np.asarray(by % self.period).astype(np.uint64)
        right = (np.uint64(self.period) - left) % np.uint64(self.period)
        return ((bits << left) | (bits >> right)) & self.every

    def layers(self, source: int) -> int | None:
        lit = [np.zeros(len(first) - 1, np.uint64) for first in self.first]
        at = int(np.searchsorted(self.start, source, side="right")) - 1
        low, high = at, at + 1  # the cells of lit segments
        for i, branch in enumerate(self.branches):
            if (offset := source % branch.length % branch.rate) in branch.offsets:
                segment = source // branch.length
                lit[i][segment] = 1 << offset
                low, high = min(low, int(self.first[i][segment])), max(high, int(self.first[i][segment + 1]))
        begin = end = at  # cells between are whole, and have lit their segments
        layers = 1
        while True:
            seen = [(a, b, self._seen(lit, a, b)) for a, b in ((low, begin), (end, high)) if a < b]
            whole = [bits == self.there[a:b] for a, b, bits in seen]
            if (low, high) == (0, self.cells) and all(each.all() for each in whole):
                return layers
            has_grown = False
            for a, b, bits in seen:
                for i, where, grown in self._lit(lit, a, b, bits):
                    has_grown = True
                    lit[i][where] |= grown
                    new = np.flatnonzero(grown) + where.start
                    low, high = min(low, int(self.first[i][new[0]])), max(high, int(self.first[i][new[-1] + 1]))
            if not has_grown:
                return None
            begin, end = _whole_run(begin, end, seen, whole)
            layers += 1

    def _seen(self, lit: list[Bits], a: int, b: int) -> Bits:
        """The tokens of lit segments in cells `a ... b`."""
        bits = np.zeros(b - a, np.uint64)
        for i, branch in enumerate(self.branches):
            low, high = self.segment[i][a], self.segment[i][b - 1] + 1
            tokens = self._turned(lit[i][low:high] * self.repeated[i], np.arange(low, high) * branch.length)
            bits |= tokens[self.segment[i][a:b] - low]
        return bits & self.there[a:b]

    def _lit(self, lit: list[Bits], a: int, b: int, bits: Bits) -> Iterator[tuple[int, slice, Bits]]:
        """By branch, the segments of cells `a ... b`, and the offsets of each that these cells light up."""
        for i, branch in enumerate(self.branches):
            low, high = int(self.segment[i][a]), int(self.segment[i][b - 1]) + 1
            held = np.bitwise_or.reduceat(bits, np.maximum(self.first[i][low:high] - a, 0))
            held = self._turned(held, -(np.arange(low, high) * branch.length))
            offsets = np.zeros_like(held)
            for at in range(0, self.period, branch.rate):
                offsets |= held >> np.uint64(at)
            grown = offsets & self.kept[i] & ~lit[i][low:high]
            if grown.any():
                yield i, slice(low, high), grown


def _whole_run(begin: int, end: int, seen: list[tuple[int, int, Bits]], whole: list[NDArray[np.bool_]]) -> tuple[int, int]:
    """The run of whole cells, which both fronts leave behind."""
    for (a, b, _), each in zip(seen, whole):
        if b == begin:
            begin = b - int(np.argmin(each[::-1])) if not each.all() else a
        elif a == end:
            end = a + int(np.argmin(each)) if not each.all() else b
    return begin, end
