"""The number of (query, key) pairs that each branch and head scores, and of pairs scored more than once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb, lcm
from typing import NamedTuple

from flexdilated.analysis.lattice import checked, count_common, each_block, group_heads, sum_exact
from flexdilated.core.branch import Kept, Window
from flexdilated.core.pattern import DilatedPattern

MAX_BRANCHES = 12  # of one head, whose shared pairs are counted by inclusion and exclusion


class Balance(NamedTuple):
    """The least, the largest and the mean number of pairs of a head.

    >>> analyse(DilatedPattern((7,), (2,)), 7, 2).balance  # 4 and 3 tokens, squared
    Balance(least=9, most=16, mean=12.5)
    """

    least: int
    most: int
    mean: float

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest head over the mean; 1.0 where all do the same, and where there are no pairs."""
        return self.most / self.mean if self.most else 1.0


def count_pairs(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, *, is_causal: bool = False
) -> tuple[tuple[int, ...], ...]:
    """The number of (query, key) pairs that each branch scores for each head; a pair in m branches is in m of the counts.

    >>> count_pairs(DilatedPattern((8, 16), (1, 4)), 16, 4)
    ((128, 128, 128, 128), (16, 16, 16, 16))

    The sum is `pattern.count_pairs(...)`. A head that does not run a branch has 0 there. Zero keys are not counted.

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N; in closed form, of any size.
        num_heads: Heads H. Under grouped-query attention these are key/value heads.
        is_causal: Whether a query sees only keys at its own position and before.

    Returns:
        One tuple per branch, one integer per head in it.

    Raises:
        ValueError: If a number is below 1, or some branch would have no head.
        TypeError: If an argument has the wrong type.
    """
    num_tokens, num_heads = checked(pattern, num_tokens, num_heads, is_causal=is_causal)
    counts = []
    segments, window = pattern.split("count_pairs")
    for branch, (length, rate) in enumerate(segments):
        by_offset: dict[int, int] = {}
        row = [0] * num_heads
        for head in pattern.head_range(branch, num_heads):
            offset = pattern.offset(branch, head, num_heads)
            if offset not in by_offset:
                by_offset[offset] = Kept(length, rate, offset).count_pairs(num_tokens, is_causal=is_causal)
            row[head] = by_offset[offset]
        counts.append(tuple(row))
    if window is not None:
        counts.append((window.count_pairs(num_tokens, is_causal=is_causal),) * num_heads)
    return tuple(counts)


def balance_of(counts: tuple[tuple[int, ...], ...]) -> Balance:
    """How evenly the heads share the pairs that `count_pairs` counted."""
    heads = [sum(column) for column in zip(*counts)]
    return Balance(min(heads), max(heads), sum(heads) / len(heads))


def count_multiplicities(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, *, is_causal: bool = False
) -> tuple[dict[int, int], ...]:
    """By head, the number of different (query, key) pairs that exactly m branches join, `{m: pairs}`, for each m that occurs.

    >>> count_multiplicities(DilatedPattern((8, 16), (1, 2)), 16, 2)
    ({1: 128, 2: 32}, {1: 128, 2: 32})

    A pair that m branches join counts m times in the softmax: `sum(m * pairs)` is scored; a mask over the sequence would score
    `sum(pairs)`. Counted by inclusion and exclusion over sets of branches, with the Chinese remainder theorem. Arguments and
    errors are those of `count_pairs`. Time grows with the number of segments until their boundaries repeat, not with N.

    Raises:
        NotImplementedError: If a head runs more than 12 branches, or rates have a least common multiple of 2**62 or more.
    """
    num_tokens, num_heads = checked(pattern, num_tokens, num_heads, is_causal=is_causal)
    counts_by_head: list[dict[int, int]] = [{}] * num_heads
    joined_pairs: dict[tuple[Kept | Window, ...], int] = {}
    window = pattern.split("count_multiplicities")[1]
    for kept, heads in group_heads(pattern, num_tokens, num_heads).items():
        branches: list[Kept | Window] = [*kept, *([] if window is None else [window])]
        counts = _multiplicities(branches, num_tokens, joined_pairs, is_causal=is_causal)
        for head in heads:
            counts_by_head[head] = counts
    return tuple(dict(head_counts) for head_counts in counts_by_head)


def _multiplicities(
    branches: Sequence[Kept | Window], num_tokens: int, joined_pairs: dict[tuple[Kept | Window, ...], int], *, is_causal: bool
) -> dict[int, int]:
    """`count_multiplicities` of one head. `joined_pairs` holds the number of pairs that all branches of a set join."""
    if len(branches) > MAX_BRANCHES:
        raise NotImplementedError(
            f"pattern must have at most {MAX_BRANCHES} branches per head to count the pairs that they share, got {len(branches)}"
        )
    # By the size of a set of branches: the pairs that all of it join, summed over the sets of that size.
    joined = [0] * (len(branches) + 1)
    empty: set[frozenset[int]] = set()
    for size in range(1, len(branches) + 1):
        for chosen in combinations(range(len(branches)), size):
            if size > 1 and any(frozenset(chosen) - {i} in empty for i in chosen):
                empty.add(frozenset(chosen))
                continue
            members = tuple(sorted({branches[i] for i in chosen}))
            if members not in joined_pairs:
                joined_pairs[members] = _joined_by_all(members, num_tokens, is_causal=is_causal)
            pairs = joined_pairs[members]
            if not pairs:
                empty.add(frozenset(chosen))
            joined[size] += pairs
    exactly = {
        m: sum((-1) ** (size - m) * comb(size, m) * joined[size] for size in range(m, len(joined))) for m in range(1, len(joined))
    }
    return {m: pairs for m, pairs in exactly.items() if pairs}


def _joined_by_all(members: tuple[Kept | Window, ...], num_tokens: int, *, is_causal: bool) -> int:
    if len(members) == 1:
        return members[0].count_pairs(num_tokens, is_causal=is_causal)
    kept = [branch for branch in members if isinstance(branch, Kept)]
    window = next((branch for branch in members if isinstance(branch, Window)), Window(num_tokens))
    rows = window.rows(lcm(*(branch.rate for branch in kept)))  # kept tokens of a cell are so far apart
    blocks = each_block([branch.length for branch in kept], num_tokens)
    return sum(times * sum_exact(count_common(kept, tokens), rows, is_causal=is_causal) for tokens, times in blocks)
