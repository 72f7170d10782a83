"""What each backend for GPUs computes, moves and launches, on the pieces of a pattern.

Every tensor that a launch is given moves once: what caches save or cost is left out. A kernel of a library, or an operation of
torch, counts as one launch, whatever it launches inside. The tensors are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from flexdilated.backends.flex.cost import BLOCK, Shape, fused_cost, is_one_sequence
from flexdilated.backends.kernel import GRID_LIMIT
from flexdilated.backends.triton.groups import together
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.pieces import Piece, plan_pieces
from flexdilated.core.slabs import StridedLayout, layouts, slabs_of

LSE = 4  # bytes of a log-sum-exp, and of whatever else is float32
FORWARD_PRODUCTS, BACKWARD_PRODUCTS, SPLIT_BACKWARD_PRODUCTS = 2, 5, 7  # of the matrix products per pair; 2 D operations each


class Step(NamedTuple):
    """One launch, or several that are alike in what bounds them."""

    flops: int
    bytes: int
    launches: int = 1


class _Rows(NamedTuple):
    """A piece in numbers: rows of queries and of keys, their elements, and the pairs that it scores."""

    piece: Piece
    shape: Shape

    @property
    def group(self) -> int:
        return group_of(self.shape)

    @property
    def keys(self) -> int:
        piece = self.piece
        return self.shape.batch * piece.segments * piece.offsets * piece.heads * piece.rows

    @property
    def queries(self) -> int:
        return self.keys * self.group

    @property
    def q(self) -> int:
        """Bytes of the queries."""
        return self.queries * self.shape.head_dim * self.shape.element

    @property
    def k(self) -> int:
        return self.keys * self.shape.head_dim * self.shape.element

    @property
    def lse(self) -> int:
        return self.queries * LSE

    @property
    def pairs(self) -> int:
        rows = self.piece.rows
        return self.queries * (rows + 1) // 2 if self.shape.is_causal else self.queries * rows

    def flops(self, products: int) -> int:
        return 2 * products * self.shape.head_dim * self.pairs

    def sizes(self, group: int) -> tuple[int, ...]:
        """Of the box `b s o h g r`."""
        piece = self.piece
        return (self.shape.batch, piece.segments, piece.offsets, piece.heads, group, piece.rows)

    def strides(self, group: int, token: int, head: int, batch: int) -> tuple[int, ...]:
        """Of the box in a tensor with these distances of tokens, heads and sequences."""
        piece = self.piece
        step = head * group
        inner = token + piece.offset_head_step * step
        return (batch, piece.segment_stride * token, inner, piece.head_step * step, head, piece.row_stride * token)


def group_of(shape: Shape) -> int:
    return shape.num_heads // shape.num_kv_heads


def _rows(pattern: DilatedPattern, shape: Shape) -> Iterator[_Rows]:
    if pattern.zero_padding or pattern.detach_weights:
        raise ValueError(
            f"pattern must have zero_padding=False and detach_weights=False to be modelled, got {pattern.zero_padding} and "
            f"{pattern.detach_weights}; use dataclasses.replace(pattern, zero_padding=False, detach_weights=False)"
        )
    for piece in plan_pieces(pattern, ((0, shape.num_tokens),), shape.num_kv_heads, shape.is_causal):
        yield _Rows(piece, shape)


def _merges(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether dims are one dim of a view."""
    dims = [(size, stride) for size, stride in zip(sizes, strides) if size > 1]
    return all(stride == size * inner for (_, stride), (size, inner) in pairwise(dims))


