"""Who computes which part of the heads of cut segments, so that all ranks end together.

The heads of a segment, one behind another, and in each its queries, are one line of work. The ranks that hold tokens of the segment
take an interval of it each, in their order: what fills all of them to one level of pairs scored, over those they have already.
Where an interval ends inside a head, the head is cut by its queries, and its keys go to both ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flexdilated.distributed import work
from flexdilated.distributed.segments import CutSegments
from flexdilated.distributed.spans import Integers, expanded
from flexdilated.distributed.work import Parts

MOST = (5, 4)  # a rank takes 5/4 of its part of a segment's tokens at most: more would travel than it saves
LEAST = 32  # a head is not cut for less than one in so many of the queries that a rank takes: its keys would travel once more
UNITS = 1 << 28  # of pairs and tokens at most, larger ones where a segment has more: their products fit 64 bits


def pay(cut: CutSegments) -> NDArray[np.bool_]:
    """The cut segments of all branches where heads travel less than rows, and causal ones of a whole document.

    Of the latter the ranks of late tokens would compute the most, and they can level out what narrower segments leave uneven.
    """
    at = cut.all_segments
    pays = np.zeros(len(at.token), bool)
    # Else no rank lacks any of its tokens, or no head asks for them.
    chosen = np.flatnonzero((at.first_source < at.last_source) & (cut.num_kept > 0)[at.branch])
    first, size = at.token[chosen], at.size[chosen]
    which, rank = expanded(at.first_source[chosen], (at.last_source - at.first_source + 1)[chosen])
    low, high = cut.held(first[which], size[which], rank)
    by_rows, squares = np.zeros_like(size), np.zeros(len(size))
    # What the ranks with queries need: the tokens of others, or of those before.
    np.add.at(by_rows, which, 2 * np.where(low < high, low if cut.is_causal else size[which] - (high - low), 0))
    np.add.at(squares, which, (high - low).astype(np.float64) ** 2)  # beyond 64 bits for segments of 2**32 tokens
    # Who computes a head holds as many of its tokens as the rank of a token does on average.
    by_heads = (2 + 2 * cut.group) * (size - np.floor(squares / size))
    pays[chosen] = (by_heads < by_rows) | (cut.is_causal & (size == cut.all_cut[chosen, 1]))
    return pays


def deal(cut: CutSegments, dealt: NDArray[np.bool_]) -> tuple[Parts, ...]:
    """Per branch, who computes the heads of the segments that are dealt, of those of all branches. The same on every rank."""
    at, segments = cut.all_segments, np.flatnonzero(dealt)
    pairs = (work.by_rows(cut) - work.of_rows(cut, segments)).tolist()
    which, ranks = expanded(at.first_source[segments], (at.last_source - at.first_source + 1)[segments])
    low, high = cut.held(at.token[segments[which]], at.size[segments[which]], ranks)
    some = low < high
    ranks, tokens = ranks[some].tolist(), (high - low)[some].tolist()
    borders = np.searchsorted(which[some], np.arange(len(segments) + 1)).tolist()
    found: list[list[tuple[int, ...]]] = [[] for _ in cut.kept]
    # The widest last: most ranks can make good what is left uneven.
    of_branches = at.branch[segments].tolist()
    for number in sorted(range(len(segments)), key=lambda number: cut.pattern.segment_lengths[of_branches[number]]):
        here = slice(borders[number], borders[number + 1])
        found[of_branches[number]] += _deal(cut, int(segments[number]), ranks[here], tokens[here], pairs)
    return tuple(Parts(*np.array(parts, np.int64).reshape(-1, len(Parts._fields)).T) for parts in found)


def _deal(cut: CutSegments, segment: int, ranks: list[int], tokens: list[int], pairs: list[int]) -> Iterator[tuple[int, ...]]:
    """The parts of one segment, of which these ranks hold so many tokens; pairs are added to those that each rank has."""
    at, branch = cut.all_segments, int(cut.all_segments.branch[segment])
    rate, heads = cut.kept[branch]
    size, outputs = int(at.size[segment]), int(at.outputs[segment])
    rows, asked = -(-size // rate), -(-min(size, outputs) // rate)  # of the first offset; others keep as many or one less
    if not asked:
        return

    def scored(first: int, end: int) -> int:
        return work.scored(rows, first, end, is_causal=cut.is_causal)

    shares = _shares([pairs[rank] for rank in ranks], tokens, scored(0, asked) * len(heads))
    ends = _ends(np.array(shares), len(heads), asked, is_causal=cut.is_causal)
    segment -= int(cut.begin[branch])
    for rank, begin, end in zip(ranks, [0, *ends], ends):
        while begin < end:
            place, first = divmod(begin, asked)
            places = 1 if first else max(1, (end - begin) // asked)
            last = min(asked, end - place * asked)
            pairs[rank] += places * scored(first, last)
            yield segment, place, places, rank, first * rate, outputs if last == asked else last * rate
            begin = (place + places - 1) * asked + last


def _shares(pairs: Sequence[int], tokens: Sequence[int], total: int) -> list[int]:
    """How much of some work each rank takes, in any unit, that has scored so many pairs and holds so many tokens of it."""
    unit, coarse = 1 + total // UNITS, 1 + sum(tokens) // UNITS
    pairs, total, tokens = [each // unit for each in pairs], 1 + total // unit, [-(-each // coarse) for each in tokens]
    held = MOST[1] * sum(tokens)
    most = [-(-MOST[0] * total * each // held) for each in tokens]
    # What is taken up to a level grows by one for each rank between the pairs that it has and the most that it takes.
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
    """Where each rank's interval ends, in the queries of all heads one behind another."""
    total = int(shares.sum())
    heads = np.cumsum(shares) * num_heads
    place, rest = heads // total, heads % total / total
    # The pairs of causal queries grow with the square. A quotient and a root are rounded alike everywhere.
    row = np.rint(asked * (np.sqrt(rest) if is_causal else rest)).astype(np.int64)
    least = LEAST * -(-len(shares) // num_heads)  # parts of a head, where it has several ranks
    row = np.where(row * least < asked, 0, np.where((asked - row) * least < asked, asked, row))
    ends: list[int] = (place * asked + row).tolist()
    return ends
