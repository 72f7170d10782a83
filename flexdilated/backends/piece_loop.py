"""Loop over all pieces of a pattern and run a kernel on each: forward, backward and tangent.

Every piece's backward is called with the output and the log-sum-exp of the whole mixture; since `exp(score - lse)` is then the
pair's weight in the one softmax over all branches, the gradients of the pieces add up to the exact gradient. Under `detach_weights`
a piece needs its own output and log-sum-exp instead: they are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexdilated.backends import choose_kernel
from flexdilated.backends.kernel import GRID_LIMIT, Dropout, Options, spread
from flexdilated.backends.math import differential
from flexdilated.core.custom_op import Flat, Inputs
from flexdilated.core.lse import accumulated, add_zero_keys_, merge_
from flexdilated.core.pieces import Piece, box, fold, slabs, unfold
from flexdilated.core.request import Request

# Bytes of one packed tensor of a slab, on a CPU. Slabs that fit its caches are packed before they are computed: the kernels are up
# to a tenth faster than on strided rows, and the temporaries reuse the same memory instead of touching fresh pages. Elsewhere a
# piece is one launch over views, or as few as a CUDA grid allows. See docs/adr/0002.
CPU_SLAB_BYTES = 4 << 20


class PieceLoop:
    """The slabs of some pieces, the options of their kernel, and the seed of the dropout."""

    def __init__(self, inputs: Inputs, flat: Flat, pieces: tuple[Piece, ...], seed: int | None) -> None:
        q, k, _, key_padding_mask, *_ = inputs
        self.pieces = pieces
        self.device = q.device
        self.group = q.shape[2] // k.shape[2]
        self.detaches = flat.detach_weights
        request = Request.of(q, k, masked=key_padding_mask is not None, dropout=flat.dropout_p > 0.0)
        self.kernel = choose_kernel(flat.engine, request)
        self.in_place = None if self.kernel.in_place is None else self.kernel.in_place()
        self._batch = q.shape[0]
        self._row_bytes = self.group * q.shape[3] * q.element_size()
        self._packs = q.device.type == "cpu"
        # The mask has no heads: every head reads the same column.
        self._ignored = None if key_padding_mask is None else key_padding_mask[:, :, None, None].expand(-1, -1, k.shape[2], 1)
        self.options = Options(flat.is_causal, flat.scale, key_padding_mask)
        self._dropout = None if seed is None else Dropout(flat.dropout_p, seed)

    def accumulator(self, shape: Sequence[int], dtype: torch.dtype, start: float) -> Tensor:
        """Memory to merge or add into; where the first pieces tile it, they write it, and it needs no start."""
        memory = torch.empty(shape, dtype=dtype, device=self.device)
        return memory if self.pieces and self.pieces[0].tiles else memory.fill_(start)

    def slabs(self) -> Iterator[tuple[Piece, tuple[slice, slice], Options]]:
        """Every slab: the piece, its part of (batch, segments), and the kernel's options."""
        ordinal = 0
        for piece in self.pieces:
            per_segment = piece.offsets * piece.heads * piece.rows * self._row_bytes
            limit = CPU_SLAB_BYTES if self._packs else per_segment * (GRID_LIMIT // piece.offsets)
            for part in slabs(piece, self._batch, per_segment, limit):
                options = self.options._replace(ignored=None)
                if self._ignored is not None:
                    rows = box(self._ignored, piece)[part][:, :, :, :1]
                    options = options._replace(ignored=fold(rows, piece.rows)[:, 0, :, 0])
                if self._dropout is not None:
                    options = options._replace(dropout=self._dropout._replace(seed=spread(self._dropout.seed, ordinal)))
                ordinal += 1
                yield piece, part, options

    def inputs(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, part: tuple[slice, slice], options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A slab's q, k, v as the kernel takes them. Ignored keys and values are zeroed, whatever they hold."""
        q = fold(box(q, piece, group=self.group)[part], piece.rows)
        k, v = (fold(box(x, piece)[part], piece.rows) for x in (k, v))
        if options.ignored is not None:
            k, v = (x.masked_fill(options.ignored[:, None, :, None], 0.0) for x in (k, v))
        return (q.contiguous(), k.contiguous(), v.contiguous()) if self._packs else (q, k, v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, part: tuple[slice, slice], options: Options
    ) -> tuple[Tensor, Tensor]:
        """A slab's own output and lse."""
        out, lse = self.kernel.forward(*self.inputs(q, k, v, piece, part, options), options)
        if piece.zero_keys:
            add_zero_keys_(out, lse, piece.zero_keys)
        return out, lse

    def outputs(self, x: Tensor, piece: Piece, part: tuple[slice, slice], fill: float = 0.0) -> Tensor:
        """A slab's rows of `x` `(B, N, H, ...)`, which belongs to outputs, as a kernel takes them."""
        return fold(box(x, piece, group=self.group, output=True)[part], piece.rows, fill)


def forward(q: Tensor, k: Tensor, v: Tensor, loop: PieceLoop) -> tuple[Tensor, Tensor]:
    out = loop.accumulator(q.shape, q.dtype, 0.0)
    lse = loop.accumulator((q.shape[0], q.shape[2], q.shape[1]), accumulated(q.dtype), -torch.inf)
    if loop.in_place is not None:
        loop.in_place.forward(out, lse, q, k, v, loop.pieces, loop.options)
        return out, lse
    lse_rows = lse.transpose(1, 2)[..., None]
    for piece, part, options in loop.slabs():
        out_i, lse_i = loop.attend(q, k, v, piece, part, options)
        out_box = box(out, piece, group=loop.group, output=True)[part]
        lse_box = box(lse_rows, piece, group=loop.group, output=True)[part]
        out_i, lse_i = unfold(out_i, out_box), unfold(lse_i[..., None], lse_box)
        if piece.tiles:
            out_box.copy_(out_i)
            lse_box.copy_(lse_i)
        else:
            merge_(out_box, lse_box[..., 0], out_i, lse_i[..., 0])
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
        terms = loop.kernel.backward(dout_i, dlse_i, q_i, k_i, v_i, out_i, lse_i, options)
        for total_grad, grad, group in zip((dq, dk, dv), terms, (loop.group, 1, 1)):
            rows = box(total_grad, piece, group=group)[part]
            write = rows.copy_ if piece.tiles else rows.add_
            write(unfold(grad, rows))
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
