"""Users' score and mask functions over shards, and FlexAttention: rows travel by operations that autograd differentiates.

Either rows of keys and values come to the ranks of the queries ("gather"), or rows of heads to the ranks that compute them, and
their outputs back ("heads"). Under both, queries of global tokens that see every key go to the ranks of the keys. Autograd sees the
tensors between the messages. So tensors that the functions hold get gradients: on each rank, those of the pairs that it scores. The
sum over the ranks is the whole gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from flexdilated.backends.autograd import functions
from flexdilated.backends.autograd.combine import PartialOutput, Scattered, mix, unshared
from flexdilated.backends.dense.windows import MOST_CHUNK, dense_pieces
from flexdilated.backends.dropout import fold_in, seeded_draws
from flexdilated.backends.flex import rows as flex
from flexdilated.core.call import Call
from flexdilated.core.checks import call_mod, first_pair, refuse_zero_keys
from flexdilated.core.custom_op import GRADIENT_MESSAGE, Inputs
from flexdilated.core.hardware import without_autocast
from flexdilated.core.lse import with_zero_keys
from flexdilated.core.pieces import UNBOUNDED, plan_pieces
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.tasks import local_pieces
from flexdilated.distributed.runtime.buffers import Buffers, Gradients
from flexdilated.distributed.runtime.messages import (
    exchange_keys,
    exchange_outputs,
    exchange_queries,
    return_key_gradients,
    return_query_gradients,
)
from flexdilated.distributed.runtime.schedule import ScheduledTask, schedule
from flexdilated.distributed.runtime.transport import Transport

Open = Callable[[bool], Transport]  # of the forward, or of its backward (True)


def refuse_zero_padding(plan: ContextPlan) -> None:
    """Reject torchscale's zero keys beside functions, equally on all ranks.

    Raises:
        NotImplementedError: If the plan has any.
    """
    if plan.pattern.zero_padding:
        pieces = plan_pieces(plan.pattern, plan.documents, plan.num_kv_heads, plan.is_causal, plan.within)
        if any(piece.zero_keys for piece in pieces):
            refuse_zero_keys(plan.num_tokens)


def attend_modified(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    *,
    plan: ContextPlan,
    exchange: str,
    rank: int,
    seed: int | None,
    transport: Open,
) -> tuple[Tensor, Tensor]:
    """`out` `(B, n, H, D)` and `lse` `(B, H, n)` of this rank's shard, differentiable, also in tensors that the functions hold.

    Every rank must call backward if q, k or v has a gradient on any rank. The functions get positions of the whole sequence, and
    heads as they are numbered here.

    Args:
        q, k, v, call: The shard and the options.
        plan: The plan of the call.
        exchange: `"gather"` or `"heads"`.
        rank: This rank.
        seed: Seed of the dropout.
        transport: Makes the transport of the forward, or of its backward (True).
    """
    mask, rows = call.key_padding_mask, schedule(plan, exchange, rank, q.device)
    q, k, v = (unshared(x) for x in (q, k, v))
    fetched = Buffers(Inputs(q.detach(), k.detach(), v.detach(), mask), rows, keeps=True)
    bare = fetched.without_tokens()
    waits: list[Callable[[], None]] = []
    q, k, v, received, token = _Fetch.apply(q, k, v, fetched, bare, transport, waits)
    if call.score_mod_requires_grad and call.score_mod is not None:
        # Outputs then have a backward on every rank, also on one that computes none for others.
        first = call_mod("score_mod", call.score_mod, *first_pair(q))
        token = token + first.flatten()[:0].to(token.dtype) if first.requires_grad else token
    attend_piece = flex.attend_piece if call.backend == "flex" else functions.attend_piece
    own_seed = None if seed is None else fold_in(seed, ((rank + 1) << 40) + plan.within.start)
    with seeded_draws(own_seed, q.device), without_autocast(q.device):
        if mask is not None:
            # What ignored keys and values hold must not matter, and 0 times NaN would.
            k, v = (x.masked_fill(mask[:, :, None, None], 0.0) for x in (k, v))
        pieces = local_pieces(plan, rank)
        pieces = pieces if call.backend == "flex" else dense_pieces(pieces, "mask", alone=True)
        layers: list[list[PartialOutput]] = [
            [(piece, *attend_piece(q, k, v, mask, int(plan.limits[rank]), piece=piece, call=call)) for piece in branch]
            for _, branch in groupby(pieces, key=lambda piece: (piece.branch, piece.part))
        ]
        with torch.no_grad():
            for wait in waits:
                wait()
        buffers = Buffers(Inputs(q, k, v, mask), rows, keeps=True)
        buffers.receive_into(received)
        local, sent = _tasks(buffers, call)
        layers += local
        via, detaches = rows.out, plan.pattern.detaches
        if via.sends or via.receives:
            sent_q = q.new_empty(buffers.batch, via.num_sent, buffers.group, buffers.head_dim)
            out, lse = mix(sent, sent_q, buffers.group, detach_weights=detaches)
            out, lse, token = _Deliver.apply(out.transpose(0, 1), lse.permute(2, 0, 1), token, bare, transport)
            for peer, place in via.receives.items():
                layers.append([(Scattered(*via.rows(peer)), out[place].transpose(0, 1), lse[place].transpose(0, 1))])
        out, lse = mix(layers, q, buffers.group, detach_weights=detaches)
    results: tuple[Tensor, Tensor] = _Tie.apply(out, lse, token)
    return results


def _tasks(buffers: Buffers, call: Call) -> tuple[list[list[PartialOutput]], list[list[PartialOutput]]]:
    """The outputs of tasks in layers as `mix` takes them: those of this shard, and those that are sent."""
    local: dict[tuple[int, ...], list[PartialOutput]] = {(): []}
    sent: dict[tuple[int, ...], list[PartialOutput]] = {(): []}
    for number, task in enumerate(buffers.schedule.tasks):
        out, lse = _attend_task(buffers, task, call)
        branch, low, _ = task.task.branch, *task.task.band
        # Two tasks of near pairs may have a query in common, and so may the pairs before and after queries of a segment.
        layer = (branch, low) if branch < len(call.pattern.segment_lengths) else (branch, low, number)
        for row_range in task.queries:
            span = slice(row_range.first - task.queries[0].first, row_range.end - task.queries[0].first)
            index = row_range.row_index.read()
            if row_range.is_local:
                part = (Scattered(index, task.heads), out[:, :, span], lse[:, :, span])
                local.setdefault(layer, []).append(part)
            else:
                index = index + buffers.schedule.out.sends[row_range.rank].start
                part = (Scattered(index, torch.zeros_like(index)), out[:, :, span], lse[:, :, span])
                sent.setdefault(layer, []).append(part)
    return [*local.values()], [*sent.values()]


def _attend_task(buffers: Buffers, scheduled: ScheduledTask, call: Call) -> tuple[Tensor, Tensor]:
    """Out `(B, lane, row, group, D)` and lse `(B, lane, row, group)` of a task's queries."""
    task, batch, group, device = scheduled.task, buffers.batch, buffers.group, buffers.q.device
    q = buffers.rows_of(scheduled, buffers.q, buffers.q_rows)
    k, v, ignored = buffers.keys(scheduled.keys, scheduled)
    lanes, first_query, first_key = len(task.heads), task.queries[0], scheduled.keys[0].first
    low, high = (bound if abs(bound) == UNBOUNDED else first_query - first_key + bound for bound in task.band)
    if call.backend == "flex":
        places = flex.Lanes(
            torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(lanes),
            (scheduled.heads * group + torch.arange(group, dtype=torch.int32, device=device)).repeat(batch, 1),
            torch.from_numpy(task.tokens + first_query * task.stride).to(device, torch.int32).repeat(batch),
            task.stride,
            key_shift=(first_key - first_query) * task.stride,
            band=(low, high),
        )
        out, lse = with_zero_keys(*flex.attend_rows(q, k, v, ignored, places, call), task.zero_keys)
        return buffers.unfolded(out, scheduled), buffers.unfolded(lse, scheduled)
    q, k, v = (x.unflatten(0, (batch, lanes)) for x in (q, k, v))  # b lane group row d
    ignored = None if ignored is None else ignored.view(batch, lanes, 1, 1, -1)
    b = torch.arange(batch, device=device)[:, None, None, None, None]
    h = (scheduled.heads.long() * group + torch.arange(group, device=device))[None, :, :, None, None]
    first = torch.as_tensor(task.tokens, device=device)[None, :, None, None, None]
    q_idx = first + task.stride * torch.arange(*task.queries, device=device)[:, None]
    kv_idx = first + task.stride * torch.arange(first_key, scheduled.keys[-1].end, device=device)
    chunks, in_tokens = [], [bound if abs(bound) == UNBOUNDED else bound * task.stride for bound in task.band]
    size = max(1 - task.band[0], MOST_CHUNK)
    for rows in (slice(row, row + size) for row in range(0, q.shape[-2], size)):
        # The keys that these queries may see; the first row of keys is not that of queries.
        columns = slice(max(0, rows.start + low), max(0, rows.stop + high))
        tensors = q[..., rows, :], k[..., columns, :], v[..., columns, :], None if ignored is None else ignored[..., columns]
        part = functions.Rows(*tensors, b, h, q_idx[..., rows, :], kv_idx[..., columns])
        chunks.append(functions.attend_lanes(part, call, (in_tokens[0], in_tokens[1])))
    out, lse = torch.cat([out for out, _ in chunks], dim=-2), torch.cat([lse for _, lse in chunks], dim=-1)
    return out.transpose(2, 3), lse.transpose(2, 3)


