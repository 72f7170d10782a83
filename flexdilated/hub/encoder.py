"""LongNet as torchscale's encoder: its wiring and its parameter names, around this library's attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.core.pattern import DilatedPattern
from flexdilated.nn.attention import MultiheadDilatedAttention
from flexdilated.nn.initial_weights import reset_modules
from flexdilated.nn.transformer import Block, FeedForward

__all__ = ["BranchDropout", "LongNetEncoder"]


class BranchDropout(nn.Dropout):
    """In training, elements are dropped as by `nn.Dropout(p)`; then each sample `x[b]` is 0 with probability `path_p`, else divided
    by `1 - path_p`.

    Source: stochastic depth, arXiv 1603.09382, rescaled in training instead of evaluation.

    Args:
        p: Probability of dropping an element.
        path_p: Probability of dropping a sample, in [0, 1).
    """

    def __init__(self, p: float, path_p: float) -> None:
        super().__init__(p)
        self.path_p = path_p

    def forward(self, x: Tensor) -> Tensor:
        """`(B, ...)` to the same."""
        x = super().forward(x)
        if not self.training or self.path_p == 0.0:
            return x
        path_mask = x.new_empty(x.shape[0], *(1 for _ in x.shape[1:])).bernoulli_(1.0 - self.path_p)
        return x * (path_mask / (1.0 - self.path_p))

    def extra_repr(self) -> str:
        return f"p={self.p}, path_p={self.path_p}"


class LongNetEncoder(nn.Module):
    """`layer_norm(layers(dropout(x)))`: non-causal pre-norm blocks with sub-LayerNorm, over embedded tokens.

    Layer `i` of `L` adds `drop_path(dropout(attention(norm(x))))`, then `drop_path(dropout(ffn(norm(x))))`; the probability of
    dropping a path grows evenly from 0 in the first layer to `drop_path_rate` in the last. Parameters are named as in torchscale.
    Source: torchscale's `LongNetEncoder` as Prov-GigaPath configures it; initial gain `sqrt(log(2 L))`: MAGNETO, arXiv 2210.06423.

    Args:
        embed_dim: Elements of a token.
        num_layers: Blocks.
        num_heads: Must divide `embed_dim`.
        pattern: Which positions attend to which; torchscale's own rules are `DilatedPattern.torchscale`.
        ffn_dim: Elements inside the feed-forward networks. Default: `4 * embed_dim`.
        dropout_p: Probability, in training, of dropping an element of the input and of every branch.
        attention_dropout_p: Probability, in training, of dropping an attention weight.
        drop_path_rate: Probability, in training, that the last layer's branches are dropped for a whole sample.
        layer_norm_eps: Epsilon of the LayerNorms.
        backend: Backend of the attention: `"auto"` or a name.
        mesh: A 1-D `DeviceMesh` over which the sequence is sharded: calls take and give this rank's shard. Default: it is whole.

    Raises:
        ValueError: If a number is below 1 or does not divide, or a probability is outside [0, 1).
    """

    def __init__(
        self,
        embed_dim: int,
        num_layers: int,
        num_heads: int,
        pattern: DilatedPattern,
        *,
        ffn_dim: int | None = None,
        dropout_p: float = 0.0,
        attention_dropout_p: float = 0.0,
        drop_path_rate: float = 0.0,
        layer_norm_eps: float = 1e-5,
        backend: str = "auto",
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.pattern = pattern
        ffn_dim = 4 * embed_dim if ffn_dim is None else ffn_dim
        for name, value in (("num_layers", num_layers), ("ffn_dim", ffn_dim)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name, p in (("dropout_p", dropout_p), ("attention_dropout_p", attention_dropout_p), ("drop_path_rate", drop_path_rate)):
            if not 0.0 <= p < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {p}")
        gamma = math.sqrt(math.log(2 * num_layers))

        def block(index: int) -> Block:
            attention = MultiheadDilatedAttention(
                embed_dim,
                num_heads,
                pattern,
                dropout_p=attention_dropout_p,
                layer_norm_eps=layer_norm_eps,
                gamma_init=gamma,
                backend=backend,
                mesh=mesh,
            )
            ffn = FeedForward(embed_dim, ffn_dim, gamma_init=gamma, layer_norm_eps=layer_norm_eps)
            layer = Block(attention, ffn, dropout_p=dropout_p, layer_norm_eps=layer_norm_eps)
            # Where the block drops elements of a branch; it holds no parameter, so the names stay torchscale's.
            layer.dropout = BranchDropout(dropout_p, drop_path_rate * index / max(1, num_layers - 1))
            return layer

        self.dropout = nn.Dropout(dropout_p)
        self.layers = nn.ModuleList(block(i) for i in range(num_layers))
        self.layer_norm = nn.LayerNorm(embed_dim, eps=layer_norm_eps)

    init_weights = reset_modules

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        shard_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """`(B, N, embed_dim)` to the same.

        Args:
            x: Embedded tokens, their positions included.
            key_padding_mask: `(B, N)` bool, True where a token is ignored by the others. Under `zero_padding` the number of zero
                keys still follows N: for what each sequence gives alone, pack them and pass `cu_seqlens`.
            cu_seqlens: `(num_sequences + 1,)` borders of packed sequences, for B = 1. A dropped path is then dropped for all.
            shard_lengths: With a mesh: tokens of each rank, the same on every rank. Default: equally many.
        """
        states = self.hidden_states(x, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, shard_lengths=shard_lengths)
        for state in states:
            output = state
        return self.layer_norm(output)

    def hidden_states(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        shard_lengths: Sequence[int] | None = None,
    ) -> Iterator[Tensor]:
        """The input after dropout, then each layer's output, `num_layers + 1` tensors `(B, N, embed_dim)`.

        They are computed as they are asked for, so that who keeps none of them needs no memory for all. The last one is before
        `layer_norm`, as torchscale's `encoder_states`. The arguments are those of the call.
        """
        x = self.dropout(x)
        yield x
        for layer in self.layers:
            x = layer(x, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, rotation=None, shard_lengths=shard_lengths)
            yield x
