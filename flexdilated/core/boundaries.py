"""Boundaries of segments of several lengths: where they meet, and what crosses them, in integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexdilated.core.branch import Near

MOST_LOOKS = 128  # boundaries checked token by token, and tokens checked before each


def first_uncrossed(branches: Sequence[tuple[int, int, range]], near: Near, block: int, num_tokens: int) -> int | None:
    """The first boundary that no information crosses, as `DilatedPattern.first_uncrossed_boundary`.

    Each branch is `(length, rate, kept offsets)`. `block`: length of the runs of tokens in which each token sees the one before it.
    """
    if near.window > 1:  # each token sees the one before it
        return None
    far = {(length, rate) for length, rate, offsets in branches if 1 < rate <= (block + 1) // 2 and len(offsets) == rate}
    if any(length >= num_tokens for length, _ in far):
        return None
    counting = sorted(far, reverse=True)  # long segments leave the fewest candidates
    distance, boundary = 2 * max((rate for _, rate in far), default=1) - 1, min(near.global_tokens, num_tokens)
    for _ in range(MOST_LOOKS):  # each iteration checks one boundary that `counting` does not cross
        boundary = min(first_near_ends(0, block, counting, sign, boundary, num_tokens) for sign in (1, -1))
        if boundary == num_tokens:
            return None
        if distance > MOST_LOOKS or not is_crossed(boundary, branches, distance, num_tokens, near.global_tokens):
            break
    return boundary


def first_near_ends(start: int, step: int, branches: Sequence[tuple[int, int]], sign: int, last: int, limit: int) -> int:
    """The first b in `(last, limit)` with `b % step == start` and `sign * b % w < r` for each branch `(w, r)`, or `limit`.

    With sign 1, b is one of the first r positions of a segment of each branch; with sign -1, `b - 1` is one of the last r. Each
    branch leaves a few remainders modulo w, which the Chinese remainder theorem joins to the remainder modulo `step`.
    """
    first = start + step * ((last - start) // step + 1)
    if first >= limit or not branches:
        return min(first, limit)
    (length, rate), *other_branches = branches
    common = math.gcd(step, length)
    inverse = pow(step // common, -1, length // common)
    for distance in range(sign * start % common, rate, common):
        times = (sign * distance - start) // common * inverse % (length // common)
        limit = first_near_ends(start + step * times, step * length // common, other_branches, sign, last, limit)
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
