"""The rows that each rank needs of each other rank, in integers: intervals and strides, never lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np

from flexdilated.core.bounded_cache import recent
from flexdilated.core.call import EXCHANGES as ASKED
from flexdilated.core.pattern import DilatedPattern
from flexdilated.distributed.planner.load_balance import HeadParts, assign_heads, heads_exchange_pays_off
from flexdilated.distributed.planner.segments import CutSegments
from flexdilated.distributed.planner.spans import Booleans, Integers, Spans, expanded, have_rows

EXCHANGES = tuple(name for name in ASKED if name != "auto")  # in the order of preference where times are equal
SPANS = 1 << 18  # at most about so many spans are made together
KINDS = ("kv", "q", "out")  # keys with values, queries, outputs with their lse


@dataclass(frozen=True, eq=False)
class ContextPlan(CutSegments):
    """Dilated attention over a sharded sequence: what it moves, and what each rank computes. Identical on every rank.

    Made by `context_plan`, which returns the same object for the same integers: plans are compared by identity.
    """

    @cached_property
    def description(self) -> dict[str, Any]:
        """What ranks must agree on, in JSON types; more than 64 lengths or documents are replaced by a hash."""
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
        """Heads that keep the same rows in every branch, by their offsets."""
        offsets = [dict(self.kept[branch].heads) for branch in range(len(self.pattern.branches))]
        found: dict[tuple[int | None, ...], list[int]] = {}
        for head in range(len(self.within)):
            found.setdefault(tuple(each.get(head) for each in offsets), []).append(head)
        return {offsets: tuple(heads) for offsets, heads in found.items()}

    def some_ranks(self) -> Iterator[range]:
        """All ranks, some at a time, so that the spans that they receive fit in memory."""
        several = max(1, SPANS // (self.num_ranks * len(self.pattern.branches)))
        for first in range(0, self.num_ranks, several):
            yield range(first, min(first + several, self.num_ranks))

    def spans(self, exchange: str, kind: str, *, receivers: range | None = None, senders: range | None = None) -> Spans:
        """What some ranks receive from some ranks, as spans of tokens.

        Args:
            exchange: One of `EXCHANGES`.
            kind: One of `KINDS`.
            receivers: Default: all ranks.
            senders: Default: all ranks.
        """
        everyone = range(self.num_ranks)
        receivers, senders = (everyone if ranks is None else ranks for ranks in (receivers, senders))
        assigned = self.assigned(exchange)
        found = []
        if self._travels_by_rows(kind):
            found.append(self._row_spans(kind, np.flatnonzero(~assigned), receivers, senders))
        if assigned.any():
            found.append(self._head_spans(kind, receivers, senders))
        found = [spans for spans in found if len(spans.first)]
        spans = Spans.joined(found)
        return spans.where(np.argsort(spans.branch, kind="stable")) if len(found) > 1 else spans

    def _travels_by_rows(self, kind: str) -> bool:
        """Whether ranks may need rows of a kind for their own outputs. Queries travel only if outputs belong to other tokens."""
        return kind == "kv" or (kind == "q" and self.moves)

    def _row_spans(self, kind: str, chosen: Integers, receivers: range, senders: range) -> Spans:
        """Rows of some segments that ranks need for their own outputs."""
        at, chosen = self.all_segments, chosen[(self.num_kept > 0)[self.all_segments.branch[chosen]]]
        first_owner, owners = _overlap(at.first_owner, at.last_owner, receivers)
        first_source, sources = _overlap(at.first_source, at.last_source, senders)
        # A rank that holds all tokens and all outputs of a segment needs nothing.
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
        branch, token = at.branch[of], at.token[of]
        rate = self.rates[branch]
        # Fewer outputs than the rate need the keys of their own offsets alone. A slot of queries has one offset.
        few = (high - low < rate) & (kind != "q")
        return Spans(
            branch=branch,
            receiver=receiver,
            sender=sender,
            first=token + first,
            end=token + end,
            origin=token,
            residue=np.where(few, low % rate, 0),
            residues=np.where(few, high - low, rate),
            place=np.zeros_like(low),
            places=self.num_kept[branch],
        )

    def assigned(self, exchange: str) -> Booleans:
        """`(segments,)`: the cut segments of all branches whose heads are assigned to ranks.

        In the other segments every rank computes its own outputs. Only `"heads"` assigns heads, and only if anything must travel.
        """
        return self._assigned if exchange == "heads" else np.zeros_like(self._assigned)

    @cached_property
    def _assigned(self) -> Booleans:
        return np.zeros(int(self.begin[-1]), bool) if self.is_local else heads_exchange_pays_off(self)

    @cached_property
    def parts(self) -> HeadParts:
        """Which rank computes which part of the heads of assigned segments, over all branches."""
        return assign_heads(self, self._assigned)

    def _head_spans(self, kind: str, receivers: range, senders: range) -> Spans:
        """Rows of heads that go to the ranks that compute them, or their outputs on the way back."""
        executors, owners = (senders, receivers) if kind == "out" else (receivers, senders)
        parts = self._part_spans(kind, executors)
        part, rank = expanded(*_overlap(self.rank_of(parts.first), self.rank_of(parts.end - 1), owners))
        first, end = np.maximum(parts.first[part], self.limits[rank]), np.minimum(parts.end[part], self.limits[rank + 1])
        some = np.flatnonzero((first < end) & (rank != parts.receiver[part]))
        part, rank = part[some], rank[some]
        found = parts.where(part)._replace(first=first[some], end=end[some])
        return found._replace(receiver=rank) if kind == "out" else found._replace(sender=rank)

    def _part_spans(self, kind: str, executors: range) -> Spans:
        """One span per part of heads, not cut at shards; the executor is both receiver and sender."""
        here = (executors.start <= self.parts.executor) & (self.parts.executor < executors.stop)
        of, place, places, executor, low, high = self.parts.where(here)
        at = self.all_segments
        # Offsets beyond the last query of a part ask for nothing.
        branch, token, size, residues = at.branch[of], at.token[of], at.size[of], high - low
        if kind == "out":
            token = at.out_token[of]
        elif kind == "q":
            high = np.minimum(high, size)
        else:
            low, high = np.zeros_like(low), np.minimum(high, size) if self.is_causal else size
        return Spans(
            branch=branch,
            receiver=executor,
            sender=executor,
            first=token + low,
            end=token + high,
            origin=token,
            residue=np.zeros_like(low),
            residues=np.minimum(residues, self.rates[branch]),
            place=place,
            places=places,
        )

    @cached_property
    def is_local(self) -> bool:
        """Whether no rank needs anything of another."""
        everyone = range(self.num_ranks)
        branches = [np.arange(a, b) for a, b in pairwise(self.begin.tolist()) if a < b]
        return not any(
            have_rows(self._row_spans(kind, branch, receivers, everyone), self.kept)
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
    """The plan of these integers; equal integers return the same object.

    Args:
        pattern: The attention pattern.
        shard_lengths: Tokens of each rank.
        num_heads: Key/value heads of the whole model.
        within: The key/value heads that these ranks hold.
        group: Query heads per key/value head.
        documents: `(first token, number of tokens)` of each packed document.
        is_causal: Whether a query sees only keys at its own position and before.

    Raises:
        ValueError: If the pattern has more groups of heads than the model has heads, or its numbers do not fit 64 bits.
    """
    pattern.check_heads(num_heads)
    branches, widest = len(pattern.branches), max(pattern.dilation_rates)
    # One number names a branch with a residue, or with a document and a token.
    if branches * max(2 * widest, len(documents) * (sum(shard_lengths) + 1)) >= 1 << 62:
        raise ValueError(
            f"pattern must be such that branches times twice the largest rate, and times documents and tokens, are below 2**62, "
            f"got {branches} branches, a rate of {widest}, {len(documents)} documents and {sum(shard_lengths)} tokens"
        )
    return ContextPlan(pattern, shard_lengths, num_heads, within, group, documents, is_causal)


def _overlap(first: Integers, last: Integers, ranks: range) -> tuple[Integers, Integers]:
    """The part of runs of ranks `first ... last` that lies in a range: the first rank, and the number of ranks."""
    low = np.maximum(first, ranks.start)
    return low, np.maximum(0, np.minimum(last, ranks.stop - 1) - low + 1)


def _shown(values: tuple[Any, ...]) -> Any:
    if len(values) <= 64:
        return [list(value) if isinstance(value, tuple) else value for value in values]
    return f"{len(values)} values of sha256 {sha256(repr(values).encode()).hexdigest()}"
