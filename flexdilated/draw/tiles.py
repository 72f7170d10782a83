"""The tiles of a pattern's FlexAttention block mask: those visited per head, and the share of useful pairs in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexdilated.core.branch import Kept, Near
from flexdilated.core.pattern import DilatedPattern
from flexdilated.masks.blocks import BlockLists, HeadBranch, block_lists, head_branches


class Cell(IntEnum):
    """State of the tiles of a cell of the picture. A cell of a single tile is never `UNDER_HALF` or `OVER_HALF`."""

    FUTURE = 0
    NONE = 1
    UNDER_HALF = 2
    OVER_HALF = 3
    VISITED = 4
    FULL = 5


class Tally(NamedTuple):
    """Tiles and pairs of one head or more."""

    block_size: int
    tiles: int  # there are, visited or not
    partial: int  # visited by the raw mask, over the sequence as it is
    full: int
    packed: int  # visited by the packed masks, one per branch over its kept rows
    pairs: int  # useful ones: `DilatedPattern.count_pairs`

    @property
    def density(self) -> str:
        """The share of all tiles that the raw mask visits."""
        return f"{100 * (self.partial + self.full) / self.tiles:.3g} %"

    @property
    def waste_raw(self) -> str:
        """Pairs in visited tiles per useful pair."""
        return self._waste(self.partial + self.full)

    @property
    def waste_packed(self) -> str:
        """As `waste_raw`, for the packed masks."""
        return self._waste(self.packed)

    def _waste(self, visited: int) -> str:
        if not self.pairs:
            return "-"
        waste = visited * self.block_size**2 / self.pairs
        return f"{waste:.2f}" if waste < 100 else f"{waste:,.0f}"


class HeadTiles(NamedTuple):
    """The tiles of heads that visit the same number of tiles and look the same."""

    heads: tuple[int, ...]
    tally: Tally  # of each head
    cells: NDArray[np.int64]  # (rows, columns) of `Cell`


def head_tiles(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, block_size: int, group: int, *, is_causal: bool = False
) -> list[HeadTiles]:
    """The tiles of `block_size x block_size` pairs that FlexAttention visits, once for heads with equal pictures and numbers.

    The raw mask is that of `create_dilated_block_mask`. Packed, the kept rows of all segments of a branch follow one another, and
    two of them are joined if they come from one segment: a block-diagonal mask per branch, which visits near pairs too. A window
    and global tokens keep the sequence as it is. Zero keys of `zero_padding` are not counted, since a mask cannot hold them.

    Args:
        pattern, num_tokens, num_kv_heads, is_causal: As in `flexdilated.draw.pattern.draw`.
        block_size: Tokens per side of a tile.
        group: Tiles per side of a cell of the picture.
    """
    near = pattern.split("pictures of block masks")[1]
    looks: dict[tuple[Kept, ...], tuple[Tally, NDArray[np.int64]]] = {}
    groups: dict[tuple[object, ...], tuple[list[int], Tally, NDArray[np.int64]]] = {}
    for head in range(num_kv_heads):
        branches = pattern.kept(head, num_kv_heads, "pictures of block masks")
        if branches not in looks:
            distinct = head_branches(pattern, head, num_kv_heads, num_tokens)
            looks[branches] = _look(branches, near, distinct, num_tokens, block_size, group=group, is_causal=is_causal)
        tally, cells = looks[branches]
        look = (*((length, rate) for length, rate, _ in branches), tally, cells.tobytes())
        groups.setdefault(look, ([], tally, cells))[0].append(head)
    return [HeadTiles(tuple(heads), tally, cells) for heads, tally, cells in groups.values()]


def _look(
    branches: Sequence[Kept],
    near: Near,
    distinct: tuple[HeadBranch, ...],
    num_tokens: int,
    block_size: int,
    group: int,
    is_causal: bool,
) -> tuple[Tally, NDArray[np.int64]]:
    """Numbers and cells of one head. Equal branches count once in the raw mask, and once each in the packed masks."""
    raw = _lists(distinct, num_tokens, block_size, is_causal)
    near_masks = [(kind, num_tokens) for kind in (Near(near.window), Near(0, min(near.global_tokens, num_tokens))) if kind]
    masks = [*_packed_rows(branches, num_tokens), *near_masks]
    tally = Tally(
        block_size=block_size,
        tiles=len(raw.partial_counts) ** 2,
        partial=int(raw.partial_counts.sum()),
        full=int(raw.full_counts.sum()),
        packed=sum(_packed(branch, rows, block_size, is_causal) for branch, rows in masks),
        pairs=sum(branch.count_pairs(num_tokens, is_causal=is_causal, near=near) for branch in branches)
        + near.count_pairs(num_tokens, is_causal=is_causal),
    )
    return tally, _cells(raw, group, is_causal)


def _lists(branches: tuple[HeadBranch, ...], num_rows: int, block_size: int, is_causal: bool) -> BlockLists:
    return block_lists(branches, num_rows, block_size, block_size, "before" if is_causal else "any")


def _packed_rows(branches: Sequence[Kept], num_tokens: int) -> Iterator[tuple[Kept, int]]:
    """For each branch that keeps a row: the branch over its kept rows, and their number; the last segment may be shorter."""
    for branch in branches:
        segment = min(branch.length, num_tokens)
        num_whole, last_length = divmod(num_tokens, segment)
        rows = branch.rows(segment)
        if rows:
            yield Kept(rows, 1, 0), num_whole * rows + branch.rows(last_length)


@lru_cache(maxsize=64)
def _packed(branch: HeadBranch, rows: int, block_size: int, is_causal: bool) -> int:
    """Visited tiles of a branch over so many rows."""
    lists = _lists((branch,), rows, block_size, is_causal)
    return int(lists.partial_counts.sum()) + int(lists.full_counts.sum())


def _cells(lists: BlockLists, group: int, is_causal: bool) -> NDArray[np.int64]:
    tiles = len(lists.partial_counts)
    full = _gather(lists.full_counts, lists.full_indices, group)
    visited = full + _gather(lists.partial_counts, lists.partial_indices, group)
    size = np.minimum(group, tiles - np.arange(0, tiles, group))
    present = size[:, None] * size
    if is_causal:
        present = np.tril(present, k=-1) + np.diag(size * (size + 1) // 2)
    # The first that holds.
    conditions = [present == 0, visited == 0, full == present, visited == present, 2 * visited >= present]
    return np.select(conditions, [Cell.FUTURE, Cell.NONE, Cell.FULL, Cell.VISITED, Cell.OVER_HALF], Cell.UNDER_HALF)


def _gather(counts: Tensor, indices: Tensor, group: int) -> NDArray[np.int64]:
    """The number of listed tiles in each cell. One row of cells at a time: the lists of a dense mask are long."""
    cells = -(-len(counts) // group)
    place = torch.arange(indices.shape[1])
    rows = []
    for start in range(0, len(counts), group):
        is_listed = place < counts[start : start + group, None]
        rows.append(torch.bincount(indices[start : start + group][is_listed] // group, minlength=cells))
    return torch.stack(rows).numpy()


def all_heads(groups: Sequence[HeadTiles]) -> Tally:
    """The sum over all heads."""

    def total(name: str) -> int:
        return sum(len(group.heads) * getattr(group.tally, name) for group in groups)

    return Tally(groups[0].tally.block_size, *(total(name) for name in Tally._fields[1:]))
