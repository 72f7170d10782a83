"""The factory functions of the forks, with the arguments that have a meaning here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flexdilated.compat.absent import MASK_MOD, MESH
from flexdilated.compat.arguments import ignores
from flexdilated.compat.attention import ImprovedDilatedAttention, RingDilatedAttention
from flexdilated.compat.multihead import ImprovedMultiheadDilatedAttention, RingMultiheadDilatedAttention

TYPES = ("auto", "standard", "improved", "ring")
UNSUPPORTED = {
    **dict.fromkeys(("distributed", "improved_distributed", "ring_distributed"), MESH),
    **dict.fromkeys(("block_sparse_ring", "block_sparse_ring_distributed"), MASK_MOD),
}
LENGTHS, RATES = (2048, 4096, 8192), (1, 2, 4)


@ignores("use_tf32", "block_size", "enable_memory_pool", "use_checkpointing", "device", "dtype")
def create_dilated_attention(
    attention_type: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    dropout: float = 0.0,
    ring_size: int | None = None,
) -> nn.Module:
    """`ImprovedDilatedAttention`, or `RingDilatedAttention` for `"ring"`.

    Default lengths and rates: 2048, 4096, 8192 and 1, 2, 4. The forks ignored unknown arguments; here they raise an error.

    Raises:
        ValueError: If the type is unknown, or `ring_size` comes with another type than `"ring"`.
        NotImplementedError: If the type is a distributed or block-sparse one.
        TypeError: If an argument is unknown.
    """
    pattern = (LENGTHS if segment_lengths is None else segment_lengths, RATES if dilation_rates is None else dilation_rates)
    if _is_ring(attention_type, ring_size):
        return RingDilatedAttention(*pattern, dropout, ring_size=ring_size)
    return ImprovedDilatedAttention(*pattern, dropout)


@ignores("use_tf32", "block_size", "enable_memory_pool", "use_checkpointing")
def create_multihead_dilated_attention(
    attention_type: str = "auto",
    embed_dim: int = 768,
    num_heads: int = 12,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    dropout: float = 0.0,
    bias: bool = True,
    layer_norm: bool = True,
    layer_norm_eps: float = 1e-5,
    gamma_init: float = 1.0,
    ring_size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """`ImprovedMultiheadDilatedAttention`, or `RingMultiheadDilatedAttention` for `"ring"`.

    Default lengths and rates, and errors: as `create_dilated_attention`.
    """
    lengths = LENGTHS if segment_lengths is None else segment_lengths
    rates = RATES if dilation_rates is None else dilation_rates
    rest = (dropout, bias, layer_norm, layer_norm_eps, gamma_init)
    if _is_ring(attention_type, ring_size):
        return RingMultiheadDilatedAttention(
            embed_dim, num_heads, lengths, rates, *rest, ring_size=ring_size, device=device, dtype=dtype
        )
    return ImprovedMultiheadDilatedAttention(embed_dim, num_heads, rates, lengths, *rest, device, dtype)


def _is_ring(attention_type: str, ring_size: int | None) -> bool:
    if attention_type in UNSUPPORTED:
        use = UNSUPPORTED[attention_type]
        raise NotImplementedError(f"attention_type must be one of {TYPES}, got {attention_type!r}; use {use}")
    if attention_type not in TYPES:
        raise ValueError(f"attention_type must be one of {TYPES}, got {attention_type!r}")
    if attention_type != "ring" and ring_size is not None:
        raise ValueError(f"ring_size must be None unless attention_type='ring', got {ring_size}")
    return attention_type == "ring"
