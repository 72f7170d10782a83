"""LongNet as encoder and decoder, on embeddings.

Dilated self-attention in both, dilated or dense cross-attention in the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.attention import dilated_attention
from flexdilated.core.checks import check_exchange
from flexdilated.core.pattern import DilatedPattern
from flexdilated.distributed.mesh import canonical_mesh
from flexdilated.distributed.sharding import local_shard_lengths
from flexdilated.nn.attention import MultiheadDilatedAttention
from flexdilated.nn.initial_weights import reset_modules, set_initial_projections
from flexdilated.nn.padding import ignored_keys
from flexdilated.nn.transformer import Block, FeedForward

LONGNET = DilatedPattern.longnet()
EVERYTHING = DilatedPattern((1 << 40,), (1,))  # one segment, however long: a sum of lengths would be another graph each time


class CrossAttention(nn.Module):
    """`out_proj(attention(q_proj(x), k_proj(memory), v_proj(memory)))`: every query sees the whole memory, however long.

    >>> query, memory = torch.randn(2, 5, 32), torch.randn(2, 64, 32)
    >>> CrossAttention(32, 4)(query, memory, memory)[0].shape
    torch.Size([2, 5, 32])

    Arguments are those of `MultiheadDilatedAttention`; the ranks of `mesh` share the query and the memory.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout_p: float = 0.0,
        gamma_init: float = 1.0,
        mesh: DeviceMesh | None = None,
        exchange: str = "auto",
    ) -> None:
        super().__init__()
        check_exchange(exchange, mesh)
        self.num_heads, self.dropout_p, self.mesh, self.exchange = num_heads, dropout_p, canonical_mesh(mesh), exchange
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
        set_initial_projections(self, gamma_init)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        shard_lengths: Sequence[int] | None = None,
        key_shard_lengths: Sequence[int] | None = None,
    ) -> tuple[Tensor, None]:
        """`(B, N, embed_dim)` from query of that shape and key, value `(B, M, embed_dim)`; the mask is `(B, M)`, bool or float.

        With a mesh they are this rank's shards; `shard_lengths` are the queries of each rank, `key_shard_lengths` the keys, by
        default as many as here.
        """
        key_padding_mask = ignored_keys(key_padding_mask)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value)))
        if self.mesh is not None:
            out = self._attend_shards(q, k, v, key_padding_mask, shard_lengths, key_shard_lengths)
            return self.out_proj(out.flatten(2)), None
        for name, lengths in (("shard_lengths", shard_lengths), ("key_shard_lengths", key_shard_lengths)):
            if lengths is not None:
                raise ValueError(f"{name} must come with mesh, got {tuple(lengths)} and no mesh")
        dropout_p = self.dropout_p if self.training else 0.0
        visible = None
        if key_padding_mask is not None:  # what is ignored may be NaN, which no mask of scores takes out
            k, v = (x.masked_fill(key_padding_mask[:, :, None, None], 0.0) for x in (k, v))
            visible = ~key_padding_mask[:, None, None]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, N or M, D)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout_p)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None

    def _attend_shards(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        query_lengths: Sequence[int] | None,
        key_lengths: Sequence[int] | None,
    ) -> Tensor:
        """One branch that keeps everything. Its queries and keys have one length: the shorter are filled up, on each rank."""
        assert self.mesh is not None
        rank, queries = local_shard_lengths(self.mesh, q.shape[1], query_lengths)
        _, keys = local_shard_lengths(self.mesh, k.shape[1], key_lengths)
        lengths, num_queries = tuple(map(max, queries, keys)), q.shape[1]
        if lengths != keys:  # alike on all ranks
            key_padding_mask = (
                torch.zeros(k.shape[:2], dtype=torch.bool, device=k.device) if key_padding_mask is None else key_padding_mask
            )
            key_padding_mask = F.pad(key_padding_mask, (0, lengths[rank] - k.shape[1]), value=True)
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, lengths[rank] - x.shape[1])) for x in (q, k, v))
        out = dilated_attention(
            q,
            k,
            v,
            EVERYTHING,
            dropout_p=self.dropout_p if self.training else 0.0,
            key_padding_mask=key_padding_mask,
            mesh=self.mesh,
            exchange=self.exchange,
            shard_lengths=lengths,
        )
        return out[:, :num_queries]


