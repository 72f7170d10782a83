"""What the library adds to the kernels: against the bare calls on tensors that are already packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention import (
    DTYPES,
    HEAD_DIM,
    NUM_HEADS,
    SMALL_LONGNET,
    Inputs,
    Results,
    assert_matches_definition,
    assert_near,
    assert_rows_match_definition,
    forward,
    forward_backward,
    random_inputs,
)
from benchmarks.conftest import Sizes
from benchmarks.timing import Ratio, processor_ratio, processor_seconds, side_by_side
from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.backends.dense import piece_loop, sdpa
from flexdilated.backends.kernel import Options
from flexdilated.core import pieces
from flexdilated.decode import DilatedKVCache

PATTERN = DilatedPattern.longnet()
FEW_TOKENS, FEW_HEADS, SMALL_HEAD_DIM = 64, 4, 16  # of a call that is all overhead
FEW_TOKENS_PATTERN = DilatedPattern((16, 32, 64), (1, 2, 4))

bare_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
bare_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_branches(num_tokens: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """q, k, v, dout `(N/w, H, w/r, D)` of each branch, contiguous: the pattern's work, with nothing left to gather."""
    shapes = [(num_tokens // w, NUM_HEADS, w // r, HEAD_DIM) for w, r in ((min(w, num_tokens), r) for w, r in PATTERN.branches)]
    pairs = sum(segments * heads * rows * rows for segments, heads, rows, _ in shapes)
    # Offsets below w % r keep one row more than w // r.
    assert pairs == pytest.approx(PATTERN.count_pairs(num_tokens, NUM_HEADS), rel=2e-3)
    return [tuple(torch.randn(shape, dtype=dtype) for _ in range(4)) for shape in shapes]


def assert_same_softmax(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The bare call computes attention too: its first segment and head against float64."""
    out, _ = bare_forward(q[:1, :1], k[:1, :1], v[:1, :1], 0.0, False)
    q, k, v = (x[0, 0].double() for x in (q, k, v))
    expected = torch.softmax(q[:8] @ k.T * HEAD_DIM**-0.5, dim=-1) @ v
    torch.testing.assert_close(out[0, 0, :8].double(), expected, atol=1e-2 * expected.std().item(), rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_overhead(benchmark: Any, sizes: Sizes, record: Callable[..., None], dtype: torch.dtype) -> None:
    x = random_inputs(sizes.overhead, dtype)
    packed = packed_branches(sizes.overhead, dtype)

    def bare() -> None:
        for q, k, v, _ in packed:
            bare_forward(q, k, v, 0.0, False)

    assert_same_softmax(*packed[0][:3])
    out, ratio = side_by_side(benchmark, lambda: forward(x, PATTERN), bare, rounds=sizes.rounds + 2)
    assert_rows_match_definition(x, PATTERN, out)
    name = f"overhead/forward/{str(dtype).removeprefix('torch.')}/N={sizes.overhead}"
    record(Ratio(name, ratio, 1.12, "lower"), shape=x.q.shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_backward_overhead(benchmark: Any, sizes: Sizes, record: Callable[..., None], dtype: torch.dtype) -> None:
    x = random_inputs(sizes.overhead, dtype)
    packed = packed_branches(sizes.overhead, dtype)

    def bare() -> None:
        for q, k, v, dout in packed:
            out, lse = bare_forward(q, k, v, 0.0, False)
            bare_backward(dout, q, k, v, out, lse, 0.0, False)

    assert_matches_definition(SMALL_LONGNET, dtype)
    results, ratio = side_by_side(benchmark, lambda: forward_backward(x, PATTERN), bare, rounds=sizes.rounds)
    assert_rows_match_definition(x, PATTERN, results.out, results.dq)
    name = f"overhead/forward+backward/{str(dtype).removeprefix('torch.')}/N={sizes.overhead}"
    record(Ratio(name, ratio, 1.08, "lower"), shape=x.q.shape, dtype=dtype)


def test_few_tokens(benchmark: Any, sizes: Sizes, record: Callable[..., None]) -> None:
    """One call, and one decoded token, against one call of SDPA on as many tokens."""
    shape = (1, FEW_TOKENS, FEW_HEADS, SMALL_HEAD_DIM)
    leaves, dout = [torch.randn(shape, requires_grad=True) for _ in range(3)], torch.randn(shape)
    # (B, H, N, D) as SDPA reads them
    dense_leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves]
    dense_dout = dout.transpose(1, 2).contiguous()

    def ours() -> Tensor:
        return dilated_attention(*leaves, FEW_TOKENS_PATTERN)

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(*dense_leaves)

    expected, _ = reference.dilated_attention(*(x.double() for x in leaves), FEW_TOKENS_PATTERN)
    torch.testing.assert_close(benchmark(ours).double(), expected, atol=1e-6, rtol=1e-6)
    rounds = 4 if sizes.quick else 100
    forward_ratio = processor_ratio(ours, dense, rounds=rounds)
    both_ratio = processor_ratio(
        lambda: torch.autograd.grad(ours(), leaves, dout),
        lambda: torch.autograd.grad(dense(), dense_leaves, dense_dout),
        rounds=rounds,
    )
    cache = DilatedKVCache(FEW_TOKENS_PATTERN, batch_size=1, num_kv_heads=FEW_HEADS, head_dim=SMALL_HEAD_DIM)
    token, (dense_q, dense_k, dense_v) = torch.randn(3, 1, 1, FEW_HEADS, SMALL_HEAD_DIM), dense_leaves
    with torch.no_grad():
        step_ratio = processor_ratio(
            lambda: cache.attend(*token),
            lambda: F.scaled_dot_product_attention(dense_q[:, :, :1], dense_k, dense_v),
            rounds=rounds,
        )
    record(
        Ratio(f"overhead/one call over SDPA/forward/N={FEW_TOKENS}", forward_ratio, 7.0, "lower"),
        Ratio(f"overhead/one call over SDPA/forward+backward/N={FEW_TOKENS}", both_ratio, 7.0, "lower"),
        Ratio(f"overhead/one decoded token over SDPA/N={FEW_TOKENS}", step_ratio, 5.0, "lower"),
        shape=shape,
        dtype=torch.float32,
    )


@pytest.mark.parametrize("views", [False, True], ids=["packed", "views"])
def test_own_python(
    benchmark: Any, sizes: Sizes, record: Callable[..., None], monkeypatch: pytest.MonkeyPatch, views: bool
) -> None:
    """A call whose kernels compute nothing, against a call of SDPA. `views`: views and empty merging kernels, as on a GPU."""
    shape = (1, FEW_TOKENS, FEW_HEADS, SMALL_HEAD_DIM)
    leaves, dout = [torch.randn(shape, requires_grad=True) for _ in range(3)], torch.randn(shape)
    dense_leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves]
    dense_dout = dout.transpose(1, 2).contiguous()
    zeros = cache(torch.zeros)

    def empty_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        return zeros(q.shape), zeros(q.shape[:3])

    def empty_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any, options: Options) -> tuple[Tensor, ...]:
        return zeros(q.shape), zeros(k.shape), zeros(v.shape)

    def ours() -> Tensor:
        return dilated_attention(*leaves, FEW_TOKENS_PATTERN)

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(*dense_leaves)

    def ours_with_backward() -> object:
        return torch.autograd.grad(ours(), leaves, dout)

    kernels = [replace(kernel, run_forward=empty_forward, run_backward=empty_backward) for kernel in sdpa.KERNELS]
    monkeypatch.setattr(sdpa, "KERNELS", tuple(kernels))
    if views:
        no_merging = SimpleNamespace(merge_into=lambda *tensors: None, add_to=lambda *tensors: None)
        monkeypatch.setattr(piece_loop, "packs", lambda device: False)
        monkeypatch.setattr(piece_loop, "merging", lambda request: no_merging)
    benchmark(ours_with_backward)
    rounds = 4 if sizes.quick else 100
    name = f"overhead/own Python over SDPA/{'views' if views else 'packed'}"
    record(
        Ratio(f"{name}/forward/N={FEW_TOKENS}", processor_ratio(ours, dense, rounds=rounds), 4.0 if views else 5.5, "lower"),
        Ratio(
            f"{name}/forward+backward/N={FEW_TOKENS}",
            processor_ratio(ours_with_backward, lambda: torch.autograd.grad(dense(), dense_leaves, dense_dout), rounds=rounds),
            3.0 if views else 4.0,
            "lower",
        ),
        shape=shape,
        dtype=torch.float32,
        microseconds=[1e6 * processor_seconds(work, rounds=rounds) for work in (ours, ours_with_backward)],
    )


def test_kept_outputs_of_branches(benchmark: Any, sizes: Sizes, record: Callable[..., None]) -> None:
    """`detach_weights`: time and saved bytes with kept outputs of branches, over those with recomputed outputs."""
    pattern = DilatedPattern.torchscale(PATTERN.segment_lengths, PATTERN.dilation_rates)
    num_tokens = min(sizes.overhead, 8192)  # at 32,768, torchscale shifts positions: each branch is a call of its own
    x = random_inputs(num_tokens, torch.float32)
    saved: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        saved[-1] += tensor.nbytes
        return tensor

    def run(most_kept: int) -> Results:
        saved.append(0)
        with patch.object(pieces, "MOST_KEPT", most_kept), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            return forward_backward(x, pattern, is_causal=True)

    kept, ratio = side_by_side(benchmark, lambda: run(3), lambda: run(0), rounds=sizes.rounds)
    kept_bytes, recomputed_bytes = max(saved), min(saved)
    for name, a, b in zip(Results._fields, kept, run(0)):
        assert_near(a, b.double(), torch.float32, name)
    record(
        Ratio(f"detach_weights/kept over computed again/time/N={num_tokens}", ratio, 0.95, "lower"),
        Ratio(f"detach_weights/kept over computed again/bytes kept/N={num_tokens}", kept_bytes / recomputed_bytes, 1.6, "lower"),
        shape=x.q.shape,
        dtype=torch.float32,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(benchmark: Any, sizes: Sizes, record: Callable[..., None], dtype: torch.dtype) -> None:
    """Against the call in float32, on any CPU: without instructions for `dtype`, torch's backward takes 6 to 11 times as long."""
    x = random_inputs(sizes.overhead, dtype)
    wide = Inputs(*(t.float() for t in x))
    assert_matches_definition(SMALL_LONGNET, dtype)
    results, ratio = side_by_side(
        benchmark, lambda: forward_backward(x, PATTERN), lambda: forward_backward(wide, PATTERN), rounds=sizes.rounds
    )
    assert_rows_match_definition(x, PATTERN, results.out, results.dq)
    name = f"half precision over float32/{str(dtype).removeprefix('torch.')}/N={sizes.overhead}"
    record(Ratio(name, ratio, 1.1, "lower"), shape=x.q.shape, dtype=dtype)
