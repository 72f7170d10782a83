"""The one differentiable operation: all pieces of a pattern, forward and backward, by a kernel of the sdpa or flash engine.

Only q, k, v, out and lse are kept for the backward. Every piece's backward is called with the output and the log-sum-exp of the
whole mixture; since `exp(score - lse)` is then the pair's weight in the one softmax over all branches, the gradients of the pieces
add up to the exact gradient. Under `detach_weights` a piece needs its own output and log-sum-exp instead: they are computed again.

Both directions are opaque custom operators: `torch.compile` and `torch.export` see one node each, so nothing in here is traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexdilated.backends import KERNEL_ENGINES
from flexdilated.backends.flex import GRID_LIMIT
from flexdilated.backends.request import request_of
from flexdilated.backends.sdpa import Dropout, Kernel, Options, differential
from flexdilated.hardware import holds_values, without_autocast
from flexdilated.merge import accumulated, add_zero_keys_, merge_
from flexdilated.pattern import DilatedPattern
from flexdilated.pieces import Piece, box, fold, plan_pieces, slabs, unfold
from flexdilated.transforms import is_mapped, is_transformed, refuse_traced_derivatives

__all__ = ["Run", "as_pattern", "backward", "documents", "draw_seed", "forward", "mixture", "rows_contiguous", "spread"]

# Bytes of one packed tensor of a slab, on a CPU. Slabs that fit its caches are packed before they are computed: the kernels are up
# to a tenth faster than on strided rows, and the temporaries reuse the same memory instead of touching fresh pages. Elsewhere a
# piece is one launch over views, or as few as a CUDA grid allows. See docs/adr/0002.
CPU_SLAB_BYTES = 4 << 20

GRADIENT_MESSAGE = (
    "dilated_attention must not be differentiated twice, got a derivative of its own derivative: the fused attention kernels have "
    "no second derivative; use backend='reference' where one is needed"
)


def mixture(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    engine: str,
    within: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`out` `(B, N, H, D)` and `lse` `(B, H, N)` of checked arguments, both differentiable; `engine` names a kernel engine.

    `within` is `(first, total)` where the key/value heads are a part of a model's: the first one's index, and how many there are.
    """
    seed = draw_seed(dropout_p)
    first_head, num_heads = within or (0, k.shape[2])
    refuse_traced_derivatives()
    transformed = is_transformed(q, k, v) and not torch.compiler.is_compiling()
    attend: Any = _Mixture.apply if transformed else _forward_op
    out, lse = attend(
        q,
        k,
        v,
        key_padding_mask,
        cu_seqlens,
        seed,
        pattern.segment_lengths,
        pattern.dilation_rates,
        pattern.heads,
        pattern.offsets,
        pattern.zero_padding,
        pattern.detach_weights,
        is_causal,
        scale,
        dropout_p,
        engine,
        first_head,
        num_heads,
    )
    return out, lse


def draw_seed(dropout_p: float) -> Tensor | None:
    """`(1,)` int64 for attention dropout. Drawn outside the operators: activation checkpointing then draws the same seed again."""
    return torch.randint(1 << 62, (1,)) if dropout_p > 0.0 else None


