"""What one rank computes: the pieces inside its shard, and tasks of the segments that shards cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from flexdilated.core.bounded_cache import PIECE_BYTES, recent
from flexdilated.core.pieces import Piece, branch_order, document_pieces, everything_kept
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.segments import Integers, Segments, inside, kept_below

NOBODY: Integers = np.empty(0, np.int64)


class Task(NamedTuple):
    """Attention of some rows of one cut segment, on one rank: lanes of equal shape, one for each key/value head.

    Rows are the kept slots of `Segments`, numbered from 0.
    """

    branch: int  # number of the branch
    stride: int  # tokens from a row to the next: the rate
    zero_keys: int  # torchscale's, which take part in every softmax
    queries: tuple[int, int]  # first row, end
    keys: tuple[int, int]  # first row, end
    sources: tuple[tuple[int, int, int], ...]  # (rank, first row, end), ascending, of all rows of the segment
    heads: Integers = NOBODY  # (lanes,), of the tensors held here
    tokens: Integers = NOBODY  # (lanes,), of row 0 in the whole sequence

    @property
    def shape(self) -> tuple[Any, ...]:
        """Everything that is equal in all lanes."""
        return self[:-2]


def tasks_of(plan: ContextPlan, exchange: str, rank: int) -> tuple[Task, ...]:
    """The tasks of a rank: what it computes of cut segments. Lanes of equal shape are one task."""
    parts, at = plan.parts(exchange), plan.all_segments
    parts = parts.where(parts.executor == rank)
    found: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
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
                lanes = ((head, int(here.token) + offset) for head in heads[offset])
                found.setdefault(task.shape, []).extend(lanes)
    return tuple(Task(*shape, *np.array(lanes, np.int64).T) for shape, lanes in found.items())


def _tasks_of_part(plan: ContextPlan, at: Segments, offsets: Integers, low: int, high: int) -> Iterator[Task | None]:
    """For heads of each offset, the task without lanes of the queries `low ... high` of a segment; None without queries."""
    rate = plan.kept[int(at.branch)].rate
    limits = (at.size, at.padded, low, high)
    rows, padded, first, end = (kept_below(slots, rate, offsets).tolist() for slots in limits)
    ranks = range(int(at.first_rank), int(at.last_rank) + 1)
    held = np.clip(plan.limits[ranks.start : ranks.stop + 1] - at.token, 0, at.size)
    borders = kept_below(held, rate, offsets[:, None]).tolist()  # (offsets, ranks + 1)
    for i, border in enumerate(borders):
        if first[i] == end[i]:
            yield None
            continue
        yield Task(
            branch=int(at.branch),
            stride=rate,
            zero_keys=padded[i] - rows[i],
            queries=(first[i], end[i]),
            keys=(0, end[i] if plan.is_causal else rows[i]),
            sources=tuple((rank, low, high) for rank, low, high in zip(ranks, border, border[1:]) if low < high),
        )


@recent(size=lambda pieces, plan, rank: PIECE_BYTES * len(pieces) + plan.nbytes)
def local_pieces(plan: ContextPlan, rank: int) -> tuple[Piece, ...]:
    """What a rank computes of segments that lie inside its shard; tokens are counted from the first of the shard."""
    begin, end = plan.borders[rank], plan.borders[rank + 1]
    start, num_tokens = np.array(plan.documents, np.int64).reshape(-1, 2).T
    here = (start < end) & (start + num_tokens > begin) & (num_tokens > 0)
    start, num_tokens = start[here], num_tokens[here]
    pieces: list[Piece] = []
    for branch in branch_order(plan.pattern):
        length = plan.pattern.segments("the planner of ranks")[branch].segment_length
        w = np.minimum(length, num_tokens)
        limits = inside(begin - start, end - start, num_tokens, w)
        columns = (x.tolist() for x in (start - begin, num_tokens, *limits))
        documents = [(token, count, range(first, stop)) for token, count, first, stop in zip(*columns)]
        # The whole segments of the branch that keeps everything cover a shard that cuts none of them.
        covers = branch == everything_kept(plan.pattern) and not _touches(plan, branch, rank)
        pieces += document_pieces(
            plan.pattern, branch, documents, plan.num_heads, plan.is_causal, within=plan.within, covers=covers
        )
    return tuple(pieces)


def _touches(plan: ContextPlan, branch: int, rank: int) -> bool:
    """Whether a rank holds a part of a cut segment of a branch."""
    at = plan.all_segments
    return bool(((at.branch == branch) & (at.first_rank <= rank) & (rank <= at.last_rank)).any())
