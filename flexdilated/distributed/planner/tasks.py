"""What one rank computes: the pieces inside its shard, and tasks of the segments that shards cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from flexdilated.core.bounded_cache import PIECE, recent
from flexdilated.core.pieces import Piece, branch_order, document_pieces, everything_kept
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.segments import Integers, Segments, inside, kept_below

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
    """The tasks of a rank: what it computes of cut segments. Lanes of equal shape are one task."""
    parts, at = plan.parts(exchange), plan.all_segments
    parts = parts.where(parts.executor == rank)
    found: dict[tuple[Any, ...], list[tuple[int, int, int]]] = {}
    turn = {branch: place for place, branch in enumerate(branch_order(plan.pattern))}
    for segment, place, places, _, low, high in sorted(
        zip(*(column.tolist() for column in parts)), key=lambda part: turn[int(at.branch[part[0]])]
    ):
        here = at.where(segment)
        heads: dict[int, list[int]] = {}
        for head, offset in plan.kept[int(here.branch)].heads[place : place + places]:
            heads.setdefault(offset, []).append(head)
        for offset, task in zip(heads, _tasks_of_part(plan, here, np.array([*heads]), low, high)):
            if task is not None:
                lanes = ((head, int(here.token) + offset, int(here.out_token) + offset) for head in heads[offset])
                found.setdefault(task.shape, []).extend(lanes)
    return tuple(Task(*shape, *np.array(lanes, np.int64).T) for shape, lanes in found.items())


def _tasks_of_part(plan: ContextPlan, at: Segments, offsets: Integers, low: int, high: int) -> Iterator[Task | None]:
    """For heads of each offset, the task without lanes of the outputs `low ... high` of a segment; None without outputs."""
    rate, offset = plan.kept[int(at.branch)].rate, offsets[:, None]
    rows, slots, padded = (kept_below(size, rate, offsets).tolist() for size in (at.size, at.slots, at.padded))
    sources = _rows_of_ranks(plan, at.first_source, at.last_source, at.token, (0, at.size), rate, offset)
    first, last = plan.rank_of(at.out_token + np.array([low, high - 1]))
    owners = _rows_of_ranks(plan, first, last, at.out_token, (low, high), rate, offset)
    for i, (of_source, of_owner) in enumerate(zip(sources, owners)):
        if not of_owner:
            yield None
            continue
        queries = (of_owner[0][1], of_owner[-1][2])
        yield Task(
            branch=int(at.branch),
            stride=rate,
            rows=rows[i],
            zero_row=slots[i] > rows[i],
            zero_keys=padded[i] - slots[i],
            queries=queries,
            keys=(0, min(queries[1], rows[i]) if plan.is_causal else rows[i]),
            sources=of_source,
            owners=of_owner,
        )


def _rows_of_ranks(
    plan: ContextPlan, first: Any, last: Any, token: Any, slots: tuple[Any, Any], rate: int, offset: Integers
) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Per offset, the rows of slots that each of some ranks holds, if slot 0 is a token: rank, first row, end."""
    borders = kept_below(np.clip(plan.limits[first : last + 2] - token, *slots), rate, offset)  # (offsets, ranks + 1)
    for each in borders.tolist():
        parts = zip(range(int(first), int(last) + 1), each, each[1:])
        yield tuple((rank, begin, end) for rank, begin, end in parts if begin < end)


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
    at = plan.all_segments
    first, last = np.minimum(at.first_source, at.first_owner), np.maximum(at.last_source, at.last_owner)
    return bool(((at.branch == branch) & (first <= rank) & (rank <= last)).any())
