"""Counts, coverage and pictures of patterns with a window, against a look at every pair."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from flexdilated import DilatedPattern, analysis
from flexdilated.draw.blocks import draw_blocks
from flexdilated.draw.pattern import cell_counts, multiplicity_panels
from flexdilated.draw.tiles import Tally, head_tiles
from tests.analysis.definition import joined_by as segments_joined_by
from tests.commands import invoke
from tests.draw.brute_force import tiles_of


def random_question(seed: int) -> tuple[DilatedPattern, int, int, bool]:
    """A pattern with a window, tokens, heads, and whether it is causal."""
    rng = random.Random(seed)
    num_tokens = rng.choice((1, 2, 7, 23, 37, 41))
    lengths = [rng.choice((rng.randint(1, 11), rng.randint(5, 43), num_tokens)) for _ in range(rng.randint(0, 3))]
    lengths = [length * 2**i for i, length in enumerate(sorted(lengths))] if rng.random() < 0.3 else lengths
    rates = [rng.choice([rate for rate in (1, 1, 2, 3, 4, 6, length) if rate <= length]) for length in lengths]
    heads, offsets = rng.choice(("all", "grouped")), rng.choice(("blocked", "interleaved"))
    near = {"window": rng.choice((1, 2, 3, 5, 8, 19, 61)), "global_tokens": rng.choice((0, 0, 1, 4, 11))}
    pattern = DilatedPattern(lengths, rates, heads=heads, offsets=offsets, **near)  # type: ignore
    return pattern, num_tokens, rng.randint(max(1, len(lengths)), 5), rng.random() < 0.5


def joined_by(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, *, is_causal: bool) -> NDArray[np.bool_]:
    """`(branches, H, N, N)`: whether a branch joins a query and a key in a head; window and global tokens are the last branches."""
    found = np.zeros((len(pattern.branches), num_kv_heads, num_tokens, num_tokens), dtype=bool)
    for query in range(num_tokens):
        for key in range(query + 1 if is_causal else num_tokens):
            is_global = min(query, key) < pattern.global_tokens
            if is_global or abs(query - key) < pattern.window:  # type: ignore[operator]
                found[-1 if is_global else len(pattern.segment_lengths), :, query, key] = True
                continue
            for i, (length, rate) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates)):
                for head in pattern.head_range(i, num_kv_heads):
                    kept = all(p % length % rate == pattern.offset(i, head, num_kv_heads) for p in (query, key))
                    found[i, head, query, key] = kept and query // length == key // length
    return found


QUESTIONS = [
    *map(random_question, range(30)),
    (DilatedPattern((41, 43), (2, 3), window=5), 41, 6, False),  # two rates together keep every sixth token
    (DilatedPattern((3,), (1,), window=5), 41, 1, True),  # the window reaches farther than segments
]


@pytest.mark.parametrize(("pattern", "num_tokens", "num_kv_heads", "is_causal"), QUESTIONS)
def test_counts_equal_a_look_at_every_pair(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, is_causal: bool) -> None:
    joined = joined_by(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    sizes = pattern, num_tokens, num_kv_heads
    assert analysis.count_pairs(*sizes, is_causal=is_causal) == tuple(tuple(head.sum() for head in branch) for branch in joined)
    counted = analysis.count_multiplicities(*sizes, is_causal=is_causal)
    assert list(counted) == [Counter(head[head > 0].tolist()) for head in joined.sum(axis=0)]
    assert pattern.first_token_without_head(num_tokens, num_kv_heads) is None
    assert len(analysis.missing_residues(pattern, num_kv_heads)) == len(pattern.branches)

    step, everything = joined.any(axis=(0, 1)), np.tri(num_tokens, dtype=bool) if is_causal else np.ones_like(joined[0, 0])
    seen, layers = [np.eye(num_tokens, dtype=bool)], None
    while layers is None and (len(seen) == 1 or (seen[-1] != seen[-2]).any()):
        layers = len(seen) - 1 if (seen[-1] == everything).all() else None
        seen.append(seen[-1].astype(int) @ step > 0)
    assert analysis.layers_to_cover(*sizes, is_causal=is_causal) == layers
    boundary = pattern.first_uncrossed_boundary(num_tokens, num_kv_heads)
    if pattern.window != 1:
        assert layers is not None
        assert boundary is None
    elif pattern.segment_lengths:  # a token that sees itself crosses nothing
        assert boundary == replace(pattern, window=None).first_uncrossed_boundary(num_tokens, num_kv_heads)
    for layer, expected in enumerate(seen):
        np.testing.assert_array_equal(analysis.reachable(*sizes, layers=layer, is_causal=is_causal), expected)
        for query in range(0, num_tokens, 5):
            keys = analysis.keys_seen(*sizes, query, layers=layer, is_causal=is_causal)
            assert keys.tolist() == np.flatnonzero(expected[query]).tolist()


@pytest.mark.parametrize("seed", range(120, 135))
def test_pictures_count_the_window(seed: int) -> None:
    pattern, num_tokens, num_kv_heads, is_causal = random_question(seed)
    joined = joined_by(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    times, sizes = joined.sum(axis=0), (pattern, num_tokens, num_kv_heads)
    starts = np.arange(0, num_tokens, size := 1 + seed % 7)
    expected = np.add.reduceat(np.add.reduceat(times, starts, axis=1), starts, axis=2)
    np.testing.assert_array_equal(cell_counts(*sizes, size, is_causal=is_causal), expected)
    picture = multiplicity_panels(*sizes, is_causal=is_causal)
    own = next(i for i, label in picture.labels.items() if label.startswith("the window") and label.endswith("alone"))
    is_near = joined[len(pattern.segment_lengths) :].any(axis=0)
    np.testing.assert_array_equal([panel.cells == own for panel in picture.panels], is_near)


@pytest.mark.parametrize("seed", range(200, 220))
def test_tiles_equal_a_look_at_every_pair(seed: int) -> None:
    (pattern, num_tokens, num_kv_heads, is_causal), size = random_question(seed), 1 + seed % 5
    joined = joined_by(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    position = np.arange(num_tokens)
    query, key = position[:, None], position
    masks = [abs(query - key) < pattern.window, np.minimum(query, key) < pattern.global_tokens]  # type: ignore[operator]
    plain = replace(pattern, window=None, global_tokens=0) if pattern.segment_lengths else None
    of_segments = [] if plain is None else [*segments_joined_by(plain, num_tokens, num_kv_heads, is_causal=is_causal)]
    for each in head_tiles(pattern, num_tokens, num_kv_heads, size, 1, is_causal=is_causal):
        for head in each.heads:
            visited, full = tiles_of(joined[:, head].any(axis=0), size)
            rows = [branch[head][np.ix_(kept, kept)] for branch in of_segments if (kept := branch[head].diagonal()).any()]
            rows += [mask & (key <= query) if is_causal else mask for mask in masks]
            packed = sum(int(tiles_of(branch, size)[0].sum()) for branch in rows)
            counts = int((visited & ~full).sum()), int(full.sum()), packed, int(joined[:, head].sum())
            assert each.tally == Tally(size, visited.size, *counts)
    assert len(draw_blocks(DilatedPattern(window=9), 61, 2, block_size=4).axes) == 1


@pytest.mark.slow
def test_layers_of_a_million_tokens() -> None:
    far = DilatedPattern((10**6,), (8,), window=8)
    for is_causal in (False, True):
        assert analysis.layers_to_cover(far, 10**6, 8, is_causal=is_causal) == 2
        assert analysis.layers_to_cover(DilatedPattern(window=5), 10**6, 1, is_causal=is_causal) == 250_000
        assert (
            analysis.layers_to_cover(DilatedPattern((64, 96), (1, 1), window=9), 10**6, 1, is_causal=is_causal) == 4 * 10**6 // 192
        )
    local = DilatedPattern((64, 10**6), (2, 8), window=8)
    for is_causal in (False, True):
        with pytest.raises(NotImplementedError, match=r"^num_tokens must give at most 1073741824 pairs to look"):
            analysis.layers_to_cover(local, 10**6, 8, is_causal=is_causal)
    last = analysis.keys_seen(far, 10**6, 8, 10**6 - 1, is_causal=True)
    assert last.tolist() == [*range(7, 999_992, 8), *range(999_992, 10**6)]


def test_few_queries_represent_all_where_segments_span_the_sequence() -> None:
    for seed in range(200, 300):
        pattern, num_tokens, num_kv_heads, is_causal = random_question(seed)
        long = replace(pattern, segment_lengths=[max(num_tokens, length) for length in pattern.segment_lengths])
        seen = [analysis.reachable(long, num_tokens, num_kv_heads, layers=n, is_causal=is_causal).sum() for n in range(50)]
        found = analysis.layers_to_cover(long, num_tokens, num_kv_heads, is_causal=is_causal)
        most = num_tokens * (num_tokens + 1) // 2 if is_causal else num_tokens**2
        assert found == (seen.index(most) if most in seen else None)


def test_commands_take_a_window() -> None:
    small = ("--segment-lengths", "8,16", "--dilation-rates", "1,2", "--window", 3, "--heads", 2)
    code, out, _ = invoke("show", *small, "--causal")
    assert (code, out.splitlines()[0]) == (0, "segment lengths 8, 16 · dilation rates 1, 2 · window 3")
    assert "w = the window alone" in out
    assert invoke("show", "--window", 3)[1].startswith("window 3\n12 tokens · 4 heads")
    code, out, _ = invoke("choose", "--tokens", 64, "--window", 3, "--heads", 2)
    assert code == 0
    assert "DilatedPattern(window=3)\n" in out
    assert "flexdilated explorer 'w=&r=&window=3&N=64&" in out
    assert invoke("choose", "--tokens", 64, "--window", 0)[0] == 2
    code, out, _ = invoke("show", *small, "--causal", "--global-tokens", 2)
    assert (code, out.splitlines()[0]) == (0, "segment lengths 8, 16 · dilation rates 1, 2 · window 3 · global tokens 2")
    assert "w = the window or global tokens alone" in out
    assert invoke("show", "--global-tokens", 3)[1].startswith("global tokens 3\n12 tokens · 4 heads")
    code, out, _ = invoke("choose", "--tokens", 64, "--global-tokens", 3, "--heads", 2)
    assert code == 0
    assert "DilatedPattern(global_tokens=3)\n" in out
    assert "'w=&r=&first=3&N=64&" in out
    pattern = DilatedPattern((8, 16), (1, 2), window=3, heads="grouped")
    assert repr(pattern) == "DilatedPattern((8, 16), (1, 2), window=3, heads='grouped')"
    svg = pattern._repr_svg_()
    assert svg.count("<polygon") == 1
    assert "window of 3 tokens" in svg
    assert "<polygon" in DilatedPattern(window=3)._repr_svg_()
    assert '<path d="M0 0 H160 V40.00 H40.00 V160 H0 Z"' in DilatedPattern(global_tokens=3)._repr_svg_()
