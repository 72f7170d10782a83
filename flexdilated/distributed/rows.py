"""The rows that one rank reads, sends and adds to: its own by position, those of other ranks by their place in a message.

A task works on `(b lane) group row d`: sequence and lane, query head of the lane's key/value head, row, element. A message of a
peer is `(E, B, ...)`, one entry for each row that travels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from flexdilated.core.custom_op import Inputs
from flexdilated.core.lse import accumulated
from flexdilated.distributed.exchange import Links
from flexdilated.distributed.program import Job, Part, Program


class Rows:
    """The tensors of a call on one rank, and the rows that other ranks lend it, which it keeps; in a ring they pass."""

    def __init__(self, inputs: Inputs, program: Program, *, keeps: bool) -> None:
        self.q, self.k, self.v, self.mask, *_ = inputs
        self.program, self.keeps = program, keeps
        self.batch, self.heads, self.head_dim, self.dtype = self.q.shape[0], self.k.shape[2], self.q.shape[3], self.q.dtype
        self.group = self.q.shape[2] // self.heads
        self.sums = accumulated(self.dtype)
        self.kv_width = 2 * self.head_dim + (self.mask is not None)
        # By rank.
        self.kv_rows: dict[int, Tensor] = {}
        self.q_rows: dict[int, Tensor] = {}

    def without_tokens(self) -> Rows:
        """The same sizes and places, and no values."""
        q, k, v = (x.new_empty((x.shape[0], 0, *x.shape[2:])) for x in (self.q, self.k, self.v))
        mask = None if self.mask is None else self.mask.new_empty((self.batch, 0))
        return Rows(Inputs(q, k, v, mask, None, None), self.program, keeps=self.keeps)

    @property
    def num_queries_received(self) -> int:
        """Elements of the queries that other ranks send."""
        return self.program.q.num_received * self.batch * self.group * self.head_dim

    @property
    def num_received(self) -> int:
        """Elements that a forward receives and its backward needs; none in a ring, where they travel again."""
        if not self.keeps:
            return 0
        return self.program.kv.num_received * self.batch * self.kv_width + self.num_queries_received

    def take(self, received: Tensor) -> None:
        """Read the rows of other ranks from a flat buffer: keys and values, unless they go round a ring, then queries."""
        kv, q = self.program.kv, self.program.q
        keys, queries = received.tensor_split([received.numel() - self.num_queries_received])
        if self.keeps:
            self.kv_rows = kv.split(keys.view(kv.num_received, self.batch, self.kv_width), sent=False)
        self.q_rows = q.split(queries.view(q.num_received, self.batch, self.group, self.head_dim), sent=False)

    def grouped(self, x: Tensor) -> Tensor:
        """`(B, n, H, ...)` as `(B, n, Hkv, group, ...)`, a view."""
        return x.unflatten(2, (self.heads, self.group))

    def kv_message(self, peer: int, into: Tensor | None = None) -> Tensor:
        """`(E, B, 2 D)`: keys and values for a peer, and a column that says which are ignored, where there is a mask."""
        tokens, heads = self.program.kv.rows(peer)
        message = self.k.new_empty(tokens.shape[0], self.batch, self.kv_width) if into is None else into
        message[..., : self.head_dim] = self.k.transpose(0, 1)[tokens, :, heads]
        message[..., self.head_dim : 2 * self.head_dim] = self.v.transpose(0, 1)[tokens, :, heads]
        if self.mask is not None:
            message[..., -1] = self.mask.T[tokens]
        return message

    def owned(self, x: Tensor, via: Links, peer: int) -> Tensor:
        """`(E, B, group, ...)`: the rows of `x` `(B, n, H, ...)` that this rank exchanges with a peer."""
        tokens, heads = via.rows(peer)
        return self.grouped(x).transpose(0, 1)[tokens, :, heads]

    def queries(self, job: Job) -> Tensor:
        """`(b lane) group row d`; the query of zeros, where there is one, comes last."""
        parts = []
        for part in job.queries:
            index = part.at.read()
            if part.here:
                parts.append(self.grouped(self.q)[:, index, job.heads])
            else:
                parts.append(rearrange(self.q_rows[part.rank][index], "lane row b group d -> b lane row group d"))
        if job.task.queries[1] > job.task.rows:
            parts.append(self.q.new_zeros(self.batch, len(job.task.heads), 1, self.group, self.head_dim))
        return _folded(parts)

    def keys(self, parts: Sequence[Part], job: Job) -> tuple[Tensor, Tensor, Tensor | None]:
        """k and v of neighbouring parts, `(b lane) 1 row d`, and which are ignored, `(b lane) row`; ignored ones hold zeros."""
        ks, vs, ignored = [], [], []
        for part in parts:
            index = part.at.read()
            if part.here:
                ks.append(self.k[:, index, job.heads])
                vs.append(self.v[:, index, job.heads])
                if self.mask is not None:
                    ignored.append(self.mask[:, index])
            else:
                rows = rearrange(self.kv_rows[part.rank][index], "lane row b d -> b lane row d")
                ks.append(rows[..., : self.head_dim])
                vs.append(rows[..., self.head_dim : 2 * self.head_dim])
                if self.mask is not None:
                    ignored.append(rows[..., -1] != 0)
        k, v = (rearrange(torch.cat(x, dim=2), "b lane row d -> (b lane) 1 row d") for x in (ks, vs))
        if not ignored:
            return k, v, None
        hidden = rearrange(torch.cat(ignored, dim=2), "b lane row -> (b lane) row")
        k, v = (x.masked_fill(hidden[:, None, :, None], 0.0) for x in (k, v))
        return k, v, hidden

    def outputs(self, job: Job, local: Tensor, remote: dict[int, Tensor]) -> Tensor:
        """A task's rows of what belongs to outputs: `local` `(B, n, H, D')` here, `remote` `(E, B, group, D')` from owners."""
        parts = []
        for part in job.outputs:
            index = part.at.read()
            if part.here:
                parts.append(self.grouped(local)[:, index, job.heads])
            else:
                parts.append(rearrange(remote[part.rank][index], "lane row b group d -> b lane row group d"))
        return _folded(parts)

    def unfolded(self, x: Tensor, job: Job) -> Tensor:
        """`(b lane) group row ...` as `b lane row group ...`."""
        return rearrange(x, "(b lane) group row ... -> b lane row group ...", lane=len(job.task.heads))


def _folded(parts: Sequence[Tensor]) -> Tensor:
    return rearrange(torch.cat(list(parts), dim=2), "b lane row group d -> (b lane) group row d")


class Grads:
    """Sums of gradients: of this rank's own tensors, and of the rows that other ranks lent."""

    def __init__(self, rows: Rows, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        self.rows, self.dq, self.dk, self.dv = rows, dq, dk, dv
        self.kv_rows: dict[int, Tensor] = {}
        self.q_rows = {peer: torch.zeros_like(lent, dtype=rows.sums) for peer, lent in rows.q_rows.items()}

    def lend(self, peer: int) -> None:
        """Make room for the gradients of a peer's keys and values."""
        place = self.rows.program.kv.receives[peer]
        shape = (place.stop - place.start, self.rows.batch, 2 * self.rows.head_dim)
        self.kv_rows[peer] = self.dk.new_zeros(shape, dtype=self.rows.sums)

    def add_queries(self, job: Job, dq: Tensor) -> None:
        """`b lane row group d`; the query of zeros, which comes last, has no gradient."""
        at, mine = 0, self.rows.grouped(self.dq)
        for part in job.queries:
            rows, index = dq[:, :, at : at + part.rows], part.at.read()
            at += part.rows
            if part.here:
                # A task meets a row once: reading, adding and writing back needs no atomic sum.
                mine[:, index, job.heads] += rows.to(mine.dtype)
            else:
                self.q_rows[part.rank][index] += rearrange(rows, "b lane row group d -> lane row b group d")

    def add_keys(self, job: Job, parts: Sequence[Part], dk: Tensor, dv: Tensor) -> None:
        """`(b lane) 1 row d` each, of neighbouring parts."""
        at = 0
        dk, dv = (rearrange(x, "(b lane) 1 row d -> b lane row d", lane=len(job.task.heads)) for x in (dk, dv))
        for part in parts:
            index, span = part.at.read(), slice(at, at + part.rows)
            at = span.stop
            if part.here:
                self.dk[:, index, job.heads] += dk[:, :, span]
                self.dv[:, index, job.heads] += dv[:, :, span]
            else:
                both = torch.cat([dk[:, :, span], dv[:, :, span]], dim=-1)
                self.kv_rows[part.rank][index] += rearrange(both, "b lane row d -> lane row b d")

    def settle_keys(self, peer: int, rows: Tensor) -> None:
        """Add `(E, B, 2 D)`: what a peer returns for the rows that this rank lent it."""
        tokens, heads = self.rows.program.kv.rows(peer)
        for total, part in zip((self.dk, self.dv), rows.to(self.rows.sums).chunk(2, dim=-1)):
            total.transpose(0, 1)[tokens, :, heads] += part

    def settle_queries(self, peer: int, rows: Tensor) -> None:
        """Add `(E, B, group, D)`."""
        tokens, heads = self.rows.program.q.rows(peer)
        mine = self.rows.grouped(self.dq).transpose(0, 1)
        mine[tokens, :, heads] += rows.to(mine.dtype)
