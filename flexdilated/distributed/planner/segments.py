"""Segments and near pairs that span more than one shard, in integers, and the rows that heads keep in segments.

The sequence is cut in contiguous shards. A segment inside one shard is computed on its rank. This file describes the *cut* segments
only, which span more than one shard. The tokens of a segment are numbered `0, 1, ...` as slots. Each rank holds an interval of
slots, and a head keeps the slots of its offset modulo the rate.

A sliding window and global tokens have no segments. Inside one shard, the part of a document is treated as a document of its own.
`NearParts` are the near pairs of two shards, and `FarParts` are the pairs of cut segments without near pairs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.core.bounded_cache import DOCUMENT_BYTES
from flexdilated.core.branch import Near
from flexdilated.core.pattern import DilatedPattern

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


class BranchHeads(NamedTuple):
    """The key/value heads of one branch that these ranks hold, with their offsets."""

    rate: int
    heads: tuple[tuple[int, int], ...]  # (head, offset), ascending; heads count from `within.start`


class SpanningSegments(NamedTuple):
    """Segments that span more than one shard. Every field is a `(segments,)` array, ordered by branch, then by token.

    Slot `s` of a segment is token `token + s` of the whole sequence. Its tokens are in the shards of `first_rank ... last_rank`.
    """

    branch: Integers  # index into `pattern.branches`
    document_tokens: Integers  # length of the packed document that has the segment, in tokens
    token: Integers  # position of slot 0 in the whole sequence
    size: Integers  # tokens of the segment
    skipped: Integers  # slots of global tokens, before the others
    padded: Integers  # slots that hold keys, `padded >= size`; slots from `size` on are torchscale's zero keys
    first_rank: Integers  # inclusive
    last_rank: Integers  # inclusive

    def where(self, index: Booleans | Integers | slice) -> SpanningSegments:
        return SpanningSegments(*(x[index] for x in self))


class NearParts(NamedTuple):
    """Near pairs whose query and key are on different ranks. Every field is a `(parts,)` array.

    A rank computes the pairs of a branch between the queries `query ... query_end` and the keys `key ... key_end`, tokens of the
    whole sequence. It holds the queries, and the keys belong to ranks before or after it. Without causality, queries that are
    global tokens see every key: the ranks of the keys compute them, and these queries belong to other ranks.
    """

    branch: Integers  # index into `pattern.branches`
    rank: Integers
    query: Integers
    query_end: Integers  # exclusive
    key: Integers
    key_end: Integers  # exclusive

    def where(self, index: Booleans) -> NearParts:
        return NearParts(*(x[index] for x in self))


class FarParts(NamedTuple):
    """Pairs of parts of cut segments, without near pairs. Every field but the last is a `(parts,)` array, numbers of slots.

    An offset has pairs in a part if it keeps one of the slots `query ... query_end`. It needs all keys that it keeps in
    `key ... key_end`.
    """

    query: Integers
    query_end: Integers  # exclusive
    key: Integers
    key_end: Integers  # exclusive
    is_before: bool  # whether keys are `far_rows` or more before their queries, without a window any number; else after them


@dataclass(frozen=True, eq=False)
class CutSegments:
    """The segments and near pairs that span more than one shard, and the rows that the heads of these ranks keep in segments."""

    pattern: DilatedPattern
    shard_lengths: tuple[int, ...]  # contiguous in the order of ranks; some may be 0
    num_kv_heads: int  # key/value heads of the whole model
    within: range  # the key/value heads that these ranks hold
    group: int  # query heads per key/value head
    documents: tuple[tuple[int, int], ...]  # (first token, number of tokens) of each packed one
    is_causal: bool

    @property
    def num_ranks(self) -> int:
        return len(self.shard_lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the documents and shards, the largest part of a plan."""
        return DOCUMENT_BYTES * (len(self.documents) + self.num_ranks)

    @property
    def num_tokens(self) -> int:
        return sum(self.shard_lengths)

    @cached_property
    def limits(self) -> Integers:
        """`(num_ranks + 1,)` first tokens of the shards, and the number of tokens."""
        return np.cumsum([0, *self.shard_lengths], dtype=np.int64)

    @cached_property
    def near(self) -> Near:
        """The pairs that count once."""
        return self.pattern.split("the planner of ranks")[1]

    @cached_property
    def rates(self) -> Integers:
        """`(branches,)` dilation rates; 1 for the window and the global tokens."""
        segments, _ = self.pattern.split("the planner of ranks")
        return np.array([*(rate for _, rate in segments), *[1] * (len(self.pattern.branches) - len(segments))], np.int64)

    @cached_property
    def lengths(self) -> Integers:
        """`(branches of segments,)` segment lengths, at most as long as the sequence."""
        lengths = [length for length, _ in self.pattern.split("the planner of ranks")[0]]
        return np.minimum(np.array(lengths, np.int64), self.num_tokens)

    @cached_property
    def apart(self) -> Integers:
        """`(branches,)` least distance of a query and a key of a segment, in tokens; 0 without a window."""
        rows = [self.near.far_rows(rate) for rate in self.rates.tolist()]
        return np.array(rows, np.int64) * self.rates

    @cached_property
    def cut_documents(self) -> tuple[tuple[int, int], ...]:
        """`(first token, number of tokens)` of the documents that span more than one shard."""
        starts = [start for start, _ in self.documents]
        by_number = {}
        for token in self.limits[1:-1].tolist():
            i = bisect_right(starts, token) - 1
            # If several documents begin at one token, all but the last are empty.
            if i >= 0 and starts[i] < token < sum(self.documents[i]):
                by_number[i] = self.documents[i]
        return tuple(by_number.values())

    @cached_property
    def document_parts(self) -> tuple[Integers, Integers, Integers, Integers, Integers]:
        """`(rank, begin, end, tokens of the document, count)` of parts of documents that ranks hold; equal parts are one entry."""
        start, num_tokens = np.array([document for document in self.documents if document[1]], np.int64).reshape(-1, 2).T
        first, last = self.rank_of(start), self.rank_of(start + num_tokens - 1)
        document, rank = expand_ranges(first, last - first + 1)
        start, num_tokens = start[document], num_tokens[document]
        begin, end = (np.clip(limit - start, 0, num_tokens) for limit in (self.limits[rank], self.limits[rank + 1]))
        parts, count = np.unique(np.stack([rank, begin, end, num_tokens]), axis=1, return_counts=True)
        return (*parts, count)

    def rank_of(self, tokens: Integers) -> Integers:
        """The rank whose shard has each token."""
        return np.searchsorted(self.limits, tokens, side="right") - 1

    def slots_of_rank(self, token: Integers, size: Integers, rank: Integers | int) -> tuple[Integers, Integers]:
        """The slots `first ... end` of a segment that a rank holds; slot 0 is token `token`, and the segment has `size` tokens."""
        return np.clip(self.limits[rank] - token, 0, size), np.clip(self.limits[np.add(rank, 1)] - token, 0, size)

    @cached_property
    def all_segments(self) -> SpanningSegments:
        """The segments of all branches that span more than one shard."""
        start, num_tokens = np.array(self.cut_documents, np.int64).reshape(-1, 2).T
        inner = np.unique(self.limits[1:-1])
        low, high = np.searchsorted(inner, start, side="right"), np.searchsorted(inner, start + num_tokens)
        document, number = expand_ranges(low, high - low)
        cut = inner[number] - start[document]
        w = np.minimum(self.lengths[:, None], num_tokens)  # (branches, documents)
        # The segments that contain the first token of a shard, but not as their first token.
        first, last = cut // w[:, document], -(-cut // w[:, document])  # (branches, cuts)
        # Several shards may begin in one segment.
        first[:, 1:] = np.where(document[1:] == document[:-1], np.maximum(first[:, 1:], last[:, :-1]), first[:, 1:])
        pair, index = expand_ranges(first.reshape(-1), np.maximum(0, last - first).reshape(-1))
        branch, document = pair // max(1, len(document)), np.tile(document, len(w))[pair]
        w, start, num_tokens = w[branch, document], start[document], num_tokens[document]
        token, size = start + index * w, np.minimum(w, num_tokens - index * w)
        padded = w + -w % self.rates[branch] if self.pattern.zero_padding and not self.is_causal else size
        skipped = np.clip(start + self.near.global_tokens - token, 0, size)
        segments = SpanningSegments(
            branch=branch,
            document_tokens=num_tokens,
            token=token,
            size=size,
            skipped=skipped,
            padded=padded,
            first_rank=self.rank_of(token),
            last_rank=self.rank_of(token + size - 1),
        )
        return segments.where(size - skipped > self.apart[branch])  # the others have near pairs alone

    def far_parts(self, segment: Integers, low: Integers, high: Integers) -> Iterator[FarParts]:
        """The pairs of the queries in slots `low ... high` of segments (indices into `all_segments`); parts may be empty."""
        segments = self.all_segments.where(segment)
        size, skipped, apart = segments.size, segments.skipped, self.apart[segments.branch]
        first = np.maximum(low, skipped)
        before = first if self.near.window == 0 else np.maximum(low, skipped + apart)
        key_end = high - apart if self.is_causal or self.near.window else size
        yield FarParts(before, high, skipped, np.maximum(skipped, key_end), is_before=True)
        if self.near.window and not self.is_causal:
            yield FarParts(first, np.minimum(high, size - apart), np.minimum(first + apart, size), size, is_before=False)

    @cached_property
    def near_parts(self) -> NearParts:
        """The near pairs of two shards, of each kind of pair at most one part for each rank and side."""
        rank = np.flatnonzero(np.diff(self.limits))
        begin, end = self.limits[rank], self.limits[rank + 1]
        starts, num_tokens = np.array(self.documents, np.int64).reshape(-1, 2).T
        global_tokens, reach = self.near.global_tokens, self.near.window - 1
        window, first_tokens = len(self.lengths), len(self.rates) - 1
        parts = [np.empty((len(NearParts._fields), 0), np.int64)]

        def add(branch: int, query: Integers, query_end: Integers, key: Integers, key_end: Integers) -> None:
            columns = np.stack([np.full_like(rank, branch), rank, query, query_end, key, key_end])
            parts.append(columns[:, (query < query_end) & (key < key_end)])

        for is_after in (False, True)[: 1 if self.is_causal else 2]:
            # If several documents begin at one token, all but the last are empty.
            document = np.searchsorted(starts, end - 1 if is_after else begin, side="right") - 1
            start, stop = starts[document], (starts + num_tokens)[document]
            local_start = np.minimum(start + global_tokens, stop)  # the first token that is not global
            first, last = np.maximum(begin, start), np.minimum(end, stop)
            query = np.maximum(first, local_start)
            if reach > 0 and is_after:
                add(window, np.maximum(query, last - reach), last, last, np.minimum(stop, last + reach))
            elif reach > 0:
                add(window, query, np.minimum(last, query + reach), np.maximum(local_start, query - reach), query)
            if global_tokens and is_after:
                add(first_tokens, last, local_start, first, last)
            elif global_tokens:
                add(first_tokens, first if self.is_causal else query, last, start, np.minimum(local_start, first))
            if global_tokens and not self.is_causal and not is_after:
                add(first_tokens, start, np.minimum(local_start, first), first, last)
        return NearParts(*np.concatenate(parts, axis=1))

    @cached_property
    def branch_heads(self) -> tuple[BranchHeads, ...]:
        """Per branch, the heads of these ranks and their offsets."""
        branches = []
        for branch, rate in enumerate(self.rates.tolist()):
            runs = self.pattern.head_runs(branch, self.num_kv_heads, self.within)
            heads = sorted((run.start + j * run.step, run.offset) for run in runs for j in range(run.heads))
            branches.append(BranchHeads(rate, tuple(heads)))
        return tuple(branches)

    @cached_property
    def all_branch_heads(self) -> tuple[Integers, Integers, Integers]:
        """`(start, heads, offsets)`: heads and offsets of all branches in one array each; branch `i` begins at `start[i]`."""
        heads, offsets = np.array([head for branch in self.branch_heads for head in branch.heads], np.int64).reshape(-1, 2).T
        return np.cumsum(self.num_branch_heads) - self.num_branch_heads, heads, offsets

    @cached_property
    def num_branch_heads(self) -> Integers:
        """`(branches,)` number of heads of these ranks."""
        return np.array([len(branch.heads) for branch in self.branch_heads], np.int64)


def segments_between(begin: Any, end: Any, num_tokens: Any, w: Any) -> tuple[Any, Any]:
    """The range `first ... end` of whole segments of length `w` between two positions of a document of `num_tokens` tokens."""
    first, last = np.maximum(0, -(-begin // w)), -(-num_tokens // w)
    stop = np.minimum(np.where(num_tokens <= end, last, np.maximum(0, end // w)), last)
    return first, np.maximum(first, stop)


def expand_ranges(first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """Concatenate the ranges `first ... first + count`: the index of the range of each number, and the numbers.

    `expand_ranges([5, 8], [2, 1])` is `([0, 0, 1], [5, 6, 8])`.
    """
    ends = np.cumsum(count)
    run = np.repeat(np.arange(len(count)), count)
    return run, np.arange(len(run)) + np.repeat(first - ends + count, count)


def kept_below(length: int | Integers, rate: int | Integers, offset: int | Integers) -> Integers:
    """The number of positions `offset, offset + rate, ...` below `length`."""
    return np.maximum(0, -((offset - length) // rate))
