"""How many (query, key) pairs each rank scores."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from flexdilated.backends.recent import recent
from flexdilated.distributed.segments import CutSegments, inside
from flexdilated.distributed.spans import Booleans, Integers, expanded, kept_below

Count = TypeVar("Count", int, Integers)

TOGETHER = 1 << 14  # runs of queries, each of one offset, that are counted together


class Parts(NamedTuple):
    """Heads of cut segments of one branch, or parts of them: who computes them. Arrays over parts, by segment, head and query.

    Of `places` heads from `place` on among those of the branch, the queries of slots `low ... high`; several heads, if at all, with
    all their queries.
    """

    segment: Integers
    place: Integers
    places: Integers
    executor: Integers  # a rank
    low: Integers
    high: Integers

    def of_head(self, place: int) -> Parts:
        """Those of one head of the branch."""
        return self.where((self.place <= place) & (place < self.place + self.places))

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
    everything = (of_rows(cut, branch, np.arange(len(at.token))) for branch, at in enumerate(cut.segments))
    return sum(everything, start=of_shards(cut))


def of_shards(cut: CutSegments) -> Integers:
    """`(num_ranks,)` pairs of the segments that lie inside one shard."""
    work = np.zeros(cut.num_ranks, np.int64)
    for branch, (rate, heads) in enumerate(cut.kept):
        offsets = np.sort(np.array([offset for _, offset in heads], np.int64))
        ranks, sizes = _local_sizes(cut, branch)
        for repeats, size, outputs in sizes:
            # Of each head so many rows and queries, and one more of those whose offset is below the rest.
            (rows, rest), (asked, behind) = np.divmod(size, rate), np.divmod(np.minimum(size, outputs), rate)
            more, asking = np.searchsorted(offsets, rest), np.searchsorted(offsets, behind)
            if cut.is_causal:
                pairs = len(offsets) * (asked * (asked + 1) // 2) + asking * (asked + 1)
            else:
                pairs = len(offsets) * rows * asked + rows * asking + asked * more + np.minimum(more, asking)
            np.add.at(work, ranks, repeats * pairs)
    return work


def of_rows(cut: CutSegments, branch: int, chosen: Integers) -> Integers:
    """`(num_ranks,)` pairs of some cut segments whose outputs each rank computes that holds them."""
    work, rate = np.zeros(cut.num_ranks, np.int64), cut.kept[branch].rate
    at = cut.segments[branch]
    which, rank = expanded(at.first_owner[chosen], (at.last_owner - at.first_owner + 1)[chosen])
    which = chosen[which]
    held = cut.held(at.out_token[which], at.outputs[which], rank)
    members = cut.offsets_of(branch)
    offsets, heads = np.array([*members], np.int64)[:, None], np.array([len(those) for those in members.values()], np.int64)
    several = max(1, TOGETHER // max(1, len(which)))
    pairs = np.zeros(len(which), np.int64)
    for some in range(0, len(offsets), several):
        offset = offsets[some : some + several]
        rows = kept_below(at.size[which], rate, offset)
        low, high = (np.minimum(kept_below(slot, rate, offset), rows) for slot in held)
        pairs += heads[some : some + several] @ scored(rows, low, high, is_causal=cut.is_causal)
    np.add.at(work, rank, at.repeats[which] * pairs)
    return work


def of_parts(cut: CutSegments, branch: int, parts: Parts) -> Integers:
    """`(num_ranks,)` pairs of parts of heads."""
    work, (rate, heads) = np.zeros(cut.num_ranks, np.int64), cut.kept[branch]
    for place, (_, offset) in enumerate(heads):
        its = parts.of_head(place)
        rows = kept_below(cut.segments[branch].size[its.segment], rate, offset)
        low, high = (np.minimum(kept_below(slot, rate, offset), rows) for slot in (its.low, its.high))
        np.add.at(work, its.executor, scored(rows, low, high, is_causal=cut.is_causal))
    return work


def _local_sizes(cut: CutSegments, branch: int) -> tuple[Integers, tuple[tuple[Integers, Integers, Integers], ...]]:
    """Ranks with documents of which they hold segments, and of those `(how many, tokens, outputs)`: whole ones with all their
    outputs, the one whose outputs the end of the document cuts, and the last."""
    length, rate = cut.pattern.segment_lengths[branch], cut.pattern.dilation_rates[branch]
    rank, begin, end, num_tokens, times = cut.parts_of_documents
    w = np.minimum(length, num_tokens)
    out = cut.stride_of_outputs(w, rate)
    a, b = inside(begin, end, num_tokens, w, out)
    whole, shown = num_tokens // w, num_tokens // out  # segments with all of their tokens, and with all of their outputs
    full = times * np.clip(np.minimum(b, np.minimum(whole, shown)) - a, 0, None)
    edge = times * ((a <= shown) & (shown < np.minimum(b, whole)))
    last = times * ((a <= whole) & (whole < b))
    rest = num_tokens - whole * w
    return rank, (
        (full, w, w),
        (edge, w, num_tokens - shown * out),
        (last, rest, np.clip(num_tokens - whole * out, 0, None)),
    )
