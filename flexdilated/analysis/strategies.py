"""The cost per rank of a layer over a sharded sequence: under our exchanges, and under those of other systems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flexdilated.core.pattern import DilatedPattern
from flexdilated.distributed.planner import cost_model
from flexdilated.distributed.planner.plan import EXCHANGES, ContextPlan, context_plan
from flexdilated.distributed.planner.row_counts import counts
from flexdilated.distributed.sharding import even_shard_lengths

Counts = NDArray[np.int64]

COUNTED = 1 << 25  # rows of all ranks, up to which they are counted exactly: less than a second
OTHERS = ("ring-all", "all-gather", "ulysses")  # ring attention; an all-gather of K and V; two all-to-alls to shards of heads


@dataclass(frozen=True)
class Layer:
    """One attention layer over a sharded sequence, in plain numbers."""

    pattern: DilatedPattern
    tokens: int
    ranks: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str  # as torch calls it
    batch: int
    is_causal: bool
    document_lengths: tuple[int, ...] = ()  # of packed documents; none: all tokens are one

    @property
    def documents(self) -> tuple[tuple[int, int], ...]:
        """`(first token, number of tokens)` of each that has any."""
        lengths = self.document_lengths or (self.tokens,)
        return tuple((first, length) for first, length in zip(accumulate(lengths, initial=0), lengths) if length)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def lse_size(self) -> int:
        return 8 if self.dtype == "float64" else 4

    @property
    def sizes(self) -> dict[str, Any]:
        """The keywords of `cost_model.bytes_received`."""
        return {"head_dim": self.head_dim, "itemsize": self.itemsize, "batch": self.batch, "lse_size": self.lse_size}


@dataclass(frozen=True)
class Strategy:
    """The cost of one way of moving rows: arrays `(ranks,)`, or the reason why it cannot run."""

    name: str
    why_not: str | None = None
    is_exact: bool = True  # else bytes, rows and buffers are at most so many
    forward: Counts | None = None  # bytes received
    backward: Counts | None = None
    rows: NDArray[np.float64] | None = None  # of K and V received in a forward, over all key/value heads
    buffers: Counts | None = None  # bytes of the messages held at once in a forward
    pairs: Counts | None = None

    @property
    def is_ours(self) -> bool:
        return self.name in EXCHANGES


class Memory(NamedTuple):
    """Bytes of one rank in a forward and its backward."""

    tensors: int  # q, k, v, out and lse of its shard
    gradients: int
    buffers: int
    total: int


def layer_plan(layer: Layer, heads: range | None = None) -> ContextPlan:
    """The plan of a layer over even shards; with `heads`, of these key/value heads, with the whole sequence on one rank."""
    return context_plan(
        layer.pattern,
        (layer.tokens,) if heads is not None else even_shard_lengths(layer.tokens, layer.ranks),
        layer.kv_heads,
        within=range(layer.kv_heads) if heads is None else heads,
        group=layer.group,
        documents=layer.documents,
        is_causal=layer.is_causal,
    )


def strategies(layer: Layer, *, with_pairs: bool = True) -> list[Strategy]:
    """The costs of the exchanges of `EXCHANGES`, then of `OTHERS`.

    Our exchanges are counted exactly up to `COUNTED` rows; above, their bytes, rows and buffers are upper bounds.

    The others, for shards of `n` of `N` tokens on `P` ranks, each with `n` rows of q, k, v and the plan's byte sizes:
    ring-all receives `N - n` rows of K|V forward, the same again backward, and the dK|dV of `P - 1` shards: the sum of a shard
    starts at the next rank and goes round until it is home. all-gather receives the same rows at once, and backward `P - 1` partial
    sums of the dK|dV of its own shard. ulysses receives `(N - n) / P` of q, k, v in heads and `n (1 - 1/P)` of out; backward
    `(N - n) / P` of dout and `n (1 - 1/P)` of dq, dk, dv.

    `with_pairs`: whether to count pairs, which takes longest.
    """
    plan = layer_plan(layer)
    ours = [_ours(plan, layer, exchange) for exchange in EXCHANGES]
    costs = [*ours, *_all_keys(plan, layer), _ulysses(plan, layer)]
    if not with_pairs:
        return costs
    # The ring of everything and the all-gather compute what gather computes: the rows of a rank's own queries. Without causality
    # gather computes the few queries that are global tokens where their keys are: the sum over ranks is equal.
    pairs = {name: cost_model.pairs(plan, name) for name in ("gather", "heads")}
    pairs |= dict.fromkeys(("ring", "ring-all", "all-gather"), pairs["gather"])
    if costs[-1].why_not is None:
        pairs["ulysses"] = _ulysses_pairs(layer)
    return [replace(strategy, pairs=pairs.get(strategy.name)) for strategy in costs]


def _ours(plan: ContextPlan, layer: Layer, exchange: str) -> Strategy:
    rows, is_exact = counts(plan, exchange, COUNTED)
    forward, backward = cost_model.bytes_received(plan, exchange, rows=rows, **layer.sizes)
    kv, q, out = (rows[kind].received for kind in ("kv", "q", "out"))
    buffers = cost_model.buffer_bytes(plan, exchange, rows=rows, **layer.sizes)
    received = kv + (q + out) * (layer.group / 2)
    return Strategy(exchange, is_exact=is_exact, forward=forward, backward=backward, rows=received, buffers=buffers)


def _all_keys(plan: ContextPlan, layer: Layer) -> list[Strategy]:
    """Ring attention and all-gather: every rank receives all keys and values."""
    n, has_peers = np.diff(plan.limits), layer.ranks > 1
    remote = (layer.tokens - n) * layer.kv_heads
    local = n * layer.kv_heads
    row = 2 * layer.head_dim * layer.itemsize * layer.batch
    # The sum of rank r's dK|dV starts at rank r + 1, so that a rank receives all but the one it starts.
    sums = (layer.tokens - np.roll(n, 1)) * layer.kv_heads
    shared_costs: dict[str, Any] = {"forward": remote * row, "rows": remote.astype(np.float64)}
    ring_buffers, all_rows = np.full_like(n, 2 * local.max() * row * has_peers), (local + remote) * row * has_peers
    return [
        Strategy("ring-all", backward=(remote + sums) * row, buffers=ring_buffers, **shared_costs),
        Strategy("all-gather", backward=(layer.ranks - 1) * local * row, buffers=all_rows, **shared_costs),
    ]


def _ulysses(plan: ContextPlan, layer: Layer) -> Strategy:
    for option, heads in (("--heads", layer.heads), ("--kv-heads", layer.kv_heads)):
        if heads % layer.ranks:
            return Strategy("ulysses", f"{option}={heads} must be a multiple of --context-parallel={layer.ranks}")
    n = np.diff(plan.limits)
    row = layer.head_dim * layer.itemsize * layer.batch
    heads, kv_heads = layer.heads // layer.ranks, layer.kv_heads // layer.ranks
    remote, outgoing = layer.tokens - n, n * (layer.ranks - 1)  # per head of a rank: others' tokens; own tokens times other ranks
    forward = remote * (heads + 2 * kv_heads) + outgoing * heads
    backward = remote * heads + outgoing * (heads + 2 * kv_heads)
    # A rank sends of its shard what it receives of out, and the reverse.
    buffers = (remote + outgoing) * (2 * heads + 2 * kv_heads)
    return Strategy("ulysses", forward=forward * row, backward=backward * row, rows=forward / 2, buffers=buffers * row)


def _ulysses_pairs(layer: Layer) -> Counts:
    size = layer.kv_heads // layer.ranks
    # Ranks whose heads keep the same rows compute the same.
    pairs_by_classes: dict[Any, int] = {}
    pairs = []
    for rank in range(layer.ranks):
        rank_plan = layer_plan(layer, range(rank * size, (rank + 1) * size))
        key = frozenset((offsets, len(heads)) for offsets, heads in rank_plan.classes.items())
        if key not in pairs_by_classes:
            pairs_by_classes[key] = int(cost_model.pairs(rank_plan, "gather")[0])
        pairs.append(pairs_by_classes[key])
    return np.array(pairs, np.int64)


def memory(layer: Layer, plan: ContextPlan, buffers: Counts) -> Memory:
    """The memory of the rank that needs most; `buffers` are the bytes of messages that each rank holds at the same time."""
    tokens = np.diff(plan.limits) * layer.batch
    gradients = tokens * (2 * layer.heads + 2 * layer.kv_heads) * layer.head_dim * layer.itemsize
    tensors = gradients + tokens * layer.heads * layer.lse_size
    total = tensors + gradients + buffers
    busiest = int(total.argmax())
    return Memory(*(int(amount[busiest]) for amount in (tensors, gradients, buffers, total)))


def traffic_by_ranks(layer: Layer) -> tuple[dict[str, list[tuple[int, int]]], bool]:
    """The bytes that the busiest rank receives in both passes, for each power of two of ranks below the layer's, and for its ranks.

    Returns:
        By strategy, `(ranks, bytes)`; and whether all bytes are exact: else those of our exchanges are upper bounds.
    """
    counts = sorted({*(2**i for i in range(1, layer.ranks.bit_length()) if 2**i < layer.ranks), layer.ranks})
    lines: dict[str, list[tuple[int, int]]] = {name: [] for name in (*EXCHANGES, *OTHERS)}
    is_exact = True
    for ranks in counts:
        for strategy in strategies(replace(layer, ranks=ranks), with_pairs=False):
            if strategy.forward is not None and strategy.backward is not None:
                lines[strategy.name].append((ranks, int((strategy.forward + strategy.backward).max())))
                is_exact &= strategy.is_exact
    return lines, is_exact
