"""The factory functions of the forks, with the arguments that have a meaning here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flexdilated.compat.arguments import MASK_MOD, MESH, Lengths, ignores
from flexdilated.compat.attention import ImprovedDilatedAttention, RingDilatedAttention
from flexdilated.compat.multihead import ImprovedMultiheadDilatedAttention, RingMultiheadDilatedAttention

TYPES = ("auto", "standard", "improved", "ring")
UNSUPPORTED = {
    **dict.fromkeys(("distributed", "improved_distributed", "ring_distributed"), MESH),
    **dict.fromkeys(("block_sparse_ring", "block_sparse_ring_distributed"), MASK_MOD),
}
LENGTHS, RATES = (2048, 4096, 8192), (1, 2, 4)
IGNORED = ("use_tf32", "block_size", "enable_memory_pool", "use_checkpointing", "ring_size")


@ignores(*IGNORED, "device", "dtype")
def create_dilated_attention(
    attention_type: str = "auto",
    segment_lengths: Lengths | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    dropout: float = 0.0,
) -> nn.Module:
    """`ImprovedDilatedAttention`, or `RingDilatedAttention` for `"ring"`.

    >>> type(create_dilated_attention('ring')).__name__
    'RingDilatedAttention'

    Default lengths and rates: 2048, 4096, 8192 and 1, 2, 4. Unlike in the forks, unknown arguments raise an error.

    Raises:
        ValueError: If the type is unknown.
        NotImplementedError: If the type is a distributed or block-sparse one.
        TypeError: If an argument is unknown.
    """
    build = RingDilatedAttention if _is_ring(attention_type) else ImprovedDilatedAttention
    return build(
        LENGTHS if segment_lengths is None else segment_lengths, RATES if dilation_rates is None else dilation_rates, dropout
    )


@ignores(*IGNORED)
def create_multihead_dilated_attention(
    attention_type: str = "auto",
    embed_dim: int = 768,
    num_heads: int = 12,
    segment_lengths: Lengths | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    dropout: float = 0.0,
    bias: bool = True,
    layer_norm: bool = True,
    layer_norm_eps: float = 1e-5,
    gamma_init: float = 1.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """`ImprovedMultiheadDilatedAttention`, or `RingMultiheadDilatedAttention` for `"ring"`.

    >>> type(create_multihead_dilated_attention('improved', 32, 4)).__name__
    'ImprovedMultiheadDilatedAttention'

    Default lengths and rates, and errors: as `create_dilated_attention`.
    """
    lengths = LENGTHS if segment_lengths is None else segment_lengths
    rates = RATES if dilation_rates is None else dilation_rates
    build = RingMultiheadDilatedAttention if _is_ring(attention_type) else ImprovedMultiheadDilatedAttention
    sizes = {"segment_lengths": lengths, "dilation_rates": rates, "device": device, "dtype": dtype}
    norm = {"layer_norm": layer_norm, "layer_norm_eps": layer_norm_eps, "gamma_init": gamma_init}
    return build(embed_dim, num_heads, dropout=dropout, bias=bias, **sizes, **norm)  # type: ignore[arg-type]


def _is_ring(attention_type: str) -> bool:
    if attention_type in UNSUPPORTED:
        use = UNSUPPORTED[attention_type]
        raise NotImplementedError(f"attention_type must be one of {TYPES}, got {attention_type!r}; use {use}")
    if attention_type not in TYPES:
        raise ValueError(f"attention_type must be one of {TYPES}, got {attention_type!r}")
    return attention_type == "ring"
