"""Checks of a cache: its pattern, and the tensors of a call."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.backends import BACKENDS
from flexdilated.core.checks import DTYPES, check_dense, check_sinks
from flexdilated.core.functorch import is_transformed
from flexdilated.core.integers import as_integer, at_least_one
from flexdilated.core.losses import check_losses, warn_of_losses
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.tracing import holds_values, reads_freely


class Sizes(NamedTuple):
    """Sizes that the tensors of a call share with the cache."""

    batch_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


def check_sizes(pattern: DilatedPattern, cache: Sizes, max_length: int | None, first_head: int, total_kv_heads: int) -> None:
    """Raise ValueError or TypeError unless a cache can have this pattern and these sizes.

    Raises NotImplementedError if the pattern cannot be decoded token by token.
    """
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}")
    for name in ("batch_size", "num_kv_heads", "head_dim"):
        at_least_one(name, getattr(cache, name))
    if max_length is not None:
        at_least_one("max_length", max_length)
    if not 0 <= first_head <= total_kv_heads - cache.num_kv_heads:
        room = f"num_kv_heads={cache.num_kv_heads} of total_kv_heads={total_kv_heads} heads"
        raise ValueError(f"first_head must leave room for {room}, got {first_head}")
    if cache.dtype not in DTYPES:
        raise TypeError(f"dtype must be float64, float32, bfloat16 or float16, got {cache.dtype}")
    check_losses(pattern, max_length, total_kv_heads, is_causal=True)
    if (refusal := cache_refusal(pattern, max_length)) is not None:
        raise NotImplementedError(refusal)


def cache_refusal(pattern: DilatedPattern, max_length: int | None) -> str | None:
    """Why a causal pattern cannot be decoded token by token; None if it can."""
    for w, r in pattern.split("DilatedKVCache")[0]:
        if pattern.zero_padding and w % r and (max_length is None or max_length > w):
            return (
                f"pattern must not shift positions in decoding, got zero_padding=True and dilation rate {r} of segment length {w}; "
                "use rates that divide their segments, or zero_padding=False"
            )
    return None


def check_cache_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raise for sinks that `check_sinks` rejects or that require a gradient; None is accepted."""
    if sinks is not None:
        check_sinks(sinks, q)
        if sinks.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("sinks must not require a gradient: the cache is for inference; use torch.no_grad()")


