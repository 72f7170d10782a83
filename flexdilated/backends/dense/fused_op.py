"""All pieces of a pattern by a kernel backend, as one differentiable operation that keeps q, k, v, out and lse alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexdilated.backends import Choice
from flexdilated.backends.dense.piece_loop import PieceLoop, backward, forward
from flexdilated.backends.dropout import draw_seed, fold_in
from flexdilated.core.call import Call, documents
from flexdilated.core.checks import refuse_shards_of_torch
from flexdilated.core.custom_op import (
    Inputs,
    OpOptions,
    differentiate,
    is_plain_eager,
    operator,
    refuse,
    rows_contiguous,
    save,
    schema_of,
    shapes_of,
)
from flexdilated.core.functorch import is_differentiated
from flexdilated.core.hardware import without_autocast
from flexdilated.core.pieces import TokenOrder, arrange, plan_pieces
from flexdilated.core.tracing import refuse_traced_derivatives


def attend_fused(q: Tensor, k: Tensor, v: Tensor, call: Call, choice: Choice) -> tuple[Tensor, Tensor]:
    """`out` `(B, N, H, D)` and `lse` `(B, H, N)` of a checked call, both differentiable; its backend is a kernel backend."""
    if torch.compiler.is_compiling():
        refuse_traced_derivatives()
    seed = draw_seed(call.dropout_p, call.first_sequence) if call.dropout_p > 0.0 else None
    arguments = (q, k, v, call.key_padding_mask, call.cu_seqlens, seed, call.op_options(), choice)
    if not torch.compiler.is_compiling() and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        in_graph = torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        if not in_graph and not torch.is_inference_mode_enabled():
            return FlexdilatedMixture.apply(*arguments)
    return _run(*arguments)


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator, without the time that torch.library takes for it where nothing sees the difference."""
    inputs, (op_options, choice) = Inputs(*arguments[:6]), arguments[6:]
    out, lse = _forward(inputs, op_options, choice) if is_plain_eager(inputs) else MIXTURE.forward(*inputs, *op_options.encoded())
    return out, lse


def _piece_loop(inputs: Inputs, op_options: OpOptions, choice: Choice | None) -> tuple[PieceLoop, Inputs, TokenOrder]:
    """Over the whole sequence: the loop over pieces, the tensors in the order in which it reads them, and that order."""
    inputs, order, spans = inputs.rows_contiguous(), TokenOrder(), documents(inputs.cu_seqlens, inputs.q.shape[1])
    if len(spans) > 1 and op_options.engine != "triton":  # whose kernels take many pieces in one launch, wherever they are
        spans, order = arrange(spans, inputs.q.device)
    if order.tokens is not None:
        q, k, v, mask, *others = inputs
        inputs = Inputs(order.take(q), order.take(k), order.take(v), None if mask is None else order.take(mask), *others)
    kv_heads = inputs.k.shape[2]
    within = None if kv_heads == op_options.num_kv_heads else range(op_options.first_head, op_options.first_head + kv_heads)
    pieces = plan_pieces(op_options.pattern, spans, op_options.num_kv_heads, op_options.is_causal, within)
    seed = None if inputs.seed is None else fold_in(int(inputs.seed.item()), op_options.first_head << 32)
    return PieceLoop(inputs, op_options, pieces, seed, choice), inputs, order


def _forward(inputs: Inputs, op_options: OpOptions, choice: Choice | None = None) -> tuple[Tensor, ...]:
    with without_autocast(inputs.q.device):
        loop, inputs, order = _piece_loop(inputs, op_options, choice)
        out, lse = forward(inputs.q, inputs.k, inputs.v, loop)
        return (out, lse) if order.places is None else (order.put(out), order.put(lse, 2))


def _run_operator(inputs: Inputs, op_options: OpOptions) -> tuple[Tensor, ...]:
    refuse_shards_of_torch(0)  # again: a compiled graph was checked when it was traced
    return _forward(inputs, op_options)


def _shapes(inputs: Inputs, options: Sequence[Any]) -> tuple[Tensor, ...]:
    return shapes_of(inputs.q)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    inputs: Inputs,
    outputs: Sequence[Tensor],
    op_options: OpOptions,
    choice: Choice | None = None,
) -> tuple[Tensor, ...]:
    with without_autocast(dout.device):
        loop, inputs, order = _piece_loop(inputs, op_options, choice)
        dout, out, lse = rows_contiguous(dout), rows_contiguous(outputs[0]), outputs[1]
        if order.tokens is None:
            return backward(dout, dlse, *inputs[:3], out=out, lse=lse, loop=loop)
        dout, out, lse = order.take(dout), order.take(out), order.take(lse, 2)
        dlse = None if dlse is None else order.take(dlse, 2)
        return tuple(order.put(x) for x in backward(dout, dlse, *inputs[:3], out=out, lse=lse, loop=loop))


def _differentiate(*arguments: Any) -> tuple[Tensor, ...]:
    if is_differentiated(*arguments[:7]):
        refuse(None)
    grads: tuple[Tensor, ...] = MIXTURE.backward(*arguments)  # which refuses a derivative of its own
    return grads


def _differentiate_eager(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, (op_options, choice) = arguments[:10], arguments[10:]
    if torch.is_grad_enabled() or not is_plain_eager(tensors) or is_differentiated(*tensors[:7]):
        return _differentiate(*tensors, *op_options.encoded())
    dout, dlse, q, k, v, out, lse, *others = tensors
    return _backward(dout, dlse, Inputs(q, k, v, *others), (out, lse), op_options, choice)


MIXTURE = operator(
    "mixture",
    schema_of(OpOptions),
    OpOptions.decoded,
    forward=_run_operator,
    shapes=_shapes,
    backward=_backward,
    through=_differentiate,
)


class FlexdilatedMixture(torch.autograd.Function):
    """The operator with its derivative, without the time that torch.library takes for that."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        outputs = _run(*arguments)
        save(ctx, arguments, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return differentiate(ctx, _differentiate_eager, dout, dlse)
