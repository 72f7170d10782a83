"""Attention over ranks as one differentiable operation.

Both directions are opaque custom operators, communication included: the compiler sees one node each, with any exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexdilated.backends import choose
from flexdilated.backends.engines import attend as attend_whole
from flexdilated.backends.kernel import draw_seed
from flexdilated.core.call import Call
from flexdilated.core.checks import check, refuse_shards_of_torch
from flexdilated.core.collective_order import refuse_regions, unknown
from flexdilated.core.custom_op import Flat, Inputs, operator, rows_contiguous, schema_of, shapes_of
from flexdilated.core.functorch import is_transformed
from flexdilated.core.hardware import TRACES_UNKNOWN_SIZES, is_symbolic, outside_graphs, without_autocast
from flexdilated.distributed import functions
from flexdilated.distributed.consistency import Fields, compare, miss_call, one_call
from flexdilated.distributed.exchange import GroupTransport, Silence, Transport
from flexdilated.distributed.meshes import group_of
from flexdilated.distributed.place import Place, exchange_of, made_by, plan_of, resolve
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.row_counts import rows_received
from flexdilated.distributed.rank import Given, Share, context_backward, context_forward
from flexdilated.distributed.sharding import declared_lengths
from flexdilated.distributed.terms import Terms, fields_of

UNCOMPILED = (
    "fullgraph must be False with score_mod, mask_mod or backend='flex' over several ranks, where such calls run uncompiled"
)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """`out` `(B, n, H, D)` and `lse` `(B, H, n)` of this rank's shard, both differentiable.

    Raises:
        ValueError: If the ranks disagree, or the borders of documents do not tile the tokens.
    """
    mesh = call.mesh
    assert mesh is not None
    group_name, rank, num_ranks = group_of(mesh)
    if num_ranks > 1:
        refuse_regions()
    if torch.compiler.is_compiling() and num_ranks > 1 and (call.is_modified() or call.backend == "flex"):
        if torch.compiler.is_exporting():
            raise NotImplementedError("mesh must be None with score_mod, mask_mod or backend='flex' under torch.export, got one")
        return _attend_uncompiled(q, k, v, call)
    try:
        lengths = _shard_lengths(q, call, rank, num_ranks)
        if num_ranks == 1:
            return attend_whole(q, k, v, call)
        q, k, v, call = check(q, k, v, call)
        if is_transformed(q, k, v):
            raise NotImplementedError(
                "mesh must come without torch.func and forward-mode differentiation, got a call under one; use torch.autograd"
            )
        request = call.request(q, k, v, dynamic=torch.compiler.is_compiling() and is_symbolic(q.shape[1]))
        call = call._replace(backend=choose(call.backend, request, divided=True))
        by_autograd = call.is_modified() or call.backend == "flex"
        if by_autograd and call.exchange == "ring":
            asked = "score_mod and mask_mod" if call.is_modified() else "backend='flex'"
            raise NotImplementedError(
                f"exchange must be 'auto', 'gather' or 'heads' with {asked}, got 'ring', which keeps no rows of other ranks: "
                "autograd keeps them"
            )
        made = made_by(call.exchange)
    except Exception:
        if num_ranks > 1 and not torch.compiler.is_compiling():
            miss_call(resolve(group_name))
        raise
    if by_autograd:
        place = Place(group_name, rank, lengths, call.exchange, _shares_gradients(q, k, v), True, made)
        return _by_autograd(q, k, v, call, place)
    # How many rows the backward is left depends on where documents lie, which tracing does not know.
    keeps = request.differentiable and (TRACES_UNKNOWN_SIZES or call.cu_seqlens is None or not torch.compiler.is_compiling())
    place = Place(group_name, rank, lengths, call.exchange, request.differentiable, keeps, made)
    seed = draw_seed(call.dropout_p, call.first_sequence)
    tensors = (q, k, v, call.key_padding_mask, call.cu_seqlens, seed, unknown(q.device))
    out, lse, _, _ = CONTEXT_PARALLEL.forward(*tensors, *call.flat(), *place)
    return out, lse


@outside_graphs(UNCOMPILED)
def _attend_uncompiled(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    return attend(q, k, v, call)


def _shares_gradients(*tensors: Tensor) -> bool:
    """Whether a backward has messages: a score function may learn without any."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _by_autograd(q: Tensor, k: Tensor, v: Tensor, call: Call, place: Place) -> tuple[Tensor, Tensor]:
    """A call with a score or mask function, or by flex_attention. No operator: autograd finds the tensors that functions hold."""
    group = resolve(place.group_name)
    inputs, flat = Inputs(q, k, v, call.key_padding_mask, call.cu_seqlens, None), call.flat()
    with one_call(group) as number:
        plan, chosen = _plan(inputs, flat, place)
        functions.refuse_shifted(plan, call.is_modified())
        terms = Terms.of(inputs, flat, place.exchange, differentiable=place.differentiable)._replace(
            score_mod=call.score_mod is not None,
            mask_mod=call.mask_mod is not None,
            score_mod_learns=call.learns,
            flex=call.backend == "flex",
        )
        fields = fields_of(plan, terms)
        seed = draw_seed(call.dropout_p, call.first_sequence)
        share = _share(plan, "gather" if chosen == "ring" else chosen, inputs._replace(seed=seed), flat, place)
        compare(group, q.device, fields, (number,))

        def transport(backward: bool) -> Transport:
            return _transport(plan, fields, group, q.device, number, backward=backward)

        return functions.attend(q, k, v, call, share, transport)


