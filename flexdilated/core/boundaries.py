"""Positions near the ends of segments of several lengths at once, in integers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def first_near_ends(start: int, step: int, branches: Sequence[tuple[int, int]], sign: int, limit: int) -> int:
    """The first b in `(0, limit)` with `b % step == start` and `sign * b % w < r` for each branch `(w, r)`, or `limit`.

    With sign 1, b is one of the first r positions of a segment of each branch; with sign -1, `b - 1` is one of the last r. Each
    branch leaves a few remainders modulo w, which the Chinese remainder theorem joins to the remainder modulo `step`.
    """
    if (start or step) >= limit or not branches:
        return min(start or step, limit)
    (length, rate), *rest = branches
    common = math.gcd(step, length)
    inverse = pow(step // common, -1, length // common)
    for distance in range(sign * start % common, rate, common):
        times = (sign * distance - start) // common * inverse % (length // common)
        limit = first_near_ends(start + step * times, step * length // common, rest, sign, limit)
    return limit
