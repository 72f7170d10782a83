"""The number of (query, key) pairs that each branch and head scores, and of pairs scored more than once."""

from __future__ import annotations

from functools import lru_cache
from math import comb, lcm
from operator import mul
from typing import NamedTuple

import numpy as np

from flexdilated.analysis.lattice import checked, count_common, each_block, group_heads
from flexdilated.core.branch import Kept, Near
from flexdilated.core.keywords import takes_num_kv_heads
from flexdilated.core.pattern import DilatedPattern

MAX_BRANCHES = 12  # of one head: each set of them is counted


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


@takes_num_kv_heads
def count_pairs(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, *, is_causal: bool = False
) -> tuple[tuple[int, ...], ...]:
    """The number of (query, key) pairs that each branch scores for each head; a pair that counts m times is in m of the counts.

    >>> count_pairs(DilatedPattern((8, 16), (1, 4)), 16, 4)
    ((128, 128, 128, 128), (16, 16, 16, 16))

    The sum is `pattern.count_pairs(...)`. A head that does not run a branch has 0 there. Zero keys are not counted.

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N; in closed form, of any size.
        num_kv_heads: Key/value heads, which may be fewer than query heads.
        is_causal: Whether a query sees only keys at its own position and before.

    Returns:
        One tuple per branch, one integer per head in it.

    Raises:
        ValueError: If a number is below 1, or some branch would have no head.
        TypeError: If an argument has the wrong type.
    """
    num_tokens, num_kv_heads = checked(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    counts = []
    segments, near = pattern.split("count_pairs")
    for branch, (length, rate) in enumerate(segments):
        row = [0] * num_kv_heads
        for offset, start, step, heads in pattern.head_runs(branch, num_kv_heads):
            pairs = Kept(length, rate, offset).count_pairs(num_tokens, is_causal=is_causal, near=near)
            row[start : start + step * heads : step] = [pairs] * heads
        counts.append(tuple(row))
    near_pairs = near.count_pairs(num_tokens, is_causal=is_causal)
    global_pairs = near._replace(window=0).count_pairs(num_tokens, is_causal=is_causal)
    counts += [(near_pairs - global_pairs,) * num_kv_heads] * (near.window > 0)
    counts += [(global_pairs,) * num_kv_heads] * (near.global_tokens > 0)
    return tuple(counts)


@takes_num_kv_heads
def count_multiplicities(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, *, is_causal: bool = False
) -> tuple[dict[int, int], ...]:
    """By head, the number of different (query, key) pairs that count exactly m times, `{m: pairs}`, for each m that occurs.

    >>> count_multiplicities(DilatedPattern((8, 16), (1, 2)), 16, 2)
    ({1: 128, 2: 32}, {1: 128, 2: 32})

    A pair counts once for each branch of segments that joins it, and a pair of the window or the global tokens once:
    `sum(m * pairs)` is scored, and a mask over the sequence would score `sum(pairs)`. The pairs of each set of branches are counted
    by the Chinese remainder theorem, so the time does not grow with N, but with the number of segments until their boundaries
    repeat. For arguments and errors see `count_pairs`.

    Raises:
        NotImplementedError: If a head runs more than 12 branches, or rates have a least common multiple of 2**62 or more.
    """
    num_tokens, num_kv_heads = checked(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    counts_by_head: list[dict[int, int]] = [{}] * num_kv_heads
    near = pattern.split("count_multiplicities")[1]
    for clipped, heads in group_heads(pattern, num_tokens, num_kv_heads).items():
        if len(clipped) > MAX_BRANCHES:
            raise NotImplementedError(
                f"pattern must have at most {MAX_BRANCHES} branches per head to count the pairs that they share, got {len(clipped)}"
            )
        counts = _multiplicities(clipped, near, num_tokens, is_causal=is_causal)
        for head in heads:
            counts_by_head[head] = counts
    return tuple(dict(head_counts) for head_counts in counts_by_head)


def _multiplicities(branches: tuple[Kept, ...], near: Near, num_tokens: int, *, is_causal: bool) -> dict[int, int]:
    """`count_multiplicities` of one head. A pair that m branches join is in `comb(m, n)` of the sets of n branches."""
    by_size = [0] * (len(branches) + 1)  # far pairs that all branches of a set join, summed over the sets of a size

    def add(subset: tuple[Kept, ...], further: tuple[Kept, ...]) -> None:
        for i, branch in enumerate(further, start=1):
            if pairs := _joined_by_all((*subset, branch), near, num_tokens, is_causal=is_causal):
                by_size[len(subset) + 1] += pairs
                add((*subset, branch), further[i:])

    add((), branches)
    sizes = range(len(by_size))
    counts = {m: sum((-1) ** (n - m) * comb(n, m) * by_size[n] for n in sizes[m:]) for m in sizes[1:]}
    counts[1] = counts.get(1, 0) + near.count_pairs(num_tokens, is_causal=is_causal)
    return {m: pairs for m, pairs in counts.items() if pairs}


@lru_cache(maxsize=4096)  # heads share sets of branches
def _joined_by_all(branches: tuple[Kept, ...], near: Near, num_tokens: int, *, is_causal: bool) -> int:
    """The number of pairs that all branches join, without near ones."""
    apart = near.far_rows(lcm(*(branch.rate for branch in branches)))  # kept tokens of a cell are so far apart

    def far(rows: int) -> int:
        distant = max(0, rows - apart)
        return distant * (distant + 1) // 2 if is_causal else rows * rows if apart == 0 else distant * (distant + 1)

    lengths, num_global, total = [branch.length for branch in branches], min(near.global_tokens, num_tokens), 0
    for size, repeats in each_block(lengths, num_tokens):
        counts, times = np.unique(count_common(branches, size), return_counts=True)
        total += repeats * sum(map(mul, map(far, counts.tolist()), times.tolist()))
    if num_global:  # in cells with global tokens, count the other tokens only
        skipped = count_common(branches, num_global).tolist()
        cell_rows = count_common(branches, min(-(-num_global // lcm(*lengths)) * lcm(*lengths), num_tokens)).tolist()
        total += sum(far(rows - few) - far(rows) for rows, few in zip(cell_rows, skipped))
    return total