class Run:
    """One walk over the slabs of some pieces: which rows, under which options."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        key_padding_mask: Tensor | None,
        seed: int | None,
        pattern: DilatedPattern,
        pieces: tuple[Piece, ...],
        is_causal: bool,
        scale: float,
        dropout_p: float,
        engine: str,
    ) -> None:
        self.pattern = pattern
        self.pieces = pieces
        self.device = q.device
        self.group = q.shape[2] // k.shape[2]
        self.kernel: Kernel = KERNEL_ENGINES[engine](request_of(q, k, k, key_padding_mask, dropout_p))
        self._batch = q.shape[0]
        self._row_bytes = self.group * q.shape[3] * q.element_size()
        self._packs = q.device.type == "cpu"
        # The mask has no heads: every head reads the same column.
        self._ignored = None if key_padding_mask is None else key_padding_mask[:, :, None, None].expand(-1, -1, k.shape[2], 1)
        self._options = Options(is_causal, scale)
        self._dropout = None if seed is None else Dropout(dropout_p, seed)

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
                options = self._options
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


def forward(q: Tensor, k: Tensor, v: Tensor, run: Run) -> tuple[Tensor, Tensor]:
    out = run.accumulator(q.shape, q.dtype, 0.0)
    lse = run.accumulator((q.shape[0], q.shape[2], q.shape[1]), accumulated(q.dtype), -torch.inf)
    lse_rows = lse.transpose(1, 2)[..., None]
    for piece, part, options in run.slabs():
        out_i, lse_i = run.attend(q, k, v, piece, part, options)
        out_box = box(out, piece, group=run.group, output=True)[part]
        lse_box = box(lse_rows, piece, group=run.group, output=True)[part]
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
    run: Run,
    sums: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv` of the pieces, in the dtype `sums`, which is by default that of the inputs."""
    # In the dtype of the inputs: a position has one term per branch, and adding those in bfloat16 adds 3 to 6 % to the error that
    # the kernels make anyway, where float32 sums cost three tensors of twice the size.
    dq, dk, dv = (run.accumulator(x.shape, sums or x.dtype, 0.0) for x in (q, k, v))
    lse_rows = lse.transpose(1, 2)[..., None]
    dlse_rows = None if dlse is None else dlse.transpose(1, 2)[..., None]
    for piece, part, options in run.slabs():
        q_i, k_i, v_i = run.inputs(q, k, v, piece, part, options)
        # Rows without an output have no gradient either: -inf takes them out of the backward.
        dout_i, lse_i = run.outputs(dout, piece, part), run.outputs(lse_rows, piece, part, -torch.inf)[..., 0]
        dlse_i = None if dlse_rows is None else run.outputs(dlse_rows, piece, part)[..., 0]
        if run.pattern.detach_weights:
            total = lse_i
            out_i, lse_i = run.attend(q, k, v, piece, part, options)
            weight = torch.exp(lse_i - total).masked_fill(total == -torch.inf, 0.0)
            dout_i = dout_i * weight[..., None].to(dout_i.dtype)
            dlse_i = None if dlse_i is None else dlse_i * weight
        else:
            out_i = run.outputs(out, piece, part)
        grads = run.kernel.backward(dout_i, dlse_i, q_i, k_i, v_i, out_i, lse_i, options)
        for total_grad, grad, group in zip((dq, dk, dv), grads, (run.group, 1, 1)):
            rows = box(total_grad, piece, group=group)[part]
            write = rows.copy_ if piece.tiles else rows.add_
            write(unfold(grad, rows))
    return dq, dk, dv


def tangent(
    tangents: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, run: Run
) -> tuple[Tensor, Tensor]:
    """`dout, dlse` for the tangents `dq, dk, dv`.

    With `p = exp(score - lse)` of the mixture, `dlse = sum p dscore` and `dout = sum p (dscore v + dv) - dlse out`, where the sums
    run over the pieces too. Zero keys move nothing. Under `detach_weights` a piece's share of dlse meets its own output instead.
    """
    dout, dlse = torch.zeros_like(out, dtype=lse.dtype), torch.zeros_like(lse)
    lse_rows, dlse_rows = (x.transpose(1, 2)[..., None] for x in (lse, dlse))
    for piece, part, options in run.slabs():
        q_i, k_i, v_i = run.inputs(q, k, v, piece, part, options)
        lse_i = run.outputs(lse_rows, piece, part, -torch.inf)[..., 0]
        moved, dlse_i = differential(run.inputs(*tangents, piece, part, options), q_i, k_i, v_i, lse_i, options)
        out_i = run.attend(q, k, v, piece, part, options)[0] if run.pattern.detach_weights else run.outputs(out, piece, part)
        dlse_i = dlse_i[..., None]
        for total, term in ((dout, moved - dlse_i * out_i), (dlse_rows, dlse_i)):
            rows = box(total, piece, group=run.group, output=True)[part]
            rows.add_(unfold(term, rows))
    return dout.to(out.dtype), dlse


