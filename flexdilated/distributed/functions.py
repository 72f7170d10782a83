"""Users' score and mask functions over shards, and FlexAttention: rows travel by operations that autograd differentiates.

Either rows of keys and values come to the ranks of the queries ("gather"), or rows of heads to the ranks that compute them, and
their outputs back ("heads"). Between messages there are tensors that autograd sees, so that whatever the functions hold gets its
gradient: on each rank that of the pairs scored there. Their sum over the ranks is the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexdilated.backends import modified_scores
from flexdilated.backends.combine import Part, Scattered, mix
from flexdilated.backends.flex import engine as flex
from flexdilated.backends.flex.rows import Lanes, attend_rows
from flexdilated.backends.kernel import draws_of_its_own, spread
from flexdilated.core.call import Call
from flexdilated.core.checks import call_mod, first_pair, refuse_zero_keys
from flexdilated.core.custom_op import GRADIENT_MESSAGE, Inputs
from flexdilated.core.hardware import without_autocast
from flexdilated.core.pieces import Piece, plan_pieces
from flexdilated.distributed.exchange import Transport
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.tasks import local_pieces
from flexdilated.distributed.program import Job, Program
from flexdilated.distributed.rank import Share, return_keys, return_queries, rows_of_share, swap_keys, swap_outputs, swap_queries
from flexdilated.distributed.rows import Grads, Rows

Open = Callable[[bool], Transport]  # of a forward, or of its backward


def refuse_shifted(plan: ContextPlan, is_modified: bool) -> None:
    """Refuse torchscale's shifted positions, and its zero keys beside functions: alike on all ranks, whatever their parts hold.

    Raises:
        NotImplementedError: If the plan has any.
    """
    if plan.pattern.zero_padding:
        pieces = plan_pieces(plan.pattern, plan.documents, plan.num_heads, plan.is_causal, plan.within)
        if is_modified and not all(piece.holds_tokens_alone for piece in pieces):
            refuse_zero_keys(plan.num_tokens)
        flex.refuse_shifted(plan.pattern, pieces, plan.num_tokens)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, share: Share, transport: Open) -> tuple[Tensor, Tensor]:
    """`out` `(B, n, H, D)` and `lse` `(B, H, n)` of this rank's shard, differentiable, also in what the functions hold.

    Every rank must call backward where q, k or v has a gradient on any. The functions get positions of the whole sequence, and
    heads as they are numbered here.
    """
    plan, mask = share.plan, call.key_padding_mask
    lent = rows_of_share(Inputs(q.detach(), k.detach(), v.detach(), mask, None, None), share)
    bare = lent.without_tokens()
    waits: list[Callable[[], None]] = []
    q, k, v, received, token = _Fetch.apply(q, k, v, lent, bare, transport, waits)
    if call.learns:
        token = tied_to_function(token, first_score(q, call))

    def arrive() -> Tensor:
        with torch.no_grad():
            for wait in waits:
                wait()
        rows_received: Tensor = received
        return rows_received

    def deliver(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal token
        out, lse, token = _Deliver.apply(out, lse, token, bare, transport)
        return out, lse

    seed = None if share.seed is None else spread(share.seed, ((share.rank + 1) << 40) + plan.within.start)
    with draws_of_its_own(seed, q.device):
        pieces = local_pieces(plan, share.rank)
        out, lse = mixture(Inputs(q, k, v, mask, None, None), call, lent.program, pieces, plan.borders[share.rank], arrive, deliver)
    tied: tuple[Tensor, Tensor] = _Tie.apply(out, lse, token)
    return tied


def first_score(q: Tensor, call: Call) -> Tensor | None:
    """The score of the first pair, if there is a score function: whether a gradient may be asked of what it holds."""
    if call.score_mod is None:
        return None
    return call_mod("score_mod", call.score_mod, *first_pair(q))


def tied_to_function(token: Tensor, first: Tensor | None) -> Tensor:
    """A tensor without elements whose gradient is asked for where that of a score function is.

    Outputs then have a backward on every rank, also on one that computes none for others.
    """
    return token if first is None or not first.requires_grad else token + first.flatten()[:0].to(token.dtype)


def mixture(
    inputs: Inputs,
    call: Call,
    program: Program,
    pieces: Sequence[Piece],
    start: int,
    arrive: Callable[[], Tensor],
    deliver: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """What a rank computes, between its messages.

    Args:
        inputs: Of this rank's shard.
        call: Its options.
        program: What it does of cut segments.
        pieces: And inside its shard.
        start: The first token of the shard.
        arrive: Gives the rows of other ranks, flat as `Rows.take` reads them; called when the pieces are computed.
        deliver: Sends `(E, B, group, D)` and `(E, B, group)` of the rows computed for others home, and gives those that come.
    """
    q, k, v, mask, *_ = inputs
    attend_piece = flex.attend_piece if call.backend == "flex" else modified_scores.attend_piece
    with without_autocast(q.device):
        if mask is not None:
            # What ignored keys and values hold must not matter, and 0 times NaN would.
            k, v = (x.masked_fill(mask[:, :, None, None], 0.0) for x in (k, v))
        layers: list[list[Part]] = [[(piece, *attend_piece(q, k, v, mask, start, piece, call))] for piece in pieces]
        rows = Rows(Inputs(q, k, v, mask, None, None), program, keeps=True)
        rows.take(arrive())
        branches = len(call.pattern.branches)
        here: list[list[Part]] = [[] for _ in range(branches)]
        away: list[list[Part]] = [[] for _ in range(branches)]
        for job in program.jobs:
            _place(rows, job, *_task(rows, job, call), here[job.task.branch], away[job.task.branch])
        layers += here
        via = program.out
        if via:
            sent = q.new_empty(rows.batch, via.num_sent, rows.group, rows.head_dim)
            out, lse = mix(away, sent, rows.group, detach_weights=call.pattern.detach_weights)
            out, lse = deliver(out.transpose(0, 1), lse.permute(2, 0, 1))
            for peer, place in via.receives.items():
                layers.append([(Scattered(*via.rows(peer)), out[place].transpose(0, 1), lse[place].transpose(0, 1))])
        return mix(layers, q, rows.group, detach_weights=call.pattern.detach_weights)


def _task(rows: Rows, job: Job, call: Call) -> tuple[Tensor, Tensor]:
    """Out `(B, lane, row, group, D)` and lse `(B, lane, row, group)` of a task's queries."""
    task, batch, group, device = job.task, rows.batch, rows.group, rows.q.device
    k, v, hidden = rows.keys(job.keys, job)
    lanes = len(task.heads)
    if call.backend == "flex":
        places = Lanes(
            torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(lanes),
            (job.heads * group + torch.arange(group, dtype=torch.int32, device=device)).repeat(batch, 1),
            torch.from_numpy(task.tokens).to(device, torch.int32).repeat(batch),
            task.stride,
            task.queries[0],
            job.keys[0].first,
        )
        out, lse = flex.with_zero_keys(*attend_rows(rows.queries(job), k, v, hidden, places, call), task.zero_keys)
        return rows.unfolded(out, job), rows.unfolded(lse, job)
    q, k, v = (x.unflatten(0, (batch, lanes)) for x in (rows.queries(job), k, v))  # b lane group row d
    hidden = None if hidden is None else hidden.view(batch, lanes, 1, 1, -1)
    b = torch.arange(batch, device=device)[:, None, None, None, None]
    h = (job.heads.long() * group + torch.arange(group, device=device))[None, :, :, None, None]
    first = torch.as_tensor(task.tokens, device=device)[None, :, None, None, None]
    q_idx = first + task.stride * torch.arange(*task.queries, device=device)[:, None]
    kv_idx = first + task.stride * torch.arange(job.keys[0].first, job.keys[-1].end, device=device)
    per_row = batch * group * k.shape[3]
    several = max(1, modified_scores.SCORES // (per_row * q.shape[3]))
    most = max(1, modified_scores.SCORES // (per_row * min(several, lanes)))
    outs, lses = [], []
    for at in range(0, lanes, several):
        lane, parts = slice(at, at + several), []
        for row in range(0, q.shape[3], most):
            some = slice(row, row + most)
            parts.append(
                modified_scores.attend_rows(
                    q[:, lane, :, some],
                    k[:, lane],
                    v[:, lane],
                    None if hidden is None else hidden[:, lane],
                    b,
                    h[:, lane],
                    q_idx[:, lane, :, some],
                    kv_idx[:, lane],
                    call,
                )
            )
        outs.append(torch.cat([out for out, _ in parts], dim=3))
        lses.append(torch.cat([lse for _, lse in parts], dim=3))
    return torch.cat(outs, dim=1).transpose(2, 3), torch.cat(lses, dim=1).transpose(2, 3)


def _place(rows: Rows, job: Job, out: Tensor, lse: Tensor, here: list[Part], away: list[Part]) -> None:
    """Say where a task's outputs go: to rows of this shard, or to places among the rows that are sent home."""
    at = 0
    for part in job.outputs:
        span, index = slice(at, at + part.rows), part.at.read()
        at = span.stop
        if part.here:
            here.append((Scattered(index, job.heads), out[:, :, span], lse[:, :, span]))
        else:
            index = index + rows.program.out.sends[part.rank].start
            away.append((Scattered(index, torch.zeros_like(index)), out[:, :, span], lse[:, :, span]))


def return_rows(rows: Rows, received: Tensor, grads: Grads, transport: Transport) -> tuple[Tensor, ...]:
    """Send the gradients of received rows home, and add what comes to those of this rank's q, k and v: all of these."""
    rows.take(received.contiguous())
    grads.kv_rows = {peer: grad[..., : 2 * rows.head_dim].contiguous() for peer, grad in rows.kv_rows.items()}
    grads.q_rows = dict(rows.q_rows)
    return_keys(rows, transport, grads, list(rows.program.kv.sends))()
    return_queries(rows, transport, grads)
    return tuple(x.to(rows.dtype) for x in (grads.dq, grads.dk, grads.dv))


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that refuses to be differentiated; torch's own `once_differentiable` drops that part where inputs are named."""

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(GRADIENT_MESSAGE)
        return backward(ctx, *grads)

    return refusing


class _Fetch(torch.autograd.Function):
    """Rows of other ranks, flat as `Rows.take` reads them, to be read after waiting; in the backward their gradients go home.

    q, k and v pass, and so does a tensor without elements: so the backward runs on every rank, whatever was read there.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows, bare: Rows, transport: Open, waits: list[Callable[[], None]]
    ) -> tuple[Tensor, ...]:
        ctx.rows, ctx.transport = bare, transport  # a backward needs no values, which a checkpoint around this would free
        received = q.new_empty(rows.num_received)
        rows.take(received)
        going = transport(False)
        waits += [swap_queries(rows, going), swap_keys(rows, going)]
        return q.view_as(q), k.view_as(k), v.view_as(v), received, q.new_empty(0)

    @staticmethod
    @_once
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, received: Tensor, token: Tensor) -> tuple[Tensor | None, ...]:
        rows: Rows = ctx.rows
        own = (x.to(rows.sums, copy=True) for x in (dq, dk, dv))
        return *return_rows(rows, received, Grads(rows, *own), ctx.transport(True)), None, None, None, None


class _Deliver(torch.autograd.Function):
    """Outputs and lse of rows computed for others, `(E, B, group, D)` and `(E, B, group)`: what comes, of rows of these queries."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, token: Tensor, rows: Rows, transport: Open) -> tuple[Tensor, ...]:
        ctx.rows, ctx.transport = rows, transport
        return *swap_outputs(rows, transport(False), out, lse, back=False), token.view_as(token)

    @staticmethod
    @_once
    def backward(ctx: Any, dout: Tensor, dlse: Tensor, token: Tensor) -> tuple[Tensor | None, ...]:
        return *swap_outputs(ctx.rows, ctx.transport(True), dout, dlse, back=True), token, None, None


class _Tie(torch.autograd.Function):
    """Out and lse as they are; in the backward, a gradient for a tensor without elements."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)  # a checkpoint around this then computes again, with messages, on every rank
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        return dout, dlse, torch.zeros_like(token)
