"""Which rows each rank needs of which other, in integers: intervals and strides, never lists."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.core.bounded_cache import PIECE, recent
from flexdilated.core.call import EXCHANGES as ASKED
from flexdilated.core.pattern import DilatedPattern
from flexdilated.distributed import shares
from flexdilated.distributed.counts import Counter
from flexdilated.distributed.estimates import by_owner
from flexdilated.distributed.segments import CutSegments
from flexdilated.distributed.spans import Integers, Spans, Traffic, expanded, has_rows
from flexdilated.distributed.work import Parts

EXCHANGES = tuple(name for name in ASKED if name != "auto")  # in the order of preference where bytes are equal
SPANS = 1 << 16  # pairs of ranks whose spans are made at once
KINDS = ("kv", "q", "out")  # keys with values, queries, outputs with their lse
MOST = 1 << 18  # spans of heads, above which nothing of them is counted
COUNTED, ALWAYS = 1 << 24, 1 << 30  # bytes written to count what travels, for each rank and at least; what is left is estimated


@dataclass(frozen=True, eq=False)
class ContextPlan(CutSegments):
    """Dilated attention over a sharded sequence, by what it moves and what each rank computes. Identical on every rank.

    Made by `context_plan`, which gives the same object for the same integers: plans are compared by identity.
    """

    @cached_property
    def description(self) -> dict[str, Any]:
        """What ranks must share, in JSON types; many lengths or documents are told by a hash."""
        return {
            "pattern": self.pattern.to_dict(),
            "world_size": self.num_ranks,
            "shard_lengths": _shown(self.shard_lengths),
            "num_kv_heads": self.num_heads,
            "kv_heads_held": [self.within.start, self.within.stop],
            "query_heads_per_kv_head": self.group,
            "documents": "none" if self.documents == ((0, self.num_tokens),) else _shown(self.documents),
            "is_causal": self.is_causal,
        }

    @cached_property
    def classes(self) -> dict[tuple[int | None, ...], tuple[int, ...]]:
        """Heads that keep the same rows in every branch."""
        offsets = [dict(self.kept[branch].heads) for branch in range(len(self.pattern.branches))]
        found: dict[tuple[int | None, ...], list[int]] = {}
        for head in range(len(self.within)):
            found.setdefault(tuple(each.get(head) for each in offsets), []).append(head)
        return {offsets: tuple(heads) for offsets, heads in found.items()}

    def spans(self, exchange: str, kind: str, rank: int | None = None, *, sent: bool = False) -> Spans:
        """What travels, as spans of tokens: all of it, or what one rank receives or sends."""
        ranks = range(self.num_ranks)
        one = ranks if rank is None else range(rank, rank + 1)
        return self._spans(exchange, kind, *((ranks, one) if sent else (one, ranks)))

    def some_ranks(self) -> Iterator[range]:
        """All ranks, some at a time: pairs of ranks are the square of their number."""
        several = max(1, SPANS // self.num_ranks)
        for first in range(0, self.num_ranks, several):
            yield range(first, min(first + several, self.num_ranks))

    def received(self, exchange: str, kind: str, receivers: range) -> Spans:
        """What some ranks receive."""
        return self._spans(exchange, kind, receivers, range(self.num_ranks))

    def _spans(self, exchange: str, kind: str, receivers: range, senders: range) -> Spans:
        """What some ranks receive of some."""
        whole = self.dealt if exchange == "heads" else np.zeros(int(self.begin[-1]), bool)
        found = []
        if self._travels_by_rows(kind):
            found.append(self._row_spans(kind, np.flatnonzero(~whole), receivers, senders))
        if whole.any():
            found.append(self._head_spans(kind, receivers, senders))
        found = [spans for spans in found if len(spans.first)]
        spans = Spans.joined(found)
        return spans.where(np.argsort(spans.branch, kind="stable")) if len(found) > 1 else spans

    def _travels_by_rows(self, kind: str) -> bool:
        """Whether ranks may need rows of a kind for their own outputs: queries do not travel where these belong to their tokens."""
        return kind == "kv" or (kind == "q" and self.moves)

    def _row_spans(self, kind: str, chosen: Integers, receivers: range, senders: range) -> Spans:
        """Rows that the ranks of some segments need for their own outputs."""
        at, chosen = self.all_segments, chosen[(self.num_kept > 0)[self.all_segments.branch[chosen]]]
        first_owner, owners = _among(at.first_owner, at.last_owner, receivers)
        first_source, sources = _among(at.first_source, at.last_source, senders)
        # A rank that holds both sides of a segment alone needs nothing.
        away = (at.first_source < at.last_source) | (at.first_owner != at.first_source) | (at.first_owner < at.last_owner)
        chosen = chosen[(away & (owners > 0) & (sources > 0))[chosen]]
        which, number = expanded(np.zeros_like(chosen), (sources * owners)[chosen])
        of = chosen[which]
        steps = sources[of]
        receiver, sender = first_owner[of] + number // steps, first_source[of] + number % steps
        low, high = self.held(at.out_token[of], at.outputs[of], receiver)  # the slots of the outputs there
        first, end = self.held(at.token[of], at.size[of], sender)
        if kind == "q":
            first, end = np.maximum(first, low), np.minimum(end, high)
        elif self.is_causal:
            end = np.minimum(end, high)
        some = np.flatnonzero((receiver != sender) & (low < high) & (first < end))
        of, receiver, sender, low, high, first, end = (x[some] for x in (of, receiver, sender, low, high, first, end))
        branch, token, size, repeats = (x[of] for x in (at.branch, at.token, at.size, at.repeats))
        rate = self.rates[branch]
        # Few outputs are those of some offsets alone; and each slot of queries has but one.
        few = (high - low < rate) & (kind != "q")
        residue, residues = np.where(few, low % rate, 0), np.where(few, high - low, rate)
        spans = Spans(
            branch=branch,
            receiver=receiver,
            sender=sender,
            first=token + first,
            end=token + end + (repeats - 1) * size,  # neighbours that look alike are one span
            origin=token,
            residue=residue,
            residues=residues,
            place=np.zeros_like(low),
            places=self.num_kept[branch],
            period=np.where(repeats > 1, size, rate),
        )
        return self.by_offsets(spans)

    def taken(self, exchange: str) -> tuple[NDArray[np.bool_], ...]:
        """Per branch, the cut segments whose heads are dealt to ranks; of the others every rank computes its own outputs."""
        return self.by_heads if exchange == "heads" else self._by_rows

    @cached_property
    def _by_rows(self) -> tuple[NDArray[np.bool_], ...]:
        return tuple(np.zeros(len(cut), bool) for cut in self.cut)

    @cached_property
    def dealt(self) -> NDArray[np.bool_]:
        """The cut segments of all branches whose heads "heads" deals; none where nothing need travel."""
        return np.zeros(int(self.begin[-1]), bool) if self.is_local else shares.pay(self)

    @cached_property
    def by_heads(self) -> tuple[NDArray[np.bool_], ...]:
        """Per branch, the same."""
        return tuple(self.dealt[a:b] for a, b in pairwise(self.begin.tolist()))

    @cached_property
    def parts(self) -> tuple[Parts, ...]:
        """Per branch, who computes which part of the heads of these segments."""
        return shares.deal(self, self.dealt)

    @cached_property
    def all_parts(self) -> Parts:
        """Those of all branches, of segments among those of all."""
        branch = np.repeat(np.arange(len(self.parts)), [len(each.place) for each in self.parts])
        joined = Parts(*(np.concatenate(columns) for columns in zip(*self.parts)))
        return joined._replace(segment=joined.segment + self.begin[branch])

    def _head_spans(self, kind: str, receivers: range, senders: range) -> Spans:
        """Rows of heads to the ranks that compute them, or their outputs back."""
        executors, owners = (senders, receivers) if kind == "out" else (receivers, senders)
        lent = self._lent(kind, executors)
        span, rank = expanded(*_among(self.rank_of(lent.first), self.rank_of(lent.end - 1), owners))
        first, end = np.maximum(lent.first[span], self.limits[rank]), np.minimum(lent.end[span], self.limits[rank + 1])
        some = np.flatnonzero((first < end) & (rank != lent.receiver[span]))
        span, rank = span[some], rank[some]
        found = lent.where(span)._replace(first=first[some], end=end[some])
        return found._replace(receiver=rank) if kind == "out" else found._replace(sender=rank)

    def _lent(self, kind: str, executors: range) -> Spans:
        """The same of each part of heads, wherever it lies: as if all of it travelled, and those that compute were both sides."""
        parts = self.all_parts
        here = np.flatnonzero((executors.start <= parts.executor) & (parts.executor < executors.stop))
        of, place, places, executor, low, high = parts.where(here)
        at = self.all_segments
        # An offset whose queries lie behind the others' asks for nothing.
        branch, token, size, residues = at.branch[of], at.token[of], at.size[of], high - low
        if kind == "out":
            token = at.out_token[of]
        elif kind == "q":
            high = np.minimum(high, size)
        else:
            low, high = np.zeros_like(low), np.minimum(high, size) if self.is_causal else size
        rate = self.rates[branch]
        return Spans(
            branch=branch,
            receiver=executor,
            sender=executor,
            first=token + low,
            end=token + high,
            origin=token,
            residue=np.zeros_like(low),
            residues=np.minimum(residues, rate),
            place=place,
            places=places,
            period=rate,
        )

    @property
    def num_spans(self) -> int:
        """Parts of heads in shards, for keys and values; about as many spans are made to count what travels for "heads"."""
        lent = self._lent("kv", range(self.num_ranks))
        return int((self.rank_of(lent.end - 1) - self.rank_of(lent.first) + 1).sum())

    def estimated(self) -> dict[str, Traffic]:
        """About what travels for "heads", by kind, from spans that no border cuts."""
        everyone, (start, heads, _) = range(self.num_ranks), self.all_kept
        found: dict[str, Traffic] = {}
        for kind in KINDS:
            if kind == "out" and not self.moves:
                found[kind] = found["q"].reversed().ascending()
                continue
            by_rows = ~self.dealt if self._travels_by_rows(kind) else self.dealt[:0]
            rows = self._row_spans(kind, np.flatnonzero(by_rows), everyone, everyone)
            table = by_owner(rows, self._lent(kind, everyone), self.limits, rates=self.rates, heads=heads, start=start)
            executor, owner = np.nonzero(table)
            traffic = Traffic(executor, owner, table[executor, owner])
            found[kind] = traffic.reversed().ascending() if kind == "out" else traffic
        return found

    def traffic(self, exchange: str, kind: str, *, exact: bool = True) -> Traffic:
        """(row, key/value head) counts per pair of ranks, the union over branches.

        If they need not be exact, they are about so many where too many rows would have to be looked at one by one.
        """
        found = self._counted(exchange)
        return (found if found.is_exact or not exact else _traffic(self, self.counted_as(exchange), math.inf)).by_kind[kind]

    def rows_received(self, exchange: str, kind: str, rank: int) -> int:
        """What one rank receives of all, exactly."""
        found = self._counted(exchange)
        if found.is_exact:
            return int(found.by_kind[kind].received(self.num_ranks)[rank])
        return _rows_received(self, self.counted_as(exchange), kind, rank)

    def is_counted(self, exchange: str) -> bool:
        """Whether counts that need not be exact are."""
        return self._counted(exchange).is_exact

    def _counted(self, exchange: str) -> Counted:
        return _traffic(self, self.counted_as(exchange), max(ALWAYS, COUNTED * self.num_ranks))

    def counted_as(self, exchange: str) -> str:
        """An exchange that moves the same rows to the same ranks, for what is counted once."""
        return "heads" if exchange == "heads" and self.dealt.any() else "gather"

    @cached_property
    def is_local(self) -> bool:
        """Whether no rank needs anything of another."""
        everyone = range(self.num_ranks)
        branches = [np.arange(a, b) for a, b in pairwise(self.begin.tolist()) if a < b]  # the first most often tells
        return not any(
            has_rows(self._row_spans(kind, branch, receivers, everyone), self.kept)
            for kind in (("kv", "q") if self.pattern.zero_padding else ("kv",))
            for receivers in self.some_ranks()
            for branch in branches
        )


@recent(size=lambda plan, *integers: plan.nbytes)
def context_plan(
    pattern: DilatedPattern,
    shard_lengths: tuple[int, ...],
    num_heads: int,
    within: range,
    group: int,
    documents: tuple[tuple[int, int], ...],
    is_causal: bool,
) -> ContextPlan:
    """The plan of these integers; built once.

    Raises:
        ValueError: If the pattern has more groups of heads than the model has heads, or its numbers do not fit 64 bits.
    """
    pattern.check_heads(num_heads)
    branches, widest = len(pattern.branches), max(pattern.dilation_rates)
    # Branches are told apart by numbers that have places for residues, or for tokens of documents.
    if branches * max(2 * widest, len(documents) * (sum(shard_lengths) + 1)) >= 1 << 62:
        raise ValueError(
            f"pattern must be such that branches times twice the largest rate, and times documents and tokens, are below 2**62, "
            f"got {branches} branches, a rate of {widest}, {len(documents)} documents and {sum(shard_lengths)} tokens"
        )
    return ContextPlan(pattern, shard_lengths, num_heads, within, group, documents, is_causal)


class Counted(NamedTuple):
    """Rows that travel, by kind, and whether they are exact."""

    by_kind: dict[str, Traffic]
    is_exact: bool


@recent(size=lambda found, plan, *exchange: plan.nbytes)
def _traffic(plan: ContextPlan, exchange: str, most: float) -> Counted:
    """What is known of one kind holds for spans of another that lie alike."""
    if exchange == "heads" and most < math.inf and plan.num_spans > MOST:
        return Counted(plan.estimated(), is_exact=False)
    counter = Counter(plan.kept, plan.num_ranks, most)
    found: dict[str, Traffic] = {}
    for kind in KINDS:
        if kind == "out" and not plan.moves and counter.would_repeat:  # outputs go back as their queries came
            found[kind] = found["q"].reversed().ascending()
            continue
        parts = [counter.count(plan.received(exchange, kind, receivers)) for receivers in plan.some_ranks()]
        found[kind] = Traffic(*(np.concatenate(columns) for columns in zip(*parts)))
    return Counted(found, counter.is_exact)


@recent(size=lambda rows, plan, *of: PIECE)
def _rows_received(plan: ContextPlan, exchange: str, kind: str, rank: int) -> int:
    spans = plan.received(exchange, kind, range(rank, rank + 1))
    return int(Counter(plan.kept, plan.num_ranks).count(spans).rows.sum())


def _among(first: Integers, last: Integers, ranks: range) -> tuple[Integers, Integers]:
    """Of runs of ranks the part in a range: the first, and how many."""
    low = np.maximum(first, ranks.start)
    return low, np.maximum(0, np.minimum(last, ranks.stop - 1) - low + 1)


def _shown(values: tuple[Any, ...]) -> Any:
    if len(values) <= 64:
        return [list(value) if isinstance(value, tuple) else value for value in values]
    return f"{len(values)} values of sha256 {sha256(repr(values).encode()).hexdigest()}"
