"""Which rows each rank needs of which other, in integers: intervals and strides, never lists, until a rank asks for its own.

The sequence is cut in contiguous shards. A segment that lies inside one shard is computed there. What follows speaks of the *cut*
segments alone: of a branch at most one at each border between shards. Their kept rows, at one offset, are numbered `0, 1, ...`;
each rank holds an interval of these numbers, so every question about two ranks is about two intervals and a stride.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import accumulate, combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.pattern import DilatedPattern
from flexdilated.pieces import Piece, branch_order, everything_kept, segment_pieces

__all__ = ["EXCHANGES", "IDLE_LIMIT", "KINDS", "ContextPlan", "Needs", "Strips", "Task", "Traffic", "context_plan"]

Integers = NDArray[np.int64]

EXCHANGES = ("gather", "ring", "heads")  # in the order of preference where bytes are equal
IDLE_LIMIT = 4  # moving rows takes longer than computing them: some imbalance is worth it
LARGEST_STEP = 1 << 62  # no two tokens are that far apart
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


class Traffic(NamedTuple):
    """Rows that travel, per pair of ranks that exchange any: arrays of equal length, in ascending order of the pair."""

    receiver: Integers
    sender: Integers
    rows: Integers

    def received(self, num_ranks: int) -> Integers:
        """`(num_ranks,)` rows that each rank gets."""
        return np.bincount(self.receiver, self.rows, num_ranks).astype(np.int64)

    def largest(self, num_ranks: int) -> Integers:
        """`(num_ranks,)` rows of the largest message that each rank gets."""
        most = np.zeros(num_ranks, np.int64)
        np.maximum.at(most, self.receiver, self.rows)
        return most


class Strips(NamedTuple):
    """The cut segments of one branch at one offset: arrays over segments.

    Row `l` is token `token + l * stride`, for `l < rows`; its output belongs to token `out_token + l * stride`, for `l < outputs`.
    With `zero_row`, output row `rows` is that of a query of zeros.
    """

    token: Integers
    out_token: Integers
    stride: int
    rows: Integers
    outputs: Integers
    zero_row: NDArray[np.bool_]
    zero_keys: Integers
    first_rank: Integers
    last_rank: Integers


class Task(NamedTuple):
    """Attention of some rows of one cut segment, on one rank: lanes of equal shape, one for each key/value head.

    Rows are numbered as in `Strips`; the number `rows` is the query of zeros, where there is one.
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
            # Border by border, the segments that begin before it and end, or write, behind it.
            first, count = at // out, np.maximum((at - 1) // w - at // out + 1, 0)
            index = np.unique(np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum()))
            whole = ((index + 1) * w <= num_tokens).astype(np.int64)
            tables.append(np.stack([np.full_like(index, start), np.full_like(index, num_tokens), index, whole], axis=1))
        return np.concatenate(tables) if tables else np.empty((0, 4), np.int64)

    def _rank_of(self, tokens: Integers) -> Integers:
        return np.searchsorted(self._borders, tokens, side="right") - 1

    @lru_cache(maxsize=128)  # noqa: B019  (plans are few and kept anyway)
    def strips(self, branch: int, offset: int) -> Strips:
        """The cut segments of a branch at one offset."""
        length, rate = self.pattern.branches[branch]
        start, num_tokens, index, whole = self._cut[branch].T
        w = np.minimum(length, num_tokens)
        out = w + -w % rate if self.pattern.zero_padding else w
        token, out_token = start + index * w + offset, start + index * out + offset
        size = np.where(whole == 1, w, num_tokens - index * w)
        rows, padded = _kept(size, rate, offset), _kept(out, rate, offset)
        shifted = (out != w) & (num_tokens > w)
        # As in pieces.py: only a shifted output can show the padding row of a whole segment.
        zero_row = shifted & (whole == 1) & (padded > rows)
        visible = np.where(shifted, _kept(start + num_tokens - (out_token - offset), rate, offset), rows + zero_row)
        outputs = np.minimum(rows + zero_row, visible)
        zero_keys = padded - rows - zero_row if self.pattern.zero_padding and not self.is_causal else np.zeros_like(rows)
        low, high = _reach(index, start, num_tokens, w, out)
        return Strips(token, out_token, rate, rows, outputs, zero_row, zero_keys, self._rank_of(low), self._rank_of(high - 1))

    def _interval(self, token: Integers, stride: int, rows: Integers, rank: Integers) -> tuple[Integers, Integers]:
        """The row numbers whose tokens a rank holds."""
        low, high = (np.clip(-((token - self._borders[rank + i]) // stride), 0, rows) for i in (0, 1))
        return low, high

    # -- who needs what -----------------------------------------------------------------------------------------------------

    def heads_of(self, branch: int) -> list[tuple[int, int]]:
        """`(head, offset)` of the heads held here that run a branch."""
        runs = self.pattern.head_runs(branch, self.num_heads, self.within)
        return sorted((run.start + j * run.step, run.offset) for run in runs for j in range(run.heads))

    def _offset(self, branch: int, head: int) -> int | None:
        return dict(self.heads_of(branch)).get(head)

    @cached_property
    def classes(self) -> dict[tuple[int | None, ...], tuple[int, ...]]:
        """Heads that keep the same rows in every branch."""
        offsets = [dict(self.heads_of(branch)) for branch in range(len(self.pattern.branches))]
        found: dict[tuple[int | None, ...], list[int]] = {}
        for head in range(len(self.within)):
            found.setdefault(tuple(each.get(head) for each in offsets), []).append(head)
        return {offsets: tuple(heads) for offsets, heads in found.items()}

    def needs(self, exchange: str, kind: str, head: int) -> Needs:
        """What travels for one head: the progressions of all branches, which may overlap."""
        found = []
        for branch in range(len(self.pattern.branches)):
            offset = self._offset(branch, head)
            if offset is None or not len(self._cut[branch]):
                continue
            whole = self._by_heads[branch] if exchange == "heads" else np.zeros(len(self._cut[branch]), bool)
            if kind != "out" and not whole.all():
                found.append(self._row_needs(branch, offset, kind, ~whole))
            if whole.any():
                found.append(self._head_needs(branch, offset, head, kind, whole))
        if not found:
            return Needs(*(np.empty(0, np.int64) for _ in Needs._fields))
        return Needs(*(np.concatenate(parts) for parts in zip(*found)))

    def _row_needs(self, branch: int, offset: int, kind: str, chosen: NDArray[np.bool_]) -> Needs:
        """Rows that the ranks of a segment need for their own outputs."""
        strips = self.strips(branch, offset)
        segment, rank = _incidence(strips, chosen)
        token, rows = strips.token[segment], strips.rows[segment]
        low, high = self._interval(token, strips.stride, rows, rank)
        out_low, out_high = self._interval(strips.out_token[segment], strips.stride, strips.outputs[segment], rank)
        receiver, sender = _pairs(segment)
        asks = (receiver != sender) & (out_low < out_high)[receiver] & (low < high)[sender]
        receiver, sender = receiver[asks], sender[asks]
        asked = out_high[receiver]  # may count a query of zeros, which comes after all rows
        first, end = low[sender], high[sender]
        if kind == "q":
            first, end = np.maximum(first, out_low[receiver]), np.minimum(end, asked)
        elif self.is_causal:
            end = np.minimum(end, asked)
        needs = Needs(
            rank[receiver],
            rank[sender],
            token[sender] + first * strips.stride,
            np.full_like(first, strips.stride),
            end - first,
        )
        return needs.where(needs.rows > 0)

    @cached_property
    def _by_heads(self) -> tuple[NDArray[np.bool_], ...]:
        """Per branch, the cut segments where whole heads travel less than rows."""
        return tuple(self._heads_pay(branch) for branch in range(len(self.pattern.branches)))

    def _heads_pay(self, branch: int) -> NDArray[np.bool_]:
        if self.is_local:  # a cut segment may keep no rows on one side of the border
            return np.zeros(len(self._cut[branch]), bool)
        first, size = self._span(branch)
        strips = self.strips(branch, 0)
        segment, rank = _incidence(strips, np.ones(len(first), bool))
        low = np.clip(self._borders[rank] - first[segment], 0, size[segment])
        high = np.clip(self._borders[rank + 1] - first[segment], 0, size[segment])
        # What the ranks with queries need: the tokens of others, or of those before.
        missing = np.where(low < high, low if self.is_causal else size[segment] - (high - low), 0)
        by_rows = 2 * np.bincount(segment, missing, len(first)) * len(self.heads_of(branch))
        by_heads = np.zeros(len(first))
        for head, _ in self.heads_of(branch):
            executor = self._executor(branch, head)
            held = np.minimum(self._borders[executor + 1], first + size) - np.maximum(self._borders[executor], first)
            by_heads += (2 + 2 * self.group) * (size - held)
        return by_heads < by_rows

    def _span(self, branch: int) -> tuple[Integers, Integers]:
        """First token and length of the cut segments."""
        start, num_tokens, index, _ = self._cut[branch].T
        w = np.minimum(self.pattern.segment_lengths[branch], num_tokens)
        return start + index * w, np.minimum(w, num_tokens - index * w)

    def _executor(self, branch: int, head: int) -> Integers:
        """The rank that would compute a head of each cut segment: heads are dealt in proportion to the tokens that ranks hold."""
        first, size = self._span(branch)
        heads = [h for h, _ in self.heads_of(branch)]
        return self._rank_of(first + (2 * heads.index(head) + 1) * size // (2 * len(heads)))

    def executors(self, branch: int, head: int) -> Integers:
        """The rank that computes a head of each cut segment under the exchange of whole heads; -1 where rows travel."""
        return np.where(self._by_heads[branch], self._executor(branch, head), -1)

    def _head_needs(self, branch: int, offset: int, head: int, kind: str, chosen: NDArray[np.bool_]) -> Needs:
        """Rows of a head to the rank that computes it, or its outputs back."""
        strips = self.strips(branch, offset)
        segment, rank = _incidence(strips, chosen & (strips.outputs > 0))
        executor = self.executors(branch, head)[segment]
        asked = np.minimum(strips.outputs, strips.rows)[segment]
        if kind == "out":
            token = strips.out_token[segment]
            low, high = self._interval(token, strips.stride, strips.outputs[segment], rank)
            receiver, sender = rank, executor
        else:
            token = strips.token[segment]
            rows = strips.rows[segment] if kind == "kv" and not self.is_causal else asked
            low, high = self._interval(token, strips.stride, rows, rank)
            receiver, sender = executor, rank
        needs = Needs(receiver, sender, token + low * strips.stride, np.full_like(low, strips.stride), high - low)
        return needs.where((needs.rows > 0) & (receiver != sender))

    # -- counts -------------------------------------------------------------------------------------------------------------

    def traffic(self, exchange: str, kind: str) -> Traffic:
        """Exact (row, key/value head) counts per pair of ranks, the union over branches."""
        return _traffic(self, "gather" if exchange == "ring" else exchange, kind)  # the same rows, in another order

    @cached_property
    def is_local(self) -> bool:
        """Whether no rank needs anything of another."""
        return not any(len(self.traffic("gather", kind).rows) for kind in ("kv", "q"))

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
        return _pairs_scored(self, exchange)

    def _count_pairs(self, exchange: str) -> Integers:
        work = np.zeros(self.num_ranks, np.int64)
        for rank in range(self.num_ranks):
            for piece in self.local_pieces(rank):
                size = piece.rows - piece.zero_row
                queries = min(size, piece.out_rows)  # outputs behind the end are nobody's
                scored = queries * (queries + 1) // 2 if self.is_causal else queries * size
                work[rank] += piece.segments * piece.offsets * piece.heads * scored
        for branch in range(len(self.pattern.branches)):
            if not len(self._cut[branch]):
                continue
            whole = self._by_heads[branch] if exchange == "heads" else np.zeros(len(self._cut[branch]), bool)
            there = np.flatnonzero(whole)
            for head, offset in self.heads_of(branch):
                strips = self.strips(branch, offset)
                segment, ranks = _incidence(strips, ~whole)
                rows = strips.rows[segment]
                low, high = self._interval(strips.out_token[segment], strips.stride, strips.outputs[segment], ranks)
                np.add.at(work, ranks, self._scored(rows, np.minimum(low, rows), np.minimum(high, rows)))
                rows, asked = strips.rows[there], np.minimum(strips.outputs, strips.rows)[there]
                np.add.at(work, self.executors(branch, head)[there], self._scored(rows, np.zeros_like(rows), asked))
        return work

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
        held = self.heads_of(branch)
        executors = {head: self.executors(branch, head) for head, _ in held} if exchange == "heads" else {}
        strips = {offset: self.strips(branch, offset) for _, offset in held}
        alike: dict[Task, list[tuple[int, int, int]]] = {}
        for segment in range(len(self._cut[branch])):
            for head, offset in held:
                strip = strips[offset]
                executor = int(executors[head][segment]) if executors else -1
                near = strip.first_rank[segment] <= rank <= strip.last_rank[segment]
                if executor != rank and (executor >= 0 or not near):
                    continue
                task = self._task(branch, strip, segment, rank, executor)
                if task is not None:
                    lane = (head, int(strip.token[segment]), int(strip.out_token[segment]))
                    alike.setdefault(task, []).append(lane)
        for task, lanes in alike.items():
            heads, tokens, out_tokens = zip(*lanes)
            yield task._replace(heads=heads, tokens=tokens, out_tokens=out_tokens)

    def _task(self, branch: int, strips: Strips, segment: int, rank: int, executor: int) -> Task | None:
        """The task of one lane, without the lane: equal ones are computed together."""
        rows, outputs = int(strips.rows[segment]), int(strips.outputs[segment])
        ranks = np.arange(strips.first_rank[segment], strips.last_rank[segment] + 1)

        def intervals(token: Integers, size: int) -> tuple[tuple[int, int, int], ...]:
            low, high = self._interval(np.full_like(ranks, token[segment]), strips.stride, np.full_like(ranks, size), ranks)
            return tuple((int(r), int(a), int(b)) for r, a, b in zip(ranks, low, high) if a < b)

        owners = intervals(strips.out_token, outputs)
        if executor < 0:
            owners = tuple(owner for owner in owners if owner[0] == rank)
        if not owners:
            return None
        queries = (owners[0][1], owners[-1][2])
        return Task(
            branch=branch,
            heads=(),
            tokens=(),
            out_tokens=(),
            stride=strips.stride,
            rows=rows,
            zero_row=bool(strips.zero_row[segment]),
            zero_keys=int(strips.zero_keys[segment]),
            queries=queries,
            keys=(0, min(queries[1], rows) if self.is_causal else rows),
            sources=intervals(strips.token, rows),
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
        needed: dict[Any, Needs] = {}
        for offsets, members in self.classes.items():
            for head in members:
                # Under whole heads the receiver depends on the head, else heads of a class need the same rows.
                key = (offsets, head) if exchange == "heads" else offsets
                if key not in needed:
                    needs = self.needs(exchange, kind, head)
                    needed[key] = needs.where((needs.sender if sent else needs.receiver) == rank)
        peers = {int(peer) for needs in needed.values() for peer in (needs.receiver if sent else needs.sender)}
        heads = sorted((head, offsets) for offsets, members in self.classes.items() for head in members)
        for peer in sorted(peers):
            lists: dict[Any, Integers] = {}
            for key, needs in needed.items():
                lists[key] = _tokens(needs.where((needs.receiver if sent else needs.sender) == peer))
            rows = [(head, lists[(offsets, head) if exchange == "heads" else offsets]) for head, offsets in heads]
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
    """The plan of these integers; built once."""
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


@lru_cache(maxsize=256)
def _traffic(plan: ContextPlan, exchange: str, kind: str) -> Traffic:
    counted: dict[Any, Traffic] = {}
    parts = []
    for offsets, heads in plan.classes.items():
        for head in heads:
            key = (offsets, head) if exchange == "heads" else offsets
            if key not in counted:
                counted[key] = _union(plan.needs(exchange, kind, head), plan.num_ranks)
            parts.append(counted[key])
    if not parts:
        return Traffic(*(np.empty(0, np.int64) for _ in Traffic._fields))
    receiver, sender, rows = (np.concatenate(x) for x in zip(*parts))
    pair, place = np.unique(receiver * plan.num_ranks + sender, return_inverse=True)
    return Traffic(pair // plan.num_ranks, pair % plan.num_ranks, np.bincount(place, rows, len(pair)).astype(np.int64))


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
            out, last = plan._stride_of_outputs(w, rate), -(-num_tokens // w)
            # Sources begin no later than outputs, and outputs end no earlier, but for the end of the document.
            first = max(0, -(-(begin - start) // w))
            stop = last if start + num_tokens <= end else max(0, (end - start) // out)
            stop = min(stop, last)
            found += segment_pieces(
                plan.pattern,
                branch,
                start - begin,
                num_tokens,
                plan.num_heads,
                plan.is_causal,
                within=plan.within,
                segments=range(first, max(first, stop)),
            )
        # The whole segments of the branch that keeps everything tile the shard where it cuts none.
        tiles = branch == everything_kept(plan.pattern) and not _touches(plan, branch, rank)
        pieces += [piece._replace(tiles=tiles) for piece in found]
    return tuple(pieces)


def _touches(plan: ContextPlan, branch: int, rank: int) -> bool:
    """Whether a rank holds a part of a cut segment."""
    if not len(plan._cut[branch]):
        return False
    strips = plan.strips(branch, 0)
    return bool(((strips.first_rank <= rank) & (rank <= strips.last_rank)).any())


def _reach(index: Integers, start: Any, num_tokens: Any, w: Any, out: Any) -> tuple[Integers, Integers]:
    """First token and end of segments with their outputs."""
    low = start + index * w
    return low, np.minimum(np.maximum(low + w, start + index * out + out), start + num_tokens)


def _shown(values: tuple[Any, ...]) -> Any:
    if len(values) <= 64:
        return [list(value) if isinstance(value, tuple) else value for value in values]
    return f"{len(values)} values of sha256 {sha256(repr(values).encode()).hexdigest()}"


def _kept(length: Integers, rate: int, offset: int) -> Integers:
    """How many positions `offset, offset + rate, ...` lie below `length`."""
    return np.maximum(0, -((offset - length) // rate))


def _incidence(strips: Strips, chosen: NDArray[np.bool_]) -> tuple[Integers, Integers]:
    """Every (segment, rank that may hold a part of it) of the chosen segments, segment by segment."""
    segments = np.flatnonzero(chosen)
    first, count = strips.first_rank[segments], (strips.last_rank - strips.first_rank + 1)[segments]
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(segments, count), np.repeat(first, count) + within


def _pairs(segment: Integers) -> tuple[Integers, Integers]:
    """All ordered pairs of places of an incidence that belong to one segment."""
    _, first, place, count = np.unique(segment, return_index=True, return_inverse=True, return_counts=True)
    partners = count[place]
    within = np.arange(partners.sum()) - np.repeat(np.cumsum(partners) - partners, partners)
    return np.repeat(np.arange(len(segment)), partners), np.repeat(first[place], partners) + within


def _reversed(traffic: Traffic) -> Traffic:
    return Traffic(traffic.sender, traffic.receiver, traffic.rows)


def _union(needs: Needs, num_ranks: int) -> Traffic:
    """The number of different tokens per pair of ranks, by inclusion and exclusion over its progressions."""
    pair = needs.receiver * num_ranks + needs.sender
    order = np.argsort(pair, kind="stable")
    keys, start, size = np.unique(pair[order], return_index=True, return_counts=True)
    rows, rates = np.zeros(len(keys), np.int64), np.unique(needs.stride)
    for many in np.unique(size):
        chosen = np.flatnonzero(size == many)
        index = order[start[chosen][:, None] + np.arange(many)]
        # Pairs whose progressions have the same strides are counted together.
        kind = np.searchsorted(rates, needs.stride[index]) @ (len(rates) ** np.arange(many))
        for each in np.unique(kind):
            among = np.flatnonzero(kind == each)
            steps = needs.stride[index[among[0]]].tolist()
            first = needs.first[index[among]]
            end = first + (needs.rows[index[among]] - 1) * steps
            for terms in range(1, many + 1):
                for subset in combinations(range(many), terms):
                    rows[chosen[among]] += (-1) ** (terms + 1) * _common(first, end, steps, subset)
    return Traffic(keys // num_ranks, keys % num_ranks, rows)


def _common(first: Integers, end: Integers, strides: list[int], subset: tuple[int, ...]) -> Integers:
    """How many tokens the progressions of a subset of columns share, row by row."""
    columns = list(subset)
    low, high = first[:, columns].max(axis=1), end[:, columns].min(axis=1)
    alive = low <= high
    a, step = first[:, columns[0]], strides[columns[0]]
    for column in columns[1:]:
        # The Chinese remainder: the least a + t * step that is b modulo the other stride.
        b, other = first[:, column], strides[column]
        gcd = math.gcd(step, other)
        modulus = other // gcd
        alive &= (b - a) % gcd == 0
        t = ((b - a) // gcd % modulus) * pow(step // gcd, -1, modulus) % modulus
        alive &= t <= (high - a) // step
        a = np.where(alive, a + t * step, a)
        step = min(step * modulus, LARGEST_STEP)
    begin = a + np.maximum(0, -((a - low) // step)) * step
    return np.where(alive, np.maximum(0, (high - begin) // step + 1), 0)


def _tokens(needs: Needs) -> Integers:
    """The tokens of some progressions: ascending, each once."""
    if not len(needs.rows):
        return np.empty(0, np.int64)
    parts = [first + stride * np.arange(rows) for first, stride, rows in zip(needs.first, needs.stride, needs.rows)]
    return np.unique(np.concatenate(parts)) if len(parts) > 1 else parts[0]
