"""Sizes of the presets of `DilatedPattern`, and checks of its fields."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from flexdilated.core.branch import ceil_div
from flexdilated.core.integers import as_integer, at_least_one

# Measured on a pretrained dense model without further training: a window below 256 tokens increases the loss much, and 4 first
# tokens recover most of what sparse attention loses (docs/adr/0013-near-pairs.md).
LEAST_WINDOW, MOST_RATE, FIRST_TOKENS = 256, 8, 4


def has_all_residues(rate: int, num_kv_heads: int) -> bool:
    """Whether each residue modulo the rate has a key/value head, by the blocked rule of offsets."""
    return (num_kv_heads - 1) // ceil_div(num_kv_heads, rate) == rate - 1


def causal_sizes(
    seq_len: int, num_kv_heads: int, window: int | None, rate: int | None, share: Callable[[int, int], float], budget: float | None
) -> tuple[int, int | None]:
    """`(rate, window)` of `DilatedPattern.causal`; window None: dense. `share(rate, window)`: the share of dense pairs."""
    if rate is None:
        most = min(seq_len, MOST_RATE, max(num_kv_heads // 2, min(num_kv_heads, 2)))
        rate = next(r for r in range(most, 0, -1) if has_all_residues(r, num_kv_heads))
    rate = at_least_one("rate", rate)
    if rate > seq_len or not has_all_residues(rate, num_kv_heads):
        raise ValueError(
            f"rate must be at most seq_len={seq_len} and have a head for each of its residues among num_kv_heads={num_kv_heads}, "
            f"got {rate}; use a divisor of num_kv_heads"
        )
    if budget is not None:
        return rate, _window_within(budget, seq_len, window, lambda size: share(rate, size))
    if window is None:
        size = rounded(max(seq_len // (2 * rate**2), LEAST_WINDOW, 2 * rate))
        return rate, None if rate == 1 or size >= seq_len else size
    if at_least_one("window", window) == 1 < rate:
        raise ValueError(f"window must be at least 2 beside a branch of rate={rate}, got 1: no query would see its neighbour")
    return rate, window


def _window_within(budget: float, seq_len: int, window: int | None, share: Callable[[int], float]) -> int | None:
    """The longest window whose pattern scores at most a share of the pairs of dense attention."""
    if window is not None:
        raise ValueError(f"window must be None with budget, which determines it, got {window}")
    if not isinstance(budget, numbers.Real) or isinstance(budget, bool):
        raise TypeError(f"budget must be a number, got {budget!r}")
    if not 0 < budget <= 1:
        raise ValueError(f"budget must be in (0, 1], got {budget}; 0.1 is a tenth of the pairs of dense attention")
    low, high = min(LEAST_WINDOW, seq_len), seq_len
    if share(low) > budget:
        least = rounded_up(share(low))
        raise ValueError(f"budget must be at least {least:g} for a window of {low} tokens and the far branch, got {budget}")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if share(middle) <= budget else (low, middle - 1)
    return None if low == seq_len else rounded(low)


def rounded(size: int) -> int:
    """`size` rounded down to a multiple of a large power of two, which kernels prefer."""
    unit = 1 << max((size // 4).bit_length() - 1, 0)
    return size // unit * unit


def rounded_up(share: float) -> float:
    """A share, rounded up to three digits."""
    digits = 2 - math.floor(math.log10(share))
    return float(math.ceil(share * 10**digits) / 10**digits)


def gigapath_lengths(max_wsi_size: int, tile_size: int) -> list[int]:
    """Five lengths from 1,024 to the largest number of tiles, evenly spaced in log2, rounded down."""
    max_wsi_size, tile_size = as_integer("max_wsi_size", max_wsi_size), as_integer("tile_size", tile_size)
    if not 1 <= tile_size <= max_wsi_size // 4:
        least = f"[1, {max_wsi_size // 4}], a quarter of max_wsi_size={max_wsi_size}"
        raise ValueError(f"tile_size must be in {least}, got {tile_size}")
    largest_exponent = int(math.log2((max_wsi_size // tile_size) ** 2))
    return [int(2 ** (10 + (largest_exponent - 10) * i / 4)) for i in range(5)]


def check_branches(pattern: Any, most_length: int, most_branches: int) -> None:
    """Raise for numbers of a `DilatedPattern` that are out of range or do not fit each other."""
    for name, number in (("window", pattern.window or 0), ("global_tokens", pattern.global_tokens)):
        if not 0 <= number <= most_length:
            raise ValueError(f"{name} must be in [{int(name == 'window')}, {most_length}], got {number}")
    lengths, rates = pattern.segment_lengths, pattern.dilation_rates
    if not lengths and pattern.window is None and not pattern.global_tokens:
        raise ValueError("segment_lengths must hold at least one length without a window or global_tokens, got ()")
    if len(lengths) > most_branches:
        raise ValueError(f"segment_lengths must hold at most {most_branches} lengths, one for each branch, got {len(lengths)}")
    if len(lengths) != len(rates):
        raise ValueError(f"dilation_rates must hold one rate per segment length ({len(lengths)}), got {rates}")
    for i, (length, rate) in enumerate(zip(lengths, rates)):
        if length < 1:
            raise ValueError(f"segment_lengths[{i}] must be at least 1, got {length}")
        if length > most_length:
            raise ValueError(f"segment_lengths[{i}] must be at most {most_length}, got {length}")
        if not 1 <= rate <= length:
            raise ValueError(f"dilation_rates[{i}] must be in [1, segment_lengths[{i}]={length}], got {rate}")
    for name in ("zero_padding", "detach_weights"):
        if not isinstance(getattr(pattern, name), bool):
            raise TypeError(f"{name} must be a bool, got {getattr(pattern, name)!r}")
        if getattr(pattern, name) and (pattern.window is not None or pattern.global_tokens):
            raise ValueError(
                f"{name} must be False beside a window or global_tokens, got True: torchscale, whose rule it is, has neither"
            )
