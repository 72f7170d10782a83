"""Attention over ranks as one differentiable operation.

Both directions are opaque custom operators, communication included: the compiler sees one node each, with any exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexdilated.backends import choose
from flexdilated.backends.dispatch import attend_whole
from flexdilated.backends.dropout import draw_seed
from flexdilated.core.call import Call
from flexdilated.core.checks import check, refuse_shards_of_torch
from flexdilated.core.collective_order import unknown
from flexdilated.core.custom_op import Inputs, OpOptions, operator, rows_contiguous, schema_of, shapes_of
from flexdilated.core.functorch import is_transformed
from flexdilated.core.hardware import without_autocast
from flexdilated.core.tracing import TRACES_UNKNOWN_SIZES, is_exporting, outside_graphs, refuse_regions
from flexdilated.distributed.consistency import compare, miss_call, one_call
from flexdilated.distributed.mesh import group_of, process_group
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.row_counts import rows_received
from flexdilated.distributed.planner.tasks import output_rows
from flexdilated.distributed.runtime import score_mod
from flexdilated.distributed.runtime.backward import context_backward
from flexdilated.distributed.runtime.context import RankContext, version_and_speeds
from flexdilated.distributed.runtime.forward import context_forward
from flexdilated.distributed.runtime.task_attention import OutputGradients, TaskAttention
from flexdilated.distributed.sharding import declared_lengths

UNCOMPILED = (
    "fullgraph must be False with score_mod, mask_mod or backend='flex' over several ranks, where such calls run uncompiled"
)


def attend_sharded(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """`out` `(B, n, H, D)` and `lse` `(B, H, n)` of this rank's shard, both differentiable; the call is not checked yet.

    Raises ValueError if the ranks disagree, or if `cu_seqlens` do not span the tokens.
    """
    mesh, has_sinks = call.mesh, call.sinks is not None
    assert mesh is not None
    group_name, rank, num_ranks = group_of(mesh)
    if num_ranks > 1 and torch.compiler.is_compiling():
        refuse_regions()
        if call.is_modified() or call.backend == "flex":
            if is_exporting():
                raise NotImplementedError(
                    "mesh must be None with score_mod, mask_mod or backend='flex' under torch.export, got one"
                )
            return _attend_uncompiled(q, k, v, call)
    try:
        q, k, v, call = check(q, k, v, call)
        if q.device.type != mesh.device_type:
            raise ValueError(f"q must be on the device of mesh={mesh.device_type}, got {q.device}")
        lengths = declared_lengths(rank, num_ranks, q.shape[1], call.shard_lengths)
        if sum(lengths) < 1:
            raise ValueError(f"shard_lengths must hold at least 1 token in all, got {lengths}")
        if num_ranks == 1:
            return attend_whole(q, k, v, call)
        if is_transformed(q, k, v):
            raise NotImplementedError(
                "mesh must come without torch.func and forward-mode differentiation, got a call under one; use torch.autograd"
            )
        request = call.dispatch_key(q, k, v)
        call = call.replaced(backend=choose(call.backend, request, divided=True))
        by_autograd = call.is_modified() or call.backend == "flex"
        if by_autograd and call.exchange == "ring":
            option = "score_mod and mask_mod" if call.is_modified() else "backend='flex'"
            raise NotImplementedError(
                f"exchange must be 'auto', 'gather' or 'heads' with {option}, got 'ring', which keeps no rows of other ranks: "
                "autograd keeps them"
            )
        made_by = version_and_speeds(call.exchange)
    except Exception:
        if not torch.compiler.is_compiling():
            miss_call(mesh.get_group())
        raise
    # A score function may learn where q, k and v do not: then a backward has no messages.
    sends_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    # The number of rows saved for the backward depends on document boundaries, whose values tracing does not know.
    keeps = request.differentiable and (TRACES_UNKNOWN_SIZES or call.cu_seqlens is None or not torch.compiler.is_compiling())
    context = RankContext(
        group_name=group_name,
        rank=rank,
        shard_lengths=lengths,
        exchange=call.exchange,
        differentiable=sends_gradients if by_autograd else request.differentiable,
        keeps=by_autograd or keeps,
        has_sinks=has_sinks,
        made_by=made_by,
    )
    if by_autograd:
        return _by_autograd(q, k, v, call, context)
    seed = draw_seed(call.dropout_p, call.first_sequence) if call.dropout_p > 0.0 else None
    tensors = (q, k, v, call.key_padding_mask, call.cu_seqlens, seed, unknown(q.device))
    out, lse, _, _ = CONTEXT_PARALLEL.forward(*tensors, *call.op_options().encoded(), *context)
    return out, lse


@outside_graphs(UNCOMPILED)
def _attend_uncompiled(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    return attend_sharded(q, k, v, call)


def _by_autograd(q: Tensor, k: Tensor, v: Tensor, call: Call, context: RankContext) -> tuple[Tensor, Tensor]:
    """A call with a score or mask function, or by flex_attention. No operator: autograd finds the tensors that functions hold."""
    group = process_group(context.group_name)
    inputs, op_options = Inputs(q, k, v, call.key_padding_mask, call.cu_seqlens), call.op_options()
    with one_call(group) as number:
        plan = context.plan(inputs, op_options)
        exchange = context.chosen_exchange(plan, inputs)
        if call.is_modified():
            score_mod.refuse_zero_padding(plan)
        fields = context.fields(
            plan,
            inputs,
            op_options,
            score_mod=call.score_mod is not None,
            mask_mod=call.mask_mod is not None,
            score_mod_requires_grad=call.score_mod_requires_grad,  # then there are backwards without that of q
            flex=call.backend == "flex",  # whose backward sends other messages
        )
        seed = draw_seed(call.dropout_p, call.first_sequence) if call.dropout_p > 0.0 else None
        compare(group, q.device, fields, (number,))
        return score_mod.attend_modified(
            q,
            k,
            v,
            call,
            plan=plan,
            exchange="gather" if exchange == "ring" else exchange,
            rank=context.rank,
            seed=None if seed is None else int(seed.item()),
            transport=lambda backward: context.transport(plan, fields, q.device, number, backward=backward),
        )


def _read(options: Sequence[Any]) -> tuple[OpOptions, RankContext]:
    count = len(OpOptions._fields)
    return OpOptions.decoded(options[:count]), RankContext(*options[count:])


def _work(inputs: Inputs, op_options: OpOptions, context: RankContext, plan: ContextPlan) -> TaskAttention:
    exchange = context.chosen_exchange(plan, inputs)
    inputs, rank, keeps = inputs.rows_contiguous(), context.rank, context.keeps
    return TaskAttention(inputs, op_options=op_options, plan=plan, exchange=exchange, rank=rank, keeps=keeps)


def _forward(inputs: Inputs, options: tuple[OpOptions, RankContext]) -> tuple[Tensor, ...]:
    """`out`, `lse`, the tensor that the backward needs, and the number of the call, which is known only at run time."""
    op_options, context = options
    group, device = process_group(context.group_name), inputs.q.device
    with one_call(group) as number, without_autocast(device):
        refuse_shards_of_torch(len(context.shard_lengths))
        plan = context.plan(inputs, op_options)
        fields, work = context.fields(plan, inputs, op_options), _work(inputs, op_options, context, plan)
        compare(group, device, fields, (number,))
        out, lse, received = context_forward(work, context.transport(plan, fields, device, number, backward=False))
    return out, lse, received if context.keeps else received.new_empty(0), torch.tensor(number)


def _shapes(inputs: Inputs, options: Sequence[Any]) -> tuple[Tensor, ...]:
    q = inputs.q
    received, number = q.new_empty(_received_size(inputs, options)), torch.empty((), dtype=torch.int64, device="cpu")
    return *shapes_of(q), received, number


def _received_size(inputs: Inputs, options: Sequence[Any]) -> Any:
    """Number of elements that the forward saves for the backward; a symbol if it is known only at run time."""
    q, context = inputs.q, RankContext(*options[len(OpOptions._fields) :])
    if not context.keeps:
        return 0
    # Document boundaries, and sizes that change from call to call, are known at run time only. Where that cannot be traced, each
    # length gets a graph of its own.
    sizes = (*q.shape, *context.shard_lengths)
    if inputs.cu_seqlens is not None or (TRACES_UNKNOWN_SIZES and any(isinstance(n, torch.SymInt) for n in sizes)):
        return torch.library.get_ctx().new_dynamic_size()
    op_options, _ = _read(options)
    plan = context.plan(inputs, op_options)
    exchange = context.chosen_exchange(plan, inputs)
    keys, queries = (rows_received(plan, exchange, kind, context.rank) for kind in ("kv", "q"))
    kv_width = 0 if exchange == "ring" else 2 * q.shape[3] + (inputs.key_padding_mask is not None)
    queries += output_rows(plan, exchange, context.rank, op_options.engine)
    return q.shape[0] * (keys * kv_width + queries * plan.group * q.shape[3])


def _backward(
    dout: Tensor, dlse: Tensor | None, inputs: Inputs, outputs: tuple[Tensor, ...], options: tuple[OpOptions, RankContext]
) -> tuple[Tensor, ...]:
    (op_options, context), (out, lse, received, number) = options, outputs
    plan = context.plan(inputs, op_options)
    fields = context.fields(plan, inputs, op_options)
    transport = context.transport(plan, fields, dout.device, int(number.item()), backward=True)
    output_grads = OutputGradients(dout=rows_contiguous(dout), dlse=dlse, out=rows_contiguous(out), lse=lse)
    with without_autocast(dout.device):
        work = _work(inputs, op_options, context, plan)
        return context_backward(work, output_grads, received if context.keeps else None, transport)


CONTEXT_PARALLEL = operator(
    "context_parallel",
    f"{schema_of(OpOptions)}, {schema_of(RankContext)}",
    _read,
    forward=_forward,
    shapes=_shapes,
    backward=_backward,
    more_outputs=("received", "number"),
    over_ranks=True,
)
