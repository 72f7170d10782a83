"""The definition of dilated attention, slow and obvious: dense, O(N^2), float64. Every test compares with this."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from flexdilated.core.branch import Segments, Window
from flexdilated.core.call import MaskMod, ScoreMod
from flexdilated.core.pattern import DilatedPattern

__all__ = ["MaskMod", "ScoreMod", "dilated_attention"]


def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of dilated attention by the definition, differentiable by autograd.

    In branch `i`, query `p` sees key `p'` when `(p % w) % r == (p' % w) % r == offset`, `p // w == p' // w`, and, if causal,
    `p' <= p`. In a window of size w every head sees key `p'` when `|p - p'| < w`, and with g global tokens when `p' < g` or
    `p < g`, if causal only where `p' <= p`. A pair of the window or the global tokens belongs to no other branch. Then
    `lse = logsumexp_i lse_i` and `out = sum_i exp(lse_i - lse) out_i`. A row that no key reaches has `out = 0` and `lse = -inf`,
    with zero gradients. Source: LongNet, arXiv 2307.02486, equations 5-10.

    Args:
        q: Queries, `(B, N, H, D)`, any floating dtype; computed in float64.
        k: Keys, `(B, N, Hkv, D)`, `H % Hkv == 0`.
        v: Values, `(B, N, Hkv, D)`.
        pattern: Which positions attend to which.
        is_causal: Whether a query sees only keys at its own position and before.
        scale: Multiplies `q @ k^T`. Default: `D ** -0.5`.
        key_padding_mask: `(B, N)` bool, True where a key is ignored.
        cu_seqlens: `(num_documents + 1,)` integers, the borders of packed documents; each is computed as if alone.
        score_mod: `(score, b, h, q_idx, kv_idx)` to the score, in positions of the whole sequence; called with all pairs at once.
        mask_mod: `(b, h, q_idx, kv_idx)` to whether the query sees the key.
        sinks: `(H,)`, the score of one more key of value 0 for each head.

    Returns:
        `out` `(B, N, H, D)` and `lse` `(B, H, N)`, natural log, both float64.

    Raises:
        NotImplementedError: If zero keys take part under a score or mask function: they have no position.
    """
    num_tokens, head_dim = q.shape[1], q.shape[3]
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    ignored = torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device) if key_padding_mask is None else key_padding_mask
    k, v = (x.masked_fill(ignored[:, :, None, None], 0.0) for x in (k, v))  # 0 times NaN would be NaN
    scale = head_dim**-0.5 if scale is None else scale

    borders = [0, num_tokens] if cu_seqlens is None else cu_seqlens.tolist()
    outs, lses = [], []
    for a, b in pairwise(borders):
        if a == b:
            continue
        parts = [
            _branch(
                q[:, a:b],
                k[:, a:b],
                v[:, a:b],
                ignored=ignored[:, a:b],
                pattern=pattern,
                branch=i,
                group=group,
                is_causal=is_causal,
                scale=scale,
                start=a,
                score_mod=score_mod,
                mask_mod=mask_mod,
            )
            for i in range(len(pattern.branches))
        ]
        out, lse = _mix(parts, detach_weights=pattern.detach_weights)
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs, dim=1), torch.cat(lses, dim=2)
    if sinks is None:
        return out, lse
    return _mix([(out, lse), (torch.zeros_like(out), sinks.double()[:, None].expand_as(lse))], detach_weights=False)


