"""Loop over all pieces of a pattern and run a kernel on each: forward and backward.

Every piece's backward is called with the output and the log-sum-exp of the whole mixture; since `exp(score - lse)` is then the
pair's weight in the one softmax over all branches, the gradients of the pieces add up to the exact gradient. Under `detach_weights`
a piece needs its own output and log-sum-exp instead: they are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexdilated.backends import choose_kernel
from flexdilated.backends.dense.windows import dense_pieces
from flexdilated.backends.kernel import GRID_LIMIT, Dropout, Kernel, Options, fold_in
from flexdilated.backends.triton import backend as triton_backend
from flexdilated.core.custom_op import Inputs, OpOptions
from flexdilated.core.dispatch_key import DispatchKey
from flexdilated.core.lse import accumulated, add_zero_keys_, for_backward, merge_
from flexdilated.core.pieces import Piece
from flexdilated.core.slabs import Slabs, layouts, pack, slabs_of

# Bytes of one packed tensor of a slab, on a CPU. Slabs that fit its caches are packed before they are computed: the kernels are up
# to a tenth faster than on strided rows, and the temporaries reuse the same memory instead of touching fresh pages. Elsewhere a
# piece is as few launches as its views allow. See docs/adr/0002.
CPU_SLAB_BYTES = 4 << 20


class Slab(NamedTuple):
    """A part of a piece that is one call of a kernel, its place among all, and the options of that call."""

    number: int
    piece: Piece
    options: Options


class Rows:
    """The rows of slabs' queries in a tensor `(B, N, H, ...)`; `of_keys`: those of keys.

    The tensor has `group` heads for each key/value head.
    """

    def __init__(self, plan: Slabs, x: Tensor, group: int = 1, *, of_keys: bool = False) -> None:
        self.x, self.first, self.apart = x, x.storage_offset(), plan.offsets_apart
        self.layouts = layouts(plan, x.shape, x.stride(), group, of_keys)

    def box(self, slab: Slab) -> Tensor:
        """The rows as `b s o h g r d`."""
        size, strides, first = self.layouts[slab.number].box
        return self.x.as_strided(size, strides, self.first + first)

    def view(self, slab: Slab) -> Tensor | None:
        """The rows as a kernel takes them, `(batch, heads, rows, D)`, where strides make that a view."""
        layout = self.layouts[slab.number].view
        return None if layout is None else self.x.as_strided(layout[0], layout[1], self.first + layout[2])

    def read(self, slab: Slab) -> Tensor:
        """The rows as a kernel takes them, a view if strides allow, else a copy."""
        layout = self.layouts[slab.number].view
        if layout is None:
            return pack(self.box(slab), offsets_apart=self.apart)
        return self.x.as_strided(layout[0], layout[1], self.first + layout[2])


class PieceLoop:
    """The slabs of some pieces, the options of their kernel, and the seed of the dropout."""

    def __init__(self, inputs: Inputs, op_options: OpOptions, pieces: tuple[Piece, ...], seed: int | None) -> None:
        q, k, _, key_padding_mask, cu_seqlens, _ = inputs
        self.device = q.device
        self.group = q.shape[2] // k.shape[2]
        self.detaches = op_options.pattern.detach_weights and len(op_options.pattern.branches) > 1
        self._backend = op_options.engine
        pattern = op_options.pattern
        wanted = {"window": pattern.window is not None, "windows_alone": pattern.windows_alone}
        self._request = DispatchKey.of(q, k, key_padding_mask, cu_seqlens, op_options.dropout_p, **wanted)
        self.kernel = choose_kernel(op_options.engine, self._request)
        if pattern.window is not None and self.kernel.windows != "bounds":
            pieces = dense_pieces(pieces, self.kernel.windows == "mask", pattern.windows_alone)
        self.pieces = pieces
        self.in_place = None if self.kernel.in_place is None else self.kernel.in_place()
        self.options = Options(op_options.is_causal, op_options.scale, key_padding_mask)
        self._dropout = None if seed is None else Dropout(op_options.dropout_p, seed)
        self._packs = packs(q.device)
        # The mask has no heads: every head reads the same column.
        self._key_padding_mask = (
            None if key_padding_mask is None else key_padding_mask[:, :, None, None].expand(-1, -1, k.shape[2], 1)
        )
        if self.in_place is None:
            row_bytes = self.group * q.shape[3] * q.element_size() if self._packs else 0
            limit = CPU_SLAB_BYTES if self._packs else GRID_LIMIT
            offsets_apart = key_padding_mask is not None or self.group > 1
            self._merging: Any = None if self._packs else merging(self._request)
            self.plan = slabs_of(pieces, q.shape[0], q.shape[1], self.group, limit, packed=row_bytes, offsets_apart=offsets_apart)

    def differentiating(self, dlse: Tensor | None) -> Kernel:
        """The kernel of the backward: one more column, for a gradient of lse, may be too many for that of the forward."""
        return self.kernel if dlse is None else choose_kernel(self._backend, replace(self._request, dlse=True))

    def accumulator(self, shape: Sequence[int], dtype: torch.dtype, start: float) -> Tensor:
        """Memory to merge or add into, filled with `start` unless the first pieces write every row."""
        memory = torch.empty(shape, dtype=dtype, device=self.device)
        return memory if self.pieces and self.pieces[0].covers else memory.fill_(start)

    def slabs(self) -> Iterator[Slab]:
        """All slabs, in the order of the pieces."""
        plain = self.options._replace(ignored=None)
        ignored = None if self._key_padding_mask is None else Rows(self.plan, self._key_padding_mask, of_keys=True)
        for number, piece in enumerate(self.plan.pieces):
            slab = Slab(number, piece, plain.within(piece))
            if ignored is not None:
                rows = pack(ignored.box(slab)[:, :, :, :1], offsets_apart=True)[:, 0, :, 0]
                slab = slab._replace(options=slab.options._replace(ignored=rows))
            if self._dropout is not None:
                dropout = self._dropout._replace(seed=fold_in(self._dropout.seed, number))
                slab = slab._replace(options=slab.options._replace(dropout=dropout))
            yield slab

    def inputs(self, slab: Slab, *rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """A slab's q, k, v as the kernel takes them. Ignored keys and values are zeroed, whatever they hold."""
        q, k, v = rows[0].read(slab), rows[1].read(slab), rows[2].read(slab)
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
        merge_(out_box, lse_box[..., 0], out_i.view(out_box.shape), lse_i[..., None].view(lse_box.shape)[..., 0])

    def add(self, slab: Slab, total: Rows, term: Tensor) -> None:
        """Add a slab's gradient, as a kernel gives it, to running sums."""
        view = total.view(slab) if self._merging else None
        if view is None or not self._launches(self._merging.add_to, view, term):
            rows = total.box(slab)
            rows.add_(term.view(rows.shape))

    def _launches(self, run: Callable[..., None], *tensors: Tensor) -> bool:
        """Whether a Triton kernel could do it; if not, torch's operations do this and all that follows."""
        if triton_backend.attempt(run, *tensors):
            return True
        self._merging = None
        return False


