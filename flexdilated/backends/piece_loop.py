"""Loop over all pieces of a pattern and run a kernel on each: forward and backward.

Every piece's backward is called with the output and the log-sum-exp of the whole mixture; since `exp(score - lse)` is then the
pair's weight in the one softmax over all branches, the gradients of the pieces add up to the exact gradient. Under `detach_weights`
a piece needs its own output and log-sum-exp instead: they are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexdilated.backends import choose_kernel
from flexdilated.backends.kernel import GRID_LIMIT, Dropout, Kernel, Options, spread
from flexdilated.backends.triton import engine as triton_engine
from flexdilated.core.custom_op import Flat, Inputs
from flexdilated.core.lse import accumulated, add_zero_keys_, for_backward, merge_
from flexdilated.core.pieces import Part, Piece, box, fold, fold_view, parts_of, slabs, unfold, view_layouts
from flexdilated.core.request import Request

# Bytes of one packed tensor of a slab, on a CPU. Slabs that fit its caches are packed before they are computed: the kernels are up
# to a tenth faster than on strided rows, and the temporaries reuse the same memory instead of touching fresh pages. Elsewhere a
# piece is as few launches as its views allow. See docs/adr/0002.
CPU_SLAB_BYTES = 4 << 20


class Slab(NamedTuple):
    """A part of a piece that is one call of a kernel, its place among all, and the options of that call."""

    number: int
    piece: Piece
    part: Part
    options: Options


class Rows:
    """The rows of slabs in a tensor `(B, N, H, ...)`.

    Off the CPU a slab is a view: the sizes and strides of all are computed once for each layout of the tensor.
    """

    def __init__(self, x: Tensor, group: int, apart: bool, parts: tuple[Any, ...] | None) -> None:
        self.x, self.group, self.apart, self.views = x, group, apart, None
        if parts is not None:
            first, layouts = x.storage_offset(), view_layouts(parts, x.shape, x.stride(), group)
            self.views = [None if y is None else x.as_strided(y[0], y[1], first + y[2]) for y in layouts]

    def box(self, slab: Slab) -> Tensor:
        """The rows as `b s o h g r d`."""
        return box(self.x, slab.piece, group=self.group)[slab.part]

    def view(self, slab: Slab) -> Tensor | None:
        """The rows as a kernel takes them, `(batch, heads, rows, D)`, where strides make that a view."""
        return fold_view(self.box(slab), offsets_apart=self.apart) if self.views is None else self.views[slab.number]

    def read(self, slab: Slab) -> Tensor:
        """The rows as a kernel takes them, a view if strides allow, else a copy."""
        view = self.view(slab)
        return fold(self.box(slab), offsets_apart=self.apart) if view is None else view


class PieceLoop:
    """The slabs of some pieces, the options of their kernel, and the seed of the dropout."""

    def __init__(self, inputs: Inputs, flat: Flat, pieces: tuple[Piece, ...], seed: int | None) -> None:
        q, k, _, key_padding_mask, cu_seqlens, _ = inputs
        self.pieces = pieces
        self.device = q.device
        self.group = q.shape[2] // k.shape[2]
        self.detaches = flat.pattern.detach_weights
        self._engine = flat.engine
        self._request = Request.of(q, k, key_padding_mask, cu_seqlens, flat.dropout_p)
        self.kernel = choose_kernel(flat.engine, self._request)
        self.in_place = None if self.kernel.in_place is None else self.kernel.in_place()
        self.options = Options(flat.is_causal, flat.scale, key_padding_mask)
        self._dropout = None if seed is None else Dropout(flat.dropout_p, seed)
        self._sizes = q.shape
        self._row_bytes = self.group * q.shape[3] * q.element_size()
        self._packs = packs(q.device)
        self._apart = key_padding_mask is not None or self.group > 1  # of `fold`
        # The mask has no heads: every head reads the same column.
        self._ignored = None if key_padding_mask is None else key_padding_mask[:, :, None, None].expand(-1, -1, k.shape[2], 1)

    @cached_property
    def _views(self) -> tuple[Any, ...]:
        return self.pieces, *self._sizes[:2], self.group, GRID_LIMIT, self._apart

    @cached_property
    def _parts(self) -> tuple[tuple[Piece, Part], ...]:
        if not self._packs:
            return parts_of(*self._views)
        return tuple(
            (piece, part)
            for piece in self.pieces
            for part in slabs(piece, self._sizes[0], piece.offsets * piece.heads * piece.rows * self._row_bytes, CPU_SLAB_BYTES)
        )

    @cached_property
    def _merging(self) -> Any:
        return merging(self._request)

    def differentiating(self, dlse: Tensor | None) -> Kernel:
        """The kernel of the backward: one more column, for a gradient of lse, may be too many for that of the forward."""
        return self.kernel if dlse is None else choose_kernel(self._engine, replace(self._request, dlse=True))

    def accumulator(self, shape: Sequence[int], dtype: torch.dtype, start: float) -> Tensor:
        """Memory to merge or add into, filled with `start` unless the first pieces write every row."""
        memory = torch.empty(shape, dtype=dtype, device=self.device)
        return memory if self.pieces and self.pieces[0].covers else memory.fill_(start)

    def slabs(self) -> Iterator[Slab]:
        """All slabs, in the order of the pieces."""
        plain = self.options._replace(ignored=None)
        for number, (piece, part) in enumerate(self._parts):
            options = plain
            if self._ignored is not None:
                rows = box(self._ignored, piece)[part][:, :, :, :1]
                options = options._replace(ignored=fold(rows, offsets_apart=True)[:, 0, :, 0])
            if self._dropout is not None:
                options = options._replace(dropout=self._dropout._replace(seed=spread(self._dropout.seed, number)))
            yield Slab(number, piece, part, options)

    def rows(self, x: Tensor, group: int = 1) -> Rows:
        """The slabs' rows in `x` `(B, N, H, ...)`."""
        return Rows(x, group, self._apart, None if self._packs else self._views)

    def inputs(self, slab: Slab, *rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """A slab's q, k, v as the kernel takes them. Ignored keys and values are zeroed, whatever they hold."""
        q, k, v = (x.read(slab) for x in rows)
        if slab.options.ignored is not None:
            k, v = (x.masked_fill(slab.options.ignored[:, None, :, None], 0.0) for x in (k, v))
        return (q.contiguous(), k.contiguous(), v.contiguous()) if self._packs else (q, k, v)

    def attend(self, slab: Slab, inputs: tuple[Tensor, Tensor, Tensor], into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A slab's own output and lse of its `inputs`; the output is written to `into` where given."""
        out, lse = self.kernel.forward(*inputs, slab.options, into)
        if slab.piece.zero_keys:
            add_zero_keys_(out, lse, slab.piece.zero_keys)
        return out, lse

    def merge(self, slab: Slab, out: Rows, lse: Rows, out_i: Tensor, lse_i: Tensor) -> None:
        """Merge a slab's results, as a kernel gives them, into running results."""
        view = out.view(slab) if self._merging else None
        if view is not None:
            rows = lse.view(slab)
            # The lse of several sequences has strides of its own for sequences and segments.
            if rows is None:
                rows = lse.box(slab)
                rows = rows.view(*rows.shape[:2], -1, *rows.shape[5:])
            if self._launches(self._merging.merge_into, view, rows.select(-1, 0), out_i, lse_i):
                return
        out_box, lse_box = out.box(slab), lse.box(slab)
        merge_(out_box, lse_box[..., 0], unfold(out_i, out_box), unfold(lse_i[..., None], lse_box)[..., 0])

    def add(self, slab: Slab, total: Rows, term: Tensor) -> None:
        """Add a slab's gradient, as a kernel gives it, to running sums."""
        view = total.view(slab) if self._merging else None
        if view is None or not self._launches(self._merging.add_to, view, term):
            rows = total.box(slab)
            rows.add_(unfold(term, rows))

    def _launches(self, run: Callable[..., None], *tensors: Tensor) -> bool:
        """Whether a Triton kernel could do it; if not, torch's operations do this and all that follows."""
        if triton_engine.attempt(run, *tensors):
            return True
        self._merging = None
        return False


def packs(device: torch.device) -> bool:
    """Whether slabs are copied together before they are computed."""
    return device.type == "cpu"


def merging(request: Request) -> Any:
    """The module of the Triton kernels that merge and add on a GPU, or None where torch's operations do."""
    if request.hardware.device_type != "cuda" or triton_engine.why_not(replace(request, dropout=False)) or triton_engine.UNBUILT:
        return None
    # It imports triton, which is optional, and may be installed without being loadable.
    if not triton_engine.attempt(import_module, "flexdilated.backends.triton.merging"):
        return None
    from flexdilated.backends.triton import merging as kernels

    return kernels


def forward(q: Tensor, k: Tensor, v: Tensor, loop: PieceLoop) -> tuple[Tensor, Tensor]:
    out = loop.accumulator(q.shape, q.dtype, 0.0)
    lse = loop.accumulator((q.shape[0], q.shape[2], q.shape[1]), accumulated(q.dtype), -torch.inf)
    if loop.in_place is not None:
        loop.in_place.forward(out, lse, q, k, v, loop.pieces, loop.options)
        return out, lse
    given = loop.rows(q, loop.group), loop.rows(k), loop.rows(v)
    out_rows, lse_rows = (loop.rows(x, loop.group) for x in (out, lse.transpose(1, 2)[..., None]))
    for slab in loop.slabs():
        inputs = loop.inputs(slab, *given)
        if not slab.piece.covers:
            loop.merge(slab, out_rows, lse_rows, *loop.attend(slab, inputs))
            continue
        into, lse_box = out_rows.view(slab), lse_rows.box(slab)
        out_i, lse_i = loop.attend(slab, inputs, into)
        if into is None:
            out_box = out_rows.box(slab)
            out_box.copy_(unfold(out_i, out_box))
        lse_box.copy_(unfold(lse_i[..., None], lse_box))
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    loop: PieceLoop,
    sums: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv` of the pieces, in the dtype `sums`, which is by default that of the inputs."""
    # In the dtype of the inputs: a position has one term per branch, and adding those in bfloat16 adds 3 to 6 % to the error that
    # the kernels make anyway, where float32 sums cost three tensors of twice the size.
    dq, dk, dv = (loop.accumulator(x.shape, sums or x.dtype, 0.0) for x in (q, k, v))
    if loop.in_place is not None:
        grads = (dq, dk, dv)
        loop.in_place.backward(grads, dout, dlse, q, k, v, out, lse, loop.pieces, loop.options, detaches=loop.detaches)
        return grads
    lse, dlse = for_backward(lse, dlse)
    given, kernel = (loop.rows(q, loop.group), loop.rows(k), loop.rows(v)), loop.differentiating(dlse)
    dout_rows, out_rows, lse_rows = (loop.rows(x, loop.group) for x in (dout, out, lse.transpose(1, 2)[..., None]))
    dlse_rows = None if dlse is None else loop.rows(dlse.transpose(1, 2)[..., None], loop.group)
    sum_rows = loop.rows(dq, loop.group), loop.rows(dk), loop.rows(dv)
    for slab in loop.slabs():
        inputs = loop.inputs(slab, *given)
        dout_i, lse_i = dout_rows.read(slab), lse_rows.read(slab).select(3, 0)
        dlse_i = None if dlse_rows is None else dlse_rows.read(slab).select(3, 0)
        if loop.detaches:
            total = lse_i
            out_i, lse_i = loop.attend(slab, inputs)
            weight = torch.exp(lse_i - total)
            dout_i = dout_i * weight[..., None].to(dout_i.dtype)
            lse_i, dlse_i = for_backward(lse_i, None if dlse_i is None else dlse_i * weight)
        else:
            out_i = out_rows.read(slab)
        into = None
        if slab.piece.covers and dq.dtype == q.dtype:
            views = tuple(view for view in (rows.view(slab) for rows in sum_rows) if view is not None)
            into = views if len(views) == len(sum_rows) else None
        terms = kernel.backward(dout_i, dlse_i, *inputs, out_i, lse_i, slab.options, into)
        for rows, term in zip(sum_rows, terms if into is None else ()):
            if slab.piece.covers:
                memory = rows.box(slab)
                memory.copy_(unfold(term, memory))
            else:
                loop.add(slab, rows, term)
    return dq, dk, dv
