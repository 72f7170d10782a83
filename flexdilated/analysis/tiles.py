"""The tiles that FlexAttention visits, counted without listing them: over the sequence as it is, and packed."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from flexdilated.analysis.lattice import Integers, Kept, alike, checked, each_block
from flexdilated.analysis.pairs import count_pairs
from flexdilated.pattern import DilatedPattern, num_kept

__all__ = ["BLOCK_SIZE", "TileCount", "count_tiles"]

BLOCK_SIZE = 128
MAX_ROWS = 2**21  # of tiles, looked at for each head


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
        num_tokens: Sequence length N. Time grows with the rows of tiles until the borders of segments repeat, not with N.
        num_heads: Heads H. Under grouped-query attention these are key/value heads.
        block_size: Tokens per side of a tile; at least the largest dilation rate.
        is_causal: Whether a query sees only keys at its own position and before.

    Raises:
        ValueError: If a number is below 1, or some branch would have no head.
        TypeError: If an argument has the wrong type.
        NotImplementedError: If a rate exceeds the block size, or more than 2**21 rows of tiles would have to be looked at.
    """
    checked(pattern, num_tokens, num_heads)
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if max(pattern.dilation_rates) > block_size:
        raise NotImplementedError(
            f"block_size must be at least the largest dilation rate={max(pattern.dilation_rates)} to count tiles without listing "
            f"them, got {block_size}; use create_dilated_block_mask"
        )
    pairs = [sum(column) for column in zip(*count_pairs(pattern, num_tokens, num_heads, is_causal=is_causal))]
    found: list[TileCount | None] = [None] * num_heads
    for kept, heads in alike(pattern, num_tokens, num_heads).items():
        raw = _raw(sorted(set(kept)), num_tokens, block_size, is_causal=is_causal)
        packed = sum(_packed(each, num_tokens, block_size, is_causal=is_causal) for each in kept)
        for head in heads:
            found[head] = TileCount(block_size, raw, packed, pairs[head])
    return tuple(each for each in found if each is not None)


def _raw(kept: list[Kept], num_tokens: int, block_size: int, *, is_causal: bool) -> int:
    blocks = each_block([*(each.length for each in kept), block_size], num_tokens)
    return sum(times * _visited(kept, tokens, block_size, is_causal=is_causal) for tokens, times in blocks)


def _visited(kept: list[Kept], num_tokens: int, block_size: int, *, is_causal: bool) -> int:
    """Tiles of the union: per row of tiles, runs of columns, one for each segment that it touches."""
    runs = [_runs(each, num_tokens, block_size, is_causal=is_causal) for each in kept]
    row, first, last = (np.concatenate(columns) for columns in zip(*runs))
    if not len(row):
        return 0
    # All rows are laid out on one line, with a gap between them.
    pitch = -(-num_tokens // block_size) + 1
    start, end = row * pitch + first, row * pitch + last + 1
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    before = np.concatenate([[0], end[:-1]])
    return int(np.maximum(0, end - np.maximum(start, before)).sum())


def _runs(kept: Kept, num_tokens: int, block_size: int, *, is_causal: bool) -> tuple[Integers, Integers, Integers]:
    """`(row, first column, last column)` of tiles; no column between is without a kept token, since no rate exceeds a tile."""
    length, rate, offset = kept
    rows = -(-num_tokens // block_size)
    touched = rows + -(-num_tokens // length)
    if touched > MAX_ROWS:
        raise NotImplementedError(
            f"num_tokens must be such that at most {MAX_ROWS} rows of tiles and segments are looked at, got {num_tokens}; use "
            "segment lengths whose least common multiple with block_size is small, or a larger block_size"
        )
    # Whatever begins at the border of a tile or of a segment lies in one of each.
    begin = np.unique(np.concatenate([np.arange(0, num_tokens, block_size), np.arange(0, num_tokens, length)]))
    end = np.append(begin[1:], num_tokens)
    origin = begin // length * length + offset
    stop = np.minimum(begin // length * length + length, num_tokens)
    first = origin + np.maximum(0, -((origin - begin) // rate)) * rate
    newest = origin + (end - 1 - origin) // rate * rate
    last = newest if is_causal else origin + (stop - 1 - origin) // rate * rate
    holds = first < end
    return begin[holds] // block_size, origin[holds] // block_size, last[holds] // block_size


def _packed(kept: Kept, num_tokens: int, block_size: int, *, is_causal: bool) -> int:
    """Tiles of the kept rows of a branch, joined where they come from one segment."""
    length, rate, offset = kept
    whole, rest = divmod(num_tokens, length)
    rows = num_kept(length, rate, offset)
    if not rows:
        return 0
    return _raw([Kept(rows, 1, 0)], whole * rows + num_kept(rest, rate, offset), block_size, is_causal=is_causal)