def check_new(cache: Sizes, q: Tensor, k: Tensor, v: Tensor, backend: str, *, is_shard: bool) -> None:
    """Raise unless `DilatedKVCache.attend` can take these tensors; a shard may have no tokens.

    ValueError: a wrong shape or name of a backend; TypeError: a wrong dtype; NotImplementedError: a gradient, or `torch.jit.trace`.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(
            "DilatedKVCache.attend must not be called under torch.jit.trace, which keeps the positions that it traced: use "
            "torch.compile or torch.export.export"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dense(name, x, nested="pad the sequences and give their lengths")
        if type(x).__name__ == "DTensor":
            raise NotImplementedError(
                f"{name} must be a plain tensor, got a DTensor; a cache holds one rank's heads: use to_local()"
            )
        if x.dim() != 4:
            raise ValueError(f"{name} must have shape (B, T, H, D), got {tuple(x.shape)}")
        if (x.shape[0], x.shape[3]) != (cache.batch_size, cache.head_dim):
            raise ValueError(f"{name} must match the cache in B and D={(cache.batch_size, cache.head_dim)}, got {tuple(x.shape)}")
        if x.dtype != cache.dtype:
            raise TypeError(
                f"{name} must have the dtype of the cache={cache.dtype}, got {x.dtype}; DilatedKVCache(dtype=) says it, under "
                "torch.autocast that of autocast"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name} must not require a gradient: the cache is for inference; use torch.no_grad()")
    if is_transformed(q, k, v):
        raise NotImplementedError(
            "q, k and v must come without torch.func and forward-mode differentiation, got a call under one: the cache is for "
            "inference; use dilated_attention"
        )
    if q.shape[1] < 1 and not is_shard:
        raise ValueError(f"q must have at least one token, got shape {tuple(q.shape)}")
    if q.shape[2] < 1 or q.shape[2] % cache.num_kv_heads:
        raise ValueError(f"q must have a multiple of num_kv_heads={cache.num_kv_heads} heads, got {q.shape[2]}")
    for name, x in (("k", k), ("v", v)):
        if (x.shape[1], x.shape[2]) != (q.shape[1], cache.num_kv_heads):
            raise ValueError(f"{name} must have T={q.shape[1]} tokens of {cache.num_kv_heads} heads, got {tuple(x.shape)}")
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of {('auto', *BACKENDS)}, got {backend!r}")


def check_lengths(lengths: Tensor | None, cache_lengths: Tensor, num_tokens: int) -> None:
    """Raise ValueError or TypeError unless `lengths` `(B,)` are int64 in `[0, num_tokens]`.

    `cache_lengths` `(B,)`: tokens in the cache.
    """
    if lengths is None:
        return
    if lengths.dtype != torch.int64:
        raise TypeError(f"lengths must be int64, got {lengths.dtype}")
    if lengths.shape != cache_lengths.shape:
        raise ValueError(f"lengths must have shape (B,)=({len(cache_lengths)},), got {tuple(lengths.shape)}")
    in_range = (lengths >= 0) & (lengths <= num_tokens)
    if not reads_freely(lengths):  # to read it would wait for the device at every step
        torch._assert_async(in_range.all(), f"lengths must be in [0, T={num_tokens}]")
    elif not bool(in_range.all()):
        raise ValueError(f"lengths must be in [0, T={num_tokens}], got {lengths.tolist()}")


def count_seen(most_seen: float, lengths: Tensor, pattern: DilatedPattern, total_kv_heads: int) -> float:
    """An upper bound of `lengths`: `most_seen`, which counts padding; -inf after the warning of tokens beyond the longest segment.

    The device is waited for only where the bound is beyond that segment: `lengths` then say whether a token is.
    """
    longest = max(pattern.segment_lengths, default=math.inf)
    is_capturing = lengths.is_cuda and torch.cuda.is_current_stream_capturing()
    if most_seen <= longest or is_capturing or not holds_values(lengths):
        return most_seen
    if (num_tokens := int(lengths.max())) <= longest:
        return num_tokens
    warn_of_losses(pattern, num_tokens, total_kv_heads, is_causal=True)
    return -math.inf


def checked_length(length: int | Tensor, lengths: Tensor) -> list[int]:
    """The end of each sequence of `lengths` `(B,)` tokens, from the argument of `DilatedKVCache.crop`.

    Raises ValueError or TypeError for a wrong argument, NotImplementedError if it or the cache holds no values.
    """
    if not holds_values(lengths) or (isinstance(length, Tensor) and not holds_values(length)):
        raise NotImplementedError("length must be that of a cache with values, got a meta or fake tensor: its end is read")
    if isinstance(length, Tensor):
        if length.shape != lengths.shape:
            raise ValueError(f"length must have shape (B,)=({len(lengths)},), got {tuple(length.shape)}")
        ends = [as_integer("length", value) for value in length.tolist()]
    else:
        ends = [as_integer("length", length)] * len(lengths)
    if min(ends) < 0:
        raise ValueError(f"length must be at least 0, got {min(ends)}")
    return ends


def checked_indices(indices: Tensor, lengths: Tensor) -> Tensor:
    """Indices of the sequences of `lengths` `(B,)` tokens, on its device.

    Raises TypeError unless they are int64, ValueError if one is out of range.
    """
    if indices.dtype != torch.int64:
        raise TypeError(f"indices must be int64, got {indices.dtype}")
    reads = not torch.compiler.is_compiling() and holds_values(indices)
    if reads and not bool(((indices >= 0) & (indices < len(lengths))).all()):
        raise ValueError(f"indices must be in [0, B={len(lengths)}), got {indices.tolist()}")
    return indices.to(lengths.device)
