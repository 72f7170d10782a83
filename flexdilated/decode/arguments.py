"""What a cache refuses: sizes, patterns, and the tensors of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.backends import BACKENDS
from flexdilated.core.checks import check_dense
from flexdilated.core.functorch import is_transformed
from flexdilated.core.hardware import holds_values
from flexdilated.core.pattern import MAX_LENGTH, DilatedPattern, is_integer


class Sizes(NamedTuple):
    """What the tensors of a call share with the cache."""

    batch_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class Softmax(NamedTuple):
    """What makes weights of products: `scale` (None: `D ** -0.5`), and the `sinks` `(H,)`, scores of keys that have no value."""

    scale: float | None
    sinks: Tensor | None


def check_sizes(sizes: dict[str, int | None]) -> None:
    """Raise unless sizes are integers in `[1, 2**40]`; None is left out.

    Raises:
        TypeError: If one is no integer.
        ValueError: If one is outside `[1, 2**40]`.
    """
    for name, value in sizes.items():
        if value is None:
            continue
        if not is_integer(value):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
        if value > MAX_LENGTH:
            raise ValueError(f"{name} must be at most {MAX_LENGTH}, got {value}")


def check_heads(first_head: int, num_kv_heads: int, total: int) -> None:
    """Refuse heads that are not among those of the model.

    Raises:
        TypeError: If a number is no integer.
        ValueError: If they do not fit.
    """
    for name, value in (("first_head", first_head), ("total_kv_heads", total)):
        if not is_integer(value):
            raise TypeError(f"{name} must be an integer, got {value!r}")
    if not 0 <= first_head <= total - num_kv_heads:
        raise ValueError(
            f"first_head must leave room for num_kv_heads={num_kv_heads} of total_kv_heads={total} heads, got {first_head}"
        )


def cache_refusal(pattern: DilatedPattern, max_length: int | None) -> str | None:
    """Why a causal pattern cannot be decoded token by token; None if it can."""
    for w, r in pattern.branches:
        if pattern.zero_padding and w % r and (max_length is None or max_length > w):
            return (
                f"pattern must not shift positions in decoding, got zero_padding=True and dilation rate {r} of segment length {w}; "
                "use rates that divide their segments, or zero_padding=False"
            )
    return None


def check_new(cache: Sizes, q: Tensor, k: Tensor, v: Tensor, backend: str, *, is_shard: bool) -> None:
    """Refuse tensors that `DilatedKVCache.attend` cannot take; a shard may have no tokens.

    Raises:
        ValueError: If a shape, a device or the name of the backend is wrong.
        TypeError: If a dtype is wrong.
        NotImplementedError: If a gradient is asked for.
    """
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
        if x.device != cache.device:
            raise ValueError(f"{name} must be on the device of the cache={cache.device}, got {x.device}")
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


def check_sinks(sinks: Tensor | None, num_heads: int) -> None:
    """Refuse what is no score for each of the query heads.

    Raises:
        TypeError: If they are no tensor of floating point.
        ValueError: If the shape is wrong.
        NotImplementedError: If a gradient is asked for.
    """
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        got = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"sinks must be a tensor of floating point, got {got}")
    if sinks.shape != (num_heads,):
        raise ValueError(f"sinks must have shape (H,)=({num_heads},), got {tuple(sinks.shape)}")
    if sinks.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("sinks must not require a gradient: the cache is for inference; use torch.no_grad()")


def check_lengths(lengths: Tensor | None, held: Tensor, num_tokens: int) -> None:
    """Refuse what cannot say how many of `num_tokens` each sequence of `held` `(B,)` gets.

    Raises:
        ValueError: If a shape or device is wrong, or a number out of range.
        TypeError: If they are no int64.
    """
    if lengths is None:
        return
    if not isinstance(lengths, Tensor):
        raise TypeError(f"lengths must be a tensor, got {type(lengths).__name__}")
    if lengths.dtype != torch.int64:
        raise TypeError(f"lengths must be int64, got {lengths.dtype}")
    if lengths.shape != held.shape:
        raise ValueError(f"lengths must have shape (B,)=({len(held)},), got {tuple(lengths.shape)}")
    if lengths.device != held.device:
        raise ValueError(f"lengths must be on the device of the cache={held.device}, got {lengths.device}")
    inside = (lengths >= 0) & (lengths <= num_tokens)
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():  # to read it would wait for the device at every step
        torch._assert_async(inside.all(), f"lengths must be in [0, T={num_tokens}]")
    elif holds_values(lengths) and not bool(inside.all()):
        raise ValueError(f"lengths must be in [0, T={num_tokens}], got {lengths.tolist()}")


def checked_length(length: int | Tensor, lengths: Tensor) -> list[int]:
    """The end of each sequence of `lengths` `(B,)` tokens, of what `DilatedKVCache.crop` is given.

    Raises:
        ValueError: If a length is below 0 or has the wrong shape.
        TypeError: If it is no integer.
        NotImplementedError: If it or the cache holds no values.
    """
    if not holds_values(lengths) or (isinstance(length, Tensor) and not holds_values(length)):
        raise NotImplementedError("length must be that of a cache with values, got a meta or fake tensor: its end is read")
    if isinstance(length, Tensor):
        if length.is_floating_point() or length.is_complex() or length.dtype == torch.bool:
            raise TypeError(f"length must hold integers, got {length.dtype}")
        if length.shape != lengths.shape:
            raise ValueError(f"length must have shape (B,)=({len(lengths)},), got {tuple(length.shape)}")
        wanted = length.tolist()
    else:
        if not is_integer(length):
            raise TypeError(f"length must be an integer or a tensor, got {length!r}")
        wanted = [length] * len(lengths)
    if min(wanted) < 0:
        raise ValueError(f"length must be at least 0, got {min(wanted)}")
    return wanted


def checked_indices(indices: Tensor, lengths: Tensor) -> Tensor:
    """Indices of the sequences of `lengths` `(B,)` tokens, on its device.

    Raises:
        ValueError: If one is out of range.
        TypeError: If the dtype is not int64.
    """
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64:
        got = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"indices must be int64, got {got}")
    reads = not torch.compiler.is_compiling() and holds_values(indices)
    if reads and not bool(((indices >= 0) & (indices < len(lengths))).all()):
        raise ValueError(f"indices must be in [0, B={len(lengths)}), got {indices.tolist()}")
    return indices.to(lengths.device)
