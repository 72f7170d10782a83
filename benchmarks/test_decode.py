"""Time and memory per decoded token as the context grows, beside a cache of all keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention import HEAD_DIM, NUM_HEADS
from benchmarks.conftest import Sizes
from benchmarks.timing import Ratio, side_by_side
from flexdilated import DilatedPattern
from flexdilated.decode import DilatedKVCache

PATTERN = DilatedPattern.longnet()
STEPS = 16  # tokens per timed call

GROWTH_TARGET = 1.15
# A full cache of 65,536 rows per head against 11,605 in the pattern's segments.
FULL_TARGET = 0.4


SMALL = (2, 16)  # heads and head dim of a million tokens: their keys and values must be made, too


def prefilled(num_tokens: int, num_kv_heads: int, head_dim: int) -> tuple[DilatedKVCache, Tensor, Tensor]:
    """A cache that has seen `num_tokens` random tokens, and their keys and values `(1, N, H, D)`."""
    cache = DilatedKVCache(PATTERN, batch_size=1, num_kv_heads=num_kv_heads, head_dim=head_dim)
    q, k, v = (torch.randn(1, num_tokens, num_kv_heads, head_dim) for _ in range(3))
    with torch.no_grad():
        cache.attend(q, k, v)
    return cache, k, v


def decode(cache: DilatedKVCache, tokens: Tensor) -> Tensor:
    """The outputs of tokens `(STEPS, 3, 1, 1, H, D)`, one after another."""
    with torch.no_grad():
        return torch.cat([cache.attend(*token) for token in tokens], dim=1)


def expected_row(q: Tensor, k: Tensor, v: Tensor, position: int, head: int) -> Tensor:
    """One output of one head, `(D,)` float64: a softmax over the keys that the branches gather, each as often as they do."""
    num_kv_heads, head_dim = k.shape[2:]
    keys: list[int] = []
    for i, (w, r) in enumerate(PATTERN.branches):
        offset = PATTERN.offset(i, head, num_kv_heads)
        if position % w % r == offset:
            keys.extend(range(position // w * w + offset, position + 1, r))
    if not keys:
        return torch.zeros(head_dim, dtype=torch.float64)
    weights = torch.softmax(k[0, keys, head].double() @ q[0, 0, head].double() * head_dim**-0.5, dim=0)
    return weights @ v[0, keys, head].double()


def assert_decodes(cache: DilatedKVCache, k: Tensor, v: Tensor) -> None:
    """The next token, written into the cache, against the definition."""
    position = k.shape[1]
    q_1, k_1, v_1 = torch.randn(3, 1, 1, *k.shape[2:])
    out = decode(cache, torch.stack([q_1, k_1, v_1])[None])
    k, v = torch.cat([k, k_1], dim=1), torch.cat([v, v_1], dim=1)
    for head in range(k.shape[2]):
        expected = expected_row(q_1, k, v, position, head)
        torch.testing.assert_close(out[0, 0, head].double(), expected, atol=1e-5, rtol=1e-5)


def test_decode_growth(benchmark: Any, sizes: Sizes, record: Callable[..., None]) -> None:
    small, large = 1024, 4096 if sizes.quick else 1 << 20
    (few, *few_kv), (many, *many_kv) = prefilled(small, *SMALL), prefilled(large, *SMALL)
    assert_decodes(few, *few_kv)
    assert_decodes(many, *many_kv)
    tokens = torch.randn(STEPS, 3, 1, 1, *SMALL)
    out, ratio = side_by_side(benchmark, lambda: decode(many, tokens), lambda: decode(few, tokens), rounds=sizes.rounds)
    assert out.isfinite().all()
    assert int(many.lengths) == large + 1 + STEPS * (sizes.rounds + 1)
    where = f"N={small} to {large}"
    record(
        Ratio(f"decode/time per token/{where}", ratio, GROWTH_TARGET, "lower"),
        Ratio(f"decode/memory/{where}", many.nbytes / few.nbytes, 1.0, "lower"),
        shape=(1, large, *SMALL),
        dtype=torch.float32,
        steps=STEPS,
        cache_bytes=many.nbytes,
    )


def test_decode_against_full_cache(benchmark: Any, sizes: Sizes, record: Callable[..., None]) -> None:
    context = 4096 if sizes.quick else 65536
    cache, k, v = prefilled(context, NUM_HEADS, HEAD_DIM)
    assert_decodes(cache, k, v)
    tokens = torch.randn(STEPS, 3, 1, 1, NUM_HEADS, HEAD_DIM)
    # As much room as will be needed, (B, H, N, D) as SDPA reads it: the full cache grows in place, without copies.
    stored_k, stored_v = (F.pad(x.transpose(1, 2), (0, 0, 0, STEPS)).contiguous() for x in (k, v))

    def dense() -> Tensor:
        outs = []
        for t, (q_1, k_1, v_1) in enumerate(tokens):
            end = context + t + 1
            stored_k[:, :, end - 1], stored_v[:, :, end - 1] = k_1[:, 0], v_1[:, 0]
            outs.append(F.scaled_dot_product_attention(q_1.transpose(1, 2), stored_k[:, :, :end], stored_v[:, :, :end]))
        return torch.cat(outs, dim=2)

    q_1, k_1, v_1 = (x[0, :, 0].double() for x in tokens[0])  # of head 0, (1, D) each
    weights = torch.softmax(q_1[0] @ torch.cat([k[0, :, 0].double(), k_1]).T * HEAD_DIM**-0.5, dim=0)
    expected = weights @ torch.cat([v[0, :, 0].double(), v_1])
    torch.testing.assert_close(dense()[0, 0, 0].double(), expected, atol=1e-5, rtol=1e-5)
    out, ratio = side_by_side(benchmark, lambda: decode(cache, tokens), dense, rounds=sizes.rounds)
    assert out.isfinite().all()
    full_bytes = 2 * k.nbytes
    record(
        # Short contexts fit into the longest segment: there the bounded cache has nothing to save.
        Ratio(f"decode/time over a full cache/N={context}", ratio, None if sizes.quick else FULL_TARGET, "lower"),
        Ratio(f"decode/memory over a full cache/N={context}", cache.nbytes / full_bytes, None if sizes.quick else 0.2, "lower"),
        shape=(1, context, NUM_HEADS, HEAD_DIM),
        dtype=torch.float32,
        steps=STEPS,
        cache_bytes=cache.nbytes,
        full_bytes=full_bytes,
    )
