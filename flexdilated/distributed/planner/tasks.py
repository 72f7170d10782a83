"""What one rank computes: pieces inside its shard, and tasks of segments and near pairs that span more than one shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flexdilated.core.bounded_cache import PIECE_BYTES, recent
from flexdilated.core.branch import Window
from flexdilated.core.pieces import UNBOUNDED, Piece, branch_order, document_pieces, everything_kept
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.segments import Integers, SpanningSegments, kept_below, segments_between

NOBODY: Integers = np.empty(0, np.int64)


class Task(NamedTuple):
    """Attention that one rank computes: queries `queries` against keys `keys`, in `lanes` independent softmaxes of equal shape.

    A lane is one key/value head in one segment or document that spans more than one shard. Row `l` of lane `i` is token
    `tokens[i] + l * stride` of the whole sequence: the rows of a segment are the tokens that the head keeps, numbered from 0.
    Pairs with `low <= key row - query row <= high` join.
    """

    branch: int  # index into `pattern.branches`
    stride: int  # tokens between consecutive rows: the dilation rate
    zero_keys: int  # number of torchscale's zero keys in every softmax
    queries: tuple[int, int]  # rows [first, end)
    keys: tuple[int, int]  # rows [first, end)
    band: tuple[int, int]  # (low, high)
    sources: tuple[tuple[int, int, int], ...]  # (rank, first, end): rows [first, end) are in the shard of rank; all rows, ascending
    heads: Integers = NOBODY  # (lanes,) key/value heads, counted from the first one that this rank holds
    tokens: Integers = NOBODY  # (lanes,) token of row 0

    @property
    def shape(self) -> tuple[Any, ...]:
        """All fields but those of single lanes, as a hashable key."""
        return self[:-2]


def tasks_of(plan: ContextPlan, exchange: str, rank: int) -> tuple[Task, ...]:
    """The tasks of a rank, in the order in which branches are computed. Lanes of equal shape are one task."""
    parts, segments = plan.parts(exchange), plan.all_segments
    parts = parts.where(parts.executor == rank)
    place_of_branch = np.argsort(branch_order(plan.pattern, everything_kept(plan.pattern)))
    parts = parts.where(np.argsort(place_of_branch[segments.branch[parts.segment]], kind="stable"))
    lanes_by_shape: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for far in plan.far_parts(parts.segment, parts.low, parts.high):
        columns = (parts.segment, parts.place, parts.places, far.query, far.query_end, far.key, far.key_end)
        for number, place, places, *slots in zip(*(column.tolist() for column in columns)):
            segment = segments.where(number)
            heads: dict[int, list[int]] = {}
            for head, offset in plan.branch_heads[int(segment.branch)].heads[place : place + places]:
                heads.setdefault(offset, []).append(head)
            for offset, task in zip(heads, _tasks_of_part(plan, segment, np.array([*heads]), slots, is_before=far.is_before)):
                if task is not None:
                    lanes = ((head, int(segment.token) + offset) for head in heads[offset])
                    lanes_by_shape.setdefault(task.shape, []).extend(lanes)
    for token, task in _near_tasks(plan, rank):
        lanes_by_shape.setdefault(task.shape, []).extend((head, token) for head, _ in plan.branch_heads[task.branch].heads)
    return tuple(Task(*shape, *np.array(lanes, np.int64).T) for shape, lanes in lanes_by_shape.items())


def _tasks_of_part(
    plan: ContextPlan, segment: SpanningSegments, offsets: Integers, slots: Sequence[int], *, is_before: bool
) -> Iterator[Task | None]:
    """Per offset, the task (without its lanes) of a part of a segment; None if no query is kept.

    `slots`: the first query, the end of queries, the first key, and the end of keys, as in `FarParts`.
    """
    rate = plan.branch_heads[int(segment.branch)].rate
    limits: tuple[Any, ...] = (segment.size, segment.padded, *slots)
    rows, padded, first, end, first_key, end_key = (kept_below(slot, rate, offsets).tolist() for slot in limits)
    apart = plan.near.far_rows(rate)
    band = (-UNBOUNDED, -apart if plan.is_causal or apart else UNBOUNDED) if is_before else (apart, UNBOUNDED)
    ranks = range(int(segment.first_rank), int(segment.last_rank) + 1)
    slot_starts = np.clip(plan.limits[ranks.start : ranks.stop + 1] - segment.token, 0, segment.size)
    starts_by_offset = kept_below(slot_starts, rate, offsets[:, None]).tolist()  # (offsets, ranks + 1)
    for i, starts in enumerate(starts_by_offset):
        if first[i] >= end[i]:
            yield None
            continue
        yield Task(
            branch=int(segment.branch),
            stride=rate,
            zero_keys=padded[i] - rows[i],
            queries=(first[i], end[i]),
            keys=(first_key[i], end_key[i]),
            band=band,
            sources=tuple((rank, low, high) for rank, low, high in zip(ranks, starts, starts[1:]) if low < high),
        )


def _near_tasks(plan: ContextPlan, rank: int) -> Iterator[tuple[int, Task]]:
    """The tasks of near pairs (without their lanes), each with the token of row 0; none if the rank holds no head."""
    parts = plan.near_parts
    parts = parts.where((parts.rank == rank) & (plan.num_branch_heads[parts.branch] > 0))
    for branch, _, query, query_end, key, key_end in zip(*(column.tolist() for column in parts)):
        kind = plan.pattern.branches[branch]
        token, end = min(query, key), max(query_end, key_end)
        first, last = plan.rank_of(np.array([token, end - 1])).tolist()
        starts = (np.clip(plan.limits[first : last + 2], token, end) - token).tolist()
        sources = zip(range(first, last + 1), starts, starts[1:])
        yield (
            token,
            Task(
                branch=branch,
                stride=1,
                zero_keys=0,
                queries=(query - token, query_end - token),
                keys=(key - token, key_end - token),
                # A causal query sees every global token before its shard.
                band=kind.band(is_causal=plan.is_causal) if isinstance(kind, Window) else (-UNBOUNDED, UNBOUNDED),
                sources=tuple((rank, low, high) for rank, low, high in sources if low < high),
            ),
        )


@recent(size=lambda pieces, plan, rank: PIECE_BYTES * len(pieces) + plan.nbytes)
def local_pieces(plan: ContextPlan, rank: int) -> tuple[Piece, ...]:
    """The pieces of the segments and near pairs inside a rank's shard; tokens count from the first one of the shard."""
    begin, end = plan.limits[rank : rank + 2].tolist()
    start, num_tokens = np.array(plan.documents, np.int64).reshape(-1, 2).T
    overlaps = (start < end) & (start + num_tokens > begin) & (num_tokens > 0)
    start, num_tokens = start[overlaps], num_tokens[overlaps]
    pieces: list[Piece] = []
    documents: list[tuple[int, int, range | None]]
    for branch in branch_order(plan.pattern, everything_kept(plan.pattern)):
        if branch >= len(plan.lengths):
            # Inside the shard, the part of a document is treated as a document of its own.
            first, stop = np.maximum(start, begin) - begin, np.minimum(start + num_tokens, end) - begin
            documents = [(token, count, None) for token, count in zip(first.tolist(), (stop - first).tolist())]
            covers = True
        else:
            w = np.minimum(plan.lengths[branch], num_tokens)
            limits = segments_between(begin - start, end - start, num_tokens, w)
            columns = (x.tolist() for x in (start - begin, num_tokens, *limits))
            documents = [(token, count, range(low, high)) for token, count, low, high in zip(*columns)]
            # The whole segments of the branch that keeps everything cover a shard that cuts none of them.
            cut = plan.all_segments
            covers = not bool(((cut.branch == branch) & (cut.first_rank <= rank) & (rank <= cut.last_rank)).any())
        covers = covers and branch == everything_kept(plan.pattern)
        groups = [(plan.pattern, documents)]
        if branch >= len(plan.lengths) and plan.near.global_tokens and documents and start[0] < begin:
            # A document that began before the shard has fewer global tokens in it, or none.
            groups, num_global = [(plan.pattern, documents[1:])], max(0, plan.near.global_tokens - begin + int(start[0]))
            if num_global or isinstance(plan.pattern.branches[branch], Window):
                groups.append((replace(plan.pattern, global_tokens=num_global), documents[:1]))
        for pattern, parts in groups:
            pieces += document_pieces(pattern, branch, parts, plan.num_kv_heads, plan.is_causal, within=plan.within, covers=covers)
    return tuple(pieces)


@recent(size=lambda rows, plan, *_: plan.nbytes)
def output_rows(plan: ContextPlan, exchange: str, rank: int, backend: str) -> int:
    """The rows of outputs of tasks and pieces that a rank keeps for its backward, for one query head per key/value head."""
    if not plan.keeps_outputs:
        return 0
    pieces = () if backend == "triton" else local_pieces(plan, rank)  # triton kernels write no outputs of pieces
    rows = sum(piece.segments * piece.offsets * piece.heads * piece.rows for piece in pieces)
    return rows + sum(len(task.heads) * (task.queries[1] - task.queries[0]) for task in tasks_of(plan, exchange, rank))
