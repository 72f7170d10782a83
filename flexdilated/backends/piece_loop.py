"""Loop over all pieces of a pattern and run a kernel on each: forward, backward and tangent.

Every piece's backward is called with the output and the log-sum-exp of the whole mixture; since `exp(score - lse)` is then the
pair's weight in the one softmax over all branches, the gradients of the pieces add up to the exact gradient. Under `detach_weights`
a piece needs its own output and log-sum-exp instead: they are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexdilated.backends import choose_kernel
from flexdilated.backends.kernel import GRID_LIMIT, Dropout, Kernel, Options, spread
from flexdilated.backends.math import differential
from flexdilated.backends.triton import engine as triton_engine
from flexdilated.core.custom_op import Flat, Inputs
from flexdilated.core.lse import accumulated, add_zero_keys_, merge_
from flexdilated.core.pieces import Part, Piece, box, fold, fold_view, slabs, unfold, view_parts
from flexdilated.core.request import Request

# Bytes of one packed tensor of a slab, on a CPU. Slabs that fit its caches are packed before they are computed: the kernels are up
# to a tenth faster than on strided rows, and the temporaries reuse the same memory instead of touching fresh pages. Elsewhere a
# piece is as few launches as its views allow. See docs/adr/0002.
CPU_SLAB_BYTES = 4 << 20


class PieceLoop:
    """The slabs of some pieces, the options of their kernel, and the seed of the dropout."""

    def __init__(self, inputs: Inputs, flat: Flat, pieces: tuple[Piece, ...], seed: int | None) -> None:
        q, k, _, key_padding_mask, cu_seqlens, _ = inputs
        self.pieces = pieces
        self.device = q.device
        self.group = q.shape[2] // k.shape[2]
        self.detaches = flat.detach_weights
        self._engine = flat.engine
        asked = {"masked": key_padding_mask is not None, "packed": cu_seqlens is not None, "dropout": flat.dropout_p > 0.0}
        self._request = Request.of(q, k, **asked)
        self.kernel = choose_kernel(flat.engine, self._request)
        self.in_place = None if self.kernel.in_place is None else self.kernel.in_place()
        self._sizes = q.shape[:2]
        self._row_bytes = self.group * q.shape[3] * q.element_size()
        self._packs = q.device.type == "cpu"
        self._triton = merging(self._request)
        self._apart = key_padding_mask is not None or self.group > 1  # of `fold`
        # The mask has no heads: every head reads the same column.
        self._ignored = None if key_padding_mask is None else key_padding_mask[:, :, None, None].expand(-1, -1, k.shape[2], 1)
        self.options = Options(flat.is_causal, flat.scale, key_padding_mask)
        self._dropout = None if seed is None else Dropout(flat.dropout_p, seed)

    def differentiating(self, dlse: Tensor | None) -> Kernel:
        """The kernel of the backward: one more column, for a gradient of lse, may be too many for that of the forward."""
        return self.kernel if dlse is None else choose_kernel(self._engine, replace(self._request, dlse=True))

    def accumulator(self, shape: Sequence[int], dtype: torch.dtype, start: float) -> Tensor:
        """Memory to merge or add into; where the first pieces tile it, they write it, and it needs no start."""
        memory = torch.empty(shape, dtype=dtype, device=self.device)
        return memory if self.pieces and self.pieces[0].tiles else memory.fill_(start)

    def slabs(self) -> Iterator[tuple[Piece, Part, Options]]:
        """Every slab: the piece, its part of the box, and the kernel's options."""
        ordinal = 0
        batch, num_tokens = self._sizes
        for piece in self.pieces:
            if self._packs:
                parts = slabs(piece, batch, piece.offsets * piece.heads * piece.rows * self._row_bytes, CPU_SLAB_BYTES)
            else:
                parts = view_parts(piece, batch, num_tokens, self.group, GRID_LIMIT, offsets_apart=self._apart)
            for part in parts:
                options = self.options._replace(ignored=None)
                if self._ignored is not None:
                    rows = box(self._ignored, piece)[part][:, :, :, :1]
                    options = options._replace(ignored=fold(rows, piece.rows, offsets_apart=True)[:, 0, :, 0])
                if self._dropout is not None:
                    options = options._replace(dropout=self._dropout._replace(seed=spread(self._dropout.seed, ordinal)))
                ordinal += 1
                yield piece, part, options

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, part: Part, options: Options) -> tuple[Tensor, Tensor, Tensor]:
        """A slab's q, k, v as the kernel takes them. Ignored keys and values are zeroed, whatever they hold."""
        q, k, v = (self._fold(box(x, piece, group=group)[part], piece.rows) for x, group in ((q, self.group), (k, 1), (v, 1)))
        if options.ignored is not None:
            k, v = (x.masked_fill(options.ignored[:, None, :, None], 0.0) for x in (k, v))
        return (q.contiguous(), k.contiguous(), v.contiguous()) if self._packs else (q, k, v)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        piece: Piece,
        part: Part,
        options: Options,
        into: tuple[Tensor, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A slab's own output and lse, written to `into` where given."""
        out, lse = self.kernel.forward(*self.inputs(q, k, v, piece, part, options), options, into)
        if piece.zero_keys:
            add_zero_keys_(out, lse, piece.zero_keys)
        return out, lse

    def outputs(self, x: Tensor, piece: Piece, part: Part, fill: float = 0.0) -> Tensor:
        """A slab's rows of `x` `(B, N, H, ...)`, which belongs to outputs, as a kernel takes them."""
        return self._fold(box(x, piece, group=self.group, output=True)[part], piece.rows, fill)

    def merge(self, out: Tensor, lse: Tensor, out_i: Tensor, lse_i: Tensor) -> None:
        """Merge a slab's results, as a kernel gives them, into the boxes `out` and `lse` of the slab."""
        views = self.views(out, lse) if self._triton else None
        if views is not None:
            self._triton.merge_into(views[0], views[1][..., 0], out_i, lse_i)
        else:
            merge_(out, lse[..., 0], unfold(out_i, out), unfold(lse_i[..., None], lse)[..., 0])

    def add(self, total: Tensor, term: Tensor) -> None:
        """Add a slab's gradient, as a kernel gives it, to the box `total` of the slab."""
        views = self.views(total) if self._triton else None
        if views is not None:
            self._triton.add_to(views[0], term)
        else:
            total.add_(unfold(term, total))

    def views(self, *boxes: Tensor, rows: int | None = None) -> tuple[Tensor, ...] | None:
        """Boxes of a slab as a kernel takes them, where all of them can be viewed so and have `rows` rows, if given."""
        if rows is not None and boxes[0].shape[5] != rows:
            return None
        views = [fold_view(x, offsets_apart=self._apart) for x in boxes]
        return None if any(x is None for x in views) else tuple(x for x in views if x is not None)

    def _fold(self, x: Tensor, rows: int, fill: float = 0.0) -> Tensor:
        return fold(x, rows, fill, offsets_apart=self._apart)


def merging(request: Request) -> Any:
    """The module of the Triton kernels that merge and add on a GPU, or None where torch's operations do."""
    if request.hardware.device_type != "cuda" or triton_engine.why_not(replace(request, dropout=False)) or triton_engine.UNBUILT:
        return None
    from flexdilated.backends.triton import merging as kernels  # imports triton, which is optional

    return kernels


def forward(q: Tensor, k: Tensor, v: Tensor, loop: PieceLoop) -> tuple[Tensor, Tensor]:
    out = loop.accumulator(q.shape, q.dtype, 0.0)
    lse = loop.accumulator((q.shape[0], q.shape[2], q.shape[1]), accumulated(q.dtype), -torch.inf)
    if loop.in_place is not None:
        loop.in_place.forward(out, lse, q, k, v, loop.pieces, loop.options)
        return out, lse
    lse_rows = lse.transpose(1, 2)[..., None]
    for piece, part, options in loop.slabs():
        out_box, lse_box = (box(x, piece, group=loop.group, output=True)[part] for x in (out, lse_rows))
        into = loop.views(out_box, lse_box, rows=piece.rows) if piece.tiles else None
        if into is not None:
            loop.attend(q, k, v, piece, part, options, (into[0], into[1][..., 0]))
            continue
        out_i, lse_i = loop.attend(q, k, v, piece, part, options)
        if piece.tiles:
            out_box.copy_(unfold(out_i, out_box))
            lse_box.copy_(unfold(lse_i[..., None], lse_box))
        else:
            loop.merge(out_box, lse_box, out_i, lse_i)
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
    lse_rows = lse.transpose(1, 2)[..., None]
    dlse_rows = None if dlse is None else dlse.transpose(1, 2)[..., None]
    kernel, groups = loop.differentiating(dlse), (loop.group, 1, 1)
    for piece, part, options in loop.slabs():
        q_i, k_i, v_i = loop.inputs(q, k, v, piece, part, options)
        # Rows without an output have no gradient either: -inf takes them out of the backward.
        dout_i, lse_i = loop.outputs(dout, piece, part), loop.outputs(lse_rows, piece, part, -torch.inf)[..., 0]
        dlse_i = None if dlse_rows is None else loop.outputs(dlse_rows, piece, part)[..., 0]
        if loop.detaches:
            total = lse_i
            out_i, lse_i = loop.attend(q, k, v, piece, part, options)
            weight = torch.exp(lse_i - total).masked_fill(total == -torch.inf, 0.0)
            dout_i = dout_i * weight[..., None].to(dout_i.dtype)
            dlse_i = None if dlse_i is None else dlse_i * weight
        else:
            out_i = loop.outputs(out, piece, part)
        boxes = [box(x, piece, group=group)[part] for x, group in zip((dq, dk, dv), groups)]
        into = loop.views(*boxes, rows=piece.rows) if piece.tiles and dq.dtype == q.dtype else None
        terms = kernel.backward(dout_i, dlse_i, q_i, k_i, v_i, out_i, lse_i, options, into)
        for total, term in zip(boxes, terms if into is None else ()):
            if piece.tiles:
                total.copy_(unfold(term, total))
            else:
                loop.add(total, term)
    return dq, dk, dv


def tangent(
    tangents: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, loop: PieceLoop
) -> tuple[Tensor, Tensor]:
    """`dout, dlse` for the tangents `dq, dk, dv`.

    With `p = exp(score - lse)` of the mixture, `dlse = sum p dscore` and `dout = sum p (dscore v + dv) - dlse out`, where the sums
    run over the pieces too. Zero keys move nothing. Under `detach_weights` a piece's share of dlse meets its own output instead.
    """
    dout, dlse = torch.zeros_like(out, dtype=lse.dtype), torch.zeros_like(lse)
    lse_rows, dlse_rows = (x.transpose(1, 2)[..., None] for x in (lse, dlse))
    for piece, part, options in loop.slabs():
        q_i, k_i, v_i = loop.inputs(q, k, v, piece, part, options)
        lse_i = loop.outputs(lse_rows, piece, part, -torch.inf)[..., 0]
        moved, dlse_i = differential(loop.inputs(*tangents, piece, part, options), q_i, k_i, v_i, lse_i, options)
        out_i = loop.attend(q, k, v, piece, part, options)[0] if loop.detaches else loop.outputs(out, piece, part)
        dlse_i = dlse_i[..., None]
        for total, term in ((dout, moved - dlse_i * out_i), (dlse_rows, dlse_i)):
            rows = box(total, piece, group=loop.group, output=True)[part]
            rows.add_(unfold(term, rows))
    return dout.to(out.dtype), dlse
