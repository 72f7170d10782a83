"""What an exchange costs each rank, and which one to take: bytes, buffers, pairs and time of a plan."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.core.bounded_cache import recent
from flexdilated.core.pattern import BACKWARD, FORWARD
from flexdilated.distributed import work
from flexdilated.distributed.plan import EXCHANGES, KINDS, ContextPlan
from flexdilated.distributed.spans import Integers

LEAST_BUDGET = 1 << 27  # bytes of messages that are worth their time however small a shard is


class Speeds(NamedTuple):
    """What a rank does in a second, by which exchanges are compared; all ranks must say the same.

    By default that of a GPU in a DGX H100: a 400 Gb/s port of its own, and the 35 % of 989e12 operations in half precision that
    FlashAttention-2 reaches there (arXiv 2407.08608, abstract).
    """

    link: float = 50e9  # bytes that a rank receives
    compute: float = 350e12  # floating-point operations


@lru_cache(maxsize=1)  # a backward must choose as its forward did
def speeds_of_environment() -> Speeds:
    """What `FLEXDILATED_LINK_SPEED` and `FLEXDILATED_COMPUTE_SPEED` say, where they are set; read once.

    Raises:
        ValueError: If one is no number above 0.
    """
    return Speeds(*(_speed(name, default) for name, default in zip(("LINK", "COMPUTE"), Speeds())))


def _speed(name: str, default: float) -> float:
    variable = f"FLEXDILATED_{name}_SPEED"
    given = os.environ.get(variable)
    if given is None:
        return default
    try:
        speed = float(given)
    except ValueError:
        speed = 0.0
    if not 0.0 < speed < float("inf"):
        unit = "bytes" if name == "LINK" else "floating-point operations"
        raise ValueError(f"{variable} must be a number of {unit} per second above 0, got {given!r}")
    return speed


class _Sizes:
    """Bytes of one row of each kind of message."""

    def __init__(self, head_dim: int, itemsize: int, group: int, batch: int, masked: bool, lse_size: int) -> None:
        self.kv = batch * (2 * head_dim + masked) * itemsize
        self.dkv = batch * 2 * head_dim * itemsize
        self.q = batch * group * head_dim * itemsize
        self.out = batch * group * (head_dim * itemsize + lse_size)
        self.dout = batch * group * (2 * head_dim * itemsize + 2 * lse_size)


def bytes_received(
    plan: ContextPlan,
    exchange: str,
    *,
    head_dim: int,
    itemsize: int,
    batch: int = 1,
    masked: bool = False,
    lse_size: int = 4,
    exact: bool = True,
) -> tuple[Integers, Integers]:
    """`(num_ranks,)` bytes that each rank receives in a forward, and in its backward.

    Elements of q, k and v have `itemsize` bytes, those of lse `lse_size`. What need not be exact is so where rows are soon counted.
    """
    size = _Sizes(head_dim, itemsize, plan.group, batch, masked, lse_size)
    kv, q, out = (plan.traffic(exchange, kind, exact=exact) for kind in KINDS)
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
    plan: ContextPlan,
    exchange: str,
    *,
    head_dim: int,
    itemsize: int,
    batch: int = 1,
    masked: bool = False,
    lse_size: int = 4,
    exact: bool = True,
) -> Integers:
    """`(num_ranks,)` bytes of the messages that each rank holds at once in a forward: what it packs and what it receives."""
    size = _Sizes(head_dim, itemsize, plan.group, batch, masked, lse_size)
    p = plan.num_ranks
    kv, q, out = (plan.traffic(exchange, kind, exact=exact) for kind in KINDS)
    queries = (q.received(p) + q.reversed().received(p)) * size.q
    if exchange == "ring":  # one message is read, one comes, one leaves
        return (2 * kv.largest(p) + kv.reversed().largest(p)) * size.kv + queries
    keys = (kv.received(p) + kv.reversed().received(p)) * size.kv
    return keys + queries + (out.received(p) + out.reversed().received(p)) * size.out


def default_budget(plan: ContextPlan, *, head_dim: int, itemsize: int, batch: int = 1) -> int:
    """Twice the bytes of q, k, v and out of the largest shard, and at least `LEAST_BUDGET`.

    Of a million tokens over thousands of ranks each holds some megabytes: twice that leaves only the ring, at many times the time.
    """
    heads = len(plan.within) * (2 + 2 * plan.group)
    return max(LEAST_BUDGET, 2 * max(plan.shard_lengths) * heads * head_dim * itemsize * batch)


def seconds(
    plan: ContextPlan, exchange: str, *, speeds: Speeds, head_dim: int, batch: int = 1, **sizes: Any
) -> NDArray[np.float64]:
    """`(num_ranks,)` seconds of a forward and its backward: what a rank receives at the speed of its link, then what it computes.

    Nothing hides behind anything else, and messages have no latency: an estimate by which exchanges are compared.
    """
    forward, backward = bytes_received(plan, exchange, head_dim=head_dim, batch=batch, **sizes)
    return taken(forward + backward, pairs(plan, exchange) * (plan.group * batch), head_dim, speeds)


def taken(received: Integers, scored: Integers, head_dim: int, speeds: Speeds) -> NDArray[np.float64]:
    """The seconds of bytes received and of pairs scored, over query heads and sequences."""
    return received / speeds.link + scored * float((FORWARD + BACKWARD) * head_dim) / speeds.compute


def choose(plan: ContextPlan, *, budget: int, speeds: Speeds | None = None, **sizes: Any) -> str:
    """The exchange whose busiest rank takes the least time, of those whose buffers fit `budget` bytes.

    Where none fits, the one of the smallest buffers. Of patterns whose rows take long to count it goes by about how many they are.
    """
    speeds, sizes = Speeds() if speeds is None else speeds, {**sizes, "exact": False}
    buffers = {name: int(buffer_bytes(plan, name, **sizes).max()) for name in EXCHANGES}
    fitting = [name for name in EXCHANGES if buffers[name] <= budget]
    if not fitting:
        return min(EXCHANGES, key=lambda name: buffers[name])
    return min(fitting, key=lambda name: float(seconds(plan, name, speeds=speeds, **sizes).max()))


def pairs(plan: ContextPlan, exchange: str) -> Integers:
    """`(num_ranks,)` (query, key) pairs that each rank scores, over the key/value heads held."""
    return _count_pairs(plan, plan.counted_as(exchange))


@recent(size=lambda pairs, plan, exchange: plan.nbytes)
def _count_pairs(plan: ContextPlan, exchange: str) -> Integers:
    pairs = work.by_rows(plan)
    if exchange == "heads":
        pairs = pairs - work.of_rows(plan, np.flatnonzero(plan.dealt)) + work.of_parts(plan, plan.all_parts)
    return pairs
