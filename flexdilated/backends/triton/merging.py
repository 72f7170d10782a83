"""Merge and add what a dense kernel gives for a part of a piece, each in one pass, for `backend="sdpa"` and `backend="flash"`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexdilated.backends.triton.forward import merge
from flexdilated.backends.triton.launch import on_device, options_of, readable, unit_of
from flexdilated.backends.triton.places import load_rows
from flexdilated.backends.triton.tiles import PREPARE, padded

AXES = ("batch", "head", "row")
STRIDES = tuple(f"{name}_{axis}" for name in ("out", "part", "part_lse", "lse") for axis in AXES)


@triton.jit
def _first(x, b, h, row, batch, head, step, UNIT: tl.constexpr):
    """Pointers to the first elements of rows of one head; strides are in units of `UNIT` elements."""
    return x + (b * batch + h * head + row * step) * UNIT


@triton.jit(do_not_specialize=(*STRIDES, "lse_segment", "segments", "heads", "rows", "tiles"))
def join_rows(
    OUT, LSE, PART, PART_LSE,
    out_batch, out_head, out_row, part_batch, part_head, part_row, part_lse_batch, part_lse_head, part_lse_row,
    lse_batch, lse_segment, lse_head, lse_row, segments, heads, rows, tiles,
    MERGES: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one head, merged into `OUT` and `LSE` by their lse, or added to `OUT` in float32 and rounded once.

    Sequences and segments of `LSE` have strides of their own.
    """
    lane = tl.program_id(0) // tiles
    b, h = (lane // heads).to(tl.int64), (lane % heads).to(tl.int64)
    row = ((tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    there, in_row = row < rows, d < D
    part = _first(PART, b, h, row, part_batch, part_head, part_row, UNIT)[:, None] + d[None, :]
    out = _first(OUT, b, h, row, out_batch, out_head, out_row, UNIT)[:, None] + d[None, :]
    x = load_rows(part, there, in_row, True, True).to(tl.float32)
    if MERGES:
        lse = tl.load(_first(PART_LSE, b, h, row, part_lse_batch, part_lse_head, part_lse_row, 1), mask=there, other=0.0)
        LSE += b // segments * lse_batch
        merge(out, _first(LSE, b % segments, h, row, lse_segment, lse_head, lse_row, 1), x, lse, there, in_row)
    else:
        x += load_rows(out, there, in_row, True, True).to(tl.float32)
        tl.store(out, x.to(OUT.dtype.element_ty), mask=there[:, None] & in_row[None, :])


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the first rows of a partial attention into running results, in place.

    Args:
        out: `(batch, heads, rows, D)`, strided, rows aligned as `readable` says.
        lse: `(batch, heads, rows)` or `(sequences, segments, heads, rows)`, natural logarithm, strided.
        part: `(batch, heads, rows or more, D)`.
        part_lse: `(batch, heads, rows or more)`.
    """
    lse = lse if lse.dim() == 4 else lse[None]
    _join(out, lse, part, part_lse, (*part_lse.stride(), *lse.stride(), lse.shape[1]))


def add_to(total: Tensor, term: Tensor) -> None:
    """Add the first rows of a partial gradient `(batch, heads, rows or more, D)` to a strided one, in place."""
    _join(total, None, term, None, (0,) * 8)


def _join(out: Tensor, lse: Tensor | None, part: Tensor, part_lse: Tensor | None, numbers: tuple[int, ...]) -> None:
    (batch, heads, rows, head_dim), unit, part = out.shape, unit_of(out), readable(part)
    strides = tuple(stride // unit for x in (out, part) for stride in x.stride()[:3])
    tiles = -(-rows // PREPARE.queries)
    constants = {"MERGES": lse is not None, "UNIT": unit, "D": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_M": PREPARE.queries}
    run = join_rows[(tiles * batch * heads,)]
    with on_device(out):
        run(*(out, lse, part, part_lse), *strides, *numbers, heads, rows, tiles, **constants, **options_of(PREPARE))
