"""All pieces of a pattern by a kernel backend, as one differentiable operation that keeps q, k, v, out and lse alone.

With constant mixing weights it also keeps the outputs of branches, where they are few (docs/adr/0003).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.pieces import TokenOrder, arrange, kept_rows, plan_pieces
from flexdilated.core.tracing import is_exporting, refuse_traced_derivatives


def attend_fused(q: Tensor, k: Tensor, v: Tensor, call: Call, choice: Choice) -> tuple[Tensor, Tensor]:
    """`out` `(B, N, H, D)` and `lse` `(B, H, N)` of a checked call, both differentiable; its backend is a kernel backend."""
    if torch.compiler.is_compiling():
        refuse_traced_derivatives()
    seed = draw_seed(call.dropout_p, call.first_sequence) if call.dropout_p > 0.0 else None
    differentiable = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    # Outputs can be kept if sizes alone determine their number, and if the kernels write them to memory.
    keeps = call.pattern.detach_weights and call.cu_seqlens is None and call.backend != "triton" and not is_exporting()
    num_kept = _num_kept(q, call.pattern) if differentiable and keeps else 0
    arguments = (q, k, v, call.key_padding_mask, call.cu_seqlens, seed, call.op_options(), num_kept, choice)
    if differentiable and not torch.compiler.is_compiling():
        in_graph = torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        if not in_graph and not torch.is_inference_mode_enabled():
            return FlexdilatedMixture.apply(*arguments)
    out, lse, *_ = _run(*arguments)
    return out, lse


def _num_kept(q: Tensor, pattern: DilatedPattern) -> int:
    """The number of rows of kept branch outputs, over all sequences and heads of q."""
    return q.shape[0] * q.shape[2] * kept_rows(pattern, q.shape[1])


def _run(*arguments: Any) -> tuple[Tensor, ...]:
    """The operator, without the time that torch.library takes for it where nothing sees the difference."""
    inputs, (op_options, num_kept, choice) = Inputs(*arguments[:6]), arguments[6:]
    if is_plain_eager(inputs):
        return _forward(inputs, op_options, choice, keeps=num_kept > 0)
    options = op_options.encoded()
    outputs: tuple[Tensor, ...] = KEEPING.forward(*inputs, *options, num_kept) if num_kept else MIXTURE.forward(*inputs, *options)
    return outputs


def _piece_loop(inputs: Inputs, op_options: OpOptions, choice: Choice | None) -> tuple[PieceLoop, Inputs, TokenOrder]:
    """Over the whole sequence: the loop over pieces, the tensors in the order in which it reads them, and that order."""
    inputs, order, spans = inputs.rows_contiguous(), TokenOrder(), documents(inputs.cu_seqlens, inputs.q.shape[1])
    if len(spans) > 1 and op_options.engine != "triton":  # a triton launch takes many pieces at any positions
        spans, order = arrange(spans, inputs.q.device)
    if order.tokens is not None:
        q, k, v, mask, *other_inputs = inputs
        inputs = Inputs(order.take(q), order.take(k), order.take(v), None if mask is None else order.take(mask), *other_inputs)
    kv_heads = inputs.k.shape[2]
    within = None if kv_heads == op_options.num_kv_heads else range(op_options.first_head, op_options.first_head + kv_heads)
    pieces = plan_pieces(op_options.pattern, spans, op_options.num_kv_heads, op_options.is_causal, within)
    seed = None if inputs.seed is None else fold_in(int(inputs.seed.item()), op_options.first_head << 32)
    return PieceLoop(inputs, op_options, pieces, seed, choice), inputs, order


def _forward(inputs: Inputs, op_options: OpOptions, choice: Choice | None = None, *, keeps: bool = False) -> tuple[Tensor, ...]:
    """`out`, `lse` and, where it `keeps` them, the outputs of branches."""
    with without_autocast(inputs.q.device):
        loop, inputs, order = _piece_loop(inputs, op_options, choice)
        q = inputs.q
        branch_outs = q.new_empty(_num_kept(q, op_options.pattern), q.shape[3]) if keeps else None
        out, lse = forward(q, inputs.k, inputs.v, loop, branch_outs)
        if branch_outs is not None:
            return out, lse, branch_outs
        return (out, lse) if order.places is None else (order.put(out), order.put(lse, 2))


def _run_operator(inputs: Inputs, op_options: OpOptions, *, keeps: bool = False) -> tuple[Tensor, ...]:
    refuse_shards_of_torch(0)  # again: a compiled graph was checked when it was traced
    return _forward(inputs, op_options, keeps=keeps)


def _shapes(inputs: Inputs, options: Sequence[Any]) -> tuple[Tensor, ...]:
    return shapes_of(inputs.q)


def _keeping_shapes(inputs: Inputs, options: Sequence[Any]) -> tuple[Tensor, ...]:
    return *shapes_of(inputs.q), inputs.q.new_empty(options[-1], inputs.q.shape[3])


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
        branch_outs = outputs[2] if outputs[2:] else None
        if order.tokens is None:
            return backward(dout, dlse, *inputs[:3], out=out, lse=lse, loop=loop, branch_outs=branch_outs)
        dout, out, lse = order.take(dout), order.take(out), order.take(lse, 2)
        dlse = None if dlse is None else order.take(dlse, 2)
        return tuple(order.put(x) for x in backward(dout, dlse, *inputs[:3], out=out, lse=lse, loop=loop))


def _differentiate(*arguments: Any, keeps: bool = False) -> tuple[Tensor, ...]:
    if is_differentiated(*arguments[:7]):
        refuse(None)
    grads: tuple[Tensor, ...] = (KEEPING if keeps else MIXTURE).backward(*arguments)  # raises if it is differentiated in turn
    return grads


def _differentiate_eager(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, op_options, num_kept, choice = arguments
    if torch.is_grad_enabled() or not is_plain_eager(tensors) or is_differentiated(*tensors[:7]):
        return _differentiate(*tensors, *op_options.encoded(), *((num_kept,) if num_kept else ()), keeps=num_kept > 0)
    dout, dlse, q, k, v, *outputs = tensors[:-3]
    return _backward(dout, dlse, Inputs(q, k, v, *tensors[-3:]), outputs, op_options, choice)


MIXTURE = operator(
    "mixture",
    schema_of(OpOptions),
    OpOptions.decoded,
    forward=_run_operator,
    shapes=_shapes,
    backward=_backward,
    through=_differentiate,
)
KEEPING = operator(
    "mixture_keeping",
    f"{schema_of(OpOptions)}, SymInt num_kept",
    lambda values: OpOptions.decoded(values[:-1]),
    forward=partial(_run_operator, keeps=True),
    shapes=_keeping_shapes,
    backward=_backward,
    more_outputs=("kept",),
    through=partial(_differentiate, keeps=True),
)


class FlexdilatedMixture(torch.autograd.Function):
    """The operator with its derivative, without the time that torch.library takes for that."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        outputs = _run(*arguments)
        save(ctx, arguments, outputs)
        return outputs[:2]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return differentiate(ctx, _differentiate_eager, dout, dlse)
