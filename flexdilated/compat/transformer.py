"""Transformer layers and `LongNet` of the popular port, version 0.2.0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdilated.compat.arguments import Lengths
from flexdilated.compat.multihead import MultiheadDilatedAttention
from flexdilated.core.pattern import DilatedPattern
from flexdilated.nn.initial_weights import set_initial_weights

Activation = str | Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}
LONGNET = DilatedPattern.longnet()


class _Layer(nn.Module):
    """Attentions, each after a LayerNorm, then a feed-forward network between two LayerNorms; weights of the port's layer load.

    Raises:
        ValueError: If the activation is neither a known name nor a function.
    """

    # Attribute of each attention, and whether a LayerNorm is before its output projection.
    attentions: ClassVar[dict[str, bool]]
    self_attn: MultiheadDilatedAttention
    norm1: nn.LayerNorm
    norm2: nn.LayerNorm
    norm3: nn.LayerNorm

    def __init__(
        self,
        d_model: int,
        nhead: int,
        segment_lengths: Lengths,
        dilation_rates: Sequence[int],
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not callable(activation) and activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {tuple(ACTIVATIONS)} or a function, got {activation!r}")
        self.activation = activation if callable(activation) else ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)
        sizes = (d_model, nhead, dilation_rates, segment_lengths)
        for name, has_norm in self.attentions.items():
            layer = MultiheadDilatedAttention(
                *sizes, dropout, True, has_norm, layer_norm_eps, gamma_init, device=device, dtype=dtype
            )
            self.add_module(name, layer)
        widths = [d_model] * (len(self.attentions) + 1) + [dim_feedforward]
        for i, width in enumerate(widths, start=1):
            self.add_module(f"norm{i}", nn.LayerNorm(width, eps=layer_norm_eps, device=device, dtype=dtype))
        self.linear1 = nn.Linear(d_model, dim_feedforward, device=device, dtype=dtype)
        self.linear2 = nn.Linear(dim_feedforward, d_model, device=device, dtype=dtype)
        for projection in (self.linear1, self.linear2):
            set_initial_weights(projection, "xavier_normal_", gain=gamma_init)

    def _feed_forward(self, x: Tensor, first_norm: nn.Module, inner_norm: nn.Module) -> Tensor:
        """`x + linear2(inner_norm(activation(linear1(first_norm(x)))))`, with dropout."""
        h = inner_norm(self.dropout(self.activation(self.linear1(first_norm(x)))))
        return x + self.dropout(self.linear2(h))


class DilatedTransformerEncoderLayer(_Layer):
    """`x + self_attn(norm1(x))`, then `x + linear2(norm3(activation(linear1(norm2(x)))))`.

    >>> DilatedTransformerEncoderLayer(32, 4, [16, 64], [1, 2])(torch.randn(2, 64, 32)).shape
    torch.Size([2, 64, 32])
    """

    attentions: ClassVar[dict[str, bool]] = {"self_attn": True}

    def forward(self, src: Tensor, is_causal: bool = False) -> Tensor:
        """`(b, n, d_model)` from src of that shape."""
        h = self.norm1(src)
        x = src + self.dropout(self.self_attn(h, h, h, is_causal=is_causal)[0])
        return self._feed_forward(x, self.norm2, self.norm3)


class DilatedTransformerDecoderLayer(_Layer):
    """`x + self_attn(norm1(x))`, `x + multihead_attn(norm2(x), memory)`, `x + linear2(norm4(activation(linear1(norm3(x)))))`.

    >>> x = torch.randn(2, 64, 32)
    >>> DilatedTransformerDecoderLayer(32, 4, [16, 64], [1, 2])(x, memory=x).shape
    torch.Size([2, 64, 32])

    As in the port, the cross-attention has a LayerNorm before its output projection and the self-attention has none.
    """

    attentions: ClassVar[dict[str, bool]] = {"self_attn": False, "multihead_attn": True}
    multihead_attn: MultiheadDilatedAttention
    norm4: nn.LayerNorm

    def forward(self, tgt: Tensor, memory: Tensor, tgt_is_causal: bool = False, memory_is_causal: bool = False) -> Tensor:
        """`(b, n, d_model)` from tgt and memory of that shape."""
        h = self.norm1(tgt)
        x = tgt + self.dropout(self.self_attn(h, h, h, is_causal=tgt_is_causal)[0])
        x = x + self.dropout(self.multihead_attn(self.norm2(x), memory, memory, is_causal=memory_is_causal)[0])
        return self._feed_forward(x, self.norm3, self.norm4)


class LongNet(nn.Module):
    """The port's encoder and decoder, which read the same embeddings; `flexdilated.LongNet` takes a source and a target.

    >>> model = LongNet(32, 4, 1, 1, 64, segment_lengths=(16, 64), dilation_rates=(1, 2))
    >>> model(torch.randn(2, 64, 32)).shape
    torch.Size([2, 64, 32])

    Weights of the port's model load. Initial gains are those of `flexdilated.LongNet`.
    """

    def __init__(
        self,
        d_model: int = 768,
        nhead: int = 12,
        num_encoder_layers: int = 12,
        num_decoder_layers: int = 12,
        dim_feedforward: int = 3072,
        segment_lengths: Lengths = LONGNET.segment_lengths,
        dilation_rates: Sequence[int] = LONGNET.dilation_rates,
        dropout: float = 0.0,
        activation: Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        decoder_gamma = math.sqrt(math.log(3 * num_decoder_layers))
        encoder_gamma = decoder_gamma * math.sqrt(math.log(2 * num_encoder_layers) / 3)

        layer = (d_model, nhead, segment_lengths, dilation_rates, dim_feedforward, dropout, activation, layer_norm_eps)
        encoder, decoder = (*layer, encoder_gamma, device, dtype), (*layer, decoder_gamma, device, dtype)
        encoders = nn.ModuleList(DilatedTransformerEncoderLayer(*encoder) for _ in range(num_encoder_layers))
        decoders = nn.ModuleList(DilatedTransformerDecoderLayer(*decoder) for _ in range(num_decoder_layers))
        # `layers` is what the port's weights are called.
        self.encoder, self.decoder = nn.ModuleDict({"layers": encoders}), nn.ModuleDict({"layers": decoders})

    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:
        """`(b, n, d_model)` from embeddings of that shape, causal in all attentions or in none."""
        tgt = memory = x
        for layer in self.encoder["layers"].children():
            memory = layer(memory, is_causal=is_causal)
        for layer in self.decoder["layers"].children():
            tgt = layer(tgt, memory, memory_is_causal=is_causal, tgt_is_causal=is_causal)
        return tgt
