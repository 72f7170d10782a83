"""The rows that one rank exchanges, one by one: what a plan says in intervals and strides, listed for this rank alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flexdilated.distributed.plan import ContextPlan
from flexdilated.distributed.spans import Integers, Spans, expanded, rows_of

SPREAD = 64  # tokens for each row, above which rows are sorted; else they are marked along the line of tokens
TOGETHER = 1 << 16  # spans, each of one head, that are looked at together
LONG = 16  # rows of a progression, on average, from which each is marked by itself


class Runs(NamedTuple):
    """Arithmetic progressions of tokens that travel from or to a peer, one array entry each."""

    peer: Integers
    first: Integers
    stride: Integers
    rows: Integers

    def where(self, chosen: Integers | slice) -> Runs:
        return Runs(*(x[chosen] for x in self))

    def tokens(self) -> Integers:
        """Those of all, ascending, each once."""
        first, stride, rows = self.first, self.stride, self.rows
        if len(rows) == 1:
            return first[0] + stride[0] * np.arange(rows[0])
        if not len(rows):
            return np.empty(0, np.int64)
        total, low, high = int(rows.sum()), int(first.min()), int((first + stride * (rows - 1)).max())
        if total < LONG * len(rows):
            run, number = expanded(np.zeros_like(rows), rows)
            found = first[run] + number * stride[run]
            if high - low >= SPREAD * total:
                return np.unique(found)
            seen = np.zeros(high + 1 - low, bool)
            seen[found - low] = True
        else:
            seen = np.zeros(high + 1 - low, bool)
            for begin, step, count in zip((first - low).tolist(), stride.tolist(), rows.tolist()):
                seen[begin : begin + step * count : step] = True
        return low + np.flatnonzero(seen)


def messages(plan: ContextPlan, exchange: str, kind: str, rank: int, *, sent: bool) -> Iterator[tuple[int, Integers, Integers]]:
    """Peer by peer, `(peer, head, token)` of the rows that a rank sends or receives, ascending; tokens of the whole sequence."""
    spans = plan.spans(exchange, kind, rank, sent=sent)
    peers = np.unique(spans.receiver if sent else spans.sender)
    if not len(peers):
        return
    # Where heads are dealt the receiver depends on the head, else heads of a class need the same rows: those of its first.
    groups = plan.classes.values()
    alike = [(head,) for heads in groups for head in heads] if exchange == "heads" else list(groups)
    of, runs = _runs(plan, spans, [heads[0] for heads in alike], sent=sent)
    name = of * plan.num_ranks + runs.peer
    order = np.argsort(name, kind="stable")
    runs, name = runs.where(order), name[order]
    which = sorted((head, number) for number, heads in enumerate(alike) for head in heads)
    for peer in peers.tolist():
        names = np.arange(len(alike)) * plan.num_ranks + peer
        borders = zip(*(np.searchsorted(name, names, side).tolist() for side in ("left", "right")))
        lists = [runs.where(slice(first, end)).tokens() for first, end in borders]
        rows = [(head, lists[number]) for head, number in which]
        if any(len(tokens) for tokens in lists):
            yield peer, np.repeat([head for head, _ in rows], [len(x) for _, x in rows]), np.concatenate([x for _, x in rows])


def _runs(plan: ContextPlan, spans: Spans, heads: Sequence[int], *, sent: bool) -> tuple[Integers, Runs]:
    """What travels of one span or more for some heads: which of these, and what; progressions of two branches may overlap."""
    found = []
    for branch, (rate, kept) in enumerate(plan.kept):
        here = spans.where(spans.branch == branch).alone(rate)
        peer = here.receiver if sent else here.sender
        places = {head: place for place, (head, _) in enumerate(kept)}
        those = np.array([number for number, head in enumerate(heads) if head in places], np.int64)
        place = np.array([places[head] for head in heads if head in places], np.int64)[:, None]
        offset = np.array([offset for _, offset in kept], np.int64)[place]
        if not len(peer):
            continue
        several = max(1, TOGETHER // len(peer))
        for some in range(0, len(those), several):
            chosen, first, rows = rows_of(here, rate, offset[some : some + several], place[some : some + several])
            found.append((those[some + chosen // len(peer)], peer[chosen % len(peer)], first, np.full_like(first, rate), rows))
    which, *columns = (np.concatenate(column) for column in zip(*found))
    return which, Runs(*columns)
