"""Patterns under a budget: a local branch or a window, and far branches that carry information over the whole sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from flexdilated.analysis.coverage import layers_to_cover
from flexdilated.analysis.lattice import checked
from flexdilated.core.branch import Kept
from flexdilated.core.checks import is_number
from flexdilated.core.description import describe, reads
from flexdilated.core.integers import at_least_one
from flexdilated.core.keywords import takes_num_kv_heads
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.presets import FIRST_TOKENS, rounded_up

MOST_TOKENS, MOST_HEADS = 2**40, 1024
SHORTEST = 16  # tokens of a local segment
USEFUL_LOCAL = 256  # tokens of a local segment that reads a paragraph
LITTLE_GAIN = 0.25  # of the pairs of dense attention


@dataclass(frozen=True)
class Choice:
    """One pattern, its cost, and one sentence about it.

    >>> choice = choose_pattern(4096, 8, budget=0.05).shown[0]
    >>> choice.pairs, round(choice.share, 3), choice.is_within_budget
    (6165440, 0.046, True)
    """

    pattern: DilatedPattern
    pairs: int  # over all heads
    share: float  # of the pairs of dense attention
    is_within_budget: bool
    is_given: bool  # by the caller
    why: str

    @property
    def local(self) -> int:
        """Tokens of the longest rate-1 segment, 0 without one. A window of w tokens counts as a segment of 2 w tokens."""
        segments, near = self.pattern.split("choose_pattern")
        return max([2 * near.window, *(length for length, rate in segments if rate == 1)])


@dataclass(frozen=True)
class Choices:
    """The result of `choose_pattern`.

    >>> [choice.pattern.segment_lengths for choice in choose_pattern(4096, 8, budget=0.05, most=2).shown]
    [(4096,), (128, 4096)]
    """

    num_tokens: int
    num_kv_heads: int
    is_causal: bool
    budget: float  # share of the pairs of dense attention
    shown: tuple[Choice, ...]  # best first, then the caller's patterns
    tried: tuple[Choice, ...] = field(repr=False)  # all proposals, within the budget or not


@takes_num_kv_heads
def choose_pattern(
    num_tokens: int,
    num_kv_heads: int,
    *,
    budget: float = 0.1,
    is_causal: bool = False,
    patterns: Iterable[DilatedPattern] = (),
    most: int = 5,
) -> Choices:
    """Patterns under a budget, best first, with one sentence about each.

    >>> choose_pattern(4096, 8, budget=0.05).shown[0].pattern.branches
    (Segments(segment_length=4096, dilation_rate=8), Window(size=64))

    All proposals are connected (`DilatedPattern.crosses_boundaries`): a local branch or a window and one far branch over the whole
    sequence, or a local branch and two far branches whose boundaries differ. Better is: fewer branches, then a lower far rate, then
    longer local segments, then fewer pairs, as in experiments with small causal models. A window of w tokens costs less than local
    segments of 2 w tokens, which read as many keys on average.

    Args:
        num_tokens: Sequence length N, up to 2**40. For packed documents: the tokens of the longest document.
        num_kv_heads: Key/value heads, up to 1024.
        budget: Pairs of queries and keys that are scored, as a share of the pairs of dense attention, in (0, 1].
        is_causal: Whether a query sees only keys at its own position and before.
        patterns: Your own patterns, shown after the proposals, with the sentences of `DilatedPattern.describe`.
        most: Largest number of proposals to show. Where none is within the budget, the cheapest is shown.

    Raises:
        ValueError: If a number is out of range, or a pattern has more groups of heads than there are heads.
        TypeError: If an argument has the wrong type.
    """
    num_tokens, num_kv_heads = checked(DilatedPattern((1,), (1,)), num_tokens, num_kv_heads, is_causal=is_causal)
    for name, value, limit in (("num_tokens", num_tokens, MOST_TOKENS), ("num_kv_heads", num_kv_heads, MOST_HEADS)):
        if value > limit:
            raise ValueError(f"{name} must be at most {limit}, got {value}")
    if not is_number(budget):
        raise TypeError(f"budget must be a number, got {budget!r}")
    if not 0.0 < budget <= 1.0:
        raise ValueError(f"budget must be in (0, 1], got {budget}; 0.1 or 10% is a tenth of the pairs of dense attention")
    most = at_least_one("most", most)
    if not isinstance(patterns, Iterable):
        raise TypeError(f"patterns must be a sequence, got {patterns!r}; put one in a tuple")
    user_patterns = tuple(patterns)
    for pattern in user_patterns:
        checked(pattern, num_tokens, num_kv_heads)

    def pairs_over(pattern: DilatedPattern) -> int:
        """Pairs of a pattern whose rates divide the number of heads: each residue has as many heads."""
        segments, near = pattern.split("choose_pattern")
        options: dict[str, Any] = {"is_causal": is_causal, "near": near}
        return num_kv_heads * near.count_pairs(num_tokens, is_causal=is_causal) + sum(
            num_kv_heads // rate * sum(Kept(length, rate, offset).count_pairs(num_tokens, **options) for offset in range(rate))
            for length, rate in segments
        )

    dense = pairs_over(DilatedPattern((num_tokens,), (1,)))

    def judged(pattern: DilatedPattern, pairs: int, why: str, *, is_given: bool = False) -> Choice:
        return Choice(pattern, pairs, pairs / dense, pairs <= budget * dense, is_given, why)

    proposals = [
        judged(pattern, pairs_over(pattern), reads(pattern, num_tokens, num_kv_heads, is_causal=is_causal))
        for pattern in _proposals(num_tokens, num_kv_heads, FIRST_TOKENS if is_causal else 0)
    ]
    tried = sorted((choice for choice in proposals if choice.share <= 1.0), key=_order)
    best: dict[tuple[int, ...], Choice] = {}
    for choice in tried:
        if choice.is_within_budget:
            best.setdefault(choice.pattern.dilation_rates, choice)
    shown = [*best.values()][:most] or [min(tried, key=lambda choice: choice.pairs)]
    shown = [replace(choice, why=choice.why + _beyond(choice.pattern, num_tokens, num_kv_heads, is_causal)) for choice in shown]
    if not shown[0].is_within_budget:
        shown[0] = replace(shown[0], why=f"{shown[0].why} It is the cheapest: budget={rounded_up(shown[0].share):g} would do.")
    if all(max(choice.pattern.segment_lengths) < num_tokens for choice in shown):
        share = min(choice.share for choice in tried if max(choice.pattern.segment_lengths) >= num_tokens)
        shown[0] = replace(shown[0], why=f"{shown[0].why} A branch over the whole sequence fits budget={rounded_up(share):g}.")
    for pattern in user_patterns:
        pairs = pattern.count_pairs(num_tokens, num_kv_heads, is_causal=is_causal)
        _, *sentences = describe(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
        shown.append(judged(pattern, pairs, " ".join(sentences), is_given=True))
    return Choices(num_tokens, num_kv_heads, is_causal, float(budget), tuple(shown), tuple(tried))


def few_heads(choices: Choices) -> str | None:
    """One sentence where there are too few key/value heads for much to be gained at this length, else None.

    H heads have at most H different offsets, so a far branch over all tokens scores at least `1 / H**2` of the pairs of dense
    attention. Much is gained where such a branch and a local segment of `USEFUL_LOCAL` tokens are within the budget.
    """
    num_tokens, heads, budget = choices.num_tokens, choices.num_kv_heads, choices.budget
    with_far = [choice for choice in choices.tried if choice.is_within_budget and _num_parts(choice.pattern) == 2]
    patterns = (DilatedPattern.causal(num_tokens, heads), DilatedPattern((num_tokens,), (1,)))
    pairs, dense = (pattern.count_pairs(num_tokens, heads, is_causal=choices.is_causal) for pattern in patterns)
    share = pairs / dense
    if share <= LITTLE_GAIN or any(choice.local >= USEFUL_LOCAL for choice in with_far):
        return None
    least, far = 1 / heads**2, f"a local segment of {USEFUL_LOCAL} tokens and a far branch over all tokens"
    predicate = f"need at least {100 * least:.3g} % of the pairs at any length, more than the budget"
    if budget > least:
        predicate = f"are within the budget from about {float(f'{USEFUL_LOCAL / (budget - least):.2g}'):,.0f} tokens on"
    return (
        f"few key/value heads ({heads}): little is gained at {num_tokens:,} tokens. DilatedPattern.causal({num_tokens}, {heads}), "
        f"the preset for causal models, takes {100 * share:.0f} % of the pairs; {far} {predicate}."
    )


def _num_parts(pattern: DilatedPattern) -> int:
    """Branches of segments, and one more for a window."""
    return len(pattern.segment_lengths) + (pattern.window is not None)


def _order(choice: Choice) -> tuple[int, int, int, int]:
    """Better comes first."""
    return (_num_parts(choice.pattern), max(choice.pattern.dilation_rates), -choice.local, choice.pairs)


def _beyond(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, is_causal: bool) -> str:
    """A sentence for patterns without a segment as long as the sequence: after how many layers a token has seen all tokens."""
    if max(pattern.segment_lengths) >= num_tokens:
        return ""
    try:
        layers = layers_to_cover(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    except NotImplementedError:  # too many tokens or segments to look at
        return " No segment is as long as the sequence: it takes several layers to see far tokens."
    but = "" if layers else f", except perhaps some of the {2 * max(pattern.dilation_rates) - 2} tokens just before it"
    tokens = "all earlier tokens" if is_causal else "all tokens"
    return f" No segment is as long as the sequence: a token has seen {tokens} after {layers or 'several'} layers{but}."


def _proposals(num_tokens: int, num_kv_heads: int, global_tokens: int) -> Iterator[DilatedPattern]:
    yield DilatedPattern((num_tokens,), (1,))
    rates = [rate for rate in range(2, num_kv_heads + 1) if num_kv_heads % rate == 0]
    local_lengths = sorted({part << i for part in (1, 3) for i in range(num_tokens.bit_length())})
    for rate in rates:
        for local in local_lengths:
            if not max(SHORTEST, 4 * rate) <= local < num_tokens:
                continue
            yield DilatedPattern((local, num_tokens), (1, rate))
            yield DilatedPattern((num_tokens,), (rate,), window=local // 2, global_tokens=global_tokens)
            parts = max(2, math.isqrt(num_tokens // local) + 1)  # n (n + 1) of them reach the next boundary of all branches
            if (parts + 1) * local < num_tokens:
                yield DilatedPattern((local, parts * local, (parts + 1) * local), (1, rate, rate))
