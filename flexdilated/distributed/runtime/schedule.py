"""What one rank computes under a plan: its tasks, and where each row of them is, in its shard or in a message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.core.bounded_cache import recent
from flexdilated.core.functorch import in_no_mode
from flexdilated.distributed.planner.message_rows import messages
from flexdilated.distributed.planner.plan import KINDS, ContextPlan
from flexdilated.distributed.planner.segments import Integers
from flexdilated.distributed.planner.tasks import Task, tasks_of
from flexdilated.distributed.runtime.row_index import RowExchange, RowIndex, as_int32, row_exchange

KEPT = 1 << 28  # bytes of schedules


class RowRange(NamedTuple):
    """Rows `first ... end` of a task, which are in the shard of one rank. The ranges of a task are consecutive."""

    rank: int
    first: int
    end: int
    is_local: bool
    row_index: RowIndex  # (lanes, rows): tokens of this rank's shard if local, else places in the message from or to the rank


class ScheduledTask(NamedTuple):
    """A task, with the places of its queries and keys; outputs have the places of their queries."""

    task: Task
    heads: Tensor  # (lanes, 1) int32
    queries: tuple[RowRange, ...]
    keys: tuple[RowRange, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The tasks of a rank, and the rows that it exchanges."""

    tasks: tuple[ScheduledTask, ...]
    kv: RowExchange
    q: RowExchange

    @cached_property
    def out(self) -> RowExchange:
        """Outputs go back as their queries came."""
        return RowExchange(self.q.receives, self.q.sends, self.q.local)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tables of rows, on the device."""
        ranges = [row_range.row_index for task in self.tasks for row_range in (*task.queries, *task.keys)]
        blocks = [index for via in (self.kv, self.q) for local in via.local.values() for _, index in local]
        return sum(index.nbytes for index in (*ranges, *blocks))


@recent(size=lambda schedule, plan, *options: schedule.nbytes + plan.nbytes, room=KEPT)
@in_no_mode
def schedule(plan: ContextPlan, exchange: str, rank: int, device: torch.device) -> Schedule:
    """The schedule of a rank; built once for every layer's pattern, as far as `KEPT` bytes allow."""
    tasks = tasks_of(plan, exchange, rank)
    index: dict[tuple[int, str, int], RowIndex] = {}
    remote: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}  # rows in the shards of peers
    for kind in KINDS:
        pending: dict[int, list[tuple[int, Integers, int]]] = {}
        for number, task in enumerate(tasks):
            for owner, low, high, tokens in _ranges(task, kind):
                if owner == rank:
                    index[number, kind, owner] = RowIndex.strided(task.stride, tokens - plan.limits[rank], high - low, device)
                else:
                    pending.setdefault(owner, []).append((number, tokens, high - low))
        for message in messages(plan, exchange, kind, rank, sent=False):
            remote[kind][message.peer] = message.num_rows
            for number, tokens, rows in pending.pop(message.peer, ()):
                table = message.places(tasks[number].heads, tokens, tasks[number].stride, rows)
                index[number, kind, message.peer] = RowIndex.from_table(table, device)
        assert not pending, "a message that is not sent"

    def ranges(number: int, kind: str) -> tuple[RowRange, ...]:
        return tuple(
            RowRange(owner, low, high, owner == rank, index[number, kind, owner])
            for owner, low, high, _ in _ranges(tasks[number], kind)
        )

    scheduled = [
        ScheduledTask(
            task,
            heads=as_int32(task.heads, device)[:, None],
            queries=ranges(number, "q"),
            keys=ranges(number, "kv"),
        )
        for number, task in enumerate(tasks)
    ]
    kv, q = (row_exchange(plan, exchange, kind, rank, device, remote[kind]) for kind in KINDS)
    return Schedule(tuple(scheduled), kv, q)


def _ranges(task: Task, kind: str) -> Iterator[tuple[int, int, int, Integers]]:
    """The rows of one kind that a task uses, by the rank whose shard holds them: rank, first row, end, token of the first row."""
    first, end = task.keys if kind == "kv" else task.queries
    for owner, low, high in task.sources:
        low, high = max(low, first), min(high, end)
        if low < high:
            yield owner, low, high, task.tokens + task.stride * low
