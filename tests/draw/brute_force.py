"""The tiles of a pattern, by a look at every pair."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexdilated import DilatedPattern
from flexdilated.draw.tiles import Tally


def branches_of(pattern: DilatedPattern, head: int, num_heads: int) -> list[tuple[int, int, int]]:
    return [
        (length, rate, pattern.offset(i, head, num_heads))
        for i, (length, rate) in enumerate(pattern.branches)
        if head in pattern.head_range(i, num_heads)
    ]


def is_joined(q: int, k: int, length: int, rate: int, offset: int, is_causal: bool) -> bool:
    is_kept = q % length % rate == offset and k % length % rate == offset
    return is_kept and q // length == k // length and not (is_causal and k > q)


def tiles_of(joined: NDArray[np.bool_], block_size: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tiles hold a joined pair, and which hold nothing else."""
    size = -(-len(joined) // block_size)
    visited, full = (np.zeros((size, size), dtype=bool) for _ in range(2))
    for i, j in np.ndindex(size, size):
        tile = joined[i * block_size : (i + 1) * block_size, j * block_size : (j + 1) * block_size]
        visited[i, j] = tile.any()
        full[i, j] = tile.sum() == block_size**2
    return visited, full


def brute_force(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, head: int, block_size: int, is_causal: bool
) -> tuple[Tally, NDArray[np.bool_], NDArray[np.bool_]]:
    """Looks at every pair of the sequence, and of the kept rows of every branch."""
    raw = np.zeros((num_tokens, num_tokens), dtype=bool)
    packed = pairs = 0
    for branch in branches_of(pattern, head, num_heads):
        joined = np.zeros_like(raw)
        for q, k in np.ndindex(raw.shape):
            joined[q, k] = is_joined(q, k, *branch, is_causal)
        kept = [p for p in range(num_tokens) if is_joined(p, p, *branch, is_causal)]
        raw |= joined
        packed += int(tiles_of(joined[np.ix_(kept, kept)], block_size)[0].sum())
        pairs += int(joined.sum())
    visited, full = tiles_of(raw, block_size)
    return Tally(block_size, visited.size, int((visited & ~full).sum()), int(full.sum()), packed, pairs), visited, full
