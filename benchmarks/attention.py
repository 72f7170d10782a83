"""The attention that the benchmarks run, and the assertions that its results are right."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.core.call import ScoreMod
from flexdilated.core.hardware import detect

NUM_HEADS = 12
HEAD_DIM = 64

# Without instructions for bfloat16 the bare kernels, against which the library is measured, take many times as long as in float32.
DTYPES = (
    torch.float32,
    pytest.param(
        torch.bfloat16, marks=pytest.mark.skipif(not detect("cpu").has_fast_bfloat16, reason="this CPU multiplies no bfloat16")
    ),
)

# The shape of LongNet's pattern, small enough that the dense definition fits in memory.
SMALL_LONGNET = DilatedPattern((16, 32, 64, 128, 256), (1, 2, 4, 6, 12))
SMALL_TOKENS = 263

# Largest error of any element, in units of the standard deviation of the expected values.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.08, torch.float16: 0.01}


class Inputs(NamedTuple):
    """One call's tensors, `(1, N, H, D)`; a forward alone has no dout."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None


class Results(NamedTuple):
    """What a training step needs of attention, `(1, N, H, D)` each."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def random_inputs(num_tokens: int, dtype: torch.dtype, *, dout: bool = True) -> Inputs:
    """Normal numbers, drawn in `dtype` so that no wider copy is ever made."""
    q, k, v, *rest = (torch.randn(1, num_tokens, NUM_HEADS, HEAD_DIM, dtype=dtype) for _ in range(4 if dout else 3))
    return Inputs(q, k, v, rest[0] if dout else None)


def forward(x: Inputs, pattern: DilatedPattern, *, is_causal: bool = False, cu_seqlens: Tensor | None = None) -> Tensor:
    """The output alone."""
    return dilated_attention(x.q, x.k, x.v, pattern, is_causal=is_causal, cu_seqlens=cu_seqlens, backend="sdpa")


def forward_backward(
    x: Inputs,
    pattern: DilatedPattern,
    *,
    is_causal: bool = False,
    cu_seqlens: Tensor | None = None,
    score_mod: ScoreMod | None = None,
) -> Results:
    """The output and the three gradients."""
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    options: dict[str, Any] = {"is_causal": is_causal, "cu_seqlens": cu_seqlens, "score_mod": score_mod}
    out = dilated_attention(q, k, v, pattern, **options, backend="sdpa")
    return Results(out.detach(), *torch.autograd.grad(out, (q, k, v), x.dout))


def assert_matches_definition(
    pattern: DilatedPattern, dtype: torch.dtype, *, is_causal: bool = False, borders: Sequence[int] | None = None
) -> None:
    """Output and gradients over `SMALL_TOKENS` tokens equal those of the dense definition."""
    x = random_inputs(SMALL_TOKENS, dtype)
    cu_seqlens = None if borders is None else torch.tensor(borders)
    actual = forward_backward(x, pattern, is_causal=is_causal, cu_seqlens=cu_seqlens)
    q, k, v = (t.double().requires_grad_() for t in x[:3])
    out, _ = reference.dilated_attention(q, k, v, pattern, is_causal=is_causal, cu_seqlens=cu_seqlens)
    expected = Results(out.detach(), *torch.autograd.grad(out, (q, k, v), x.dout.double()))
    for name, a, b in zip(Results._fields, actual, expected):
        assert_near(a, b, dtype, name)


def assert_rows_match_definition(
    x: Inputs,
    pattern: DilatedPattern,
    out: Tensor,
    dq: Tensor | None = None,
    *,
    is_causal: bool = False,
    cu_seqlens: Tensor | None = None,
    count: int = 32,
) -> None:
    """Some rows of the first sequence of a result equal one softmax over the keys that the definition lists for them.

    Query heads may share key heads.
    """
    _, num_tokens, num_heads, head_dim = x.q.shape
    borders = [0, num_tokens] if cu_seqlens is None else cu_seqlens.tolist()
    chosen = random.Random(2307)
    actual, expected = [], []
    for _ in range(count):
        token, head = chosen.randrange(num_tokens), chosen.randrange(num_heads)
        kv_head, kv_heads = head * x.k.shape[2] // num_heads, x.k.shape[2]
        visible = visible_keys(pattern, borders, token, kv_head, is_causal, kv_heads)
        keys = torch.tensor(visible, dtype=torch.int64, device=x.q.device)
        q = x.q[0, token, head].double().requires_grad_(True)
        k, v = (t[0, keys, kv_head].double() for t in (x.k, x.v))
        row = torch.softmax(k @ q * head_dim**-0.5, dim=0) @ v
        actual.append(out[0, token, head])
        expected.append(row.detach())
        if dq is not None:
            actual.append(dq[0, token, head])
            expected.extend(torch.autograd.grad(row, q, x.dout[0, token, head].double()))
    step = 1 if dq is None else 2
    for name, start in (("out", 0), ("dq", 1))[:step]:
        assert_near(torch.stack(actual[start::step]), torch.stack(expected[start::step]), x.q.dtype, name)


def visible_keys(
    pattern: DilatedPattern, borders: Sequence[int], token: int, head: int, is_causal: bool, num_kv_heads: int
) -> list[int]:
    """The keys of one query, a key as often as its pair counts."""
    document = bisect_right(borders, token) - 1
    start, end = borders[document], borders[document + 1]
    position = token - start
    keys: list[int] = []
    segments, near = pattern.split("benchmarks")
    others = range(position + 1 if is_causal else end - start)
    keys += [start + p for p in others if near.joins(position, p)]
    for i, (length, rate) in enumerate(segments):
        offset = pattern.offset(i, head, num_kv_heads)
        if head not in pattern.head_range(i, num_kv_heads) or position % length % rate != offset:
            continue
        first = position // length * length
        last = position + 1 if is_causal else min(first + length, end - start)
        keys += [start + p for p in range(first + offset, last, rate) if not near.joins(position, p)]
    return keys


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, name: str) -> None:
    """No element is off by more than the tolerance of `dtype`, in units of the spread of the expected values."""
    unit = expected.std()
    torch.testing.assert_close(
        actual.double() / unit, expected / unit, atol=TOLERANCES[dtype], rtol=0.0, msg=lambda text: f"{name}: {text}"
    )
