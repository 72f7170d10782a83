"""The kinds of branches of a pattern, and the rule of each: what a head keeps, which pairs join, how many, and how far apart.

The class of a branch is its kind: `Segments`, `Window` or `GlobalTokens`. `Near` is the window and the global tokens, whose pairs
count once. `Kept` is a branch of segments as one head keeps it. Code that computes something from branches calls
`DilatedPattern.split`, with its own name for the error message. A branch of an unknown kind raises an error.
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

    def band(self, *, is_causal: bool) -> tuple[int, int]:
        """The smallest and the largest `key - query` of joined pairs."""
        return 1 - self.size, 0 if is_causal else self.size - 1


class GlobalTokens(NamedTuple):
    """The first tokens of a document: every query sees them. In calls that are not causal, they see every key."""

    count: int  # type: ignore[assignment]  # tuple has a method of this name


class Near(NamedTuple):
    """The pairs of the window and of the global tokens. Each counts once, so branches of segments leave these pairs out."""

    window: int = 0  # size of the window; 0: none
    global_tokens: int = 0

    def __bool__(self) -> bool:
        return self.window > 0 or self.global_tokens > 0

    def joins(self, query: Any, key: Any) -> Any:
        """Whether a pair is near; causality is ignored. Positions are those in the document: numbers, arrays or tensors."""
        joined = (query - key < self.window) & (key - query < self.window)
        return joined | (query < self.global_tokens) | (key < self.global_tokens) if self.global_tokens else joined

    def keys(self, query: int, num_tokens: int, *, is_causal: bool) -> tuple[range, range]:
        """The near keys of a query: global tokens (for a global query, all keys), then the other keys of the window."""
        first, end = self.global_tokens, query + 1 if is_causal else num_tokens
        if query < first:
            return range(end), range(0)
        return range(first), range(max(first, query + 1 - self.window), min(query + self.window, end))

    def far_rows(self, rate: int) -> int:
        """The smallest distance at which two rows are outside the window, counted in rows of every `rate`-th token."""
        return (self.window - 1) // rate + 1 if self.window else 0

    def count_pairs(self, num_tokens: Any, *, is_causal: bool, begin: Any = 0, end: Any = None) -> Any:
        """The number of near pairs of a document that the rank with its tokens `begin ... end` (default: all) computes.

        Arguments are numbers or arrays. Pairs of global queries are computed where their keys are.
        """
        end, first = num_tokens if end is None else end, num_tokens - positive(num_tokens - self.global_tokens)
        local_begin, local_end, local = (positive(position - first) for position in (begin, end, num_tokens))
        pairs = _window_pairs(local_begin, local_end, self.window)
        if is_causal:  # queries see the global tokens that are not after them
            return pairs + _window_pairs(begin, end, first)
        if self.window:  # keys after a query: count them before it, in reverse order
            pairs = pairs + _window_pairs(local - local_end, local - local_begin, self.window) - (local_end - local_begin)
        return pairs + first * (end - begin + local_end - local_begin)


NONE = Near()
Branch = Segments | Window | GlobalTokens  # the kinds of branches


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

    def count_pairs(self, num_tokens: int, *, is_causal: bool, near: Near = NONE) -> int:
        """The number of joined pairs in a document that are not near."""
        total, first = 0, min(ceil_div(near.global_tokens, self.length), ceil_div(num_tokens, self.length))
        for segment in range(first):  # segments with global tokens
            tokens = min(self.length, num_tokens - segment * self.length)
            total += self._far_pairs(tokens, near.global_tokens - segment * self.length, near, is_causal=is_causal)
        for tokens, times in segment_counts(num_tokens - min(first * self.length, num_tokens), self.length):
            total += times * self._far_pairs(tokens, 0, near, is_causal=is_causal)
        return total

    def _far_pairs(self, tokens: int, skipped: int, near: Near, *, is_causal: bool) -> int:
        """The number of far pairs of one segment whose first `skipped` tokens are global."""
        rows, skipped = self.rows(tokens), self.rows(min(skipped, tokens))
        return int(far_pairs(rows, 0, rows, is_causal=is_causal, skipped=skipped, apart=near.far_rows(self.rate)))

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


def split_kinds(branches: Iterable[object], consumer: str) -> tuple[tuple[Segments, ...], Near]:
    """The branches of segments, and the near pairs.

    Raises:
        NotImplementedError: If a branch is of another kind; the message names the kind and the consumer.
    """
    segments, near = [], Near()
    for branch in branches:
        if isinstance(branch, Segments):
            segments.append(branch)
        elif isinstance(branch, Window):
            near = near._replace(window=branch.size)
        elif isinstance(branch, GlobalTokens):
            near = near._replace(global_tokens=branch.count)
        else:
            kind = type(branch).__name__
            raise NotImplementedError(
                f"{consumer} must get branches of kind Segments, Window or GlobalTokens, got a branch of kind {kind}: {branch}"
            )
    return tuple(segments), near


def num_kept(length: int, rate: int, offset: int) -> int:
    """How many positions `offset, offset + rate, ...` lie below `length`."""
    return max(0, ceil_div(length - offset, rate))


def far_pairs(rows: Any, low: Any, high: Any, *, is_causal: bool, skipped: Any = 0, apart: Any = 0) -> Any:
    """The number of far pairs that the queries `low ... high` score in a segment of `rows` rows; numbers or arrays.

    `skipped`: rows of global tokens, which are the first. `apart`: least distance between the rows of a pair, 0 without a window.
    """
    rows, low, high = rows - skipped, positive(low - skipped), positive(high - skipped)
    before = _triangle(high - apart) - _triangle(low - apart)
    if is_causal:
        return before
    return before + _triangle(rows - apart - low) - _triangle(rows - apart - high) - (high - low) * (apart == 0)


def positive(number: Any) -> Any:
    """The number, or 0 if it is negative. Python integers stay Python integers, since numbers of pairs may exceed 64 bits."""
    return number * (number > 0)


def _triangle(rows: Any) -> Any:
    """The number of pairs of a causal square, 0 for a negative number of rows."""
    return positive(rows) * (rows + 1) // 2


def _window_pairs(begin: Any, end: Any, size: Any) -> Any:
    """The pairs of a causal window with queries `begin ... end`: all causal pairs, less those outside the window."""
    return _triangle(end) - _triangle(begin) - _triangle(end - size) + _triangle(begin - size)


def segment_counts(num_tokens: int, segment_length: int) -> Iterator[tuple[int, int]]:
    """(length, how many segments have it): the whole segments, then the shorter last one."""
    num_whole, last_size = divmod(num_tokens, segment_length)
    if num_whole:
        yield segment_length, num_whole
    if last_size:
        yield last_size, 1


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
