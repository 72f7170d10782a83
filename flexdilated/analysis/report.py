"""All counts of a pattern in one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from flexdilated.analysis.coverage import count_uncovered, layers_to_cover, missing_residues
from flexdilated.analysis.lattice import checked
from flexdilated.analysis.pairs import Balance, count_multiplicities, count_pairs
from flexdilated.analysis.reach import longest_reach
from flexdilated.core.integers import at_least_one
from flexdilated.core.keywords import takes_num_kv_heads
from flexdilated.core.pattern import BACKWARD, FORWARD, DilatedPattern

T = TypeVar("T")


@dataclass(frozen=True)
class Analysis:
    """The counts that `analyse` returns. `not_counted` gives the reason why a field is None, by its name.

    >>> analysis = analyse(DilatedPattern.causal(1024, 8), 1024, 8, is_causal=True)
    >>> analysis.total_pairs, analysis.duplicates, analysis.flops(head_dim=64)
    (2007248, 0, 513855488)
    """

    pattern: DilatedPattern
    num_tokens: int
    num_kv_heads: int
    is_causal: bool
    pairs: tuple[tuple[int, ...], ...]  # by branch and head, as `count_pairs`
    dense_pairs: int  # what dense attention scores over all heads
    multiplicities: tuple[dict[int, int], ...] | None  # by head, as `count_multiplicities`
    balance: Balance
    reach: tuple[int, ...]  # by head, as `longest_reach`
    missing_residues: tuple[tuple[int, ...], ...]  # by branch
    uncrossed_boundary: int | None  # as `DilatedPattern.first_uncrossed_boundary`: None for a connected pattern
    uncovered: int | None  # tokens that no head of any branch keeps
    layers: int | None  # as `layers_to_cover`: None is never, or not counted
    not_counted: dict[str, str]

    @property
    def total_pairs(self) -> int:
        """Over all branches and heads, as `DilatedPattern.count_pairs` counts."""
        return sum(map(sum, self.pairs))

    @property
    def distinct_pairs(self) -> int | None:
        """Over all heads, a pair that several branches join counted once."""
        return None if self.multiplicities is None else sum(sum(head.values()) for head in self.multiplicities)

    @property
    def duplicates(self) -> int | None:
        """Over all heads, what `total_pairs` counts more than once."""
        return None if self.distinct_pairs is None else self.total_pairs - self.distinct_pairs

    def flops(self, head_dim: int, *, with_backward: bool = False) -> int:
        """Floating-point operations over all heads: `4 * head_dim` per pair forward, `10 * head_dim` more backward.

        Two products of matrices forward and five backward, as FlashAttention counts them, without softmax, packing and merging.
        Under grouped-query attention multiply by the query heads of a group.
        """
        return (FORWARD + BACKWARD if with_backward else FORWARD) * at_least_one("head_dim", head_dim) * self.total_pairs


@takes_num_kv_heads
def analyse(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, *, is_causal: bool = False) -> Analysis:
    """Pairs, duplicates, balance, reach and coverage of a pattern at a length, in integers.

    >>> analysis = analyse(DilatedPattern.causal(4096, 8), 4096, 8)
    >>> analysis.layers, analysis.uncovered, analysis.dense_pairs // analysis.total_pairs
    (2, 0, 5)

    In closed form: seconds for a thousand million tokens of LongNet's pattern. A count that needs too many steps is None, and
    `not_counted` says why. For arguments and errors see `count_pairs`.
    """
    num_tokens, num_kv_heads = checked(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    pairs = count_pairs(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    totals = [sum(column) for column in zip(*pairs)]  # by head
    not_counted: dict[str, str] = {}

    def counted(name: str, count: Callable[..., T], **options: bool) -> T | None:
        try:
            return count(pattern, num_tokens, num_kv_heads, **options)
        except NotImplementedError as error:
            not_counted[name] = str(error)
            return None

    return Analysis(
        pattern=pattern,
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        is_causal=is_causal,
        pairs=pairs,
        dense_pairs=num_kv_heads * (num_tokens * (num_tokens + 1) // 2 if is_causal else num_tokens**2),
        multiplicities=counted("multiplicities", count_multiplicities, is_causal=is_causal),
        balance=Balance(min(totals), max(totals), sum(totals) / len(totals)),
        reach=longest_reach(pattern, num_tokens, num_kv_heads),
        missing_residues=missing_residues(pattern, num_kv_heads),
        uncrossed_boundary=pattern.first_uncrossed_boundary(num_tokens, num_kv_heads),
        uncovered=counted("uncovered", count_uncovered),
        layers=counted("layers", layers_to_cover, is_causal=is_causal),
        not_counted=not_counted,
    )
