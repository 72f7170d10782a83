"""What a pattern costs flex_attention in either layout, in plain integers: the choice between them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

from flexdilated.core.branch import Kept, ceil_div
from flexdilated.core.custom_op import decode, encode
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.pieces import Piece, plan_pieces
from flexdilated.core.tracing import answers_while_traced
from flexdilated.masks.blocks import HeadBranch, head_branches

Packing = Literal["packed", "fused"]
BLOCK = 128

# Estimates for a recent data-centre GPU, from its published rates at about half of their peak: a tile of 128 x 128 pairs takes
# 4 * 128 * 128 floating-point operations per element of the head at 400 TFLOP/s, memory moves 2 TB/s, a launch with its bookkeeping
# takes 20 us. They only need to resolve a factor of two.
TILE_PS_PER_ELEMENT = 164
KILOBYTE_PS = 500
LAUNCH_PS = 20_000_000


class Shape(NamedTuple):
    """The sizes of an attention call, as in `dilated_attention`, and the bytes of an element."""

    batch: int
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    element: int
    is_causal: bool


class Cost(NamedTuple):
    """Work of one forward.

    `tiles`: blocks of 128 x 128 pairs that are computed, over all heads. `launches`: kernel calls. `bytes`: memory
    traffic.
    """

    tiles: int
    launches: int
    bytes: int

    def picoseconds(self, head_dim: int) -> int:
        """The estimated time."""
        return self.tiles * head_dim * TILE_PS_PER_ELEMENT + self.launches * LAUNCH_PS + self.bytes * KILOBYTE_PS // 1000


def packed_cost(pattern: DilatedPattern, shape: Shape) -> Cost:
    """One kernel call per piece of the pattern, over its kept rows alone, and the merge of what they give."""
    group = shape.num_heads // shape.num_kv_heads
    pieces = plan_pieces(pattern, ((0, shape.num_tokens),), shape.num_kv_heads, shape.is_causal)
    tiles = moved = 0
    for piece in pieces:
        lanes = shape.batch * piece.offsets * piece.heads * group
        rows = piece.segments * piece.rows
        if is_one_sequence(piece):
            tiles += lanes * _diagonal_tiles(piece.rows, rows, piece.high == 0)
        else:
            tiles += lanes * piece.segments * _band_tiles(piece.rows, piece.keys, piece.low, piece.high)
        # q, k, v in, out to memory; then out in, and the running float32 mixture in and out.
        moved += lanes * rows * shape.head_dim * (5 * shape.element + 8)
    return Cost(tiles, len(pieces), moved)


def fused_cost(pattern: DilatedPattern, shape: Shape) -> Cost:
    """One kernel call over the raw layout. Tiles are at least those of a head's costliest branch, so many where segments nest."""
    tiles = 0
    for head in range(shape.num_kv_heads):
        branches = head_branches(pattern, head, shape.num_kv_heads, shape.num_tokens)
        tiles += max([0, *(_tiles(branch, shape.num_tokens, shape.is_causal) for branch in branches)])
    tiles *= shape.batch * (shape.num_heads // shape.num_kv_heads)
    return Cost(tiles, 1, 4 * shape.batch * shape.num_tokens * shape.num_heads * shape.head_dim * shape.element)


def choose_layout(pattern: DilatedPattern, shape: Shape) -> Packing:
    """The layout of the lower estimate."""
    return _choose_layout(tuple(shape), encode(pattern))


@answers_while_traced  # a compiler would trace loops over all blocks
def _choose_layout(sizes: tuple[Any, ...], encoded_pattern: list[int]) -> Packing:
    pattern, shape = decode(encoded_pattern), Shape(*sizes)
    packed, fused = packed_cost(pattern, shape), fused_cost(pattern, shape)
    return "fused" if fused.picoseconds(shape.head_dim) < packed.picoseconds(shape.head_dim) else "packed"


def is_one_sequence(piece: Piece) -> bool:
    """Whether all segments are one long sequence under a block-diagonal mask: their rows follow one another at one distance."""
    is_affine = piece.segments == 1 or piece.segment_stride == piece.rows * piece.row_stride
    return is_affine and piece.rows == piece.keys and not piece.is_banded


@lru_cache(maxsize=256)
def _tiles(branch: HeadBranch, rows: int, is_causal: bool) -> int:
    """Tiles that a branch touches in a sequence of `rows`; 0 for a rate above a block."""
    if isinstance(branch, Kept):
        return _diagonal_tiles(branch.length, rows, is_causal) if branch.rate <= BLOCK else 0
    blocks, first = ceil_div(rows, BLOCK), ceil_div(min(branch.global_tokens, rows), BLOCK)
    tiles = _band_tiles(rows, rows, 1 - branch.window, 0 if is_causal else branch.window - 1) if branch.window else 0
    return tiles + (first * blocks - first * (first - 1) // 2 if is_causal else first * (2 * blocks - first))


@lru_cache(maxsize=256)
def _band_tiles(rows: int, keys: int, low: int, high: int) -> int:
    """Tiles that a band touches between a sequence of `rows` queries and one of `keys` keys."""
    tiles = 0
    for start in range(0, rows, BLOCK):
        last = min(start + BLOCK, rows) - 1
        tiles += max(0, min(last + high, keys - 1) // BLOCK - max(0, start + low) // BLOCK + 1)
    return tiles


@lru_cache(maxsize=256)
def _diagonal_tiles(segment: int, rows: int, is_causal: bool) -> int:
    """Tiles that segments of so many rows touch on and around the diagonal of a sequence of `rows`."""
    tiles = 0
    for start in range(0, rows, BLOCK):
        end = min(start + BLOCK, rows)
        first = start // segment * segment
        last = end - 1 if is_causal else min(rows, ((end - 1) // segment + 1) * segment) - 1
        tiles += last // BLOCK - first // BLOCK + 1
    return tiles
