"""The rows that one rank exchanges, one by one: what a plan says in intervals and strides, listed for this rank alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flexdilated.distributed.plan import ContextPlan
from flexdilated.distributed.spans import Integers, Kept, Spans, expanded, rows_of

SPREAD = 64  # tokens for each row, above which rows are sorted; else they are marked along the line of tokens
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
    branches = [spans.where(spans.branch == branch).alone(rate) for branch, (rate, _) in enumerate(plan.kept)]
    peers = np.unique(spans.receiver if sent else spans.sender)
    heads: list[tuple[int, Hashable]] = []
    # By class, sorted by peer once, and where each peer's begin: to look for each among all would take the square of their number.
    parts: dict[Hashable, tuple[Runs, list[int]]] = {}
    for offsets, members in plan.classes.items():
        for head in members:
            # Where heads are dealt the receiver depends on the head, else heads of a class need the same rows.
            key = (offsets, head) if exchange == "heads" else offsets
            heads.append((head, key))
            if key not in parts:
                runs = _runs(plan.kept, branches, head, sent=sent)
                runs = runs.where(np.argsort(runs.peer, kind="stable"))
                parts[key] = runs, [*np.searchsorted(runs.peer, peers).tolist(), len(runs.peer)]
    for place, peer in enumerate(peers.tolist()):
        lists = {key: runs.where(slice(*starts[place : place + 2])).tokens() for key, (runs, starts) in parts.items()}
        rows = [(head, lists[key]) for head, key in sorted(heads, key=lambda each: each[0])]
        if any(len(tokens) for _, tokens in rows):
            yield peer, np.repeat([head for head, _ in rows], [len(x) for _, x in rows]), np.concatenate([x for _, x in rows])


def _runs(kept: Sequence[Kept], branches: Sequence[Spans], head: int, *, sent: bool) -> Runs:
    """What travels of the spans of each branch for one head, which some branch keeps; progressions of two branches may overlap."""
    found = []
    for (rate, heads), spans in zip(kept, branches):
        place = next((i for i, (each, _) in enumerate(heads) if each == head), None)
        if place is not None:
            chosen, first, rows = rows_of(spans, rate, heads[place][1], place)
            peer = (spans.receiver if sent else spans.sender)[chosen]
            found.append(Runs(peer, first, np.full_like(first, rate), rows))
    return Runs(*(np.concatenate(parts) for parts in zip(*found)))
