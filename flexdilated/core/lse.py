"""Log-sum-exp arithmetic: partial attentions over disjoint keys become one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of sums for inputs of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_attentions(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial attentions of the same queries over different keys into one attention.

    >>> q, k, v = torch.randn(3, 1, 64, 4, 8)
    >>> pattern = DilatedPattern((64,), (1,))
    >>> first = (torch.arange(64) < 24)[None]
    >>> parts = [dilated_attention(q, k, v, pattern, key_padding_mask=mask, return_lse=True) for mask in (first, ~first)]
    >>> out, lse = merge_attentions(*zip(*parts))
    >>> torch.allclose(out, dilated_attention(q, k, v, pattern), atol=1e-5)
    True

    `lse = logsumexp_i lse_i`, `out = sum_i exp(lse_i - lse) out_i`. A query without keys in all parts has `out = 0` and
    `lse = -inf`. A key in several parts counts once per part. Differentiable. NATTEN's function of this name has lse `(B, N, H)`.
    Source: blockwise softmax as in ring attention (arXiv 2310.01889).

    Args:
        outs: Outputs, `(B, N, H, D)` each; a stacked tensor has the parts in dim 0.
        lses: Their natural log-sum-exps, `(B, H, N)` each, as `dilated_attention(..., return_lse=True)` returns them.

    Returns:
        `out` in the dtype of the first output, and `lse` in that of the first lse.

    Raises:
        ValueError: If there is no part, the numbers of outputs and lses differ, or shapes differ.
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"outs must be as many as lses and at least one, got {len(outs)} and {len(lses)}")
    if outs[0].ndim != 4:
        raise ValueError(f"outs must hold tensors of shape (B, N, H, D), got {tuple(outs[0].shape)}")
    batch, tokens, heads, _ = outs[0].shape
    for i, (out, lse) in enumerate(zip(outs, lses)):
        if out.shape != outs[0].shape or lse.shape != (batch, heads, tokens):
            raise ValueError(
                f"outs[{i}] and lses[{i}] must have shapes (B, N, H, D)={tuple(outs[0].shape)} and (B, H, N)="
                f"{(batch, heads, tokens)}, got {tuple(out.shape)} and {tuple(lse.shape)}"
            )
    parts = [(out.to(lse.dtype), lse.transpose(1, 2)) for out, lse in zip(outs, lses)]
    return mix_branches(parts, outs[0].dtype, detach_weights=False)


def merge_(out: Tensor, lse: Tensor, out_i: Tensor, lse_i: Tensor) -> None:
    """Merge the partial attention `(out_i, lse_i)` into the running `(out, lse)`, in place.

    `lse' = logaddexp(lse, lse_i)`, `out' = out + sigmoid(lse_i - lse) (out_i - out)`. A row that neither side reaches stays
    `out = 0`, `lse = -inf`; merging into such a row copies the other side. The result does not depend on the order of merges.
    Outputs `(..., D)` have any floating dtype; they are merged in the dtype of lse `(...)`, float32 or float64, and rounded once.
    """
    # -inf - -inf would be NaN where neither side reaches the row: `out_i`, which is 0 there, is copied instead.
    weight = lse_i.clamp(min=torch.finfo(lse_i.dtype).min).sub_(lse).sigmoid_().unsqueeze_(-1)
    if out.dtype == out_i.dtype == lse.dtype:
        out.lerp_(out_i, weight)
    else:
        out.copy_(out.to(lse.dtype).lerp_(out_i.to(lse.dtype), weight))
    torch.logaddexp(lse, lse_i, out=lse)


def add_zero_keys_(out: Tensor, lse: Tensor, count: int) -> None:
    """Let `count` keys of logit 0 and value 0 take part in a softmax that is already computed, in place.

    `lse' = logaddexp(lse, log count)`, `out' = out exp(lse - lse')`.
    """
    total = torch.logaddexp(lse, torch.full_like(lse, math.log(count)))
    out.mul_(torch.exp(lse - total).unsqueeze(-1))
    lse.copy_(total)


def with_zero_keys(out: Tensor, lse: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`add_zero_keys_` out of place, differentiable; out and lse unchanged if `count` is 0."""
    if not count:
        return out, lse
    shares, total = normalised(torch.stack([lse, torch.full_like(lse, math.log(count))]), dim=0)
    return out * shares[0, ..., None].to(out.dtype), total[0]


def normalised(scores: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """`softmax(scores)` and `logsumexp(scores)` along a dim, which is kept: 0 and -inf where all are -inf, also their gradients.

    Not `exp(scores - lse)`: a large lse, of scores that a function has moved by -1e9, has lost what many equal ones add up to.
    """
    reached = (scores != -math.inf).any(dim=dim, keepdim=True)
    scores = scores.masked_fill(~reached, 0.0)
    largest = scores.amax(dim=dim, keepdim=True).detach()  # what is taken off and put on again has no gradient
    weights = torch.exp(scores - largest)
    total = weights.sum(dim=dim, keepdim=True)
    return weights / total * reached, (largest + torch.log(total)).masked_fill(~reached, -math.inf)


def mix_branches(branches: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, *, detach_weights: bool) -> tuple[Tensor, Tensor]:
    """`out` `(B, N, H, D)` and `lse` `(B, H, N)` of the mixture; each branch is `(out, lse)`, `(B, N, H, D)` and `(B, N, H)`.

    `lse = logsumexp_i lse_i`, `out = sum_i exp(lse_i - lse) out_i`.
    """
    weights, lse = normalised(torch.stack([lse for _, lse in branches]), dim=0)  # (branches, B, N, H), (1, B, N, H)
    mixed = torch.zeros_like(branches[0][0])
    for (out, _), weight in zip(branches, weights.detach() if detach_weights else weights):
        mixed = mixed + out * weight[..., None]
    return mixed.to(dtype), lse[0].transpose(1, 2)


def sink_scale(sinks: Tensor, lse: Tensor) -> Tensor:
    """The factor by which one more key of value 0 and logit `sinks` scales a softmax: `exp(lse - logaddexp(lse, sinks))`.

    0 in a row without keys, whatever the sink.
    """
    return torch.sigmoid((lse - sinks).masked_fill(lse == -math.inf, -math.inf))  # -inf - -inf is NaN


def for_backward(lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`lse` and `dlse` for a backward kernel: in a row without keys, `lse` is `+inf` instead of `-inf`, and `dlse` is 0.

    `exp(score - lse)` is then 0, not NaN, whatever the derivative of what was made of -inf is.
    """
    if dlse is not None:
        dlse = dlse.masked_fill(lse == -math.inf, 0.0)
    return lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=math.inf), dlse
