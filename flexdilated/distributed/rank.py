"""One rank's part of attention over a sharded sequence.

Pieces inside the shard, tasks of segments that shards cut, one merge.

Of a segment that lies in several shards, either rows of keys and values travel to the ranks of the queries ("gather": all at once;
"ring": one source after another), or the rows of heads travel to the ranks that compute them, and their outputs back ("heads"). A
source and a piece are the same thing: more keys, whose partial `(out, lse)` are merged; and since the backward of a part needs the
output and log-sum-exp of the whole mixture alone, the gradients of all parts, wherever they are computed, add up to the exact
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.backends.kernel import Dropout, Options, spread
from flexdilated.backends.piece_loop import PieceLoop, backward, forward
from flexdilated.core.custom_op import Flat, Inputs
from flexdilated.core.lse import add_zero_keys_, merge_
from flexdilated.distributed.exchange import Pending, Transport
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.tasks import local_pieces
from flexdilated.distributed.program import Part, program
from flexdilated.distributed.rows import Grads, Rows


@dataclass(frozen=True, eq=False)
class Share:
    """One attention over ranks, as one rank sees it: everything but the tensors."""

    plan: ContextPlan
    exchange: str  # "gather", "ring" or "heads"
    rank: int
    flat: Flat
    seed: int | None = None  # of the dropout: the same on all ranks or not, the parts of all ranks differ


def rows_of_share(inputs: Inputs, share: Share) -> Rows:
    """The rows that a rank reads, sends and adds to; in a ring it keeps none of others."""
    return Rows(inputs, program(share.plan, share.exchange, share.rank, inputs.q.device), keeps=share.exchange != "ring")


class Given(NamedTuple):
    """What a backward is given for some rows, whose output and lse may be those of the mixture."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor


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