def _transport(
    plan: ContextPlan, fields: Fields, group: dist.ProcessGroup, device: torch.device, number: int, *, backward: bool
) -> Transport:
    """Of the messages of one direction of a call."""
    if plan.is_local:
        return Silence()
    call = f"{'the backward of ' if backward else ''}call {number} over this mesh, with {plan.pattern}"
    return GroupTransport(group, device, fields.tag(number, backward=backward), call)


def _shard_lengths(q: Tensor, call: Call, rank: int, num_ranks: int) -> tuple[int, ...]:
    """Tokens of each rank."""
    assert call.mesh is not None
    if not isinstance(q, Tensor) or q.is_nested or q.dim() != 4:
        return ()  # refused with the other arguments
    if q.device.type != call.mesh.device_type:
        raise ValueError(f"q must be on the device of mesh={call.mesh.device_type}, got {q.device}")
    lengths = declared_lengths(rank, num_ranks, q.shape[1], call.shard_lengths)
    if sum(lengths) < 1:
        raise ValueError(f"shard_lengths must hold at least 1 token in all, got {lengths}")
    return lengths


def _plan(inputs: Inputs, flat: Flat, place: Place) -> tuple[ContextPlan, str]:
    """The plan of a call, and the exchange that runs it."""
    q, k, _, key_padding_mask, cu_seqlens, _ = inputs
    plan = plan_of(flat, place, k.shape[2], q.shape[2] // k.shape[2], cu_seqlens)
    return plan, exchange_of(plan, place, q.shape[3], q.dtype, q.shape[0], key_padding_mask is not None)


def _read(options: Sequence[Any]) -> tuple[Flat, Place]:
    count = len(Flat._fields)
    return Flat(*options[:count]), Place(*options[count:])


def _forward(inputs: Inputs, options: tuple[Flat, Place]) -> tuple[Tensor, ...]:
    """`out`, `lse`, the rows that the backward needs, and the number of the call, which is known when it runs and not before."""
    flat, place = options
    group, device = resolve(place.group_name), inputs.q.device
    with one_call(group) as number, without_autocast(device):
        refuse_shards_of_torch(len(place.shard_lengths))
        plan, chosen = _plan(inputs, flat, place)
        fields = fields_of(plan, Terms.of(inputs, flat, place.exchange, differentiable=place.differentiable))
        share = _share(plan, chosen, inputs, flat, place)
        compare(group, device, fields, (number,))
        transport = _transport(plan, fields, group, device, number, backward=False)
        out, lse, received = context_forward(inputs.rows_contiguous(), share, transport)
    return out, lse, received if place.keeps else received.new_empty(0), torch.tensor(number)


def _shapes(inputs: Inputs, options: tuple[Flat, Place]) -> tuple[Tensor, ...]:
    q = inputs.q
    received, number = q.new_empty(_received_size(inputs, *options)), torch.empty((), dtype=torch.int64, device="cpu")
    return *shapes_of(q), received, number


def _received_size(inputs: Inputs, flat: Flat, place: Place) -> Any:
    """Elements that the forward leaves to the backward, as far as they are known before it runs."""
    q = inputs.q
    if not place.keeps or place.exchange == "ring":
        return 0
    # Where documents lie, and sizes that change from call to call, are known at run time only. Where that cannot be traced, each
    # length gets a graph of its own.
    sizes = (*q.shape, *place.shard_lengths)
    if inputs.cu_seqlens is not None or (TRACES_UNKNOWN_SIZES and any(isinstance(n, torch.SymInt) for n in sizes)):
        return torch.library.get_ctx().new_dynamic_size()
    plan, chosen = _plan(inputs, flat, place)
    if chosen == "ring":
        return 0
    rows = [rows_received(plan, chosen, kind, place.rank) for kind in ("kv", "q")]
    kv_width = 2 * q.shape[3] + (inputs.key_padding_mask is not None)
    return q.shape[0] * (rows[0] * kv_width + rows[1] * plan.group * q.shape[3])


def _backward(
    dout: Tensor, dlse: Tensor | None, inputs: Inputs, outputs: tuple[Tensor, ...], options: tuple[Flat, Place]
) -> tuple[Tensor, ...]:
    flat, place = options
    out, lse, received, number = outputs
    plan, chosen = _plan(inputs, flat, place)
    share = _share(plan, chosen, inputs, flat, place)
    fields = fields_of(plan, Terms.of(inputs, flat, place.exchange, differentiable=place.differentiable))
    transport = _transport(plan, fields, resolve(place.group_name), dout.device, int(number.item()), backward=True)
    given = Given(rows_contiguous(dout), dlse, rows_contiguous(out), lse)
    with without_autocast(dout.device):
        return context_backward(given, inputs.rows_contiguous(), received if place.keeps else None, share, transport)


def _share(plan: ContextPlan, exchange: str, inputs: Inputs, flat: Flat, place: Place) -> Share:
    return Share(plan, exchange, place.rank, flat, None if inputs.seed is None else int(inputs.seed.item()))


CONTEXT_PARALLEL = operator(
    "context_parallel",
    f"{schema_of(Flat)}, {schema_of(Place)}",
    _read,
    forward=_forward,
    shapes=_shapes,
    backward=_backward,
    more_outputs=("received", "number"),
    over_ranks=True,
)
