"""How many different rows travel between ranks: exact, or, of patterns that take long to count, about.

Between two ranks that exchange heads of their own, few branches have a head in common: what its progressions share is counted by
the Chinese remainder theorem. Where many do, sets of heads are counted along the line of tokens, and pairs of ranks whose spans lie
alike are counted once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from flexdilated.distributed import progressions
from flexdilated.distributed.estimates import about
from flexdilated.distributed.lines import Lines
from flexdilated.distributed.progressions import Progressions, num_different
from flexdilated.distributed.spans import Booleans, Integers, Kept, Spans, Traffic, expanded

LIMIT = 1 << 62  # of what 64 bits hold
FEW = 16  # spans of a branch between two ranks, to look for pairs alike
SPREAD = 4  # progressions of each head of the model, on average, between two ranks that are counted head by head
MOST = 5  # progressions of a head there that are counted by what they share
PROGRESSIONS = 1 << 17  # that are looked at together


class Counter:
    """Counts the different (token, head) of pairs of ranks, the union over branches.

    Args:
        kept: Of each branch.
        num_ranks: Ranks.
        most: What may be written to count, as `lines.Bound` takes it; of pairs of ranks beyond it `count` tells about how many.

    Attributes:
        is_exact: Whether none was beyond it.
    """

    def __init__(self, kept: Sequence[Kept], num_ranks: int, most: float = math.inf) -> None:
        self.num_ranks, self.is_exact, self._most = num_ranks, True, most
        self._all_known = True  # whether no pair of ranks had so many spans that it had to stand for itself
        self._rates = np.array([each.rate for each in kept], np.int64)
        self._lines = Lines(kept, most)
        self._num_heads = int(self._lines.heads.max(initial=-1)) + 1
        self._known: dict[bytes | int, int] = {}  # by what `_shapes` says of a pair

    @property
    def would_repeat(self) -> bool:
        """Whether all that was counted would be the same if it were counted once more: known, or exact with as much left."""
        return self._all_known or (self.is_exact and self._lines.left >= self._most / 2)

    def count(self, spans: Spans) -> Traffic:
        """The rows of some pairs of ranks, of which these are all spans."""
        spans, pairs, size = self._by_pair(spans)
        rows = np.zeros(len(pairs), np.int64)
        by_head = self._are_of_few_heads(spans, size)
        if by_head.any():
            chosen = np.repeat(by_head, size)
            left = [spans.where(~chosen)]
            spans, ends = spans.where(chosen), np.append(0, np.cumsum(size[by_head]))
            # Some pairs at a time: of each head of a span there is a progression.
            some = np.append(0, np.cumsum(spans.places))[ends] // PROGRESSIONS
            borders = [0, *(np.flatnonzero(np.diff(some)) + 1).tolist(), len(ends) - 1]
            which = np.flatnonzero(by_head)
            for a, b in pairwise(borders):
                rows[which[a:b]], rest = self._count_heads(spans.where(slice(ends[a], ends[b])), np.diff(ends[a : b + 1]))
                left.append(rest.merged())
            spans, others, size = self._by_pair(Spans.joined(left))
            rows[np.searchsorted(pairs, others)] += self._count_sets(spans, size)
        else:
            rows = self._count_sets(spans, size)
        some = np.flatnonzero(rows)
        return Traffic(pairs[some] // self.num_ranks, pairs[some] % self.num_ranks, rows[some])

    def _by_pair(self, spans: Spans) -> tuple[Spans, Integers, Integers]:
        """Spans by pairs of ranks, the numbers of these pairs, and how many spans each has."""
        pair = spans.receiver * self.num_ranks + spans.sender
        order = np.argsort(pair, kind="stable")
        start = np.flatnonzero(np.diff(pair[order], prepend=-1))
        return spans.where(order), pair[order[start]], np.diff(np.append(start, len(pair)))

    def _are_of_few_heads(self, spans: Spans, size: Integers) -> Booleans:
        """The pairs of ranks with progressions of so few heads that each head is counted alone."""
        if not len(size):
            return np.zeros(0, bool)
        start = np.cumsum(size) - size
        dealt = spans.places < np.diff(self._lines.start)[spans.branch]
        fits = (spans.end - spans.first <= progressions.LONGEST) & (spans.period == self._rates[spans.branch])
        some, every = np.logical_or.reduceat(dealt, start), np.logical_and.reduceat(fits, start)
        return some & every & (np.add.reduceat(spans.places, start) <= SPREAD * self._num_heads)

    def _count_heads(self, spans: Spans, size: Integers) -> tuple[Integers, Spans]:
        """Rows of pairs of ranks that have so many spans each, and the spans of the heads that are not counted so."""
        of, place = expanded(spans.place, spans.places)
        branch, first = spans.branch[of], spans.first[of]
        rate, at = self._rates[branch], self._lines.start[branch] + place
        first = first + (self._lines.offsets[at] - (first - spans.origin[of])) % rate
        takes_part = (self._lines.offsets[at] - spans.residue[of]) % rate < spans.residues[of]
        some, found = Progressions.within(first, np.where(takes_part, spans.end[of], first), rate)
        of, place = of[some], place[some]
        pair = np.repeat(np.arange(len(size)), size)[of]
        name = pair * self._num_heads + self._lines.heads[at[some]]
        order = np.argsort(name, kind="stable")
        _, several = np.unique(name, return_counts=True)
        few = several <= MOST
        rows = np.zeros(len(size), np.int64)
        first_of = order[np.cumsum(several) - several]
        np.add.at(rows, pair[first_of[few]], num_different(found.where(order[np.repeat(few, several)]), several[few]))
        rest = np.sort(order[np.repeat(~few, several)])
        return rows, spans.where(of[rest])._replace(place=place[rest], places=np.ones_like(rest))

    def _count_sets(self, spans: Spans, size: Integers) -> Integers:
        """Rows of pairs of ranks that have so many spans each, one pair's after another's; alike ones are counted once."""
        one, names, group = self._alike(spans, size)
        new: dict[bytes | int, int] = {}
        for pair, name in zip(one, names):
            if name not in self._known:
                new.setdefault(name, pair)
        pairs = np.array(list(new.values()), np.int64)
        chosen = expanded((np.cumsum(size) - size)[pairs], size[pairs])[1]
        found = dict(zip(new, self._rows(spans.where(chosen), size[pairs]).tolist()))
        self._known.update((name, rows) for name, rows in found.items() if isinstance(name, bytes))
        return np.array([found[name] if name in found else self._known[name] for name in names], np.int64)[group]

    def _rows(self, spans: Spans, size: Integers) -> Integers:
        """Rows of pairs of ranks that have so many spans each, one pair's after another's."""
        rows = self._lines.count(spans, size)
        beyond = rows < 0
        if beyond.any():
            self.is_exact, lines = False, self._lines
            left = spans.where(np.repeat(beyond, size))
            rows[beyond] = about(left, size[beyond], rates=self._rates, heads=lines.heads, start=lines.start)
        return rows

    def _alike(self, spans: Spans, size: Integers) -> tuple[list[int], list[bytes | int], Integers]:
        """Pairs of ranks of which each stands for those whose spans lie alike, its name, and by which each pair is stood for.

        Pairs of many spans stand for themselves, by their number.
        """
        start = np.cumsum(size) - size
        shapes = _shapes(spans, start, size)
        standing: list[int] = []
        names: list[bytes | int] = []
        groups = np.zeros(len(size), np.int64)
        for many in np.unique(size):
            chosen = np.flatnonzero(size == many)
            if many > FEW * len(self._rates):
                self._all_known = False
                groups[chosen] = np.arange(len(chosen)) + len(standing)
                standing += chosen.tolist()
                names += chosen.tolist()
                continue
            tables = shapes[:, start[chosen][:, None] + np.arange(many)].transpose(1, 0, 2).reshape(len(chosen), -1)
            one = group = np.arange(len(chosen))
            if many < len(chosen):  # else names take longer than a look at each
                _, one, group = np.unique(_names(tables.T), return_index=True, return_inverse=True)
            groups[chosen] = group.reshape(-1) + len(standing)
            standing += chosen[one].tolist()
            names += [tables[at].tobytes() for at in one.tolist()]
        return standing, names, groups


def _shapes(spans: Spans, start: Integers, size: Integers) -> Integers:
    """`(9, spans)`: where each lies beside the others of its pair of ranks. Pairs of the same columns have as many rows."""
    base = np.repeat(np.minimum.reduceat(spans.first, start), size)
    phase = (base - spans.origin) % spans.period
    return np.stack([spans.branch, spans.first - base, spans.end - base, phase, *spans[6:]])


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
