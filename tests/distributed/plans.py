"""Random plans, and what the definition says of them, token by token."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import hypothesis.strategies as st

from flexdilated import DilatedPattern
from flexdilated.distributed.planner.plan import KINDS, ContextPlan, context_plan
from flexdilated.reference import _rows
from tests.cases import least_heads, unshifted
from tests.distributed.cases import executors

MILLION = 1 << 20


class Softmax(NamedTuple):
    """One query of one branch and head: its keys are tokens and a number of zeros."""

    branch: int
    head: int  # of those held
    query: int
    keys: tuple[int, ...]
    zeros: int


@dataclass(frozen=True)
class Segment:
    """A segment of one branch, in the eyes of one head."""

    head: int
    tokens: range
    softmaxes: tuple[Softmax, ...]


def segments_of(plan: ContextPlan, branch: int) -> Iterator[Segment]:
    pattern = plan.pattern
    rate = pattern.dilation_rates[branch]
    for head in pattern.head_range(branch, plan.num_kv_heads):
        if head not in plan.within:
            continue
        offset = pattern.offset(branch, head, plan.num_kv_heads)
        for start, num_tokens in plan.documents:
            if not num_tokens:
                continue
            source, size = _rows(pattern, pattern.split("the test of plans")[0][branch], num_tokens)
            for first in range(0, len(source), size):
                rows = range(first, min(first + size, len(source)))
                kept = [p for p in rows if (p % size) % rate == offset]
                found = []
                for p in kept:
                    if source[p] < 0:  # a row of zeros: nobody reads its output
                        continue
                    seen = [source[j] for j in kept if j <= p or not plan.is_causal]
                    keys = tuple(start + token for token in seen if token >= 0)
                    found.append(Softmax(branch, head - plan.within.start, start + p, keys, seen.count(-1)))
                tokens = range(start + first, start + min(rows.stop, num_tokens))
                yield Segment(head - plan.within.start, tokens, tuple(found))


@lru_cache(maxsize=4)
def definition(plan: ContextPlan) -> tuple[tuple[Segment, ...], ...]:
    return tuple(tuple(segments_of(plan, branch)) for branch in range(len(plan.pattern.branches)))


def owner(plan: ContextPlan, token: int) -> int:
    end = 0
    for rank, length in enumerate(plan.shard_lengths):
        end += length
        if token < end:
            return rank
    raise AssertionError(f"token {token} of {end}")


def is_cut(plan: ContextPlan, segment: Segment) -> bool:
    return len(segment.tokens) > 0 and owner(plan, segment.tokens[0]) != owner(plan, segment.tokens[-1])


def placed(plan: ContextPlan, exchange: str) -> Iterator[tuple[int, Softmax]]:
    """Every softmax with the rank that computes it: its output's, but for the segments whose heads are dealt to ranks."""
    for branch, segments in enumerate(definition(plan)):
        turn: Counter[int] = Counter()
        for segment in segments:
            parts: list[tuple[int, int, int]] = []
            if is_cut(plan, segment):
                parts = executors(plan, branch, segment.head)[turn[segment.head]] if exchange == "heads" else []
                turn[segment.head] += 1
            for softmax in segment.softmaxes:
                slot = softmax.query - segment.tokens.start
                takers = [rank for rank, low, high in parts if low <= slot < high]
                assert len(takers) == (len(parts) > 0)
                yield takers[0] if takers else owner(plan, softmax.query), softmax
        assert all((plan.all_segments.branch == branch).sum() == count for count in turn.values())


Rows = dict[tuple[int, int], set[tuple[int, int]]]  # (receiver, sender): (head, token)


