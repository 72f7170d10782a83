"""Boundaries of segments of several lengths: where they meet, and what crosses them, in integers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def first_near_ends(start: int, step: int, branches: Sequence[tuple[int, int]], sign: int, last: int, limit: int) -> int:
    """The first b in `(last, limit)` with `b % step == start` and `sign * b % w < r` for each branch `(w, r)`, or `limit`.

    With sign 1, b is one of the first r positions of a segment of each branch; with sign -1, `b - 1` is one of the last r. Each
    branch leaves a few remainders modulo w, which the Chinese remainder theorem joins to the remainder modulo `step`.
    """
    first = start + step * ((last - start) // step + 1)
    if first >= limit or not branches:
        return min(first, limit)
    (length, rate), *rest = branches
    common = math.gcd(step, length)
    inverse = pow(step // common, -1, length // common)
    for distance in range(sign * start % common, rate, common):
        times = (sign * distance - start) // common * inverse % (length // common)
        limit = first_near_ends(start + step * times, step * length // common, rest, sign, last, limit)
    return limit


def is_crossed(
    boundary: int, branches: Sequence[tuple[int, int, range]], distance: int, num_tokens: int, global_tokens: int
) -> bool:
    """Whether tokens from `boundary` on receive from all tokens that are `distance` or more before them.

    All receive from the global tokens. Each branch is `(length, rate, kept offsets)`. Looks at the tokens near the boundary, one by
    one.
    """
    first = max(boundary - 3 * distance, 0)  # short runs: what crosses one boundary must cross the next as well
    received: list[int] = []  # a bit for each earlier token
    for q in range(first, min(boundary + 3 * distance, num_tokens)):
        bits = 1 << q - first | (1 << max(min(global_tokens, q) - first, 0)) - 1
        for length, rate, offsets in branches:
            if q - first >= rate <= q % length and q % length % rate in offsets:
                bits |= received[q - first - rate]
        received.append(bits)
        required = (1 << max(q - distance + 1 - first, 0)) - 1
        if q >= boundary and bits & required != required:
            return False
    return True
