"""What an exchange costs each rank, and which exchange to take: bytes, buffers and time of a plan."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.core.bounded_cache import recent
from flexdilated.core.pattern import BACKWARD, FORWARD
from flexdilated.distributed.planner.load_balance import pairs_by_rows, pairs_of_parts
from flexdilated.distributed.planner.plan import EXCHANGES, ContextPlan
from flexdilated.distributed.planner.row_counts import Counts, counts, equivalent, listed
from flexdilated.distributed.planner.segments import Integers

LEAST_BUDGET = 1 << 27  # bytes of messages that are worth their time however small a shard is
CHOICE = 1 << 21  # the work of listing all ranks, in rows, up to which the choice counts exactly


class Speeds(NamedTuple):
    """What a rank does in a second, by which exchanges are compared; equal on all ranks.

    By default a GPU in a DGX H100: a 400 Gb/s port of its own, and the 35 % of 989e12 operations in half precision that
    FlashAttention-2 reaches there (arXiv 2407.08608, abstract).
    """

    link: float = 50e9  # bytes that a rank receives
    compute: float = 350e12  # floating-point operations


@lru_cache(maxsize=1)  # a backward must choose as its forward did
def speeds_of_environment() -> Speeds:
    """The speeds in `FLEXDILATED_LINK_SPEED` and `FLEXDILATED_COMPUTE_SPEED`, or the defaults; read once.

    Raises:
        ValueError: If one is not a number above 0.
    """
    return Speeds(*(_speed(name, default) for name, default in zip(("LINK", "COMPUTE"), Speeds())))


def _speed(name: str, default: float) -> float:
    variable = f"FLEXDILATED_{name}_SPEED"
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0.0 < speed < float("inf"):
        unit = "bytes" if name == "LINK" else "floating-point operations"
        raise ValueError(f"{variable} must be a number of {unit} per second above 0, got {text!r}")
    return speed


class _RowBytes:
    """Bytes of one row of each kind of message.

    Args:
        group: Query heads per key/value head.
        head_dim: Elements per head.
        itemsize: Bytes of an element of q, k and v.
        batch: Sequences.
        key_padding_mask: Whether a key padding mask travels with the keys.
        lse_size: Bytes of an element of lse.
    """

    def __init__(
        self, group: int, *, head_dim: int, itemsize: int, batch: int = 1, key_padding_mask: bool = False, lse_size: int = 4
    ) -> None:
        self.kv = batch * (2 * head_dim + key_padding_mask) * itemsize
        self.dkv = batch * 2 * head_dim * itemsize
        self.q = batch * group * head_dim * itemsize
        self.out = batch * group * (head_dim * itemsize + lse_size)
        self.dout = batch * group * (2 * head_dim * itemsize + 2 * lse_size)


def bytes_received(plan: ContextPlan, exchange: str, *, rows: Counts | None = None, **sizes: Any) -> tuple[Integers, Integers]:
    """`(num_ranks,)` bytes that each rank receives in a forward, and in its backward.

    Args:
        plan, exchange: The plan, and one of `EXCHANGES`.
        rows: The rows that ranks exchange, by kind. Default: exactly, by listing them.
        sizes: The keywords of `_RowBytes`.
    """
    size = _RowBytes(plan.group, **sizes)
    rows = listed(plan, exchange) if rows is None else rows
    kv, q, out = rows["kv"], rows["q"], rows["out"]
    forward = kv.received * size.kv + q.received * size.q + out.received * size.out
    backward = kv.sent * size.dkv + q.sent * size.q + out.sent * size.dout
    if exchange == "ring":  # keys travel again: once for the gradients, and once for the branches' own outputs if they are not kept
        backward = backward + (1 + (plan.pattern.detaches and not plan.keeps_outputs)) * kv.received * size.kv
    return forward, backward


def buffer_bytes(plan: ContextPlan, exchange: str, *, rows: Counts | None = None, **sizes: Any) -> Integers:
    """`(num_ranks,)` bytes of the messages that each rank holds in a forward: what it packs and what it receives.

    The arguments are those of `bytes_received`.
    """
    size = _RowBytes(plan.group, **sizes)
    rows = listed(plan, exchange) if rows is None else rows
    kv, q, out = rows["kv"], rows["q"], rows["out"]
    q_out_bytes = (q.received + q.sent) * size.q + (out.received + out.sent) * size.out
    if exchange == "ring":  # one message is read, one comes, one leaves
        return (2 * kv.largest_received + kv.largest_sent) * size.kv + q_out_bytes
    return (kv.received + kv.sent) * size.kv + q_out_bytes


def default_budget(plan: ContextPlan, *, head_dim: int, itemsize: int, batch: int = 1) -> int:
    """Twice the bytes of q, k, v and out of the largest shard, and at least `LEAST_BUDGET`.

    With a million tokens over thousands of ranks, each rank holds some megabytes: twice that would leave only the ring, at many
    times the time.
    """
    heads = len(plan.within) * (2 + 2 * plan.group)
    return max(LEAST_BUDGET, 2 * max(plan.shard_lengths) * heads * head_dim * itemsize * batch)


def seconds(
    plan: ContextPlan,
    exchange: str,
    *,
    speeds: Speeds,
    head_dim: int,
    batch: int = 1,
    **sizes: Any,
) -> NDArray[np.float64]:
    """`(num_ranks,)` seconds of a forward and its backward: bytes received at the speed of the link, then pairs computed.

    Nothing overlaps, and messages have no latency: an estimate by which exchanges are compared. `sizes` are the other arguments of
    `bytes_received`.
    """
    forward, backward = bytes_received(plan, exchange, head_dim=head_dim, batch=batch, **sizes)
    return seconds_of(forward + backward, pairs(plan, exchange) * (plan.group * batch), head_dim, speeds)


def seconds_of(received: Integers, scored: Integers, head_dim: int, speeds: Speeds) -> NDArray[np.float64]:
    """The seconds of bytes received and of pairs scored, over query heads and sequences."""
    return received / speeds.link + scored * float((FORWARD + BACKWARD) * head_dim) / speeds.compute


@recent(size=lambda choice, plan, **options: plan.nbytes)
def choose(plan: ContextPlan, *, budget: int | None = None, speeds: Speeds | None = None, **sizes: Any) -> str:
    """The exchange whose busiest rank takes the least time, among those whose buffers fit `budget` bytes.

    If none fits, the exchange with the smallest buffers. The answer depends on the integers of the plan and on the arguments alone,
    so it is equal on every rank. Rows are counted exactly if that is quick, else at most (see `counts`).

    Args:
        plan, sizes: As in `bytes_received`.
        budget: Bytes of messages that a rank may hold in a forward. Default: `default_budget`.
        speeds: Default: `Speeds()`.
    """
    speeds = Speeds() if speeds is None else speeds
    if budget is None:
        budget = default_budget(plan, **{name: sizes[name] for name in ("head_dim", "itemsize", "batch")})
    rows = {name: counts(plan, name, CHOICE)[0] for name in EXCHANGES}
    buffers = {name: int(buffer_bytes(plan, name, rows=rows[name], **sizes).max()) for name in EXCHANGES}
    fitting = [name for name in EXCHANGES if buffers[name] <= budget]
    if not fitting:
        return min(EXCHANGES, key=lambda name: buffers[name])
    return min(fitting, key=lambda name: float(seconds(plan, name, speeds=speeds, rows=rows[name], **sizes).max()))


def pairs(plan: ContextPlan, exchange: str) -> Integers:
    """`(num_ranks,)` (query, key) pairs that each rank scores, over the key/value heads held."""
    return _pairs(plan, equivalent(plan, exchange))


@recent(size=lambda pairs, plan, exchange: plan.nbytes)
def _pairs(plan: ContextPlan, exchange: str) -> Integers:
    pairs_by_rank = pairs_by_rows(plan)
    if exchange == "heads":
        pairs_by_rank = pairs_by_rank - pairs_of_parts(plan, plan.parts("gather")) + pairs_of_parts(plan, plan.parts("heads"))
    return pairs_by_rank
