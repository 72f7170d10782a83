"""Tokens followed between fronts, and bounds of layers, against a look at every pair."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flexdilated import DilatedPattern
from flexdilated.analysis import (
    LayerBounds,
    analyse,
    bound_layers,
    count_uncovered,
    coverage,
    layers_to_cover,
)
from flexdilated.analysis.fronts import MOST_RESIDUES, layers_at_most, layers_of, layers_of_hull
from flexdilated.analysis.lattice import together
from tests.analysis.definition import joined_by, questions

Question = tuple[DilatedPattern, int, int]


def layers_of_tokens(pattern: DilatedPattern, num_tokens: int, num_heads: int) -> list[int | None]:
    """By token, the layers after which it has seen every other, by a look at every pair; None is never."""
    step = joined_by(pattern, num_tokens, num_heads, is_causal=False).any(axis=(0, 1)) | np.eye(num_tokens, dtype=bool)
    seen, before, layers = np.eye(num_tokens, dtype=bool), np.zeros((num_tokens, num_tokens), dtype=bool), 0
    found: list[int | None] = [None] * num_tokens
    while (seen != before).any():
        found = [layers if each is None and row.all() else each for each, row in zip(found, seen)]
        seen, before, layers = seen.astype(np.float32) @ step > 0, seen, layers + 1
    return found


@given(questions(), st.integers(0, 60))
@settings(deadline=None, max_examples=60)
def test_one_token_is_followed_exactly(question: Question, source: int) -> None:
    num_tokens = question[1]
    assume(math.lcm(*question[0].dilation_rates) <= MOST_RESIDUES)  # others are refused
    assume(num_tokens > 1 and not count_uncovered(*question))
    source %= num_tokens
    assert layers_of(together(*question), num_tokens, source) == layers_of_tokens(*question)[source]


def window_patterns() -> st.SearchStrategy[Question]:
    """A branch at rate 1, and others whose rates it holds: what bounds can speak of."""
    dilated = st.integers(2, 5).flatmap(lambda rate: st.tuples(st.integers(rate, 31), st.just(rate)))
    branches = st.tuples(st.integers(5, 9), st.lists(dilated, min_size=1, max_size=3))

    def pattern(drawn: tuple[int, list[tuple[int, int]]]) -> DilatedPattern:
        lengths, rates = zip((drawn[0], 1), *drawn[1])
        return DilatedPattern(lengths, rates, offsets="interleaved" if drawn[0] % 2 else "blocked")

    return st.tuples(branches.map(pattern), st.integers(2, 61), st.integers(1, 5))


@given(window_patterns())
@settings(deadline=None, max_examples=60)
def test_bounds_hold_the_number_of_layers(question: Question) -> None:
    branches, num_tokens = together(*question), question[1]
    layers = layers_of_tokens(*question)
    hull, most = layers_of_hull(branches, num_tokens), layers_at_most(branches, num_tokens)
    if None in layers:
        assert most is None
        assert layers_to_cover(*question) is None
        return
    expected = max(each for each in layers if each is not None)
    assert hull is not None
    assert hull <= expected
    if most is not None:
        found = coverage._bounds(branches, num_tokens, most)
        assert found.least <= expected <= found.most == most


@pytest.mark.slow
def test_published_patterns_are_counted_exactly_where_segments_do_not_nest() -> None:
    pattern = DilatedPattern.gigapath()
    assert layers_to_cover(pattern, 10**9, 16) == 1908
    assert bound_layers(pattern, 10**9, 16) == LayerBounds(1908, 1908)
    assert bound_layers(pattern, 10**9, 16, is_causal=True) is None
    assert bound_layers(pattern, 1, 16) == LayerBounds(0, 0)
    # Segments like these at a smaller size, and every pair of them is looked at.
    small = DilatedPattern((64, 362, 1024), (1, 2, 4))
    most = layers_at_most(together(small, 4001, 4), 4001)
    assert most is not None
    assert coverage._bounds(together(small, 4001, 4), 4001, most) == LayerBounds(most, most)
    assert layers_to_cover(small, 4001, 4) == most


def test_where_bounds_do_not_meet_they_are_told() -> None:
    pattern = DilatedPattern.gigapath()  # 5 heads keep 5 of 16 residues
    found = bound_layers(pattern, 10**7, 5)
    assert found is not None
    assert not found.is_exact
    message = f"got from {found.least} to {found.most} layers; use bound_layers, or lengths that divide"
    with pytest.raises(NotImplementedError, match=message):
        layers_to_cover(pattern, 10**7, 5)
    report = analyse(pattern, 10**7, 5)
    assert (report.layers, report.layer_bounds) == (None, found)
    assert report.not_counted["layers"].startswith(f"layers are between {found.least} and {found.most}; ")


def test_refuses_rates_of_too_many_residues() -> None:
    branches = together(DilatedPattern((97, 97), (11, 7)), 97, 11)
    with pytest.raises(NotImplementedError, match="dilation_rates must have a least common multiple of at most 64, got 77"):
        layers_of(branches, 97, 0)
