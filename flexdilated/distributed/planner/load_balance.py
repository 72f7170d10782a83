"""Count the (query, key) pairs that each rank scores, and assign heads of segments that span several shards to ranks.

The heads of a segment, one after another, and in each head its queries, form one line of work. Each rank that holds tokens of the
segment takes one interval of the line, in the order of ranks. The intervals fill the ranks to one level of scored pairs, including
the pairs that they have already. An interval that ends inside a head cuts the head by its queries; its keys then go to both ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flexdilated.core.bounded_cache import recent
from flexdilated.core.branch import far_pairs
from flexdilated.distributed.planner.segments import Booleans, CutSegments, Integers, expand_ranges, kept_below

MOST = (5, 4)  # a rank takes 5/4 of its part of a segment's tokens at most: more would travel than it saves
LEAST = 32  # a head is not cut for less than one in so many of the queries that a rank takes: its keys would travel once more
UNITS = 1 << 28  # at most so many units of pairs and tokens, so that products fit 64 bits


class HeadParts(NamedTuple):
    """Which rank computes which heads of segments. Every field is a `(parts,)` array, ordered by segment, head and query.

    For part `i`, rank `executor` computes the queries in slots `low ... high` of heads `place ... place + places`. A part of
    several heads has all slots of its segment.
    """

    segment: Integers  # index into `CutSegments.all_segments`
    place: Integers  # index of the first head, among the branch's heads of these ranks
    places: Integers  # number of heads
    executor: Integers  # rank
    low: Integers  # slot
    high: Integers  # slot, exclusive

    def where(self, chosen: Booleans | Integers) -> HeadParts:
        return HeadParts(*(x[chosen] for x in self))


@recent(size=lambda pairs, cut: cut.nbytes)
def pairs_by_rows(cut: CutSegments) -> Integers:
    """`(num_ranks,)` pairs if each rank computes its own outputs; those of global tokens count where their keys are."""
    ranks, begin, end, num_tokens, count = cut.document_parts
    pairs = np.zeros(cut.num_ranks, np.int64)
    for length, (rate, heads) in zip(cut.lengths, cut.branch_heads):
        w = np.minimum(length, num_tokens)
        for offset, num_kv_heads in Counter(offset for _, offset in heads).items():
            pairs_before = (_pairs_before(cut, position, num_tokens, w, rate, offset) for position in (begin, end))
            np.add.at(pairs, ranks, -num_kv_heads * count * np.subtract(*pairs_before))
    if cut.near:
        near = cut.near.count_pairs(num_tokens, is_causal=cut.is_causal, begin=begin, end=end)
        np.add.at(pairs, ranks, cut.num_branch_heads[-1] * count * near)
    return pairs


def _pairs_before(cut: CutSegments, position: Integers, num_tokens: Integers, w: Integers, rate: int, offset: int) -> Integers:
    """The far pairs of one head whose queries are before a position of a document."""
    num_whole: Integers = position // w
    rows, last = (kept_below(size, rate, offset) for size in (w, np.clip(num_tokens - num_whole * w, 0, w)))
    queries = np.minimum(kept_below(position - num_whole * w, rate, offset), last)
    apart, first = cut.near.far_rows(rate), cut.near.global_tokens

    def skipped(segment: Integers) -> Integers:
        return kept_below(np.clip(first - segment * w, 0, w), rate, offset)

    without = -(-first // w)  # segments that hold global tokens: only the last of them has other tokens
    total: Integers = np.maximum(num_whole - without, 0) * far_pairs(rows, 0, rows, is_causal=cut.is_causal, apart=apart)
    of_last = far_pairs(rows, 0, rows, is_causal=cut.is_causal, skipped=skipped(without - 1), apart=apart)
    total = total + np.where((without > 0) & (without <= num_whole), of_last, 0)
    skipped_rows = np.minimum(skipped(num_whole), last)
    return total + far_pairs(last, 0, queries, is_causal=cut.is_causal, skipped=skipped_rows, apart=apart)


def pairs_of_parts(cut: CutSegments, parts: HeadParts) -> Integers:
    """`(num_ranks,)` pairs that each rank scores in these parts."""
    pairs, segments, (start, _, offsets) = np.zeros(cut.num_ranks, np.int64), cut.all_segments, cut.all_branch_heads
    part, place = expand_ranges(parts.place, parts.places)
    segment = parts.segment[part]
    branch, size = segments.branch[segment], segments.size[segment]
    rate, offset = cut.rates[branch], offsets[start[branch] + place]
    rows, skipped = (kept_below(slots, rate, offset) for slots in (size, segments.skipped[segment]))
    low, high = (np.minimum(kept_below(slot[part], rate, offset), rows) for slot in (parts.low, parts.high))
    scored = far_pairs(rows, low, high, is_causal=cut.is_causal, skipped=skipped, apart=cut.apart[branch] // rate)
    np.add.at(pairs, parts.executor[part], scored)
    return pairs


def own_parts(cut: CutSegments, segments: Integers) -> HeadParts:
    """The parts of some segments (indices into `all_segments`), if each rank computes its own outputs."""
    chosen = cut.all_segments.where(segments)
    index, rank = expand_ranges(chosen.first_rank, chosen.last_rank - chosen.first_rank + 1)
    low, high = cut.slots_of_rank(chosen.token[index], chosen.size[index], rank)
    places = cut.num_branch_heads[chosen.branch[index]]
    parts = HeadParts(segments[index], np.zeros_like(index), places, rank, low, high)
    return parts.where((low < high) & (places > 0))


def heads_exchange_pays_off(cut: CutSegments) -> Booleans:
    """`(segments,)`: whether moving heads of a cut segment moves fewer rows, over all branches.

    Causal segments of a whole document always do: ranks of late tokens would compute the most, and assigning heads evens out what
    narrower segments leave uneven.
    """
    segments = cut.all_segments
    pays_off = np.zeros(len(segments.token), bool)
    # In other segments no rank lacks a token, or no head asks for one.
    chosen = np.flatnonzero((segments.first_rank < segments.last_rank) & (cut.num_branch_heads > 0)[segments.branch])
    first, size = segments.token[chosen], segments.size[chosen]
    index, rank = expand_ranges(segments.first_rank[chosen], (segments.last_rank - segments.first_rank + 1)[chosen])
    low, high = cut.slots_of_rank(first[index], size[index], rank)
    by_rows, squares = np.zeros_like(size), np.zeros(len(size))
    # Ranks with queries need the tokens of other ranks, or, if causal, of earlier ranks.
    np.add.at(by_rows, index, 2 * np.where(low < high, low if cut.is_causal else size[index] - (high - low), 0))
    np.add.at(squares, index, (high - low).astype(np.float64) ** 2)  # beyond 64 bits for segments of 2**32 tokens
    # A rank that computes a head holds, on average, as many of its tokens as the rank of a token does.
    by_heads = (2 + 2 * cut.group) * (size - np.floor(squares / size))
    pays_off[chosen] = (by_heads < by_rows) | (cut.is_causal & (size == segments.document_tokens[chosen]))
    return pays_off


def assign_heads(cut: CutSegments, assigned: Booleans) -> HeadParts:
    """Which rank computes which heads of the chosen cut segments of all branches: equal on every rank.

    Args:
        cut: The cut segments.
        assigned: `(segments,)`, over all branches, whether to assign the heads of a segment.
    """
    segments = np.flatnonzero(assigned)
    chosen = cut.all_segments.where(segments)
    pairs = (pairs_by_rows(cut) - pairs_of_parts(cut, own_parts(cut, segments))).tolist()
    index, ranks = expand_ranges(chosen.first_rank, chosen.last_rank - chosen.first_rank + 1)
    low, high = cut.slots_of_rank(chosen.token[index], chosen.size[index], ranks)
    has_tokens = low < high
    ranks, tokens = ranks[has_tokens].tolist(), (high - low)[has_tokens].tolist()
    begin = np.searchsorted(index[has_tokens], np.arange(len(segments) + 1)).tolist()
    parts: list[tuple[int, ...]] = []
    # The widest segments last: they have the most ranks, which can even out what is left.
    branch, widths = chosen.branch.tolist(), [length for length, _ in cut.pattern.split("the planner of ranks")[0]]
    for number in sorted(range(len(segments)), key=lambda number: widths[branch[number]]):
        span = slice(begin[number], begin[number + 1])
        parts += _parts_of_segment(cut, int(segments[number]), ranks[span], tokens[span], pairs)
    return HeadParts(*np.array(parts, np.int64).reshape(-1, len(HeadParts._fields)).T)


def _parts_of_segment(
    cut: CutSegments, segment: int, ranks: list[int], tokens: list[int], pairs: list[int]
) -> Iterator[tuple[int, ...]]:
    """The parts of one segment: `ranks[i]` holds `tokens[i]` of its tokens. Adds the pairs of each part to `pairs[rank]`."""
    segments = cut.all_segments
    rate, heads = cut.branch_heads[int(segments.branch[segment])]
    size = int(segments.size[segment])
    skipped, apart = -(-int(segments.skipped[segment]) // rate), cut.near.far_rows(rate)
    start = skipped + apart if cut.is_causal else skipped  # queries before it have near pairs alone
    rows = max(1, -(-size // rate) - start)  # of the first offset; others keep as many or one less

    def pairs_of(first: int, end: int) -> int:
        queries = start + first, start + end
        return int(far_pairs(start + rows, *queries, is_causal=cut.is_causal, skipped=skipped, apart=apart))

    shares = _shares([pairs[rank] for rank in ranks], tokens, pairs_of(0, rows) * len(heads))
    ends = _ends(np.array(shares), len(heads), rows, is_causal=cut.is_causal)
    for rank, begin, end in zip(ranks, [0, *ends], ends):
        while begin < end:
            place, first = divmod(begin, rows)
            places = 1 if first else max(1, (end - begin) // rows)
            last = min(rows, end - place * rows)
            pairs[rank] += places * pairs_of(first, last)
            low, high = (start + first) * rate if first else 0, size if last == rows else (start + last) * rate
            yield segment, place, places, rank, low, high
            begin = (place + places - 1) * rows + last


def _shares(pairs: Sequence[int], tokens: Sequence[int], total: int) -> list[int]:
    """The work that each rank takes, in any unit; rank `i` already scores `pairs[i]` pairs and holds `tokens[i]` tokens."""
    unit, coarse = 1 + total // UNITS, 1 + sum(tokens) // UNITS
    pairs, total, tokens = [count // unit for count in pairs], 1 + total // unit, [-(-count // coarse) for count in tokens]
    denominator = MOST[1] * sum(tokens)
    limits = [-(-MOST[0] * total * count // denominator) for count in tokens]
    # The work below a level grows by one for each rank between the pairs that it has and the most that it takes.
    events = sorted([*((count, 1) for count in pairs), *((count + limit, -1) for count, limit in zip(pairs, limits))])
    filled, num_ranks = 0, 0
    level = events[0][0]
    for event, step in events:
        reached = filled + num_ranks * (event - level)
        if reached > total:
            break
        filled, num_ranks, level = reached, num_ranks + step, event
    level -= (filled - total) // num_ranks
    return [min(max(level - count, 0), limit) for count, limit in zip(pairs, limits)]


def _ends(shares: Integers, num_kv_heads: int, num_queries: int, *, is_causal: bool) -> list[int]:
    """Where each rank's interval ends, in the queries of all heads, one head after another."""
    total = int(shares.sum())
    heads = np.cumsum(shares) * num_kv_heads
    place, fraction = heads // total, heads % total / total
    # The pairs of causal queries grow with the square. A quotient and a root are rounded equally on every processor.
    row = np.rint(num_queries * (np.sqrt(fraction) if is_causal else fraction)).astype(np.int64)
    least = LEAST * -(-len(shares) // num_kv_heads)  # parts of a head, where it has several ranks
    row = np.where(row * least < num_queries, 0, np.where((num_queries - row) * least < num_queries, num_queries, row))
    ends: list[int] = (place * num_queries + row).tolist()
    return ends
