"""The tokens that heads keep, as arithmetic progressions, and the cells between boundaries of segments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.core.branch import Kept, Near
from flexdilated.core.integers import at_least_one
from flexdilated.core.pattern import DilatedPattern

Integers = NDArray[np.int64]

MOST_MULTIPLE = 2**62  # of rates that are met at once: positions are 64-bit integers
MOST_RATE = 2**31  # likewise: two of them are multiplied
MOST_CELLS = 2**22  # looked at for each set of branches: a few arrays of 32 MB


class Together(NamedTuple):
    """One branch of all heads together, its segment cut to the sequence."""

    length: int
    rate: int
    offsets: tuple[int, ...]  # that some head keeps


def checked(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, *, is_causal: bool = False) -> tuple[int, int]:
    """`num_tokens` and `num_kv_heads` as Python's integers, after a check of all arguments.

    Raises:
        ValueError: If a number is below 1, or some branch would have no head.
        TypeError: If an argument has the wrong type.
    """
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}")
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
    num_tokens, num_kv_heads = at_least_one("num_tokens", num_tokens), at_least_one("num_kv_heads", num_kv_heads)
    pattern.check_heads(num_kv_heads)
    return num_tokens, num_kv_heads


def group_heads(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int) -> dict[tuple[Kept, ...], list[int]]:
    """Heads by the tokens that they keep: `{branches of segments as they run them: heads}`. The window is not included."""
    groups: dict[tuple[Kept, ...], list[int]] = {}
    for head in range(num_kv_heads):
        branches = pattern.kept(head, num_kv_heads, "coverage and reach")
        clipped = tuple(branch._replace(length=min(branch.length, num_tokens)) for branch in branches)
        groups.setdefault(clipped, []).append(head)
    return groups


def merge_heads(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int) -> tuple[list[Together], Near]:
    """The distinct branches of segments of all heads, the shortest first, and the pairs of window and global tokens."""
    segments, near = pattern.split("coverage and reach")
    offsets: dict[tuple[int, int], set[int]] = {}
    for i, (length, rate) in enumerate(segments):
        offsets.setdefault((min(length, num_tokens), rate), set()).update(pattern.kept_offsets(i, num_kv_heads))
    branches = [Together(length, rate, tuple(sorted(kept_offsets))) for (length, rate), kept_offsets in sorted(offsets.items())]
    return branches, near


def each_block(lengths: Sequence[int], num_tokens: int) -> Iterator[tuple[int, int]]:
    """(tokens, number of times) of the blocks that no segment crosses: whole periods of the boundaries, and the rest."""
    period = min(math.lcm(*lengths), num_tokens)
    yield period, num_tokens // period
    if num_tokens % period:
        yield num_tokens % period, 1


@lru_cache(maxsize=32)
def cell_starts(lengths: tuple[int, ...], num_tokens: int) -> Integers:
    """The first token of each cell: all tokens of a cell lie in one segment of each length.

    Raises:
        NotImplementedError: If there are too many of them.
    """
    if (cells := sum(-(-num_tokens // length) for length in lengths)) > MOST_CELLS:
        raise NotImplementedError(
            f"segment_lengths must have at most {MOST_CELLS} segments before their boundaries repeat, got {cells} of {lengths}; "
            "use lengths that divide one another, or fewer tokens"
        )
    starts = np.concatenate([np.arange(0, num_tokens, length, dtype=np.int64) for length in lengths])
    starts.sort(kind="stable")  # merges the sorted parts in a tenth of the time of `np.unique`, which hashes
    distinct_starts = starts[np.append(True, starts[1:] != starts[:-1])]
    distinct_starts.setflags(write=False)
    return distinct_starts


def count_common(branches: Sequence[Kept], num_tokens: int) -> Integers:
    """The number of tokens of each cell that all these branches keep, by the Chinese remainder theorem.

    Raises:
        NotImplementedError: If the rates have a least common multiple beyond 64-bit integers.
    """
    rates = [branch.rate for branch in branches]
    if math.lcm(*rates) >= MOST_MULTIPLE or (len(rates) > 1 and max(rates) >= MOST_RATE):
        raise NotImplementedError(
            f"dilation_rates must be below 2**31 with a least common multiple below 2**62, got {tuple(rates)}; "
            "use rates that share factors"
        )
    start = cell_starts(tuple(sorted({branch.length for branch in branches})), num_tokens)
    size = np.diff(start, append=num_tokens)
    first, step, joined = np.zeros_like(start), 1, np.ones(len(start), np.bool_)  # first + t * step: kept by the branches so far
    for length, rate, offset in branches:
        gap, divisor = start // length * length + offset - first, math.gcd(step, rate)
        if divisor > 1:
            joined &= gap % divisor == 0
        reduced_rate = rate // divisor
        # The inner product stays below rate * rate, the outer one below the least common multiple.
        first = first + step * (gap // divisor % reduced_rate * pow(step // divisor, -1, reduced_rate) % reduced_rate)
        step *= reduced_rate
    within = (first - start) % step
    return np.where(joined & (within < size), (size - 1 - within) // step + 1, 0)
