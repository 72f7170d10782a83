"""Merge and add what a dense kernel gives for a part of a piece, each in one pass, for `backend="sdpa"` and `backend="flash"`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flexdilated.backends.triton.forward import merge
from flexdilated.backends.triton.launch import on_device, options_of, readable, unit_of
from flexdilated.backends.triton.places import load_rows
from flexdilated.backends.triton.tiles import PREPARE, padded

AXES = ("batch", "head", "row")


def _steps(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}_{axis}" for name in names for axis in AXES)


@triton.jit
def _first(x, b, h, row, batch, head, step, UNIT: tl.constexpr):
    """Pointers to the first elements of rows of one head; strides are in units of `UNIT` elements."""
    return x + (b * batch + h * head + row * step) * UNIT


@triton.jit(do_not_specialize=(*_steps("out", "lse", "part", "part_lse"), "lse_segment", "segments", "heads", "rows", "tiles"))
def merge_rows(
    OUT, LSE, PART, PART_LSE,
    out_batch, out_head, out_row, lse_batch, lse_segment, lse_head, lse_row, part_batch, part_head, part_row,
    part_lse_batch, part_lse_head, part_lse_row, segments, heads, rows, tiles,
    UNIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one head, merged into `OUT` and `LSE`; sequences and segments of `LSE` have strides of their own."""
    lane = tl.program_id(0) // tiles
    b, h = (lane // heads).to(tl.int64), (lane % heads).to(tl.int64)
    row = ((tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    there, in_row = row < rows, d < D
    part = _first(PART, b, h, row, part_batch, part_head, part_row, UNIT)[:, None] + d[None, :]
    out = _first(OUT, b, h, row, out_batch, out_head, out_row, UNIT)[:, None] + d[None, :]
    acc = load_rows(part, there, in_row, True, True).to(tl.float32)
    lse = tl.load(_first(PART_LSE, b, h, row, part_lse_batch, part_lse_head, part_lse_row, 1), mask=there, other=0.0)
    LSE += b // segments * lse_batch
    merge(out, _first(LSE, b % segments, h, row, lse_segment, lse_head, lse_row, 1), acc, lse, there, in_row)


@triton.jit(do_not_specialize=(*_steps("sum", "term"), "heads", "rows", "tiles"))
def add_rows(
    SUM, TERM, sum_batch, sum_head, sum_row, term_batch, term_head, term_row, heads, rows, tiles,
    UNIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one head, added to `SUM` in float32 and rounded once."""
    lane = tl.program_id(0) // tiles
    b, h = (lane // heads).to(tl.int64), (lane % heads).to(tl.int64)
    row = ((tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    there, in_row = row < rows, d < D
    total = _first(SUM, b, h, row, sum_batch, sum_head, sum_row, UNIT)[:, None] + d[None, :]
    term = _first(TERM, b, h, row, term_batch, term_head, term_row, UNIT)[:, None] + d[None, :]
    x = load_rows(total, there, in_row, True, True).to(tl.float32) + load_rows(term, there, in_row, True, True).to(tl.float32)
    tl.store(total, x.to(SUM.dtype.element_ty), mask=there[:, None] & in_row[None, :])


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the first rows of a partial attention into running results, in place.

    Args:
        out: `(batch, heads, rows, D)`, strided, rows aligned as `readable` says.
        lse: `(batch, heads, rows)` or `(sequences, segments, heads, rows)`, natural logarithm, strided.
        part: `(batch, heads, rows or more, D)`.
        part_lse: `(batch, heads, rows or more)`.
    """
    if lse.dim() == 3:
        lse = lse[None]
    part, unit = readable(part), unit_of(out)
    strides = (*_strides(out, unit), *lse.stride(), *_strides(part, unit), *part_lse.stride(), lse.shape[1])
    _launch(merge_rows, (out, lse, part, part_lse), strides, out)


def add_to(total: Tensor, term: Tensor) -> None:
    """Add the first rows of a partial gradient `(batch, heads, rows or more, D)` to a strided one, in place."""
    term, unit = readable(term), unit_of(total)
    _launch(add_rows, (total, term), (*_strides(total, unit), *_strides(term, unit)), total)


def _strides(x: Tensor, unit: int) -> tuple[int, ...]:
    return x.stride(0) // unit, x.stride(1) // unit, x.stride(2) // unit


def _launch(kernel: Any, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], like: Tensor) -> None:
    batch, heads, rows, head_dim = like.shape
    tiles = -(-rows // PREPARE.queries)
    constants = {"UNIT": unit_of(like), "D": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_M": PREPARE.queries}
    with on_device(like):
        kernel[(tiles * batch * heads,)](*tensors, *numbers, heads, rows, tiles, **constants, **options_of(PREPARE))
