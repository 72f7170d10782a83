"""Time and memory as the sequence grows fourfold, and memory against what the caller holds anyway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attention import (
    DTYPES,
    HEAD_DIM,
    NUM_HEADS,
    SMALL_LONGNET,
    assert_matches_definition,
    assert_rows_match_definition,
    forward,
    forward_backward,
    random_inputs,
)
from benchmarks.conftest import Sizes
from benchmarks.memory import Direction, Peak, peak_memory
from benchmarks.timing import Ratio, side_by_side
from flexdilated import DilatedPattern

DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")
PATTERN = DilatedPattern.longnet()

TIME_TARGET = 4.4
MEMORY_TARGET = 4.1
HELD_TARGETS = {torch.float32: 2.0, torch.bfloat16: 2.5}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_time_growth(benchmark: Any, sizes: Sizes, record: Callable[..., None], dtype: torch.dtype, direction: Direction) -> None:
    small, large = (random_inputs(num_tokens, dtype) for num_tokens in sizes.growth)
    attend = forward if direction == "forward" else forward_backward
    assert_matches_definition(SMALL_LONGNET, dtype)
    result, ratio = side_by_side(
        benchmark, lambda: attend(large, PATTERN), lambda: attend(small, PATTERN), rounds=min(3, sizes.rounds)
    )
    assert_rows_match_definition(large, PATTERN, *((result,) if direction == "forward" else result[:2]))
    record(Ratio(f"growth/time/{label(sizes, dtype, direction)}", ratio, TIME_TARGET, "lower"), shape=large.q.shape, dtype=dtype)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc/self/status")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_growth(benchmark: Any, sizes: Sizes, record: Callable[..., None], dtype: torch.dtype, direction: Direction) -> None:
    def measure() -> tuple[Peak, ...]:
        return tuple(peak_memory(num_tokens, dtype, direction, PATTERN) for num_tokens in sizes.growth)

    small, large = benchmark.pedantic(measure, rounds=1)
    for measured in (small, large):
        # At the end all of them exist at once. A little of it may lie in memory that the process had before.
        assert measured.peak > 0.9 * measured.tensors
    where = label(sizes, dtype, direction)
    ratios = [Ratio(f"growth/memory/{where}", large.peak / small.peak, MEMORY_TARGET, "lower")]
    if direction == "forward+backward":
        name = f"memory over q,k,v,out,dout,dq,dk,dv/{dtype_name(dtype)}/N={sizes.growth[1]}"
        ratios.append(Ratio(name, large.peak / large.tensors, HELD_TARGETS[dtype], "lower"))
    record(
        *ratios,
        shape=(1, sizes.growth[1], NUM_HEADS, HEAD_DIM),
        dtype=dtype,
        peak_bytes=[small.peak, large.peak],
        tensor_bytes=[small.tensors, large.tensors],
    )


def label(sizes: Sizes, dtype: torch.dtype, direction: Direction) -> str:
    small, large = sizes.growth
    return f"{direction}/{dtype_name(dtype)}/N={small} to {large}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
