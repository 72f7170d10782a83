"""Attention maps: which keys chosen queries attend to, all branches mixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import SupportsIndex

import torch
from torch import Tensor

from flexdilated.backends.hardware import without_autocast
from flexdilated.backends.merge import accumulated
from flexdilated.backends.transforms import is_transformed
from flexdilated.call import Call, check_dtypes, check_tensors
from flexdilated.pattern import DilatedPattern, as_integer, num_kept


@torch.no_grad()
def attention_map(
    q: Tensor,
    k: Tensor,
    pattern: DilatedPattern,
    *,
    queries: SupportsIndex | Sequence[SupportsIndex] | Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """The exact weights with which chosen queries of `dilated_attention` read every key, all branches mixed.

    `weights[b, h, i, p]` is the factor of `v[b, p]` in `out[b, queries[i], h]`: `exp(score - lse)`, added up over the branches that
    join the pair, so `weights @ v == out`. A row sums to 1, less what zero keys take (`DilatedPattern.zero_padding`); the row of a
    query that no key reaches is 0. Memory and time grow with N times the number of queries, never with N squared. No gradient.
    Source: LongNet, arXiv 2307.02486, equations 9-10.

    Args:
        q: Queries of the whole sequence, `(B, N, H, D)`, float64, float32, bfloat16 or float16, as given to `dilated_attention`.
        k: Keys, `(B, N, Hkv, D)`, `H % Hkv == 0`.
        pattern: Which positions attend to which.
        queries: Positions in `[0, N)`: an integer (0 for a leading CLS token), a sequence, or a 1-D integer tensor; any order.
        is_causal: Whether a query sees only keys at its own position and before.
        scale: Multiplies `q @ k^T`. Default: `D ** -0.5`.
        key_padding_mask: `(B, N)` bool, True where a key is ignored.

    Returns:
        `(B, H, Q, N)`, Q positions in the order of `queries` (1 for an integer), float32, or float64 for float64 inputs.

    Raises:
        ValueError: If a shape is wrong, a position is outside the sequence, or k has fewer heads than the pattern groups.
        TypeError: If an argument has the wrong type or dtype.
        NotImplementedError: If it is called under torch.func or forward-mode differentiation.
    """
    if is_transformed(q, k):
        raise NotImplementedError(
            "attention_map must be called outside torch.func and forward-mode differentiation, got a call under one: its weights "
            "have no derivative"
        )
    check_tensors(q, k, k, Call(pattern, is_causal, scale, key_padding_mask=key_padding_mask))
    check_dtypes(q, k, k)
    pattern.check_heads(k.shape[2])
    num_tokens, kv_heads = q.shape[1], k.shape[2]
    positions = _positions(queries, num_tokens)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    dtype = accumulated(q.dtype)
    q = q.unflatten(2, (kv_heads, -1))  # (B, N, Hkv, group, D)

    mixed = torch.full((*q.shape[:1], *q.shape[2:4], len(positions), num_tokens), -math.inf, dtype=dtype, device=q.device)
    zero_keys = torch.zeros(kv_heads, len(positions), dtype=dtype, device="cpu")
    # Autocast would compute the scores in half precision.
    with without_autocast(q.device):
        for branch, (length, rate) in enumerate(pattern.branches):
            length = min(length, num_tokens)
            # Where the rate does not divide the segment, torchscale pads each one and reads its rows back as positions.
            padded = length + -length % rate if pattern.zero_padding else length
            for offset, start, step, count in pattern.head_runs(branch, kv_heads):
                heads = slice(start, start + step * (count - 1) + 1, step)
                for i, position in enumerate(positions):
                    segment, row = divmod(position, padded)
                    if row % rate != offset:
                        continue
                    first = segment * length
                    size = min(length, num_tokens - first)
                    # A row behind the segment's tokens is a query of zeros.
                    query = q[:, first + row, heads].to(dtype) * scale if row < size else q.new_zeros((), dtype=dtype)
                    seen = min(size, row + 1) if is_causal else size
                    keys = slice(first + offset, first + seen, rate)
                    query = query.expand(q.shape[0], count, *q.shape[3:])
                    scores = torch.einsum("bhgd,bnhd->bhgn", query, k[:, keys, heads].to(dtype))
                    if key_padding_mask is not None:
                        scores = scores.masked_fill(key_padding_mask[:, None, None, keys], -math.inf)
                    pairs = mixed[:, heads, :, i, keys]
                    pairs.copy_(torch.logaddexp(pairs, scores))
                    if pattern.zero_padding:
                        reach = row + 1 if is_causal else padded
                        zero_keys[heads, i] += num_kept(reach, rate, offset) - num_kept(seen, rate, offset)

    lse = torch.logaddexp(torch.logsumexp(mixed, dim=-1), zero_keys.to(q.device).log()[None, :, None])  # (B, Hkv, group, Q)
    # Rows without any key have scores and lse of -inf: their difference would be NaN.
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    return mixed.sub_(lse[..., None]).exp_().flatten(1, 2)


def _positions(queries: SupportsIndex | Sequence[SupportsIndex] | Tensor, num_tokens: int) -> list[int]:
    if isinstance(queries, Tensor):
        if queries.dtype == torch.bool or queries.is_floating_point() or queries.is_complex():
            raise TypeError(f"queries must hold integers, got {queries.dtype}")
        if queries.dim() > 1:
            raise ValueError(f"queries must be one position or a 1-D tensor of them, got shape {tuple(queries.shape)}")
        positions = queries.reshape(-1).tolist()
    else:
        single = hasattr(queries, "__index__")
        if not single and (isinstance(queries, (str, bytes)) or not isinstance(queries, Sequence)):
            raise TypeError(f"queries must be an integer, a sequence or a tensor of integers, got {queries!r}")
        values: Sequence[SupportsIndex] = [queries] if single else queries  # type: ignore[assignment, list-item]
        positions = [as_integer("queries" if single else f"queries[{i}]", value) for i, value in enumerate(values)]
    if not positions:
        raise ValueError("queries must hold at least one position, got none")
    for i, position in enumerate(positions):
        if not 0 <= position < num_tokens:
            raise ValueError(f"queries[{i}] must be in [0, N={num_tokens}), got {position}")
    return positions
