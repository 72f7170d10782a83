"""Pieces as tensors: strided boxes of q, k, v and out, in slabs that one call of a kernel takes, as views where strides allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from torch import Tensor

from flexdilated.core.pieces import Piece

BoxSlices = tuple[slice, slice, slice, slice]  # of a box: sequences, segments, offsets, heads


def slabs(piece: Piece, batch: int, bytes_per_segment: int, limit: int) -> Iterator[BoxSlices]:
    """Cut the (batch, segments) of a piece so that one packed tensor of a slab holds about `limit` bytes."""
    per_slab = max(1, limit // max(1, bytes_per_segment))
    batch_step = max(1, per_slab // piece.segments)
    segment_step = min(piece.segments, per_slab)
    for b in range(0, batch, batch_step):
        for s in range(0, piece.segments, segment_step):
            yield slice(b, b + batch_step), slice(s, s + segment_step), slice(None), slice(None)


def view_parts(piece: Piece, batch: int, num_tokens: int, group: int, limit: int, *, offsets_apart: bool) -> Iterator[BoxSlices]:
    """Split a piece into parts that `pack` views without a copy, in tensors whose batch stride is `num_tokens` token strides.

    A view has one stride for (sequence, segment) and one for the heads, so the loop is over the smaller of offsets and heads.
    A sequence has `num_tokens` tokens, a key/value head has `group` query heads, and a launch takes a batch of at most `most`.
    """
    sequences, segments, offsets, heads = ([slice(None)] for _ in range(4))
    if batch > 1 and piece.segments > 1 and piece.segments * piece.segment_stride != num_tokens:
        if batch <= piece.segments:
            sequences = _single_slices(batch)
        else:
            segments = _single_slices(piece.segments)
    if piece.offsets > 1:
        if offsets_apart or piece.offsets <= piece.heads:
            offsets = _single_slices(piece.offsets)
        else:
            heads = _single_slices(piece.heads)
    if group > 1 and piece.heads > 1 and piece.head_step > 1:  # query heads of different key heads have no common stride
        heads = _single_slices(piece.heads)
    for b, s, o, h in product(sequences, segments, offsets, heads):
        counts = (len(range(batch)[b]), len(range(piece.segments)[s]))
        for batch_slice, segment_slice, *_ in slabs(piece._replace(segments=counts[1]), counts[0], 1, limit):
            yield batch_slice if counts[0] == batch else b, segment_slice if counts[1] == piece.segments else s, o, h


def _single_slices(count: int) -> list[slice]:
    return [slice(i, i + 1) for i in range(count)]


def box(x: Tensor, piece: Piece, *, group: int = 1) -> Tensor:
    """The rows of a piece in `x` `(B, N, H, D)`, of any strides, as one affine view `b s o h g r d`.

    The dims: sequence, segment, offset, key/value head, its query heads (`group`, or 1 for k and v), row, element.
    """
    if piece.segments > 1 and piece.segment_stride <= (piece.rows - 1) * piece.row_stride:
        # The keys of overlapping windows: the gradient of a strided view would need an index of every element.
        heads = slice(piece.head, piece.head + (piece.heads - 1) * piece.head_step + 1, piece.head_step)
        end = piece.token + (piece.segments - 1) * piece.segment_stride + piece.rows
        return x[:, piece.token : end, heads].unfold(1, piece.rows, piece.segment_stride).mT[:, :, None, :, None]
    size, strides, first = box_layout(piece, x.shape, x.stride(), group)
    return x.as_strided(size, strides, x.storage_offset() + first)


@lru_cache(maxsize=1024)
def box_layout(piece: Piece, size: tuple[int, ...], strides: tuple[int, ...], group: int) -> StridedLayout:
    """Size and strides of the `box` of a piece in a tensor `(B, N, H, D)` or `(B, N, H)`, and the elements before its first one."""
    batch, token, query_head, *dim = strides
    head = query_head * group
    return (
        (size[0], piece.segments, piece.offsets, piece.heads, group, piece.rows, *size[3:]),
        (
            batch,
            piece.segment_stride * token,
            token + piece.offset_head_step * head,
            piece.head_step * head,
            query_head,
            piece.row_stride * token,
            *dim,
        ),
        piece.token * token + piece.head * head,
    )


def pack(rows: Tensor, *, offsets_apart: bool = False) -> Tensor:
    """A slab `b s o h g r d` as a kernel's `(b s o) (h g) r d`: a view where strides allow.

    Where each offset has one head, offsets are the kernel's heads, `(b s) o r d`, unless they must stay `offsets_apart`: with key
    heads shared by query heads, or a key padding mask.
    """
    return rows.reshape(_packed_shape(rows.shape, offsets_apart))


@dataclass(frozen=True, eq=False)
class Slabs:
    """Parts of pieces, in order, each of which is one call of a kernel; compared by identity."""

    pieces: tuple[Piece, ...]  # of each slab
    parts: tuple[BoxSlices, ...]
    offsets_apart: bool  # of `pack`


def slabs_of(
    pieces: tuple[Piece, ...], batch: int, num_tokens: int, group: int, limit: int, packed: int, offsets_apart: bool
) -> Slabs:
    """The pieces as slabs: `view_parts` of at most `limit` softmaxes, or parts whose copies have at most `limit` bytes.

    `packed`: the bytes that a row of q has in a copy, 0 for views.
    """
    slab_parts = []
    for piece in pieces:
        if packed:
            parts = slabs(piece, batch, piece.offsets * piece.heads * max(piece.rows, piece.keys) * packed, limit)
        else:
            parts = view_parts(piece, batch, num_tokens, group, limit, offsets_apart=offsets_apart)
        slab_parts += [(piece, part) for part in parts]
    return Slabs(tuple(piece for piece, _ in slab_parts), tuple(part for _, part in slab_parts), offsets_apart)


StridedLayout = tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides, and elements before the first one


class SlabLayout(NamedTuple):
    """Size, strides and first element of the rows of a slab in a tensor, without the tensor's own storage offset."""

    box: StridedLayout  # b s o h g r d
    view: StridedLayout | None  # as `pack` gives them, where strides make that a view
    packed: tuple[int, ...]  # the size that `pack` gives them


