"""Two functions timed side by side, and the ratio that comes of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import pytest
import torch

T = TypeVar("T")


class Ratio(NamedTuple):
    """A quotient of two measurements of one run: what may be compared with another run."""

    name: str
    value: float
    target: float | None
    better: Literal["lower", "higher"]


def side_by_side(benchmark: Any, ours: Callable[[], T], peer: Callable[[], object], *, rounds: int) -> tuple[T, float]:
    """The result of `ours`, and the median over `rounds` of time(ours) / time(other).

    The two alternate, so that what else the machine does strikes both; pytest-benchmark reports the times of `ours`.
    """
    if benchmark.disabled:
        pytest.skip("a ratio needs timings, --benchmark-disable was given")
    other_seconds: list[float] = []
    result = benchmark.pedantic(ours, setup=lambda: other_seconds.append(seconds(peer)), rounds=rounds, warmup_rounds=1)
    pairs = zip(benchmark.stats.stats.data, other_seconds[-rounds:])
    benchmark.extra_info["other_seconds"] = statistics.median(other_seconds[-rounds:])
    return result, statistics.median(a / b for a, b in pairs)


def median_ratio(ours: Callable[[], object], peer: Callable[[], object], *, rounds: int) -> float:
    """The median of time(ours) / time(other), alternating, after one call of each that is not counted."""
    ours(), peer()
    return statistics.median(seconds(ours) / seconds(peer) for _ in range(rounds))


def processor_ratio(ours: Callable[[], object], peer: Callable[[], object], *, rounds: int, calls: int = 20) -> float:
    """The median of processor time(ours) / processor time(peer), of many calls each: for calls of microseconds, on one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        functions = (ours, peer)
        pairs = [[_processor_seconds(function, calls) for function in functions] for _ in range(rounds + 1)]
    finally:
        torch.set_num_threads(num_threads)
    return statistics.median(a / b for a, b in pairs[1:])  # the first pair makes plans


def processor_seconds(function: Callable[[], object], *, rounds: int, calls: int = 20) -> float:
    """The processor time of one call: the least of `rounds` means over `calls` calls."""
    return min(_processor_seconds(function, calls) / calls for _ in range(rounds))


def _processor_seconds(function: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        function()
    return time.process_time() - start


def seconds(function: Callable[[], object]) -> float:
    """The wall-clock time of one call on the CPU."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
