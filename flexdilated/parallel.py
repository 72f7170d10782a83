"""One rank's part of attention over a sharded sequence: pieces inside the shard, tasks of segments that shards cut, one merge.

Of a segment that lies in several shards, either rows of keys and values travel to the ranks of the queries ("gather": all at once;
"ring": one source after another), or the rows of whole heads travel to one rank each, and their outputs back ("heads"). A source
and a piece are the same thing: more keys, whose partial `(out, lse)` are merged; and since the backward of a part needs the output
and log-sum-exp of the whole mixture alone, the gradients of all parts, wherever they are computed, add up to the exact gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexdilated.backends.sdpa import Dropout, Options
from flexdilated.distributed.exchange import Links, Pending, Transport
from flexdilated.distributed.plan import ContextPlan
from flexdilated.distributed.program import Job, Part, program
from flexdilated.merge import accumulated, add_zero_keys_, merge_
from flexdilated.mixture import Run, backward, forward, spread

__all__ = ["Call", "context_backward", "context_forward"]


class _Block(NamedTuple):
    """Queries and keys, by row number, of one kernel call."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    is_causal: bool


def _blocks(queries: tuple[int, int], keys: tuple[int, int], is_causal: bool) -> Iterator[_Block]:
    """The kernel calls that join queries with keys: whole rectangles and, where causal, one square on the diagonal."""
    if not is_causal:
        yield _Block(queries, keys, False)
        return
    if keys[0] < min(keys[1], queries[0]):
        yield _Block(queries, (keys[0], min(keys[1], queries[0])), False)
    low, high = max(keys[0], queries[0]), min(keys[1], queries[1])
    if low < high:
        yield _Block((low, high), (low, high), True)
        if high < queries[1]:
            yield _Block((high, queries[1]), (low, high), False)


# -- one call on one rank -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Call:
    """One attention over ranks, as one rank sees it: everything but the tensors.

    Args:
        plan: What moves.
        exchange: `"gather"`, `"ring"` or `"heads"`.
        rank: This rank.
        scale: Multiplies the scores.
        dropout_p: Probability of dropping a weight.
        seed: Of the dropout: the same on all ranks or not, the parts of all ranks differ.
        engine: A kernel engine.
    """

    plan: ContextPlan
    exchange: str
    rank: int
    scale: float
    dropout_p: float = 0.0
    seed: int | None = None
    engine: str = "sdpa"


