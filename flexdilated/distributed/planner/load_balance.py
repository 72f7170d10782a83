"""Count the (query, key) pairs that each rank scores, and assign heads of cut segments to ranks so that all ranks finish together.

The heads of a segment, one after another, and in each head its queries, form one line of work. Each rank that holds tokens of the
segment takes one interval of the line, in the order of ranks. The intervals fill the ranks to one level of scored pairs, including
the pairs that they have already. An interval that ends inside a head cuts the head by its queries; its keys then go to both ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flexdilated.core.bounded_cache import recent
from flexdilated.distributed.planner.segments import Booleans, CutSegments, Integers, expanded, kept_below

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


def _scored(rows: Any, low: Any, high: Any, cut: CutSegments) -> Any:
    """The pairs of queries `low ... high` of a number of rows: numbers, or arrays."""
    if cut.is_causal:
        return high * (high + 1) // 2 - low * (low + 1) // 2
    return (high - low) * rows


@recent(size=lambda pairs, cut: cut.nbytes)
def pairs_by_rows(cut: CutSegments) -> Integers:
    """`(num_ranks,)` pairs if each rank computes its own outputs."""
    ranks, begin, end, num_tokens, count = cut.document_parts
    pairs = np.zeros(cut.num_ranks, np.int64)
    for branch, (rate, heads) in enumerate(cut.kept):
        w = np.minimum(cut.lengths[branch], num_tokens)
        for offset, same in Counter(offset for _, offset in heads).items():
            before = (_pairs_before(cut, position, num_tokens, w, rate, offset) for position in (begin, end))
            np.add.at(pairs, ranks, -same * count * np.subtract(*before))
    return pairs


def _pairs_before(cut: CutSegments, position: Integers, num_tokens: Integers, w: Integers, rate: int, offset: int) -> Integers:
    """The pairs of one head whose queries are before a position of a document."""
    whole: Integers = position // w
    rows, last = (kept_below(size, rate, offset) for size in (w, np.clip(num_tokens - whole * w, 0, w)))
    asked = np.minimum(kept_below(position - whole * w, rate, offset), last)
    found: Integers = whole * _scored(rows, 0, rows, cut) + _scored(last, 0, asked, cut)
    return found


def pairs_of_parts(cut: CutSegments, parts: HeadParts) -> Integers:
    """`(num_ranks,)` pairs of parts of heads; segments are numbered over all branches."""
    pairs, at, (start, _, offsets) = np.zeros(cut.num_ranks, np.int64), cut.all_segments, cut.all_kept
    of, place = expanded(parts.place, parts.places)
    segment = parts.segment[of]
    branch, size = at.branch[segment], at.size[segment]
    rate, offset = cut.rates[branch], offsets[start[branch] + place]
    rows = kept_below(size, rate, offset)
    low, high = (np.minimum(kept_below(slot[of], rate, offset), rows) for slot in (parts.low, parts.high))
    np.add.at(pairs, parts.executor[of], _scored(rows, low, high, cut))
    return pairs


def own_parts(cut: CutSegments, segments: Integers) -> HeadParts:
    """The parts of some cut segments, numbered over all branches, if each rank computes its own outputs."""
    at = cut.all_segments.where(segments)
    which, rank = expanded(at.first_rank, at.last_rank - at.first_rank + 1)
    low, high = cut.held(at.token[which], at.size[which], rank)
    places = cut.num_kept[at.branch[which]]
    parts = HeadParts(segments[which], np.zeros_like(which), places, rank, low, high)
    return parts.where((low < high) & (places > 0))


def heads_exchange_pays_off(cut: CutSegments) -> Booleans:
    """`(segments,)`: whether moving heads of a cut segment moves fewer rows, over all branches.

    Causal segments of a whole document always do: ranks of late tokens would compute the most, and assigning heads evens out what
    narrower segments leave uneven.
    """
    at = cut.all_segments
    pays = np.zeros(len(at.token), bool)
    # In other segments no rank lacks a token, or no head asks for one.
    chosen = np.flatnonzero((at.first_rank < at.last_rank) & (cut.num_kept > 0)[at.branch])
    first, size = at.token[chosen], at.size[chosen]
    which, rank = expanded(at.first_rank[chosen], (at.last_rank - at.first_rank + 1)[chosen])
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
    pairs = (pairs_by_rows(cut) - pairs_of_parts(cut, own_parts(cut, segments))).tolist()
    which, ranks = expanded(at.first_rank[segments], (at.last_rank - at.first_rank + 1)[segments])
    low, high = cut.held(at.token[segments[which]], at.size[segments[which]], ranks)
    some = low < high
    ranks, tokens = ranks[some].tolist(), (high - low)[some].tolist()
    begin = np.searchsorted(which[some], np.arange(len(segments) + 1)).tolist()
    found: list[tuple[int, ...]] = []
    # The widest segments last: they have the most ranks, which can even out what is left.
    branch, widths = at.branch[segments].tolist(), [length for length, _ in cut.pattern.segments("the planner of ranks")]
    for number in sorted(range(len(segments)), key=lambda number: widths[branch[number]]):
        here = slice(begin[number], begin[number + 1])
        found += _parts_of_segment(cut, int(segments[number]), ranks[here], tokens[here], pairs)
    return HeadParts(*np.array(found, np.int64).reshape(-1, len(HeadParts._fields)).T)


def _parts_of_segment(
    cut: CutSegments, segment: int, ranks: list[int], tokens: list[int], pairs: list[int]
) -> Iterator[tuple[int, ...]]:
    """The parts of one segment, of which `ranks` hold `tokens`; its pairs are added to `pairs`, those that each rank has."""
    at = cut.all_segments
    rate, heads = cut.kept[int(at.branch[segment])]
    size = int(at.size[segment])
    rows = -(-size // rate)  # of the first offset; others keep as many or one less

    def pairs_of(first: int, end: int) -> int:
        return int(_scored(rows, first, end, cut))

    shares = _shares([pairs[rank] for rank in ranks], tokens, pairs_of(0, rows) * len(heads))
    ends = _ends(np.array(shares), len(heads), rows, is_causal=cut.is_causal)
    for rank, begin, end in zip(ranks, [0, *ends], ends):
        while begin < end:
            place, first = divmod(begin, rows)
            places = 1 if first else max(1, (end - begin) // rows)
            last = min(rows, end - place * rows)
            pairs[rank] += places * pairs_of(first, last)
            yield segment, place, places, rank, first * rate, size if last == rows else last * rate
            begin = (place + places - 1) * rows + last


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
