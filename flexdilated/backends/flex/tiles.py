"""Tiles for FlexAttention where those that torch takes by itself spill: by level of CUDA, head dim and size of an element.

By what the compiler makes of the kernels that inductor prints (`python -m benchmarks.lab.flex_cubins`), not by a GPU's word.
Torch's own choice stays where it spills no more than some tens of stores.
"""

from __future__ import annotations

import torch

from flexdilated.core.hardware import ON_ROCM, family_of


def _forward(queries: int, keys: int, num_warps: int, num_stages: int) -> dict[str, int]:
    options = {"BLOCK_M": queries, "BLOCK_N": keys, "num_warps": num_warps, "num_stages": num_stages}
    return {f"fwd_{name}": value for name, value in options.items()}


def _backward(queries: int, keys: int, num_warps: int, num_stages: int) -> dict[str, int]:
    """Tiles of the program that differentiates keys; the one that differentiates queries takes their sizes the other way round."""
    blocks = {"BLOCK_M1": queries, "BLOCK_N1": keys, "BLOCK_M2": keys, "BLOCK_N2": queries}
    options = {**blocks, "num_warps": num_warps, "num_stages": num_stages}
    return {f"bwd_{name}": value for name, value in options.items()}


# For rows of 64, up to 128, and up to 256 elements.
TILES: dict[int, tuple[dict[str, int], ...]] = {
    80: (_backward(32, 64, 4, 2), _backward(64, 64, 8, 2), _backward(32, 32, 8, 2)),
    # 99 KiB of shared memory, sm_89 and sm_120 too: torch's own tiles of 256 elements do not fit.
    86: (_backward(32, 64, 4, 2), _backward(64, 64, 8, 2), _forward(32, 64, 4, 2) | _backward(32, 32, 8, 2)),
    90: ({}, {}, _backward(32, 64, 8, 2)),
    100: (_forward(128, 64, 8, 3) | _backward(64, 128, 8, 3), _backward(64, 128, 8, 3), _backward(64, 64, 8, 1)),
}
# And under a function of scores, which takes registers of its own.
SCORED_TILES: dict[int, tuple[dict[str, int], ...]] = {
    80: (_forward(128, 64, 8, 3), {}, {}),
    86: (_forward(128, 64, 8, 3), {}, {}),
    90: (_forward(128, 64, 8, 3), _backward(32, 128, 8, 2), {}),
    100: ({}, {}, {}),
}

# Of four bytes, on every level: torch's forward tiles spill by the thousand, and from 128 elements on do not fit 99 KiB.
SINGLE_TILES = (_forward(64, 32, 8, 2), _forward(32, 32, 8, 2), _forward(16, 32, 8, 1))


def tiles_of(capability: tuple[int, int] | None, head_dim: int, dtype: torch.dtype, *, scored: bool) -> dict[str, int]:
    """Options of `flex_attention`'s kernels, with a function of scores or without; none where torch's own choice stays."""
    if capability is None or ON_ROCM or dtype.itemsize not in (2, 4) or not 64 <= head_dim <= 256:
        return {}
    size = 0 if head_dim == 64 else 1 if head_dim <= 128 else 2
    if dtype.itemsize == 4:
        return SINGLE_TILES[size]
    family = family_of(capability)
    return TILES[family][size] | (SCORED_TILES[family][size] if scored else {})
