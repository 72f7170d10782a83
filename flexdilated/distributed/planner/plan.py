"""The rows that each rank needs from each other rank, as intervals and strides of integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from flexdilated.core.bounded_cache import recent
from flexdilated.core.call import EXCHANGES as ASKED
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.pieces import kept_rows, refuse_shifts
from flexdilated.distributed.planner.load_balance import HeadParts, assign_heads, heads_exchange_pays_off, own_parts
from flexdilated.distributed.planner.segments import Booleans, CutSegments, Integers, expand_ranges

EXCHANGES = tuple(name for name in ASKED if name != "auto")  # in the order of preference where times are equal
SPANS = 1 << 18  # at most about so many spans are made together
KINDS = ("kv", "q")  # keys with values, queries; outputs with their lse go back as their queries came


class Spans(NamedTuple):
    """Intervals of tokens that one rank sends to another. Every field is a `(spans,)` array, ordered by branch, then by token.

    For span `i`, rank `sender` sends the tokens `first ... end` of a segment or of near pairs to rank `receiver`, for the heads
    `place ... place + places` of the branch. Of these tokens a head with offset `o` needs every r-th one, those with
    `(token - origin) % r == o`, if `(o - residue) % r < residues`, and no token otherwise.
    """

    branch: Integers  # index into `pattern.branches`
    receiver: Integers  # rank
    sender: Integers  # rank
    first: Integers  # token of the whole sequence
    end: Integers  # token of the whole sequence, exclusive
    origin: Integers  # first token of the segment; arbitrary for near pairs
    residue: Integers  # first offset that takes part
    residues: Integers  # number of offsets that take part, modulo the rate
    place: Integers  # index of the first head, among the branch's heads of these ranks
    places: Integers  # number of heads

    def where(self, index: Booleans | Integers | slice) -> Spans:
        return Spans(*(x[index] for x in self))


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
            "num_kv_heads": self.num_kv_heads,
            "kv_heads_held": [self.within.start, self.within.stop],
            "query_heads_per_kv_head": self.group,
            "documents": "none" if self.documents == ((0, self.num_tokens),) else _shown(self.documents),
            "is_causal": self.is_causal,
        }

    @cached_property
    def keeps_outputs(self) -> bool:
        """Whether a forward keeps the outputs of branches, which a backward with `detach_weights` reads."""
        return len(self.documents) == 1 and kept_rows(self.pattern, 1) > 0

    @cached_property
    def classes(self) -> dict[tuple[int | None, ...], tuple[int, ...]]:
        """Heads with equal offsets in every branch, by these offsets (None: the branch has no such head)."""
        offsets = [dict(self.branch_heads[branch].heads) for branch in range(len(self.pattern.branches))]
        by_offsets: dict[tuple[int | None, ...], list[int]] = {}
        for head in range(len(self.within)):
            by_offsets.setdefault(tuple(branch_offsets.get(head) for branch_offsets in offsets), []).append(head)
        return {offsets: tuple(heads) for offsets, heads in by_offsets.items()}

    def some_ranks(self) -> Iterator[range]:
        """All ranks in consecutive ranges, so that the spans that a range receives fit in memory."""
        ranks_per_range = max(1, SPANS // (self.num_ranks * len(self.pattern.branches)))
        for first in range(0, self.num_ranks, ranks_per_range):
            yield range(first, min(first + ranks_per_range, self.num_ranks))

    def spans(self, exchange: str, kind: str, *, receivers: range | None = None, senders: range | None = None) -> Spans:
        """The spans of tokens of one of `KINDS` that `receivers` receive from `senders`, by default all ranks."""
        everyone = range(self.num_ranks)
        receivers, senders = (everyone if ranks is None else ranks for ranks in (receivers, senders))
        parts = self.parts(exchange)
        parts = parts.where((receivers.start <= parts.executor) & (parts.executor < receivers.stop))
        segments, rate = self.all_segments.where(parts.segment), self.rates[self.all_segments.branch[parts.segment]]
        span_parts = []
        for far in self.far_parts(parts.segment, parts.low, parts.high):
            low, high = (far.key, far.key_end) if kind == "kv" else (far.query, far.query_end)
            spans = Spans(
                branch=segments.branch,
                receiver=parts.executor,
                sender=parts.executor,
                first=segments.token + low,
                end=segments.token + high,
                origin=segments.token,
                # With fewer queries than the rate, only their own offsets need keys.
                residue=far.query % rate,
                residues=np.minimum(far.query_end - far.query, rate),
                place=parts.place,
                places=parts.places,
            )
            span_parts.append(spans.where((far.query < far.query_end) & (low < high)))
        near = self.near_parts.where((receivers.start <= self.near_parts.rank) & (self.near_parts.rank < receivers.stop))
        first, end = (near.key, near.key_end) if kind == "kv" else (near.query, near.query_end)
        none, heads = np.zeros_like(first), self.num_branch_heads[near.branch]
        span = {"branch": near.branch, "receiver": near.rank, "sender": near.rank, "first": first, "end": end, "origin": first}
        span_parts.append(Spans(**span, residue=none, residues=none + 1, place=none, places=heads))
        requests = Spans(*(np.concatenate(columns) for columns in zip(*span_parts)))
        holder = np.maximum(self.rank_of(requests.first), senders.start)
        last = np.minimum(self.rank_of(requests.end - 1), senders.stop - 1)
        part, rank = expand_ranges(holder, np.maximum(0, last - holder + 1))
        requests = requests.where(part)
        first, end = np.maximum(requests.first, self.limits[rank]), np.minimum(requests.end, self.limits[rank + 1])
        requests = requests._replace(sender=rank, first=first, end=end)
        return requests.where((first < end) & (rank != requests.receiver))

    @cached_property
    def assigned(self) -> Booleans:
        """`(segments,)`: the cut segments of all branches whose heads `"heads"` assigns to ranks.

        In the other segments, and in all of them by the other exchanges, every rank computes its own outputs.
        """
        return heads_exchange_pays_off(self)

    def parts(self, exchange: str) -> HeadParts:
        """Which rank computes which part of the heads of cut segments."""
        return self._parts_by_heads if exchange == "heads" else self._parts_by_rows

    @cached_property
    def _parts_by_rows(self) -> HeadParts:
        return own_parts(self, np.arange(len(self.assigned)))

    @cached_property
    def _parts_by_heads(self) -> HeadParts:
        halves = own_parts(self, np.flatnonzero(~self.assigned)), assign_heads(self, self.assigned)
        parts = HeadParts(*(np.concatenate(columns) for columns in zip(*halves)))
        return parts.where(np.argsort(parts.segment, kind="stable"))

    @cached_property
    def is_local(self) -> bool:
        """Whether all pairs are inside one shard, so that ranks exchange nothing."""
        return not len(self.all_segments.token) and not len(self.near_parts.rank)


@recent(size=lambda plan, *integers, **options: plan.nbytes)
def context_plan(
    pattern: DilatedPattern,
    shard_lengths: tuple[int, ...],
    num_kv_heads: int,
    within: range,
    group: int,
    documents: tuple[tuple[int, int], ...],
    is_causal: bool,
) -> ContextPlan:
    """The plan of these integers, which are the fields of `CutSegments`; equal integers return the same object.

    Raises:
        ValueError: If the pattern has more groups of heads than the model has heads, or its numbers do not fit 64 bits.
        NotImplementedError: If torchscale's positions are shifted.
    """
    refuse_shifts(pattern, documents, "over ranks")
    pattern.check_heads(num_kv_heads)
    branches, widest = len(pattern.branches), max((rate for _, rate in pattern.split("the planner of ranks")[0]), default=1)
    # One number names a branch with a residue, or with a document and a token.
    if branches * max(2 * widest, len(documents) * (sum(shard_lengths) + 1)) >= 1 << 62:
        raise ValueError(
            f"pattern must be such that branches times twice the largest rate, and times documents and tokens, are below 2**62, "
            f"got {branches} branches, a rate of {widest}, {len(documents)} documents and {sum(shard_lengths)} tokens"
        )
    return ContextPlan(pattern, shard_lengths, num_kv_heads, within, group, documents=documents, is_causal=is_causal)


def _shown(values: tuple[Any, ...]) -> Any:
    if len(values) <= 64:
        return [list(value) if isinstance(value, tuple) else value for value in values]
    return f"{len(values)} values of sha256 {sha256(repr(values).encode()).hexdigest()}"
