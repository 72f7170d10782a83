"""Patterns as integers, for the schemas of operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexdilated.core.pattern import HEADS, OFFSETS, DilatedPattern


def encode(pattern: DilatedPattern) -> list[int]:
    """A pattern as integers, for the schema of an operator; `decode` is the inverse.

    Four integers for `heads`, `offsets` and the two flags, two per branch of segments, then the window if there is one. With global
    tokens the first integer is 2 more, and the window, or 0, and their number come last. Saved programs hold these integers.

    Raises:
        NotImplementedError: If a branch is of an unknown kind.
    """
    segments, near = pattern.split("the encoding of operators")
    rules = [HEADS.index(pattern.heads), OFFSETS.index(pattern.offsets), int(pattern.zero_padding), int(pattern.detach_weights)]
    rules[0] += len(HEADS) * (near.global_tokens > 0)
    numbers = [*rules, *(number for branch in segments for number in branch)]
    return [*numbers, *near] if near.global_tokens else [*numbers, *([near.window] if near.window else [])]


def decode(numbers: Sequence[int]) -> DilatedPattern:
    """The pattern that `encode` turned into these integers. Lengths and rates may be symbols of a compiler."""
    heads, offsets, zeros, detached = (int(number) for number in numbers[:4])
    has_global, heads = divmod(heads, len(HEADS))
    end = len(numbers) - (2 if has_global else len(numbers) % 2)  # an odd number of integers ends with a window
    window, global_tokens = (*numbers[end:], 0, 0)[:2]
    rules: Any = {"heads": HEADS[heads], "offsets": OFFSETS[offsets], "zero_padding": bool(zeros), "detach_weights": bool(detached)}
    near: Any = {"window": window or None, "global_tokens": global_tokens}
    return DilatedPattern(tuple(numbers[4:end:2]), tuple(numbers[5:end:2]), **near, **rules)