def _parts(pattern: DilatedPattern, shape: Shape) -> Iterator[tuple[_Rows, StridedLayout, StridedLayout | None]]:
    """The parts of pieces that dense kernels are given as views, and the layouts of queries and lse there."""
    pieces = tuple(rows.piece for rows in _rows(pattern, shape))
    batch, tokens, heads, width = shape.batch, shape.num_tokens, shape.num_heads, shape.head_dim
    group = group_of(shape)
    slabs = slabs_of(pieces, batch, tokens, group, GRID_LIMIT, packed=0, offsets_apart=group > 1)
    queries = layouts(slabs, (batch, tokens, heads, width), (tokens * heads * width, heads * width, width, 1), group)
    lses = layouts(slabs, (batch, tokens, heads, 1), (heads * tokens, 1, tokens, 1), group)
    for piece, part, (_, of_q, _), (_, of_lse, _) in zip(slabs.pieces, slabs.parts, queries, lses):
        counts = (len(range(n)[selected]) for n, selected in zip((batch, piece.segments, piece.offsets, piece.heads), part))
        part_batch, segments, offsets, kv_heads = counts
        part_piece = piece._replace(segments=segments, offsets=offsets, heads=kv_heads)
        assert of_q is not None
        yield _Rows(part_piece, shape._replace(batch=part_batch)), of_q, of_lse


def _copies(*sizes: int) -> Iterator[Step]:
    """Copies of tensors of so many bytes."""
    for size in sizes:
        yield Step(0, 2 * size)


def _starts(pattern: DilatedPattern, *sizes: int) -> Iterator[Step]:
    """Fills of tensors that the first pieces do not write as a whole."""
    if not (1 in pattern.dilation_rates and pattern.heads == "all"):
        for size in sizes:
            yield Step(0, size)


def _tensor_bytes(shape: Shape) -> tuple[int, int, int]:
    """Bytes of q, k and lse."""
    tokens = shape.batch * shape.num_tokens
    width = shape.head_dim * shape.element
    return tokens * shape.num_heads * width, tokens * shape.num_kv_heads * width, tokens * shape.num_heads * LSE


class Library(NamedTuple):
    """What a kernel costs beside its own work."""

    shares_kv: bool
    contiguous_backward: bool  # whether out and dout are copied to lie as `(lanes, rows, heads, D)`
    seeds: int = 0  # bytes of what stands for a seed of dropout backward
    contiguous_lse: bool = True  # whether lse is copied to lie so in the backward
    writes: bool = False  # whether it writes the first branch where it belongs


FLASH = Library(shares_kv=True, contiguous_backward=True, seeds=16)
CUDNN = Library(shares_kv=False, contiguous_backward=False, seeds=8)
EFFICIENT = Library(shares_kv=False, contiguous_backward=True, contiguous_lse=False)
FLASH_ATTN = Library(shares_kv=True, contiguous_backward=False)
FLASH_ATTN_4 = Library(shares_kv=True, contiguous_backward=False, writes=True)


def walk_forward(pattern: DilatedPattern, shape: Shape, library: Library) -> Iterator[Step]:
    """The loop over pieces by a library's kernel."""
    q, _, lse = _tensor_bytes(shape)
    yield from _starts(pattern, q, lse)
    for rows, *_ in _parts(pattern, shape):
        yield from _repeat(rows, library)
        k = rows.k if library.shares_kv else rows.q
        yield Step(rows.flops(FORWARD_PRODUCTS), 2 * rows.q + 2 * k + rows.lse)
        if not rows.piece.covers:
            yield Step(0, 3 * (rows.q + rows.lse))  # merged: two are read, one is written
        else:
            yield from _copies(rows.lse, *([] if library.writes else [rows.q]))


def _repeat(rows: _Rows, library: Library) -> Iterator[Step]:
    if not library.shares_kv and rows.group > 1:
        yield Step(0, 2 * (rows.k + rows.q), 2)


def walk_backward(pattern: DilatedPattern, shape: Shape, library: Library) -> Iterator[Step]:
    q, k, lse = _tensor_bytes(shape)
    yield from _starts(pattern, q, k, k)
    yield Step(0, 2 * lse)  # `for_backward`
    for rows, of_q, of_lse in _parts(pattern, shape):
        yield from _repeat(rows, library)
        if library.contiguous_backward and not _is_contiguous(of_q, (0, 2, 1, 3)):
            yield from _copies(rows.q, rows.q)
        if of_lse is None or (library.contiguous_lse and not _is_contiguous(of_lse, (0, 1, 2))):
            yield from _copies(rows.lse)
        if library.seeds:
            yield Step(0, library.seeds)
        kv = rows.k if library.shares_kv else rows.q
        yield Step(rows.flops(BACKWARD_PRODUCTS), 4 * rows.q + 4 * kv + rows.lse)
        if kv != rows.k:
            yield Step(0, 2 * (rows.q + rows.k), 2)  # gradients of shared heads are summed
        if not (rows.piece.covers and library.writes and kv == rows.k):
            yield Step(0, (2 if rows.piece.covers else 3) * (rows.q + 2 * rows.k), 3)


