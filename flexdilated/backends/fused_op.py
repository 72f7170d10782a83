"""All pieces of a pattern by a kernel engine, as one differentiable operation that keeps q, k, v, out and lse alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexdilated.backends.kernel import draw_seed, spread
from flexdilated.backends.piece_loop import PieceLoop, backward, forward, tangent
from flexdilated.core.call import Call, documents
from flexdilated.core.checks import refuse_shards_of_torch
from flexdilated.core.custom_op import (
    MORE_TENSORS,
    TENSORS,
    Flat,
    Inputs,
    contiguous_like,
    declare,
    differentiate,
    operator,
    refuse,
    rows_contiguous,
    save,
    schema_of,
    shapes_of,
)
from flexdilated.core.functorch import is_transformed, refuse_traced_derivatives
from flexdilated.core.hardware import without_autocast
from flexdilated.core.pieces import Order, arrange, plan_pieces


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """`out` `(B, N, H, D)` and `lse` `(B, H, N)` of a checked call, both differentiable; its backend is a kernel engine."""
    if torch.compiler.is_compiling():
        refuse_traced_derivatives()
    transformed, run = is_transformed(q, k, v), MIXTURE.forward  # asked in traced code too: it refuses to drop tangents there
    if not torch.compiler.is_compiling():
        in_graph = torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        if transformed:
            run = _Mixture.apply
        elif torch.is_grad_enabled() and not (in_graph or torch.is_inference_mode_enabled()):
            run = FlexdilatedMixture.apply
    seed = draw_seed(call.dropout_p, call.first_sequence) if call.dropout_p > 0.0 else None
    inputs = Inputs(q, k, v, call.key_padding_mask, call.cu_seqlens, seed)
    out, lse = run(*inputs, *call.flat())
    return out, lse


def _piece_loop(inputs: Inputs, flat: Flat) -> tuple[PieceLoop, Inputs, Order]:
    """Over the whole sequence: the loop over pieces, the tensors in the order in which it reads them, and that order."""
    inputs, order, spans = inputs.rows_contiguous(), Order(), documents(inputs.cu_seqlens, inputs.q.shape[1])
    if len(spans) > 1 and flat.engine != "triton":  # whose kernels take many pieces in one launch, wherever they are
        spans, order = arrange(spans, inputs.q.device)
    if order.tokens is not None:
        q, k, v, mask, *rest = inputs
        inputs = Inputs(order.take(q), order.take(k), order.take(v), None if mask is None else order.take(mask), *rest)
    kv_heads = inputs.k.shape[2]
    within = None if kv_heads == flat.num_heads else range(flat.first_head, flat.first_head + kv_heads)
    pieces = plan_pieces(flat.pattern, spans, flat.num_heads, flat.is_causal, within)
    seed = None if inputs.seed is None else spread(int(inputs.seed.item()), flat.first_head << 32)
    return PieceLoop(inputs, flat, pieces, seed), inputs, order


def _forward(inputs: Inputs, flat: Flat) -> tuple[Tensor, ...]:
    refuse_shards_of_torch(0)  # again: a compiled graph was checked when it was traced
    with without_autocast(inputs.q.device):
        loop, inputs, order = _piece_loop(inputs, flat)
        out, lse = forward(inputs.q, inputs.k, inputs.v, loop)
        return (out, lse) if order.places is None else (order.put(out), order.put(lse, 2))


def _shapes(inputs: Inputs, flat: Flat) -> tuple[Tensor, ...]:
    return shapes_of(inputs.q)


def _backward(dout: Tensor, dlse: Tensor | None, inputs: Inputs, outputs: tuple[Tensor, ...], flat: Flat) -> tuple[Tensor, ...]:
    with without_autocast(dout.device):
        loop, inputs, order = _piece_loop(inputs, flat)
        dout, out, lse = rows_contiguous(dout), rows_contiguous(outputs[0]), outputs[1]
        if order.tokens is None:
            return backward(dout, dlse, *inputs[:3], out=out, lse=lse, loop=loop)
        dout, out, lse = order.take(dout), order.take(out), order.take(lse, 2)
        dlse = None if dlse is None else order.take(dlse, 2)
        return tuple(order.put(x) for x in backward(dout, dlse, *inputs[:3], out=out, lse=lse, loop=loop))


def _differentiate(*arguments: Any) -> tuple[Tensor, ...]:
    run = _Backward.apply if is_transformed(*arguments[:7]) else MIXTURE.backward
    return run(*arguments)


MIXTURE = operator(
    "mixture", schema_of(Flat), Flat._make, forward=_forward, shapes=_shapes, backward=_backward, through=_differentiate
)


class FlexdilatedMixture(torch.autograd.Function):
    """The operator with its derivative, without the time that torch.library takes for that: some 80 us a call (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        outputs = MIXTURE.forward(*arguments)
        save(ctx, arguments, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return differentiate(ctx, _differentiate, dout, dlse)


def _tangent(dq: Tensor, dk: Tensor, dv: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """`dout, dlse` for the tangents of q, k and v, given those, out, lse and the rest as the backward is."""
    q, k, v, out, lse, *more = arguments[:8]
    with without_autocast(q.device):
        loop, inputs, order = _piece_loop(Inputs(q, k, v, *more), Flat._make(arguments[8:]))
        dq, dk, dv, out = (order.take(rows_contiguous(x)) for x in (dq, dk, dv, out))
        dout, dlse = tangent((dq, dk, dv), inputs.q, inputs.k, v=inputs.v, out=out, lse=order.take(lse, 2), loop=loop)
        return order.put(dout), order.put(dlse, 2)


TANGENT = declare(
    "mixture_tangent",
    f"Tensor dq, Tensor dk, Tensor dv, {TENSORS}, Tensor out, Tensor lse, {MORE_TENSORS}, {schema_of(Flat)}",
    2,
    _tangent,
)
TANGENT.register_fake(lambda *arguments: tuple(contiguous_like(x) for x in arguments[6:8]))
TANGENT.register_autograd(refuse)


# For torch.func and forward-mode differentiation, which do not reach into operators. The compiler takes no Function with a `jvp`.


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return MIXTURE.forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        save(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:3], *output, *inputs[3:6])

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return differentiate(ctx, _differentiate, dout, dlse)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        saved = ctx.saved_tensors
        given = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(saved, tangents[:3])]
        run = _Tangent.apply if is_transformed(*given, *saved) else TANGENT
        return run(*given, *saved, *ctx.options)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _map(_Mixture, info.batch_size, in_dims, inputs)


def _without_derivative(run: Callable[..., tuple[Tensor, ...]]) -> Any:
    class Once(torch.autograd.Function):
        forward = staticmethod(run)
        backward = staticmethod(refuse)
        jvp = staticmethod(refuse)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            """There is nothing to keep."""

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
            return _map(Once, info.batch_size, in_dims, inputs)

    return Once


_Backward, _Tangent = _without_derivative(MIXTURE.backward), _without_derivative(TANGENT)


def _map(function: Any, size: int, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    """A function of tensors whose first dim is the batch, and of options, over a mapped dim: that dim joins the batch.

    Packed documents and dropout, whose batch is one call, are computed one after another.
    """
    if torch.compiler.is_compiling():  # where code is left uncompiled, the compiler tries this function, and fails in Functions
        raise NotImplementedError("operators must be mapped by torch.func outside compiled code, got a trace; use the operator")
    tensors, options = inputs[: -len(Flat._fields)], inputs[-len(Flat._fields) :]
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
