"""The forward of one rank.

"gather" and "ring" bring rows of keys and values to the ranks of the queries, all at the same time or one rank after another.
"heads" brings the rows of heads to the ranks that compute them, and the outputs back. Under each of them, the queries of global
tokens that see every key go to the ranks of the keys, and their outputs come back.
"""

from __future__ import annotations

from torch import Tensor

from flexdilated.backends.dense.piece_loop import forward
from flexdilated.core.lse import merge_
from flexdilated.distributed.runtime.messages import exchange_outputs, exchange_queries
from flexdilated.distributed.runtime.ring import sources
from flexdilated.distributed.runtime.task_attention import TaskAttention
from flexdilated.distributed.runtime.transport import Transport


def context_forward(work: TaskAttention, transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `lse` of this rank's shard, and flat what a backward needs: rows of other ranks, and outputs of branches."""
    buffers, inputs = work.buffers, work.inputs
    received = inputs.q.new_empty(buffers.num_received + work.num_kept)
    buffers.receive_into(received[: buffers.num_received])
    branch_outs, task_outs = work.own_outputs(received) if work.keeps_outputs else (None, ())
    travels = work.schedule.q.sends or work.schedule.q.receives
    wait_for_queries = exchange_queries(buffers, transport) if travels else None
    pieces: list[tuple[Tensor, Tensor]] = []
    partials = work.empty_partials()

    def attend_inside() -> None:
        pieces.append(forward(inputs.q, inputs.k, inputs.v, work.loop, branch_outs))
        if wait_for_queries is not None:
            wait_for_queries()

    for source in sources(work, transport, attend_inside):
        work.attend(partials, source)
    if work.plan.pattern.zero_padding:
        work.add_zero_keys(partials)
    for kept_out, (task_out, _) in zip(task_outs, partials):
        kept_out.copy_(task_out)
    ((out, lse),) = pieces
    _merge_outputs(work, transport, out, lse, partials)
    return out, lse, received


def _merge_outputs(
    work: TaskAttention, transport: Transport, out: Tensor, lse: Tensor, partials: list[tuple[Tensor, Tensor]]
) -> None:
    """Merge the results of tasks into the outputs, here and on the ranks of the outputs."""
    via, buffers = work.schedule.out, work.buffers
    outs, lses = buffers.grouped(out), buffers.grouped(lse.transpose(1, 2))
    sent = buffers.q.new_zeros(via.num_sent, buffers.batch, buffers.group, buffers.head_dim, dtype=buffers.sums)
    sent_lse = buffers.q.new_full(sent.shape[:-1], -float("inf"), dtype=buffers.sums)
    sent_to, lse_to = via.split(sent, sent=True), via.split(sent_lse, sent=True)
    for task, partial in zip(work.schedule.tasks, partials):
        task_out, task_lse = (buffers.unfolded(x, task) for x in partial)
        for row_range in task.queries:
            span = slice(row_range.first - task.queries[0].first, row_range.end - task.queries[0].first)
            index = row_range.row_index.read()
            part, part_lse = task_out[:, :, span], task_lse[:, :, span]
            if row_range.is_local:
                _merge_at(outs, lses, (slice(None), index, task.heads), part, part_lse)
            else:
                _merge_at(sent_to[row_range.rank], lse_to[row_range.rank], index, part.movedim(0, 2), part_lse.movedim(0, 2))
    if not (via.sends or via.receives):
        return
    arrived, arrived_lse = exchange_outputs(buffers, transport, sent, sent_lse, back=False)
    for peer, place in via.receives.items():  # one after another: several peers may send outputs of one row
        tokens, heads = via.rows(peer)
        _merge_at(outs.transpose(0, 1), lses.transpose(0, 1), (tokens, slice(None), heads), arrived[place], arrived_lse[place])


def _merge_at(out: Tensor, lse: Tensor, index: object, part: Tensor, part_lse: Tensor) -> None:
    rows, rows_lse = out[index], lse[index]  # type: ignore[index]
    merge_(rows, rows_lse, part, part_lse)
    out[index], lse[index] = rows, rows_lse  # type: ignore[index]
