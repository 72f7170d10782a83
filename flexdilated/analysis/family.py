"""The patterns that are tried where one is to be chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flexdilated.core.pattern import DilatedPattern

SHORTEST, MOST_RATE = 32, 1024
MOST_BRANCHES = 5
MOST_KINDS = 2048  # kinds of tokens to look at, of each pattern


def family(num_tokens: int, num_heads: int) -> Iterator[DilatedPattern]:
    """Segments `w, w f, w f^2, ...` at rates `1, g, g^2, ...`, g at least 2, until one holds the sequence, or before.

    Rates grow up to a limit, or up to the number of heads, which leaves no row out; where that is no power of two, segments are
    multiples of its odd part, so that the rates divide them.
    """
    seen = set()
    odd = num_heads // (num_heads & -num_heads)
    for unit, most_rate in ((1, MOST_RATE), (odd, num_heads)):
        if unit > SHORTEST:
            continue
        whole = unit << max(0, (-(-num_tokens // unit) - 1).bit_length())
        shortest = unit << (SHORTEST // unit - 1).bit_length()
        for first in _powers(min(shortest, whole), whole):
            for factor in _powers(2, max(2, whole // first)):
                for growth in _powers(2, factor):
                    lengths, rates = [first], [1]
                    while True:
                        kinds = math.lcm(*rates) * 3 ** (len(rates) - 1)
                        is_known = (tuple(lengths), tuple(rates)) in seen
                        if not is_known and kinds <= MOST_KINDS and first % math.lcm(*rates) == 0:
                            seen.add((tuple(lengths), tuple(rates)))
                            yield DilatedPattern(tuple(lengths), tuple(rates))
                        if lengths[-1] >= whole or len(lengths) == MOST_BRANCHES:
                            break
                        lengths.append(min(lengths[-1] * factor, whole))
                        rates.append(min(rates[-1] * growth, most_rate, first))


def _powers(low: int, high: int) -> Iterator[int]:
    """`low`, and twice as much, up to `high`."""
    while low <= high:
        yield low
        low *= 2
