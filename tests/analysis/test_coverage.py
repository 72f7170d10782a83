"""Reach and coverage, against a look at every pair, layer by layer."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexdilated import DilatedPattern
from flexdilated.analysis import analyse, count_uncovered, keys_seen, layers_to_cover, longest_reach, missing_residues, reachable
from tests.analysis.definition import joined_by, nested_patterns, questions, seen_after

Question = tuple[DilatedPattern, int, int]


@given(questions())
@settings(deadline=None, max_examples=60)
def test_reach_equals_a_look_at_every_pair(question: Question) -> None:
    pattern, num_tokens, num_kv_heads = question
    joined = joined_by(pattern, num_tokens, num_kv_heads, is_causal=False).any(axis=0)
    position = np.arange(num_tokens)
    distance = np.where(joined, abs(position[:, None] - position), -1)
    assert longest_reach(pattern, num_tokens, num_kv_heads) == tuple(distance.max(axis=(1, 2)).tolist())


@given(questions(), st.integers(0, 4), st.booleans())
@settings(deadline=None, max_examples=60)
def test_what_is_seen_after_layers_equals_a_look_at_every_pair(question: Question, layers: int, is_causal: bool) -> None:
    pattern, num_tokens, num_kv_heads = question
    expected = seen_after(pattern, num_tokens, num_kv_heads, layers, is_causal=is_causal)
    np.testing.assert_array_equal(reachable(pattern, num_tokens, num_kv_heads, layers=layers, is_causal=is_causal), expected)
    for query in range(num_tokens):
        seen = keys_seen(pattern, num_tokens, num_kv_heads, query, layers=layers, is_causal=is_causal)
        assert seen.tolist() == np.flatnonzero(expected[query]).tolist()


@given(questions(), st.booleans())
@example((DilatedPattern((5, 7), (1, 1)), 61, 1), True)  # undilated segments that overlap: borders are crossed backwards too
@example((DilatedPattern((5, 7, 61), (1, 1, 7)), 31, 7), True)
@example((DilatedPattern((6, 7), (1, 2)), 7, 2), False)  # one token behind an undilated segment
@example((DilatedPattern((2, 6, 24), (1, 2, 2)), 24, 2), False)
@example((DilatedPattern((6, 12, 48), (2, 3, 6), offsets="interleaved"), 47, 6), False)
@settings(deadline=None, max_examples=100)
def test_layers_and_uncovered_tokens_equal_a_look_at_every_pair(question: Question, is_causal: bool) -> None:
    pattern, num_tokens, num_kv_heads = question
    joined = joined_by(pattern, num_tokens, num_kv_heads, is_causal=False)
    lost = ~joined.any(axis=(0, 1, 2))
    assert count_uncovered(pattern, num_tokens, num_kv_heads) == lost.sum()
    residues = missing_residues(pattern, num_kv_heads)
    for p in np.flatnonzero(lost).tolist():
        assert all(p % length % rate in missing for (length, rate), missing in zip(pattern.branches, residues))
    everything = np.tri(num_tokens, dtype=bool) if is_causal else np.ones((num_tokens, num_tokens), dtype=bool)
    found, before, layers = None, None, 0
    while found is None:
        seen = seen_after(pattern, num_tokens, num_kv_heads, layers, is_causal=is_causal)
        if (seen >= everything).all():
            found = layers
        if before is not None and (seen == before).all():
            break
        before, layers = seen, layers + 1
    assert layers_to_cover(pattern, num_tokens, num_kv_heads, is_causal=is_causal) == found


@given(nested_patterns(), st.integers(1, 500), st.integers(4, 6))
@settings(deadline=None, max_examples=30)
def test_layers_of_longer_sequences_equal_products_of_matrices(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int) -> None:
    pattern = DilatedPattern((*pattern.segment_lengths, 499), (*pattern.dilation_rates, 2), heads="all", offsets=pattern.offsets)
    found = layers_to_cover(pattern, num_tokens, num_kv_heads)
    if found is None:
        assert not reachable(pattern, num_tokens, num_kv_heads, layers=num_tokens).all()
    else:
        assert reachable(pattern, num_tokens, num_kv_heads, layers=found).all()
        assert found == 0 or not reachable(pattern, num_tokens, num_kv_heads, layers=found - 1).all()


def test_long_sequences_whose_segments_nest_are_answered_by_short_ones() -> None:
    lengths, rates = (64, 4096, 2**20, 2**30), (1, 4, 8, 16)
    pattern = DilatedPattern(lengths, rates)
    assert layers_to_cover(pattern, 10**9, 16) == layers_to_cover(DilatedPattern((64, 192, 576, 1728), rates), 1500, 16)
    assert layers_to_cover(pattern, 10**9, 8) is not None
    assert layers_to_cover(DilatedPattern(lengths[1:], rates[1:]), 10**9, 2) is None  # residues that no head keeps
    assert layers_to_cover(DilatedPattern.longnet(), 10**9, 12) is None  # no segment spans the sequence
    assert layers_to_cover(DilatedPattern.longnet(), 32768, 12) == 2
    last = keys_seen(DilatedPattern.longnet(), 10**9, 12, 10**9 - 1, layers=2)
    assert last.tolist() == list(range(10**9 // 32768 * 32768, 10**9))


def test_longnet_loses_no_token_and_its_first_branch_reaches_least() -> None:
    found = analyse(DilatedPattern.longnet(), 1_000_000, 12)
    assert found.uncovered == 0
    assert found.missing_residues == ((),) * 5
    assert missing_residues(DilatedPattern.longnet(), 4)[4] == (4, 5, 6, 7, 8, 9, 10, 11)
    assert count_uncovered(DilatedPattern((8,), (4,)), 8 * 10**8 + 3, 1) == 6 * 10**8 + 2
    assert longest_reach(DilatedPattern((8,), (4,)), 3, 8) == (0, 0, 0, 0, 0, 0, -1, -1)


def test_rejects_what_has_no_answer() -> None:
    pattern, undilated = DilatedPattern((5, 7), (1, 2)), DilatedPattern((2**30,), (1,))
    short, overlapping = DilatedPattern((1009, 40_009), (211, 3)), DilatedPattern((500, 777, 40_000), (1, 1, 7))
    window, rate = DilatedPattern((2, 3), (1, 1), window=2), DilatedPattern((2**21,), (2**21,))
    causal = partial(layers_to_cover, is_causal=True)
    cases: list[tuple[type[Exception], str, Callable[..., object], tuple[object, ...]]] = [
        (ValueError, "num_tokens must be at most 4096, got 4097; use keys_seen for single", reachable, (pattern, 4097, 1)),
        (ValueError, "layers must be at least 0, got -1", partial(reachable, layers=-1), (pattern, 11, 1)),
        (TypeError, r"layers must be an integer, got 1\.5", partial(keys_seen, layers=1.5), (pattern, 11, 1, 0)),
        (ValueError, r"query must be in \[0, N=11\), got 11", keys_seen, (pattern, 11, 1, 11)),
        (TypeError, r"query must be an integer, got 0\.5", keys_seen, (pattern, 11, 1, 0.5)),
        (NotImplementedError, "layers must be such that a query sees keys of at most", keys_seen, (undilated, 2**30, 1, 0)),
        (NotImplementedError, "num_tokens must give at most 1073741824 pairs to look at, got", layers_to_cover, (short, 10**7, 6)),
        (NotImplementedError, "num_tokens must give at most 1073741824 pairs to look at, got", causal, (overlapping, 40_000, 7)),
        (NotImplementedError, "num_tokens must give at most 1048576 layers to look at, got 2796202", causal, (window, 2**23, 1)),
        (NotImplementedError, "num_tokens must give at most 8388608 tokens to look at, got", count_uncovered, (short, 10**9, 1)),
        (NotImplementedError, "dilation_rates must be at most 1048576 to list residues", missing_residues, (rate, 1)),
    ]
    for error, message, count, arguments in cases:
        with pytest.raises(error, match=message):
            count(*arguments)


@pytest.mark.slow
def test_layers_of_gigapath_are_counted_up_to_a_million_tokens() -> None:  # its segments do not nest
    assert layers_to_cover(DilatedPattern.gigapath(), 10**6, 16) == 2
    found = analyse(DilatedPattern.gigapath(), 10**7, 16)
    assert found.layers is None
    assert found.not_counted["layers"].startswith("num_tokens must give at most")
