"""Count the (query, key) pairs that each rank scores, and assign heads of cut segments to ranks so that all ranks finish together.

The heads of a segment, one after another, and in each head its queries, form one line of work. Each rank that holds tokens of the
segment takes one interval of the line, in the order of ranks. The intervals fill the ranks to one level of scored pairs, including
the pairs that they have already. An interval that ends inside a head cuts the head by its queries; its keys then go to both ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from flexdilated.core.bounded_cache import recent
from flexdilated.distributed.planner.segments import CutSegments, inside
from flexdilated.distributed.planner.spans import Booleans, Integers, expanded, kept_below, portions

Count = TypeVar("Count", int, Integers)

TOGETHER = 1 << 14  # intervals of queries, each of one offset, that are counted together
MOST = (5, 4)  # a rank takes 5/4 of its part of a segment's tokens at most: more would travel than it saves
LEAST = 32  # a head is not cut for less than one in so many of the queries that a rank takes: its keys would travel once more
UNITS = 1 << 28  # at most so many units of pairs and tokens, so that products fit 64 bits


class HeadParts(NamedTuple):
    """Which rank computes which heads of cut segments: arrays over parts, ordered by segment, head and query.

    A part is the queries of slots `low ... high` of `places` heads, from number `place` on among the heads of the branch. A part of
    several heads has all their queries.
    """

    segment: Integers
    place: Integers
    places: Integers
    executor: Integers  # a rank
    low: Integers
    high: Integers

    def where(self, chosen: Booleans | Integers) -> HeadParts:
        return HeadParts(*(x[chosen] for x in self))


def scored(rows: Count, low: Count, high: Count, *, is_causal: bool) -> Count:
    """The pairs of queries `low ... high` of a number of rows: numbers, or arrays."""
    if is_causal:
        return high * (high + 1) // 2 - low * (low + 1) // 2
    return (high - low) * rows


@recent(size=lambda pairs, cut: cut.nbytes)
def pairs_by_rows(cut: CutSegments) -> Integers:
    """`(num_ranks,)` pairs if each rank computes its own outputs."""
    return pairs_inside_shards(cut) + pairs_of_segments(cut, np.arange(len(cut.all_segments.token)))


def pairs_inside_shards(cut: CutSegments) -> Integers:
    """`(num_ranks,)` pairs of the segments that lie inside one shard."""
    pairs, ranks = np.zeros(cut.num_ranks, np.int64), cut.document_parts[0]
    start, _, offsets = cut.all_kept
    names = np.sort(cut.named(np.repeat(np.arange(len(cut.kept)), cut.num_kept), offsets))
    several = max(1, TOGETHER // max(1, len(ranks)))
    for some in range(0, len(cut.kept), several):
        branch = np.arange(some, min(some + several, len(cut.kept)))[:, None]
        rate, kept = cut.rates[branch], cut.num_kept[branch]
        for repeats, size, outputs in _sizes_inside_shards(cut, branch):
            # Every head has this many rows and queries. Heads whose offset is below the remainder have one more.
            (rows, rest), (asked, behind) = np.divmod(size, rate), np.divmod(np.minimum(size, outputs), rate)
            more, asking = (np.searchsorted(names, cut.named(branch, left)) - start[branch] for left in (rest, behind))
            if cut.is_causal:
                found = kept * (asked * (asked + 1) // 2) + asking * (asked + 1)
            else:
                found = kept * rows * asked + rows * asking + asked * more + np.minimum(more, asking)
            np.add.at(pairs, ranks, (repeats * found).sum(axis=0))
    return pairs


def pairs_of_segments(cut: CutSegments, chosen: Integers) -> Integers:
    """`(num_ranks,)` pairs of some cut segments if each rank computes its own outputs; segments are numbered over all branches."""
    pairs, at = np.zeros(cut.num_ranks, np.int64), cut.all_segments
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
        np.add.at(pairs, rank[of], heads[number] * scored(rows, low, high, is_causal=cut.is_causal))
    return pairs


def pairs_of_parts(cut: CutSegments, parts: HeadParts) -> Integers:
    """`(num_ranks,)` pairs of parts of heads; segments are numbered over all branches."""
    pairs, at, (start, _, offsets) = np.zeros(cut.num_ranks, np.int64), cut.all_segments, cut.all_kept
    of, place = expanded(parts.place, parts.places)
    segment = parts.segment[of]
    rate, offset = cut.rates[at.branch[segment]], offsets[start[at.branch[segment]] + place]
    rows = kept_below(at.size[segment], rate, offset)
    low, high = (np.minimum(kept_below(slot[of], rate, offset), rows) for slot in (parts.low, parts.high))
    np.add.at(pairs, parts.executor[of], scored(rows, low, high, is_causal=cut.is_causal))
    return pairs


def _sizes_inside_shards(cut: CutSegments, branch: Integers) -> tuple[tuple[Integers, Integers, Integers], ...]:
    """`(count, tokens, outputs)` of the segments inside the parts of documents, for a column of branches.

    Three kinds: whole segments with all their outputs, the one whose outputs the end of the document cuts, and the last one.
    """
    _, begin, end, num_tokens, count = cut.document_parts
    w = np.minimum(cut.lengths[branch], num_tokens)
    out = cut.stride_of_outputs(w, cut.rates[branch])
    a, b = inside(begin, end, num_tokens, w, out)
    whole, shown = num_tokens // w, num_tokens // out  # segments with all of their tokens, and with all of their outputs
    full = count * np.clip(np.minimum(b, np.minimum(whole, shown)) - a, 0, None)
    edge = count * ((a <= shown) & (shown < np.minimum(b, whole)))
    last = count * ((a <= whole) & (whole < b))
    rest = num_tokens - whole * w
    return (
        (full, w, w),
        (edge, w, num_tokens - shown * out),
        (last, rest, np.clip(num_tokens - whole * out, 0, None)),
    )


def heads_exchange_pays_off(cut: CutSegments) -> Booleans:
    """`(segments,)`: whether moving heads of a cut segment moves fewer rows, over all branches.

    Causal segments of a whole document always do: ranks of late tokens would compute the most, and assigning heads evens out what
    narrower segments leave uneven.
    """
    at = cut.all_segments
    pays = np.zeros(len(at.token), bool)
    # In other segments no rank lacks a token, or no head asks for one.
    chosen = np.flatnonzero((at.first_source < at.last_source) & (cut.num_kept > 0)[at.branch])
    first, size = at.token[chosen], at.size[chosen]
    which, rank = expanded(at.first_source[chosen], (at.last_source - at.first_source + 1)[chosen])
    low, high = cut.held(first[which], size[which], rank)
    by_rows, squares = np.zeros_like(size), np.zeros(len(size))
    # Ranks with queries need the tokens of other ranks, or, if causal, of earlier ranks.
    np.add.at(by_rows, which, 2 * np.where(low < high, low if cut.is_causal else size[which] - (high - low), 0))
    np.add.at(squares, which, (high - low).astype(np.float64) ** 2)  # beyond 64 bits for segments of 2**32 tokens
    # A rank that computes a head holds, on average, as many of its tokens as the rank of a token does.
    by_heads = (2 + 2 * cut.group) * (size - np.floor(squares / size))
    pays[chosen] = (by_heads < by_rows) | (cut.is_causal & (size == at.document_tokens[chosen]))
    return pays


def assign_heads(cut: CutSegments, assigned: Booleans) -> HeadParts:
    """Which rank computes which heads of the chosen cut segments of all branches: equal on every rank.

    Args:
        cut: The cut segments.
        assigned: `(segments,)`, over all branches, whether to assign the heads of a segment.
    """
    at, segments = cut.all_segments, np.flatnonzero(assigned)
    pairs = (pairs_by_rows(cut) - pairs_of_segments(cut, segments)).tolist()
    which, ranks = expanded(at.first_source[segments], (at.last_source - at.first_source + 1)[segments])
    low, high = cut.held(at.token[segments[which]], at.size[segments[which]], ranks)
    some = low < high
    ranks, tokens = ranks[some].tolist(), (high - low)[some].tolist()
    begin = np.searchsorted(which[some], np.arange(len(segments) + 1)).tolist()
    found: list[tuple[int, ...]] = []
    # The widest segments last: they have the most ranks, which can even out what is left.
    branch = at.branch[segments].tolist()
    for number in sorted(range(len(segments)), key=lambda number: cut.pattern.segment_lengths[branch[number]]):
        here = slice(begin[number], begin[number + 1])
        found += _parts_of_segment(cut, int(segments[number]), ranks[here], tokens[here], pairs)
    parts = HeadParts(*np.array(found, np.int64).reshape(-1, len(HeadParts._fields)).T)
    return parts.where(np.argsort(at.branch[parts.segment], kind="stable"))


def _parts_of_segment(
    cut: CutSegments, segment: int, ranks: list[int], tokens: list[int], pairs: list[int]
) -> Iterator[tuple[int, ...]]:
    """The parts of one segment, of which `ranks` hold `tokens`; its pairs are added to `pairs`, those that each rank has."""
    at = cut.all_segments
    rate, heads = cut.kept[int(at.branch[segment])]
    size, outputs = int(at.size[segment]), int(at.outputs[segment])
    rows, asked = -(-size // rate), -(-min(size, outputs) // rate)  # of the first offset; others keep as many or one less
    if not asked:
        return

    def pairs_of(first: int, end: int) -> int:
        return scored(rows, first, end, is_causal=cut.is_causal)

    shares = _shares([pairs[rank] for rank in ranks], tokens, pairs_of(0, asked) * len(heads))
    ends = _ends(np.array(shares), len(heads), asked, is_causal=cut.is_causal)
    for rank, begin, end in zip(ranks, [0, *ends], ends):
        while begin < end:
            place, first = divmod(begin, asked)
            places = 1 if first else max(1, (end - begin) // asked)
            last = min(asked, end - place * asked)
            pairs[rank] += places * pairs_of(first, last)
            yield segment, place, places, rank, first * rate, outputs if last == asked else last * rate
            begin = (place + places - 1) * asked + last


def _shares(pairs: Sequence[int], tokens: Sequence[int], total: int) -> list[int]:
    """The work that each rank takes, in any unit, given the pairs that it scores already and the tokens that it holds."""
    unit, coarse = 1 + total // UNITS, 1 + sum(tokens) // UNITS
    pairs, total, tokens = [each // unit for each in pairs], 1 + total // unit, [-(-each // coarse) for each in tokens]
    held = MOST[1] * sum(tokens)
    most = [-(-MOST[0] * total * each // held) for each in tokens]
    # The work below a level grows by one for each rank between the pairs that it has and the most that it takes.
    turns = sorted([*((each, 1) for each in pairs), *((each + more, -1) for each, more in zip(pairs, most))])
    taken, taking = 0, 0
    level = turns[0][0]
    for turn, step in turns:
        reached = taken + taking * (turn - level)
        if reached > total:
            break
        taken, taking, level = reached, taking + step, turn
    level -= (taken - total) // taking
    return [min(max(level - each, 0), more) for each, more in zip(pairs, most)]


def _ends(shares: Integers, num_heads: int, asked: int, *, is_causal: bool) -> list[int]:
    """Where each rank's interval ends, in the queries of all heads, one head after another."""
    total = int(shares.sum())
    heads = np.cumsum(shares) * num_heads
    place, rest = heads // total, heads % total / total
    # The pairs of causal queries grow with the square. A quotient and a root are rounded equally on every processor.
    row = np.rint(asked * (np.sqrt(rest) if is_causal else rest)).astype(np.int64)
    least = LEAST * -(-len(shares) // num_heads)  # parts of a head, where it has several ranks
    row = np.where(row * least < asked, 0, np.where((asked - row) * least < asked, asked, row))
    ends: list[int] = (place * asked + row).tolist()
    return ends
