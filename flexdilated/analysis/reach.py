"""The farthest key of each head, and the keys that a query has seen after some layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flexdilated.analysis.lattice import Integers, Together, checked, group_heads, merge_heads
from flexdilated.core.branch import Near
from flexdilated.core.integers import as_integer
from flexdilated.core.keywords import takes_num_kv_heads
from flexdilated.core.pattern import DilatedPattern

T = TypeVar("T", np.bool_, np.uint8)

MAX_MATRIX = 4096  # tokens, of which every pair is looked at
MAX_WINDOW = 2**26  # tokens of which a query may have seen any


@takes_num_kv_heads
def longest_reach(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int) -> tuple[int, ...]:
    """By head, the largest distance between a query and a key that it sees, causal or not; -1: the head keeps no token.

    >>> longest_reach(DilatedPattern((4, 16), (1, 4)), 16, 2)
    (12, 12)

    For arguments and errors see `count_pairs`.
    """
    num_tokens, num_kv_heads = checked(pattern, num_tokens, num_kv_heads)
    reach = [-1] * num_kv_heads
    near_pairs = pattern.split("longest_reach")[1]
    near = num_tokens - 1 if near_pairs.global_tokens else min(near_pairs.window, num_tokens) - 1
    for branches, heads in group_heads(pattern, num_tokens, num_kv_heads).items():
        most = max([near, *(branch.longest_reach() for branch in branches)])
        for head in heads:
            reach[head] = most
    return tuple(reach)


@takes_num_kv_heads
def reachable(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, *, layers: int = 1, is_causal: bool = False
) -> NDArray[np.bool_]:
    """The keys that each query has seen after `layers` layers, through all heads.

    >>> [int(reachable(DilatedPattern((4, 16), (1, 4)), 16, 4, layers=n).sum()) for n in (0, 1, 2)]
    [16, 112, 256]

    A layer mixes heads, and every token keeps itself through the residual connection, whether a branch keeps it or not.

    Args:
        pattern, num_kv_heads, is_causal: As in `count_pairs`.
        num_tokens: Sequence length N, at most 4,096; `keys_seen` takes one query of any sequence.
        layers: Layers L, at least 0.

    Returns:
        `(N, N)`: query, key.

    Raises:
        ValueError: If a number is below 1, layers is below 0, num_tokens is above 4,096, or some branch would have no head.
        TypeError: If an argument has the wrong type.
    """
    num_tokens, num_kv_heads = checked(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    _check_layers(layers)
    if num_tokens > MAX_MATRIX:
        raise ValueError(f"num_tokens must be at most {MAX_MATRIX}, got {num_tokens}; use keys_seen for single queries")
    branches, near = merge_heads(pattern, num_tokens, num_kv_heads)
    position, start = np.arange(num_tokens), np.eye(num_tokens, dtype=np.bool_)
    seen_by = islice(each_layer(start, position, branches, near, is_causal=is_causal), min(layers, num_tokens) + 1)
    return deque(seen_by, maxlen=1).pop().T


@takes_num_kv_heads
def keys_seen(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, query: int, *, layers: int = 1, is_causal: bool = False
) -> Integers:
    """The keys that one query has seen after `layers` layers, through all heads: a row of `reachable`.

    >>> keys_seen(DilatedPattern((4, 16), (1, 4)), 16, 1, query=4).tolist()
    [0, 4, 5, 6, 7, 8, 12]

    Positions in ascending order, with the query itself. Arguments and errors are those of `reachable`, for N up to 2**62.

    Raises:
        ValueError: If the query is outside the sequence.
        NotImplementedError: If more than 2**26 tokens could have been seen.
    """
    num_tokens, num_kv_heads = checked(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    _check_layers(layers)
    query = as_integer("query", query)
    if not 0 <= query < num_tokens:
        raise ValueError(f"query must be in [0, N={num_tokens}), got {query}")
    branches, near = merge_heads(pattern, num_tokens, num_kv_heads)
    step, num_global = max(near.window - 1, 0), near.global_tokens
    if num_global and layers and not is_causal:  # global tokens see everything
        low, high, layers_left = 0, num_tokens, 0
    else:
        low, high, layers_left = query, query + 1, layers
    for _ in range(layers_left):
        # A token is in the longest segment around it, but shorter ones may reach farther out.
        wider = (
            min([max(low - step, 0), *(low // length * length for length, _, _ in branches)]),
            max(min(end, num_tokens) for end in [high + step, *(-(-high // w) * w for w, _, _ in branches)]),
        )
        wider = (wider[0], min(wider[1], query + 1)) if is_causal else wider
        if wider == (low, high):
            break
        low, high = wider
    if high - low > MAX_WINDOW:
        raise NotImplementedError(
            f"layers must be such that a query sees keys of at most {MAX_WINDOW} tokens, got {layers}, which span {high - low}; "
            "use fewer layers or shorter segments"
        )
    position = np.arange(low, high)
    if num_global and layers:
        position = np.union1d(np.arange(min(num_global, num_tokens)), position)
        position = position[position <= query] if is_causal else position
    seen_by = islice(each_layer(position == query, position, branches, near, is_causal=is_causal), min(layers, num_tokens) + 1)
    return position[deque(seen_by, maxlen=1).pop()]


def each_layer(
    seen_by: NDArray[T], tokens: Integers, branches: list[Together], near: Near, *, is_causal: bool
) -> Iterator[NDArray[T]]:
    """The queries that have seen each token after 0 layers, 1 layer, and so on, up to the last layer that adds something.

    Args:
        seen_by: Before the first layer. One row per token; the rest is a bool, or bits of integers, for each query.
        tokens: Positions in ascending order; with a window, without gaps but after the global tokens.
        branches: The branches of segments.
        near: Window and global tokens.
        is_causal: Whether a query sees only keys at its own position and before.
    """
    cliques = []  # by branch, segment and offset: the rows of kept tokens, the last one first
    for length, rate, offsets in branches:
        rows = np.flatnonzero(np.isin(tokens % length % rate, offsets))[::-1]
        clique = tokens[rows] // length * rate + tokens[rows] % length % rate
        order = np.argsort(clique, kind="stable")
        cliques += np.split(rows[order], np.flatnonzero(np.diff(clique[order])) + 1)
    step, num_global = max(near.window - 1, 0), int(np.searchsorted(tokens, near.global_tokens))
    yield seen_by
    while True:
        further, reach = seen_by.copy(), 0
        ordinary = further[num_global:]
        while reach < min(step, len(ordinary)):  # 1, 3, 7, ... tokens on each side
            by = min(reach + 1, step - reach)
            ordinary[:-by] |= ordinary[by:]
            if not is_causal:
                ordinary[by:] |= ordinary[:-by]
            reach += by
        if num_global and is_causal:
            further[:num_global] |= np.bitwise_or.reduce(seen_by[num_global:], axis=0)
            further[num_global - 1 :: -1][:num_global] |= np.bitwise_or.accumulate(seen_by[num_global - 1 :: -1][:num_global])
        elif num_global:
            further[:num_global] |= np.bitwise_or.reduce(seen_by)
            further |= np.bitwise_or.reduce(seen_by[:num_global])
        for rows in cliques:
            further[rows] |= (np.bitwise_or.accumulate if is_causal else np.bitwise_or.reduce)(seen_by[rows])
        if (further == seen_by).all():
            return
        yield (seen_by := further)


def _check_layers(layers: int) -> None:
    if as_integer("layers", layers) < 0:
        raise ValueError(f"layers must be at least 0, got {layers}")
