"""Calls of one pattern timed in turns, so that all meet the same clock rates and the same other work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdilated.attention import dilated_attention
from flexdilated.core.pattern import DilatedPattern

NUM_HEADS, DENSE_ROWS = 12, 2048  # branches of LongNet have 2,048 to 2,731 rows
PATTERN = DilatedPattern.longnet()

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
TimedCall = Callable[[], tuple[Tensor, ...]]


def inputs(num_tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """q, k, v, dout of random numbers."""
    q, k, v, dout = (torch.randn(1, num_tokens, NUM_HEADS, head_dim, device=device).to(dtype) for _ in range(4))
    return q, k, v, dout


def attention_call(backend: str, x: Inputs, *, training: bool) -> TimedCall:
    """Causal attention by a backend: out, and in training dq, dk, dv."""
    return _call(lambda q, k, v: dilated_attention(q, k, v, PATTERN, is_causal=True, backend=backend), x, training=training)


def dense_call(x: Inputs, *, training: bool) -> TimedCall:
    """Causal dense attention over `DENSE_ROWS` tokens at a time, by the kernel that torch chooses."""

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = min(DENSE_ROWS, q.shape[1])
        q, k, v = (t[:, : t.shape[1] // rows * rows].unflatten(1, (-1, rows))[0].transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)[None]

    return _call(dense, x, training=training)


def _call(attend: Callable[[Tensor, Tensor, Tensor], Tensor], x: Inputs, *, training: bool) -> TimedCall:
    def call() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(training):
            leaves = [t.detach().requires_grad_(training) for t in x[:3]]
            out = attend(*leaves)
            return out.detach(), *(torch.autograd.grad(out, leaves, x[3][:, : out.shape[1]]) if training else ())

    return call


def in_turns(calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """The median time of each call in seconds, one call of each in every round."""
    times_of_calls: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times_of_calls[name].append(seconds(call, device))
    return {name: statistics.median(times) for name, times in times_of_calls.items()}


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of one call, the device's work included."""
    _synchronize(device)
    start = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
