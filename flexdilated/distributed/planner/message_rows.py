"""List the rows that one rank exchanges, message by message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.segments import Integers, expanded

SPREAD = 64  # with more tokens than so many per row, rows are sorted; else they are marked in a table of tokens


@dataclass(frozen=True, eq=False)
class Message:
    """Rows that travel from or to a peer: head after head, ascending, and per head its tokens, ascending."""

    peer: int
    heads: Integers  # heads that have rows
    tokens: tuple[Integers, ...]  # of each of these heads, in the whole sequence; heads that keep the same rows share an array

    @cached_property
    def counts(self) -> Integers:
        """`(heads,)` rows of each head."""
        return np.array([len(tokens) for tokens in self.tokens], np.int64)

    @cached_property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def _line(self) -> tuple[int, Integers]:
        """One number per row, ascending over the message: `width` times the place of its head, plus its token; and the width."""
        width = 1 + max(int(tokens[-1]) for tokens in self.tokens)
        return width, np.concatenate([at * width + tokens for at, tokens in enumerate(self.tokens)])

    def places(self, heads: Integers, first: Integers, stride: int, rows: int) -> Integers:
        """`(lanes, rows)`: where rows `first, first + stride, ...` of some heads, one lane per head, are in the message."""
        width, line = self._line
        assert (first + stride * (rows - 1) < width).all(), "a row that does not travel"
        asked = (self.heads.searchsorted(heads) * width + first)[:, None] + stride * np.arange(rows)
        found = line.searchsorted(asked)
        assert (line[found] == asked).all(), "a row that does not travel"
        return found

    def blocks(self) -> Iterator[tuple[Integers, Integers]]:
        """Neighbouring heads with equal numbers of rows: the heads, and their tokens `(heads, rows)`."""
        borders = [0, *(np.flatnonzero(np.diff(self.counts)) + 1).tolist(), len(self.heads)]
        for a, b in pairwise(borders):
            yield self.heads[a:b], np.stack(self.tokens[a:b])


def messages(plan: ContextPlan, exchange: str, kind: str, rank: int, *, sent: bool) -> Iterator[Message]:
    """The messages that a rank sends or receives, one peer at a time: all together could hold the whole sequence."""
    alone = range(rank, rank + 1)
    spans = plan.spans(exchange, kind, senders=alone) if sent else plan.spans(exchange, kind, receivers=alone)
    # If heads are assigned to ranks, the receiver depends on the head. Else all heads of a class need the rows of its first head.
    classes = [(head,) for head in range(len(plan.within))] if exchange == "heads" else list(plan.classes.values())
    number = np.full(len(plan.within), -1)
    number[[heads[0] for heads in classes]] = np.arange(len(classes))
    of_class = {head: i for i, heads in enumerate(classes) for head in heads}
    # Progressions of tokens, one for each span and class.
    start, heads, offsets = plan.all_kept
    of, place = expanded(start[spans.branch] + spans.place, spans.places)
    of, place = (x[number[heads[place]] >= 0] for x in (of, place))
    here, offset = spans.where(of), offsets[place]
    rate = plan.rates[here.branch]
    first = here.first + (offset - (here.first - here.origin)) % rate
    some = np.flatnonzero(((offset - here.residue) % rate < here.residues) & (first < here.end))
    peer, group = here.receiver if sent else here.sender, number[heads[place]]
    columns = (x[some].tolist() for x in (peer, group, first, rate, (here.end - first - 1) // rate + 1))
    for to, of_peer in groupby(sorted(zip(*columns)), itemgetter(0)):
        tokens = {group: _union(*zip(*(each[2:] for each in runs))) for group, runs in groupby(of_peer, itemgetter(1))}
        having = [head for head in range(len(plan.within)) if of_class[head] in tokens]
        yield Message(to, np.array(having, np.int64), tuple(tokens[of_class[head]] for head in having))


def _union(firsts: Sequence[int], strides: Sequence[int], rows: Sequence[int]) -> Integers:
    """The tokens of progressions, ascending, each once."""
    ends = [first + stride * (count - 1) + 1 for first, stride, count in zip(firsts, strides, rows)]
    low, end = min(firsts), max(ends)
    if end - low > SPREAD * sum(rows):
        return np.unique(np.concatenate([np.arange(*each) for each in zip(firsts, ends, strides)]))
    marked = np.zeros(end - low, bool)
    for first, stop, stride in zip(firsts, ends, strides):
        marked[first - low : stop - low : stride] = True
    return low + np.flatnonzero(marked)
