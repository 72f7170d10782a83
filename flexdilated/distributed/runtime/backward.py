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
    work: TaskAttention, outputs: OutputGradients, received: Tensor | None, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv` of this rank's shard, from its own outputs and those of all other ranks.

    Args:
        work, transport: As in the forward, with other tags.
        outputs: `dout`, `out` `(B, n, H, D)`, `dlse`, `lse` `(B, H, n)` of this rank's shard.
        received: The rows and outputs that the forward kept; None: rows are exchanged again.
    """
    buffers, (q, k, v) = work.buffers, (work.inputs.q, work.inputs.k, work.inputs.v)
    remote, wait_for_outputs = _exchange_output_gradients(work, outputs, transport)
    is_received = received is not None
    received = q.new_empty(buffers.num_received) if received is None else received
    buffers.receive_into(received[: buffers.num_received])
    branch_outs, task_outs = work.own_outputs(received) if is_received and work.keeps_outputs else (None, ())
    if not is_received:
        exchange_queries(buffers, transport)()
    # Rows have one term per branch and source: sums of many ranks are kept in float32.
    out, lse = outputs.out, outputs.lse
    local_grads = backward(
        outputs.dout, outputs.dlse, q, k, v, out=out, lse=lse, loop=work.loop, sums=buffers.sums, branch_outs=branch_outs
    )
    grads = Gradients(buffers, *local_grads)
    wait_for_outputs()
    grads_by_task = _split_by_task(work, outputs, remote)
    if branch_outs is not None:
        grads_by_task = [grads._replace(out=kept_out) for grads, kept_out in zip(grads_by_task, task_outs)]
    elif work.plan.pattern.detaches:
        grads_by_task = _with_own_outputs(work, grads_by_task, transport, received=is_received)
        is_received = True
    # In a ring, the gradients of one rank's keys return while those of the next are computed: two more messages of memory than the
    # forward.
    returning: Callable[[], None] | None = None
    for source in sources(work, transport, received=is_received):
        for peer in work.schedule.kv.receives:
            if source in (peer, None):
                grads.allocate_keys(peer)
        for number, task_grads in enumerate(grads_by_task):
            work.differentiate(number, work.keys_of(number, source), task_grads, grads)
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
    work: TaskAttention, outputs: OutputGradients, transport: Transport
) -> tuple[dict[int, Tensor], Callable[[], None]]:
    """Begin to send dout, out, lse and dlse to the ranks that computed the rows; return what comes, `(E, B, ...)`, and the wait."""
    via, buffers = work.schedule.out, work.buffers
    # Whether lse has a gradient may differ from rank to rank: the size of the message must not.
    dlse = torch.zeros_like(outputs.lse) if outputs.dlse is None else outputs.dlse
    messages = {}
    for peer in via.receives:  # ranks that sent outputs in the forward
        wide = [buffers.local_rows(x, via, peer).flatten(2) for x in (outputs.dout, outputs.out)]
        bits = [view_bits(buffers.local_rows(x.transpose(1, 2), via, peer), buffers.dtype) for x in (outputs.lse, dlse)]
        messages[peer] = torch.cat([*wide, *bits], dim=-1)
    width = buffers.group * (2 * buffers.head_dim + 2 * (buffers.sums.itemsize // buffers.dtype.itemsize))
    remote = via.split(outputs.dout.new_empty(via.num_sent, buffers.batch, width), sent=True)
    return remote, transport.swap(messages, remote)


def _split_by_task(work: TaskAttention, outputs: OutputGradients, remote: dict[int, Tensor]) -> list[OutputGradients]:
    """Per task, `dout`, `out` `(b lane) group row d`, `dlse` and `lse` `(b lane) group row` of its rows."""
    buffers = work.buffers
    width = buffers.group * buffers.head_dim
    tables: list[dict[int, Tensor]] = [{}, {}, {}, {}]
    for peer, message in remote.items():
        wide = [x.unflatten(-1, (buffers.group, -1)) for x in message[..., : 2 * width].chunk(2, dim=-1)]
        numbers = [view_bits(x, buffers.sums).unflatten(-1, (buffers.group, 1)) for x in message[..., 2 * width :].chunk(2, dim=-1)]
        for table, x in zip(tables, (*wide, *numbers)):
            table[peer] = x
    douts, outs, lses, dlses = tables
    dlse = torch.zeros_like(outputs.lse) if remote and outputs.dlse is None else outputs.dlse
    lse_rows = outputs.lse.transpose(1, 2)[..., None]
    dlse_rows = None if dlse is None else dlse.transpose(1, 2)[..., None]
    return [
        OutputGradients(
            dout=buffers.rows_of(task, outputs.dout, douts),
            dlse=None if dlse_rows is None else buffers.rows_of(task, dlse_rows, dlses)[..., 0],
            out=buffers.rows_of(task, outputs.out, outs),
            lse=buffers.rows_of(task, lse_rows, lses)[..., 0],
        )
        for task in work.schedule.tasks
    ]


def _with_own_outputs(
    work: TaskAttention, grads_by_task: list[OutputGradients], transport: Transport, *, received: bool
) -> list[OutputGradients]:
    """Replace `out` by each task's own output, computed again, which constant mixing weights need."""
    partials = work.empty_partials()
    for source in sources(work, transport, received=received):
        work.attend(partials, source)
    work.add_zero_keys(partials)
    return [grads._replace(out=out.to(work.buffers.dtype)) for grads, (out, _) in zip(grads_by_task, partials)]
