"""The transformer block of LongNet: pre-norm with sub-LayerNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from flexdilated.core.tracing import writes_onnx
from flexdilated.decode import DilatedKVCache
from flexdilated.nn.attention import MultiheadDilatedAttention
from flexdilated.nn.initial_weights import set_initial_weights
from flexdilated.nn.position import Rotation


class FeedForward(nn.Module):
    """`fc2(norm(gelu(fc1(x))))`. Source: MAGNETO, arXiv 2210.06423, figure 2.

    >>> FeedForward(32, 64)(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])

    Args:
        embed_dim: Elements of a token.
        ffn_dim: Elements between the two projections.
        gamma_init: Gain of the initial weights.
        layer_norm_eps: Epsilon of the LayerNorm.
    """

    def __init__(self, embed_dim: int, ffn_dim: int, *, gamma_init: float = 1.0, layer_norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.ffn_layernorm = nn.LayerNorm(ffn_dim, eps=layer_norm_eps)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        for projection in (self.fc1, self.fc2):
            set_initial_weights(projection, "xavier_normal_", gain=gamma_init)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, N, embed_dim)` to `(B, N, embed_dim)`; arguments as for the attention."""
        return self.fc2(self.ffn_layernorm(_activation(self.fc1(x))))


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + ffn(norm(x))`.

    >>> attention = MultiheadDilatedAttention(32, 4, DilatedPattern((8, 64), (1, 2)))
    >>> Block(attention, FeedForward(32, 64))(torch.randn(2, 64, 32)).shape
    torch.Size([2, 64, 32])

    Args:
        attention: The self-attention.
        ffn: The feed-forward network.
        dropout_p: Probability of dropping an element of either branch in training.
        layer_norm_eps: Epsilon of the LayerNorms.
    """

    def __init__(
        self, attention: MultiheadDilatedAttention, ffn: FeedForward, *, dropout_p: float = 0.0, layer_norm_eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(attention.embed_dim, eps=layer_norm_eps)
        self.self_attn = attention
        self.final_layer_norm = nn.LayerNorm(attention.embed_dim, eps=layer_norm_eps)
        self.ffn = ffn
        self.dropout = nn.Dropout(dropout_p)

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: DilatedKVCache | None = None,
        lengths: Tensor | None = None,
        shard_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """`(B, N, embed_dim)` to the same; the arguments are those of the attention."""
        h = self.self_attn_layer_norm(x)
        h, _ = self.self_attn(
            h,
            h,
            h,
            key_padding_mask,
            cu_seqlens=cu_seqlens,
            rotation=rotation,
            cache=cache,
            lengths=lengths,
            shard_lengths=shard_lengths,
        )
        x = x + self.dropout(h)
        return x + self.dropout(self.ffn(self.final_layer_norm(x)))


def _activation(x: Tensor) -> Tensor:
    """GELU. On a CPU inductor would fuse it into the LayerNorm that follows, and evaluate it once per pass over the row."""
    compiled = x.device.type == "cpu" and torch.compiler.is_compiling() and not writes_onnx()
    opaque = compiled and forward_ad._current_level < 0  # it has no tangent
    return _gelu(x) if opaque else F.gelu(x)


@torch.library.custom_op("flexdilated::gelu", mutates_args=())
def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


@_gelu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, *ctx.saved_tensors)


_gelu.register_autograd(_differentiate, setup_context=_save)