def packs(device: torch.device) -> bool:
    """Whether slabs are copied together before they are computed."""
    return device.type == "cpu"


def merging(request: DispatchKey) -> Any:
    """The module of the Triton kernels that merge and add on a GPU, or None where torch's operations do."""
    if request.hardware.device_type != "cuda" or triton_backend.why_not(replace(request, dropout=False)) or triton_backend.UNBUILT:
        return None
    # It imports triton, which is optional, and may be installed without being loadable.
    if not triton_backend.attempt(import_module, "flexdilated.backends.triton.merging"):
        return None
    from flexdilated.backends.triton import merging as kernels

    return kernels


def forward(q: Tensor, k: Tensor, v: Tensor, loop: PieceLoop) -> tuple[Tensor, Tensor]:
    out = loop.accumulator(q.shape, q.dtype, 0.0)
    lse = loop.accumulator((q.shape[0], q.shape[2], q.shape[1]), accumulated(q.dtype), -torch.inf)
    if loop.in_place is not None:
        loop.in_place.forward(out, lse, q, k, v, pieces=loop.pieces, options=loop.options)
        return out, lse
    input_rows = Rows(loop.plan, q, loop.group), Rows(loop.plan, k, of_keys=True), Rows(loop.plan, v, of_keys=True)
    out_rows, lse_rows = (Rows(loop.plan, x, loop.group) for x in (out, lse.transpose(1, 2)[..., None]))
    for slab in loop.slabs():
        inputs = loop.inputs(slab, *input_rows)
        if not slab.piece.covers:
            loop.merge(slab, out_rows, lse_rows, *loop.attend(slab, inputs))
            continue
        into, lse_box = out_rows.view(slab), lse_rows.box(slab)
        out_i, lse_i = loop.attend(slab, inputs, into)
        if into is None:
            out_box = out_rows.box(slab)
            out_box.copy_(out_i.view(out_box.shape))
        lse_box.copy_(lse_i[..., None].view(lse_box.shape))
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
        options = loop.options
        loop.in_place.backward(
            grads, dout, dlse, q, k, v, out=out, lse=lse, pieces=loop.pieces, options=options, detaches=loop.detaches
        )
        return grads
    lse, dlse = for_backward(lse, dlse)
    input_rows, sum_rows = (
        (Rows(loop.plan, x, loop.group), Rows(loop.plan, y, of_keys=True), Rows(loop.plan, z, of_keys=True))
        for x, y, z in ((q, k, v), (dq, dk, dv))
    )
    kernel = loop.differentiating(dlse)
    dout_rows, out_rows, lse_rows = (Rows(loop.plan, x, loop.group) for x in (dout, out, lse.transpose(1, 2)[..., None]))
    dlse_rows = None if dlse is None else Rows(loop.plan, dlse.transpose(1, 2)[..., None], loop.group)
    for slab in loop.slabs():
        inputs = loop.inputs(slab, *input_rows)
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
        terms = kernel.backward(dout_i, dlse_i, *inputs, out=out_i, lse=lse_i, options=slab.options, into=into)
        for rows, term in zip(sum_rows, terms if into is None else ()):
            if slab.piece.covers:
                memory = rows.box(slab)
                memory.copy_(term.view(memory.shape))
            else:
                loop.add(slab, rows, term)
    return dq, dk, dv
