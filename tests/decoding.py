"""Caches that tests of decoding fill, on one rank and over several."""

from itertools import pairwise

import torch
from torch import Tensor

from flexdilated import DilatedPattern, reference
from flexdilated.decode import DilatedKVCache

LONGNET = DilatedPattern((7, 14, 28), (1, 2, 4))
RAGGED = DilatedPattern((5, 11), (2, 3), offsets="interleaved")
GROUPED = DilatedPattern((5, 11, 13), (1, 2, 3), heads="grouped")
PATTERNS = (LONGNET, RAGGED, GROUPED)
BATCH, TOKENS, HEADS, GROUP, DIM = 3, 61, 5, 2, 3


def draw(tokens: int = TOKENS, heads: int = HEADS, group: int = GROUP, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(torch.randn(BATCH, tokens, h, DIM, dtype=torch.float64).to(dtype) for h in (heads * group, heads, heads))


def make(pattern: DilatedPattern, **options: object) -> DilatedKVCache:
    defaults = {"batch_size": BATCH, "num_kv_heads": HEADS, "head_dim": DIM, "dtype": torch.float64}
    return DilatedKVCache(pattern, **(defaults | options))


def feed(cache: DilatedKVCache, inputs: tuple[Tensor, ...], start: int, end: int) -> Tensor:
    return cache.attend(*(x[:, start:end] for x in inputs))


def feed_all(cache: DilatedKVCache, inputs: tuple[Tensor, ...], *borders: int, **options: object) -> Tensor:
    """The outputs of calls that begin and end at each border, put together."""
    return torch.cat([cache.attend(*(x[:, a:b] for x in inputs), **options) for a, b in pairwise(borders)], dim=1)


def full(inputs: tuple[Tensor, ...], pattern: DilatedPattern, sinks: Tensor | None = None, **options: object) -> Tensor:
    """The oracle; a sink is one more key of its head, of value 0."""
    out, lse = reference.dilated_attention(*inputs, pattern, is_causal=True, **options)
    return out if sinks is None else out / (1 + torch.exp(sinks - lse.transpose(1, 2).clamp(min=-500)))[..., None]


def padded_chunk(inputs: tuple[Tensor, ...], at: list[int], counts: list[int], padding: float = torch.nan) -> list[Tensor]:
    """The next `counts` tokens of each sequence, of which `at` have been."""
    chunk = [torch.full((BATCH, max(*counts, 1), *x.shape[2:]), padding, dtype=x.dtype) for x in inputs]
    for b, count in enumerate(counts):
        for part, x in zip(chunk, inputs):
            part[b, :count] = x[b, at[b] : at[b] + count]
    return chunk


def sees(inputs: tuple[Tensor, ...], pattern: DilatedPattern, poisoned: Tensor) -> Tensor:
    """`(B, N, H)`: whether a token attends to a poisoned key, `(B, N, Hkv)`."""
    q, k, _ = inputs
    weight = reference.dilated_attention(q, k, poisoned[..., None].expand_as(k).double(), pattern, is_causal=True)[0]
    return weight[..., 0] > 0
