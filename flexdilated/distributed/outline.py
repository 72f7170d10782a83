"""What one rank does under a plan, as a compiler takes it: integers, constants of its graph, and the tables of rows as tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexdilated.core.custom_op import Flat
from flexdilated.core.hardware import answers_while_traced
from flexdilated.core.pieces import Piece
from flexdilated.distributed import functions
from flexdilated.distributed.place import Place, exchange_of, plan_of
from flexdilated.distributed.program import Job, Part, Program, program
from flexdilated.distributed.tasks import Task, local_pieces


class Sizes(NamedTuple):
    """What the operators must know beside the options of a call and its place."""

    batch: int
    kv_heads: int  # held here
    group: int
    head_dim: int
    masked: bool
    score_mod: bool
    mask_mod: bool
    score_mod_learns: bool  # whether a gradient may be asked of what it holds
    runs: Any = ""  # str: the exchange that the one of the place comes to


class _Lanes(NamedTuple):
    """A job without its tables."""

    task: tuple[Any, ...]  # `Task.shape`
    lanes: int
    queries: tuple[tuple[int, int, int, bool], ...]  # `Part` less its rows
    keys: tuple[tuple[int, int, int, bool], ...]
    outputs: tuple[tuple[int, int, int, bool], ...]


class _Places(NamedTuple):
    """`Links` without its tables."""

    sends: tuple[tuple[int, int, int], ...]  # (peer, first, end)
    receives: tuple[tuple[int, int, int], ...]


class Outline(NamedTuple):
    """What a rank does, in plain data that a compiler takes for constants."""

    refused: str = ""  # why it does nothing
    runs: str = ""  # the exchange
    pieces: tuple[Piece, ...] = ()
    start: int = 0  # the first token of the shard
    jobs: tuple[_Lanes, ...] = ()
    kv: _Places = _Places((), ())
    q: _Places = _Places((), ())
    out: _Places = _Places((), ())

    @property
    def num_places(self) -> int:
        """Elements of the tables of rows."""
        places = 2 * num_rows(self.out.receives)
        for job in self.jobs:
            rows = [high - low for parts in (job.queries, job.keys, job.outputs) for _, low, high, _ in parts]
            places += job.lanes * (1 + sum(rows))
        return places

    @property
    def num_lanes(self) -> int:
        """Of all jobs."""
        return sum([job.lanes for job in self.jobs])

    def num_received(self, sizes: Sizes) -> int:
        """Elements of the rows of other ranks."""
        kv_width = 2 * sizes.head_dim + sizes.masked
        rows = num_rows(self.kv.receives) * kv_width + num_rows(self.q.receives) * sizes.group * sizes.head_dim
        return sizes.batch * rows


def num_rows(places: Sequence[tuple[int, int, int]]) -> int:
    """Of all peers."""
    return max([end for _, _, end in places], default=0)


@answers_while_traced
def outline_of(flat: tuple[Any, ...], place: tuple[Any, ...], sizes: tuple[Any, ...], dtype: torch.dtype) -> Outline:
    """What this rank does; runs while a compiler traces."""
    where, size = Place(*place), Sizes(*sizes)
    plan = plan_of(Flat(*flat), where, size.kv_heads, size.group)
    try:
        functions.refuse_shifted(plan, is_modified=True)
    except NotImplementedError as refused:
        return Outline(str(refused))
    runs = exchange_of(plan, where, size.head_dim, dtype, size.batch, size.masked)
    runs = "gather" if runs == "ring" else runs  # of "auto": a ring keeps no rows, and autograd keeps them
    found = program(plan, runs, where.rank, torch.device("cpu"))
    links = (
        _Places(*(tuple((peer, at.start, at.stop) for peer, at in of.items()) for of in (each.sends, each.receives)))
        for each in (found.kv, found.q, found.out)
    )
    start, pieces = plan.borders[where.rank], local_pieces(plan, where.rank)
    return Outline("", runs, pieces, start, tuple(_lanes(job) for job in found.jobs), *links)


def _lanes(job: Job) -> _Lanes:
    return _Lanes(job.task.shape, len(job.task.heads), *(tuple(part[:-1] for part in parts) for parts in job[2:]))


def tables_of(found: Program, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tables of rows of a program, int32, one after another, and the first token of every lane, int64."""
    places = [torch.empty(0, dtype=torch.int32, device=device), *(each.flatten() for each in _places_of(found))]
    tokens = [torch.empty(0, dtype=torch.int64), *(torch.from_numpy(job.task.tokens) for job in found.jobs)]
    return torch.cat(places), torch.cat(tokens).to(device)


def _places_of(found: Program) -> Iterator[Tensor]:
    for job in found.jobs:
        yield job.heads
        for parts in (job.queries, job.keys, job.outputs):
            for part in parts:
                yield part.at.read()
    for peer in found.out.receives:
        yield from found.out.rows(peer)


# -- what the compiler traces ---------------------------------------------------------------------------------------------------


class _Reader:
    """Tables that lie one after another in a flat tensor."""

    def __init__(self, tables: Tensor) -> None:
        self.tables, self.at = tables, 0

    def take(self, *shape: int) -> Tensor:
        first, self.at = self.at, self.at + math.prod(shape)
        return self.tables[first : self.at].view(shape)


class _Table:
    """An `Index` that has been read."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def read(self) -> Tensor:
        return self.table


class _TracedLinks:
    """`Links`, as `Rows` and `functions.mixture` use them."""

    def __init__(self, places: _Places, owned: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.sends = {peer: slice(first, end) for peer, first, end in places.sends}
        self.receives = {peer: slice(first, end) for peer, first, end in places.receives}
        self.num_sent, self.num_received = num_rows(places.sends), num_rows(places.receives)
        self._owned = owned

    def __bool__(self) -> bool:
        return len(self.sends) + len(self.receives) > 0

    def split(self, message: Tensor, *, sent: bool) -> dict[int, Tensor]:
        return {peer: message[place] for peer, place in (self.sends if sent else self.receives).items()}

    def rows(self, peer: int) -> tuple[Tensor, Tensor]:
        return self._owned[peer]


class TracedProgram:
    """`Program`, of an outline and its tables."""

    def __init__(self, outline: Outline, places: Tensor, firsts: Tensor) -> None:
        reader, first = _Reader(places), _Reader(firsts)
        self.jobs = [_job(lanes, reader, first) for lanes in outline.jobs]
        owned = {peer: (reader.take(end - first), reader.take(end - first)) for peer, first, end in outline.out.receives}
        self.kv, self.q, self.out = (
            _TracedLinks(outline.kv, {}),
            _TracedLinks(outline.q, {}),
            _TracedLinks(outline.out, owned),
        )


def _job(lanes: _Lanes, reader: _Reader, first: _Reader) -> Job:
    heads: Any = range(lanes.lanes)  # how many there are
    tokens: Any = first.take(lanes.lanes)
    make: Any = Task
    task = make(*lanes.task, heads, tokens, tokens)  # all of it: torch 2.9 cannot trace the defaults
    of_lanes = reader.take(lanes.lanes, 1)
    parts = []
    for group in (lanes.queries, lanes.keys, lanes.outputs):
        found = []
        for rank, low, high, here in group:
            at: Any = _Table(reader.take(lanes.lanes, high - low))
            found.append(Part(rank, low, high, here, at))
        parts.append(tuple(found))
    return Job(task, of_lanes, parts[0], parts[1], parts[2])
