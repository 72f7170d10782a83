"""Patterns as integers, for the schemas of operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexdilated.core.pattern import HEADS, OFFSETS, DilatedPattern


def encode(pattern: DilatedPattern) -> list[int]:
    """A pattern as integers, for the schema of an operator; `decode` is the inverse.

    Six integers for `heads`, `offsets`, the two flags, the window (0: none) and the global tokens, then two per branch of segments.

    Raises:
        NotImplementedError: If a branch is of an unknown kind.
    """
    segments, near = pattern.split("the encoding of operators")
    rules = [HEADS.index(pattern.heads), OFFSETS.index(pattern.offsets), int(pattern.zero_padding), int(pattern.detach_weights)]
    return [*rules, *near, *(number for branch in segments for number in branch)]


def decode(numbers: Sequence[int]) -> DilatedPattern:
    """The pattern that `encode` turned into these integers. Lengths and rates may be symbols of a compiler."""
    heads, offsets, zeros, detached, window, global_tokens = (int(number) for number in numbers[:6])
    rules: Any = {"heads": HEADS[heads], "offsets": OFFSETS[offsets], "zero_padding": bool(zeros), "detach_weights": bool(detached)}
    near: Any = {"window": window or None, "global_tokens": global_tokens}
    return DilatedPattern(tuple(numbers[6::2]), tuple(numbers[7::2]), **near, **rules)
