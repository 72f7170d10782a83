"""Who sees whom, by a look at every pair."""

import hypothesis.strategies as st
import numpy as np
from numpy.typing import NDArray

from flexdilated import DilatedPattern
from tests.cases import least_heads, patterns


@st.composite
def questions(draw: st.DrawFn) -> tuple[DilatedPattern, int, int]:
    """A pattern, tokens and heads; segments that nest as often as not."""
    pattern = draw(st.one_of(patterns(), nested_patterns()))
    return pattern, draw(st.integers(1, 61)), draw(st.integers(least_heads(pattern), 7))


@st.composite
def nested_patterns(draw: st.DrawFn) -> DilatedPattern:
    """Segments that divide one another, in any order; rates that may divide the shortest."""
    length = draw(st.integers(1, 6))
    lengths = [length]
    for _ in range(draw(st.integers(0, 3))):
        lengths.append(lengths[-1] * draw(st.integers(1, 4)))
    rates = [draw(st.sampled_from([r for r in range(1, 7) if r <= each])) for each in lengths]
    order = draw(st.permutations(range(len(lengths))))
    heads, offsets = draw(st.sampled_from(("all", "grouped"))), draw(st.sampled_from(("blocked", "interleaved")))
    return DilatedPattern(tuple(lengths[i] for i in order), tuple(rates[i] for i in order), heads=heads, offsets=offsets)


def joined_by(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, *, is_causal: bool) -> NDArray[np.bool_]:
    """`(branches, H, N, N)`: whether a branch joins a query and a key in a head."""
    found = np.zeros((len(pattern.branches), num_kv_heads, num_tokens, num_tokens), dtype=bool)
    for branch, (length, rate) in enumerate(pattern.branches):
        for head in pattern.head_range(branch, num_kv_heads):
            offset = pattern.offset(branch, head, num_kv_heads)
            kept = [p for p in range(num_tokens) if p % length % rate == offset]
            for q in kept:
                for k in kept:
                    found[branch, head, q, k] = q // length == k // length and not (is_causal and k > q)
    return found


def seen_after(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, layers: int, *, is_causal: bool) -> NDArray[np.bool_]:
    """`(N, N)`: layer by layer, what every query has seen through all heads and its residual."""
    step = joined_by(pattern, num_tokens, num_kv_heads, is_causal=is_causal).any(axis=(0, 1)) | np.eye(num_tokens, dtype=bool)
    seen = np.eye(num_tokens, dtype=bool)
    for _ in range(layers):
        further = np.stack([step[seen[q]].any(axis=0) for q in range(num_tokens)])
        if (further == seen).all():
            break
        seen = further
    return seen
