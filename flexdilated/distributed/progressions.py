"""Arithmetic progressions of tokens, many at once: what two have in common, and how many different tokens several hold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexdilated.distributed.spans import Booleans, Integers

LONGEST = 1 << 30  # tokens from the first to the last: products of two fit 64 bits


class Progressions(NamedTuple):
    """Tokens `first, first + stride, ..., last`: arrays of equal length, each with at least one token.

    A progression of one token has stride 1, so that strides are below `LONGEST` where no progression is longer.
    """

    first: Integers
    last: Integers
    stride: Integers

    @classmethod
    def within(cls, first: Integers, end: Integers, stride: Integers) -> tuple[Booleans, Progressions]:
        """Those that begin at `first` and end before `end`: which hold any token, and these."""
        some = first < end
        first, end, stride = first[some], end[some], stride[some]
        last = end - 1 - (end - 1 - first) % stride
        return some, cls(first, last, np.where(last > first, stride, 1))

    @property
    def tokens(self) -> Integers:
        """How many each holds."""
        return (self.last - self.first) // self.stride + 1

    def where(self, chosen: Booleans | Integers) -> Progressions:
        return Progressions(*(x[chosen] for x in self))


def common(a: Progressions, b: Progressions) -> tuple[Integers, Progressions]:
    """What progressions have in common with others, one by one: which pairs have any token, and those tokens."""
    divisor = np.gcd(a.stride, b.stride)
    low, high = np.maximum(a.first, b.first), np.minimum(a.last, b.last)
    met = np.flatnonzero((low <= high) & ((b.first - a.first) % divisor == 0))
    a, b, low, high, divisor = a.where(met), b.where(met), low[met], high[met], divisor[met]
    # The first multiple of one stride, from its first token on, that meets the other's residue: by the Chinese remainder theorem.
    step, steps = a.stride // divisor, b.stride // divisor
    turns = (b.first - a.first) // divisor % steps * _inverse(step, steps) % steps
    stride = a.stride * steps
    first = a.first + a.stride * turns
    first += -((first - low) // stride) * stride
    some, found = Progressions.within(first, high + 1, stride)
    return met[some], found


def _inverse(number: Integers, modulus: Integers) -> Integers:
    """What times a number leaves 1 by division by a modulus without a common divisor; by a modulus of 1, 0."""
    found = number % modulus
    hard = np.flatnonzero(found > 1)  # none where strides are powers of one number: 0 and 1 are their own inverses
    kept, rest = modulus[hard], found[hard]
    last, inverse = np.zeros_like(rest), np.ones_like(rest)
    while (some := rest > 0).any():
        quotient = kept // np.maximum(rest, 1)
        kept, rest = np.where(some, rest, kept), np.where(some, kept - quotient * rest, 0)
        last, inverse = np.where(some, inverse, last), np.where(some, last - quotient * inverse, inverse)
    found[hard] = last % modulus[hard]
    return found


def num_different(progressions: Progressions, size: Integers) -> Integers:
    """`(groups,)` tokens that the progressions of a group hold, each token once; one group of `size` lies behind another.

    By inclusion and exclusion: `n` progressions may have `2 ** n` terms.
    """
    start = np.cumsum(size) - size
    total = np.zeros(len(size), np.int64)
    of = sign = np.empty(0, np.int64)
    terms = Progressions(of, of, of)
    for number in range(int(size.max(initial=0))):
        here = np.flatnonzero(size > number)
        active = np.flatnonzero(size[of] > number)
        terms, of, sign = terms.where(active), of[active], sign[active]
        chosen, shared = common(terms, progressions.where(start[of] + number))
        new = Progressions(*(np.concatenate(x) for x in zip(progressions.where(start[here] + number), shared)))
        new_of, new_sign = np.concatenate([here, of[chosen]]), np.concatenate([np.ones_like(here), -sign[chosen]])
        np.add.at(total, new_of, new_sign * new.tokens)
        terms = Progressions(*(np.concatenate(x) for x in zip(terms, new)))
        of, sign = np.concatenate([of, new_of]), np.concatenate([sign, new_sign])
    return total
