"""Branches as grids of segments and rows, all of one size: what one graph needs to serve every number of tokens.

Pieces are exact boxes, and which boxes there are depends on every remainder of the number of tokens: each set needs a graph of its
own. In a grid the last segment is padded to the size of the others. A window is cut in blocks of queries, each with all keys of its
windows. Global tokens are the keys of every block and, without causality, the queries of one more block, whose keys are all others.
The sizes of a grid are sizes of an opaque operator's outputs: the compiler sees a new symbol, and need not reason about quotients
of the number of tokens. Portable programs hold no such operator: there, sizes are expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    """Indices of the rows of a tile. A lane is one key/value head in one block. Queries come in parts."""

    queries: Tensor  # (parts, L, M): the token of every query
    heads: Tensor  # (parts, L, M): the head of every query
    is_unread: Tensor  # (parts, L, M): whether the query is padding
    keys: Tensor  # (L, R): the token of every key
    kv_heads: Tensor  # (L, 1): the key/value head of every lane
    is_ignored: Tensor  # (L, R): whether the key is padding
    lanes: Tensor  # (N, H): the lane of every token of every head
    rows: Tensor  # (N, H): the index of that token's query in the lane, over all parts
    is_kept: Tensor  # (N, H): whether the head keeps the token, so that the query exists


class Tile(NamedTuple):
    """A branch, or a part of one, in blocks of queries: the keys of a block are its own tokens, those near it, or `keys`."""

    branch: int
    block: Segments
    apart: Near = NONE  # pairs that are left out
    window: Window | None = None
    keys: range | None = None  # positions of the keys of every block
    is_first: bool = False  # only the first block has queries

    def heads(self, pattern: DilatedPattern, kv_heads: int, within: range) -> range:
        """The key/value heads in `within`, a range of the model's heads, that run the branch."""
        heads = pattern.head_range(self.branch, kv_heads)
        return range(max(heads.start, within.start), min(heads.stop, within.stop))


def tiles(pattern: DilatedPattern, consumer: str, *, is_causal: bool) -> list[Tile]:
    """The tiles of a pattern. Blocks of a window: half its size, at least `LEAST_BLOCK` tokens."""
    segments, near = pattern.split(consumer)
    all_tiles = [Tile(i, block, near) for i, block in enumerate(segments)]
    for i, branch in enumerate(pattern.branches):
        if isinstance(branch, Window):
            block = Segments(max(LEAST_BLOCK, ceil_div(branch.size, 2)), 1)
            all_tiles.append(Tile(i, block, Near(global_tokens=near.global_tokens), window=branch))
        elif isinstance(branch, GlobalTokens):
            all_tiles.append(Tile(i, Segments(max(LEAST_BLOCK, branch.count), 1), keys=range(branch.count)))
            if not is_causal:
                all_tiles.append(Tile(i, Segments(branch.count, 1), keys=range(branch.count, LONGEST), is_first=True))
    return all_tiles


