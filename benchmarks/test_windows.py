"""A causal sliding window against causal segments with as many pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.attention import NUM_HEADS, Inputs, assert_rows_match_definition, forward, forward_backward, random_inputs
from benchmarks.conftest import Sizes
from benchmarks.memory import Direction
from benchmarks.timing import Ratio, side_by_side
from flexdilated import DilatedPattern


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("window", [128, 512, 1024, 2048])
def test_window(benchmark: Any, sizes: Sizes, record: Callable[..., None], window: int, direction: Direction) -> None:
    num_tokens = sizes.dense[0]
    x = random_inputs(num_tokens, torch.float32)
    pattern, segments = DilatedPattern(window=window), DilatedPattern((2 * window,), (1,))
    ratio = _ratio(benchmark, sizes, x, pattern, (segments,), direction)
    pairs = [each.count_pairs(num_tokens, NUM_HEADS, is_causal=True) for each in (pattern, segments)]
    name = f"window over segments/{direction}/float32/w={window}/N={num_tokens}"
    record(
        Ratio(name, ratio, 1.6 if window >= 512 else None, "lower"),
        shape=x.q.shape,
        dtype=torch.float32,
        pair_ratio=pairs[0] / pairs[1],
    )


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_first_tokens(benchmark: Any, sizes: Sizes, record: Callable[..., None], direction: Direction) -> None:
    """Four global tokens beside a window and a far branch: the same pattern without them is the unit."""
    num_tokens = sizes.dense[0]
    x = random_inputs(num_tokens, torch.float32)
    pattern, without = (DilatedPattern.causal(num_tokens, NUM_HEADS, global_tokens=count) for count in (4, 0))
    ratio = _ratio(benchmark, sizes, x, pattern, (without,), direction)
    name = f"first 4 tokens over none/{direction}/float32/N={num_tokens}"
    record(Ratio(name, ratio, 1.05, "lower"), shape=x.q.shape, dtype=torch.float32)


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_near_pairs_once(benchmark: Any, sizes: Sizes, record: Callable[..., None], direction: Direction) -> None:
    """A window and a far branch that leaves its pairs out: both branches by themselves, one after the other, are the unit."""
    num_tokens = sizes.dense[0]
    x = random_inputs(num_tokens, torch.float32)
    pattern = DilatedPattern((num_tokens,), (4,), window=1024)
    alone = DilatedPattern((num_tokens,), (4,)), DilatedPattern(window=1024)
    ratio = _ratio(benchmark, sizes, x, pattern, alone, direction)
    pairs = [each.count_pairs(num_tokens, NUM_HEADS, is_causal=True) for each in (pattern, *alone)]
    name = f"window and far over both apart/{direction}/float32/N={num_tokens}"
    record(Ratio(name, ratio, None, "lower"), shape=x.q.shape, dtype=torch.float32, pair_ratio=pairs[0] / sum(pairs[1:]))


def _ratio(
    benchmark: Any, sizes: Sizes, x: Inputs, pattern: DilatedPattern, unit: Sequence[DilatedPattern], direction: Direction
) -> float:
    """The time of a causal pattern, which is checked, divided by that of the patterns of `unit`, one after another."""
    attend = forward if direction == "forward" else forward_backward
    result, ratio = side_by_side(
        benchmark,
        lambda: attend(x, pattern, is_causal=True),
        lambda: [attend(x, part, is_causal=True) for part in unit],
        rounds=sizes.rounds,
    )
    assert_rows_match_definition(x, pattern, *((result,) if direction == "forward" else result[:2]), is_causal=True)
    return ratio