def _is_contiguous(layout: StridedLayout, order: tuple[int, ...]) -> bool:
    """Whether a view is contiguous with its dims in some order."""
    return _is_dense([(layout[0][i], layout[1][i]) for i in order], 1)


def _is_dense(dims: list[tuple[int, int]], inner: int) -> bool:
    for size, stride in reversed(dims):
        if size > 1:
            if stride != inner:
                return False
            inner *= size
    return True


def packed_forward(pattern: DilatedPattern, shape: Shape) -> Iterator[Step]:
    """FlexAttention over kept rows, a call per piece."""
    q, _, lse = _tensor_bytes(shape)
    wide, mask = q // shape.element * LSE, lse // LSE
    pieces = list(_rows(pattern, shape))
    for rows in pieces:
        yield Step(0, 3 * LSE, 3)  # rows, strides and segments as tensors
        yield from _pack(rows)
        yield Step(rows.flops(FORWARD_PRODUCTS), 2 * rows.q + 2 * rows.k + rows.lse)
        yield Step(0, lse)  # a map of its lse
        yield from _copies(rows.lse)
    count = len(pieces)
    yield Step(0, (15 * count + 11) * lse + (2 * count + 8) * mask, 15)  # the weights and lse of all maps
    yield Step(0, wide)  # zeros
    for rows in pieces:
        out = rows.queries * shape.head_dim * LSE
        if shape.element != LSE:
            yield Step(0, rows.q + out)
        yield Step(0, 2 * out + rows.lse)  # times the weight
        yield Step(0, 3 * out)  # added
    if shape.element != LSE:
        yield Step(0, wide + q)


def packed_backward(pattern: DilatedPattern, shape: Shape) -> Iterator[Step]:
    """What autograd makes of the forward: sums over whole tensors wherever a piece was read or written through a view."""
    q, k, lse = _tensor_bytes(shape)
    wide, mask = q // shape.element * LSE, lse // LSE
    pieces = list(_rows(pattern, shape))
    count = len(pieces)
    if shape.element != LSE:
        yield Step(0, q + wide)
    for i, rows in enumerate(pieces):
        out = rows.queries * shape.head_dim * LSE
        yield Step(0, 2 * wide)  # added: the gradient before it
        yield Step(0, (2 if i == 0 else 4) * out, 1 if i == 0 else 2)  # and its rows
        yield Step(0, 6 * out + 2 * rows.lse, 3)  # of the weight and of the output
        if shape.element != LSE:
            yield Step(0, out + rows.q)
        yield Step(0, lse + 2 * rows.lse, 2)  # the weight's rows
    if count > 1:
        yield Step(0, 2 * count * lse)  # the weights of all maps
    yield Step(0, (23 * count + 5) * lse + 2 * mask, 11)  # of their scores
    for rows in pieces:
        yield Step(0, 2 * lse + 2 * rows.lse, 2)  # of the map of its lse
    for i, rows in enumerate(pieces):
        if not _is_order_of_lanes(rows):
            yield from _copies(rows.lse, rows.q)
        yield Step(rows.flops(SPLIT_BACKWARD_PRODUCTS), 4 * rows.q + 4 * rows.k + 2 * rows.lse)
        yield Step(0, 2 * (rows.q + 2 * rows.k), 3)  # of the lanes of one launch
        yield Step(0, q + 2 * k + 2 * (rows.q + 2 * rows.k), 6)  # of the views
        if i:
            yield Step(0, 3 * (q + 2 * k), 3)
    yield from _copies(q, k, k)  # gradients of one document are put together


def _is_order_of_lanes(rows: _Rows) -> bool:
    """Whether the gradient of a piece, a new tensor `b s o h g r`, is a view in the order of the kernel's lanes."""
    sizes = rows.sizes(rows.group)
    return _are_lanes(rows.piece, sizes, tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes))))


