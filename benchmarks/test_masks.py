"""Block masks in closed form: what a million tokens cost, and against looking at all pairs where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.conftest import Sizes
from benchmarks.timing import Ratio, side_by_side
from flexdilated import DilatedPattern, create_dilated_block_mask, dilated_mask_mod
from flexdilated.masks.blocks import block_lists, head_branches

LONGNET = DilatedPattern.longnet()
MILLION = 1 << 20


def test_block_mask_against_all_pairs(benchmark: Any, sizes: Sizes, record: Callable[..., None]) -> None:
    """One head: torch's own construction holds all pairs in memory at once."""
    num_tokens = 1024 if sizes.quick else 8192

    def ours() -> Any:
        from flexdilated.masks import block_mask

        block_mask._find_lists.cache_clear()
        block_mask._find_large_lists.cache_clear()
        return create_dilated_block_mask(LONGNET, 1, seq_len=num_tokens, device="cpu")

    def theirs() -> Any:
        return create_block_mask(dilated_mask_mod(LONGNET, 1, seq_len=num_tokens), 1, 1, num_tokens, num_tokens, device="cpu")

    mask, ratio = side_by_side(benchmark, ours, theirs, rounds=sizes.rounds)
    assert torch.equal(mask.kv_num_blocks, theirs().kv_num_blocks)
    record(
        # Below a hundredth it is the noise of two milliseconds.
        Ratio(f"block mask in closed form over all pairs/N={num_tokens}", max(ratio, 0.01), 0.1, "lower"),
        shape=(1, num_tokens, 1, 0),
        dtype=torch.int32,
    )


def test_block_mask_of_a_million_tokens(benchmark: Any, sizes: Sizes, record: Callable[..., None]) -> None:
    """Seconds and bytes of one distinct head of LongNet's pattern, both directions, and of one packed branch."""
    branches = head_branches(LONGNET, 7, 12, MILLION)
    packed = head_branches(DilatedPattern((2048,), (1,)), 0, 1, MILLION)

    def head() -> list[Any]:
        return [block_lists(branches, MILLION, 128, 128, order) for order in ("before", "after")]

    lists = benchmark.pedantic(head, rounds=3, warmup_rounds=1)
    ratio_of_packed = statistics_of(lambda: block_lists(packed, MILLION, 128, 128, "any"))
    record(
        shape=(1, MILLION, 1, 0),
        dtype=torch.int32,
        megabytes=sum(x.numel() * x.element_size() for side in lists for x in side) / 1e6,
        packed_branch_seconds=ratio_of_packed,
        packed_branch_megabytes=sum(x.numel() * x.element_size() for x in block_lists(packed, MILLION, 128, 128, "any")) / 1e6,
    )


def statistics_of(function: Callable[[], object]) -> float:
    """The median time of five calls, in seconds."""
    from statistics import median

    from benchmarks.timing import seconds

    function()
    return median(seconds(function) for _ in range(5))
