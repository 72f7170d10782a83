"""Tokens that no head keeps, and the number of layers until every token has seen every other.

Tokens of the same segments with the same residues see the same tokens: one represents all of them. Where segments nest, two
segments of a length and the last one represent any number of them. With a window or causality, the search holds every token. It
follows a few queries if all segments span the sequence: residue and distance from both ends then decide what a query sees.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from flexdilated.analysis.lattice import Integers, Together, cell_starts, checked, each_block, merge_heads
from flexdilated.analysis.reach import each_layer
from flexdilated.core.branch import NONE, ceil_div
from flexdilated.core.keywords import takes_num_kv_heads
from flexdilated.core.pattern import DilatedPattern

MAX_RESIDUES = 2**20  # of one rate, listed
MAX_TOKENS = 2**23  # looked at: a few arrays of 64 MB
MAX_PAIRS = 2**30  # of a token and a query, one bit each
MAX_STEPS = 2**20  # layers that one token is followed through


@takes_num_kv_heads
def missing_residues(pattern: DilatedPattern, num_kv_heads: int) -> tuple[tuple[int, ...], ...]:
    """By branch, the residues modulo its rate that no head keeps.

    >>> missing_residues(DilatedPattern((16, 64), (1, 4)), 2)
    ((), (2, 3))

    A token whose residue is missing in every branch takes no part in attention: `count_uncovered` counts such tokens. For arguments
    and errors see `count_pairs`.
    """
    _, num_kv_heads = checked(pattern, 1, num_kv_heads)
    segments, _ = pattern.split("missing_residues")
    if max((rate for _, rate in segments), default=1) > MAX_RESIDUES:
        raise NotImplementedError(f"dilation_rates must be at most {MAX_RESIDUES} to list residues, got {pattern.dilation_rates}")
    offsets = [pattern.kept_offsets(branch, num_kv_heads) for branch in range(len(segments))]
    missing = [tuple(residue for residue in range(rate) if residue not in present) for (_, rate), present in zip(segments, offsets)]
    return (*missing, *[()] * (len(pattern.branches) - len(segments)))


@takes_num_kv_heads
def count_uncovered(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int) -> int:
    """The number of tokens that no head of any branch keeps: their output is 0, and no query reads them.

    >>> count_uncovered(DilatedPattern((16,), (4,)), 64, 2)  # two heads keep two of four residues
    32

    For arguments and errors see `count_pairs`. Time grows with the segments until their boundaries repeat.

    Raises:
        NotImplementedError: If there are too many segments before their boundaries repeat.
    """
    num_tokens, num_kv_heads = checked(pattern, num_tokens, num_kv_heads)
    branches, near = merge_heads(pattern, num_tokens, num_kv_heads)
    if near or any(len(offsets) == rate for _, rate, offsets in branches):
        return 0
    total = 0
    for size, repeats in each_block([branch.length for branch in branches], num_tokens):
        tokens, times = _representatives(branches, size)
        is_kept = [np.isin(tokens % length % rate, offsets) for length, rate, offsets in branches]
        total += repeats * int(times[~np.any(is_kept, axis=0)].sum())
    return total


@takes_num_kv_heads
def layers_to_cover(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, *, is_causal: bool = False) -> int | None:
    """The number of layers until every token has seen every other (every earlier one, if causal); None: never.

    >>> layers_to_cover(DilatedPattern((16, 64), (1, 4)), 64, 4)
    2

    All heads together, and every token keeps itself, as in `reachable`. A boundary that all branches share is never crossed; if
    causal, one that all undilated branches share. For arguments and errors see `count_pairs`. Time does not grow with N where
    segments nest and rates divide the shortest one, or where the answer is None; otherwise with the number of segments.

    With undilated segments and a window, the result is in closed form. With dilated segments, a window or causality needs a look at
    every token: at most 32,768 tokens, or 2**22 if all segments span the sequence.

    Raises:
        NotImplementedError: If there are too many tokens or segments to look at all of them.
    """
    num_tokens, num_kv_heads = checked(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    branches, near = merge_heads(pattern, num_tokens, num_kv_heads)
    step, num_global = max(near.window - 1, 0), min(near.global_tokens, num_tokens - 1)
    distance = num_tokens - 1 - num_global  # from the first token that is not global to the last
    lengths, undilated = [branch.length for branch in branches], [branch.length for branch in branches if branch.rate == 1]
    if num_tokens == 1:
        return 0
    if num_global and not is_causal:  # two layers over the global tokens, unless one layer is dense attention
        spanning = [branch for branch in branches if branch.length >= num_tokens]
        ends = [num_global % branch.rate in branch.offsets and distance % branch.rate == 0 for branch in spanning]
        if step < distance and not any(ends):
            return 2 if distance else 1
    if not step and not num_global and count_uncovered(pattern, num_tokens, num_kv_heads):
        return None
    shared = math.lcm(*(undilated if is_causal else lengths))  # a boundary of all branches; global tokens before it are seen
    if not step and (num_tokens - 1) // shared * shared > num_global:
        return None
    if not branches:
        return max(ceil_div(distance, step) if step else 0, 1)
    longest = max([step + 1, *undilated])
    if undilated == lengths or longest >= num_tokens:
        # A token has seen a run of tokens around it. The last token takes longest to see the first that is not global.
        _check(num_tokens // longest, MAX_STEPS, "layers", num_tokens)
        token, layers = num_tokens - 1, 0
        while token > num_global:
            token, layers = min([token - step, *(token // length * length for length in undilated)]), layers + 1
        return max(layers, 1)
    period = math.lcm(*(branch.rate for branch in branches))
    chain = [period, *sorted({length for length in lengths if length < num_tokens})]
    if is_causal or step or num_global:
        num_at_ends = 2 * period + num_global if len(chain) == 1 else num_tokens  # queries at each end, which represent all
        _check(num_tokens * max(min(2 * num_at_ends, num_tokens), 256), MAX_PAIRS, "pairs", num_tokens)
        tokens = np.arange(num_tokens)
        queries = np.unique(np.concatenate([tokens[:num_at_ends], tokens[-num_at_ends:]]))
    else:
        nested = not any(outer % part for part, outer in pairwise(chain))
        queries = tokens = np.concatenate(_nested(0, num_tokens, chain)) if nested else _representatives(branches, num_tokens)[0]
        _check(len(tokens) ** 2, MAX_PAIRS, "pairs", num_tokens)
    column = np.arange(len(queries))
    seen_by = np.zeros((len(tokens), ceil_div(len(queries), 8)), np.uint8)  # a bit for each query
    seen_by[np.searchsorted(tokens, queries), column // 8] = 128 >> column % 8
    _, all_queries = each_layer(seen_by, tokens, [Together(num_tokens, 1, (0,))], NONE, is_causal=is_causal)
    layers_seen = enumerate(each_layer(seen_by, tokens, branches, near, is_causal=is_causal))
    return next((layers for layers, queries_seen in layers_seen if (queries_seen == all_queries).all()), None)


def _nested(start: int, stop: int, chain: list[int]) -> list[Integers]:
    """Tokens of the first two segments and the last, for each length of a chain, down to one period of residues."""
    *shorter, length = chain
    if not shorter:
        return [np.arange(start, min(start + length, stop))]
    starts = range(start, stop, length)
    return [tokens for begin in sorted({*starts[:2], starts[-1]}) for tokens in _nested(begin, min(begin + length, stop), shorter)]


def _representatives(branches: list[Together], num_tokens: int) -> tuple[Integers, Integers]:
    """One token of each residue in each cell, and the number of tokens that it represents."""
    period = min(math.lcm(*(branch.rate for branch in branches)), num_tokens)
    start = cell_starts(tuple(branch.length for branch in branches), num_tokens)
    size = np.diff(start, append=num_tokens)
    few = np.minimum(size, period)
    _check(int(few.sum()), MAX_TOKENS, "tokens", num_tokens)
    within = np.arange(few.sum()) - np.repeat(np.cumsum(few) - few, few)
    return np.repeat(start, few) + within, (np.repeat(size, few) - 1 - within) // period + 1


def _check(count: int, most: int, unit: str, num_tokens: int) -> None:
    if count > most:
        raise NotImplementedError(
            f"num_tokens must give at most {most} {unit} to look at, got {count} for {num_tokens} tokens; use segments that span "
            "the sequence, or that divide one another at rates that divide the shortest, or keys_seen for single queries"
        )
