"""Tiles, warps and stages of every kernel, by level of CUDA, head dim and size of an element."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Tiles", "padded", "tiles_of"]


class Tiles(NamedTuple):
    """Queries and keys that a program takes at once, its warps, and how many tiles it loads ahead."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def padded(head_dim: int) -> int:
    """Elements of a row as the kernels hold it: a power of two, as tensor cores take it."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tiles_of(kernel: str, level: tuple[int, int], head_dim: int, element: int) -> Tiles:
    """The tiles of a kernel: `"attend"`, `"differentiate_keys"`, `"differentiate_queries"` or `"prepare"`."""
    return Tiles(64, 64, 4, 2)