class _Work:
    """What a rank computes: the pieces of its shard by a loop, and tasks of cut segments, numbered as in the program."""

    def __init__(self, inputs: Inputs, share: Share) -> None:
        plan = share.plan
        self.share, self.is_ring = share, share.exchange == "ring"
        self.rows = rows_of_share(inputs, share)
        self.program = self.rows.program
        ordinal = ((share.rank + 1) << 40) + (plan.within.start << 24)
        self._seed = None if share.seed is None else spread(share.seed, ordinal)
        self.loop = PieceLoop(inputs, share.flat, local_pieces(plan, share.rank), self._seed)

    @property
    def numbers(self) -> range:
        """Of the tasks."""
        return range(len(self.program.jobs))

    def parts(self, number: int, source: int | None = None) -> list[Part]:
        """A task's keys by the ranks that own them: all of them, or those of one rank."""
        return [part for part in self.program.jobs[number].keys if source is None or part.rank == source]

    def start(self, number: int) -> tuple[Tensor, Tensor]:
        """A task's own `(out, lse)` before any key: `(b lane) group row d` and `(b lane) group row`."""
        task, rows = self.program.jobs[number].task, self.rows
        shape = (rows.batch * len(task.heads), rows.group, task.queries[1] - task.queries[0])
        return rows.q.new_zeros((*shape, rows.head_dim), dtype=rows.sums), rows.q.new_full(shape, -torch.inf, dtype=rows.sums)

    def attend(self, number: int, parts: Sequence[Part], own: tuple[Tensor, Tensor]) -> None:
        """Merge the keys of neighbouring parts into a task's own `(out, lse)`."""
        if not parts:
            return
        q = self.rows.queries(self.program.jobs[number])
        for rows, _, k, v, options in self._calls(number, parts):
            out, lse = self.loop.kernel.forward(q[:, :, rows], k, v, options)
            merge_(own[0][:, :, rows], own[1][:, :, rows], out, lse.to(self.rows.sums))

    def finish(self, number: int, own: tuple[Tensor, Tensor]) -> None:
        """Let torchscale's zero keys take part. A causal segment's is seen by the query of zeros alone."""
        task = self.program.jobs[number].task
        if self.share.plan.is_causal:
            if task.queries[1] > task.rows:
                add_zero_keys_(own[0][:, :, -1:], own[1][:, :, -1:], 1)
        elif task.zero_keys + task.zero_row:
            add_zero_keys_(*own, task.zero_keys + task.zero_row)

    def differentiate(self, number: int, parts: Sequence[Part], given: Given, grads: Grads) -> None:
        """Add the gradients of a task against the keys of neighbouring parts."""
        if not parts:
            return
        job = self.program.jobs[number]
        q = self.rows.queries(job)
        dq = torch.zeros_like(q, dtype=self.rows.sums)
        shape = (q.shape[0], 1, parts[-1].end - parts[0].first, self.rows.head_dim)
        dk, dv = (q.new_zeros(shape, dtype=self.rows.sums) for _ in range(2))
        for rows, keys, k, v, options in self._calls(number, parts):
            dout, dlse, out, lse = (None if x is None else x[:, :, rows] for x in given)
            assert dout is not None
            assert out is not None
            assert lse is not None
            terms = self.loop.kernel.backward(dout, dlse, q[:, :, rows], k, v, out, lse, options)
            for total, term, at in zip((dq, dk, dv), terms, (rows, keys, keys)):
                total[:, :, at] += term
        grads.add_queries(job, self.rows.unfolded(dq, job))
        grads.add_keys(job, parts, dk, dv)

    def _calls(self, number: int, parts: Sequence[Part]) -> Iterator[tuple[slice, slice, Tensor, Tensor, Options]]:
        """The kernel calls of a task against neighbouring parts: rows of queries, rows among the keys, k, v, options."""
        job = self.program.jobs[number]
        k, v, ignored = self.rows.keys(parts, job)
        first, origin = parts[0].first, job.task.queries[0]
        blocks = _blocks(job.task.queries, (first, parts[-1].end), self.share.plan.is_causal)
        for place, block in enumerate(blocks):
            keys = slice(block.keys[0] - first, block.keys[1] - first)
            options = Options(block.is_causal, self.share.flat.scale, None if ignored is None else ignored[:, keys])
            if self._seed is not None:
                ordinal = 1 + ((number * self.share.plan.num_ranks + parts[0].rank) * 4 + place)
                options = options._replace(dropout=Dropout(self.share.flat.dropout_p, spread(self._seed, -ordinal)))
            yield slice(block.queries[0] - origin, block.queries[1] - origin), keys, k[:, :, keys], v[:, :, keys], options


