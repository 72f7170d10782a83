"""The tiles that FlexAttention visits, counted without listing them: over the sequence as it is, and packed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from flexdilated.analysis.lattice import Integers, Kept, alike, ascending, checked, each_block
from flexdilated.analysis.pairs import count_pairs
from flexdilated.core.pattern import DilatedPattern, at_least_one, num_kept

BLOCK_SIZE = 128
MOST_BLOCK_SIZE = 2**31  # rows of tiles are counted in 64-bit integers
MAX_ROWS = 2**24  # of tiles in which a segment begins, looked at for each branch
MAX_TILES = 2**62  # that there are: counts are 64-bit integers
AT_ONCE = 2**19  # rows: a few arrays of 4 MB


class TileCount(NamedTuple):
    """Tiles of one head."""

    block_size: int
    raw: int  # visited by one mask over the sequence as it is
    packed: int  # visited by one mask per branch over its kept rows, segment after segment
    pairs: int  # useful ones: a pair that m branches join is m of them

    @property
    def waste_raw(self) -> float:
        """Pairs in visited tiles per useful pair."""
        return self.raw * self.block_size**2 / self.pairs if self.pairs else math.inf if self.raw else 0.0

    @property
    def waste_packed(self) -> float:
        """As `waste_raw`, for the packed masks."""
        return self.packed * self.block_size**2 / self.pairs if self.pairs else math.inf if self.packed else 0.0


def count_tiles(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, *, block_size: int = BLOCK_SIZE, is_causal: bool = False
) -> tuple[TileCount, ...]:
    """By head, how many tiles of `block_size x block_size` pairs FlexAttention visits in either layout.

    The raw mask is that of `create_dilated_block_mask`, in which a pair that several branches join is computed once. Packed, the
    kept rows of all segments of a branch follow one another.

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N. Time grows with the number of segments until their borders repeat, not with N.
        num_heads: Heads H. Under grouped-query attention these are key/value heads.
        block_size: Tokens per side of a tile; at least the largest dilation rate.
        is_causal: Whether a query sees only keys at its own position and before.

    Raises:
        ValueError: If a number is below 1, or some branch would have no head.
        TypeError: If an argument has the wrong type.
        NotImplementedError: If a rate exceeds the block size, or more than 2**24 rows of tiles would have to be looked at.
    """
    num_tokens, num_heads = checked(pattern, num_tokens, num_heads, is_causal=is_causal)
    block_size = at_least_one("block_size", block_size)
    if block_size > MOST_BLOCK_SIZE:
        raise ValueError(f"block_size must be at most {MOST_BLOCK_SIZE}, got {block_size}")
    if max(pattern.dilation_rates) > block_size:
        raise NotImplementedError(
            f"block_size must be at least the largest dilation rate={max(pattern.dilation_rates)} to count tiles without listing "
            f"them, got {block_size}; use create_dilated_block_mask"
        )
    pairs = [sum(column) for column in zip(*count_pairs(pattern, num_tokens, num_heads, is_causal=is_causal))]
    classes = alike(pattern, num_tokens, num_heads)
    visited = _raw([tuple(sorted(set(kept))) for kept in classes], num_tokens, block_size, is_causal=is_causal)
    found: list[TileCount | None] = [None] * num_heads
    known: dict[Kept, int] = {}
    for (kept, heads), raw in zip(classes.items(), visited):
        for each in kept:
            if each not in known:
                known[each] = _packed(each, num_tokens, block_size, is_causal=is_causal)
        for head in heads:
            found[head] = TileCount(block_size, raw, sum(known[each] for each in kept), pairs[head])
    return tuple(each for each in found if each is not None)


def _raw(heads: list[tuple[Kept, ...]], num_tokens: int, block_size: int, *, is_causal: bool) -> list[int]:
    """Tiles of the union of branches, of each of these heads. Heads of the same segments are looked at together."""
    found = [0] * len(heads)
    by_lengths: dict[tuple[int, ...], list[int]] = {}
    for i, kept in enumerate(heads):
        by_lengths.setdefault(tuple(sorted({each.length for each in kept})), []).append(i)
    for lengths, members in by_lengths.items():
        for tokens, times in each_block([*lengths, block_size], num_tokens):
            counts = _visited([heads[i] for i in members], tokens, block_size, is_causal=is_causal)
            for i, count in zip(members, counts):
                found[i] += times * count
    return found


def _visited(heads: list[tuple[Kept, ...]], num_tokens: int, block_size: int, *, is_causal: bool) -> list[int]:
    """All that a row of tiles visits is one run: a kept token attends to itself, so the run of each segment has the diagonal."""
    rows, lengths = -(-num_tokens // block_size), {each.length for kept in heads for each in kept}
    segments = sum(-(-num_tokens // length) for length in lengths)
    if (touched := min(rows, 2 * segments) + segments) > MAX_ROWS or rows**2 > MAX_TILES:
        raise NotImplementedError(
            f"num_tokens must be such that at most {MAX_ROWS} rows of tiles and segments are looked at, got {touched} of "
            f"{num_tokens} tokens; use segment lengths whose least common multiple with block_size is small, or a larger block_size"
        )
    found = [0] * len(heads)
    step = max(1, rows * AT_ONCE // touched)
    for row in range(0, rows, step):
        runs: dict[Kept, tuple[Integers, Integers]] = {}
        here = _Rows(row, min(row + step, rows), num_tokens, block_size, lengths)
        for i, kept in enumerate(heads):
            for each in kept:
                if each not in runs:
                    runs[each] = here.runs(each, is_causal=is_causal)
            first = np.minimum.reduce([runs[each][0] for each in kept])
            last = np.maximum.reduce([runs[each][1] for each in kept])
            columns = (last - first + 1) * here.times
            if is_causal:  # each row of a group sees one column more than the one before
                columns += here.times * (here.times - 1) // 2
            found[i] += int(columns[last >= 0].sum())
    return found


class _Rows:
    """Some rows of tiles, in groups of rows in which no segment begins or ends, and those in parts that each lie in one segment."""

    def __init__(self, low: int, high: int, num_tokens: int, block_size: int, lengths: Iterable[int]) -> None:
        self.block_size, self.num_tokens = block_size, num_tokens
        end = min(high * block_size, num_tokens)
        self.borders = {length: np.arange(-(-low * block_size // length) * length, end, length) for length in lengths}
        border = np.concatenate(list(self.borders.values()))
        at = border // block_size
        behind = at[border % block_size != 0] + 1
        # The last row may be shorter.
        self.row = ascending([np.array([low, high - 1]), at, behind[behind < high]])
        self.times = np.diff(self.row, append=high)
        self._parts: dict[int, tuple[Integers, ...]] = {}

    def parts(self, length: int) -> tuple[Integers, ...]:
        """Of the first row of each group where they begin and end, where their segments begin, and which row it is."""
        if length not in self._parts:
            inside = self.borders[length][self.borders[length] % self.block_size != 0]
            begin = np.sort(np.concatenate([self.row * self.block_size, inside]), kind="stable")
            row = begin // self.block_size
            end = np.minimum(np.append(begin[1:], self.num_tokens), np.minimum((row + 1) * self.block_size, self.num_tokens))
            self._parts[length] = begin, end, begin // length * length, np.searchsorted(self.row, row)
        return self._parts[length]

    def runs(self, kept: Kept, *, is_causal: bool) -> tuple[Integers, Integers]:
        """By row, the first and the last column of the tiles that a branch visits; -1 is the last where it visits none.

        No column between is without a kept token, since no rate exceeds a tile.
        """
        length, rate, offset = kept
        begin, end, start, row = self.parts(length)
        origin = start + offset
        newest = origin + (end - 1 - origin) // rate * rate
        holds = newest >= np.maximum(begin, origin)
        last = newest if is_causal else origin + (np.minimum(start + length, self.num_tokens) - 1 - origin) // rate * rate
        first_column = np.full(len(self.row), np.iinfo(np.int64).max)
        last_column = np.full(len(self.row), -1, np.int64)
        # Of the parts of a row the first one reaches farthest to the left, the last one to the right: what is written last stays.
        first_column[row[holds][::-1]] = origin[holds][::-1] // self.block_size
        last_column[row[holds]] = last[holds] // self.block_size
        return first_column, last_column


def _packed(kept: Kept, num_tokens: int, block_size: int, *, is_causal: bool) -> int:
    """Tiles of the kept rows of a branch, joined where they come from one segment."""
    length, rate, offset = kept
    whole, rest = divmod(num_tokens, length)
    rows = num_kept(length, rate, offset)
    if not rows:
        return 0
    total = whole * rows + num_kept(rest, rate, offset)
    return _raw([(Kept(rows, 1, 0),)], total, block_size, is_causal=is_causal)[0]
