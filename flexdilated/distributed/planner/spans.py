"""Intervals of tokens that ranks need of each other, and the rows that heads keep of them.

A span is an interval of neighbouring tokens of one segment. Each head keeps the tokens of its own offset, so one span describes all
heads. Within one branch the spans between two ranks are disjoint.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


class BranchHeads(NamedTuple):
    """The heads of one branch that are held here, with their offsets."""

    rate: int
    heads: tuple[tuple[int, int], ...]  # (head, offset), ascending


class Spans(NamedTuple):
    """Tokens that `receiver` gets from `sender`: one array entry per span, branch by branch and ascending in each pair of ranks.

    Token `t` has offset `(t - origin) % rate`. Only `residues` offsets from `residue` on, modulo the rate, take part, and only
    `places` heads of the branch from number `place` on.
    """

    branch: Integers
    receiver: Integers
    sender: Integers
    first: Integers
    end: Integers
    origin: Integers
    residue: Integers
    residues: Integers
    place: Integers
    places: Integers

    def where(self, chosen: Booleans | Integers | slice) -> Spans:
        return Spans(*(x[chosen] for x in self))


def expanded(first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """The numbers of runs `first ... first + count`, run by run: the run of each number, and the number."""
    ends = np.cumsum(count)
    run = np.repeat(np.arange(len(count)), count)
    return run, np.arange(len(run)) + np.repeat(first - ends + count, count)


def kept_below(length: Integers, rate: int | Integers, offset: int | Integers) -> Integers:
    """The number of positions `offset, offset + rate, ...` below `length`."""
    return np.maximum(0, -((offset - length) // rate))