def context_forward(inputs: Inputs, share: Share, transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `lse` of this rank's shard, and the rows of other ranks that a backward will need, flat."""
    work = _Work(inputs, share)
    q, k, v, *_ = inputs
    received = q.new_empty(work.rows.num_received)
    if work.is_ring:
        work.rows.take(q.new_empty(work.rows.num_queries_received))
        swap_queries(work.rows, transport)()
        owns = [work.start(number) for number in work.numbers]
        for source in _around(work, transport):
            if source == share.rank:
                out, lse = forward(q, k, v, work.loop)  # while the next rank's keys travel
            for number in work.numbers:
                work.attend(number, work.parts(number, source), owns[number])
    else:
        work.rows.take(received)
        arrived = [swap_queries(work.rows, transport), swap_keys(work.rows, transport)]
        out, lse = forward(q, k, v, work.loop)  # while messages travel
        for wait in arrived:
            wait()
        owns = [work.start(number) for number in work.numbers]
        for number in work.numbers:
            work.attend(number, work.parts(number), owns[number])
    for number in work.numbers:
        work.finish(number, owns[number])
    _deliver(work, transport, out, lse, owns)
    return out, lse, received


def swap_queries(rows: Rows, transport: Transport) -> Callable[[], None]:
    """Begin to send and receive queries; what is given waits for them."""
    via = rows.program.q
    return transport.swap({peer: rows.owned(rows.q, via, peer) for peer in via.sends}, rows.q_rows).wait


def swap_keys(rows: Rows, transport: Transport) -> Callable[[], None]:
    """Begin to send and receive keys and values, of all peers at once; what is given waits for them."""
    return transport.swap({peer: rows.kv_message(peer) for peer in rows.program.kv.sends}, rows.kv_rows).wait


def _around(work: _Work, transport: Transport) -> Iterator[int]:
    """The ranks whose keys are at hand, this one first; the next one's travel meanwhile."""
    rows, via, rank, num_ranks = work.rows, work.program.kv, work.share.rank, work.share.plan.num_ranks

    def buffer(places: Mapping[int, slice]) -> Tensor:
        longest = max((place.stop - place.start for place in places.values()), default=0)
        return rows.k.new_empty(longest, rows.batch, rows.kv_width)

    # What was sent has left when the next message is packed; what was received is read while the next one comes.
    packed, received = buffer(via.sends), [buffer(via.receives), buffer(via.receives)]

    def begin(step: int) -> tuple[int, Pending]:
        source, target = (rank - step) % num_ranks, (rank + step) % num_ranks
        sends, receives = {}, {}
        if target in via.sends:
            place = via.sends[target]
            sends[target] = rows.kv_message(target, packed[: place.stop - place.start])
        if source in via.receives:
            place = via.receives[source]
            receives[source] = received[step % 2][: place.stop - place.start]
        rows.kv_rows.update(receives)
        return source, transport.swap(sends, receives)

    source = rank
    for step in range(1, num_ranks + 1):
        following = begin(step) if step < num_ranks else None
        yield source
        rows.kv_rows.pop(source, None)
        if following is not None:
            source, pending = following
            pending.wait()


def _deliver(work: _Work, transport: Transport, out: Tensor, lse: Tensor, owns: list[tuple[Tensor, Tensor]]) -> None:
    """Merge what tasks computed into the outputs, here and at the ranks that own them."""
    via, rows = work.program.out, work.rows
    outs, lses = rows.grouped(out), rows.grouped(lse.transpose(1, 2))
    away = rows.q.new_zeros(via.num_sent, rows.batch, rows.group, rows.head_dim, dtype=rows.sums)
    away_lse = rows.q.new_full((via.num_sent, rows.batch, rows.group), -torch.inf, dtype=rows.sums)
    away_of, lse_of = via.split(away, sent=True), via.split(away_lse, sent=True)
    for job, own in zip(work.program.jobs, owns):
        own_out, own_lse = (rows.unfolded(x, job) for x in own)
        at = 0
        for part in job.outputs:
            span, index = slice(at, at + part.rows), part.at.read()
            at = span.stop
            part_out, part_lse = own_out[:, :, span], own_lse[:, :, span]
            if part.here:
                _merge_at(outs, lses, (slice(None), index, job.heads), part_out, part_lse)
            else:
                part_out, part_lse = (x.movedim(0, 2) for x in (part_out, part_lse))  # lane row b group ...
                _merge_at(away_of[part.rank], lse_of[part.rank], index, part_out, part_lse)
    if not via:
        return
    arrived, arrived_lse = swap_outputs(rows, transport, away, away_lse, back=False)
    for peer, place in via.receives.items():  # peers may have computed branches of one row: one after another
        tokens, heads = via.rows(peer)
        home = (tokens, slice(None), heads)
        _merge_at(outs.transpose(0, 1), lses.transpose(0, 1), home, arrived[place], arrived_lse[place])


def swap_outputs(rows: Rows, transport: Transport, out: Tensor, lse: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    """Send `(E, B, group, D)` and `(E, B, group)` of the rows computed for others home, or `back` of the rows at home: what comes.

    Rows travel in the dtype of q, their lse in that of sums, and so they come.
    """
    via = rows.program.out
    message = torch.cat([out.to(rows.dtype).flatten(2), _bits(lse, rows.dtype)], dim=-1)
    received = message.new_empty(via.num_sent if back else via.num_received, rows.batch, message.shape[-1])
    transport.swap(via.split(message, sent=not back), via.split(received, sent=back)).wait()
    width = rows.group * rows.head_dim
    return received[..., :width].unflatten(-1, (rows.group, rows.head_dim)), _bits(received[..., width:], rows.sums)


def _merge_at(out: Tensor, lse: Tensor, index: object, part_out: Tensor, part_lse: Tensor) -> None:
    rows, rows_lse = out[index], lse[index]  # type: ignore[index]
    merge_(rows, rows_lse, part_out, part_lse)
    out[index], lse[index] = rows, rows_lse  # type: ignore[index]


def _bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of `(..., n)` as numbers of another dtype: they travel beside rows of that dtype."""
    # A fresh tensor: one that is contiguous by its sizes alone (1, or expanded) may have strides that cannot be viewed.
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


def context_backward(
    given: Given, inputs: Inputs, received: Tensor | None, share: Share, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv` of this rank's shard: what its own outputs and those of all other ranks ask of it.

    Args:
        given: `dout`, `out` `(B, n, H, D)`, `dlse`, `lse` `(B, H, n)` of this rank's shard.
        inputs: As in the forward.
        received: What the forward gave; None: the rows of other ranks travel again.
        share: As in the forward.
        transport: Of other messages than the forward's.
    """
    work = _Work(inputs, share)
    q, k, v, *_ = inputs
    remote, outputs_come = _swap_givens(work, transport, given)
    if work.is_ring:
        work.rows.take(q.new_empty(work.rows.num_queries_received))
        swap_queries(work.rows, transport)()
    elif received is not None:
        work.rows.take(received)
    else:
        work.rows.take(q.new_empty(work.rows.num_received))
        for wait in (swap_queries(work.rows, transport), swap_keys(work.rows, transport)):
            wait()
    # Rows have one term per branch and source: sums of many ranks are kept in float32.
    grads = Grads(work.rows, *backward(given.dout, given.dlse, q, k, v, given.out, given.lse, work.loop, work.rows.sums))
    outputs_come()
    givens = _givens(work, given, remote)
    if share.flat.detach_weights:
        givens = _detached(work, transport, givens)
    if work.is_ring:
        # Gradients go home while the next ones are computed: two more messages of memory than the forward.
        settle: Callable[[], None] | None = None
        for step, source in enumerate(_around(work, transport)):
            if source in work.program.kv.receives:
                grads.lend(source)
            for number in work.numbers:
                work.differentiate(number, work.parts(number, source), givens[number], grads)
            if settle is not None:
                settle()
            settle = return_keys(work.rows, transport, grads, [(share.rank + step) % share.plan.num_ranks])
        if settle is not None:
            settle()
    else:
        for peer in work.program.kv.receives:
            grads.lend(peer)
        for number in work.numbers:
            work.differentiate(number, work.parts(number), givens[number], grads)
        return_keys(work.rows, transport, grads, list(work.program.kv.sends))()
    return_queries(work.rows, transport, grads)
    return grads.dq.to(q.dtype), grads.dk.to(k.dtype), grads.dv.to(v.dtype)


def _swap_givens(work: _Work, transport: Transport, given: Given) -> tuple[dict[int, Tensor], Callable[[], None]]:
    """Send dout, out, lse and dlse of rows that other ranks computed to them: `(E, B, ...)`."""
    via, rows = work.program.out, work.rows
    # Whether lse has a gradient may differ from rank to rank: the message does not.
    dlse = torch.zeros_like(given.lse) if given.dlse is None else given.dlse
    messages = {}
    for peer in via.receives:  # who sent outputs in the forward
        wide = [rows.owned(x, via, peer).flatten(2) for x in (given.dout, given.out)]
        bits = [_bits(rows.owned(x.transpose(1, 2), via, peer), rows.dtype) for x in (given.lse, dlse)]
        messages[peer] = torch.cat([*wide, *bits], dim=-1)
    width = rows.group * (2 * rows.head_dim + 2 * (rows.sums.itemsize // rows.dtype.itemsize))
    remote = via.split(given.dout.new_empty(via.num_sent, rows.batch, width), sent=True)
    return remote, transport.swap(messages, remote).wait


def _givens(work: _Work, given: Given, remote: dict[int, Tensor]) -> list[Given]:
    """What the backward of each task is given for its rows."""
    rows = work.rows
    width = rows.group * rows.head_dim
    away: list[dict[int, Tensor]] = [{}, {}, {}, {}]
    for peer, message in remote.items():
        wide = [x.unflatten(-1, (rows.group, -1)) for x in message[..., : 2 * width].chunk(2, dim=-1)]
        numbers = [_bits(x, rows.sums).unflatten(-1, (rows.group, 1)) for x in message[..., 2 * width :].chunk(2, dim=-1)]
        for store, part in zip(away, (*wide, *numbers)):
            store[peer] = part
    dlse = torch.zeros_like(given.lse) if remote and given.dlse is None else given.dlse
    lse_rows = given.lse.transpose(1, 2)[..., None]
    dlse_rows = None if dlse is None else dlse.transpose(1, 2)[..., None]
    return [
        Given(
            rows.outputs(job, given.dout, away[0]),
            None if dlse_rows is None else rows.outputs(job, dlse_rows, away[3])[..., 0],
            rows.outputs(job, given.out, away[1]),
            rows.outputs(job, lse_rows, away[2])[..., 0],
        )
        for job in work.program.jobs
    ]


def _detached(work: _Work, transport: Transport, givens: list[Given]) -> list[Given]:
    """Under constant mixing weights a task is given its own output and lse: they are computed again."""
    owns = [work.start(number) for number in work.numbers]
    for source in _around(work, transport) if work.is_ring else [None]:
        for number in work.numbers:
            work.attend(number, work.parts(number, source), owns[number])
    detached = []
    for number, (given, own) in enumerate(zip(givens, owns)):
        work.finish(number, own)
        weight = torch.exp(own[1] - given.lse).masked_fill(given.lse == -torch.inf, 0.0)
        dout = given.dout * weight[..., None].to(given.dout.dtype)
        dlse = None if given.dlse is None else given.dlse * weight
        detached.append(Given(dout, dlse, own[0].to(work.rows.dtype), own[1]))
    return detached


def return_keys(rows: Rows, transport: Transport, grads: Grads, lenders: Sequence[int]) -> Callable[[], None]:
    """Begin to send the gradients of borrowed keys and values home; what is given adds up those of the rows lent to some peers."""
    messages = {peer: grad.to(rows.dtype) for peer, grad in grads.kv_rows.items()}
    grads.kv_rows = {}
    lent = {peer: rows.program.kv.sends[peer] for peer in lenders if peer in rows.program.kv.sends}
    returned = {peer: rows.k.new_empty(place.stop - place.start, rows.batch, 2 * rows.head_dim) for peer, place in lent.items()}
    pending = transport.swap(messages, returned)

    def settle() -> None:
        pending.wait()
        for peer, grad in returned.items():  # one after another: peers may have borrowed the same row
            grads.settle_keys(peer, grad)

    return settle


def return_queries(rows: Rows, transport: Transport, grads: Grads) -> None:
    """The same of borrowed queries."""
    via = rows.program.q
    messages = {peer: grad.to(rows.dtype) for peer, grad in grads.q_rows.items()}
    returned = via.split(rows.q.new_empty(via.num_sent, rows.batch, rows.group, rows.head_dim), sent=True)
    transport.swap(messages, returned).wait()
    for peer, grad in returned.items():
        grads.settle_queries(peer, grad)
