"""Which rows each rank needs of which other, in integers: intervals and strides, never lists, until a rank asks for its own.

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

from flexdilated.distributed.spans import Integers, Kept, Spans, Traffic, count_rows, expanded, has_rows, rows_of
from flexdilated.pattern import DilatedPattern
from flexdilated.pieces import Piece, branch_order, everything_kept, segment_pieces

__all__ = ["EXCHANGES", "IDLE_LIMIT", "KINDS", "ContextPlan", "Needs", "Segments", "Task", "context_plan"]

EXCHANGES = ("gather", "ring", "heads")  # in the order of preference where bytes are equal
IDLE_LIMIT = 4  # moving rows takes longer than computing them: some imbalance is worth it
KINDS = ("kv", "q", "out")  # keys with values, queries, outputs with their lse


class Needs(NamedTuple):
    """Arithmetic progressions of tokens that `receiver` gets from `sender`, one array entry each."""

    receiver: Integers
    sender: Integers
    first: Integers
    stride: Integers
    rows: Integers

    def where(self, chosen: NDArray[np.bool_]) -> Needs:
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


class Task(NamedTuple):
    """Attention of some rows of one cut segment, on one rank: lanes of equal shape, one for each key/value head.

    Rows are the kept slots of `Segments`, numbered from 0; the number `rows` is the query of zeros, where there is one.
    """

    branch: int
    heads: tuple[int, ...]  # of the tensors held here
    tokens: tuple[int, ...]  # of row 0, one per lane, in the whole sequence
    out_tokens: tuple[int, ...]
    stride: int
    rows: int
    zero_row: bool
    zero_keys: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    sources: tuple[tuple[int, int, int], ...]  # (rank, first row, end), ascending, of all rows
    owners: tuple[tuple[int, int, int], ...]  # (rank, first row, end) of the outputs, ascending


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """Dilated attention over a sharded sequence, by what it moves and what each rank computes. Identical on every rank.

    Made by `context_plan`, which gives the same object for the same integers: plans are compared by identity.

    Args:
        pattern: What attends to what.
        shard_lengths: Tokens of each rank, contiguous in the order of ranks; some may be 0.
        num_heads: Key/value heads of the whole model.
        within: The key/value heads that these ranks hold.
        group: Query heads per key/value head.
        documents: `(first token, number of tokens)` of each packed document.
        is_causal: Whether a query sees only keys at its own position and before.
    """

    pattern: DilatedPattern
    shard_lengths: tuple[int, ...]
    num_heads: int
    within: range
    group: int
    documents: tuple[tuple[int, int], ...]
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
    def _borders(self) -> Integers:
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

    # -- segments -----------------------------------------------------------------------------------------------------------

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

    def _stride_of_outputs(self, length: int, rate: int) -> int:
        return length + -length % rate if self.pattern.zero_padding else length

    @cached_property
    def _cut(self) -> tuple[Integers, ...]:
        """Per branch, `(segments, 4)`: document start, document tokens, index and whether it is whole, of every cut segment."""
        return tuple(self._cut_of(branch) for branch in range(len(self.pattern.branches)))

    def _cut_of(self, branch: int) -> Integers:
        length, rate = self.pattern.branches[branch]
        inner = self._borders[1:-1]
        tables = []
        for start, num_tokens in self._crossing:
            w = min(length, num_tokens)
            out = self._stride_of_outputs(w, rate)
            at = np.unique(inner[(inner > start) & (inner < start + num_tokens)]) - start
            # Border by border, the segments that begin before it and end, or write, behind it, but for those of earlier borders.
            end = (at - 1) // w + 1
            first = np.maximum(at // out, np.concatenate([[0], end[:-1]]))
            _, index = expanded(first, np.maximum(end - first, 0))
            whole = ((index + 1) * w <= num_tokens).astype(np.int64)
            tables.append(np.stack([np.full_like(index, start), np.full_like(index, num_tokens), index, whole], axis=1))
        return np.concatenate(tables) if tables else np.empty((0, 4), np.int64)

    def _rank_of(self, tokens: Integers) -> Integers:
        return np.searchsorted(self._borders, tokens, side="right") - 1

    @cached_property
    def segments(self) -> tuple[Segments, ...]:
        """Per branch, its cut segments."""
        return tuple(self._segments_of(branch) for branch in range(len(self.pattern.branches)))

    def _segments_of(self, branch: int) -> Segments:
        length, rate = self.pattern.branches[branch]
        start, num_tokens, index, whole = self._cut[branch].T
        w = np.minimum(length, num_tokens)
        out = w + -w % rate if self.pattern.zero_padding else w
        token, out_token = start + index * w, start + index * out
        size = np.where(whole == 1, w, num_tokens - index * w)
        # As in pieces.py: only a shifted output can show the padding row of a whole segment.
        slots = np.where((out != w) & (num_tokens > w) & (whole == 1), out, size)
        outputs = np.clip(start + num_tokens - out_token, 0, slots)
        sources = self._rank_of(token), self._rank_of(token + size - 1)
        first_owner = self._rank_of(out_token)
        last_owner = np.where(outputs > 0, self._rank_of(out_token + outputs - 1), first_owner - 1)
        padded = out if self.pattern.zero_padding and not self.is_causal else slots
        return Segments(token, out_token, size, slots, outputs, padded, *sources, first_owner, last_owner)

    def _held(self, token: Integers, size: Integers, rank: Integers | int) -> tuple[Integers, Integers]:
        """The slots that a rank holds of those that begin at a token."""
        return np.clip(self._borders[rank] - token, 0, size), np.clip(self._borders[np.add(rank, 1)] - token, 0, size)

    # -- who needs what -----------------------------------------------------------------------------------------------------

    def heads_of(self, branch: int) -> tuple[tuple[int, int], ...]:
        """`(head, offset)` of the heads held here that run a branch."""
        return self._kept[branch].heads

    @cached_property
    def _kept(self) -> tuple[Kept, ...]:
        runs = [self.pattern.head_runs(branch, self.num_heads, self.within) for branch in range(len(self.pattern.branches))]
        heads = [tuple(sorted((run.start + j * run.step, run.offset) for run in each for j in range(run.heads))) for each in runs]
        return tuple(Kept(rate, each) for rate, each in zip(self.pattern.dilation_rates, heads))

    def _offsets(self, branch: int) -> dict[int, list[int]]:
        """The heads of each offset."""
        found: dict[int, list[int]] = {}
        for head, offset in self.heads_of(branch):
            found.setdefault(offset, []).append(head)
        return found

    @cached_property
    def classes(self) -> dict[tuple[int | None, ...], tuple[int, ...]]:
        """Heads that keep the same rows in every branch."""
        offsets = [dict(self.heads_of(branch)) for branch in range(len(self.pattern.branches))]
        found: dict[tuple[int | None, ...], list[int]] = {}
        for head in range(len(self.within)):
            found.setdefault(tuple(each.get(head) for each in offsets), []).append(head)
        return {offsets: tuple(heads) for offsets, heads in found.items()}

    def needs(self, exchange: str, kind: str, head: int, spans: Spans | None = None) -> Needs:
        """What travels for one head: the progressions of all branches, which may overlap; of all spans, or of these alone."""
        spans = self.spans(exchange, kind) if spans is None else spans
        found = []
        for branch, (rate, heads) in enumerate(self._kept):
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
        spans = Spans.joined(list(self._spans(exchange, kind, rank, sent)))
        if rank is not None:
            spans = spans.where((spans.sender if sent else spans.receiver) == rank)
        return spans

    def _spans(self, exchange: str, kind: str, rank: int | None = None, sent: bool = False) -> Iterator[Spans]:
        for branch in range(len(self.pattern.branches)):
            if not self.heads_of(branch) or not len(self._cut[branch]):
                continue
            whole = self._by_heads[branch] if exchange == "heads" else np.zeros(len(self._cut[branch]), bool)
            if kind != "out":
                near = self._near(branch, rank, sources=sent)
                yield self._row_spans(branch, kind, np.flatnonzero(near & ~whole))
            if whole.any():
                yield self._head_spans(branch, kind, np.flatnonzero(whole))

    def _near(self, branch: int, rank: int | None, *, sources: bool) -> NDArray[np.bool_]:
        """The segments of which a rank may hold tokens, or outputs."""
        at = self.segments[branch]
        if rank is None:
            return np.ones(len(at.token), bool)
        first, last = (at.first_source, at.last_source) if sources else (at.first_owner, at.last_owner)
        return (first <= rank) & (rank <= last)

    def _row_spans(self, branch: int, kind: str, chosen: Integers) -> Spans:
        """Rows that the ranks of a segment need for their own outputs."""
        rate, heads = self._kept[branch]
        at = self.segments[branch]
        sources, owners = at.last_source - at.first_source + 1, at.last_owner - at.first_owner + 1
        away = (sources > 1) | (owners > 1) | (at.first_source != at.first_owner)
        chosen = chosen[away[chosen]]
        which, number = expanded(np.zeros_like(chosen), (sources * owners)[chosen])
        at = Segments(*(x[chosen[which]] for x in at))
        steps = sources[chosen[which]]
        receiver, sender = at.first_owner + number // steps, at.first_source + number % steps
        low, high = self._held(at.out_token, at.outputs, receiver)  # the slots of the outputs there
        first, end = self._held(at.token, at.size, sender)
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
    def _by_heads(self) -> tuple[NDArray[np.bool_], ...]:
        """Per branch, the cut segments where whole heads travel less than rows."""
        return tuple(self._heads_pay(branch) for branch in range(len(self.pattern.branches)))

    def _heads_pay(self, branch: int) -> NDArray[np.bool_]:
        at, num_heads = self.segments[branch], len(self.heads_of(branch))
        pay = np.zeros(len(at.token), bool)
        chosen = np.flatnonzero(at.first_source < at.last_source)  # else no rank lacks any of its tokens
        if self.is_local or not len(chosen):  # a cut segment may keep no rows on one side of the border
            return pay
        first, size = at.token[chosen], at.size[chosen]
        which, rank = expanded(at.first_source[chosen], (at.last_source - at.first_source + 1)[chosen])
        low, high = self._held(first[which], size[which], rank)
        # What the ranks with queries need: the tokens of others, or of those before.
        missing = np.where(low < high, low if self.is_causal else size[which] - (high - low), 0)
        by_rows = np.zeros(len(chosen), np.int64)
        np.add.at(by_rows, which, 2 * missing * num_heads)
        executor = self._executors(branch, chosen)
        low, high = self._held(first[:, None], size[:, None], executor)
        by_heads = ((2 + 2 * self.group) * (size[:, None] - (high - low))).sum(axis=1)
        pay[chosen] = by_heads < by_rows
        return pay

    def _executors(self, branch: int, chosen: Integers) -> Integers:
        """`(segments, heads of the branch)` ranks that would compute whole heads: dealt in proportion to the tokens they hold."""
        at, num_heads = self.segments[branch], len(self.heads_of(branch))
        middle = (2 * np.arange(num_heads) + 1) * at.size[chosen, None] // max(1, 2 * num_heads)
        return self._rank_of(at.token[chosen, None] + middle)

    def executors(self, branch: int, head: int) -> Integers:
        """The rank that computes a head of each cut segment under the exchange of whole heads; -1 where rows travel."""
        place = [each for each, _ in self.heads_of(branch)].index(head)
        takers, chosen = np.full(len(self._cut[branch]), -1), np.flatnonzero(self._by_heads[branch])
        takers[chosen] = self._executors(branch, chosen)[:, place]
        return takers

    def _head_spans(self, branch: int, kind: str, chosen: Integers) -> Spans:
        """Rows of heads to the rank that computes them, or their outputs back."""
        rate = self._kept[branch].rate
        executors = self._executors(branch, chosen)
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
            token, (low, high) = at.out_token, self._held(at.out_token, at.outputs, rank)
            receiver, sender = rank, executor
        else:
            token, (low, high) = at.token, self._held(at.token, at.size if kind == "kv" and not self.is_causal else asked, rank)
            receiver, sender = executor, rank
        residue, residues = np.zeros_like(low), np.minimum(at.outputs, rate)  # an offset without outputs asks for nothing
        spans = Spans(
            np.full_like(low, branch), receiver, sender, token + low, token + high, token, residue, residues, place, places
        )
        return spans.where((low < high) & (receiver != sender))

    # -- counts -------------------------------------------------------------------------------------------------------------

    def traffic(self, exchange: str, kind: str) -> Traffic:
        """Exact (row, key/value head) counts per pair of ranks, the union over branches."""
        return _traffic(self, _rows_of(self, exchange), kind)

    @cached_property
    def is_local(self) -> bool:
        """Whether no rank needs anything of another."""
        return not any(has_rows(spans, self._kept) for kind in ("kv", "q") for spans in self._spans("gather", kind))

    def bytes_received(
        self, exchange: str, *, head_dim: int, itemsize: int, batch: int = 1, masked: bool = False, lse_size: int = 4
    ) -> tuple[Integers, Integers]:
        """`(num_ranks,)` bytes that each rank receives in a forward, and in its backward.

        Args:
            exchange: One of `EXCHANGES`.
            head_dim: Elements per head.
            itemsize: Bytes per element of q, k and v.
            batch: Sequences.
            masked: Whether there is a key padding mask.
            lse_size: Bytes of one lse.
        """
        size = _Sizes(head_dim, itemsize, self.group, batch, masked, lse_size)
        kv, q, out = (self.traffic(exchange, kind) for kind in KINDS)
        p = self.num_ranks
        forward = kv.received(p) * size.kv + q.received(p) * size.q + out.received(p) * size.out
        returned = _reversed(kv).received(p) * size.dkv + _reversed(q).received(p) * size.q
        backward = returned + _reversed(out).received(p) * size.dout
        if exchange == "ring":  # nothing is kept: rows travel again
            backward += kv.received(p) * size.kv + q.received(p) * size.q
        if self.pattern.detach_weights and exchange == "ring":  # once more: a branch's own softmax comes before its gradient
            backward += kv.received(p) * size.kv
        return forward, backward

    def buffer_bytes(
        self, exchange: str, *, head_dim: int, itemsize: int, batch: int = 1, masked: bool = False, lse_size: int = 4
    ) -> Integers:
        """`(num_ranks,)` bytes of the messages that each rank holds at once in a forward: what it packs and what it receives."""
        size = _Sizes(head_dim, itemsize, self.group, batch, masked, lse_size)
        p = self.num_ranks
        kv, q, out = (self.traffic(exchange, kind) for kind in KINDS)
        queries = (q.received(p) + _reversed(q).received(p)) * size.q
        if exchange == "ring":  # one message is read, one comes, one leaves
            return (2 * kv.largest(p) + _reversed(kv).largest(p)) * size.kv + queries
        keys = (kv.received(p) + _reversed(kv).received(p)) * size.kv
        return keys + queries + (out.received(p) + _reversed(out).received(p)) * size.out

    def default_budget(self, *, head_dim: int, itemsize: int, batch: int = 1) -> int:
        """Twice the bytes of q, k, v and out of the largest shard."""
        heads = len(self.within) * (2 + 2 * self.group)
        return 2 * max(self.shard_lengths) * heads * head_dim * itemsize * batch

    def choose(self, *, budget: int, **sizes: Any) -> str:
        """The exchange of the least bytes at the busiest rank, forward and backward, whose buffers fit `budget` bytes.

        Where none fits, the one of the smallest buffers. Whole heads are left out where too few heads would leave ranks idle: where
        they give the busiest rank more than `IDLE_LIMIT` times the pairs.
        """
        idle = int(self.pairs("heads").max()) > IDLE_LIMIT * int(self.pairs("gather").max())
        names = [name for name in EXCHANGES if name != "heads" or not idle]
        buffers = {name: int(self.buffer_bytes(name, **sizes).max()) for name in names}
        fitting = [name for name in names if buffers[name] <= budget]
        if not fitting:
            return min(names, key=lambda name: buffers[name])
        moved = {name: self.bytes_received(name, **sizes) for name in fitting}
        return min(fitting, key=lambda name: int((moved[name][0] + moved[name][1]).max()))

    def pairs(self, exchange: str) -> Integers:
        """`(num_ranks,)` (query, key) pairs that each rank scores, over the key/value heads held."""
        return _pairs_scored(self, _rows_of(self, exchange))

    def _count_pairs(self, exchange: str) -> Integers:
        work = np.zeros(self.num_ranks, np.int64)
        for branch, (rate, heads) in enumerate(self._kept):
            ranks, sizes = self._local_sizes(branch)
            at = self.segments[branch]
            whole = self._by_heads[branch] if exchange == "heads" else np.zeros(len(at.token), bool)
            chosen, there = np.flatnonzero(~whole), np.flatnonzero(whole)
            which, rank = expanded(at.first_owner[chosen], (at.last_owner - at.first_owner + 1)[chosen])
            which = chosen[which]
            held = self._held(at.out_token[which], at.outputs[which], rank)
            for offset, members in self._offsets(branch).items():
                for repeats, size, outputs in sizes:
                    rows, asked = _kept_below(size, rate, offset), _kept_below(np.minimum(size, outputs), rate, offset)
                    np.add.at(work, ranks, len(members) * repeats * self._scored(rows, np.zeros_like(rows), asked))
                rows = _kept_below(at.size[which], rate, offset)
                low, high = (np.minimum(_kept_below(slot, rate, offset), rows) for slot in held)
                np.add.at(work, rank, len(members) * self._scored(rows, low, high))
            executors = self._executors(branch, there)
            for place, (_, offset) in enumerate(heads):
                rows, asked = (_kept_below(x[there], rate, offset) for x in (at.size, np.minimum(at.outputs, at.size)))
                np.add.at(work, executors[:, place], self._scored(rows, np.zeros_like(rows), asked))
        return work

    def _local_sizes(self, branch: int) -> tuple[Integers, tuple[tuple[Integers, Integers, Integers], ...]]:
        """Ranks with documents of which they hold segments, and of those `(how many, tokens, outputs)`: whole ones with all their
        outputs, the one whose outputs the end of the document cuts, and the last."""
        length, rate = self.pattern.branches[branch]
        start, num_tokens = np.array([document for document in self.documents if document[1]], np.int64).reshape(-1, 2).T
        first, count = self._rank_of(start), self._rank_of(start + num_tokens - 1) - self._rank_of(start) + 1
        which, rank = expanded(first, count)
        start, num_tokens = start[which], num_tokens[which]
        w = np.minimum(length, num_tokens)
        out = w + -w % rate if self.pattern.zero_padding else w
        a, b = _inside(self._borders[rank] - start, self._borders[rank + 1] - start, num_tokens, w, out)
        whole, shown = num_tokens // w, np.where(num_tokens > w, num_tokens // out, 1)
        full = np.clip(np.minimum(b, np.minimum(whole, shown)) - a, 0, None)
        edge = ((a <= shown) & (shown < np.minimum(b, whole))).astype(np.int64)
        last = ((a <= whole) & (whole < b)).astype(np.int64)
        rest = num_tokens - whole * w
        return rank, (
            (full, w, w),
            (edge, w, np.clip(num_tokens - shown * out, 0, None)),
            (last, rest, np.clip(num_tokens - whole * np.where(num_tokens > w, out, w), 0, None)),
        )

    def _scored(self, rows: Integers, low: Integers, high: Integers) -> Integers:
        if self.is_causal:
            return high * (high + 1) // 2 - low * (low + 1) // 2
        return (high - low) * rows

    # -- one rank -----------------------------------------------------------------------------------------------------------

    def local_pieces(self, rank: int) -> tuple[Piece, ...]:
        """What a rank computes of segments that lie inside its shard; tokens count from the shard's first."""
        return _local_pieces(self, rank)

    def tasks(self, exchange: str, rank: int) -> tuple[Task, ...]:
        """What a rank computes of cut segments."""
        return tuple(
            task for branch in branch_order(self.pattern) if len(self._cut[branch]) for task in self._tasks(exchange, rank, branch)
        )

    def _tasks(self, exchange: str, rank: int, branch: int) -> Iterator[Task]:
        whole = self._by_heads[branch] if exchange == "heads" else np.zeros(len(self._cut[branch]), bool)
        found: dict[Task, list[Integers]] = {}
        near = np.flatnonzero(self._near(branch, rank, sources=False) & ~whole)
        for offset, heads in self._offsets(branch).items():
            for task, chosen in self._alike(branch, offset, near, rank):
                found.setdefault(task, []).append(self._lanes(branch, offset, heads, chosen))
        there = np.flatnonzero(whole)
        executors = self._executors(branch, there)
        for place, (head, offset) in enumerate(self.heads_of(branch)):
            for task, chosen in self._alike(branch, offset, there[executors[:, place] == rank], None):
                found.setdefault(task, []).append(self._lanes(branch, offset, [head], chosen))
        for task, lanes in found.items():
            numbers, tokens, out_tokens = (tuple(x) for x in np.concatenate(lanes, axis=1).tolist())
            yield task._replace(heads=numbers, tokens=tokens, out_tokens=out_tokens)

    def _lanes(self, branch: int, offset: int, heads: list[int], chosen: Integers) -> Integers:
        """`(3, lanes)`: head, token and output token of row 0, for some heads of some segments."""
        at = self.segments[branch]
        first = np.stack([np.zeros_like(chosen), at.token[chosen] + offset, at.out_token[chosen] + offset])
        lanes = np.repeat(first, len(heads), axis=1)
        lanes[0] = np.tile(np.array(heads, np.int64), len(chosen))
        return lanes

    def _alike(self, branch: int, offset: int, chosen: Integers, rank: int | None) -> Iterator[tuple[Task, Integers]]:
        """Segments whose tasks at one offset are equal but for the lane, which the task lacks; a rank's own outputs, or all."""
        rate = self._kept[branch].rate
        at = Segments(*(x[chosen] for x in self.segments[branch]))
        rows, kept = _kept_below(at.size, rate, offset), _kept_below(at.slots, rate, offset)
        columns = [rows, kept - rows, _kept_below(at.padded, rate, offset) - kept]
        owners = (at.first_owner, at.last_owner) if rank is None else (np.full_like(chosen, rank),) * 2
        for begin, end in ((at.first_source, at.last_source), owners):
            columns += [begin, end]
        spread = np.maximum(at.last_source - at.first_source, owners[1] - owners[0]) + 1
        for ranks in np.unique(spread):  # how many columns it takes
            few = np.flatnonzero(spread == ranks)
            table = [x[few] for x in columns]
            for token, size, begin in ((at.token, at.size, at.first_source), (at.out_token, at.outputs, owners[0])):
                for i in range(ranks):
                    who = np.minimum(begin[few] + i, self.num_ranks - 1)
                    table += [_kept_below(slot, rate, offset) for slot in self._held(token[few], size[few], who)]
            kinds, which = np.unique(np.stack(table, axis=1), axis=0, return_inverse=True)
            order = np.argsort(which.reshape(-1), kind="stable")
            borders = np.searchsorted(which.reshape(-1)[order], np.arange(len(kinds) + 1)).tolist()
            for kind, low, high in zip(kinds.tolist(), borders, borders[1:]):
                task = self._task(branch, kind, ranks)
                if task is not None:
                    yield task, chosen[few[order[low:high]]]

    def _task(self, branch: int, kind: list[int], ranks: int) -> Task | None:
        """The task without lanes, of a row of the table of `_alike`."""
        rows, zero_row, zero_keys, first_source, last_source, first_owner, last_owner, *bounds = kind

        def parts(first: int, last: int, bounds: list[int]) -> tuple[tuple[int, int, int], ...]:
            found = zip(range(first, last + 1), bounds[::2], bounds[1::2])
            return tuple((rank, low, high) for rank, low, high in found if low < high)

        sources = parts(first_source, last_source, bounds[: 2 * ranks])
        owners = parts(first_owner, last_owner, bounds[2 * ranks :])
        if not owners:
            return None
        queries = (owners[0][1], owners[-1][2])
        return Task(
            branch=branch,
            heads=(),
            tokens=(),
            out_tokens=(),
            stride=self._kept[branch].rate,
            rows=rows,
            zero_row=bool(zero_row),
            zero_keys=zero_keys,
            queries=queries,
            keys=(0, min(queries[1], rows) if self.is_causal else rows),
            sources=sources,
            owners=owners,
        )

    def entries(self, exchange: str, kind: str, rank: int, *, sent: bool) -> tuple[Integers, Integers, Integers]:
        """`(peer, head, token)` of every row that a rank sends, or receives: ascending, each once. Tokens of the whole sequence."""
        parts = [
            (np.full_like(heads, peer), heads, tokens) for peer, heads, tokens in self.messages(exchange, kind, rank, sent=sent)
        ]
        if not parts:
            empty = np.empty(0, np.int64)
            return empty, empty, empty
        peers, heads, tokens = (np.concatenate(x) for x in zip(*parts))
        return peers, heads, tokens

    def messages(self, exchange: str, kind: str, rank: int, *, sent: bool) -> Iterator[tuple[int, Integers, Integers]]:
        """Peer by peer, `(peer, head, token)` of the rows in its message: the same rows, a message at a time."""
        spans = self.spans(exchange, kind, rank, sent=sent)
        needed: dict[Any, Needs] = {}
        for offsets, members in self.classes.items():
            for head in members:
                # Under whole heads the receiver depends on the head, else heads of a class need the same rows.
                key = (offsets, head) if exchange == "heads" else offsets
                if key not in needed:
                    needed[key] = self.needs(exchange, kind, head, spans)
        peers = np.unique(spans.receiver if sent else spans.sender).tolist()
        heads = sorted((head, offsets) for offsets, members in self.classes.items() for head in members)
        for peer in peers:
            lists: dict[Any, Integers] = {}
            for key, needs in needed.items():
                lists[key] = _tokens(needs.where((needs.receiver if sent else needs.sender) == peer))
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


