"""Attention by plain tensor operations, some queries at a time: every device and dtype, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from flexdilated.backends.dropout import Dropout
from flexdilated.backends.kernel import Kernel, Options, disabled
from flexdilated.core.dispatch_key import DispatchKey
from flexdilated.core.functorch import may_draw
from flexdilated.core.lse import accumulated

SCORES = 1 << 24  # at once: 64 MiB in float32


def operations_why_not(request: DispatchKey) -> str | None:
    """Why torch's own operations cannot compute a request, or None."""
    return "MPS has no float64" if request.hardware.device_type == "mps" and request.dtype == torch.float64 else None


def _why_not(request: DispatchKey) -> str | None:
    return operations_why_not(request) or disabled("math_sdp_enabled")


def _rows(q: Tensor, k: Tensor) -> range:
    """Starts of the query chunks whose scores fit in `SCORES`."""
    step = max(1, SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return range(0, q.shape[2], step)


def _scores(q: Tensor, k: Tensor, start: int, options: Options) -> Tensor:
    """Masked scores of the queries `start...` against all keys."""
    scores = q @ k.transpose(-1, -2) * options.scale
    rows, keys = torch.arange(start, start + q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
    if options.is_causal:
        scores = scores.masked_fill(keys > rows[:, None], -math.inf)
    if options.band is not None:
        apart = keys - rows[:, None]
        scores = scores.masked_fill((apart < options.band[0]) | (apart > options.band[1]), -math.inf)
    if options.ignored is not None:
        scores = scores.masked_fill(options.ignored[:, None, None, :], -math.inf)
    return scores


def _dropouts(q: Tensor, k: Tensor, starts: range, dropout: Dropout | None) -> list[Callable[[Tensor], Tensor]]:
    """Per chunk, the function that applies attention dropout to its weights; the same for the same seed."""
    if dropout is None:
        return [torch.positive for _ in starts]  # the weights themselves

    def apply(weights: Tensor, seed: int) -> Tensor:
        generator = torch.Generator(device=q.device).manual_seed(seed)
        # In float32 whatever the default dtype: it may be another in the backward, and a coarse one drops too many.
        with may_draw():
            is_kept = torch.rand(weights.shape, generator=generator, device=q.device, dtype=torch.float32) >= dropout.p
        return weights * is_kept / (1.0 - dropout.p)

    return [partial(apply, seed=dropout.seed + start) for start in starts]


def _forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    q, k, v = (x.to(accumulated(dtype)) for x in (q, k, v))
    outs, lses = [], []
    starts = _rows(q, k)
    for start, drop in zip(starts, _dropouts(q, k, starts, options.dropout)):
        scores = _scores(q[:, :, start : start + starts.step], k, start, options)
        lse = torch.logsumexp(scores, dim=-1)
        outs.append(drop(torch.softmax(scores, dim=-1).masked_fill((lse == -math.inf)[..., None], 0.0)) @ v)
        lses.append(lse)
    return torch.cat(outs, dim=2).to(dtype), torch.cat(lses, dim=2)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = q.dtype
    dout, q, k, v, out = (x.to(accumulated(dtype)) for x in (dout, q, k, v, out))
    delta = (dout * out).sum(dim=-1, keepdim=True)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    starts = _rows(q, k)
    for start, drop in zip(starts, _dropouts(q, k, starts, options.dropout)):
        rows = slice(start, start + starts.step)
        q_i, dout_i = q[:, :, rows], dout[:, :, rows]
        weights = torch.exp(_scores(q_i, k, start, options) - lse[:, :, rows, None])
        dv += drop(weights).transpose(-1, -2) @ dout_i
        dscores = weights * (drop(dout_i @ v.transpose(-1, -2)) - delta[:, :, rows]) * options.scale
        dq[:, :, rows] = dscores @ k
        dk += dscores.transpose(-1, -2) @ q_i
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


MATH = Kernel("math", _why_not, _forward, _backward, shares_kv=False, windows="mask")
