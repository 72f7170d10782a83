"""Against dense attention of the same shape: the speed-up that the pattern's pairs promise, and where it begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention import DTYPES, HEAD_DIM, NUM_HEADS, Inputs, assert_rows_match_definition, forward, random_inputs
from benchmarks.conftest import Sizes
from benchmarks.timing import Ratio, median_ratio, side_by_side
from flexdilated import DilatedPattern

LONGNET = DilatedPattern.longnet()
DENSE = DilatedPattern((1 << 40,), (1,))
CROSSOVER_PATTERNS = {"longnet": LONGNET, "512..4096": DilatedPattern((512, 1024, 2048, 4096), (1, 2, 4, 8))}


def dense(x: Inputs, *, is_causal: bool) -> Callable[[], Tensor]:
    """Dense attention in its own layout, `(1, H, N, D)` and contiguous, so that it pays for no transpose."""
    q, k, v = (t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_speedup_over_dense(
    benchmark: Any, sizes: Sizes, record: Callable[..., None], dense_tokens: int, dtype: torch.dtype, is_causal: bool
) -> None:
    x = random_inputs(dense_tokens, dtype)
    out, ratio = side_by_side(
        benchmark, lambda: forward(x, LONGNET, is_causal=is_causal), dense(x, is_causal=is_causal), rounds=min(3, sizes.rounds)
    )
    assert_rows_match_definition(x, LONGNET, out, is_causal=is_causal)
    pairs = [pattern.count_pairs(dense_tokens, NUM_HEADS, is_causal=is_causal) for pattern in (DENSE, LONGNET)]
    speedup, promised = 1 / ratio, pairs[0] / pairs[1]
    where = f"{label(dtype, is_causal)}/N={dense_tokens}"
    record(
        Ratio(f"dense/speed-up over pair ratio/{where}", speedup / promised, 0.8, "higher"),
        Ratio(f"dense/speed-up/{where}", speedup, None, "higher"),
        shape=x.q.shape,
        dtype=dtype,
        is_causal=is_causal,
        pair_ratio=promised,
    )


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CROSSOVER_PATTERNS)
def test_crossover(
    benchmark: Any, sizes: Sizes, record: Callable[..., None], name: str, dtype: torch.dtype, is_causal: bool
) -> None:
    pattern = CROSSOVER_PATTERNS[name]

    def search() -> dict[int, float]:
        speedups: dict[int, float] = {}
        for num_tokens in sizes.crossover:
            x = random_inputs(num_tokens, dtype)
            ours = forward(x, pattern, is_causal=is_causal)
            assert_rows_match_definition(x, pattern, ours, is_causal=is_causal)
            peer = dense(x, is_causal=is_causal)
            speedups[num_tokens] = median_ratio(peer, lambda x=x: forward(x, pattern, is_causal=is_causal), rounds=sizes.rounds)
            if speedups[num_tokens] > 1:
                break
        return speedups

    speedups = benchmark.pedantic(search, rounds=1)
    last = max(speedups)
    record(
        shape=(1, last, NUM_HEADS, HEAD_DIM),
        dtype=dtype,
        is_causal=is_causal,
        pattern=pattern.to_dict(),
        crossover={
            "name": f"crossover/{name}/{label(dtype, is_causal)}",
            "tokens": last if speedups[last] > 1 else None,
            "speedups": {str(num_tokens): speedup for num_tokens, speedup in speedups.items()},
        },
    )


def label(dtype: torch.dtype, is_causal: bool) -> str:
    return f"{'causal' if is_causal else 'full'}/{str(dtype).removeprefix('torch.')}"
