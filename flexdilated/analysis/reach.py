"""The farthest key of each head, and the keys that a query has seen after some layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexdilated.analysis.lattice import Integers, checked, group_heads
from flexdilated.core.branch import Kept, Window
from flexdilated.core.integers import as_integer
from flexdilated.core.pattern import DilatedPattern

MAX_MATRIX = 4096  # tokens, of which every pair is looked at
MAX_WINDOW = 2**26  # tokens of which a query may have seen any


def longest_reach(pattern: DilatedPattern, num_tokens: int, num_heads: int) -> tuple[int, ...]:
    """By head, the largest distance between a query and a key that it sees, causal or not; -1: the head keeps no token.

    >>> longest_reach(DilatedPattern((4, 16), (1, 4)), 16, 2)
    (12, 12)

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N, of any size.
        num_heads: Heads H. Under grouped-query attention these are key/value heads.
    """
    num_tokens, num_heads = checked(pattern, num_tokens, num_heads)
    reach = [-1] * num_heads
    window = pattern.split("longest_reach")[1]
    near = -1 if window is None else min(window.size, num_tokens) - 1
    for kept, heads in group_heads(pattern, num_tokens, num_heads).items():
        most = max([near, *(branch.longest_reach() for branch in kept)])
        for head in heads:
            reach[head] = most
    return tuple(reach)


def reachable(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, *, layers: int = 1, is_causal: bool = False
) -> NDArray[np.bool_]:
    """The keys that each query has seen after `layers` layers, through all heads.

    >>> [int(reachable(DilatedPattern((4, 16), (1, 4)), 16, 4, layers=n).sum()) for n in (0, 1, 2)]
    [16, 112, 256]

    A layer mixes heads, and every token keeps itself through the residual connection, whether a branch keeps it or not.

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N, at most 4,096; `keys_seen` takes one query of any sequence.
        num_heads: Heads H. Under grouped-query attention these are key/value heads.
        layers: Layers L, at least 0.
        is_causal: Whether a query sees only keys at its own position and before.

    Returns:
        `(N, N)`: query, key.

    Raises:
        ValueError: If a number is below 1, layers is below 0, num_tokens is above 4,096, or some branch would have no head.
        TypeError: If an argument has the wrong type.
    """
    num_tokens, num_heads = checked(pattern, num_tokens, num_heads, is_causal=is_causal)
    _check_layers(layers)
    if num_tokens > MAX_MATRIX:
        raise ValueError(f"num_tokens must be at most {MAX_MATRIX}, got {num_tokens}; use keys_seen for single queries")
    position = np.arange(num_tokens)
    window, branches = _branches(pattern, num_tokens, num_heads)
    joined = window.joins(position[:, None], position)
    for branch in branches:
        joined |= branch.joins(position[:, None], position)
    joined = np.tril(joined) if is_causal else joined
    reached, step = np.eye(num_tokens, dtype=np.bool_), joined.astype(np.float32)
    for _ in range(layers):
        further = reached.astype(np.float32) @ step > 0
        if (further == reached).all():
            break
        reached = further
    return reached


def keys_seen(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, query: int, *, layers: int = 1, is_causal: bool = False
) -> Integers:
    """The keys that one query has seen after `layers` layers, through all heads: a row of `reachable`.

    >>> keys_seen(DilatedPattern((4, 16), (1, 4)), 16, 1, query=4).tolist()
    [0, 4, 5, 6, 7, 8, 12]

    Positions in ascending order, with the query itself. Arguments and errors are those of `reachable`, for N up to 2**62.

    Raises:
        ValueError: If the query is outside the sequence.
        NotImplementedError: If more than 2**26 tokens could have been seen.
    """
    num_tokens, num_heads = checked(pattern, num_tokens, num_heads, is_causal=is_causal)
    _check_layers(layers)
    query = as_integer("query", query)
    if not 0 <= query < num_tokens:
        raise ValueError(f"query must be in [0, N={num_tokens}), got {query}")
    window, branches = _branches(pattern, num_tokens, num_heads)
    low, high = query, query + 1
    for _ in range(layers):
        # A token is in the longest segment around it, but borders of shorter ones may lie farther out.
        wider = (
            min([max(low - window.size + 1, 0), *(low // length * length for length, _, _ in branches)]),
            max(min(end, num_tokens) for end in [high + window.size - 1, *(-(-high // w) * w for w, _, _ in branches)]),
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
    reached = np.zeros(high - low, np.bool_)
    reached[query - low] = True
    position = np.arange(low, high)
    places = []  # by branch and offset: the kept tokens, counted from `low`, and the segment of each
    for length, rate, offset in branches:
        kept_tokens = np.flatnonzero(Kept(length, rate, offset).keeps(position))
        places.append((kept_tokens, position[kept_tokens] // length - low // length))
    for _ in range(layers):
        further = near_any(reached, 0 if is_causal else window.size - 1, window.size - 1)
        for kept_tokens, segment in places:
            # The last token of each segment that is seen: behind it a causal layer passes nothing on.
            last = np.full(int(segment[-1]) + 1 if len(segment) else 0, -1, np.int64)
            np.maximum.at(last, segment[reached[kept_tokens]], kept_tokens[reached[kept_tokens]])
            further[kept_tokens[(last >= 0)[segment] & ((kept_tokens <= last[segment]) if is_causal else True)]] = True
        if (further == reached).all():
            break
        reached = further
    return np.flatnonzero(reached) + low


def near_any(seen: NDArray[np.bool_], before: int, after: int) -> NDArray[np.bool_]:
    """The tokens with a seen token at most `before` positions before or `after` positions after them."""
    position, count = np.arange(len(seen)), np.concatenate([[0], np.cumsum(seen)])
    near: NDArray[np.bool_] = count[np.minimum(position + after + 1, len(seen))] > count[np.maximum(position - before, 0)]
    return near


def _branches(pattern: DilatedPattern, num_tokens: int, num_heads: int) -> tuple[Window, list[Kept]]:
    """The window (of size 1 if the pattern has none), and the distinct branches of segments of all heads."""
    window = pattern.split("reach")[1] or Window(1)
    return window, sorted({branch for branches in group_heads(pattern, num_tokens, num_heads) for branch in branches})


def _check_layers(layers: int) -> None:
    if as_integer("layers", layers) < 0:
        raise ValueError(f"layers must be at least 0, got {layers}")