def _return_gradients(buffers: Buffers, received: Tensor, grads: Gradients, transport: Transport) -> tuple[Tensor, ...]:
    """Return the gradients of received rows, and add those that come to the gradients of this rank's q, k and v."""
    buffers.receive_into(received.contiguous())
    grads.kv_rows = {peer: grad[..., : 2 * buffers.head_dim].contiguous() for peer, grad in buffers.kv_rows.items()}
    grads.q_rows = dict(buffers.q_rows)
    return_key_gradients(buffers, transport, grads, list(buffers.schedule.kv.sends))()
    return_query_gradients(buffers, transport, grads)
    return tuple(x.to(buffers.dtype) for x in (grads.dq, grads.dk, grads.dv))


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that refuses to be differentiated; torch's own `once_differentiable` drops that part where inputs are named."""

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(GRADIENT_MESSAGE)
        return backward(ctx, *grads)

    return refusing


class _Fetch(torch.autograd.Function):
    """The rows of other ranks, flat as `Buffers.receive_into` reads them, to be read after waiting; the backward returns gradients.

    q, k and v pass, and so does a tensor without elements: it makes the backward run on every rank, whatever was read there.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, buffers: Buffers, bare: Buffers, transport: Open, waits: list[Callable[[], None]]
    ) -> tuple[Tensor, ...]:
        ctx.buffers, ctx.transport = bare, transport  # a backward needs no values, which a checkpoint around this would free
        received = q.new_empty(buffers.num_received)
        buffers.receive_into(received)
        forward = transport(False)
        waits += [exchange_queries(buffers, forward), exchange_keys(buffers, forward)]
        return q.view_as(q), k.view_as(k), v.view_as(v), received, q.new_empty(0)

    @staticmethod
    @_once
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, received: Tensor, token: Tensor) -> tuple[Tensor | None, ...]:
        buffers: Buffers = ctx.buffers
        totals = (x.to(buffers.sums, copy=True) for x in (dq, dk, dv))
        return *_return_gradients(buffers, received, Gradients(buffers, *totals), ctx.transport(True)), None, None, None, None


class _Deliver(torch.autograd.Function):
    """Send outputs and lse, `(E, B, group, D)` and `(E, B, group)`, to the ranks of their tokens; return those that arrive."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, token: Tensor, buffers: Buffers, transport: Open) -> tuple[Tensor, ...]:
        ctx.buffers, ctx.transport = buffers, transport
        return *exchange_outputs(buffers, transport(False), out, lse, back=False), token.view_as(token)

    @staticmethod
    @_once
    def backward(ctx: Any, dout: Tensor, dlse: Tensor, token: Tensor) -> tuple[Tensor | None, ...]:
        return *exchange_outputs(ctx.buffers, ctx.transport(True), dout, dlse, back=True), token, None, None


class _Tie(torch.autograd.Function):
    """Return `out` and `lse` unchanged; the backward also gives a zero gradient to `token`, a tensor without elements."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)  # a checkpoint around this then computes again, with messages, on every rank
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        return dout, dlse, torch.zeros_like(token)
