"""Segments and windows that span more than one shard, in integers, and the rows that heads keep in them.

The sequence is cut in contiguous shards. A segment inside one shard is computed on its rank. This file describes the *cut* segments
only, which span more than one shard. The tokens of a segment are numbered `0, 1, ...` as slots. Each rank holds an interval of
slots, and a head keeps the slots of its offset modulo the rate.

A sliding window has no segments. Its pairs inside one shard are computed as a window that ends at the boundaries of the shard.
`WindowParts` are the pairs of two shards.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.core.bounded_cache import DOCUMENT_BYTES
from flexdilated.core.branch import Window
from flexdilated.core.pattern import DilatedPattern

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


class BranchHeads(NamedTuple):
    """The key/value heads of one branch that these ranks hold, with their offsets."""

    rate: int
    heads: tuple[tuple[int, int], ...]  # (head, offset), ascending; heads count from `within.start`


class Segments(NamedTuple):
    """Segments that span more than one shard. Every field is a `(segments,)` array, ordered by branch, then by token.

    Slot `s` of a segment is token `token + s` of the whole sequence. Its tokens are in the shards of `first_rank ... last_rank`.
    """

    branch: Integers  # index into `pattern.branches`
    document_tokens: Integers  # length of the packed document that has the segment, in tokens
    token: Integers  # position of slot 0 in the whole sequence
    size: Integers  # tokens of the segment
    padded: Integers  # slots that hold keys, `padded >= size`; slots from `size` on are torchscale's zero keys
    first_rank: Integers  # inclusive
    last_rank: Integers  # inclusive

    def where(self, chosen: Integers | slice) -> Segments:
        return Segments(*(x[chosen] for x in self))


class WindowParts(NamedTuple):
    """Queries of a rank that see keys of other ranks in their window. Every field is a `(parts,)` array, ordered by rank.

    The rank holds the queries `query ... query_end` and computes their window pairs with the keys `key ... key_end`, all tokens of
    the whole sequence. These keys belong to other ranks, before or after its own tokens. Only under
    `DilatedPattern.detaches` they are all keys that the queries see.
    """

    rank: Integers
    query: Integers
    query_end: Integers  # exclusive
    key: Integers
    key_end: Integers  # exclusive

    def where(self, chosen: Booleans) -> WindowParts:
        return WindowParts(*(x[chosen] for x in self))


@dataclass(frozen=True, eq=False)
class CutSegments:
    """The segments and windows that span more than one shard, and the rows that the heads of these ranks keep in them."""

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
    def nbytes(self) -> int:
        """Bytes of the documents and shards, the largest part of a plan."""
        return DOCUMENT_BYTES * (len(self.documents) + self.num_ranks)

    @property
    def num_tokens(self) -> int:
        return sum(self.shard_lengths)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """`(num_ranks + 1)` first tokens of the shards, and the number of tokens."""
        return tuple(accumulate(self.shard_lengths, initial=0))

    @cached_property
    def limits(self) -> Integers:
        """`borders` as an array."""
        return np.array(self.borders, np.int64)

    @cached_property
    def rates(self) -> Integers:
        """`(branches,)` dilation rates; 1 for the window."""
        segments, window = self.pattern.split("the planner of ranks")
        return np.array([*(rate for _, rate in segments), *([] if window is None else [1])], np.int64)

    @cached_property
    def lengths(self) -> Integers:
        """`(branches of segments,)` segment lengths, at most as long as the sequence."""
        lengths = [length for length, _ in self.pattern.split("the planner of ranks")[0]]
        return np.minimum(np.array(lengths, np.int64), self.num_tokens)

    @cached_property
    def window(self) -> Window | None:
        """The window, at most as long as the sequence."""
        window = self.pattern.split("the planner of ranks")[1]
        return None if window is None else Window(min(window.size, self.num_tokens))

    @cached_property
    def cut_documents(self) -> tuple[tuple[int, int], ...]:
        """`(first token, number of tokens)` of the documents that span more than one shard."""
        starts = [start for start, _ in self.documents]
        by_number = {}
        for border in self.borders[1:-1]:
            i = bisect_right(starts, border) - 1
            # If several documents begin at one token, all but the last are empty.
            if i >= 0 and starts[i] < border < sum(self.documents[i]):
                by_number[i] = self.documents[i]
        return tuple(by_number.values())

    @cached_property
    def document_parts(self) -> tuple[Integers, Integers, Integers, Integers, Integers]:
        """`(rank, begin, end, tokens of the document, count)` of parts of documents that ranks hold; equal parts are one entry."""
        start, num_tokens = np.array([document for document in self.documents if document[1]], np.int64).reshape(-1, 2).T
        first, last = self.rank_of(start), self.rank_of(start + num_tokens - 1)
        document, rank = expand_ranges(first, last - first + 1)
        start, num_tokens = start[document], num_tokens[document]
        begin, end = (np.clip(border - start, 0, num_tokens) for border in (self.limits[rank], self.limits[rank + 1]))
        parts, count = np.unique(np.stack([rank, begin, end, num_tokens]), axis=1, return_counts=True)
        return (*parts, count)

    def rank_of(self, tokens: Integers) -> Integers:
        """The rank whose shard has each token."""
        return np.searchsorted(self.limits, tokens, side="right") - 1

    def slots_of_rank(self, token: Integers, size: Integers, rank: Integers | int) -> tuple[Integers, Integers]:
        """The slots `first ... end` of a segment that a rank holds; slot 0 is token `token`, and the segment has `size` tokens."""
        return np.clip(self.limits[rank] - token, 0, size), np.clip(self.limits[np.add(rank, 1)] - token, 0, size)

    @cached_property
    def all_segments(self) -> Segments:
        """The segments of all branches that span more than one shard."""
        start, num_tokens = np.array(self.cut_documents, np.int64).reshape(-1, 2).T
        inner = np.unique(self.limits[1:-1])
        low, high = np.searchsorted(inner, start, side="right"), np.searchsorted(inner, start + num_tokens)
        document, number = expand_ranges(low, high - low)
        border = inner[number] - start[document]
        w = np.minimum(self.lengths[:, None], num_tokens)  # (branches, documents)
        # Cut by a border: segments that begin before it and end after it.
        first, last = border // w[:, document], -(-border // w[:, document])  # (branches, borders)
        # Several borders may cut one segment.
        first[:, 1:] = np.where(document[1:] == document[:-1], np.maximum(first[:, 1:], last[:, :-1]), first[:, 1:])
        pair, index = expand_ranges(first.reshape(-1), np.maximum(0, last - first).reshape(-1))
        branch, document = pair // max(1, len(document)), np.tile(document, len(w))[pair]
        w, start, num_tokens = w[branch, document], start[document], num_tokens[document]
        token, size = start + index * w, np.minimum(w, num_tokens - index * w)
        padded = w + -w % self.rates[branch] if self.pattern.zero_padding and not self.is_causal else size
        return Segments(
            branch=branch,
            document_tokens=num_tokens,
            token=token,
            size=size,
            padded=padded,
            first_rank=self.rank_of(token),
            last_rank=self.rank_of(token + size - 1),
        )

    @cached_property
    def window_parts(self) -> WindowParts:
        """The parts of the window that need keys of other ranks, at most two of each rank."""
        rank = np.flatnonzero(np.diff(self.limits))
        if self.window is None or self.window.size == 1:
            return WindowParts(*np.empty((len(WindowParts._fields), 0), np.int64))
        begin, end, reach = self.limits[rank], self.limits[rank + 1], self.window.size - 1
        starts, num_tokens = np.array(self.documents, np.int64).reshape(-1, 2).T
        parts = []
        for is_after in (False, True)[: 1 if self.is_causal else 2]:
            # If several documents begin at one token, all but the last are empty.
            document = np.searchsorted(starts, end - 1 if is_after else begin, side="right") - 1
            start, stop = starts[document], (starts + num_tokens)[document]
            query, query_end = np.maximum(begin, start), np.minimum(end, stop)
            key = np.maximum(start, query - reach)
            key_end = query_end if self.is_causal else np.minimum(stop, query_end + reach)
            is_cut = key_end > query_end if is_after else key < query
            if self.pattern.detaches:
                pass
            elif is_after:
                query, key = np.maximum(query, query_end - reach), query_end
            else:
                query_end, key_end = np.minimum(query_end, query + reach), query
            parts.append(np.stack([rank, query, query_end, key, key_end])[:, is_cut])
        return WindowParts(*np.unique(np.concatenate(parts, axis=1), axis=1))

    @cached_property
    def kept(self) -> tuple[BranchHeads, ...]:
        """Per branch, the heads of these ranks and their offsets."""
        branches = []
        for branch, rate in enumerate(self.rates.tolist()):
            runs = self.pattern.head_runs(branch, self.num_heads, self.within)
            heads = sorted((run.start + j * run.step, run.offset) for run in runs for j in range(run.heads))
            branches.append(BranchHeads(rate, tuple(heads)))
        return tuple(branches)

    @cached_property
    def all_kept(self) -> tuple[Integers, Integers, Integers]:
        """`(start, heads, offsets)`: heads and offsets of all branches in one array each; branch `i` begins at `start[i]`."""
        heads, offsets = np.array([head for branch in self.kept for head in branch.heads], np.int64).reshape(-1, 2).T
        return np.cumsum(self.num_kept) - self.num_kept, heads, offsets

    @cached_property
    def num_kept(self) -> Integers:
        """`(branches,)` number of heads of these ranks."""
        return np.array([len(branch.heads) for branch in self.kept], np.int64)


def segments_between(begin: Any, end: Any, num_tokens: Any, w: Any) -> tuple[Any, Any]:
    """The range `first ... end` of whole segments between two positions of a document.

    Args:
        begin, end: Positions in the document.
        num_tokens: Tokens of the document.
        w: Segment length.
    """
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