def documents(cu_seqlens: Tensor | None, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """`(first token, number of tokens)` of each packed document.

    Raises:
        ValueError: If the borders do not rise from 0 to `num_tokens`.
        NotImplementedError: If they hold no values, or torch.func.vmap maps over them, outside of an operator that has been given
            each sample's.
    """
    if cu_seqlens is None:
        return ((0, num_tokens),)
    if not holds_values(cu_seqlens):  # only operators, which say shapes without them, take such
        raise NotImplementedError(
            "cu_seqlens must hold values for this call, got a meta or fake tensor: score_mod, mask_mod, backend='flex' and "
            "backend='reference' plan by them; use backend='sdpa' without functions"
        )
    if is_mapped(cu_seqlens):
        raise NotImplementedError(
            "cu_seqlens must be the same for every sample of torch.func.vmap with backend='reference', score_mod or mask_mod, got "
            "mapped borders; loop over the samples, or use backend='sdpa' without functions"
        )
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != num_tokens or any(b < a for a, b in pairwise(borders)):
        shown = borders if len(borders) <= 8 else [*borders[:4], "...", *borders[-3:]]
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens={num_tokens}, got {shown}")
    return tuple((a, b - a) for a, b in pairwise(borders))


def spread(seed: int, ordinal: int) -> int:
    """A seed for each part, unlike its neighbours' in every bit: a CPU generator reads 32 of them.

    Source: the finaliser of SplitMix64, doi 10.1145/2660193.2660195, figure 16.
    """
    z = (seed + ordinal * 0x9E3779B97F4A7C15) % (1 << 64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return (z ^ (z >> 31)) % (1 << 63)


def _whole(
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    pattern: DilatedPattern,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    engine: str,
    first_head: int,
    num_heads: int,
) -> Run:
    """The walk over a whole sequence."""
    kv_heads = k.shape[2]
    within = None if kv_heads == num_heads else range(first_head, first_head + kv_heads)
    pieces = plan_pieces(pattern, documents(cu_seqlens, q.shape[1]), num_heads, is_causal, within)
    number = None if seed is None else spread(int(seed.item()), first_head << 32)
    return Run(q, k, key_padding_mask, number, pattern, pieces, is_causal, scale, dropout_p, engine)


# -- the operators ------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("flexdilated::mixture", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    heads: str,
    offsets: str,
    zero_padding: bool,
    detach_weights: bool,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    engine: str,
    first_head: int,
    num_heads: int,
) -> tuple[Tensor, Tensor]:
    pattern = as_pattern(segment_lengths, dilation_rates, heads, offsets, zero_padding, detach_weights)
    run = _whole(q, k, key_padding_mask, cu_seqlens, seed, pattern, is_causal, scale, dropout_p, engine, first_head, num_heads)
    with without_autocast(q.device):
        return forward(rows_contiguous(q), rows_contiguous(k), rows_contiguous(v), run)


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulated(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@torch.library.custom_op("flexdilated::mixture_backward", mutates_args=())
def _backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    heads: str,
    offsets: str,
    zero_padding: bool,
    detach_weights: bool,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    engine: str,
    first_head: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    pattern = as_pattern(segment_lengths, dilation_rates, heads, offsets, zero_padding, detach_weights)
    run = _whole(q, k, key_padding_mask, cu_seqlens, seed, pattern, is_causal, scale, dropout_p, engine, first_head, num_heads)
    dout, q, k, v, out = (rows_contiguous(x) for x in (dout, q, k, v, out))
    with without_autocast(q.device):
        return backward(dout, dlse, q, k, v, out, lse, run)


@_backward_op.register_fake
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


@torch.library.custom_op("flexdilated::mixture_tangent", mutates_args=())
def _tangent_op(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    heads: str,
    offsets: str,
    zero_padding: bool,
    detach_weights: bool,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    engine: str,
    first_head: int,
    num_heads: int,
) -> tuple[Tensor, Tensor]:
    pattern = as_pattern(segment_lengths, dilation_rates, heads, offsets, zero_padding, detach_weights)
    run = _whole(q, k, key_padding_mask, cu_seqlens, seed, pattern, is_causal, scale, dropout_p, engine, first_head, num_heads)
    dq, dk, dv, q, k, v, out = (rows_contiguous(x) for x in (dq, dk, dv, q, k, v, out))
    with without_autocast(q.device):
        return tangent((dq, dk, dv), q, k, v, out, lse, run)


@_tangent_op.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (out, lse))


NUM_OPTIONS = 12  # of the operators, behind the tensors


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, key_padding_mask, cu_seqlens, seed, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, key_padding_mask, cu_seqlens, seed)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *rest = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    differentiate: Any = _Backward.apply if is_transformed(dout, dlse, q, k, v, out, lse) else _backward_op
    dq, dk, dv = differentiate(dout, dlse, q, k, v, out, lse, *rest, *ctx.options)
    return dq, dk, dv, *(None for _ in range(3 + NUM_OPTIONS))


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(GRADIENT_MESSAGE)


