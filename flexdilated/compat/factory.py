"""The forks' factory functions, with the arguments that have a meaning here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from flexdilated.compat.arguments import warns
from flexdilated.compat.attention import ImprovedDilatedAttention, RingDilatedAttention
from flexdilated.compat.multihead import ImprovedMultiheadDilatedAttention, RingMultiheadDilatedAttention

PLAIN, RING = ("auto", "standard", "improved"), ("ring",)
DISTRIBUTED = ("distributed", "improved_distributed", "ring_distributed")
BLOCK_SPARSE = ("block_sparse_ring", "block_sparse_ring_distributed")


@warns("always", "without parameters")
def create_dilated_attention(
    attention_type: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    dropout: float = 0.0,
    ring_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    use_checkpointing: bool = False,
    use_tf32: bool | None = None,
    block_size: int | None = None,
    enable_memory_pool: bool | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """`ImprovedDilatedAttention`, or `RingDilatedAttention` for `"ring"`; arguments are explained in `ARGUMENTS`.

    Default lengths and rates: 2048, 4096, 8192 and 1, 2, 4. The forks dropped arguments that they did not know; here they raise.

    Raises:
        ValueError: If the type is unknown, or an argument of a ring comes with another type.
        NotImplementedError: If the type is a distributed or block-sparse one.
        TypeError: If an argument is unknown.
    """
    is_ring = _is_ring(attention_type, ring_size, group, use_checkpointing)
    lengths, rates = _pattern(segment_lengths, dilation_rates)
    if is_ring:
        return RingDilatedAttention(
            lengths,
            rates,
            dropout,
            ring_size=ring_size,
            group=group,
            use_checkpointing=use_checkpointing,
        )
    return ImprovedDilatedAttention(lengths, rates, dropout)


@warns("always")
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
    use_tf32: bool | None = None,
    block_size: int | None = None,
    enable_memory_pool: bool | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """`ImprovedMultiheadDilatedAttention`, or `RingMultiheadDilatedAttention` for `"ring"`; as `create_dilated_attention`.

    Raises:
        ValueError: If the type is unknown, or an argument of a ring comes with another type.
        NotImplementedError: If the type is a distributed or block-sparse one.
        TypeError: If an argument is unknown.
    """
    is_ring = _is_ring(attention_type, ring_size, group, use_checkpointing)
    lengths, rates = _pattern(segment_lengths, dilation_rates)
    if is_ring:
        return RingMultiheadDilatedAttention(
            embed_dim,
            num_heads,
            lengths,
            rates,
            dropout,
            bias,
            layer_norm,
            layer_norm_eps,
            gamma_init,
            ring_size=ring_size,
            group=group,
            use_checkpointing=use_checkpointing,
            device=device,
            dtype=dtype,
        )
    return ImprovedMultiheadDilatedAttention(
        embed_dim, num_heads, rates, lengths, dropout, bias, layer_norm, layer_norm_eps, gamma_init, device, dtype
    )


def _is_ring(attention_type: str, ring_size: int | None, group: dist.ProcessGroup | None, use_checkpointing: bool) -> bool:
    if attention_type in DISTRIBUTED:
        raise NotImplementedError(
            f"attention_type must be one of {(*PLAIN, *RING)}, got {attention_type!r}; for shards of a sequence use "
            "flexdilated.DilatedAttention(mesh=...) or flexdilated.MultiheadDilatedAttention(mesh=...)"
        )
    if attention_type in BLOCK_SPARSE:
        raise NotImplementedError(
            f"attention_type must be one of {(*PLAIN, *RING)}, got {attention_type!r}; for sparsity beyond the pattern use "
            "flexdilated.dilated_attention(mask_mod=...)"
        )
    if attention_type not in (*PLAIN, *RING):
        raise ValueError(f"attention_type must be one of {(*PLAIN, *RING)}, got {attention_type!r}")
    if attention_type in RING:
        return True
    for name, value, default in (
        ("ring_size", ring_size, None),
        ("group", group, None),
        ("use_checkpointing", use_checkpointing, False),
    ):
        if value is not default:
            raise ValueError(f"{name} must be {default} unless attention_type='ring', got {value!r}")
    return False


def _pattern(lengths: Sequence[int] | None, rates: Sequence[int] | None) -> tuple[Sequence[int], Sequence[int]]:
    return (2048, 4096, 8192) if lengths is None else lengths, (1, 2, 4) if rates is None else rates
