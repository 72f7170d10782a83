"""About how many different rows spans hold: where counting them would take long.

Branches are taken for independent: a token that is kept by one of ten in one branch and by one of seven in another is kept by
16 of 70 heads. That is exact of coprime rates over many tokens, and of rates of 1; of branches that keep the same tokens it is
too many.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexdilated.distributed.spans import Integers, Spans, expanded, firsts

LIMIT = 1 << 62  # of what a place of a pair of ranks is written in
FEW = 8  # heads that are looked at one by one
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
    pair, first, end, density, most = _densities(spans, size, rates=rates, heads=heads, start=start)
    return np.rint(np.bincount(pair, (end - first) * density, len(size)) * most).astype(np.int64)


def by_owner(rows: Spans, lent: Spans, limits: Integers, *, rates: Integers, heads: Integers, start: Integers) -> Integers:
    """`(ranks, ranks)`: about how many rows each rank receives of each, where spans cut at every border would be too many.

    Rows that come both among few heads and among many count twice.

    Args:
        rows: What travels of all heads, from shard to shard.
        lent: What travels of other heads, wherever it lies: also in the shard of the receiver, which does not count.
        limits: `(ranks + 1,)` where shards begin and end.
        rates, heads, start: As in `about`.
    """
    num_ranks, num_heads, known = len(limits) - 1, int(heads.max(initial=0)) + 1, {"rates": rates, "heads": heads, "start": start}
    table = np.zeros(num_ranks**2, np.int64)
    pairs, size, rows = _by_name(rows, rows.receiver * num_ranks + rows.sender)
    table[pairs] = about(rows, size, **known)
    # Few heads each by itself: a rank that has one head of long segments has others, perhaps, of short ones.
    few = lent.where(lent.places <= FEW)
    of, place = expanded(few.place, few.places)
    few = few.where(of)._replace(place=place, places=np.ones_like(place))
    many = lent.where(lent.places > FEW)
    for spans, name in ((few, few.receiver * num_heads + heads[start[few.branch] + place]), (many, many.receiver * num_heads)):
        names, size, spans = _by_name(spans, name)
        which, first, end, density, most = _densities(spans, size, **known)
        low, high = (np.searchsorted(limits, token, side="right") - 1 for token in (first, end - 1))
        run, owner = expanded(low, np.maximum(0, high - low + 1))  # runs of no tokens may lie between shards of none
        tokens = np.minimum(end[run], limits[owner + 1]) - np.maximum(first[run], limits[owner])
        pair = names[which[run]] // num_heads * num_ranks + owner
        table += np.rint(np.bincount(pair, tokens * (density * most[which])[run], len(table))).astype(np.int64)
    table[:: num_ranks + 1] = 0
    return table.reshape(num_ranks, num_ranks)


def _by_name(spans: Spans, name: Integers) -> tuple[Integers, Integers, Spans]:
    """The names of spans, ascending, how many spans have each, and these, one name's after another's."""
    names, size = np.unique(name, return_counts=True)
    return names, size, spans.where(np.argsort(name, kind="stable"))


def _densities(
    spans: Spans, size: Integers, *, rates: Integers, heads: Integers, start: Integers
) -> tuple[Integers, Integers, Integers, NDArray[np.float64], Integers]:
    """Runs of tokens, of which pair they are, and which part of its heads each token of a run has; and the heads of each pair."""
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
    return pair, first, end, np.where(full > 0, UNIT, _rounded(-np.expm1(left / UNIT))) / UNIT, most


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
