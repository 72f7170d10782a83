"""Which rows each rank needs of which other, in integers. Long: one geometry of cut segments, for rows and for whole heads.

Intervals and strides, never lists, until a rank asks for its own.

The sequence is cut in contiguous shards. A segment that lies inside one shard, with its outputs, is computed there. What follows
speaks of the *cut* segments alone. The tokens of a segment, and its outputs, are numbered `0, 1, ...` as slots; each rank holds an
interval of these numbers, and a head keeps the slots of its offset modulo the rate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.call import EXCHANGES as ASKED
from flexdilated.distributed.counts import Counter
from flexdilated.distributed.spans import Integers, Kept, Spans, Traffic, expanded, has_rows, rows_of
from flexdilated.pattern import DilatedPattern

EXCHANGES = tuple(name for name in ASKED if name != "auto")  # in the order of preference where bytes are equal
SPANS = 1 << 16  # pairs of ranks whose spans are made at once
KINDS = ("kv", "q", "out")  # keys with values, queries, outputs with their lse


class Needs(NamedTuple):
    """Arithmetic progressions of tokens that `receiver` gets from `sender`, one array entry each."""

    receiver: Integers
    sender: Integers
    first: Integers
    stride: Integers
    rows: Integers

    def where(self, chosen: Integers | slice) -> Needs:
        return Needs(*(x[chosen] for x in self))


class Segments(NamedTuple):
    """The cut segments of one branch: arrays over segments, each document's ascending.

    Slot `j < size` is token `token + j`, and its output that of token `out_token + j`, for `j < outputs`. Slots from `size` on are
    queries of zeros, where `outputs` reaches beyond it. With `padded` slots of keys, those from `slots` on hold zeros.
    """

    token: Integers
    out_token: Integers
    size: Integers
    slots: Integers
    outputs: Integers
    padded: Integers
    first_source: Integers  # ranks that hold tokens
    last_source: Integers
    first_owner: Integers  # ranks that hold outputs; where there are none, the last comes before the first
    last_owner: Integers


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """Dilated attention over a sharded sequence, by what it moves and what each rank computes. Identical on every rank.

    Made by `context_plan`, which gives the same object for the same integers: plans are compared by identity.
    """

    pattern: DilatedPattern
    shard_lengths: tuple[int, ...]  # contiguous in the order of ranks; some may be 0
    num_heads: int  # key/value heads of the whole model
    within: range  # the key/value heads that these ranks hold
    group: int  # query heads per key/value head
    documents: tuple[tuple[int, int], ...]  # (first token, number of tokens) of each packed one
    is_causal: bool

    @property
    def num_ranks(self) -> int:
        return len(self.shard_lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.shard_lengths)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Where shards begin, and the end."""
        return tuple(accumulate(self.shard_lengths, initial=0))

    @cached_property
    def limits(self) -> Integers:
        return np.array(self.borders, np.int64)

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
            "documents": _shown(self.documents),
            "is_causal": self.is_causal,
        }

    @cached_property
    def _crossing(self) -> tuple[tuple[int, int], ...]:
        """The documents that lie in more than one shard."""
        starts = [start for start, _ in self.documents]
        found = {}
        for border in self.borders[1:-1]:
            i = bisect_right(starts, border) - 1
            # Of documents that begin at one token only the last has any.
            if i >= 0 and starts[i] < border < sum(self.documents[i]):
                found[i] = self.documents[i]
        return tuple(found.values())

    def stride_of_outputs(self, length: int, rate: int) -> int:
        return length + -length % rate if self.pattern.zero_padding else length

    @cached_property
    def cut(self) -> tuple[Integers, ...]:
        """Per branch, `(segments, 4)`: document start, document tokens, index and whether it is whole, of every cut segment."""
        return tuple(self._cut_of(branch) for branch in range(len(self.pattern.branches)))

    def _cut_of(self, branch: int) -> Integers:
        length, rate = self.pattern.branches[branch]
        inner = self.limits[1:-1]
        tables = []
        for start, num_tokens in self._crossing:
            w = min(length, num_tokens)
            out = self.stride_of_outputs(w, rate)
            at = np.unique(inner[(inner > start) & (inner < start + num_tokens)]) - start
            # Border by border, the segments that begin before it and end, or write, behind it, but for those of earlier borders.
            end = (at - 1) // w + 1
            first = np.maximum(at // out, np.concatenate([[0], end[:-1]]))
            _, index = expanded(first, np.maximum(end - first, 0))
            whole = ((index + 1) * w <= num_tokens).astype(np.int64)
            tables.append(np.stack([np.full_like(index, start), np.full_like(index, num_tokens), index, whole], axis=1))
        return np.concatenate(tables) if tables else np.empty((0, 4), np.int64)

    def rank_of(self, tokens: Integers) -> Integers:
        return np.searchsorted(self.limits, tokens, side="right") - 1

    @cached_property
    def segments(self) -> tuple[Segments, ...]:
        """Per branch, its cut segments."""
        return tuple(self._segments_of(branch) for branch in range(len(self.pattern.branches)))

    def _segments_of(self, branch: int) -> Segments:
        length, rate = self.pattern.branches[branch]
        start, num_tokens, index, whole = self.cut[branch].T
        w = np.minimum(length, num_tokens)
        out = w + -w % rate if self.pattern.zero_padding else w
        token, out_token = start + index * w, start + index * out
        size = np.where(whole == 1, w, num_tokens - index * w)
        # As in backends/pieces.py: only a shifted output can show the padding row of a whole segment.
        slots = np.where((out != w) & (num_tokens > w) & (whole == 1), out, size)
        outputs = np.clip(start + num_tokens - out_token, 0, slots)
        sources = self.rank_of(token), self.rank_of(token + size - 1)
        first_owner = self.rank_of(out_token)
        last_owner = np.where(outputs > 0, self.rank_of(out_token + outputs - 1), first_owner - 1)
        padded = out if self.pattern.zero_padding and not self.is_causal else slots
        return Segments(token, out_token, size, slots, outputs, padded, *sources, first_owner, last_owner)

    def held(self, token: Integers, size: Integers, rank: Integers | int) -> tuple[Integers, Integers]:
        """The slots that a rank holds of those that begin at a token."""
        return np.clip(self.limits[rank] - token, 0, size), np.clip(self.limits[np.add(rank, 1)] - token, 0, size)

    @cached_property
    def kept(self) -> tuple[Kept, ...]:
        """Per branch, what the heads held here keep."""
        runs = [self.pattern.head_runs(branch, self.num_heads, self.within) for branch in range(len(self.pattern.branches))]
        heads = [tuple(sorted((run.start + j * run.step, run.offset) for run in each for j in range(run.heads))) for each in runs]
        return tuple(Kept(rate, each) for rate, each in zip(self.pattern.dilation_rates, heads))

    def offsets_of(self, branch: int) -> dict[int, list[int]]:
        """The heads of each offset."""
        found: dict[int, list[int]] = {}
        for head, offset in self.kept[branch].heads:
            found.setdefault(offset, []).append(head)
        return found

    @cached_property
    def classes(self) -> dict[tuple[int | None, ...], tuple[int, ...]]:
        """Heads that keep the same rows in every branch."""
        offsets = [dict(self.kept[branch].heads) for branch in range(len(self.pattern.branches))]
        found: dict[tuple[int | None, ...], list[int]] = {}
        for head in range(len(self.within)):
            found.setdefault(tuple(each.get(head) for each in offsets), []).append(head)
        return {offsets: tuple(heads) for offsets, heads in found.items()}

    def needs(self, head: int, spans: Spans) -> Needs:
        """What travels of some spans for one head: the progressions of all branches, which may overlap."""
        found = []
        for branch, (rate, heads) in enumerate(self.kept):
            place = next((i for i, (each, _) in enumerate(heads) if each == head), None)
            if place is None:
                continue
            here = spans.where(spans.branch == branch)
            chosen, first, rows = rows_of(here, rate, heads[place][1], place)
            found.append(Needs(here.receiver[chosen], here.sender[chosen], first, np.full_like(first, rate), rows))
        if not found:
            return Needs(*(np.empty(0, np.int64) for _ in Needs._fields))
        return Needs(*(np.concatenate(parts) for parts in zip(*found)))

    def spans(self, exchange: str, kind: str, rank: int | None = None, *, sent: bool = False) -> Spans:
        """What travels, as spans of tokens: all of it, or what one rank receives or sends."""
        ranks = range(self.num_ranks)
        one = ranks if rank is None else range(rank, rank + 1)
        return Spans.joined(list(self._spans(exchange, kind, *((ranks, one) if sent else (one, ranks)))))

    def some_ranks(self) -> Iterator[range]:
        """All ranks, some at a time: pairs of ranks are the square of their number."""
        several = max(1, SPANS // self.num_ranks)
        for first in range(0, self.num_ranks, several):
            yield range(first, min(first + several, self.num_ranks))

    def received(self, exchange: str, kind: str, receivers: range) -> Spans:
        """What some ranks receive."""
        return Spans.joined(list(self._spans(exchange, kind, receivers, range(self.num_ranks))))

    def _spans(self, exchange: str, kind: str, receivers: range, senders: range) -> Iterator[Spans]:
        """Branch by branch, what some ranks receive of some."""
        for branch in range(len(self.pattern.branches)):
            if not self.kept[branch].heads or not len(self.cut[branch]):
                continue
            whole = self.by_heads[branch] if exchange == "heads" else np.zeros(len(self.cut[branch]), bool)
            if kind == "kv" or (kind == "q" and self.pattern.zero_padding):  # else outputs belong to the tokens of their queries
                yield self._row_spans(branch, kind, np.flatnonzero(~whole), receivers, senders)
            if whole.any():
                spans = self._head_spans(branch, kind, np.flatnonzero(whole))
                near = (receivers.start <= spans.receiver) & (spans.receiver < receivers.stop)
                yield spans.where(near & (senders.start <= spans.sender) & (spans.sender < senders.stop))

    def near(self, branch: int, rank: int) -> NDArray[np.bool_]:
        """The segments of which a rank may hold outputs."""
        at = self.segments[branch]
        return (at.first_owner <= rank) & (rank <= at.last_owner)

    def _row_spans(self, branch: int, kind: str, chosen: Integers, receivers: range, senders: range) -> Spans:
        """Rows that the ranks of a segment need for their own outputs."""
        rate, heads = self.kept[branch]
        at = self.segments[branch]
        first_owner, owners = _among(at.first_owner, at.last_owner, receivers)
        first_source, sources = _among(at.first_source, at.last_source, senders)
        # A rank that holds both sides of a segment alone needs nothing.
        away = (at.first_source < at.last_source) | (at.first_owner != at.first_source) | (at.first_owner < at.last_owner)
        chosen = chosen[(away & (owners > 0) & (sources > 0))[chosen]]
        which, number = expanded(np.zeros_like(chosen), (sources * owners)[chosen])
        of = chosen[which]
        at = Segments(*(x[of] for x in at))
        steps = sources[of]
        receiver, sender = first_owner[of] + number // steps, first_source[of] + number % steps
        low, high = self.held(at.out_token, at.outputs, receiver)  # the slots of the outputs there
        first, end = self.held(at.token, at.size, sender)
        if kind == "q":
            first, end = np.maximum(first, low), np.minimum(end, high)
        elif self.is_causal:
            end = np.minimum(end, high)
        # Few outputs are those of some offsets alone; and each slot of queries has but one.
        few = (high - low < rate) & (kind != "q")
        residue, residues = np.where(few, low % rate, 0), np.where(few, high - low, rate)
        everyone = np.zeros_like(low), np.full_like(low, len(heads))
        spans = Spans(
            np.full_like(low, branch), receiver, sender, at.token + first, at.token + end, at.token, residue, residues, *everyone
        )
        return spans.where((receiver != sender) & (low < high) & (first < end))

    @cached_property
    def by_heads(self) -> tuple[NDArray[np.bool_], ...]:
        """Per branch, the cut segments where whole heads travel less than rows."""
        return tuple(self._heads_pay(branch) for branch in range(len(self.pattern.branches)))

    def _heads_pay(self, branch: int) -> NDArray[np.bool_]:
        at, num_heads = self.segments[branch], len(self.kept[branch].heads)
        pay = np.zeros(len(at.token), bool)
        chosen = np.flatnonzero(at.first_source < at.last_source)  # else no rank lacks any of its tokens
        if self.is_local or not len(chosen):  # a cut segment may keep no rows on one side of the border
            return pay
        first, size = at.token[chosen], at.size[chosen]
        which, rank = expanded(at.first_source[chosen], (at.last_source - at.first_source + 1)[chosen])
        low, high = self.held(first[which], size[which], rank)
        # What the ranks with queries need: the tokens of others, or of those before.
        missing = np.where(low < high, low if self.is_causal else size[which] - (high - low), 0)
        by_rows = np.zeros(len(chosen), np.int64)
        np.add.at(by_rows, which, 2 * missing * num_heads)
        executor = self.deal(branch, chosen)
        low, high = self.held(first[:, None], size[:, None], executor)
        by_heads = ((2 + 2 * self.group) * (size[:, None] - (high - low))).sum(axis=1)
        pay[chosen] = by_heads < by_rows
        return pay

    def deal(self, branch: int, chosen: Integers) -> Integers:
        """`(segments, heads of the branch)` ranks that would compute whole heads: dealt in proportion to the tokens they hold."""
        at, num_heads = self.segments[branch], len(self.kept[branch].heads)
        middle = (2 * np.arange(num_heads) + 1) * at.size[chosen, None] // max(1, 2 * num_heads)
        return self.rank_of(at.token[chosen, None] + middle)

    def _head_spans(self, branch: int, kind: str, chosen: Integers) -> Spans:
        """Rows of heads to the rank that computes them, or their outputs back."""
        rate = self.kept[branch].rate
        executors = self.deal(branch, chosen)
        # Neighbouring heads have one executor.
        begins = np.diff(executors, axis=1, prepend=-1) != 0
        segment, place = np.nonzero(begins)
        executor = executors[segment, place]
        places = np.diff(np.append(np.flatnonzero(begins), begins.size))
        at = Segments(*(x[chosen][segment] for x in self.segments[branch]))
        first_rank, last_rank = (at.first_owner, at.last_owner) if kind == "out" else (at.first_source, at.last_source)
        which, rank = expanded(first_rank, np.where(at.outputs > 0, last_rank - first_rank + 1, 0))
        at, executor, place, places = Segments(*(x[which] for x in at)), executor[which], place[which], places[which]
        asked = np.minimum(at.outputs, at.size)
        if kind == "out":
            token, (low, high) = at.out_token, self.held(at.out_token, at.outputs, rank)
            receiver, sender = rank, executor
        else:
            token, (low, high) = at.token, self.held(at.token, at.size if kind == "kv" and not self.is_causal else asked, rank)
            receiver, sender = executor, rank
        residue, residues = np.zeros_like(low), np.minimum(at.outputs, rate)  # an offset without outputs asks for nothing
        spans = Spans(
            np.full_like(low, branch), receiver, sender, token + low, token + high, token, residue, residues, place, places
        )
        return spans.where((low < high) & (receiver != sender))

    def traffic(self, exchange: str, kind: str) -> Traffic:
        """Exact (row, key/value head) counts per pair of ranks, the union over branches."""
        return _traffic(self, self.counted_as(exchange))[kind]

    def counted_as(self, exchange: str) -> str:
        """An exchange that moves the same rows to the same ranks, for what is counted once."""
        return "heads" if exchange == "heads" and any(whole.any() for whole in self.by_heads) else "gather"

    @cached_property
    def is_local(self) -> bool:
        """Whether no rank needs anything of another."""
        everyone = range(self.num_ranks)
        return not any(
            has_rows(spans, self.kept)
            for kind in ("kv", "q")
            for receivers in self.some_ranks()
            for spans in self._spans("gather", kind, receivers, everyone)
        )

    def messages(self, exchange: str, kind: str, rank: int, *, sent: bool) -> Iterator[tuple[int, Integers, Integers]]:
        """Peer by peer, `(peer, head, token)` of rows that travel, ascending; tokens of the whole sequence."""
        spans = self.spans(exchange, kind, rank, sent=sent)
        needed: dict[Any, Needs] = {}
        for offsets, members in self.classes.items():
            for head in members:
                # Under whole heads the receiver depends on the head, else heads of a class need the same rows.
                key = (offsets, head) if exchange == "heads" else offsets
                if key not in needed:
                    needed[key] = self.needs(head, spans)
        peers = np.unique(spans.receiver if sent else spans.sender)
        heads = sorted((head, offsets) for offsets, members in self.classes.items() for head in members)
        # Sorted by peer once: to look for each among all would take the square of their number.
        parts = {}
        for key, needs in needed.items():
            of = needs.receiver if sent else needs.sender
            order = np.argsort(of, kind="stable")
            parts[key] = needs.where(order), np.searchsorted(of[order], [peers, peers + 1])
        for place, peer in enumerate(peers.tolist()):
            lists: dict[Any, Integers] = {}
            for key, (needs, (first, end)) in parts.items():
                lists[key] = _tokens(needs.where(slice(first[place], end[place])))
            rows = [(head, lists[(offsets, head) if exchange == "heads" else offsets]) for head, offsets in heads]
            if not any(len(tokens) for _, tokens in rows):
                continue
            yield peer, np.repeat([head for head, _ in rows], [len(x) for _, x in rows]), np.concatenate([x for _, x in rows])


@lru_cache(maxsize=64)
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
        ValueError: If the pattern has more groups of heads than the model has heads.
    """
    pattern.check_heads(num_heads)
    return ContextPlan(pattern, shard_lengths, num_heads, within, group, documents, is_causal)


@lru_cache(maxsize=128)
def _traffic(plan: ContextPlan, exchange: str) -> dict[str, Traffic]:
    """By kind; what is known of one kind holds for spans of another that lie alike."""
    counter = Counter(plan.kept, plan.num_ranks)
    found = {}
    for kind in KINDS:
        parts = [counter.count(plan.received(exchange, kind, receivers)) for receivers in plan.some_ranks()]
        found[kind] = Traffic(*(np.concatenate(columns) for columns in zip(*parts)))
    return found


def _among(first: Integers, last: Integers, ranks: range) -> tuple[Integers, Integers]:
    """Of runs of ranks the part in a range: the first, and how many."""
    low = np.maximum(first, ranks.start)
    return low, np.maximum(0, np.minimum(last, ranks.stop - 1) - low + 1)


def inside(begin: Any, end: Any, num_tokens: Any, w: Any, out: Any) -> tuple[Any, Any]:
    """The segments of a document that lie between two places in it, with their outputs: the first, and the one behind the last."""
    # Sources begin no later than outputs, and outputs end no earlier, but for the end of the document.
    first, last = np.maximum(0, -(-begin // w)), -(-num_tokens // w)
    stop = np.minimum(np.where(num_tokens <= end, last, np.maximum(0, end // out)), last)
    return first, np.maximum(first, stop)


def _shown(values: tuple[Any, ...]) -> Any:
    if len(values) <= 64:
        return [list(value) if isinstance(value, tuple) else value for value in values]
    return f"{len(values)} values of sha256 {sha256(repr(values).encode()).hexdigest()}"


def _tokens(needs: Needs) -> Integers:
    """The tokens of some progressions: ascending, each once."""
    if len(needs.rows) == 1:
        return needs.first[0] + needs.stride[0] * np.arange(needs.rows[0])
    run, number = expanded(np.zeros_like(needs.rows), needs.rows)
    return np.unique(needs.first[run] + number * needs.stride[run])
