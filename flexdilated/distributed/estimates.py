"""About how many different rows spans hold: where counting them would take long.

Branches are taken for independent: a token that is kept by one of ten in one branch and by one of seven in another is kept by
16 of 70 heads. That is exact of coprime rates over many tokens, and of rates of 1; of branches that keep the same tokens it is
too many.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexdilated.distributed.spans import Integers, Spans, firsts

LIMIT = 1 << 62  # of what a place of a pair of ranks is written in
UNIT = 1 << 40  # of densities and their logarithms: sums of integers are the same on every processor


def about(spans: Spans, size: Integers, *, rates: Integers, heads: Integers, start: Integers) -> Integers:
    """About how many rows pairs of ranks exchange that have so many spans each, one pair's after another's.

    Args:
        spans: All of them.
        size: Spans of each pair.
        rates: Of each branch.
        heads: Those of each branch, one branch's after another's.
        start: Where each branch's begin.
    """
    pair, rate = np.repeat(np.arange(len(size)), size), rates[spans.branch]
    place = start[spans.branch] + spans.place
    turns = np.zeros((len(size), int(heads.max(initial=-1)) + 2), np.int64)
    np.add.at(turns, (pair, heads[place]), 1)
    np.add.at(turns, (pair, heads[place + spans.places - 1] + 1), -1)
    most = (np.cumsum(turns, axis=1) > 0).sum(axis=1)  # heads of which the pair exchanges any row
    kept = _rounded(spans.places * (spans.residues / rate) / rate / most[pair])
    # Spans of one branch are of different heads, or tokens: what they keep adds up. What no branch keeps is a product.
    (pair, branch, first, end), (kept,) = _alike((pair, spans.branch, spans.first, spans.end), kept)
    names = pair * len(rates) + branch
    if ((names[1:] < names[:-1]) | ((names[1:] == names[:-1]) & (first[1:] < end[:-1]))).any():
        pair, first, end, kept = _steps(pair, branch, first, end, kept)
    full = (kept >= UNIT).astype(np.int64)
    left = np.where(full > 0, 0, _rounded(np.log1p(-np.where(full > 0, 0, kept) / UNIT)))
    (pair, first, end), (full, left) = _alike((pair, first, end), full, left)
    pair, first, end, full, left = _steps(pair, np.zeros_like(pair), first, end, full, left)
    density = np.where(full > 0, UNIT, _rounded(-np.expm1(left / UNIT)))
    tokens = np.bincount(pair, (end - first) * (density / UNIT), len(size))
    return np.rint(tokens * most).astype(np.int64)


def _rounded(x: NDArray[np.float64]) -> Integers:
    return np.rint(UNIT * x).astype(np.int64)


def _alike(columns: tuple[Integers, ...], *values: Integers) -> tuple[tuple[Integers, ...], tuple[Integers, ...]]:
    """Neighbours that are alike in some columns as one, and sums over them: long segments give many branches the same spans."""
    one = firsts(np.array(True), columns)
    return tuple(column[one] for column in columns), tuple(np.add.reduceat(x, one) for x in values)


def _steps(pair: Integers, branch: Integers, first: Integers, end: Integers, *values: Integers) -> tuple[Integers, ...]:
    """Of each pair and branch, runs of tokens over which the same spans lie: pair, first and end, and sums over these spans."""
    several = int(branch.max(initial=0)) + 1
    low, edge = int(first.min(initial=0)), np.append(first, end)
    whose, width = np.tile(pair * several + branch, 2), int(end.max(initial=0)) - low + 1
    # One number is sorted sooner than three; where they do not fit in one the last comes first.
    if (int(whose.max(initial=0)) + 1) * width < LIMIT:
        order = np.argsort(whose * width + (edge - low), kind="stable")
    else:
        order = np.lexsort((edge, whose))
    whose, edge = whose[order], edge[order]
    goes_on = np.append(whose[1:] == whose[:-1], False)
    pair = np.tile(pair, 2)[order]
    return pair, edge, np.where(goes_on, np.roll(edge, -1), edge), *(np.cumsum(np.append(x, -x)[order]) for x in values)
