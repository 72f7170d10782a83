"""Attention of some queries over a cache, by the pattern's rule on positions."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

from flexdilated.core.pattern import DilatedPattern
from flexdilated.hub.transformers.heads import HeadShard
from flexdilated.masks import dilated_score_mod


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    shard: HeadShard | None,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    dropout_p: float,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention of some queries over all keys of a cache, `(B, queries, H, D)`, by the pattern's rule on their positions.

    One softmax over the union of the branches: the score plus the log of how many of them join the pair. `sinks` `(H,)` are the
    scores of one more key, of value 0.
    """
    if pattern.detach_weights and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        pattern = dataclasses.replace(pattern, detach_weights=False)  # the outputs are the same
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    first_head, total_kv_heads = (0, num_kv_heads) if shard is None else (shard.first_query, shard.total_key)
    group = num_heads // num_kv_heads if shard is None else shard.group
    count = dilated_score_mod(pattern, group * total_kv_heads, seq_len=k.shape[1], is_causal=True, num_kv_heads=total_kv_heads)
    ignored = key_positions < 0
    out_dtype, dtype = q.dtype, torch.promote_types(q.dtype, torch.float32)
    # Rows that were never written, or are padding, may hold anything.
    q, k, v = q.to(dtype), *(x.to(dtype).masked_fill(ignored[:, :, None, None], 0.0) for x in (k, v))
    grouped = rearrange(q, "b n (h g) d -> b n h g d", h=num_kv_heads)
    scores = rearrange(einsum(grouped, k, "b n h g d, b m h d -> b h g n m"), "b h g n m -> b (h g) n m") * scale
    batch = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1, 1)
    heads = torch.arange(first_head, first_head + num_heads, device=q.device).view(1, -1, 1, 1)
    # -1 lies in no segment of a real query, so ignored keys drop out here.
    scores = count(scores, batch, heads, query_positions[:, None, :, None], key_positions[:, None, None])
    empty = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    if sinks is not None:
        columns = sinks.to(dtype)[None, :, None, None].expand(q.shape[0], -1, q.shape[1], 1)
        scores = torch.cat([scores, columns], dim=-1)
    weights = torch.softmax(scores, -1)[..., : k.shape[1]].masked_fill(empty, 0.0)
    weights = F.dropout(weights, dropout_p, training=dropout_p > 0.0)
    weights = rearrange(weights, "b (h g) n m -> b h g n m", h=num_kv_heads)
    return rearrange(einsum(weights, v, "b h g n m, b m h d -> b n h g d"), "b n h g d -> b n (h g) d").to(out_dtype)
