"""The tiles of a pattern, by a look at every pair."""

import numpy as np
from numpy.typing import NDArray

from flexdilated import DilatedPattern
from flexdilated.draw.tiles import Tally
from tests.analysis.definition import joined_by


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
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, head: int, block_size: int, is_causal: bool
) -> tuple[Tally, NDArray[np.bool_], NDArray[np.bool_]]:
    """Looks at every pair of the sequence, and of the kept rows of every branch."""
    joined = joined_by(pattern, num_tokens, num_kv_heads, is_causal=is_causal)[:, head]
    kept = [np.flatnonzero(each.diagonal()) for each in joined]
    packed = sum(int(tiles_of(each[np.ix_(rows, rows)], block_size)[0].sum()) for each, rows in zip(joined, kept))
    visited, full = tiles_of(joined.any(axis=0), block_size)
    return Tally(block_size, visited.size, int((visited & ~full).sum()), int(full.sum()), packed, int(joined.sum())), visited, full
