"""The backward of one rank: gradients of its own outputs, and of the outputs that it computed for other ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexdilated.backends.dense.piece_loop import backward
from flexdilated.distributed.runtime.buffers import Gradients
from flexdilated.distributed.runtime.messages import exchange_queries, return_key_gradients, return_query_gradients, view_bits
from flexdilated.distributed.runtime.ring import sources
from flexdilated.distributed.runtime.task_attention import OutputGradients, TaskAttention
from flexdilated.distributed.runtime.transport import Transport


def context_backward(
    work: TaskAttention, given: OutputGradients, received: Tensor | None, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv` of this rank's shard, from its own outputs and those of all other ranks.

    Args:
        work: As in the forward.
        given: `dout`, `out` `(B, n, H, D)`, `dlse`, `lse` `(B, H, n)` of this rank's shard.
        received: The rows that the forward received; None: they travel again.
        transport: With other tags than the forward's.
    """
    buffers, (q, k, v) = work.buffers, (work.inputs.q, work.inputs.k, work.inputs.v)
    remote, wait_for_outputs = _exchange_output_gradients(work, given, transport)
    is_received = received is not None
    received = q.new_empty(buffers.num_received) if received is None else received
    buffers.receive_into(received)
    if not is_received:
        exchange_queries(buffers, transport)()
    # Rows have one term per branch and source: sums of many ranks are kept in float32.
    inside = backward(given.dout, given.dlse, q, k, v, out=given.out, lse=given.lse, loop=work.loop, sums=buffers.sums)
    grads = Gradients(buffers, *inside)
    wait_for_outputs()
    of_tasks = _of_tasks(work, given, remote)
    if work.plan.pattern.detach_weights:
        of_tasks = _with_own_outputs(work, of_tasks, transport, received=is_received)
        is_received = True
    # In a ring, the gradients of one rank's keys return while those of the next are computed: two more messages of memory than the
    # forward.
    returning: Callable[[], None] | None = None
    for source in sources(work, transport, received=is_received):
        for peer in work.schedule.kv.receives:
            if source in (peer, None):
                grads.allocate_keys(peer)
        for number, each in enumerate(of_tasks):
            work.differentiate(number, work.keys_of(number, source), each, grads)
        if returning is not None:
            returning()
        # In this step of a ring, this rank is the source of another one.
        peers = list(work.schedule.kv.sends) if source is None else [(2 * work.rank - source) % work.plan.num_ranks]
        returning = return_key_gradients(buffers, transport, grads, peers)
    assert returning is not None  # there is a source
    returning()
    return_query_gradients(buffers, transport, grads)
    return grads.dq.to(q.dtype), grads.dk.to(k.dtype), grads.dv.to(v.dtype)


def _exchange_output_gradients(
    work: TaskAttention, given: OutputGradients, transport: Transport
) -> tuple[dict[int, Tensor], Callable[[], None]]:
    """Begin to send dout, out, lse and dlse to the ranks that computed the rows; return what comes, `(E, B, ...)`, and the wait."""
    via, buffers = work.schedule.out, work.buffers
    # Whether lse has a gradient may differ from rank to rank: the size of the message must not.
    dlse = torch.zeros_like(given.lse) if given.dlse is None else given.dlse
    messages = {}
    for peer in via.receives:  # ranks that sent outputs in the forward
        wide = [buffers.local_rows(x, via, peer).flatten(2) for x in (given.dout, given.out)]
        bits = [view_bits(buffers.local_rows(x.transpose(1, 2), via, peer), buffers.dtype) for x in (given.lse, dlse)]
        messages[peer] = torch.cat([*wide, *bits], dim=-1)
    width = buffers.group * (2 * buffers.head_dim + 2 * (buffers.sums.itemsize // buffers.dtype.itemsize))
    remote = via.split(given.dout.new_empty(via.num_sent, buffers.batch, width), sent=True)
    return remote, transport.swap(messages, remote)


def _of_tasks(work: TaskAttention, given: OutputGradients, remote: dict[int, Tensor]) -> list[OutputGradients]:
    """Per task, the gradients, outputs and lse of its rows."""
    buffers = work.buffers
    width = buffers.group * buffers.head_dim
    parts: list[dict[int, Tensor]] = [{}, {}, {}, {}]
    for peer, message in remote.items():
        wide = [x.unflatten(-1, (buffers.group, -1)) for x in message[..., : 2 * width].chunk(2, dim=-1)]
        numbers = [view_bits(x, buffers.sums).unflatten(-1, (buffers.group, 1)) for x in message[..., 2 * width :].chunk(2, dim=-1)]
        for part, x in zip(parts, (*wide, *numbers)):
            part[peer] = x
    douts, outs, lses, dlses = parts
    dlse = torch.zeros_like(given.lse) if remote and given.dlse is None else given.dlse
    lse_rows = given.lse.transpose(1, 2)[..., None]
    dlse_rows = None if dlse is None else dlse.transpose(1, 2)[..., None]
    return [
        OutputGradients(
            dout=buffers.rows_of(task, given.dout, douts),
            dlse=None if dlse_rows is None else buffers.rows_of(task, dlse_rows, dlses)[..., 0],
            out=buffers.rows_of(task, given.out, outs),
            lse=buffers.rows_of(task, lse_rows, lses)[..., 0],
        )
        for task in work.schedule.tasks
    ]


def _with_own_outputs(
    work: TaskAttention, of_tasks: list[OutputGradients], transport: Transport, *, received: bool
) -> list[OutputGradients]:
    """Replace the final output and lse by each task's own, computed again: with constant weights of branches, these are needed."""
    partials = work.empty_partials()
    for source in sources(work, transport, received=received):
        work.attend(partials, source)
    work.add_zero_keys(partials)
    found = []
    for given, (out, lse) in zip(of_tasks, partials):
        weight = torch.exp(lse - given.lse).masked_fill(given.lse == -torch.inf, 0.0)
        dout = given.dout * weight[..., None].to(given.dout.dtype)
        dlse = None if given.dlse is None else given.dlse * weight
        found.append(OutputGradients(dout=dout, dlse=dlse, out=out.to(work.buffers.dtype), lse=lse))
    return found