def _branch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ignored: Tensor,
    pattern: DilatedPattern,
    branch: int,
    group: int,
    is_causal: bool,
    scale: float,
    start: int,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
) -> tuple[Tensor, Tensor]:
    """One branch over one document, which begins at token `start`: `out` `(B, N, H, D)`, `lse` `(B, H, N)`."""
    num_tokens, num_heads = q.shape[1], q.shape[2]
    source, joined = joined_rows(pattern, branch, num_tokens, num_heads // group, is_causal=is_causal)
    joined = joined.to(q.device).repeat_interleave(group, dim=0)
    rows = torch.tensor(source, device=q.device)
    real = rows >= 0
    q, k, v = (torch.where(real[:, None, None], x[:, rows.clamp(min=0)], 0.0) for x in (q, k, v))
    ignored = ignored[:, rows.clamp(min=0)] & real

    visible = joined[None] & ~ignored[:, None, None, :]  # (B, H, N, N)
    modified = score_mod is not None or mask_mod is not None
    if modified and source != list(range(num_tokens)) and not _holds_tokens_alone(source, joined, num_tokens):
        raise NotImplementedError("score_mod and mask_mod must come without zero keys, got zero_padding=True")

    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    b, h = torch.arange(q.shape[0], device=q.device)[:, None, None, None], torch.arange(num_heads, device=q.device)[:, None, None]
    position = start + torch.arange(len(source), device=q.device).clamp(max=num_tokens - 1)  # no function sees rows of zeros
    if score_mod is not None:
        scores = score_mod(scores, b, h, position[:, None], position).to(scores.dtype).expand_as(scores)
    if mask_mod is not None:
        is_seen = mask_mod(b, h, position[:, None], position)
        if is_seen.dtype != torch.bool:
            raise TypeError(f"mask_mod must return a bool, True where the query sees the key, got {is_seen.dtype}")
        visible = visible & is_seen
    visible = visible & (scores != -math.inf)
    reached = visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(~reached, 0.0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(~reached[..., 0], -math.inf)
    weights = torch.softmax(scores, dim=-1) * reached
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return out[:, :num_tokens], lse[:, :, :num_tokens]


def joined_rows(
    pattern: DilatedPattern, branch: int, num_tokens: int, num_kv_heads: int, *, is_causal: bool
) -> tuple[list[int], Tensor]:
    """The token at each row of a branch, -1 for a row of zeros, and which query rows see which key rows, `(Hkv, rows, rows)`."""
    segments, near = pattern.split("the definition")
    source, segment = _rows(pattern, segments[branch], num_tokens) if branch < len(segments) else (list(range(num_tokens)), 0)
    p = torch.arange(len(source), device="cpu")  # whatever the default device is
    query, key = p[:, None], p[None, :]
    is_global = (query < near.global_tokens) | (key < near.global_tokens)
    is_in_window = ((query - key).abs() < near.window) & ~is_global
    joined = torch.zeros(num_kv_heads, len(source), len(source), dtype=torch.bool, device="cpu")
    for head in pattern.head_range(branch, num_kv_heads):
        if branch >= len(segments):
            joined[head] = is_in_window if isinstance(pattern.branches[branch], Window) else is_global
            continue
        is_kept = (p % segment) % segments[branch].dilation_rate == pattern.offset(branch, head, num_kv_heads)
        same_segment = query // segment == key // segment
        joined[head] = is_kept[:, None] & is_kept[None, :] & same_segment & ~is_global & ~is_in_window
    return source, joined & (key <= query) if is_causal else joined


def _holds_tokens_alone(source: list[int], joined: Tensor, num_tokens: int) -> bool:
    """Whether every token is its own row, and sees no row of zeros."""
    return source[:num_tokens] == list(range(num_tokens)) and not bool(joined[:, :num_tokens, num_tokens:].any())


def _rows(pattern: DilatedPattern, branch: Segments, num_tokens: int) -> tuple[list[int], int]:
    """The token at each row of the branch's (possibly padded) sequence, -1 for a zero row, and the rows per segment.

    torchscale (`zero_padding`) pads the sequence to whole segments, then every segment to a multiple of the rate, and never takes
    the second padding out again: its rows are read back as positions, so the outputs shift where the rate does not divide.
    """
    length, rate = branch
    if not pattern.zero_padding:
        return list(range(num_tokens)), length
    length = min(length, num_tokens)
    source: list[int] = []
    for start in range(0, num_tokens, length):
        source += [p if p < num_tokens else -1 for p in range(start, start + length)]
        source += [-1] * (-length % rate)
    return source, length + -length % rate


def _mix(parts: list[tuple[Tensor, Tensor]], *, detach_weights: bool) -> tuple[Tensor, Tensor]:
    lses = torch.stack([lse for _, lse in parts])  # (K, B, H, N)
    reached = (lses != -math.inf).any(dim=0)
    # Rows without any key: give logsumexp something finite, so that its gradient there is 0 and not NaN.
    lses = lses.masked_fill(~reached, 0.0)
    total = torch.logsumexp(lses, dim=0)
    weights = torch.softmax(lses, dim=0) * reached  # not exp(lse_i - lse): a large lse has lost what two equal ones add up to
    if detach_weights:
        weights = weights.detach()
    out = torch.stack([w.transpose(1, 2)[..., None] * o for w, (o, _) in zip(weights, parts)]).sum(dim=0)
    return out, total.masked_fill(~reached, -math.inf)
