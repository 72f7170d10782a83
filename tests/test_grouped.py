"""`heads="grouped"` needs a key/value head for every branch: fewer are refused wherever they are known, as many are accepted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexdilated import (
    DilatedKVCache,
    DilatedPattern,
    LongNet,
    LongNetConfig,
    MultiheadDilatedAttention,
    attention_map,
    compat,
    convert,
    create_dilated_block_mask,
    dilated_attention,
    dilated_mask_mod,
    dilated_score_mod,
    reference,
)
from flexdilated.distributed.planner.plan import context_plan
from flexdilated.draw.blocks import draw_blocks
from flexdilated.draw.pattern import draw, multiplicity
from flexdilated.hub.encoder import LongNetEncoder

LENGTHS, RATES = (5, 7, 11), (1, 2, 3)
PATTERN = DilatedPattern.grouped(LENGTHS, RATES)
TOKENS, DIM = 13, 24
REFUSAL = (
    r"pattern must have at most one branch per key/value head=%d under heads='grouped', got 3 branches; use more heads, fewer "
    r"branches or heads='all'"
)


def tensors(kv_heads: int, group: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2307)
    q, k, v = (torch.randn(2, TOKENS, heads, 5, dtype=torch.float64) for heads in (kv_heads * group, kv_heads, kv_heads))
    return q, k, v


def call(kv_heads: int, **options: Any) -> object:
    return dilated_attention(*tensors(kv_heads), PATTERN, **options)


def same(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score


def layer(heads: int) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(DIM, heads, batch_first=True)


def cache(heads: int) -> DilatedKVCache:
    return DilatedKVCache(PATTERN, batch_size=1, num_kv_heads=heads, head_dim=5)


ENTRIES: dict[str, Callable[[int], object]] = {
    "pattern": lambda heads: PATTERN.head_range(0, heads),
    "count_pairs": lambda heads: PATTERN.count_pairs(TOKENS, heads),
    "auto": call,
    "sdpa": lambda heads: call(heads, backend="sdpa"),
    "flex": lambda heads: call(heads, backend="flex"),
    "reference engine": lambda heads: call(heads, backend="reference"),
    "score_mod": lambda heads: call(heads, score_mod=same),
    "oracle": lambda heads: reference.dilated_attention(*tensors(heads), PATTERN),
    "mask_mod": lambda heads: dilated_mask_mod(PATTERN, 2 * heads, seq_len=TOKENS, num_kv_heads=heads),
    "score mod": lambda heads: dilated_score_mod(PATTERN, 2 * heads, seq_len=TOKENS, num_kv_heads=heads),
    "block mask": lambda heads: create_dilated_block_mask(PATTERN, heads, seq_len=TOKENS, device="cpu"),
    "attention_map": lambda heads: attention_map(*tensors(heads)[:2], PATTERN, queries=0),
    "cache": cache,
    "plan": lambda heads: context_plan(PATTERN, (7, 6), heads, range(heads), 1, ((0, TOKENS),), False),
    "multiplicity": lambda heads: multiplicity(PATTERN, TOKENS, heads),
    "draw": lambda heads: draw(PATTERN, TOKENS, heads),
    "draw_blocks": lambda heads: draw_blocks(PATTERN, TOKENS, heads, block_size=4),
    "layer": lambda heads: MultiheadDilatedAttention(DIM, 2 * heads, PATTERN, num_kv_heads=heads),
    "from_torch": lambda heads: MultiheadDilatedAttention.from_torch(layer(heads), PATTERN),
    "convert": lambda heads: convert(nn.Sequential(layer(heads)), PATTERN),
    "config": lambda heads: LongNetConfig(
        vocab_size=5, embed_dim=DIM, num_layers=1, num_heads=2 * heads, num_kv_heads=heads, pattern=PATTERN
    ),
    "config of as many": lambda heads: LongNetConfig(vocab_size=5, embed_dim=DIM, num_layers=1, num_heads=heads, pattern=PATTERN),
    "encoder": lambda heads: LongNetEncoder(DIM, 1, heads, PATTERN),
    "encoder-decoder": lambda heads: LongNet(
        DIM, heads, 1, 1, segment_lengths=LENGTHS, dilation_rates=RATES, heads="grouped", device="meta"
    ),
    "earlier attention": lambda heads: compat.DilatedAttention(LENGTHS, RATES)(*tensors(heads, 1)),
    "earlier layer": lambda heads: compat.MultiheadDilatedAttention(DIM, heads, RATES, LENGTHS),
    "earlier LongNet": lambda heads: compat.LongNet(DIM, heads, 1, 1, 11, LENGTHS, RATES),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_refuses_fewer_heads_than_branches_and_accepts_as_many(entry: str) -> None:
    for heads in (1, 2):
        with pytest.raises(ValueError, match=REFUSAL % heads):
            ENTRIES[entry](heads)
    if entry != "flex":  # takes no float64
        ENTRIES[entry](3)
