"""The attention that one rank computes: pieces inside its shard, and tasks of segments and near pairs that shards cut.

A task's keys may come from several ranks. Each rank's keys give a partial `(out, lse)`, and partials are merged. The backward of a
partial needs only the final `out` and `lse`. So the gradients of all partials, on whichever ranks, add up to the exact gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.backends.dense.piece_loop import PieceLoop
from flexdilated.backends.dense.windows import band_blocks
from flexdilated.backends.dropout import Dropout, fold_in
from flexdilated.backends.kernel import Options
from flexdilated.core.custom_op import Inputs, OpOptions
from flexdilated.core.lse import add_zero_keys_, for_backward, merge_
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.tasks import local_pieces, output_rows
from flexdilated.distributed.runtime.buffers import Buffers, Gradients
from flexdilated.distributed.runtime.schedule import RowRange, schedule


class OutputGradients(NamedTuple):
    """The gradients of output rows, with the final `out` and `lse` of these rows, or with a task's own."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor


class TaskAttention:
    """The attention of one call on one rank, with the tensors of its shard, by one of `EXCHANGES`.

    `keeps`: whether a forward keeps what its backward reads.
    """

    def __init__(
        self, inputs: Inputs, *, op_options: OpOptions, plan: ContextPlan, exchange: str, rank: int, keeps: bool = False
    ) -> None:
        self.inputs, self.op_options, self.plan, self.rank, self.is_ring = inputs, op_options, plan, rank, exchange == "ring"
        self.schedule = schedule(plan, exchange, rank, inputs.q.device)
        self.buffers = Buffers(inputs, self.schedule, keeps=not self.is_ring)
        num_rows = output_rows(plan, exchange, rank, op_options.engine) if keeps else 0
        self.num_kept = num_rows * self.buffers.batch * self.buffers.group * self.buffers.head_dim
        self.keeps_outputs = keeps and plan.keeps_outputs
        self._seed = None
        if inputs.seed is not None:  # another one for each rank and part of the heads
            self._seed = fold_in(int(inputs.seed.item()), ((rank + 1) << 40) + (plan.within.start << 24))
        self.loop = PieceLoop(inputs, op_options, local_pieces(plan, rank), self._seed)

    def own_outputs(self, received: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Views of the end of `received`: outputs of this rank's pieces, `(rows, D)`, and of each task, `(b lane) group row d`."""
        shapes = [torch.Size((*shape, self.buffers.head_dim)) for shape in self._shapes()]
        sizes = [shape.numel() for shape in shapes]
        outs, *tasks = received[self.buffers.num_received :].split([self.num_kept - sum(sizes), *sizes])
        return outs.view(-1, self.buffers.head_dim), tuple(x.view(shape) for x, shape in zip(tasks, shapes))

    def _shapes(self) -> Iterator[tuple[int, int, int]]:
        """The sizes `(b lane) group row` of the outputs of each task."""
        for task, *_ in self.schedule.tasks:
            yield self.buffers.batch * len(task.heads), self.buffers.group, task.queries[1] - task.queries[0]

    def empty_partials(self) -> list[tuple[Tensor, Tensor]]:
        """Per task, `(out, lse)` before any key: `(b lane) group row d` and `(b lane) group row`."""
        partials, buffers = [], self.buffers
        for shape in self._shapes():
            out = buffers.q.new_zeros((*shape, buffers.head_dim), dtype=buffers.sums)
            partials.append((out, buffers.q.new_full(shape, -torch.inf, dtype=buffers.sums)))
        return partials

    def keys_of(self, number: int, source: int | None) -> Sequence[RowRange]:
        """A task's keys in the shard of one rank; None: of all ranks."""
        keys = self.schedule.tasks[number].keys
        return keys if source is None else [row_range for row_range in keys if row_range.rank == source]

    def attend(self, partials: Sequence[tuple[Tensor, Tensor]], source: int | None = None) -> None:
        """Attend to the keys of one rank, or of all, and merge the results into each task's partial `(out, lse)`."""
        for number, (out, lse) in enumerate(partials):
            keys = self.keys_of(number, source)
            if not keys:
                continue
            q = self.buffers.rows_of(self.schedule.tasks[number], self.buffers.q, self.buffers.q_rows)
            for rows, _, k, v, options in self._calls(number, keys):
                block_out, block_lse = self.loop.kernel.forward(q[:, :, rows], k, v, options)
                merge_(out[:, :, rows], lse[:, :, rows], block_out, block_lse.to(self.buffers.sums))

    def add_zero_keys(self, partials: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add torchscale's zero keys."""
        for scheduled, (out, lse) in zip(self.schedule.tasks, partials):
            if scheduled.task.zero_keys:
                add_zero_keys_(out, lse, scheduled.task.zero_keys)

    def differentiate(self, number: int, keys: Sequence[RowRange], outputs: OutputGradients, grads: Gradients) -> None:
        """Add the gradients of a task and neighbouring ranges of its keys."""
        if not keys:
            return
        task, sums, kernel = self.schedule.tasks[number], self.buffers.sums, self.loop.differentiating(outputs.dlse)
        q = self.buffers.rows_of(task, self.buffers.q, self.buffers.q_rows)
        dq = torch.zeros_like(q, dtype=sums)
        shape = (q.shape[0], 1, keys[-1].end - keys[0].first, self.buffers.head_dim)
        dk, dv = (q.new_zeros(shape, dtype=sums) for _ in range(2))
        for rows, columns, k, v, options in self._calls(number, keys):
            lse, dlse = for_backward(outputs.lse[:, :, rows], None if outputs.dlse is None else outputs.dlse[:, :, rows])
            dout, out = outputs.dout[:, :, rows], outputs.out[:, :, rows]
            terms = kernel.backward(dout, dlse, q[:, :, rows], k, v, out=out, lse=lse, options=options)
            for total, term, span in zip((dq, dk, dv), terms, (rows, columns, columns)):
                total[:, :, span] += term
        grads.add_queries(task, self.buffers.unfolded(dq, task))
        grads.add_keys(task, keys, dk, dv)

    def _calls(self, number: int, keys: Sequence[RowRange]) -> Iterator[tuple[slice, slice, Tensor, Tensor, Options]]:
        """The kernel calls of a task for neighbouring ranges of keys: rows of queries, rows of these keys, k, v, options."""
        task = self.schedule.tasks[number]
        k, v, ignored = self.buffers.keys(keys, task)
        first, origin = keys[0].first, task.task.queries[0]
        seed = None if self._seed is None else fold_in(self._seed, -1 - (number * self.plan.num_ranks + keys[0].rank))
        for place, block in enumerate(band_blocks(task.task.queries, (first, keys[-1].end), task.task.band)):
            rows = slice(block.rows.start - origin, block.rows.stop - origin)
            columns = slice(block.columns.start - first, block.columns.stop - first)
            options = Options(
                is_causal=block.is_causal,
                scale=self.op_options.scale,
                ignored=None if ignored is None else ignored[:, columns],
                dropout=None if seed is None else Dropout(self.op_options.dropout_p, fold_in(seed, place)),
                band=block.band,
            )
            yield rows, columns, k[:, :, columns], v[:, :, columns], options
