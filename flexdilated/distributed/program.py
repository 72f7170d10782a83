"""What one rank does under a plan: its tasks, with every row found, here or in a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexdilated.core.bounded_cache import recent
from flexdilated.core.functorch import in_no_mode
from flexdilated.distributed.exchange import Index, Links, link
from flexdilated.distributed.planner.message_rows import messages
from flexdilated.distributed.planner.plan import KINDS, ContextPlan
from flexdilated.distributed.planner.spans import Integers
from flexdilated.distributed.planner.tasks import Task, tasks_of

KEPT = 1 << 28  # bytes of programs


class Part(NamedTuple):
    """Rows `first ... end` of a task that stand together, at one rank."""

    rank: int
    first: int
    end: int
    here: bool
    at: Index  # (lanes, rows): tokens of this rank's shard if `here`, else places in the message from or to the rank

    @property
    def rows(self) -> int:
        return self.end - self.first


class Job(NamedTuple):
    """A task: where its queries and keys are read, where its outputs go."""

    task: Task
    heads: Tensor  # (lanes, 1) int32
    queries: tuple[Part, ...]
    keys: tuple[Part, ...]
    outputs: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """All jobs of a rank, and what it exchanges."""

    jobs: tuple[Job, ...]
    kv: Links
    q: Links
    out: Links

    @cached_property
    def nbytes(self) -> int:
        """Of the tables of rows, on the device."""
        parts = [part.at for job in self.jobs for part in (*job.queries, *job.keys, *job.outputs)]
        blocks = [at for links in (self.kv, self.q, self.out) for owned in links.owned.values() for _, at in owned]
        return sum(at.nbytes for at in (*parts, *blocks))


@recent(size=lambda program, plan, *rest: program.nbytes + plan.nbytes, room=KEPT)
@in_no_mode
def program(plan: ContextPlan, exchange: str, rank: int, device: torch.device) -> Program:
    """What a rank does; built once for every layer's pattern, as far as `KEPT` bytes allow."""
    tasks = tasks_of(plan, exchange, rank)
    found: dict[tuple[int, str, int], Index] = {}
    borrowed: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}  # rows that others own, by peer
    # Outputs that belong to the tokens of their queries go back as these came.
    for kind, lanes in (("q", _queries), ("kv", _keys), ("out", _outputs))[: 3 if plan.moves else 2]:
        asked: dict[int, list[tuple[int, Integers, int]]] = {}
        for number, task in enumerate(tasks):
            for owner, low, high, first in lanes(task):
                at = first + task.stride * low
                if owner == rank:
                    found[number, kind, owner] = Index.every(task.stride, at - plan.borders[rank], high - low, device)
                else:
                    asked.setdefault(owner, []).append((number, at, high - low))
        for message in messages(plan, exchange, kind, rank, sent=kind == "out"):
            borrowed[kind][message.peer] = message.num_rows
            for number, at, rows in asked.pop(message.peer, ()):
                places = message.places(tasks[number].heads, at, tasks[number].stride, rows)
                found[number, kind, message.peer] = Index.of(*places, device)
        assert not asked, "a message that is not sent"

    def parts(number: int, task: Task, kind: str, lanes: Lanes) -> tuple[Part, ...]:
        return tuple(Part(owner, low, high, owner == rank, found[number, kind, owner]) for owner, low, high, _ in lanes(task))

    jobs = [
        Job(
            task,
            torch.from_numpy(task.heads.astype(np.int32)).to(device)[:, None],
            parts(number, task, "q", _queries),
            parts(number, task, "kv", _keys),
            parts(number, task, "out" if plan.moves else "q", _outputs),
        )
        for number, task in enumerate(tasks)
    ]
    kv, q = (link(plan, exchange, kind, rank, device, borrowed[kind]) for kind in ("kv", "q"))
    out = link(plan, exchange, "out", rank, device, borrowed["out"]) if plan.moves else Links(q.receives, q.sends, q.owned)
    return Program(tuple(jobs), kv, q, out)


Lanes = Callable[[Task], Iterator[tuple[int, int, int, Integers]]]  # (owner, first row, end, token of row 0 per lane)


def _queries(task: Task) -> Iterator[tuple[int, int, int, Integers]]:
    return _among(task.sources, task.queries, task.tokens)


def _keys(task: Task) -> Iterator[tuple[int, int, int, Integers]]:
    return _among(task.sources, task.keys, task.tokens)


def _outputs(task: Task) -> Iterator[tuple[int, int, int, Integers]]:
    return _among(task.owners, task.queries, task.out_tokens)


def _among(
    rows: tuple[tuple[int, int, int], ...], limits: tuple[int, int], first: Integers
) -> Iterator[tuple[int, int, int, Integers]]:
    for owner, low, high in rows:
        low, high = max(low, limits[0]), min(high, limits[1])
        if low < high:
            yield owner, low, high, first
