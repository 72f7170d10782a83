"""The names of earlier packages by their kinds, small modules of each, and inputs for them."""

import inspect
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdilated import DilatedPattern, compat, reference
from tests.cases import randomised

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 23, 5, 3
EMBED = HEADS * HEAD_DIM
LENGTHS, RATES = [7, 13], [2, 3]
GROUPED = DilatedPattern.grouped(LENGTHS, RATES)
GRID = (5, 7)

MIGRATION = Path(__file__).parents[2] / "docs" / "migration.md"

BARE = (
    "DilatedAttention",
    "ImprovedDilatedAttention",
    "RingDilatedAttention",
    "RingDilatedAttentionHybrid",
    "RingDilatedAttentionHybridFixed",
    "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV3",
)
LAYERS = (
    "MultiheadDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "RingMultiheadDilatedAttention",
    "RingMultiheadDilatedAttentionHybrid",
    "RingAdvancedDistributedDilatedAttention",
)
HILBERT = "RingDilatedAttentionHybridHilbert"
TRANSFORMERS = ("DilatedTransformerEncoderLayer", "DilatedTransformerDecoderLayer", "LongNet")
FACTORIES = ("create_dilated_attention", "create_multihead_dilated_attention")

# A value of each argument that has no effect.
GIVEN = {
    "op": object(),
    "use_flash_attention": True,
    "use_tf32": False,
    "enable_memory_pool": True,
    "lightweight_pool": False,
    "enable_profiling": False,
    "use_pattern_cache": True,
    "use_checkpointing": True,
    "block_size": 1024,
    "ring_size": 3,
    "hilbert_chunk_size": 4096,
    "device": "cpu",
    "dtype": torch.float32,
}


def draw(num_tokens: int = TOKENS) -> tuple[Tensor, ...]:
    return tuple(torch.randn(BATCH, num_tokens, HEADS, HEAD_DIM, dtype=torch.float64, requires_grad=True) for _ in range(3))


def build(name: str, **options: object) -> nn.Module:
    """A module of any of the names, with random biases and gains."""
    if name in LAYERS:
        options = {"embed_dim": EMBED, "num_heads": HEADS, "dtype": torch.float64, **options}
    elif name == HILBERT:
        options = {"grid": GRID, **options}
    return randomised(getattr(compat, name)(**{"segment_lengths": LENGTHS, "dilation_rates": RATES, **options}))


def definition_of(
    layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, pattern: DilatedPattern = GROUPED
) -> Tensor:
    """A layer with projections written out over the dense definition, with or without its LayerNorm."""
    projected = ((query, layer.q_proj), (key, layer.k_proj), (value, layer.v_proj))
    q, k, v = (F.linear(x, p.weight, p.bias).unflatten(-1, (HEADS, HEAD_DIM)) for x, p in projected)
    out = reference.dilated_attention(q, k, v, pattern, is_causal=is_causal)[0].flatten(2)
    norm = layer.inner_attn_ln
    if isinstance(norm, nn.LayerNorm):
        out = F.layer_norm(out, (EMBED,), norm.weight, norm.bias, norm.eps)
    return F.linear(out, layer.out_proj.weight, layer.out_proj.bias)


def arguments(name: str) -> set[str]:
    return set(inspect.signature(getattr(compat, name)).parameters)


def expected_warnings(name: str) -> list[str]:
    """The warnings of a call that gives every argument of `GIVEN` that it accepts."""
    has_parameters = name in LAYERS or "multihead" in name
    ignored = arguments(name) & set(GIVEN) - ({"device", "dtype"} if has_parameters else set())
    return sorted(f"{argument} has no effect: {compat.ARGUMENTS[argument]}" for argument in ignored)


def inputs(name: str) -> tuple[Tensor, ...]:
    if name in LAYERS:
        return tuple(x.detach().flatten(2) for x in draw())
    return draw(GRID[0] * GRID[1] if name == HILBERT else TOKENS)


def only(result: object) -> Tensor:
    return result[0] if isinstance(result, tuple) else result
