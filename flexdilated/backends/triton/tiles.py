"""Tiles, warps and stages of every kernel, by level of CUDA, head dim and size of an element.

On sm_90 in 16 bits, most entries were the fastest on an H200 (`python -m benchmarks.tiles`, `docs/gpu-kernels.md`). The others were
chosen by what the compiler makes of them (`nox -s cubins`): large tiles that fit shared memory and spill nothing that matters.
"""

from __future__ import annotations

from typing import NamedTuple

from flexdilated.core.hardware import family_of


class TileConfig(NamedTuple):
    """Queries and keys per tile, warps, number of stages, whether descriptors load tiles, and whether the host makes those."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    described: bool = False
    host: bool = False


# Per kernel and family: for rows of up to 64, 128 and 256 elements. sm_86 stands for what has 99 KiB of shared memory.
HALF = {
    "attend": {
        80: (TileConfig(128, 64, 8, 3), TileConfig(64, 64, 4, 3), TileConfig(64, 32, 8, 2)),
        86: (TileConfig(128, 64, 8, 3), TileConfig(64, 64, 8, 2), TileConfig(64, 32, 8, 2)),
        90: (TileConfig(64, 64, 4, 3), TileConfig(128, 128, 8, 3), TileConfig(128, 32, 8, 2)),
        100: (TileConfig(128, 64, 8, 3), TileConfig(128, 64, 8, 3), TileConfig(64, 64, 8, 2)),
    },
    "differentiate_keys": {
        80: (TileConfig(32, 128, 8, 2), TileConfig(32, 64, 8, 2), TileConfig(32, 32, 8, 2)),
        86: (TileConfig(32, 128, 8, 2), TileConfig(32, 64, 8, 2), TileConfig(32, 32, 8, 1)),
        90: (TileConfig(32, 64, 4, 3), TileConfig(32, 128, 8, 3), TileConfig(32, 64, 8, 2)),
        100: (TileConfig(64, 128, 8, 2), TileConfig(64, 128, 8, 2), TileConfig(32, 64, 8, 2)),
    },
    "differentiate_queries": {
        80: (TileConfig(64, 64, 8, 2), TileConfig(64, 64, 8, 2), TileConfig(32, 32, 8, 2)),
        86: (TileConfig(64, 64, 8, 2), TileConfig(64, 32, 8, 2), TileConfig(32, 32, 8, 1)),
        90: (TileConfig(128, 64, 8, 3), TileConfig(128, 64, 8, 3), TileConfig(128, 32, 8, 2)),
        100: (TileConfig(128, 64, 8, 2), TileConfig(128, 64, 8, 2), TileConfig(64, 32, 8, 2)),
    },
}
# Instead, where rows of 128 elements and more are loaded by tensor descriptors; below, pointers are as fast or faster.
DESCRIBED: dict[str, dict[int, tuple[TileConfig | None, ...]]] = {
    "attend": {90: (None, TileConfig(64, 64, 4, 3, described=True), TileConfig(128, 32, 8, 2, described=True))},
    "differentiate_keys": {90: (None, TileConfig(64, 64, 4, 2, described=True), None)},
    "differentiate_queries": {90: (None, TileConfig(128, 64, 8, 3, described=True), TileConfig(128, 32, 8, 2, described=True))},
}
MOST_AHEAD = 128  # head dim of `launch.AHEAD`: longer rows spill
MOST_SUMS = 64  # head dim of `launch.SUMS`: above, one kernel takes more instructions than two, or spills in its loops
ROW_BYTES = 16  # what one load takes: descriptors want every row to begin at a multiple, and to be one long
LEAST_DESCRIBED_ROWS = 512  # in a segment, for a program to be worth its descriptors
# Where `launch.HOSTS` or `launch.SUMS` asks for forms that no GPU has run.
UNMEASURED = {
    "attend": (TileConfig(64, 128, 4, 2, True, True), TileConfig(128, 128, 8, 2, True, True), TileConfig(64, 64, 4, 2, True, True)),
    "differentiate_keys": (TileConfig(64, 128, 8, 2, True),),
}
# Of "attend" where `launch.LONG` is on, in 16 bits: for rows of up to 64 and 128 elements.
LONGER = (TileConfig(64, 128, 4, 3), TileConfig(128, 128, 8, 3))
# Where `launch.AHEAD` asks for such a form: tiles at which ptxas moves no wait before `exp2`, and nothing spills.
AHEAD = (TileConfig(64, 64, 4, 3), TileConfig(128, 64, 8, 3))
# Without tensor cores: float32 that is not rounded to TensorFloat-32. The same everywhere.
SINGLE = {
    "attend": (TileConfig(64, 32, 8, 2), TileConfig(32, 16, 8, 2), TileConfig(16, 32, 8, 1)),
    "differentiate_keys": (TileConfig(32, 32, 8, 2), TileConfig(16, 32, 8, 1), TileConfig(16, 16, 8, 1)),
    "differentiate_queries": (TileConfig(32, 32, 8, 2), TileConfig(32, 16, 8, 1), TileConfig(16, 16, 8, 1)),
}
PREPARE = TileConfig(64, 64, 4, 1)  # one pass over rows: memory decides


def padded(head_dim: int) -> int:
    """Elements of a row as the kernels hold it: a power of two, as tensor cores take it."""
    return max(16, 1 << (head_dim - 1).bit_length())


def is_aligned(head_dim: int, element: int) -> bool:
    """Whether rows of so many elements of so many bytes are whole units of what one load takes."""
    return head_dim * element % ROW_BYTES == 0


def tiles_of(
    kernel: str, level: tuple[int, int], head_dim: int, element: int, *, described_rows: int = 0, group: int = 1
) -> TileConfig:
    """The tiles of a kernel: `"attend"`, `"differentiate_keys"`, `"differentiate_queries"`, `"prepare"` or `"join_rows"`.

    `described_rows`: rows of a segment, where tensor descriptors can load them. `group`: query heads that share a key head.
    """
    if kernel in ("prepare", "join_rows"):
        return PREPARE
    size = _size(head_dim)
    if element > 2:
        return SINGLE[kernel][size]
    # Others take registers of their own: the tiles of a smaller level.
    family = family_of(level) if is_aligned(head_dim, element) or level < (9, 0) else 80
    if kernel == "differentiate_keys" and group > 1:  # by descriptors it spills in its loops, and has not run since its fix
        described_rows = 0
    described = DESCRIBED[kernel].get(family, (None, None, None))[size] if described_rows >= LEAST_DESCRIBED_ROWS else None
    return HALF[kernel][family][size] if described is None else described


def unmeasured_tiles(kernel: str, head_dim: int, element: int) -> TileConfig:
    """The tiles of `"attend"` by descriptors of the host, or of `"differentiate_keys"` that adds to dq too."""
    if element > 2:
        return SINGLE[kernel][_size(head_dim)]._replace(described=True, host=kernel == "attend")
    return UNMEASURED[kernel][_size(head_dim)]


def longer(tiles: TileConfig, head_dim: int, element: int) -> TileConfig:
    """The tiles of `"attend"` with more keys, loaded as `tiles` are; `tiles` where there are none."""
    if element > 2 or _size(head_dim) >= len(LONGER):
        return tiles
    return LONGER[_size(head_dim)]._replace(described=tiles.described, host=tiles.host)


def ahead_tiles(head_dim: int, element: int) -> TileConfig:
    """The tiles of `"attend"` with products ahead of the softmax."""
    return (SINGLE["attend"] if element > 2 else AHEAD)[_size(head_dim)]


def _size(head_dim: int) -> int:
    """The index of a head dim in a row of the tables: 0 up to 64, 1 up to 128, 2 up to 256."""
    return max(0, padded(head_dim).bit_length() - 7)
