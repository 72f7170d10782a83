"""What one rank computes: the pieces inside its shard, and tasks of the segments that shards cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flexdilated.core.bounded_cache import PIECE, recent
from flexdilated.core.pieces import Piece, branch_order, document_pieces, everything_kept
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.segments import Segments, inside
from flexdilated.distributed.planner.spans import Integers, expanded, kept_below

TOGETHER = 1 << 14  # segments, each at one offset, that are listed together
NOBODY: Integers = np.empty(0, np.int64)


class Task(NamedTuple):
    """Attention of some rows of one cut segment, on one rank: lanes of equal shape, one for each key/value head.

    Rows are the kept slots of `Segments`, numbered from 0. Number `rows` is the query of zeros, if there is one.
    """

    branch: int
    stride: int
    rows: int
    zero_row: bool
    zero_keys: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    sources: tuple[tuple[int, int, int], ...]  # (rank, first row, end), ascending, of all rows
    owners: tuple[tuple[int, int, int], ...]  # (rank, first row, end) of the outputs, ascending
    heads: Integers = NOBODY  # (lanes,), of the tensors held here
    tokens: Integers = NOBODY  # (lanes,), of row 0 in the whole sequence
    out_tokens: Integers = NOBODY  # (lanes,), of the output of row 0

    @property
    def shape(self) -> tuple[Any, ...]:
        """Everything that is equal in all lanes."""
        return self[:-3]


def tasks_of(plan: ContextPlan, exchange: str, rank: int) -> tuple[Task, ...]:
    """The tasks of a rank: what it computes of cut segments."""
    return tuple(
        task
        for branch in branch_order(plan.pattern)
        if len(plan.segments[branch].token)
        for task in _tasks(plan, exchange, rank, branch)
    )


def _tasks(plan: ContextPlan, exchange: str, rank: int, branch: int) -> Iterator[Task]:
    begin, end = plan.begin[branch], plan.begin[branch + 1]
    assigned, at = plan.assigned(exchange)[begin:end], plan.segments[branch]
    found: dict[tuple[Any, ...], list[Integers]] = {}
    near = at.where(np.flatnonzero(plan.near(branch, rank) & ~assigned))
    held, several = plan.held(near.out_token, near.outputs, rank), max(1, TOGETHER // max(1, len(near.token)))
    members = plan.offsets_of(branch)
    for some in range(0, len(members), several):
        offset = np.array([*members][some : some + several], np.int64)
        group, of = expanded(np.zeros_like(offset), np.full_like(offset, len(near.token)))
        here, alone = near.where(of), np.full_like(of, rank)
        for task, chosen in _equal_tasks(plan, branch, offset[group], here, (alone, alone), [slot[of] for slot in held]):
            found.setdefault(task.shape, []).append(
                _lanes([*members.items()][some : some + several], group[chosen], here.where(chosen))
            )
    if assigned.any():
        parts = plan.parts
        mine = parts.where((begin <= parts.segment) & (parts.segment < end) & (parts.executor == rank))
        heads = plan.kept[branch].heads
        which, place = expanded(mine.place, mine.places)
        mine, offset = mine.where(which), np.array([offset for _, offset in heads], np.int64)[place]
        here = plan.all_segments.where(mine.segment)
        for task, chosen in _equal_tasks(plan, branch, offset, here, (here.first_owner, here.last_owner), (mine.low, mine.high)):
            alone_of = [(offset, [head]) for head, offset in heads]
            found.setdefault(task.shape, []).append(_lanes(alone_of, place[chosen], here.where(chosen)))
    for shape, lanes in found.items():
        yield Task(*shape, *np.concatenate(lanes, axis=1))


def _lanes(groups: Sequence[tuple[int, list[int]]], group: Integers, at: Segments) -> Integers:
    """`(3, lanes)`: head, token and output token of row 0, for the heads of one group, which share an offset, per segment."""
    offset, count = (np.array(x, np.int64) for x in zip(*((offset, len(heads)) for offset, heads in groups)))
    of, place = expanded((np.cumsum(count) - count)[group], count[group])
    heads = np.array([head for _, heads in groups for head in heads], np.int64)
    return np.stack([heads[place], *((first + offset[group])[of] for first in (at.token, at.out_token))])


def _equal_tasks(
    plan: ContextPlan, branch: int, offset: Integers, at: Segments, owners: Sequence[Integers], slots: Sequence[Integers]
) -> Iterator[tuple[Task, Integers]]:
    """Group segments whose tasks differ in the lanes alone: the task without lanes, and the numbers of its segments.

    Args:
        plan: The plan.
        branch: The branch of all segments.
        offset: The offset of the heads, per segment.
        at: The segments.
        owners: The first and the last rank that hold outputs, per segment.
        slots: The first slot of the outputs, and the end, per segment.
    """
    rate = plan.kept[branch].rate
    rows, kept = kept_below(at.size, rate, offset), kept_below(at.slots, rate, offset)
    columns = [rows, kept - rows, kept_below(at.padded, rate, offset) - kept, at.first_source, at.last_source, *owners]
    spread = np.maximum(at.last_source - at.first_source, owners[1] - owners[0]) + 1
    for ranks in np.unique(spread).tolist():  # tables of equal width
        few = np.flatnonzero(spread == ranks)
        table = [x[few] for x in columns]
        everything = np.zeros_like(at.size), at.size
        for token, begin, (low, high) in ((at.token, at.first_source, everything), (at.out_token, owners[0], slots)):
            who = np.minimum(begin[few, None] + np.arange(ranks), plan.num_ranks - 1)
            held = plan.held(token[few, None], high[few, None], who)
            bounds = [kept_below(np.maximum(slot, low[few, None]), rate, offset[few, None]) for slot in held]
            table += [*np.stack(bounds, axis=-1).reshape(len(few), 2 * ranks).T]
        for those in _equal(table):
            task = _task(plan, branch, [int(column[those[0]]) for column in table], ranks)
            if task is not None:
                yield task, few[those]


def _equal(columns: Sequence[Integers]) -> Iterator[Integers]:
    """The numbers of equal rows of a table, ascending, group by group."""
    name = np.zeros_like(columns[0])
    values = 1
    for column in columns:
        low = int(column.min())
        width = int(column.max()) - low + 1
        if values * width >= 1 << 62:
            known, name = np.unique(name, return_inverse=True)
            values = len(known)
        assert values * width < 1 << 62, "tokens are counted in fewer bits"
        name, values = name * width + (column - low), values * width
    order = np.argsort(name, kind="stable")
    return iter(np.split(order, np.flatnonzero(np.diff(name[order])) + 1))


def _task(plan: ContextPlan, branch: int, kind: list[int], ranks: int) -> Task | None:
    """The task without lanes of one row of the table of `_equal_tasks`."""
    rows, zero_row, zero_keys, first_source, last_source, first_owner, last_owner, *bounds = kind

    def parts(first: int, last: int, bounds: list[int]) -> tuple[tuple[int, int, int], ...]:
        found = zip(range(first, last + 1), bounds[::2], bounds[1::2])
        return tuple((rank, low, high) for rank, low, high in found if low < high)

    sources = parts(first_source, last_source, bounds[: 2 * ranks])
    owners = parts(first_owner, last_owner, bounds[2 * ranks :])
    if not owners:
        return None
    queries = (owners[0][1], owners[-1][2])
    return Task(
        branch=branch,
        stride=plan.kept[branch].rate,
        rows=rows,
        zero_row=bool(zero_row),
        zero_keys=zero_keys,
        queries=queries,
        keys=(0, min(queries[1], rows) if plan.is_causal else rows),
        sources=sources,
        owners=owners,
    )


@recent(size=lambda pieces, plan, rank: PIECE * len(pieces) + plan.nbytes)
def local_pieces(plan: ContextPlan, rank: int) -> tuple[Piece, ...]:
    """What a rank computes of segments that lie inside its shard; tokens are counted from the first of the shard."""
    begin, end = plan.borders[rank], plan.borders[rank + 1]
    start, num_tokens = np.array(plan.documents, np.int64).reshape(-1, 2).T
    here = (start < end) & (start + num_tokens > begin) & (num_tokens > 0)
    start, num_tokens = start[here], num_tokens[here]
    pieces: list[Piece] = []
    for branch in branch_order(plan.pattern):
        length, rate = plan.pattern.branches[branch]
        w = np.minimum(length, num_tokens)
        limits = inside(begin - start, end - start, num_tokens, w, plan.stride_of_outputs(w, rate))
        columns = (x.tolist() for x in (start - begin, num_tokens, *limits))
        documents = [(token, count, range(first, stop)) for token, count, first, stop in zip(*columns)]
        # The whole segments of the branch that keeps everything tile a shard that cuts none of them.
        tiles = branch == everything_kept(plan.pattern) and not _touches(plan, branch, rank)
        pieces += document_pieces(plan.pattern, branch, documents, plan.num_heads, plan.is_causal, within=plan.within, tiles=tiles)
    return tuple(pieces)


def _touches(plan: ContextPlan, branch: int, rank: int) -> bool:
    """Whether a rank holds a part of a cut segment of a branch."""
    at = plan.segments[branch]
    first, last = np.minimum(at.first_source, at.first_owner), np.maximum(at.last_source, at.last_owner)
    return bool(((first <= rank) & (rank <= last)).any())
