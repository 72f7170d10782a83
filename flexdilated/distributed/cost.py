"""What an exchange costs each rank, and which one to take: bytes, buffers and pairs of a plan."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from flexdilated.distributed.plan import EXCHANGES, KINDS, ContextPlan, inside
from flexdilated.distributed.spans import Integers, expanded, kept_below

IDLE_LIMIT = 4  # moving rows takes longer than computing them: some imbalance is worth it


class _Sizes:
    """Bytes of one row of each kind of message."""

    def __init__(self, head_dim: int, itemsize: int, group: int, batch: int, masked: bool, lse_size: int) -> None:
        self.kv = batch * (2 * head_dim + masked) * itemsize
        self.dkv = batch * 2 * head_dim * itemsize
        self.q = batch * group * head_dim * itemsize
        self.out = batch * group * (head_dim * itemsize + lse_size)
        self.dout = batch * group * (2 * head_dim * itemsize + 2 * lse_size)


def bytes_received(
    plan: ContextPlan, exchange: str, *, head_dim: int, itemsize: int, batch: int = 1, masked: bool = False, lse_size: int = 4
) -> tuple[Integers, Integers]:
    """`(num_ranks,)` bytes that each rank receives in a forward, and in its backward.

    Elements of q, k and v have `itemsize` bytes, those of lse `lse_size`.
    """
    size = _Sizes(head_dim, itemsize, plan.group, batch, masked, lse_size)
    kv, q, out = (plan.traffic(exchange, kind) for kind in KINDS)
    p = plan.num_ranks
    forward = kv.received(p) * size.kv + q.received(p) * size.q + out.received(p) * size.out
    returned = kv.reversed().received(p) * size.dkv + q.reversed().received(p) * size.q
    backward = returned + out.reversed().received(p) * size.dout
    if exchange == "ring":  # nothing is kept: rows travel again
        backward += kv.received(p) * size.kv + q.received(p) * size.q
    if plan.pattern.detach_weights and exchange == "ring":  # once more: a branch's own softmax comes before its gradient
        backward += kv.received(p) * size.kv
    return forward, backward


def buffer_bytes(
    plan: ContextPlan, exchange: str, *, head_dim: int, itemsize: int, batch: int = 1, masked: bool = False, lse_size: int = 4
) -> Integers:
    """`(num_ranks,)` bytes of the messages that each rank holds at once in a forward: what it packs and what it receives."""
    size = _Sizes(head_dim, itemsize, plan.group, batch, masked, lse_size)
    p = plan.num_ranks
    kv, q, out = (plan.traffic(exchange, kind) for kind in KINDS)
    queries = (q.received(p) + q.reversed().received(p)) * size.q
    if exchange == "ring":  # one message is read, one comes, one leaves
        return (2 * kv.largest(p) + kv.reversed().largest(p)) * size.kv + queries
    keys = (kv.received(p) + kv.reversed().received(p)) * size.kv
    return keys + queries + (out.received(p) + out.reversed().received(p)) * size.out


def default_budget(plan: ContextPlan, *, head_dim: int, itemsize: int, batch: int = 1) -> int:
    """Twice the bytes of q, k, v and out of the largest shard."""
    heads = len(plan.within) * (2 + 2 * plan.group)
    return 2 * max(plan.shard_lengths) * heads * head_dim * itemsize * batch


def choose(plan: ContextPlan, *, budget: int, **sizes: Any) -> str:
    """The exchange of the least bytes at the busiest rank, forward and backward, whose buffers fit `budget` bytes.

    Where none fits, the one of the smallest buffers. Whole heads are left out where too few heads would leave ranks idle: where
    they give the busiest rank more than `IDLE_LIMIT` times the pairs.
    """
    idle = int(pairs(plan, "heads").max()) > IDLE_LIMIT * int(pairs(plan, "gather").max())
    names = [name for name in EXCHANGES if name != "heads" or not idle]
    buffers = {name: int(buffer_bytes(plan, name, **sizes).max()) for name in names}
    fitting = [name for name in names if buffers[name] <= budget]
    if not fitting:
        return min(names, key=lambda name: buffers[name])
    moved = {name: bytes_received(plan, name, **sizes) for name in fitting}
    return min(fitting, key=lambda name: int((moved[name][0] + moved[name][1]).max()))


def pairs(plan: ContextPlan, exchange: str) -> Integers:
    """`(num_ranks,)` (query, key) pairs that each rank scores, over the key/value heads held."""
    return _count_pairs(plan, plan.counted_as(exchange))


@lru_cache(maxsize=64)
def _count_pairs(plan: ContextPlan, exchange: str) -> Integers:
    work = np.zeros(plan.num_ranks, np.int64)
    for branch, (rate, heads) in enumerate(plan.kept):
        ranks, sizes = _local_sizes(plan, branch)
        at = plan.segments[branch]
        whole = plan.by_heads[branch] if exchange == "heads" else np.zeros(len(at.token), bool)
        chosen, there = np.flatnonzero(~whole), np.flatnonzero(whole)
        which, rank = expanded(at.first_owner[chosen], (at.last_owner - at.first_owner + 1)[chosen])
        which = chosen[which]
        held = plan.held(at.out_token[which], at.outputs[which], rank)
        for offset, members in plan.offsets_of(branch).items():
            for repeats, size, outputs in sizes:
                rows, asked = kept_below(size, rate, offset), kept_below(np.minimum(size, outputs), rate, offset)
                np.add.at(work, ranks, len(members) * repeats * _scored(plan, rows, np.zeros_like(rows), asked))
            rows = kept_below(at.size[which], rate, offset)
            low, high = (np.minimum(kept_below(slot, rate, offset), rows) for slot in held)
            np.add.at(work, rank, len(members) * _scored(plan, rows, low, high))
        executors = plan.deal(branch, there)
        for place, (_, offset) in enumerate(heads):
            rows, asked = (kept_below(x[there], rate, offset) for x in (at.size, np.minimum(at.outputs, at.size)))
            np.add.at(work, executors[:, place], _scored(plan, rows, np.zeros_like(rows), asked))
    return work


def _local_sizes(plan: ContextPlan, branch: int) -> tuple[Integers, tuple[tuple[Integers, Integers, Integers], ...]]:
    """Ranks with documents of which they hold segments, and of those `(how many, tokens, outputs)`: whole ones with all their
    outputs, the one whose outputs the end of the document cuts, and the last."""
    length, rate = plan.pattern.branches[branch]
    start, num_tokens = np.array([document for document in plan.documents if document[1]], np.int64).reshape(-1, 2).T
    first, count = plan.rank_of(start), plan.rank_of(start + num_tokens - 1) - plan.rank_of(start) + 1
    which, rank = expanded(first, count)
    start, num_tokens = start[which], num_tokens[which]
    w = np.minimum(length, num_tokens)
    out = w + -w % rate if plan.pattern.zero_padding else w
    a, b = inside(plan.limits[rank] - start, plan.limits[rank + 1] - start, num_tokens, w, out)
    whole, shown = num_tokens // w, np.where(num_tokens > w, num_tokens // out, 1)
    full = np.clip(np.minimum(b, np.minimum(whole, shown)) - a, 0, None)
    edge = ((a <= shown) & (shown < np.minimum(b, whole))).astype(np.int64)
    last = ((a <= whole) & (whole < b)).astype(np.int64)
    rest = num_tokens - whole * w
    return rank, (
        (full, w, w),
        (edge, w, np.clip(num_tokens - shown * out, 0, None)),
        (last, rest, np.clip(num_tokens - whole * np.where(num_tokens > w, out, w), 0, None)),
    )


def _scored(plan: ContextPlan, rows: Integers, low: Integers, high: Integers) -> Integers:
    if plan.is_causal:
        return high * (high + 1) // 2 - low * (low + 1) // 2
    return (high - low) * rows