def _pack(rows: _Rows) -> Iterator[Step]:
    """Lanes of kept rows: one sequence where all segments are, else one per segment."""
    shape = rows.shape
    for heads, group, sizes in ((shape.num_heads, rows.group, (rows.q,)), (shape.num_kv_heads, 1, (rows.k, rows.k))):
        if not _is_lane_view(rows, heads, group):
            yield from _copies(*sizes)


def _is_lane_view(rows: _Rows, heads: int, group: int) -> bool:
    shape = rows.shape
    row = heads * shape.head_dim
    sizes, strides = rows.sizes(group), rows.strides(group, row, shape.head_dim, shape.num_tokens * row)
    return _are_lanes(rows.piece, sizes, strides)


def _are_lanes(piece: Piece, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a box `b s o h g r` is a view as lanes."""
    together = ((0, 2), (3, 4), (1, 5)) if is_one_sequence(piece) else ((0, 1, 2), (3, 4), (5,))
    return all(_merges(tuple(sizes[i] for i in dims), tuple(strides[i] for i in dims)) for dims in together)


def fused_forward(pattern: DilatedPattern, shape: Shape) -> Iterator[Step]:
    """FlexAttention over the raw layout, one call."""
    q, k, lse = _tensor_bytes(shape)
    yield Step(0, LSE)  # the first token as a tensor
    yield Step(_fused_flops(pattern, shape, FORWARD_PRODUCTS), 2 * q + 2 * k + lse)


def fused_backward(pattern: DilatedPattern, shape: Shape) -> Iterator[Step]:
    q, k, lse = _tensor_bytes(shape)
    yield Step(0, lse)  # the gradient that lse has not
    yield Step(_fused_flops(pattern, shape, SPLIT_BACKWARD_PRODUCTS), 4 * q + 4 * k + 2 * lse)
    yield from _copies(q, k, k)  # gradients of one document are put together


def _fused_flops(pattern: DilatedPattern, shape: Shape, products: int) -> int:
    return 2 * products * shape.head_dim * BLOCK**2 * fused_cost(pattern, shape).tiles


def in_place_forward(pattern: DilatedPattern, shape: Shape) -> Iterator[Step]:
    """One kernel that reads rows in place and merges as it writes."""
    q, _, lse = _tensor_bytes(shape)
    yield from _starts(pattern, q, lse)
    for launch_rows in _launches(pattern, shape):
        merged = 1 if launch_rows[0].piece.covers else 2  # out and lse are written, or read and written
        moved = sum(rows.q + 2 * rows.k + merged * (rows.q + rows.lse) for rows in launch_rows)
        yield Step(sum(rows.flops(FORWARD_PRODUCTS) for rows in launch_rows), moved)


def in_place_backward(pattern: DilatedPattern, shape: Shape) -> Iterator[Step]:
    """`delta` once, then dk and dv of pieces in one launch and dq in another: two products are computed in both."""
    q, k, lse = _tensor_bytes(shape)
    yield Step(0, 2 * q + 3 * lse)  # out, dout and lse in; lse and delta out
    yield from _starts(pattern, q, k, k)
    for launch_rows in _launches(pattern, shape):
        added = 1 if launch_rows[0].piece.covers else 2
        queries, keys = sum(rows.q for rows in launch_rows), sum(rows.k for rows in launch_rows)
        bytes_read = 2 * queries + 2 * keys + 2 * sum(rows.lse for rows in launch_rows)  # q, dout, k, v, lse and delta
        yield Step(sum(rows.flops(4) for rows in launch_rows), bytes_read + added * 2 * keys)
        yield Step(sum(rows.flops(SPLIT_BACKWARD_PRODUCTS - 4) for rows in launch_rows), bytes_read + added * queries)


def _launches(pattern: DilatedPattern, shape: Shape) -> Iterator[list[_Rows]]:
    """The pieces of each launch of the kernels that read in place."""
    for pieces in together([rows.piece for rows in _rows(pattern, shape)]):
        yield [_Rows(piece, shape) for piece in pieces]
