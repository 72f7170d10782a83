"""Tiles counted, against tiles listed."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flexdilated import DilatedPattern
from flexdilated.analysis import count_tiles, tiles
from flexdilated.draw.tiles import head_tiles
from tests.analysis.definition import questions


@pytest.mark.slow
@given(questions(), st.integers(1, 9), st.booleans())
@settings(deadline=None, max_examples=100)
def test_counts_are_those_of_the_lists(question: tuple[DilatedPattern, int, int], block_size: int, is_causal: bool) -> None:
    pattern, num_tokens, num_heads = question
    assume(max(pattern.dilation_rates) <= block_size)
    found = count_tiles(pattern, num_tokens, num_heads, block_size=block_size, is_causal=is_causal)
    for each in head_tiles(pattern, num_tokens, num_heads, block_size, 1, is_causal=is_causal):
        for head in each.heads:
            tally = each.each
            assert found[head] == (block_size, tally.partial + tally.full, tally.packed, tally.pairs)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_tokens", "pattern"), [(100_003, DilatedPattern.longnet()), (60_001, DilatedPattern.gigapath())])
def test_published_patterns_count_the_same(num_tokens: int, pattern: DilatedPattern, is_causal: bool) -> None:
    found = count_tiles(pattern, num_tokens, 2, is_causal=is_causal)
    for each in head_tiles(pattern, num_tokens, 2, 128, 8, is_causal=is_causal):
        assert all(found[head].raw == each.each.partial + each.each.full for head in each.heads)
        assert all(found[head].packed == each.each.packed for head in each.heads)
        assert each.each.waste_raw == f"{found[each.heads[0]].waste_raw:.2f}"


def test_a_billion_tokens_are_whole_periods_and_a_rest() -> None:
    pattern = DilatedPattern((2048, 8192, 32768), (1, 4, 16))
    (period,) = count_tiles(pattern, 32768, 1)
    (many,) = count_tiles(pattern, 32768 * 30_000, 1)
    assert (many.raw, many.packed, many.pairs) == (30_000 * period.raw, 30_000 * period.packed, 30_000 * period.pairs)


def test_refuses_what_it_cannot_count() -> None:
    with pytest.raises(NotImplementedError, match=r"block_size must be at least the largest dilation rate=7 .*, got 5"):
        count_tiles(DilatedPattern((11,), (7,)), 23, 1, block_size=5)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        count_tiles(DilatedPattern((11,), (7,)), 23, 1, block_size=0)
    with pytest.raises(NotImplementedError, match="num_tokens must be such that at most 16777216 rows of tiles and segments"):
        count_tiles(DilatedPattern((1009, 10_007, 100_003), (1, 2, 3)), 10**12, 2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_looked_at_some_at_once_are_all_of_them(monkeypatch: pytest.MonkeyPatch, is_causal: bool) -> None:
    pattern = DilatedPattern((13, 101, 397), (1, 3, 7), offsets="interleaved")
    expected = count_tiles(pattern, 5003, 4, block_size=8, is_causal=is_causal)
    assert [each.raw for each in expected] == [
        each.each.partial + each.each.full for each in head_tiles(pattern, 5003, 4, 8, 1, is_causal=is_causal) for _ in each.heads
    ]
    for at_once in (1, 7, 1000):
        monkeypatch.setattr(tiles, "AT_ONCE", at_once)
        assert count_tiles(pattern, 5003, 4, block_size=8, is_causal=is_causal) == expected


@pytest.mark.slow
def test_gigapath_is_counted_at_a_thousand_million_tokens() -> None:
    found = count_tiles(DilatedPattern.gigapath(), 10**9, 16)
    assert (found[0].raw, found[15].raw) == (64652861784, 64652778524)  # the same row by row
    assert sum(each.pairs for each in found) == DilatedPattern.gigapath().count_pairs(10**9, 16)
