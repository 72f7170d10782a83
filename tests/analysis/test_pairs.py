"""Pairs in closed form, against a look at every one of them."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdilated import DilatedPattern
from flexdilated.analysis import analyse, count_multiplicities, count_pairs
from tests.analysis.definition import joined_by, questions


@given(questions(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_pairs_duplicates_and_balance_equal_a_look_at_every_pair(
    question: tuple[DilatedPattern, int, int], is_causal: bool
) -> None:
    pattern, num_tokens, num_kv_heads = question
    joined = joined_by(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    assert count_pairs(pattern, num_tokens, num_kv_heads, is_causal=is_causal) == tuple(
        tuple(int(head.sum()) for head in branch) for branch in joined
    )
    times = joined.sum(axis=0)
    expected = [Counter(head[head > 0].tolist()) for head in times]
    assert list(count_multiplicities(pattern, num_tokens, num_kv_heads, is_causal=is_causal)) == expected
    heads = [int(head.sum()) for head in times]
    even = analyse(pattern, num_tokens, num_kv_heads, is_causal=is_causal).balance
    assert (even.least, even.most, even.mean) == (min(heads), max(heads), sum(heads) / num_kv_heads)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("pattern", "num_kv_heads"), [(DilatedPattern.longnet(), 12), (DilatedPattern.gigapath(), 16)])
@pytest.mark.parametrize("num_tokens", [1_000_003, 1_000_000_007])
def test_pairs_of_long_sequences_add_up(pattern: DilatedPattern, num_kv_heads: int, num_tokens: int, is_causal: bool) -> None:
    found = count_pairs(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    total = pattern.count_pairs(num_tokens, num_kv_heads, is_causal=is_causal)
    assert sum(map(sum, found)) == total
    if num_tokens == 1_000_003 or pattern == DilatedPattern.longnet():
        times = count_multiplicities(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
        assert sum(m * pairs for head in times for m, pairs in head.items()) == total


def test_counts_are_exact_beyond_64_bits() -> None:
    length = 2**39
    assert count_pairs(DilatedPattern((length,), (1,)), length, 1) == ((length**2,),)
    shared = length**2 // 4
    assert count_multiplicities(DilatedPattern((length, 2 * length), (1, 2)), length, 1) == ({1: 3 * shared, 2: shared},)


def test_flops_are_four_per_pair_and_element_forward_and_ten_backward() -> None:
    found = analyse(DilatedPattern((5, 11), (1, 3)), 23, 3)
    assert found.total_pairs == found.pattern.count_pairs(23, 3)
    assert (found.flops(7), found.flops(7, with_backward=True)) == (28 * found.total_pairs, 98 * found.total_pairs)


def test_what_cannot_be_counted_is_refused_and_told() -> None:
    many = DilatedPattern(tuple(range(2, 15)), (1,) * 13)
    with pytest.raises(NotImplementedError, match=r"pattern must have at most 12 branches per head to count .*, got 13"):
        count_multiplicities(many, 29, 1)
    primes = DilatedPattern((2_147_483_659, 4_294_967_311), (2_147_483_659, 1))
    with pytest.raises(NotImplementedError, match=r"dilation_rates must be below 2\*\*31 .*; use rates that share factors"):
        count_multiplicities(primes, 2**33, 1)
    short = DilatedPattern((101, 1_000_000_007), (1, 7))
    with pytest.raises(NotImplementedError, match="segment_lengths must have at most 4194304 segments before their boundaries"):
        count_multiplicities(short, 10**9, 1)
    found = analyse(short, 10**9, 1)
    assert (found.multiplicities, found.duplicates, found.distinct_pairs) == (None, None, None)
    assert set(found.not_counted) == {"multiplicities", "layers"}
    assert found.not_counted["multiplicities"].startswith("segment_lengths must")


def test_refuses_numbers_and_types_without_an_answer() -> None:
    pattern = DilatedPattern((5, 7, 11), (1, 2, 3), heads="grouped")
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "num_tokens must be at least 1, got 0", lambda: analyse(pattern, 0, 3)),
        (ValueError, "num_kv_heads must be at least 1, got 0", lambda: analyse(pattern, 3, 0)),
        (TypeError, r"num_tokens must be an integer, got 3\.0", lambda: analyse(pattern, 3.0, 3)),  # type: ignore[arg-type]
        (TypeError, "pattern must be a DilatedPattern, got tuple", lambda: analyse((5, 7), 3, 3)),  # type: ignore[arg-type]
        (ValueError, "pattern must have at most one branch per key/value head=2", lambda: analyse(pattern, 3, 2)),
        (TypeError, r"^num_tokens must be an integer, got 64\.5", lambda: pattern.count_pairs(64.5, 4)),  # type: ignore[arg-type]
        (ValueError, r"^num_kv_heads must be at least 1, got -4", lambda: pattern.count_pairs(64, -4)),
        (TypeError, r"^is_causal must be a bool, got 'no'", lambda: analyse(pattern, 61, 3, is_causal="no")),  # type: ignore[arg-type]
        (TypeError, r"^head_dim must be an integer, got '64'", lambda: analyse(pattern, 61, 3).flops("64")),  # type: ignore[arg-type]
        (ValueError, "^head_dim must be at least 1, got 0", lambda: analyse(pattern, 61, 3).flops(0)),
    ]
    for error, message, ask in cases:
        with pytest.raises(error, match=message):
            ask()


def test_integers_of_numpy_do_not_overflow() -> None:
    pattern = DilatedPattern((1009, 4001), (1, 3))
    expected = analyse(pattern, 32003, 7)
    found = analyse(pattern, np.int16(32003), np.int8(7))  # type: ignore[arg-type]
    assert found == expected
    assert pattern.count_pairs(np.int16(32003), np.int8(7)) == expected.total_pairs  # type: ignore[arg-type]
