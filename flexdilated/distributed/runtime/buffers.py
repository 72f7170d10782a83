"""The rows that one rank reads and writes: its own by token, those of other ranks by their place in a message.

A task works on `(b lane) group row d`: sequence and lane, query head of the lane's key/value head, row, element. A message is
`(E, B, ...)`, one entry for each row that travels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from flexdilated.core.custom_op import Inputs
from flexdilated.core.lse import accumulated
from flexdilated.distributed.runtime.row_index import RowExchange
from flexdilated.distributed.runtime.schedule import RowRange, Schedule, ScheduledTask


class Buffers:
    """The tensors of a rank's shard in a call, and the rows that it has received.

    `keeps`: whether keys and values of all ranks are stored at the same time. A ring stores those of one rank after another.
    """

    def __init__(self, inputs: Inputs, schedule: Schedule, *, keeps: bool) -> None:
        self.q, self.k, self.v, self.mask = inputs.q, inputs.k, inputs.v, inputs.key_padding_mask
        self.schedule, self.keeps = schedule, keeps
        self.batch, self.heads, self.head_dim, self.dtype = self.q.shape[0], self.k.shape[2], self.q.shape[3], self.q.dtype
        self.group = self.q.shape[2] // self.heads
        self.sums = accumulated(self.dtype)
        self.kv_width = 2 * self.head_dim + (self.mask is not None)
        self.kv_rows: dict[int, Tensor] = {}  # by rank
        self.q_rows: dict[int, Tensor] = {}
        # Elements of the queries that other ranks send, and of all that a forward receives and its backward needs; in a ring no
        # keys, which travel again.
        self.num_queries_received = schedule.q.num_received * self.batch * self.group * self.head_dim
        self.num_received = self.num_queries_received
        if keeps:
            self.num_received += schedule.kv.num_received * self.batch * self.kv_width

    def without_tokens(self) -> Buffers:
        """Buffers of equal sizes without tokens of this rank."""
        q, k, v = (x.new_empty((x.shape[0], 0, *x.shape[2:])) for x in (self.q, self.k, self.v))
        mask = None if self.mask is None else self.mask.new_empty((self.batch, 0))
        return Buffers(Inputs(q, k, v, key_padding_mask=mask), self.schedule, keeps=self.keeps)

    def receive_into(self, received: Tensor) -> None:
        """Use parts of a flat buffer for the rows of other ranks: keys and values (not in a ring), then queries."""
        kv, q = self.schedule.kv, self.schedule.q
        keys, queries = received.tensor_split([received.numel() - self.num_queries_received])
        if self.keeps:
            self.kv_rows = kv.split(keys.view(kv.num_received, self.batch, self.kv_width), sent=False)
        self.q_rows = q.split(queries.view(q.num_received, self.batch, self.group, self.head_dim), sent=False)

    def grouped(self, x: Tensor) -> Tensor:
        """`(B, n, H, ...)` as `(B, n, Hkv, group, ...)`, a view."""
        return x.unflatten(2, (self.heads, self.group))

    def kv_message(self, peer: int, into: Tensor | None = None) -> Tensor:
        """`(E, B, 2 D)`: keys and values for a peer, and a column that says which are ignored, if there is a mask."""
        tokens, heads = self.schedule.kv.rows(peer)
        message = self.k.new_empty(tokens.shape[0], self.batch, self.kv_width) if into is None else into
        message[..., : self.head_dim] = self.k.transpose(0, 1)[tokens, :, heads]
        message[..., self.head_dim : 2 * self.head_dim] = self.v.transpose(0, 1)[tokens, :, heads]
        if self.mask is not None:
            message[..., -1] = self.mask.T[tokens]
        return message

    def local_rows(self, x: Tensor, via: RowExchange, peer: int) -> Tensor:
        """`(E, B, group, ...)`: the rows of `x` `(B, n, H, ...)` that this rank exchanges with a peer."""
        tokens, heads = via.rows(peer)
        return self.grouped(x).transpose(0, 1)[tokens, :, heads]

    def rows_of(self, task: ScheduledTask, local: Tensor, remote: dict[int, Tensor]) -> Tensor:
        """`(b lane) group row d`: the rows of a task's queries, or of tensors shaped like its outputs.

        `local` is `(B, n, H, D')` of this rank's shard, and `remote` `(E, B, group, D')` of each other rank.
        """
        parts = [
            self.grouped(local)[:, row_range.row_index.read(), task.heads]
            if row_range.is_local
            else rearrange(remote[row_range.rank][row_range.row_index.read()], "lane row b group d -> b lane row group d")
            for row_range in task.queries
        ]
        return rearrange(torch.cat(parts, dim=2), "b lane row group d -> (b lane) group row d")

    def keys(self, ranges: Sequence[RowRange], task: ScheduledTask) -> tuple[Tensor, Tensor, Tensor | None]:
        """k and v of neighbouring ranges, `(b lane) 1 row d`, and which are ignored, `(b lane) row`; ignored ones hold zeros."""
        ks, vs, masks = [], [], []
        for row_range in ranges:
            index = row_range.row_index.read()
            if row_range.is_local:
                ks.append(self.k[:, index, task.heads])
                vs.append(self.v[:, index, task.heads])
                if self.mask is not None:
                    masks.append(self.mask[:, index])
            else:
                rows = rearrange(self.kv_rows[row_range.rank][index], "lane row b d -> b lane row d")
                ks.append(rows[..., : self.head_dim])
                vs.append(rows[..., self.head_dim : 2 * self.head_dim])
                if self.mask is not None:
                    masks.append(rows[..., -1] != 0)
        k, v = (rearrange(torch.cat(x, dim=2), "b lane row d -> (b lane) 1 row d") for x in (ks, vs))
        if not masks:
            return k, v, None
        ignored = rearrange(torch.cat(masks, dim=2), "b lane row -> (b lane) row")
        k, v = (x.masked_fill(ignored[:, None, :, None], 0.0) for x in (k, v))
        return k, v, ignored

    def unfolded(self, x: Tensor, task: ScheduledTask) -> Tensor:
        """`(b lane) group row ...` as `b lane row group ...`."""
        return rearrange(x, "(b lane) group row ... -> b lane row group ...", lane=len(task.task.heads))


class Gradients:
    """Sums of gradients: of this rank's own tensors, and of the rows that it received from other ranks."""

    def __init__(self, buffers: Buffers, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        self.buffers, self.dq, self.dk, self.dv = buffers, dq, dk, dv
        self.kv_rows: dict[int, Tensor] = {}
        self.q_rows = {peer: torch.zeros_like(rows, dtype=buffers.sums) for peer, rows in buffers.q_rows.items()}

    def allocate_keys(self, peer: int) -> None:
        """Make zero gradients of a peer's keys and values."""
        place = self.buffers.schedule.kv.receives[peer]
        shape = (place.stop - place.start, self.buffers.batch, 2 * self.buffers.head_dim)
        self.kv_rows[peer] = self.dk.new_zeros(shape, dtype=self.buffers.sums)

    def add_queries(self, task: ScheduledTask, dq: Tensor) -> None:
        """Add `b lane row group d`; the query of zeros, which comes last, has no gradient."""
        local = self.buffers.grouped(self.dq)
        for row_range in task.queries:
            span = slice(row_range.first - task.queries[0].first, row_range.end - task.queries[0].first)
            rows, index = dq[:, :, span], row_range.row_index.read()
            if row_range.is_local:
                # A task meets a row once: reading, adding and writing back needs no atomic sum.
                local[:, index, task.heads] += rows.to(local.dtype)
            else:
                self.q_rows[row_range.rank][index] += rearrange(rows, "b lane row group d -> lane row b group d")

    def add_keys(self, task: ScheduledTask, ranges: Sequence[RowRange], dk: Tensor, dv: Tensor) -> None:
        """Add `(b lane) 1 row d` each, of neighbouring ranges."""
        dk, dv = (rearrange(x, "(b lane) 1 row d -> b lane row d", lane=len(task.task.heads)) for x in (dk, dv))
        for row_range in ranges:
            span = slice(row_range.first - ranges[0].first, row_range.end - ranges[0].first)
            index = row_range.row_index.read()
            if row_range.is_local:
                self.dk[:, index, task.heads] += dk[:, :, span]
                self.dv[:, index, task.heads] += dv[:, :, span]
            else:
                dkv = torch.cat([dk[:, :, span], dv[:, :, span]], dim=-1)
                self.kv_rows[row_range.rank][index] += rearrange(dkv, "b lane row d -> lane row b d")

    def add_returned_keys(self, peer: int, rows: Tensor) -> None:
        """Add `(E, B, 2 D)`, which a peer returns for this rank's keys and values."""
        tokens, heads = self.buffers.schedule.kv.rows(peer)
        for total, grad in zip((self.dk, self.dv), rows.to(self.buffers.sums).chunk(2, dim=-1)):
            total.transpose(0, 1)[tokens, :, heads] += grad

    def add_returned_queries(self, peer: int, rows: Tensor) -> None:
        """Add `(E, B, group, D)`, which a peer returns for this rank's queries."""
        tokens, heads = self.buffers.schedule.q.rows(peer)
        local = self.buffers.grouped(self.dq).transpose(0, 1)
        local[tokens, :, heads] += rows.to(local.dtype)
