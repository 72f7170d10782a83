"""A window in masks and block masks, and the estimates of the flex backend: against integers, and a look at all pairs."""

from __future__ import annotations

import pytest
import torch

from flexdilated import DilatedPattern, create_dilated_block_mask, dilated_mask_mod
from flexdilated.backends.dense.math import MATH
from flexdilated.backends.flex import kernel as flex
from flexdilated.backends.flex.cost import Shape, choose_layout, fused_cost, packed_cost
from flexdilated.backends.flex.rows import Lanes, attend_rows
from flexdilated.backends.kernel import Options
from flexdilated.core.branch import Window
from flexdilated.core.call import Call
from tests.backends import flex_emulation
from tests.tolerances import EXACT


def test_lists_of_a_million_tokens_are_as_wide_as_the_window() -> None:
    mask = create_dilated_block_mask(DilatedPattern(window=500), 4, seq_len=1 << 20, is_causal=True, device="meta")
    assert mask.kv_indices.shape == mask.q_indices.shape == (1, 4, 8192, 3)


def test_distances_of_unsigned_positions_do_not_wrap() -> None:
    p, pattern = torch.arange(100, dtype=torch.uint8), DilatedPattern(window=5, global_tokens=3)
    joined = dilated_mask_mod(pattern, 1, seq_len=100)(torch.tensor(0), torch.tensor(0), p[:, None], p)
    assert joined.sum() == pattern.count_pairs(100, 1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("shift", "size"), [(129, 130), (-150, 130), (90, 1000)])
def test_rows_of_a_window_that_shards_cut(shift: int, size: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "call", flex_emulation.call)
    q, k, v = (torch.randn(2, heads, rows, 4, dtype=torch.float64) for heads, rows in ((2, 310), (1, 401), (1, 401)))
    place = torch.zeros(2, dtype=torch.int32)
    low, high = (bound + shift for bound in Window(size).band(is_causal=is_causal))
    lanes = Lanes(place, torch.zeros(2, 2, dtype=torch.int32), place, 1, -shift, (low, high))
    out, lse = attend_rows(q, k, v, None, lanes, Call(DilatedPattern(window=size), is_causal, 0.5))
    expected = MATH.forward(q, k, v, Options(False, 0.5, band=(low, high)))
    torch.testing.assert_close((out, lse), (expected[0].nan_to_num(), expected[1]), **EXACT)


def test_estimates_count_the_tiles_of_the_masks() -> None:
    for size, num_tokens, is_causal in ((1, 700, True), (128, 700, False), (129, 640, True), (500, 901, False), (1000, 900, True)):
        pattern, shape = DilatedPattern(window=size), Shape(2, num_tokens, 4, 2, 64, 2, is_causal)
        mask = create_dilated_block_mask(pattern, 4, seq_len=num_tokens, is_causal=is_causal, device="cpu")
        tiles = 2 * int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
        assert packed_cost(pattern, shape).tiles == fused_cost(pattern, shape).tiles == tiles
    for count, num_tokens, is_causal in ((1, 700, True), (130, 700, False), (300, 640, True), (1000, 900, False)):
        pattern, shape = DilatedPattern(global_tokens=count), Shape(2, num_tokens, 4, 2, 64, 2, is_causal)
        mask = create_dilated_block_mask(pattern, 4, seq_len=num_tokens, is_causal=is_causal, device="cpu")
        assert fused_cost(pattern, shape).tiles == 2 * int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    far = DilatedPattern((1 << 17,), (8,), window=512, global_tokens=4)
    layouts = [choose_layout(each, Shape(1, 1 << 17, 8, 8, 64, 2, True)) for each in (DilatedPattern(window=512), far)]
    assert layouts == ["fused", "packed"]