def layouts(
    slabs: Slabs, size: tuple[int, ...], strides: tuple[int, ...], group: int, of_keys: bool = False
) -> tuple[SlabLayout, ...]:
    """The layouts of slabs' queries, or keys, in a tensor `(B, N, H, D)` or `(B, N, H)` of `group` heads per key/value head."""
    layouts_of_slabs = []
    for piece, part in zip(slabs.pieces, slabs.parts):
        sizes, steps, start = box_layout(piece.of_keys() if of_keys else piece, size, strides, group)
        ranges = [range(n)[span] for n, span in zip(sizes, part)]  # a view of a view
        start += sum(span.start * step for span, step in zip(ranges, steps))
        sizes = (*map(len, ranges), *sizes[len(ranges) :])
        packed = pack_layout(sizes, steps, slabs.offsets_apart)
        view = None if packed is None else (*packed, start)
        layouts_of_slabs.append(SlabLayout((sizes, steps, start), view, _packed_shape(sizes, slabs.offsets_apart)))
    return tuple(layouts_of_slabs)


def pack_layout(size: Sequence[int], strides: Sequence[int], offsets_apart: bool) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Size and strides of all rows of a slab `b s o h g r d` as `pack` gives them, or None where that is no view."""
    h, g = size[3:5]
    groups = ((6,), (5,), (3, 4), (0, 1, 2)) if offsets_apart or h * g > 1 else ((6,), (5,), (2, 3, 4), (0, 1))
    sizes, steps, contiguous_stride = [], [], 1
    for dims in groups[7 - len(size) :]:
        count, first = 1, contiguous_stride  # a dim of size 1 has the stride of a contiguous one, as `Tensor.view` gives it
        for dim in reversed(dims):
            if size[dim] != 1:
                if count == 1:
                    first = strides[dim]
                elif strides[dim] != count * first:
                    return None
                count *= size[dim]
        sizes.append(count)
        steps.append(first)
        contiguous_stride = count * first
    return tuple(reversed(sizes)), tuple(reversed(steps))


def _packed_shape(size: Sequence[int], offsets_apart: bool) -> tuple[int, ...]:
    b, s, o, h, g, *row = size
    return (b * s * o, h * g, *row) if offsets_apart or h * g > 1 else (b * s, o, *row)
