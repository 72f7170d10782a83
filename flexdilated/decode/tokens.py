"""The new tokens of a call, as a cache reads them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.core.tracing import holds_values, reads_freely

# Tokens per attention call of a chunk after stored keys: the mask has a row per token and a column per stored row.
BLOCK = 128


class Tokens(NamedTuple):
    """New keys and values `(B, T, Hkv, D)`, finite: 0 where `is_marked` `(B, T, Hkv)`; None: nowhere."""

    k: Tensor
    v: Tensor
    is_marked: Tensor | None

    def marks(self) -> Tensor:
        return torch.zeros_like(self.k[..., 0], dtype=torch.bool) if self.is_marked is None else self.is_marked

    def block(self, start: int) -> Tokens:
        block = slice(start, start + BLOCK)
        return Tokens(self.k[:, block], self.v[:, block], None if self.is_marked is None else self.is_marked[:, block])


def marked(k: Tensor, v: Tensor) -> Tokens:
    """Keys and values whose non-finite rows are marks: masked or not, they would reach every output through 0 * inf."""
    is_free = reads_freely(k)
    # A sum of products is not finite if an element is not; if it overflows, the exact check below follows.
    if is_free and math.isfinite(torch.dot(k.flatten(), v.flatten()).item()):
        return Tokens(k, v, None)
    # The largest absolute value, by a reduction that keeps NaN and needs no temporary of the size of k.
    largest = torch.maximum(*(torch.linalg.vector_norm(x, math.inf, dim=-1) for x in (k, v)))
    is_marked = ~(largest < math.inf)  # NaN too
    # Copies are worth a look at the mark where tokens are many, as in a prompt; where they are few, a look makes the device wait.
    looks = is_free or (k.shape[1] > BLOCK and not torch.compiler.is_compiling() and holds_values(k))
    if looks and not bool(is_marked.any()):
        return Tokens(k, v, None)
    k, v = (x.masked_fill(is_marked[..., None], 0.0) for x in (k, v))
    return Tokens(k, v, is_marked)


def read_new(
    cached: Tensor,
    max_length: int | None,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    start: int = 0,
    num_tokens: int | None = None,
) -> tuple[Tokens, Tensor, Tensor | None]:
    """`(tokens, added, is_real)`: new tokens after `cached` `(B,)` others, `(B,)` their number, and `(B, T)` which are no padding.

    k and v hold the tokens from the `start`-th of `num_tokens` on. `is_real` is None without padding."""
    num_tokens = k.shape[1] if num_tokens is None else num_tokens
    added = torch.full_like(cached, num_tokens) if lengths is None else lengths
    if max_length is not None:
        torch._assert_async((cached + added <= max_length).all(), f"lengths must stay within max_length={max_length} of the cache")
    if lengths is None:
        return marked(k, v), added, None
    is_real = torch.arange(start, start + k.shape[1], device=k.device) < lengths[:, None]
    k, v = (x.masked_fill(~is_real[..., None, None], 0.0) for x in (k, v))  # a NaN in the padding stays there
    return marked(k, v), added, is_real
