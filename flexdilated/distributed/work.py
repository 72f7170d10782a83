"""How many (query, key) pairs each rank scores."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from flexdilated.core.bounded_cache import recent
from flexdilated.distributed.segments import CutSegments, inside
from flexdilated.distributed.spans import Booleans, Integers, expanded, kept_below, portions

Count = TypeVar("Count", int, Integers)

TOGETHER = 1 << 14  # runs of queries, each of one offset, that are counted together


class Parts(NamedTuple):
    """Heads of cut segments, or parts of them: who computes them. Arrays over parts, by segment, head and query.

    Of `places` heads from `place` on among those of the branch, the queries of slots `low ... high`; several heads, if at all, with
    all their queries.
    """

    segment: Integers
    place: Integers
    places: Integers
    executor: Integers  # a rank
    low: Integers
    high: Integers

    def where(self, chosen: Booleans | Integers) -> Parts:
        return Parts(*(x[chosen] for x in self))


def scored(rows: Count, low: Count, high: Count, *, is_causal: bool) -> Count:
    """Pairs of the queries `low ... high` of so many rows: of numbers, or of arrays of them."""
    if is_causal:
        return high * (high + 1) // 2 - low * (low + 1) // 2
    return (high - low) * rows


@recent(size=lambda work, cut: cut.nbytes)
def by_rows(cut: CutSegments) -> Integers:
    """`(num_ranks,)` pairs where each rank computes its own outputs; counted once."""
    return of_shards(cut) + of_rows(cut, np.arange(len(cut.all_segments.token)))


def of_shards(cut: CutSegments) -> Integers:
    """`(num_ranks,)` pairs of the segments that lie inside one shard."""
    work, ranks = np.zeros(cut.num_ranks, np.int64), cut.parts_of_documents[0]
    start, _, offsets = cut.all_kept
    names = np.sort(cut.named(np.repeat(np.arange(len(cut.kept)), cut.num_kept), offsets))
    several = max(1, TOGETHER // max(1, len(ranks)))
    for some in range(0, len(cut.kept), several):
        branch = np.arange(some, min(some + several, len(cut.kept)))[:, None]
        rate, kept = cut.rates[branch], cut.num_kept[branch]
        for repeats, size, outputs in _local_sizes(cut, branch):
            # Of each head so many rows and queries, and one more of those whose offset is below the rest.
            (rows, rest), (asked, behind) = np.divmod(size, rate), np.divmod(np.minimum(size, outputs), rate)
            more, asking = (np.searchsorted(names, cut.named(branch, left)) - start[branch] for left in (rest, behind))
            if cut.is_causal:
                pairs = kept * (asked * (asked + 1) // 2) + asking * (asked + 1)
            else:
                pairs = kept * rows * asked + rows * asking + asked * more + np.minimum(more, asking)
            np.add.at(work, ranks, (repeats * pairs).sum(axis=0))
    return work


def of_rows(cut: CutSegments, chosen: Integers) -> Integers:
    """`(num_ranks,)` pairs of some cut segments, among those of all branches, whose outputs each rank computes that holds them."""
    work, at = np.zeros(cut.num_ranks, np.int64), cut.all_segments
    which, rank = expanded(at.first_owner[chosen], (at.last_owner - at.first_owner + 1)[chosen])
    which = chosen[which]
    held = cut.held(at.out_token[which], at.outputs[which], rank)
    first, count, offsets, heads = cut.offsets
    branch = at.branch[which]
    for a, b in portions(count[branch], TOGETHER):
        of, number = expanded(first[branch[a:b]], count[branch[a:b]])
        of += a
        rate, offset = cut.rates[branch[of]], offsets[number]
        rows = kept_below(at.size[which[of]], rate, offset)
        low, high = (np.minimum(kept_below(slot[of], rate, offset), rows) for slot in held)
        pairs = heads[number] * scored(rows, low, high, is_causal=cut.is_causal)
        np.add.at(work, rank[of], at.repeats[which[of]] * pairs)
    return work


def of_parts(cut: CutSegments, parts: Parts) -> Integers:
    """`(num_ranks,)` pairs of parts of heads, of segments among those of all branches."""
    work, at, (start, _, offsets) = np.zeros(cut.num_ranks, np.int64), cut.all_segments, cut.all_kept
    of, place = expanded(parts.place, parts.places)
    segment = parts.segment[of]
    rate, offset = cut.rates[at.branch[segment]], offsets[start[at.branch[segment]] + place]
    rows = kept_below(at.size[segment], rate, offset)
    low, high = (np.minimum(kept_below(slot[of], rate, offset), rows) for slot in (parts.low, parts.high))
    np.add.at(work, parts.executor[of], scored(rows, low, high, is_causal=cut.is_causal))
    return work


def _local_sizes(cut: CutSegments, branch: Integers) -> tuple[tuple[Integers, Integers, Integers], ...]:
    """Of branches, a column, in parts of documents the segments inside: `(how many, tokens, outputs)` of whole ones with all their
    outputs, the one whose outputs the end of the document cuts, and the last."""
    _, begin, end, num_tokens, times = cut.parts_of_documents
    w = np.minimum(cut.lengths[branch], num_tokens)
    out = cut.stride_of_outputs(w, cut.rates[branch])
    a, b = inside(begin, end, num_tokens, w, out)
    whole, shown = num_tokens // w, num_tokens // out  # segments with all of their tokens, and with all of their outputs
    full = times * np.clip(np.minimum(b, np.minimum(whole, shown)) - a, 0, None)
    edge = times * ((a <= shown) & (shown < np.minimum(b, whole)))
    last = times * ((a <= whole) & (whole < b))
    rest = num_tokens - whole * w
    return (
        (full, w, w),
        (edge, w, num_tokens - shown * out),
        (last, rest, np.clip(num_tokens - whole * out, 0, None)),
    )
