"""Transformer layers and `LongNet` of the popular port, as its version 0.2.0 wires and names them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdilated.compat.multihead import MultiheadDilatedAttention
from flexdilated.core.pattern import DilatedPattern
from flexdilated.nn.initial_weights import set_initial_weights

Activation = str | Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}
LONGNET = DilatedPattern.longnet()


class DilatedTransformerEncoderLayer(nn.Module):
    """`x + attention(norm1(x))`, then `x + linear2(norm3(activation(linear1(norm2(x)))))`.

    Arguments are explained in `ARGUMENTS`; weights of the port's layer load as they are.

    Raises:
        ValueError: If a number is out of range or the activation has an unknown name.
        TypeError: If the activation is neither a name nor a function.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        segment_lengths: Sequence[int],
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
        self.activation, self.dropout = _function(activation), nn.Dropout(dropout)
        self.self_attn = MultiheadDilatedAttention(
            d_model,
            nhead,
            dilation_rates,
            segment_lengths,
            dropout,
            layer_norm_eps=layer_norm_eps,
            gamma_init=gamma_init,
            device=device,
            dtype=dtype,
        )
        self.norm1, self.norm2 = (nn.LayerNorm(d_model, eps=layer_norm_eps, device=device, dtype=dtype) for _ in range(2))
        self.norm3 = nn.LayerNorm(dim_feedforward, eps=layer_norm_eps, device=device, dtype=dtype)
        self.linear1, self.linear2 = _feed_forward(d_model, dim_feedforward, gamma_init, device, dtype)

    def forward(self, src: Tensor, is_causal: bool = False) -> Tensor:
        """`(b, n, d_model)` from src of that shape."""
        h = self.norm1(src)
        x = src + self.dropout(self.self_attn(h, h, h, is_causal=is_causal)[0])
        h = self.norm3(self.dropout(self.activation(self.linear1(self.norm2(x)))))
        return x + self.dropout(self.linear2(h))


class DilatedTransformerDecoderLayer(nn.Module):
    """`x + self_attn(norm1(x))`, `x + multihead_attn(norm2(x), memory)`, `x + linear2(norm4(activation(linear1(norm3(x)))))`.

    Here, as in the port, the cross-attention has a LayerNorm before its output projection and the self-attention has none.
    Arguments are explained in `ARGUMENTS`; weights of the port's layer load as they are.

    Raises:
        ValueError: If a number is out of range or the activation has an unknown name.
        TypeError: If the activation is neither a name nor a function.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        segment_lengths: Sequence[int],
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
        self.activation, self.dropout = _function(activation), nn.Dropout(dropout)
        self.self_attn, self.multihead_attn = (
            MultiheadDilatedAttention(
                d_model,
                nhead,
                dilation_rates,
                segment_lengths,
                dropout,
                layer_norm=layer_norm,
                layer_norm_eps=layer_norm_eps,
                gamma_init=gamma_init,
                device=device,
                dtype=dtype,
            )
            for layer_norm in (False, True)
        )
        self.norm1, self.norm2, self.norm3 = (
            nn.LayerNorm(d_model, eps=layer_norm_eps, device=device, dtype=dtype) for _ in range(3)
        )
        self.norm4 = nn.LayerNorm(dim_feedforward, eps=layer_norm_eps, device=device, dtype=dtype)
        self.linear1, self.linear2 = _feed_forward(d_model, dim_feedforward, gamma_init, device, dtype)

    def forward(self, tgt: Tensor, memory: Tensor, tgt_is_causal: bool = False, memory_is_causal: bool = False) -> Tensor:
        """`(b, n, d_model)` from tgt and memory of that shape: their segments must line up."""
        h = self.norm1(tgt)
        x = tgt + self.dropout(self.self_attn(h, h, h, is_causal=tgt_is_causal)[0])
        x = x + self.dropout(self.multihead_attn(self.norm2(x), memory, memory, is_causal=memory_is_causal)[0])
        h = self.norm4(self.dropout(self.activation(self.linear1(self.norm3(x)))))
        return x + self.dropout(self.linear2(h))


class LongNet(nn.Module):
    """The port's encoder and decoder, both of which read the same embeddings; `flexdilated.LongNet` takes two sides.

    Initial gains for N encoder and M decoder layers: `sqrt(log(3 M) log(2 N) / 3)` and `sqrt(log(3 M))`.
    Arguments are explained in `ARGUMENTS`; weights of the port's model load as they are.

    Raises:
        ValueError: If a number is out of range or the activation has an unknown name.
        TypeError: If the activation is neither a name nor a function.
    """

    def __init__(
        self,
        d_model: int = 768,
        nhead: int = 12,
        num_encoder_layers: int = 12,
        num_decoder_layers: int = 12,
        dim_feedforward: int = 3072,
        segment_lengths: Sequence[int] = LONGNET.segment_lengths,
        dilation_rates: Sequence[int] = LONGNET.dilation_rates,
        dropout: float = 0.0,
        activation: Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, count in (("num_encoder_layers", num_encoder_layers), ("num_decoder_layers", num_decoder_layers)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        decoder_gamma = math.sqrt(math.log(3 * num_decoder_layers))
        encoder_gamma = decoder_gamma * math.sqrt(math.log(2 * num_encoder_layers) / 3)

        layer = (d_model, nhead, segment_lengths, dilation_rates, dim_feedforward, dropout, activation, layer_norm_eps)
        self.encoder = _Stack(
            DilatedTransformerEncoderLayer(*layer, encoder_gamma, device, dtype) for _ in range(num_encoder_layers)
        )
        self.decoder = _Stack(
            DilatedTransformerDecoderLayer(*layer, decoder_gamma, device, dtype) for _ in range(num_decoder_layers)
        )

    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:
        """`(b, n, d_model)` from embeddings of that shape, causal in all attentions or in none."""
        tgt = memory = x
        for layer in self.encoder.layers:
            memory = layer(memory, is_causal=is_causal)
        for layer in self.decoder.layers:
            tgt = layer(tgt, memory, memory_is_causal=is_causal, tgt_is_causal=is_causal)
        return tgt


class _Stack(nn.Module):
    """Layers under the name that the port's weights have."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def _function(activation: Activation) -> Callable[[Tensor], Tensor]:
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {tuple(ACTIVATIONS)} or a function, got {activation!r}")
        return ACTIVATIONS[activation]
    if not callable(activation):
        raise TypeError(f"activation must be one of {tuple(ACTIVATIONS)} or a function, got {activation!r}")
    return activation


def _feed_forward(
    d_model: int, dim_feedforward: int, gamma: float, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[nn.Linear, nn.Linear]:
    """The two projections, with MAGNETO's initial gain."""
    if dim_feedforward < 1:
        raise ValueError(f"dim_feedforward must be at least 1, got {dim_feedforward}")
    projections = (
        nn.Linear(d_model, dim_feedforward, device=device, dtype=dtype),
        nn.Linear(dim_feedforward, d_model, device=device, dtype=dtype),
    )
    for projection in projections:
        set_initial_weights(projection, "xavier_normal_", gain=gamma)
    return projections
