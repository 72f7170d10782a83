"""Patterns as integers, for the schemas of operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexdilated.core.pattern import HEADS, OFFSETS, DilatedPattern


def encode(pattern: DilatedPattern) -> list[int]:
    """A pattern as integers, for the schema of an operator, which knows no patterns; `decode` is the inverse.

    The flags and the places of `heads` and `offsets`, the window or 0, then two integers for each branch of segments.

    Raises:
        NotImplementedError: If a branch is of another kind than segments and windows.
    """
    segments, window = pattern.split("the encoding of operators")
    rules = [HEADS.index(pattern.heads), OFFSETS.index(pattern.offsets), int(pattern.zero_padding), int(pattern.detach_weights)]
    return [*rules, 0 if window is None else window.size, *(number for branch in segments for number in branch)]


def decode(numbers: Sequence[int]) -> DilatedPattern:
    """The pattern of the integers that `encode` gave. Lengths and rates may be symbols of a compiler."""
    heads, offsets, zeros, detached = (int(number) for number in numbers[:4])
    rules: Any = {"heads": HEADS[heads], "offsets": OFFSETS[offsets], "zero_padding": bool(zeros), "detach_weights": bool(detached)}
    return DilatedPattern(tuple(numbers[5::2]), tuple(numbers[6::2]), window=numbers[4] or None, **rules)
