"""Patterns that meet named goals under a budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, get_args

from flexdilated.analysis.coverage import count_uncovered, layers_to_cover, missing_residues
from flexdilated.analysis.family import family
from flexdilated.analysis.lattice import checked, checked_documents
from flexdilated.analysis.pairs import balance_of, count_pairs
from flexdilated.analysis.ranks import DTYPES, count_rank_costs
from flexdilated.core.pattern import Branch, DilatedPattern, at_least_one

Goal = Literal["reach", "cover", "balance"]
Measure = Literal["pairs", "memory", "traffic"]
GOALS: tuple[Goal, ...] = get_args(Goal)
MEASURES: tuple[Measure, ...] = get_args(Measure)

T = TypeVar("T")

MOST_IMBALANCE = 1.05
MOST_TOKENS, MOST_HEADS, MOST_RANKS = 2**40, 1024, 64
MEANING = {
    "reach": "every token sees every other",
    "cover": "every branch keeps every row in some head",
    "balance": f"no head scores more than {MOST_IMBALANCE} times the mean",
}
TRAFFIC_SHARE = 10  # of what dense attention receives, the budget of who gives none
UNITS = {"pairs": "pairs", "memory": "bytes of memory per rank", "traffic": "bytes received per rank"}


@dataclass(frozen=True)
class Choice:
    """One pattern, its numbers, and why it is shown."""

    pattern: DilatedPattern
    cost: int  # in the measure of the budget
    pairs: int  # over all heads
    layers: int | None  # after which every token has seen every other; None is never, or not counted
    span: int  # the longest segment, in tokens
    window: int  # the longest undilated segment, in tokens; 0 if there is none
    uncovered: int | None  # tokens that no head of any branch keeps; None is not counted
    partial: tuple[Branch, ...]  # branches of which no head keeps some of the residues
    imbalance: float  # pairs of the busiest head over the mean
    unmet: tuple[Goal, ...]
    within_budget: bool
    is_given: bool  # by the caller
    why: str = ""


@dataclass(frozen=True)
class Choices:
    """What `choose_pattern` found."""

    num_tokens: int
    document_lengths: tuple[int, ...]  # of one, or of packed documents
    num_heads: int
    is_causal: bool
    budget: int
    budget_of: str | None  # whose cost the budget is; None is the caller's
    measure: Measure
    dense_pairs: int  # of dense attention, over all heads
    goals: tuple[Goal, ...]
    shown: tuple[Choice, ...]  # best first; patterns of the caller at their place
    # Hundreds: all that meet the goals, within the budget or not, for the trade-off; where none is, what misses "cover" alone too.
    tried: tuple[Choice, ...] = field(repr=False)


def choose_pattern(
    num_tokens: int,
    num_heads: int,
    *,
    budget: int | None = None,
    measure: Measure = "pairs",
    goals: Iterable[Goal] | None = None,
    layers: int | None = None,
    is_causal: bool = False,
    document_lengths: Iterable[int] | None = None,
    num_ranks: int = 1,
    head_dim: int = 64,
    dtype: str = "bfloat16",
    patterns: Iterable[DilatedPattern] = (),
    most: int = 5,
) -> Choices:
    """Patterns that meet named goals under a budget, each with the reason why it is shown. Counts alone: nothing about quality.

    Tried are patterns whose segments grow by one factor from an undilated one, with rates that grow by another, up to five
    branches, `heads="all"`, blocked offsets: powers of two, and the number of heads with segments that it divides. What scores as
    many pairs as dense attention is left out, and a lone window under a causal mask, beyond which nothing is ever seen, but where
    nothing else is left. Better is: fewer layers until every token has seen every other, then a longer span (the longest segment),
    then a longer undilated segment, then a lower cost. Shown are the best of each number of layers and span, and the cheapest.
    Where nothing meets the goals within the budget, what comes nearest to it is shown, and behind it what misses `"cover"` alone.

    Args:
        num_tokens: Sequence length N, up to 2**40.
        num_heads: Heads H, up to 1024. Under grouped-query attention these are key/value heads.
        budget: The most that one layer may cost, in the unit of `measure`. Default: of pairs those of LongNet's published pattern,
            or of dense attention where these are fewer; the memory of dense attention; a tenth of its traffic.
        measure: `"pairs"`: (query, key) pairs over all heads, forward. `"memory"`: bytes on the rank that needs most.
            `"traffic"`: bytes that the busiest rank receives, forward and backward, under the exchange that `"auto"` takes.
        goals: Of `"reach"` (every token sees every other, in the longest document, in at most `layers` layers), `"cover"` (every
            branch keeps every row in some head: no residue is left out by all heads) and `"balance"` (no head scores more than
            1.05 times the mean). Default: all; if causal all but `"reach"`.
        layers: The most layers for `"reach"`. Default: any number.
        is_causal: Whether a query sees only keys at its own position and before.
        document_lengths: Tokens of packed documents in their order, `num_tokens` in all, as attention with `cu_seqlens` takes them:
            costs are counted over all of them, and over dense attention inside each; layers, span and window are those of the
            longest. Seconds for a thousand different ones. Default: one document.
        num_ranks: Ranks that share the sequence, up to 64, for `"memory"` and `"traffic"`.
        head_dim: Elements per head, up to 4096, likewise.
        dtype: Of q, k and v, likewise.
        patterns: Your own, which are placed among the others whether they meet the goals or not.
        most: How many to show, besides your own.

    Raises:
        ValueError: If a number is below 1, a goal or measure is unknown, `layers` comes without its goal, documents do not add up
            to N, or `"reach"` is asked of causal attention: of what is tried only dense attention meets it, since segments nest.
        TypeError: If an argument has the wrong type.
    """
    num_tokens, num_heads = checked(DilatedPattern((1,), (1,)), num_tokens, num_heads, is_causal=is_causal)
    documents = checked_documents(num_tokens, document_lengths)
    longest = max(documents)
    given = _several("patterns", patterns)
    for pattern in given:
        checked(pattern, num_tokens, num_heads)
    num_ranks, head_dim, most = (
        at_least_one(name, value) for name, value in (("num_ranks", num_ranks), ("head_dim", head_dim), ("most", most))
    )
    budget = None if budget is None else at_least_one("budget", budget)
    layers = None if layers is None else at_least_one("layers", layers)
    if num_tokens > MOST_TOKENS:
        raise ValueError(f"num_tokens must be at most 2**40, got {num_tokens}")
    for name, value, limit in (("num_heads", num_heads, MOST_HEADS), ("num_ranks", num_ranks, MOST_RANKS)):
        if value > limit:
            raise ValueError(f"{name} must be at most {limit}, got {value}; more take minutes")
    asked = _several("goals", goals) if goals is not None else GOALS[is_causal:]
    for goal in asked:
        if goal not in GOALS:
            raise ValueError(f"goals must be among {GOALS}, got {goal!r}")
    asked = tuple(dict.fromkeys(asked))
    if is_causal and "reach" in asked:
        raise ValueError(
            f"goals must not hold 'reach' with is_causal=True, got {asked}; leave it out: segments of what is tried "
            "nest, and a token behind a border of all never meets the one before it; a pattern of yours is told its layers"
        )
    if layers is not None and "reach" not in asked:
        raise ValueError(f"layers must come with the goal 'reach', got {layers} with goals={asked}")
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {MEASURES}, got {measure!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype!r}")

    def pairs(pattern: DilatedPattern) -> int:
        return sum(map(sum, count_pairs(pattern, num_tokens, num_heads, is_causal=is_causal, document_lengths=documents)))

    def cost(pattern: DilatedPattern) -> int:
        if measure == "pairs":
            return pairs(pattern)
        options = {"head_dim": head_dim, "dtype": dtype, "is_causal": is_causal, "document_lengths": documents}
        ways = count_rank_costs(pattern, num_tokens, num_heads, num_ranks, **options).values()  # type: ignore[arg-type]
        (way,) = (way for way in ways if way.is_chosen)
        return way.memory_bytes if measure == "memory" else way.both_bytes

    budget, budget_of = (budget, None) if budget is not None else _default_budget(cost, longest, measure)

    def judged(pattern: DilatedPattern) -> Choice:
        found = _judged(pattern, documents, num_heads, is_causal=is_causal)
        return replace(found, unmet=_unmet(found, asked, layers))

    def paid(found: Choice) -> Choice:
        spent = found.pairs if measure == "pairs" else cost(found.pattern)
        return replace(found, cost=spent, within_budget=spent <= budget)

    dense_pairs = pairs(DilatedPattern((longest,), (1,)))
    known = [judged(pattern) for pattern in family(longest, num_heads) if pattern not in given]
    known = [each for each in known if each.pairs < dense_pairs] or known
    if is_causal:
        known = [each for each in known if len(each.pattern.branches) > 1] or known
    meeting = sorted((paid(each) for each in known if not each.unmet), key=_order)
    if not any(each.within_budget for each in meeting):
        meeting = sorted([*meeting, *(paid(each) for each in known if each.unmet == ("cover",))], key=_order)
    shown = _shown(meeting, budget, measure, most, is_causal)
    mine = [replace(paid(judged(pattern)), is_given=True) for pattern in given]
    shown += [_placed(each, [other for other in meeting if not other.unmet], budget, measure, is_causal) for each in mine]
    ordered = tuple(sorted(shown, key=lambda each: (bool(each.unmet), not each.within_budget, *_order(each))))
    tried = tuple(meeting)
    return Choices(num_tokens, documents, num_heads, is_causal, budget, budget_of, measure, dense_pairs, asked, ordered, tried)


def _several(name: str, values: Iterable[T]) -> tuple[T, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence, got {values!r}; put one in a tuple")
    return tuple(values)


def _default_budget(cost: Callable[[DilatedPattern], int], longest: int, measure: Measure) -> tuple[int, str]:
    """What one layer may cost if nobody says, and whose cost that is."""
    dense = cost(DilatedPattern((longest,), (1,)))
    if measure == "memory":
        return dense, "as dense attention"
    if measure == "traffic":
        return max(1, dense // TRAFFIC_SHARE), "a tenth of dense attention's"
    published = cost(DilatedPattern.longnet())
    return (published, "as LongNet's published pattern") if published <= dense else (dense, "as dense attention")


def _judged(pattern: DilatedPattern, documents: tuple[int, ...], num_heads: int, *, is_causal: bool) -> Choice:
    """What is known without its cost."""
    longest = max(documents)
    try:
        layers = layers_to_cover(pattern, longest, num_heads, is_causal=is_causal)
    except NotImplementedError:
        layers = None
    window = max((min(length, longest) for length, rate in pattern.branches if rate == 1), default=0)
    counts = count_pairs(pattern, sum(documents), num_heads, is_causal=is_causal, document_lengths=documents)
    pairs, imbalance = sum(map(sum, counts)), balance_of(counts).imbalance
    span = min(max(pattern.segment_lengths), longest)
    missing = missing_residues(pattern, num_heads)
    uncovered = 0 if not all(missing) else _uncovered(pattern, documents, num_heads)
    # A residue that the sequence is too short for is no loss.
    partial = tuple(branch for branch, residues in zip(pattern.branches, missing) if any(r < longest for r in residues))
    return Choice(pattern, 0, pairs, layers, span, window, uncovered, partial, imbalance, (), False, False)


def _uncovered(pattern: DilatedPattern, documents: tuple[int, ...], num_heads: int) -> int | None:
    try:
        return sum(times * count_uncovered(pattern, tokens, num_heads) for tokens, times in Counter(documents).items() if tokens)
    except NotImplementedError:
        return None


def _unmet(found: Choice, goals: tuple[Goal, ...], layers: int | None) -> tuple[Goal, ...]:
    is_met = {
        "reach": found.layers is not None and (layers is None or found.layers <= layers),
        "cover": not found.partial,
        "balance": found.imbalance <= MOST_IMBALANCE,
    }
    return tuple(goal for goal in goals if not is_met[goal])


def _order(each: Choice) -> tuple[float, int, int, int, int]:
    """Better comes first."""
    layers = math.inf if each.layers is None else each.layers
    return (layers, -each.span, -each.window, each.cost, len(each.pattern.branches))


def _shown(meeting: list[Choice], budget: int, measure: Measure, most: int, is_causal: bool) -> list[Choice]:
    """The best of each number of layers and span, then the cheapest."""
    fitting = [each for each in meeting if each.within_budget]
    nearest: list[Choice] = []
    if not any(not each.unmet for each in fitting):
        over = [each for each in meeting if not each.unmet]
        for each in sorted(over, key=lambda each: each.cost)[:1]:
            times = f"{_times(each.cost / budget)} the budget"
            nearest = [replace(each, why=f"None meets the goals within the budget; this one comes nearest, at {times}.")]
    shown: list[Choice] = []
    for each in fitting:
        if not any((other.layers, other.span) == (each.layers, each.span) for other in shown):
            layers, window = _layers(each, is_causal), f"{each.window:,} tokens"
            why = f"{layers} Of such patterns within the budget it has the longest undilated segment, {window}"
            shown.append(replace(each, why=f"{why}, for {100 * each.cost / budget:.3g} % of the budget.{_left_out(each)}"))
    places = most - len(nearest)
    cheapest = min(fitting, key=lambda each: (each.cost, *_order(each)), default=None)
    shown = shown[: max(places - 1, places == 1)]
    if cheapest is not None and places > 1 and all(each.pattern != cheapest.pattern for each in shown):
        goals = "The cheapest that misses cover alone" if cheapest.unmet else "The cheapest that meets the goals"
        share = f"{100 * cheapest.cost / budget:.3g} % of the budget"
        shown.append(replace(cheapest, why=f"{goals}: {cheapest.cost:,} {UNITS[measure]}, {share}.{_left_out(cheapest)}"))
    return [*nearest, *shown]


def _left_out(each: Choice) -> str:
    """Which rates are more than the heads can keep."""
    if not each.partial:
        return ""
    rates = ", ".join(str(branch.dilation_rate) for branch in each.partial)
    several = len(each.partial) > 1
    return f" At rate{'s' * several} {rates} no head keeps some of the rows of {'those branches' if several else 'that branch'}."


def _placed(mine: Choice, meeting: list[Choice], budget: int, measure: Measure, is_causal: bool) -> Choice:
    """What is to be said of the caller's own pattern."""
    if mine.unmet:
        why = "Yours. It misses: " + ", ".join(f"{goal} ({MEANING[goal]})" for goal in mine.unmet) + "."
    elif not mine.within_budget:
        why = f"Yours. It meets the goals at {_times(mine.cost / budget)} the budget."
    else:
        before = sum(each.within_budget and _order(each) < _order(mine) for each in meeting)
        why = (
            f"Yours. It meets the goals for {100 * mine.cost / budget:.3g} % of the budget; {before} of those tried come before it."
        )
        if is_causal and mine.layers is not None:  # what those tried never do
            why += f" {_layers(mine, is_causal)}"
    alike = [
        each
        for each in meeting
        if each.layers == mine.layers and each.span >= mine.span and each.window >= mine.window and each.cost < mine.cost
    ]
    if alike and not mine.unmet:
        cheapest = min(alike, key=lambda each: each.cost)
        lengths, rates = (", ".join(map(str, x)) for x in (cheapest.pattern.segment_lengths, cheapest.pattern.dilation_rates))
        saved = f"{100 * cheapest.cost / mine.cost:.3g} % of its {UNITS[measure]}"
        why += f" As many layers, as long a span and as long an undilated segment for {saved}: lengths {lengths} at rates {rates}."
    return replace(mine, why=why)


def _layers(each: Choice, is_causal: bool) -> str:
    if each.layers is None:
        return f"Segments of up to {each.span:,} tokens."
    return (
        f"Every token has seen every {'earlier one' if is_causal else 'other'} after {each.layers} layer{'s' * (each.layers != 1)}."
    )


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times"
