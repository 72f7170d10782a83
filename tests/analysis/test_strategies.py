"""What a layer over a sharded sequence costs: rows of published patterns, and memory."""

from dataclasses import replace
from typing import Any

import pytest

from flexdilated import DilatedPattern
from flexdilated.analysis.strategies import Layer, Strategy, layer_plan, memory, strategies
from flexdilated.distributed.planner.plan import EXCHANGES

MILLION = 1 << 20


def found(layer: Layer) -> dict[str, Strategy]:
    return {each.name: each for each in strategies(layer, with_pairs=False)}


@pytest.mark.parametrize(
    ("pattern", "ranks", "ring", "ulysses", "gather", "whole_heads"),
    [
        (DilatedPattern.longnet(), 8, 917_504, 229_376, 0, 0),
        (DilatedPattern.longnet(), 64, 1_032_192, 32_256, 1_366, 1_366),
        (replace(DilatedPattern.gigapath(), zero_padding=False), 64, 1_032_192, 32_256, 114_215, 18_227),
    ],
)
def test_rows_of_published_patterns(
    pattern: DilatedPattern, ranks: int, ring: int, ulysses: int, gather: int, whole_heads: int
) -> None:
    layer = Layer(pattern, MILLION, ranks, 64, 64, 64, "bfloat16", 1, False)
    costs: dict[str, Any] = found(layer)
    rows = {name: each.rows.max() / 64 for name, each in costs.items()}
    assert (rows["ring-all"], rows["all-gather"], rows["ulysses"]) == (ring, ring, ulysses)
    # 2 * 64 elements of 2 bytes, for 64 heads.
    assert costs["ulysses"].forward.max() == costs["ulysses"].backward.max() == ulysses * 2**14
    assert costs["ring-all"].forward.max() == costs["all-gather"].backward.max() == ring * 2**14
    assert costs["ring-all"].backward.max() == 2 * ring * 2**14
    is_exact = pattern == DilatedPattern.longnet()
    assert [costs[name].is_exact for name in EXCHANGES] == [is_exact] * 3
    assert rows["gather"] == rows["ring"] <= gather * (1 if is_exact else 1.05)
    assert rows["heads"] <= whole_heads * (1 if is_exact else 1.05)
    assert layer_plan(layer).is_local is (gather == 0)


def test_memory_holds_tensors_gradients_and_messages() -> None:
    layer = Layer(DilatedPattern((7, 31), (1, 2)), 60, 2, 4, 2, 8, "float32", 1, False)
    gradients = 30 * (2 * 4 + 2 * 2) * 8 * 4
    buffers = {
        "ring-all": 2 * 30 * 2 * 2 * 8 * 4,
        "all-gather": 60 * 2 * 2 * 8 * 4,
        # Half of q, k, v and out of 30 tokens leaves, and as much arrives.
        "ulysses": 2 * gradients // 2,
    }
    for name, size in buffers.items():
        each: Any = found(layer)[name]
        tensors = gradients + 30 * 4 * 4
        assert memory(layer, layer_plan(layer), each.buffers) == (tensors, gradients, size, tensors + gradients + size)
