"""List the rows that one rank exchanges, message by message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.segments import Integers, expand_ranges

SPREAD = 64  # with more tokens than so many per row, rows are sorted; else they are marked in a table of tokens


@dataclass(frozen=True, eq=False)
class Message:
    """Rows that travel from or to a peer, ordered by head, then by token."""

    peer: int
    heads: Integers  # (heads,) key/value heads with rows in this message
    tokens: tuple[Integers, ...]  # per head its `(rows,)` tokens in the whole sequence; heads with equal rows share an array

    @cached_property
    def counts(self) -> Integers:
        """`(heads,)` rows of each head."""
        return np.array([len(tokens) for tokens in self.tokens], np.int64)

    @cached_property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def _line(self) -> tuple[int, Integers]:
        """`(width, numbers)`: one number per row, `width * index of its head + token`, ascending over the message."""
        width = 1 + max(int(tokens[-1]) for tokens in self.tokens)
        return width, np.concatenate([place * width + tokens for place, tokens in enumerate(self.tokens)])

    def places(self, heads: Integers, first: Integers, stride: int, rows: int) -> Integers:
        """`(lanes, rows)` places in the message of tokens `first[i], first[i] + stride, ...` of head `heads[i]`."""
        width, line = self._line
        assert (first + stride * (rows - 1) < width).all(), "a row that does not travel"
        numbers = (self.heads.searchsorted(heads) * width + first)[:, None] + stride * np.arange(rows)
        places = line.searchsorted(numbers)
        assert (line[places] == numbers).all(), "a row that does not travel"
        return places

    def blocks(self) -> Iterator[tuple[Integers, Integers]]:
        """Runs of consecutive heads with equal numbers of rows: `heads`, and `(heads, rows)` tokens."""
        limits = [0, *(np.flatnonzero(np.diff(self.counts)) + 1).tolist(), len(self.heads)]
        for a, b in pairwise(limits):
            yield self.heads[a:b], np.stack(self.tokens[a:b])


def messages(plan: ContextPlan, exchange: str, kind: str, rank: int, *, sent: bool) -> Iterator[Message]:
    """The messages that a rank sends or receives, one peer at a time: all together could hold the whole sequence."""
    alone = range(rank, rank + 1)
    spans = plan.spans(exchange, kind, senders=alone) if sent else plan.spans(exchange, kind, receivers=alone)
    # If heads are assigned to ranks, the receiver depends on the head. Else all heads of a class need the rows of its first head.
    classes = [(head,) for head in range(len(plan.within))] if exchange == "heads" else list(plan.classes.values())
    number = np.full(len(plan.within), -1)
    number[[heads[0] for heads in classes]] = np.arange(len(classes))
    class_of_head = {head: i for i, heads in enumerate(classes) for head in heads}
    # Progressions of tokens, one for each span and class.
    start, heads, offsets = plan.all_branch_heads
    span, place = expand_ranges(start[spans.branch] + spans.place, spans.places)
    span, place = (x[number[heads[place]] >= 0] for x in (span, place))
    repeated, offset = spans.where(span), offsets[place]
    rate = plan.rates[repeated.branch]
    first = repeated.first + (offset - (repeated.first - repeated.origin)) % rate
    nonempty = np.flatnonzero(((offset - repeated.residue) % rate < repeated.residues) & (first < repeated.end))
    peer, group = repeated.receiver if sent else repeated.sender, number[heads[place]]
    columns = (x[nonempty].tolist() for x in (peer, group, first, rate, (repeated.end - first - 1) // rate + 1))
    for peer_rank, peer_runs in groupby(sorted(zip(*columns)), itemgetter(0)):
        tokens = {group: _union(*zip(*(run[2:] for run in runs))) for group, runs in groupby(peer_runs, itemgetter(1))}
        peer_heads = [head for head in range(len(plan.within)) if class_of_head[head] in tokens]
        yield Message(peer_rank, np.array(peer_heads, np.int64), tuple(tokens[class_of_head[head]] for head in peer_heads))


def _union(firsts: Sequence[int], strides: Sequence[int], rows: Sequence[int]) -> Integers:
    """The union of the progressions `first, first + stride, ...` of `rows` tokens, ascending."""
    ends = [first + stride * (count - 1) + 1 for first, stride, count in zip(firsts, strides, rows)]
    low, end = min(firsts), max(ends)
    if end - low > SPREAD * sum(rows):
        return np.unique(np.concatenate([np.arange(*run) for run in zip(firsts, ends, strides)]))
    marked = np.zeros(end - low, bool)
    for first, stop, stride in zip(firsts, ends, strides):
        marked[first - low : stop - low : stride] = True
    return low + np.flatnonzero(marked)