def locate(row: Tensor, first: Tensor, kept_rows: Kept, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The tokens of rows of segments that begin at `first`, and whether they are padding.

    Padding has some token of the same segment, as functions may expect.
    """
    last = (first + kept_rows.length).clamp(max=num_tokens) - 1
    first = first.minimum(last)  # in segments that are padding, whose rows are not read
    token = first + kept_rows.offset + row * kept_rows.rate
    return torch.where(token > last, first, token), token > last


def locate_keys(tile: Tile, row: Tensor, first: Tensor, kept_rows: Kept, num_tokens: int) -> tuple[Tensor, Tensor]:
    """`(tokens, is_padding)` of the keys of blocks that begin at `first`. Padding has an arbitrary token."""
    if tile.window is None and tile.keys is None:
        return locate(row, first, kept_rows, num_tokens)
    keys, token = (range(LONGEST), first + row) if tile.keys is None else (tile.keys, row.expand(first.shape[0], -1))
    return token.clamp(0, num_tokens - 1), (token < keys.start) | (token >= keys.stop) | (token >= num_tokens)


def draw_grids(
    pattern: DilatedPattern,
    num_tokens: int,
    kv_heads: int,
    within: range,
    group: int,
    is_causal: bool,
    parts: Sequence[int],
    device: torch.device,
) -> list[Grid]:
    """One grid per tile, for the key/value heads in `within`; the queries of tile `i` are split in `parts[i]` parts.

    To the compiler the grids are data: it traces no arithmetic of indices, and must not see that they are ranges. Inductor's
    loops over a quotient or remainder of a symbolic range leave out the last, incomplete round (torch 2.13, CPU).

    Raises:
        NotImplementedError: If torchscale's zero keys take part, as soon as the number of tokens is known.
    """
    heads = (kv_heads, within.start, len(within), group)
    indices = _grids_op(num_tokens, encode(pattern), heads, is_causal=is_causal, parts=parts, device=device)
    return [Grid(*indices[i : i + len(Grid._fields)]) for i in range(0, len(indices), len(Grid._fields))]


def _indices(
    new_size: Callable[[], Any] | None,
    num_tokens: int,
    encoded_pattern: Sequence[int],
    heads: Sequence[int],
    is_causal: bool,
    parts: Sequence[int],
    device: torch.device,
) -> list[Tensor]:
    """The fields of all grids, one after another; `new_size`: makes a symbol for a size that only the operator computes."""
    pattern, (kv_heads, first_head, num_held, group) = decode(encoded_pattern), heads
    if new_size is None and any(piece.zero_keys for piece in plan_pieces(pattern, ((0, num_tokens),), kv_heads, is_causal)):
        refuse_zero_keys(num_tokens)
    indices: list[Tensor] = []
    token, head = torch.arange(num_tokens, device=device)[:, None], torch.arange(num_held * group, device=device)
    for tile, count in zip(tiles(pattern, "grids", is_causal=is_causal), parts):
        run = tile.heads(pattern, kv_heads, range(first_head, first_head + num_held))
        if not run:
            continue
        if new_size is None:
            lanes, rows, first_key, keys = _size(tile, num_tokens, len(run), is_causal)
            width = max(LEAST, ceil_div(rows * group, count))
        else:
            lanes, width, first_key, keys = new_size(), new_size(), 0, new_size()
        (length, rate), lane = tile.block, torch.arange(lanes, device=device)[:, None]
        offsets = torch.cat([torch.full((1,), pattern.offset(tile.branch, i, kv_heads), device=device) for i in run])
        first, kept_rows = lane // len(run) * length, Kept(length, rate, offsets[lane % len(run)])
        query, kv_head = torch.arange(count * width, device=device), run.start - first_head + lane % len(run)
        places = (*locate(query // group, first, kept_rows, num_tokens), kv_head * group + query % group)
        queries, is_unread, query_head = (x.unflatten(1, (count, width)).transpose(0, 1).contiguous() for x in places)
        key, is_ignored = locate_keys(tile, first_key + torch.arange(keys, device=device), first, kept_rows, num_tokens)
        kv_head_of_query = head // group + first_head
        run_head = (kv_head_of_query - run.start).clamp(0, len(run) - 1)  # index among the heads that run this branch
        kept_rows = Kept(length, rate, offsets[run_head])
        lane, is_kept = token // length * len(run) + run_head, kept_rows.keeps(token) & (kv_head_of_query == run.start + run_head)
        if tile.is_first:
            lane, is_kept = run_head.repeat(num_tokens, 1), is_kept & (token < length)
        row = kept_rows.row(token) * group + head % group
        indices += [queries, query_head, is_unread, key.contiguous(), kv_head, is_ignored, lane, row, is_kept]
    return indices


_grids_op: Any = torch.library.custom_op(
    "flexdilated::grids",
    lambda *arguments: _indices(None, *arguments),
    mutates_args=(),
    schema="(SymInt num_tokens, SymInt[] pattern, SymInt[] heads, bool is_causal, SymInt[] parts, Device device) -> Tensor[]",
)


@_grids_op.register_fake
def _(*arguments: Any) -> list[Tensor]:
    symbol = partial(torch.library.get_ctx().new_dynamic_size, min=LEAST)
    return _indices(symbol if is_symbolic(arguments[0]) else None, *arguments)


def num_parts(
    pattern: DilatedPattern, batch: int, num_tokens: int, kv_heads: int, group: int, is_causal: bool, scores: int
) -> list[int]:
    """For each tile, in how many parts its queries must be split so that at most so many scores exist at the same time.

    With a symbolic number of tokens, each different result compiles a graph. So the result changes only where the largest number of
    parts passes a power of 4, and a symbolic batch counts as the next power of 4.
    """
    if torch.compiler.is_compiling() and is_symbolic(batch):
        bound = 4
        while batch > bound:
            bound *= 4
        batch = bound
    all_tiles = tiles(pattern, "grids", is_causal=is_causal)

    def parts_of(tokens: int) -> list[int]:
        runs = (len(pattern.head_range(tile.branch, kv_heads)) for tile in all_tiles)
        sizes = [_size(tile, tokens, heads, is_causal) for tile, heads in zip(all_tiles, runs)]
        return [min(ceil_div(batch * lanes * rows * group * keys, scores), rows * group // LEAST) for lanes, rows, _, keys in sizes]

    if not (torch.compiler.is_compiling() and is_symbolic(num_tokens)):
        return parts_of(num_tokens)
    tokens, parts = LEAST, [1] * len(all_tiles)
    while tokens < LONGEST:
        doubled = parts_of(2 * tokens)
        if _level(max(doubled)) > _level(max(parts)) and num_tokens <= tokens:
            break
        tokens, parts = 2 * tokens, doubled
    return parts


def _level(parts: int) -> int:
    """The smallest `n` with `parts <= 4 ** n`."""
    return (parts - 1).bit_length() + 1 >> 1


def _size(tile: Tile, num_tokens: int, num_kv_heads: int, is_causal: bool) -> tuple[int, int, int, int]:
    """Lanes of `num_kv_heads` key/value heads, rows of queries, the first row of keys, and the rows of keys of a tile's grid."""
    length, rate = tile.block
    lanes = max(LEAST, (1 if tile.is_first else ceil_div(num_tokens, length)) * num_kv_heads)
    rows = max(LEAST, ceil_div(min(length, num_tokens), rate))
    if tile.keys is not None:
        return lanes, rows, 0, max(LEAST, min(tile.keys.stop, num_tokens))
    low, high = (0, 0) if tile.window is None or num_tokens <= length else tile.window.band(is_causal=is_causal)
    return lanes, rows, max(low, -num_tokens), rows + min(high, num_tokens) - max(low, -num_tokens)
