"""The factory functions of the forks, with the arguments that have a meaning here (`ARGUMENTS` explains them)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
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


@ignores("use_tf32", "block_size", "enable_memory_pool", "device", "dtype")
def create_dilated_attention(
    attention_type: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    dropout: float = 0.0,
    ring_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    use_checkpointing: bool = False,
) -> nn.Module:
    """`ImprovedDilatedAttention`, or `RingDilatedAttention` for `"ring"`.

    Default lengths and rates: 2048, 4096, 8192 and 1, 2, 4. The forks ignored unknown arguments; here they raise an error.

    Raises:
        ValueError: If the type is unknown, or an argument of a ring comes with another type.
        NotImplementedError: If the type is a distributed or block-sparse one.
        TypeError: If an argument is unknown.
    """
    lengths, rates = _pattern(segment_lengths, dilation_rates)
    if not _is_ring(attention_type, ring_size, group, use_checkpointing):
        return ImprovedDilatedAttention(lengths, rates, dropout)
    return RingDilatedAttention(lengths, rates, dropout, ring_size=ring_size, group=group, use_checkpointing=use_checkpointing)


@ignores("use_tf32", "block_size", "enable_memory_pool")
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
    group: dist.ProcessGroup | None = None,
    use_checkpointing: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """`ImprovedMultiheadDilatedAttention`, or `RingMultiheadDilatedAttention` for `"ring"`.

    Default lengths and rates, and errors: as `create_dilated_attention`.
    """
    lengths, rates = _pattern(segment_lengths, dilation_rates)
    rest = (dropout, bias, layer_norm, layer_norm_eps, gamma_init)
    if not _is_ring(attention_type, ring_size, group, use_checkpointing):
        return ImprovedMultiheadDilatedAttention(embed_dim, num_heads, rates, lengths, *rest, device, dtype)
    layer = RingMultiheadDilatedAttention(
        embed_dim, num_heads, lengths, rates, *rest, ring_size=ring_size, group=group, device=device, dtype=dtype
    )
    layer.use_checkpointing = use_checkpointing
    return layer


def _is_ring(attention_type: str, ring_size: int | None, group: dist.ProcessGroup | None, use_checkpointing: bool) -> bool:
    if attention_type in UNSUPPORTED:
        use = UNSUPPORTED[attention_type]
        raise NotImplementedError(f"attention_type must be one of {TYPES}, got {attention_type!r}; use {use}")
    if attention_type not in TYPES:
        raise ValueError(f"attention_type must be one of {TYPES}, got {attention_type!r}")
    if attention_type != "ring":
        options = {"ring_size": (ring_size, None), "group": (group, None), "use_checkpointing": (use_checkpointing, False)}
        for name, (value, default) in options.items():
            if value is not default:
                raise ValueError(f"{name} must be {default} unless attention_type='ring', got {value!r}")
    return attention_type == "ring"


def _pattern(lengths: Sequence[int] | None, rates: Sequence[int] | None) -> tuple[Sequence[int], Sequence[int]]:
    return (2048, 4096, 8192) if lengths is None else lengths, (1, 2, 4) if rates is None else rates
