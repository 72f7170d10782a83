"""Branches as grids of segments and rows, all of one size: what one graph needs to serve every number of tokens.

Pieces are exact boxes, and which boxes there are depends on every remainder of the number of tokens: each set needs a graph of its
own. In a grid the last segment is padded to the size of the others. A window is cut in blocks of queries, each with all keys of its
windows. Global tokens are the keys of every block and, without causality, the queries of one more block, whose keys are all others.
The sizes of a grid are sizes of an opaque operator's outputs: the compiler sees a new symbol, and need not reason about quotients
of the number of tokens. Portable programs hold no such operator: there, sizes are expressions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexdilated.core.branch import NONE, GlobalTokens, Kept, Near, Segments, Window, ceil_div
from flexdilated.core.checks import refuse_zero_keys
from flexdilated.core.custom_op import decode, encode
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.pieces import plan_pieces
from flexdilated.core.tracing import is_symbolic

LEAST = 2  # rows and segments: with 1, the compiler would ask of every size whether it broadcasts
LEAST_BLOCK = 64  # queries of a window
LONGEST = 1 << 40  # tokens


class Grid(NamedTuple):
    """Indices of the rows of a branch. A lane is one key/value head in one segment."""

    lanes: Tensor  # (L,): `segment * heads of the branch + head`
    queries: Tensor  # (parts, M): `row * group + query head of the group` of every query, a part of them at a time
    keys: Tensor  # (R,): rows, or tokens of `Tile.keys`; for a window also rows before the block (below 0) and after it


class Tile(NamedTuple):
    """A branch, or a part of one, in blocks of queries: the keys of a block are its own tokens, those near it, or `keys`."""

    branch: int
    block: Segments
    apart: Near = NONE  # pairs that are left out
    window: Window | None = None
    keys: range | None = None  # positions of the keys of every block
    is_first: bool = False  # only the first block has queries


def tiles(pattern: DilatedPattern, consumer: str, *, is_causal: bool) -> list[Tile]:
    """The tiles of a pattern. Blocks of a window: half its size, at least `LEAST_BLOCK` tokens."""
    segments, near = pattern.split(consumer)
    found = [Tile(i, block, near) for i, block in enumerate(segments)]
    for i, branch in enumerate(pattern.branches):
        if isinstance(branch, Window):
            block = Segments(max(LEAST_BLOCK, ceil_div(branch.size, 2)), 1)
            found.append(Tile(i, block, Near(global_tokens=near.global_tokens), window=branch))
        elif isinstance(branch, GlobalTokens):
            found.append(Tile(i, Segments(max(LEAST_BLOCK, branch.count), 1), keys=range(branch.count)))
            if not is_causal:
                found.append(Tile(i, Segments(branch.count, 1), keys=range(branch.count, LONGEST), is_first=True))
    return found


def locate(row: Tensor, first: Tensor, kept: Kept, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The tokens of rows of segments that begin at `first`, and whether they are padding.

    Padding has some token of the same segment, as functions may expect.
    """
    last = (first + kept.length).clamp(max=num_tokens) - 1
    first = first.minimum(last)  # of segments that are padding; none of their rows is read
    token = first + kept.offset + row * kept.rate
    return torch.where(token > last, first, token), token > last


def locate_keys(tile: Tile, row: Tensor, first: Tensor, kept: Kept, num_tokens: int) -> tuple[Tensor, Tensor]:
    """`(tokens, is_padding)` of the keys of blocks that begin at `first`. Padding has an arbitrary token."""
    if tile.window is None and tile.keys is None:
        return locate(row, first, kept, num_tokens)
    keys, token = (range(LONGEST), first + row) if tile.keys is None else (tile.keys, row.expand(first.shape[0], -1))
    return token.clamp(0, num_tokens - 1), (token < keys.start) | (token >= keys.stop) | (token >= num_tokens)