class _Work:
    """The tensors of a call and how its tasks read and write them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, call: Call) -> None:
        self.call, self.q, self.k, self.v, self.mask = call, q, k, v, key_padding_mask
        self.batch, self.heads, self.head_dim, self.dtype = q.shape[0], k.shape[2], q.shape[3], q.dtype
        self.group = q.shape[2] // k.shape[2]
        self.sums = accumulated(q.dtype)
        self.program = program(call.plan, call.exchange, call.rank, q.device)
        self.is_causal = call.plan.is_causal
        seed = None if call.seed is None else spread(call.seed, ((call.rank + 1) << 40) + (call.plan.within.start << 24))
        self._seed = seed
        pattern, pieces = call.plan.pattern, call.plan.local_pieces(call.rank)
        self.run = Run(q, k, key_padding_mask, seed, pattern, pieces, self.is_causal, call.scale, call.dropout_p, call.engine)
        # The rows of other ranks, by rank.
        self.kv_rows: dict[int, Tensor] = {}
        self.q_rows: dict[int, Tensor] = {}

    @property
    def num_queries_received(self) -> int:
        """Elements of the queries that other ranks send."""
        return self.program.q.num_received * self.batch * self.group * self.head_dim

    @property
    def num_received(self) -> int:
        """Elements that a forward receives and its backward needs; none in a ring, where they travel again."""
        if self.call.exchange == "ring":
            return 0
        return self.program.kv.num_received * self.batch * self.kv_width + self.num_queries_received

    def take(self, received: Tensor) -> None:
        """Read the rows of other ranks from a flat buffer: keys and values, unless they go round a ring, then queries."""
        kv, q = self.program.kv, self.program.q
        keys, queries = received.tensor_split([received.numel() - self.num_queries_received])
        if self.call.exchange != "ring":
            self.kv_rows = kv.split(keys.view(kv.num_received, self.batch, self.kv_width), sent=False)
        self.q_rows = q.split(queries.view(q.num_received, self.batch, self.group, self.head_dim), sent=False)

    # -- messages

    @property
    def kv_width(self) -> int:
        return 2 * self.head_dim + (self.mask is not None)

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
        return self._grouped(x).transpose(0, 1)[tokens, :, heads]

    def _grouped(self, x: Tensor) -> Tensor:
        """`(B, n, H, ...)` as `(B, n, Hkv, group, ...)`, a view."""
        return x.unflatten(2, (self.heads, self.group))

    # -- reading a task's rows: (B, lanes, group or 1, rows, D), folded to (B lanes, group or 1, rows, D)

    def _fold(self, x: Tensor) -> Tensor:
        return x.transpose(2, 3).flatten(0, 1)

    def queries(self, job: Job) -> Tensor:
        parts = []
        for part in job.queries:
            index = part.at.read()
            if part.here:
                parts.append(self._grouped(self.q)[:, index, job.heads])  # (B, lanes, rows, group, D)
            else:
                parts.append(self.q_rows[part.rank][index].permute(2, 0, 1, 3, 4))
        if job.task.queries[1] > job.task.rows:
            shape = (self.batch, len(job.task.heads), 1, self.group, self.head_dim)
            parts.append(self.q.new_zeros(shape))
        return self._fold(torch.cat(parts, dim=2))

    def keys(self, job: Job, parts: Sequence[Part]) -> tuple[Tensor, Tensor, Tensor | None]:
        """k and v of neighbouring parts, and which are ignored, `(B lanes, rows)`; ignored ones hold zeros."""
        ks, vs, ignored = [], [], []
        for part in parts:
            index = part.at.read()
            if part.here:
                ks.append(self.k[:, index, job.heads])  # (B, lanes, rows, D)
                vs.append(self.v[:, index, job.heads])
                if self.mask is not None:
                    ignored.append(self.mask[:, index])
            else:
                rows = self.kv_rows[part.rank][index].permute(2, 0, 1, 3)  # (B, lanes, rows, 2 D)
                ks.append(rows[..., : self.head_dim])
                vs.append(rows[..., self.head_dim : 2 * self.head_dim])
                if self.mask is not None:
                    ignored.append(rows[..., -1] != 0)
        k, v = (self._fold(torch.cat(x, dim=2)[:, :, :, None]) for x in (ks, vs))
        if not ignored:
            return k, v, None
        hidden = torch.cat(ignored, dim=2).flatten(0, 1)
        k, v = (x.masked_fill(hidden[:, None, :, None], 0.0) for x in (k, v))
        return k, v, hidden

    def outputs(self, job: Job, local: Tensor, remote: dict[int, Tensor]) -> Tensor:
        """A task's rows of what belongs to outputs: `local` `(B, n, H, D')` here, `remote` `(E, B, group, D')` from owners."""
        parts = []
        for part in job.outputs:
            index = part.at.read()
            if part.here:
                parts.append(self._grouped(local)[:, index, job.heads])
            else:
                parts.append(remote[part.rank][index].permute(2, 0, 1, 3, 4))
        return self._fold(torch.cat(parts, dim=2))

    def unfold(self, x: Tensor, job: Job) -> Tensor:
        """`(B lanes, group, rows, D)` as `(B, lanes, rows, group, D)`."""
        return x.unflatten(0, (self.batch, len(job.task.heads))).transpose(2, 3)

    # -- what a task computes

    def _options(self, number: int, source: int, place: int, block: _Block, ignored: Tensor | None) -> Options:
        options = Options(block.is_causal, self.call.scale, ignored)
        if self._seed is None:
            return options
        ordinal = 1 + ((number * self.call.plan.num_ranks + source) * 4 + place)
        return options._replace(dropout=Dropout(self.call.dropout_p, spread(self._seed, -ordinal)))

    def calls(self, number: int, parts: Sequence[Part]) -> Iterator[tuple[slice, slice, Tensor, Tensor, Options]]:
        """The kernel calls of a task against neighbouring parts: rows of queries, rows among the keys, k, v, options."""
        if not parts:
            return
        job = self.program.jobs[number]
        k, v, ignored = self.keys(job, parts)
        first, origin = parts[0].first, job.task.queries[0]
        for place, block in enumerate(_blocks(job.task.queries, (first, parts[-1].end), self.is_causal)):
            keys = slice(block.keys[0] - first, block.keys[1] - first)
            hidden = None if ignored is None else ignored[:, keys]
            options = self._options(number, parts[0].rank, place, block, hidden)
            yield slice(block.queries[0] - origin, block.queries[1] - origin), keys, k[:, :, keys], v[:, :, keys], options

    def start(self, number: int) -> tuple[Tensor, Tensor]:
        """A task's own `(out, lse)` before any key: `(B lanes, group, rows, D)` and `(B lanes, group, rows)`."""
        task = self.program.jobs[number].task
        shape = (self.batch * len(task.heads), self.group, task.queries[1] - task.queries[0])
        return self.q.new_zeros((*shape, self.head_dim), dtype=self.sums), self.q.new_full(shape, -torch.inf, dtype=self.sums)

    def attend(self, number: int, parts: Sequence[Part], own: tuple[Tensor, Tensor]) -> None:
        """Merge the keys of neighbouring parts into a task's own `(out, lse)`."""
        if not parts:
            return
        q = self.queries(self.program.jobs[number])
        for rows, _, k, v, options in self.calls(number, parts):
            out, lse = self.run.kernel.forward(q[:, :, rows], k, v, options)
            merge_(own[0][:, :, rows], own[1][:, :, rows], out, lse.to(self.sums))

    def finish(self, number: int, own: tuple[Tensor, Tensor]) -> None:
        """Let torchscale's zero keys take part. A causal segment's is seen by the query of zeros alone."""
        task = self.program.jobs[number].task
        if self.is_causal:
            if task.queries[1] > task.rows:
                add_zero_keys_(own[0][:, :, -1:], own[1][:, :, -1:], 1)
        elif task.zero_keys + task.zero_row:
            add_zero_keys_(*own, task.zero_keys + task.zero_row)

    def differentiate(self, number: int, parts: Sequence[Part], given: _Given, grads: _Grads) -> None:
        """Add the gradients of a task against the keys of neighbouring parts."""
        if not parts:
            return
        job = self.program.jobs[number]
        q = self.queries(job)
        dq = torch.zeros_like(q, dtype=self.sums)
        rows_of_keys = parts[-1].end - parts[0].first
        dkv = q.new_zeros((2, q.shape[0], 1, rows_of_keys, self.head_dim), dtype=self.sums)
        for rows, keys, k, v, options in self.calls(number, parts):
            results = self.run.kernel.backward(
                given.dout[:, :, rows],
                None if given.dlse is None else given.dlse[:, :, rows],
                q[:, :, rows],
                k,
                v,
                given.out[:, :, rows],
                given.lse[:, :, rows],
                options,
            )
            dq[:, :, rows] += results[0]
            dkv[0][:, :, keys] += results[1]
            dkv[1][:, :, keys] += results[2]
        grads.add_queries(job, self.unfold(dq, job))
        dk, dv = (self.unfold(x, job)[:, :, :, 0] for x in dkv)
        at = 0
        for part in parts:
            span = slice(at, at + part.rows)
            grads.add_keys(job, part, dk[:, :, span], dv[:, :, span])
            at = span.stop


class _Given(NamedTuple):
    """What a task's backward is given for its rows, as a kernel takes them."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor


class _Grads:
    """Sums of gradients: of this rank's own tensors, and of the rows that other ranks lent."""

    def __init__(self, work: _Work, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        self.work, self.dq, self.dk, self.dv = work, dq, dk, dv
        self.kv_rows: dict[int, Tensor] = {}
        self.q_rows = {peer: torch.zeros_like(rows, dtype=work.sums) for peer, rows in work.q_rows.items()}

    def lend(self, peer: int) -> None:
        """Make room for the gradients of a peer's keys and values."""
        place = self.work.program.kv.receives[peer]
        shape = (place.stop - place.start, self.work.batch, 2 * self.work.head_dim)
        self.kv_rows[peer] = self.dk.new_zeros(shape, dtype=self.work.sums)

    def add_queries(self, job: Job, dq: Tensor) -> None:
        """`(B, lanes, rows, group, D)`; the query of zeros, which comes last, has no gradient."""
        at, mine = 0, self.work._grouped(self.dq)
        for part in job.queries:
            rows, index = dq[:, :, at : at + part.rows], part.at.read()
            at += part.rows
            if part.here:
                # A task meets a row once: reading, adding and writing back needs no atomic sum.
                mine[:, index, job.heads] += rows.to(mine.dtype)
            else:
                self.q_rows[part.rank][index] += rows.permute(1, 2, 0, 3, 4)

    def add_keys(self, job: Job, part: Part, dk: Tensor, dv: Tensor) -> None:
        """`(B, lanes, rows, D)` each."""
        index = part.at.read()
        if part.here:
            self.dk[:, index, job.heads] += dk
            self.dv[:, index, job.heads] += dv
        else:
            self.kv_rows[part.rank][index] += torch.cat([dk, dv], dim=-1).permute(1, 2, 0, 3)

    def settle_keys(self, peer: int, rows: Tensor) -> None:
        """Add `(E, B, 2 D)`: what a peer returns for the rows that this rank lent it."""
        tokens, heads = self.work.program.kv.rows(peer)
        for total, part in zip((self.dk, self.dv), rows.to(self.work.sums).chunk(2, dim=-1)):
            total.transpose(0, 1)[tokens, :, heads] += part

    def settle_queries(self, peer: int, rows: Tensor) -> None:
        """Add `(E, B, group, D)`."""
        tokens, heads = self.work.program.q.rows(peer)
        mine = self.work._grouped(self.dq).transpose(0, 1)
        mine[tokens, :, heads] += rows.to(mine.dtype)


# -- forward ------------------------------------------------------------------------------------------------------------------


def context_forward(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, call: Call, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `lse` of this rank's shard, and the rows of other ranks that a backward will need, flat."""
    work = _Work(q, k, v, key_padding_mask, call)
    received = q.new_empty(work.num_received)
    jobs = work.program.jobs
    if call.exchange == "ring":
        work.take(q.new_empty(work.num_queries_received))
        _swap_queries(work, transport)()
        owns = [work.start(i) for i in range(len(jobs))]
        out, lse = _ring(work, transport, owns, between=lambda: forward(q, k, v, work.run))
    else:
        work.take(received)
        arrived = [_swap_queries(work, transport), _swap_keys(work, transport)]
        out, lse = forward(q, k, v, work.run)  # while messages travel
        for wait in arrived:
            wait()
        owns = [work.start(i) for i in range(len(jobs))]
        for i, job in enumerate(jobs):
            work.attend(i, job.keys, owns[i])
    for i, own in enumerate(owns):
        work.finish(i, own)
    _deliver(work, transport, out, lse, owns)
    return out, lse, received


def _swap_queries(work: _Work, transport: Transport) -> Callable[[], None]:
    via = work.program.q
    return transport.swap({peer: work.owned(work.q, via, peer) for peer in via.sends}, work.q_rows).wait


def _swap_keys(work: _Work, transport: Transport) -> Callable[[], None]:
    return transport.swap({peer: work.kv_message(peer) for peer in work.program.kv.sends}, work.kv_rows).wait


def _ring(work: _Work, transport: Transport, owns: list[tuple[Tensor, Tensor]], between: Callable[[], Any] = lambda: None) -> Any:
    """Merge the keys of one rank after another, each received while those before it are computed; gives what `between` gives."""
    result = None
    for source in _around(work, transport):
        if source == work.call.rank:
            result = between()
        for i, job in enumerate(work.program.jobs):
            work.attend(i, [part for part in job.keys if part.rank == source], owns[i])
    return result


def _around(work: _Work, transport: Transport) -> Iterator[int]:
    """The ranks whose keys are at hand, this one first; the next one's travel meanwhile."""
    rank, num_ranks, via = work.call.rank, work.call.plan.num_ranks, work.program.kv

    def buffer(places: Mapping[int, slice]) -> Tensor:
        rows = max((place.stop - place.start for place in places.values()), default=0)
        return work.k.new_empty(rows, work.batch, work.kv_width)

    # What was sent has left when the next message is packed; what was received is read while the next one comes.
    packed, received = buffer(via.sends), [buffer(via.receives), buffer(via.receives)]

    def begin(step: int) -> tuple[int, Pending]:
        source, target = (rank - step) % num_ranks, (rank + step) % num_ranks
        sends, receives = {}, {}
        if target in via.sends:
            place = via.sends[target]
            sends[target] = work.kv_message(target, packed[: place.stop - place.start])
        if source in via.receives:
            place = via.receives[source]
            receives[source] = received[step % 2][: place.stop - place.start]
        work.kv_rows.update(receives)
        return source, transport.swap(sends, receives)

    source = rank
    for step in range(1, num_ranks + 1):
        following = begin(step) if step < num_ranks else None
        yield source
        work.kv_rows.pop(source, None)
        if following is not None:
            source, pending = following
            pending.wait()


def _deliver(work: _Work, transport: Transport, out: Tensor, lse: Tensor, owns: list[tuple[Tensor, Tensor]]) -> None:
    """Merge what tasks computed into the outputs, here and at the ranks that own them."""
    via = work.program.out
    outs, lses = work._grouped(out), work._grouped(lse.transpose(1, 2))
    away = work.q.new_zeros(via.num_sent, work.batch, work.group, work.head_dim, dtype=work.sums)
    away_lse = work.q.new_full((via.num_sent, work.batch, work.group), -torch.inf, dtype=work.sums)
    rows_of, lse_of = via.split(away, sent=True), via.split(away_lse, sent=True)
    for job, (own, own_lse) in zip(work.program.jobs, owns):
        rows, rows_lse = work.unfold(own, job), work.unfold(own_lse, job)
        at = 0
        for part in job.outputs:
            span, index = slice(at, at + part.rows), part.at.read()
            at = span.stop
            part_out, part_lse = rows[:, :, span], rows_lse[:, :, span]
            if part.here:
                _merge_at(outs, lses, (slice(None), index, job.heads), part_out, part_lse)
            else:
                part_out, part_lse = part_out.permute(1, 2, 0, 3, 4), part_lse.permute(1, 2, 0, 3)
                _merge_at(rows_of[part.rank], lse_of[part.rank], index, part_out, part_lse)
    if not via:
        return
    message = torch.cat([away.to(work.dtype).flatten(2), _bits(away_lse, work.dtype)], dim=-1)
    received = message.new_empty(via.num_received, work.batch, message.shape[-1])
    parts = via.split(received, sent=False)
    transport.swap(via.split(message, sent=True), parts).wait()
    width = work.group * work.head_dim
    for peer, arrived in parts.items():  # peers may have computed branches of one row: one after another
        tokens, heads = via.rows(peer)
        part_out = arrived[..., :width].unflatten(-1, (work.group, work.head_dim))
        part_lse = _bits(arrived[..., width:], work.sums)
        _merge_at(outs.transpose(0, 1), lses.transpose(0, 1), (tokens, slice(None), heads), part_out, part_lse)


def _merge_at(out: Tensor, lse: Tensor, index: Any, part_out: Tensor, part_lse: Tensor) -> None:
    rows, rows_lse = out[index], lse[index]
    merge_(rows, rows_lse, part_out, part_lse)
    out[index], lse[index] = rows, rows_lse


def _bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of `(..., n)` as numbers of another dtype: they travel beside rows of that dtype."""
    # A fresh tensor: one that is contiguous by its sizes alone (1, or expanded) may have strides that cannot be viewed.
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


# -- backward -----------------------------------------------------------------------------------------------------------------


def context_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    received: Tensor,
    key_padding_mask: Tensor | None,
    call: Call,
    transport: Transport,
    *,
    kept: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv` of this rank's shard: what its own outputs and those of all other ranks ask of it.

    Without `kept` the rows of other ranks are not in `received`: they travel again.
    """
    work = _Work(q, k, v, key_padding_mask, call)
    remote, outputs_come = _swap_outputs(work, transport, dout, dlse, out, lse)
    if call.exchange == "ring":
        work.take(q.new_empty(work.num_queries_received))
        _swap_queries(work, transport)()
    elif kept:
        work.take(received)
    else:
        work.take(q.new_empty(work.num_received))
        for wait in (_swap_queries(work, transport), _swap_keys(work, transport)):
            wait()
    # Rows have one term per branch and source: sums of many ranks are kept in float32.
    grads = _Grads(work, *backward(dout, dlse, q, k, v, out, lse, work.run, work.sums))
    outputs_come()
    givens = _givens(work, transport, dout, dlse, out, lse, remote)
    if call.exchange == "ring":
        _ring_back(work, transport, givens, grads)
    else:
        for peer in work.program.kv.receives:
            grads.lend(peer)
        for i, job in enumerate(work.program.jobs):
            work.differentiate(i, job.keys, givens[i], grads)
        _return_keys(work, transport, grads, work.program.kv.sends)
    _return_queries(work, transport, grads)
    return grads.dq.to(q.dtype), grads.dk.to(k.dtype), grads.dv.to(v.dtype)


def _swap_outputs(
    work: _Work, transport: Transport, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[dict[int, Tensor], Callable[[], None]]:
    """Send dout, out, lse and dlse of rows that other ranks computed to them: `(E, B, ...)`."""
    via = work.program.out
    if dlse is None:  # whether lse has a gradient may differ from rank to rank: the message does not
        dlse = torch.zeros_like(lse)
    messages = {}
    for peer in via.receives:  # who sent outputs in the forward
        rows = [work.owned(x, via, peer).flatten(2) for x in (dout, out)]
        bits = [_bits(work.owned(x.transpose(1, 2), via, peer), work.dtype) for x in (lse, dlse)]
        messages[peer] = torch.cat([*rows, *bits], dim=-1)
    width = work.group * (2 * work.head_dim + 2 * (work.sums.itemsize // work.dtype.itemsize))
    remote = via.split(dout.new_empty(via.num_sent, work.batch, width), sent=True)
    return remote, transport.swap(messages, remote).wait


def _givens(
    work: _Work, transport: Transport, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, remote: dict[int, Tensor]
) -> list[_Given]:
    """What the backward of each task is given: gradients, output and lse of its rows."""
    width = work.group * work.head_dim
    away: list[dict[int, Tensor]] = [{}, {}, {}, {}]
    for peer, message in remote.items():
        rows = [x.unflatten(-1, (work.group, -1)) for x in message[..., : 2 * width].chunk(2, dim=-1)]
        numbers = [_bits(x, work.sums).unflatten(-1, (work.group, 1)) for x in message[..., 2 * width :].chunk(2, dim=-1)]
        for store, part in zip(away, (*rows, *numbers)):
            store[peer] = part
    if remote and dlse is None:
        dlse = torch.zeros_like(lse)
    lse_rows = lse.transpose(1, 2)[..., None]
    dlse_rows = None if dlse is None else dlse.transpose(1, 2)[..., None]
    givens = [
        _Given(
            work.outputs(job, dout, away[0]),
            None if dlse_rows is None else work.outputs(job, dlse_rows, away[3])[..., 0],
            work.outputs(job, out, away[1]),
            work.outputs(job, lse_rows, away[2])[..., 0],
        )
        for job in work.program.jobs
    ]
    return _detach(work, transport, givens) if work.call.plan.pattern.detach_weights else givens


def _detach(work: _Work, transport: Transport, givens: list[_Given]) -> list[_Given]:
    """Under constant mixing weights a task is given its own output and lse: they are computed again."""
    owns = [work.start(i) for i in range(len(givens))]
    if work.call.exchange == "ring":
        _ring(work, transport, owns)
    else:
        for i, job in enumerate(work.program.jobs):
            work.attend(i, job.keys, owns[i])
    detached = []
    for i, (given, own) in enumerate(zip(givens, owns)):
        work.finish(i, own)
        weight = torch.exp(own[1] - given.lse).masked_fill(given.lse == -torch.inf, 0.0)
        dout = given.dout * weight[..., None].to(given.dout.dtype)
        dlse = None if given.dlse is None else given.dlse * weight
        detached.append(_Given(dout, dlse, own[0].to(work.dtype), own[1]))
    return detached


def _ring_back(work: _Work, transport: Transport, givens: list[_Given], grads: _Grads) -> None:
    """Gradients of one rank's keys after another, each sent home before the next ones are computed.

    Only keys and values travel while gradients are computed: a gradient in flight would cost two more messages of memory.
    """
    rank, num_ranks, via = work.call.rank, work.call.plan.num_ranks, work.program.kv
    for step, source in enumerate(_around(work, transport)):
        if source in via.receives:
            grads.lend(source)
        for i, job in enumerate(work.program.jobs):
            work.differentiate(i, [part for part in job.keys if part.rank == source], givens[i], grads)
        target = (rank + step) % num_ranks
        _return_keys(work, transport, grads, {target: via.sends[target]} if target in via.sends else {})


def _return_keys(work: _Work, transport: Transport, grads: _Grads, lent: dict[int, slice]) -> None:
    """Send the gradients of borrowed keys and values home, and add up those of the rows that were lent to some peers."""
    messages = {peer: rows.to(work.dtype) for peer, rows in grads.kv_rows.items()}
    grads.kv_rows = {}
    shapes = {peer: (place.stop - place.start, work.batch, 2 * work.head_dim) for peer, place in lent.items()}
    returned = {peer: work.k.new_empty(shape) for peer, shape in shapes.items()}
    transport.swap(messages, returned).wait()
    for peer, rows in returned.items():  # one after another: peers may have borrowed the same row
        grads.settle_keys(peer, rows)


def _return_queries(work: _Work, transport: Transport, grads: _Grads) -> None:
    via = work.program.q
    messages = {peer: rows.to(work.dtype) for peer, rows in grads.q_rows.items()}
    returned = via.split(work.q.new_empty(via.num_sent, work.batch, work.group, work.head_dim), sent=True)
    transport.swap(messages, returned).wait()
    for peer, rows in returned.items():
        grads.settle_queries(peer, rows)