def expected_rows(plan: ContextPlan, exchange: str) -> dict[str, Rows]:
    """What travels, by kind: every row that a computation needs and its rank does not hold, once."""
    moved: dict[str, Rows] = {kind: {} for kind in KINDS}
    for rank, softmax in placed(plan, exchange):
        for key in softmax.keys:
            if owner(plan, key) != rank:
                moved["kv"].setdefault((rank, owner(plan, key)), set()).add((softmax.head, key))
        if owner(plan, softmax.query) != rank:
            moved["q"].setdefault((rank, owner(plan, softmax.query)), set()).add((softmax.head, softmax.query))
    return moved


def documents_of(num_tokens: int, most: int) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """With so many borders at most; repeats are empty documents."""
    inner = st.lists(st.integers(0, num_tokens), max_size=most)
    return inner.map(lambda found: tuple((a, b - a) for a, b in pairwise((0, *sorted(found), num_tokens))))


@st.composite
def plans(draw: st.DrawFn) -> ContextPlan:
    """Up to 203 tokens on 1 to 7 ranks, every rule with every other."""
    wide = draw(st.booleans())  # segments of several ranks and several heads: some are taken whole
    lengths = draw(st.lists(st.integers(31 if wide else 1, 67), min_size=1, max_size=3))
    pattern = DilatedPattern(
        tuple(lengths),
        tuple(draw(st.integers(1, min(length, 11))) for length in lengths),
        heads=draw(st.sampled_from(("all", "grouped"))),
        offsets=draw(st.sampled_from(("blocked", "interleaved"))),
        zero_padding=draw(st.booleans()),
        detach_weights=draw(st.booleans()),
    )
    shards = tuple(draw(st.lists(st.integers(0, 17 if wide else 29), min_size=5 if wide else 1, max_size=7)))
    documents = draw(documents_of(sum(shards), 1 if wide else 4))
    num_kv_heads = draw(st.integers(max(4 if wide else 1, least_heads(pattern)), 6))
    held = draw(st.integers(3 if wide else 1, num_kv_heads))
    first = draw(st.integers(0, num_kv_heads - held))
    return context_plan(
        unshifted(pattern),
        shards,
        num_kv_heads,
        range(first, first + held),
        draw(st.integers(1, 3)),
        documents,
        draw(st.booleans()),
    )


@st.composite
def wild_plans(draw: st.DrawFn) -> ContextPlan:
    """Many branches of rates that do not divide their segments, and tiny segments that drift over several ranks."""
    branches = draw(st.integers(4, 8))
    lengths = [draw(st.sampled_from((2, 3, 5, 7, 11, 13, 29, 41, 67, 97))) for _ in range(branches)]
    pattern = DilatedPattern(
        tuple(lengths),
        tuple(draw(st.integers(1, length)) for length in lengths),
        heads=draw(st.sampled_from(("all", "all", "grouped"))),
        offsets=draw(st.sampled_from(("blocked", "interleaved"))),
        zero_padding=draw(st.sampled_from((True, True, False))),
    )
    shards = tuple(draw(st.lists(st.sampled_from((0, 1, 2, 3, 13, 19, 23)), min_size=2, max_size=7)))
    documents = draw(documents_of(sum(shards), 3))
    num_kv_heads = max(draw(st.sampled_from((1, 3, 7, 67))), least_heads(pattern))  # 67: more than a word of bits
    first = draw(st.integers(0, min(2, num_kv_heads - 1)))
    return context_plan(
        unshifted(pattern),
        shards,
        num_kv_heads,
        range(first, num_kv_heads),
        draw(st.integers(1, 2)),
        documents,
        draw(st.booleans()),
    )


def even(num_tokens: int, num_ranks: int) -> tuple[int, ...]:
    return tuple(num_tokens * (i + 1) // num_ranks - num_tokens * i // num_ranks for i in range(num_ranks))


def plan_of(pattern: DilatedPattern, num_tokens: int, num_ranks: int, num_kv_heads: int, *, is_causal: bool = False) -> ContextPlan:
    document = ((0, num_tokens),)
    return context_plan(pattern, even(num_tokens, num_ranks), num_kv_heads, range(num_kv_heads), 1, document, is_causal)
