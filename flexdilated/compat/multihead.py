"""Layers with projections under the names and arguments of earlier packages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexdilated.compat.arguments import Lengths, ignores, pattern_of
from flexdilated.nn import attention

IGNORED_BY_RING = ("ring_size", "use_flash_attention", "enable_memory_pool", "use_pattern_cache")


class _Multihead(attention.MultiheadDilatedAttention):
    """`flexdilated.MultiheadDilatedAttention` under the grouped pattern; loads earlier names of its weights."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dilation_rates: Sequence[int],
        segment_lengths: Lengths,
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        pattern = pattern_of(segment_lengths, dilation_rates)
        norm: dict[str, Any] = {"layer_norm": layer_norm, "layer_norm_eps": layer_norm_eps, "gamma_init": gamma_init}
        super().__init__(embed_dim, num_heads, pattern, dropout_p=dropout, bias=bias, device=device, dtype=dtype, **norm)
        self.register_load_state_dict_pre_hook(_rename_weights)

    def forward(  # type: ignore[override]  # the earlier call, which has no padding mask in fourth place
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, None]:
        """`((b, n, embed_dim), None)` from query, key and value of that shape; key defaults to query, value to key."""
        key = query if key is None else key
        value = key if value is None else value
        return super().forward(query, key, value, is_causal=is_causal)


@ignores(last="op")
class MultiheadDilatedAttention(_Multihead):
    """The popular port's layer; dilation rates come before segment lengths.

    >>> MultiheadDilatedAttention(32, 4, [1, 2], [16, 64])(torch.randn(2, 64, 32))[0].shape
    torch.Size([2, 64, 32])
    """


@ignores(last="use_tf32")
class ImprovedMultiheadDilatedAttention(_Multihead):
    """`MultiheadDilatedAttention` with the arguments of the forks.

    >>> ImprovedMultiheadDilatedAttention(32, 4, [1, 2], [16, 64], layer_norm=False)(torch.randn(2, 64, 32))[0].shape
    torch.Size([2, 64, 32])
    """


@ignores(*IGNORED_BY_RING, "use_tf32", "block_size", "use_checkpointing")
class RingMultiheadDilatedAttention(_Multihead):
    """The ring classes' layer; segment lengths come before dilation rates. Each process computes the whole layer.

    >>> RingMultiheadDilatedAttention(32, 4, [16, 64], [1, 2])(torch.randn(2, 64, 32))[0].shape
    torch.Size([2, 64, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Lengths,
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = (embed_dim, num_heads, dilation_rates, segment_lengths)
        super().__init__(*sizes, dropout, bias, layer_norm, layer_norm_eps, gamma_init, device=device, dtype=dtype)


@ignores(*IGNORED_BY_RING)
class RingMultiheadDilatedAttentionHybrid(_Multihead):
    """`RingMultiheadDilatedAttention` without LayerNorm, called like `nn.MultiheadAttention`.

    >>> x = torch.randn(2, 64, 32)
    >>> RingMultiheadDilatedAttentionHybrid(32, 4, [16, 64], [1, 2])(x, x, x)[0].shape
    torch.Size([2, 64, 32])

    Raises:
        NotImplementedError: If `layer_norm` is True: the earlier class normalised queries and keys, not the attention's output.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Lengths,
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        *,
        layer_norm: bool = False,
        gamma_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if layer_norm:
            raise NotImplementedError(
                "layer_norm must be False, got True: there it normalised queries and keys; "
                "RingMultiheadDilatedAttention has a LayerNorm before the output projection"
            )
        sizes = (embed_dim, num_heads, dilation_rates, segment_lengths)
        super().__init__(*sizes, dropout, bias, False, gamma_init=gamma_init, device=device, dtype=dtype)

    forward = attention.MultiheadDilatedAttention.forward  # type: ignore[assignment]  # the call of nn.MultiheadAttention again


def _rename_weights(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Rename earlier weights: `norm` to `inner_attn_ln`, and a fused `qkv_proj` to three projections."""
    for part in ("weight", "bias"):
        if prefix + f"norm.{part}" in state:
            state[prefix + f"inner_attn_ln.{part}"] = state.pop(prefix + f"norm.{part}")
        if prefix + f"qkv_proj.{part}" in state:
            for name, rows in zip("qkv", state.pop(prefix + f"qkv_proj.{part}").chunk(3)):
                state[prefix + f"{name}_proj.{part}"] = rows