class _Sizes:
    """Bytes of one row of each kind of message."""

    def __init__(self, head_dim: int, itemsize: int, group: int, batch: int, masked: bool, lse_size: int) -> None:
        self.kv = batch * (2 * head_dim + masked) * itemsize
        self.dkv = batch * 2 * head_dim * itemsize
        self.q = batch * group * head_dim * itemsize
        self.out = batch * group * (head_dim * itemsize + lse_size)
        self.dout = batch * group * (2 * head_dim * itemsize + 2 * lse_size)


@lru_cache(maxsize=64)
def _pairs_scored(plan: ContextPlan, exchange: str) -> Integers:
    return plan._count_pairs(exchange)


def _rows_of(plan: ContextPlan, exchange: str) -> str:
    """An exchange that moves the same rows to the same ranks, for what is counted once."""
    return "heads" if exchange == "heads" and any(whole.any() for whole in plan._by_heads) else "gather"


@lru_cache(maxsize=256)
def _traffic(plan: ContextPlan, exchange: str, kind: str) -> Traffic:
    return count_rows(plan.spans(exchange, kind), plan._kept, plan.num_ranks)


@lru_cache(maxsize=64)
def _local_pieces(plan: ContextPlan, rank: int) -> tuple[Piece, ...]:
    begin, end = plan.borders[rank], plan.borders[rank + 1]
    starts = [start for start, _ in plan.documents]
    pieces: list[Piece] = []
    for branch in branch_order(plan.pattern):
        length, rate = plan.pattern.branches[branch]
        found: list[Piece] = []
        for start, num_tokens in plan.documents[max(0, bisect_right(starts, begin) - 1) :]:
            if start >= end:
                break
            if not num_tokens or start + num_tokens <= begin:
                continue
            w = min(length, num_tokens)
            first, stop = _inside(begin - start, end - start, num_tokens, w, plan._stride_of_outputs(w, rate))
            found += segment_pieces(
                plan.pattern,
                branch,
                start - begin,
                num_tokens,
                plan.num_heads,
                plan.is_causal,
                within=plan.within,
                segments=range(int(first), int(stop)),
            )
        # The whole segments of the branch that keeps everything tile the shard where it cuts none.
        tiles = branch == everything_kept(plan.pattern) and not _touches(plan, branch, rank)
        pieces += [piece._replace(tiles=tiles) for piece in found]
    return tuple(pieces)