def draw_grids(
    pattern: DilatedPattern,
    num_tokens: int,
    kv_heads: int,
    group: int,
    is_causal: bool,
    parts: Sequence[int],
    device: torch.device,
) -> tuple[Tensor, list[Grid]]:
    """The tokens `(N,)`, and one grid per tile; the queries of tile `i` are split in `parts[i]` parts.

    All of them are data to the compiler. It must not see that they are ranges: inductor's loops over a quotient or remainder of a
    symbolic range leave out the last, incomplete round (torch 2.13, CPU).

    Raises:
        NotImplementedError: If torchscale's zero keys take part, as soon as the number of tokens is known.
    """
    tokens, *ranges = _grids_op(num_tokens, encode(pattern), kv_heads, group=group, is_causal=is_causal, parts=parts, device=device)
    return tokens, [Grid(*ranges[i : i + 3]) for i in range(0, len(ranges), 3)]


@torch.library.custom_op("flexdilated::grids", mutates_args=())
def _grids_op(
    num_tokens: int,
    encoded_pattern: Sequence[int],
    kv_heads: int,
    group: int,
    is_causal: bool,
    parts: Sequence[int],
    device: torch.device,
) -> list[Tensor]:
    pattern = decode(encoded_pattern)
    if any(piece.zero_keys for piece in plan_pieces(pattern, ((0, num_tokens),), kv_heads, is_causal)):
        refuse_zero_keys(num_tokens)
    ranges = [torch.arange(num_tokens, device=device)]
    for tile, count in zip(tiles(pattern, "grids", is_causal=is_causal), parts):
        lanes, rows, keys = _size(pattern, tile, num_tokens, kv_heads, is_causal)
        width = max(LEAST, ceil_div(rows * group, count))
        queries = torch.arange(count * width, device=device).view(count, width)
        ranges += [torch.arange(lanes, device=device), queries, torch.arange(keys.start, keys.stop, device=device)]
    return ranges


@_grids_op.register_fake
def _(num_tokens: int, *options: Any) -> list[Tensor]:
    *_, parts, device = options
    ctx = torch.library.get_ctx()
    shapes: list[tuple[Any, ...]] = [(num_tokens,)]
    for count in parts:
        lanes, width, keys = (ctx.new_dynamic_size(min=LEAST) for _ in range(3))
        shapes += [(lanes,), (count, width), (keys,)]
    return [torch.empty(shape, dtype=torch.int64, device=device) for shape in shapes]


def num_parts(
    pattern: DilatedPattern, batch: int, num_tokens: int, kv_heads: int, group: int, is_causal: bool, scores: int
) -> list[int]:
    """For each tile, in how many parts its queries must be split so that at most so many scores exist at the same time.

    Each answer is a graph. One holds for every number of tokens in which no tile has more parts than some power of 4, and
    for every batch up to some power of 4 where that is a symbol too.
    """
    if torch.compiler.is_compiling() and is_symbolic(batch):
        bound = 4
        while batch > bound:
            bound *= 4
        batch = bound
    all_tiles = tiles(pattern, "grids", is_causal=is_causal)
    tokens, parts = LEAST, [1] * len(all_tiles)
    while tokens < LONGEST:
        sizes = [_size(pattern, tile, 2 * tokens, kv_heads, is_causal) for tile in all_tiles]
        doubled = [
            min(ceil_div(batch * lanes * rows * group * len(keys), scores), rows * group // LEAST) for lanes, rows, keys in sizes
        ]
        if _level(max(doubled)) > _level(max(parts)) and num_tokens <= tokens:
            break
        tokens, parts = 2 * tokens, doubled
    return parts


def _level(parts: int) -> int:
    """The smallest `n` with `parts <= 4 ** n`."""
    return (parts - 1).bit_length() + 1 >> 1


def _size(pattern: DilatedPattern, tile: Tile, num_tokens: int, kv_heads: int, is_causal: bool) -> tuple[int, int, range]:
    """Lanes, rows of queries, and the rows of keys of a tile's grid."""
    length, rate = tile.block
    lanes = (1 if tile.is_first else ceil_div(num_tokens, length)) * len(pattern.head_range(tile.branch, kv_heads))
    rows = max(LEAST, ceil_div(min(length, num_tokens), rate))
    if tile.keys is not None:
        return max(LEAST, lanes), rows, range(max(LEAST, min(tile.keys.stop, num_tokens)))
    low, high = (0, 0) if tile.window is None or num_tokens <= length else tile.window.band(is_causal=is_causal)
    return max(LEAST, lanes), rows, range(max(low, -num_tokens), rows + min(high, num_tokens))
