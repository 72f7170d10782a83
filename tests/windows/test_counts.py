"""Counts, coverage and pictures of patterns with a window, against a look at every pair."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from flexdilated import DilatedPattern, analysis


def random_question(seed: int) -> tuple[DilatedPattern, int, int, bool]:
    """A pattern with a window, tokens, heads, and whether it is causal."""
    rng = random.Random(seed)
    num_tokens = rng.choice((1, 2, 7, 23, 37, 41))
    lengths = [rng.choice((rng.randint(1, 11), rng.randint(5, 43), num_tokens)) for _ in range(rng.randint(0, 3))]
    lengths = [length * 2**i for i, length in enumerate(sorted(lengths))] if rng.random() < 0.3 else lengths
    rates = [rng.choice([rate for rate in (1, 1, 2, 3, 4, 6, length) if rate <= length]) for length in lengths]
    heads, offsets = rng.choice(("all", "grouped")), rng.choice(("blocked", "interleaved"))
    pattern = DilatedPattern(lengths, rates, window=rng.choice((1, 2, 3, 5, 8, 19, 61)), heads=heads, offsets=offsets)  # type: ignore
    return pattern, num_tokens, rng.randint(max(1, len(lengths)), 5), rng.random() < 0.5


def joined_by(pattern: DilatedPattern, num_tokens: int, num_heads: int, *, is_causal: bool) -> NDArray[np.bool_]:
    """`(branches, H, N, N)`: whether a branch joins a query and a key in a head; the window is the last branch."""
    found = np.zeros((len(pattern.segment_lengths) + 1, num_heads, num_tokens, num_tokens), dtype=bool)
    for query in range(num_tokens):
        for key in range(query + 1 if is_causal else num_tokens):
            found[-1, :, query, key] = abs(query - key) < pattern.window  # type: ignore[operator]
            for i, (length, rate) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates)):
                for head in pattern.head_range(i, num_heads):
                    kept = all(p % length % rate == pattern.offset(i, head, num_heads) for p in (query, key))
                    found[i, head, query, key] = kept and query // length == key // length
    return found


@pytest.mark.parametrize("seed", range(120))
def test_counts_equal_a_look_at_every_pair(seed: int) -> None:
    pattern, num_tokens, num_heads, is_causal = random_question(seed)
    joined = joined_by(pattern, num_tokens, num_heads, is_causal=is_causal)
    sizes = pattern, num_tokens, num_heads
    position = np.arange(num_tokens)
    assert analysis.count_pairs(*sizes, is_causal=is_causal) == tuple(tuple(head.sum() for head in branch) for branch in joined)
    assert pattern.count_pairs(num_tokens, num_heads, is_causal=is_causal) == joined.sum()
    times = joined.sum(axis=0)
    counted = analysis.count_multiplicities(*sizes, is_causal=is_causal)
    assert list(counted) == [Counter(head[head > 0].tolist()) for head in times]
    distance = np.where(times > 0, abs(position[:, None] - position), -1)
    assert analysis.longest_reach(*sizes) == tuple(distance.max(axis=(1, 2)).tolist())
    assert analysis.count_uncovered(*sizes) == 0
    assert pattern.first_token_without_head(num_tokens, num_heads) is None
    assert len(analysis.missing_residues(pattern, num_heads)) == len(pattern.branches)

    step, everything = joined.any(axis=(0, 1)), np.tri(num_tokens, dtype=bool) if is_causal else np.ones_like(joined[0, 0])
    seen, layers = [np.eye(num_tokens, dtype=bool)], None
    while layers is None and (len(seen) == 1 or (seen[-1] != seen[-2]).any()):
        layers = len(seen) - 1 if (seen[-1] == everything).all() else None
        seen.append(seen[-1].astype(int) @ step > 0)
    assert analysis.layers_to_cover(*sizes, is_causal=is_causal) == layers
    boundary = pattern.first_uncrossed_boundary(num_tokens, num_heads)
    if pattern.window != 1:
        assert layers is not None
        assert boundary is None
    elif pattern.segment_lengths:  # a token that sees itself crosses nothing
        assert boundary == replace(pattern, window=None).first_uncrossed_boundary(num_tokens, num_heads)
    for layer, expected in enumerate(seen):
        np.testing.assert_array_equal(analysis.reachable(*sizes, layers=layer, is_causal=is_causal), expected)
        for query in range(0, num_tokens, 5):
            keys = analysis.keys_seen(*sizes, query, layers=layer, is_causal=is_causal)
            assert keys.tolist() == np.flatnonzero(expected[query]).tolist()