def _touches(plan: ContextPlan, branch: int, rank: int) -> bool:
    """Whether a rank holds a part of a cut segment."""
    at = plan.segments[branch]
    first, last = np.minimum(at.first_source, at.first_owner), np.maximum(at.last_source, at.last_owner)
    return bool(((first <= rank) & (rank <= last)).any())


def _inside(begin: Any, end: Any, num_tokens: Any, w: Any, out: Any) -> tuple[Any, Any]:
    """The segments of a document that lie between two places in it, with their outputs: the first, and the one behind the last."""
    # Sources begin no later than outputs, and outputs end no earlier, but for the end of the document.
    first, last = np.maximum(0, -(-begin // w)), -(-num_tokens // w)
    stop = np.minimum(np.where(num_tokens <= end, last, np.maximum(0, end // out)), last)
    return first, np.maximum(first, stop)


def _shown(values: tuple[Any, ...]) -> Any:
    if len(values) <= 64:
        return [list(value) if isinstance(value, tuple) else value for value in values]
    return f"{len(values)} values of sha256 {sha256(repr(values).encode()).hexdigest()}"


def _kept_below(length: Integers, rate: int, offset: int) -> Integers:
    """How many positions `offset, offset + rate, ...` lie below `length`."""
    return np.maximum(0, -((offset - length) // rate))


def _reversed(traffic: Traffic) -> Traffic:
    return Traffic(traffic.sender, traffic.receiver, traffic.rows)


def _tokens(needs: Needs) -> Integers:
    """The tokens of some progressions: ascending, each once."""
    run, number = expanded(np.zeros_like(needs.rows), needs.rows)
    tokens = needs.first[run] + number * needs.stride[run]
    return tokens if len(needs.rows) == 1 else np.unique(tokens)
