"""The kinds of branches of a pattern, and the rule of each: what a head keeps, which pairs join, how many, and how far apart.

The class of a branch is its kind: `Segments` or `Window`. `Kept` is a branch of segments as one head keeps it. Code that computes
something from branches calls `DilatedPattern.split`, and passes its own name for the error message. A branch of another kind raises
an error; it is never left out of a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Segments(NamedTuple):
    """A branch that cuts the sequence in segments, of which each head keeps every r-th token."""

    segment_length: int
    dilation_rate: int


class Window(NamedTuple):
    """A sliding window: in every head, each query sees the keys nearest to it."""

    size: int  # keys that a causal query sees, including its own; without causality as many keys on each side, its own in both

    def joins(self, query: Any, key: Any) -> Any:
        """Whether a query sees a key, without causality."""
        return (query - key < self.size) & (key - query < self.size)

    def band(self, *, is_causal: bool) -> tuple[int, int]:
        """The smallest and the largest `key - query` of joined pairs."""
        return 1 - self.size, 0 if is_causal else self.size - 1

    def rows(self, rate: int) -> Window:
        """The window in rows, if every `rate`-th token is a row: two rows join if their tokens do."""
        return Window((self.size - 1) // rate + 1)

    def count_pairs(self, num_tokens: int, *, is_causal: bool) -> int:
        """The number of joined pairs in a sequence."""
        before = causal_window_pairs(min(self.size, num_tokens), num_tokens)
        return before if is_causal else 2 * before - num_tokens


Branch = Segments | Window  # the kinds of branches


class Kept(NamedTuple):
    """A branch of segments as one head keeps it: tokens `offset, offset + rate, ...` of each segment of `length` tokens.

    For `keeps`, `joins` and `row` the three may also be tensors or arrays that broadcast with the positions.
    """

    length: Any
    rate: Any
    offset: Any

    def keeps(self, position: Any) -> Any:
        """Whether a position is kept."""
        return position % self.length % self.rate == self.offset

    def joins(self, query: Any, key: Any) -> Any:
        """Whether a query and a key, not causal, are kept in one segment."""
        joined = query // self.length == key // self.length
        if isinstance(self.rate, int) and self.rate == 1:
            return joined
        return joined & self.keeps(query) & self.keeps(key)

    def row(self, position: Any) -> Any:
        """The number of a kept position among the kept ones of its segment."""
        return position % self.length // self.rate

    def rows(self, tokens: int) -> int:
        """The number of positions kept among the first `tokens` of a segment."""
        return num_kept(tokens, self.rate, self.offset)

    def count_pairs(self, num_tokens: int, *, is_causal: bool) -> int:
        """The number of joined pairs in a sequence."""
        total = 0
        for tokens, times in segment_counts(num_tokens, self.length):
            rows = self.rows(tokens)
            total += times * (rows * (rows + 1) // 2 if is_causal else rows * rows)
        return total

    def longest_reach(self) -> int:
        """The largest distance between a query and a key that it sees, -1 if nothing is kept."""
        reach: int = (self.length - 1 - self.offset) // self.rate * self.rate if self.offset < self.length else -1
        return reach


class HeadRun(NamedTuple):
    """The heads of one branch that keep the same offset: `start, start + step, ...`, `heads` of them."""

    offset: int
    start: int
    step: int
    heads: int


def split_kinds(branches: Iterable[object], consumer: str) -> tuple[tuple[Segments, ...], Window | None]:
    """Split branches into the segments and the window, for code that knows both kinds.

    Raises:
        NotImplementedError: If a branch is of another kind; the message names the kind and the consumer.
    """
    *others, last = branches
    window = last if isinstance(last, Window) else None
    if not isinstance(last, (Segments, Window)):  # it is named before a window that stands before it
        others = []
    return segments_among(others if window else (*others, last), consumer), window


def segments_among(branches: Iterable[object], consumer: str) -> tuple[Segments, ...]:
    """Branches that are all segments, for code that knows no other kind.

    Raises:
        NotImplementedError: If a branch is of another kind; the message names the kind and the consumer.
    """
    segments = []
    for branch in branches:
        if not isinstance(branch, Segments):
            kind = type(branch).__name__
            raise NotImplementedError(f"{consumer} must get branches of kind Segments, got a branch of kind {kind}: {branch}")
        segments.append(branch)
    return tuple(segments)


def num_kept(length: int, rate: int, offset: int) -> int:
    """How many positions `offset, offset + rate, ...` lie below `length`."""
    return max(0, ceil_div(length - offset, rate))


def causal_window_pairs(size: Any, num_tokens: Any) -> Any:
    """The joined pairs of a causal window of at most `num_tokens` tokens in a sequence; numbers or arrays."""
    return size * num_tokens - size * (size - 1) // 2


def segment_counts(num_tokens: int, segment_length: int) -> Iterator[tuple[int, int]]:
    """(length, how many segments have it): the whole segments, then the shorter last one."""
    num_whole, last_size = divmod(num_tokens, segment_length)
    if num_whole:
        yield segment_length, num_whole
    if last_size:
        yield last_size, 1


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
