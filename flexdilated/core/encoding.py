"""Patterns as integers, for the schemas of operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexdilated.core.pattern import HEADS, OFFSETS, DilatedPattern


def encode(pattern: DilatedPattern) -> list[int]:
    """A pattern as integers, for the schema of an operator; `decode` is the inverse.

    Four integers for `heads`, `offsets` and the two flags, two per branch of segments, then the window if there is one.

    Raises:
        NotImplementedError: If a branch is of another kind than segments and windows.
    """
    segments, window = pattern.split("the encoding of operators")
    rules = [HEADS.index(pattern.heads), OFFSETS.index(pattern.offsets), int(pattern.zero_padding), int(pattern.detach_weights)]
    return [*rules, *(number for branch in segments for number in branch), *(() if window is None else window)]


def decode(numbers: Sequence[int]) -> DilatedPattern:
    """The pattern that `encode` turned into these integers. Lengths and rates may be symbols of a compiler."""
    heads, offsets, zeros, detached = (int(number) for number in numbers[:4])
    rules: Any = {"heads": HEADS[heads], "offsets": OFFSETS[offsets], "zero_padding": bool(zeros), "detach_weights": bool(detached)}
    end = len(numbers) - len(numbers) % 2  # an odd number of integers ends with a window
    window = numbers[-1] if len(numbers) % 2 else None
    return DilatedPattern(tuple(numbers[4:end:2]), tuple(numbers[5:end:2]), window=window, **rules)