class DecoderBlock(nn.Module):
    """`x + self_attn(norm(x))`, then `x + encoder_attn(norm(x), memory)`, then `x + ffn(norm(x))`.

    >>> attentions = MultiheadDilatedAttention(32, 4, DilatedPattern((64,), (1,))), CrossAttention(32, 4)
    >>> block = DecoderBlock(*attentions, FeedForward(32, 64))
    >>> block(torch.randn(2, 5, 32), torch.randn(2, 64, 32), key_padding_mask=None, memory_key_padding_mask=None).shape
    torch.Size([2, 5, 32])

    Args:
        self_attn: The self-attention.
        encoder_attn: The cross-attention: queries from the decoder, keys and values from the memory.
        ffn: The feed-forward network.
        dropout_p: Probability of dropping an element of a branch in training.
        layer_norm_eps: Epsilon of the LayerNorms.
    """

    def __init__(
        self,
        self_attn: MultiheadDilatedAttention,
        encoder_attn: MultiheadDilatedAttention | CrossAttention,
        ffn: FeedForward,
        *,
        dropout_p: float = 0.0,
        layer_norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(self_attn.embed_dim, eps=layer_norm_eps)
        self.self_attn = self_attn
        self.encoder_attn_layer_norm = nn.LayerNorm(self_attn.embed_dim, eps=layer_norm_eps)
        self.encoder_attn = encoder_attn
        self.final_layer_norm = nn.LayerNorm(self_attn.embed_dim, eps=layer_norm_eps)
        self.ffn = ffn
        self.dropout = nn.Dropout(dropout_p)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        key_padding_mask: Tensor | None,
        memory_key_padding_mask: Tensor | None,
        shard_lengths: Sequence[int] | None = None,
        memory_shard_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """`(B, N, embed_dim)` from x of that shape and memory, as long under dilated cross-attention; True ignores a key."""
        lengths = {"shard_lengths": shard_lengths}
        if isinstance(self.encoder_attn, CrossAttention):
            lengths["key_shard_lengths"] = memory_shard_lengths
        h = self.self_attn_layer_norm(x)
        x = x + self.dropout(self.self_attn(h, h, h, key_padding_mask, shard_lengths=shard_lengths)[0])
        h = self.encoder_attn_layer_norm(x)
        x = x + self.dropout(self.encoder_attn(h, memory, memory, memory_key_padding_mask, **lengths)[0])
        return x + self.dropout(self.ffn(self.final_layer_norm(x)))


class LongNet(nn.Module):
    """Encoder and decoder over dilated attention, on embeddings that already carry positions.

    >>> model = LongNet(32, 4, 1, 1, 64, DilatedPattern((8, 64), (1, 2)))
    >>> model(torch.randn(2, 64, 32), torch.randn(2, 64, 32)).shape  # source, target
    torch.Size([2, 64, 32])

    `memory = norm(encoder(src))`, `out = norm(decoder(tgt, memory))`, pre-norm layers with sub-LayerNorm. By default
    cross-attention is dilated: decoder token `p` sees the kept memory in the segment of `p`, so both sides must have one length.
    With `cross_attention="dense"`, as in torchscale, every decoder token sees the whole memory, of any length.
    Source: LongNet, arXiv 2307.02486; sub-LayerNorm (none in cross-attention) and initial gains for N encoder and M decoder layers,
    `sqrt(log(3 M) log(2 N) / 3)` and `sqrt(log(3 M))`: MAGNETO, arXiv 2210.06423, figure 2.

    Args:
        d_model: Elements of a token.
        nhead: Heads; must divide `d_model`.
        num_encoder_layers: Layers of the encoder, at least 1.
        num_decoder_layers: Layers of the decoder, at least 1.
        dim_feedforward: Elements inside the feed-forward networks.
        pattern: Which positions attend to which, in every attention but dense cross-attention. Default: `DilatedPattern.longnet()`.
        dropout: Probability of dropping an element of a residual branch in training.
        attention_dropout: Probability of dropping an attention weight in training.
        layer_norm_eps: Epsilon of all LayerNorms.
        encoder_is_causal: Whether a source token sees only those before it.
        decoder_is_causal: Whether a target token sees only those before it.
        cross_is_causal: Whether a target token sees only the memory up to its own position; only in dilated cross-attention.
        cross_attention: `"dilated"` or `"dense"`.
        backend: `"auto"` or the name of a backend, of all dilated attention; dense cross-attention is torch's own.
        mesh: A 1-D `DeviceMesh`, such as `mesh["cp"]`: `forward` takes and returns this rank's contiguous shards. Default: none.
        exchange: With `mesh`: how keys and values move, as in `flexdilated.dilated_attention`.
        device: Where the parameters live.
        dtype: Of the parameters.

    Raises:
        ValueError: If a number does not divide or is out of range, cross-attention is dense and causal, the mesh does not fit, or a
            name is unknown.
        TypeError: If the mesh is no `DeviceMesh`.
    """

    def __init__(
        self,
        d_model: int = 768,
        nhead: int = 12,
        num_encoder_layers: int = 12,
        num_decoder_layers: int = 12,
        dim_feedforward: int = 3072,
        pattern: DilatedPattern = LONGNET,
        dropout: float = 0.0,
        *,
        attention_dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        encoder_is_causal: bool = False,
        decoder_is_causal: bool = True,
        cross_is_causal: bool = False,
        cross_attention: Literal["dilated", "dense"] = "dilated",
        backend: str = "auto",
        mesh: DeviceMesh | None = None,
        exchange: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if cross_attention not in ("dilated", "dense"):
            raise ValueError(f"cross_attention must be 'dilated' or 'dense', got {cross_attention!r}")
        if cross_attention == "dense" and cross_is_causal:
            raise ValueError("cross_is_causal must be False with cross_attention='dense', which has no positions, got True")
        self.d_model, self.cross_attention, self.mesh = d_model, cross_attention, canonical_mesh(mesh)
        self.pattern = pattern
        decoder_gamma = math.sqrt(math.log(3 * num_decoder_layers))
        encoder_gamma = decoder_gamma * math.sqrt(math.log(2 * num_encoder_layers) / 3)

        def attention(gamma: float, is_causal: bool, layer_norm: bool = True) -> MultiheadDilatedAttention:
            return MultiheadDilatedAttention(
                d_model,
                nhead,
                self.pattern,
                dropout_p=attention_dropout,
                layer_norm=layer_norm,
                layer_norm_eps=layer_norm_eps,
                gamma_init=gamma,
                is_causal=is_causal,
                backend=backend,
                mesh=mesh,
                exchange=exchange,
            )

        def cross() -> MultiheadDilatedAttention | CrossAttention:
            if cross_attention == "dense":
                return CrossAttention(
                    d_model, nhead, dropout_p=attention_dropout, gamma_init=decoder_gamma, mesh=mesh, exchange=exchange
                )
            return attention(decoder_gamma, cross_is_causal, layer_norm=False)

        def ffn(gamma: float) -> FeedForward:
            return FeedForward(d_model, dim_feedforward, gamma_init=gamma, layer_norm_eps=layer_norm_eps)

        self.encoder = nn.ModuleList(
            Block(attention(encoder_gamma, encoder_is_causal), ffn(encoder_gamma), dropout_p=dropout, layer_norm_eps=layer_norm_eps)
            for _ in range(num_encoder_layers)
        )
        self.encoder_layer_norm = nn.LayerNorm(d_model, eps=layer_norm_eps)
        self.decoder = nn.ModuleList(
            DecoderBlock(
                attention(decoder_gamma, decoder_is_causal),
                cross(),
                ffn(decoder_gamma),
                dropout_p=dropout,
                layer_norm_eps=layer_norm_eps,
            )
            for _ in range(num_decoder_layers)
        )
        self.decoder_layer_norm = nn.LayerNorm(d_model, eps=layer_norm_eps)
        self.to(device=device, dtype=dtype)

    init_weights = reset_modules

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        *,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        shard_lengths: Sequence[int] | None = None,
        tgt_shard_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """`(B, N, d_model)` from source and target embeddings of that shape.

        Args:
            src: `(B, N, d_model)`.
            tgt: `(B, N, d_model)`; as long as src under dilated cross-attention.
            src_key_padding_mask: `(B, N)`: True where a source token is ignored everywhere; or a float mask of 0 and -inf.
            tgt_key_padding_mask: `(B, N)`, the same of target tokens.
            shard_lengths: With a mesh (inputs are shards): source tokens of each rank. Default: equally many.
            tgt_shard_lengths: With a mesh: target tokens of each rank. Default: `shard_lengths`, or equally many without it.

        Raises:
            ValueError: If a shape is wrong, the lengths differ under dilated cross-attention, or shard lengths come without a mesh.
        """
        for name, x in (("src", src), ("tgt", tgt)):
            if x.dim() != 3 or x.shape[2] != self.d_model:
                raise ValueError(f"{name} must have shape (B, N, {self.d_model}), got {tuple(x.shape)}")
        if src.shape[1] != tgt.shape[1] and self.cross_attention == "dilated":
            raise ValueError(
                f"tgt must be as long as src={src.shape[1]}, got {tgt.shape[1]}: a token sees the memory of its own segment, so "
                f"the segments of both sides must line up; pad the shorter side and give its key_padding_mask, or build it with "
                f"cross_attention='dense'"
            )
        if tgt_shard_lengths is None:
            tgt_shard_lengths = shard_lengths
        elif self.mesh is None:
            raise ValueError(f"tgt_shard_lengths must come with mesh, got {tuple(tgt_shard_lengths)} and no mesh")
        elif self.cross_attention == "dilated":
            lengths = (src.shape[1],) * self.mesh.size() if shard_lengths is None else tuple(shard_lengths)
            if tuple(tgt_shard_lengths) != lengths:
                raise ValueError(
                    f"tgt_shard_lengths must be those of src={lengths} under dilated cross-attention, got {tgt_shard_lengths}"
                )
        if src.shape[0] != tgt.shape[0]:
            raise ValueError(f"tgt must have the batch size of src={src.shape[0]}, got {tgt.shape[0]}")
        memory = src
        for layer in self.encoder:
            memory = layer(memory, key_padding_mask=src_key_padding_mask, shard_lengths=shard_lengths)
        memory = self.encoder_layer_norm(memory)
        for layer in self.decoder:
            tgt = layer(
                tgt,
                memory,
                key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=src_key_padding_mask,
                shard_lengths=tgt_shard_lengths,
                memory_shard_lengths=shard_lengths,
            )
        return self.decoder_layer_norm(tgt)