_forward_op.register_autograd(_differentiate, setup_context=_save)
_backward_op.register_autograd(_refuse)
_tangent_op.register_autograd(_refuse)


# -- the operators under torch.func and forward-mode differentiation, which do not reach into operators. The compiler, on the other
# -- hand, takes no Function that has a `jvp`.


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return _forward_op(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:3], *output, *inputs[3:6])

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, dout, dlse)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        saved = ctx.saved_tensors
        given = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(saved, tangents[:3])]
        differentiate: Any = _Tangent.apply if is_transformed(*given, *saved) else _tangent_op
        return differentiate(*given, *saved, *ctx.options)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _map(_Mixture, info.batch_size, in_dims, inputs)


class _Once(torch.autograd.Function):
    """What has no derivative of its own."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """There is nothing to keep."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _refuse(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _refuse(ctx, *tangents)


class _Backward(_Once):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return _backward_op(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _map(_Backward, info.batch_size, in_dims, inputs)


class _Tangent(_Once):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return _tangent_op(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _map(_Tangent, info.batch_size, in_dims, inputs)


def _map(function: Any, size: int, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    """A function of tensors whose first dim is the batch, and of options, over a mapped dim: that dim joins the batch.

    Packed documents and dropout, whose batch is one call, are computed one after another.
    """
    if torch.compiler.is_compiling():  # where code is left uncompiled, the compiler tries this function, and fails in Functions
        raise NotImplementedError("operators must be mapped by torch.func outside compiled code, got a trace; use _forward_op")
    tensors, options = inputs[:-NUM_OPTIONS], inputs[-NUM_OPTIONS:]
    if tensors[-2] is None and tensors[-1] is None:  # cu_seqlens and seed
        joined, batch = [], 0
        for x, dim in zip(tensors, in_dims):
            if x is not None:
                x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
                batch, x = x.shape[1], x.flatten(0, 1)
            joined.append(x)
        results = tuple(x.unflatten(0, (size, batch)) for x in function.apply(*joined, *options))
    else:
        each = []
        for i in range(size):
            chosen = (x if x is None or dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims))
            each.append(function.apply(*chosen, *options))
        results = tuple(torch.stack(xs) for xs in zip(*each))
    return results, (0,) * len(results)


def as_pattern(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    heads: Any,
    offsets: Any,
    zero_padding: bool,
    detach_weights: bool,
) -> DilatedPattern:
    """The pattern that an operator was given in parts."""
    return DilatedPattern(
        tuple(segment_lengths),
        tuple(dilation_rates),
        heads=heads,
        offsets=offsets,
        zero_padding=zero_padding,
        detach_weights=detach_weights,
    )


def rows_contiguous(x: Tensor) -> Tensor:
    """The kernels read any strides but the last."""
    return x if x.stride(-1) == 1 else x.contiguous()
