"""Tokens that no head keeps, and the number of layers until every token has seen every other.

Tokens that lie in the same segment of every branch and have the same residues there are twins: they see the same tokens, and the
same tokens see them. The kept tokens of one segment and offset, a clique, see each other. So a question about N tokens is one about
kinds of twins and cliques, of which there are few. Where the segments nest and the rates divide the shortest, segments beyond the
second at any level change nothing (to fold one onto its neighbour keeps who sees whom): there are few however long the sequence is.
With a window, all tokens of a kind need equally many steps of the window to each clique.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flexdilated.analysis.lattice import Integers, Together, borders, check_listable, checked, each_block, merge_heads
from flexdilated.analysis.reach import near_any, reachable
from flexdilated.core.branch import ceil_div
from flexdilated.core.pattern import DilatedPattern

MAX_KINDS = 2**15  # every pair of them is looked at
MAX_CLIQUES = 2**12  # likewise
MAX_STEPS = 2**20  # layers that one token is followed through
MAX_CAUSAL = 1024  # tokens whose pairs are looked at, a product of matrices per layer
MAX_STEPS_AWAY = 2**25  # tokens times cliques, with a window
MAX_WINDOW_KINDS = 2**10  # kinds of tokens, and cliques, with a window: time is cubic in their number
FEW = 3  # segments that stand for any number of them: one's own, another's, and what is shorter comes behind fewer


def missing_residues(pattern: DilatedPattern, num_heads: int) -> tuple[tuple[int, ...], ...]:
    """By branch, the residues modulo its rate that no head keeps.

    >>> missing_residues(DilatedPattern((16, 64), (1, 4)), 2)
    ((), (2, 3))

    A token is lost to attention where its residue is missing in every branch: `count_uncovered` counts those.

    Args:
        pattern: Which positions attend to which.
        num_heads: Heads H. Under grouped-query attention these are key/value heads.
    """
    _, num_heads = checked(pattern, 1, num_heads)
    check_listable(pattern)
    missing = []
    segments, window = pattern.split("missing_residues")
    for branch, (_, rate) in enumerate(segments):
        kept_residues = {pattern.offset(branch, head, num_heads) for head in pattern.head_range(branch, num_heads)}
        missing.append(tuple(residue for residue in range(rate) if residue not in kept_residues))
    return (*missing, *([] if window is None else [()]))


def count_uncovered(pattern: DilatedPattern, num_tokens: int, num_heads: int) -> int:
    """The number of tokens that no head of any branch keeps: their output is 0, and no query reads them.

    >>> count_uncovered(DilatedPattern((16,), (4,)), 64, 2)  # two heads keep two of four residues
    32

    Arguments and errors are those of `count_pairs`. Time grows with the segments until their boundaries repeat.

    Raises:
        NotImplementedError: If there are too many segments before their boundaries repeat.
    """
    num_tokens, num_heads = checked(pattern, num_tokens, num_heads)
    check_listable(pattern)
    branches = merge_heads(pattern, num_tokens, num_heads)
    if pattern.split("count_uncovered")[1] is not None:
        return 0
    if any(len(branch.offsets) == branch.rate for branch in branches):
        return 0
    blocks = each_block([branch.length for branch in branches], num_tokens)
    return sum(times * _uncovered(branches, tokens) for tokens, times in blocks)


def _uncovered(branches: list[Together], num_tokens: int) -> int:
    start = borders(tuple(branch.length for branch in branches), num_tokens)
    size = np.diff(start, append=num_tokens)
    phases = np.stack([start % branch.length % branch.rate for branch in branches], axis=1)
    tables, table_index = np.unique(phases, axis=0, return_inverse=True)
    table_index = table_index.reshape(-1)
    longest, period = int(size.max()), math.lcm(*(branch.rate for branch in branches))
    total = 0
    for table, phase in enumerate(tables.tolist()):
        sizes = size[table_index == table]
        lost = np.ones(min(longest, period), np.bool_)
        for branch, branch_phase in zip(branches, phase):
            keeps = np.zeros(branch.rate, np.bool_)
            keeps[list(branch.offsets)] = True
            lost &= ~keeps[(branch_phase + np.arange(len(lost))) % branch.rate]
        below = np.concatenate([[0], np.cumsum(lost)])
        total += int((sizes // len(lost) * below[-1] + below[sizes % len(lost)]).sum())
    return total


def layers_to_cover(pattern: DilatedPattern, num_tokens: int, num_heads: int, *, is_causal: bool = False) -> int | None:
    """The number of layers until every token has seen every other (every earlier one, if causal); None: never.

    >>> layers_to_cover(DilatedPattern((16, 64), (1, 4)), 64, 4)
    2

    All heads together, and every token keeps itself, as in `reachable`. A boundary that all branches share is never crossed; if
    causal, one that all undilated branches share. Arguments and errors are those of `count_pairs`. Time does not grow with N where
    segments nest and rates divide the shortest one, or where the answer is None; otherwise with the number of segments.

    With a window and undilated segments the result is in closed form. With a window and dilated segments, time grows with N and the
    number of segments; causal patterns for more than 1,024 tokens must then have segments that span the sequence.

    Raises:
        NotImplementedError: If the segments do not nest and are too many to look at all of them.
    """
    num_tokens, num_heads = checked(pattern, num_tokens, num_heads, is_causal=is_causal)
    if num_tokens == 1:
        return 0
    branches, window = merge_heads(pattern, num_tokens, num_heads), pattern.split("layers_to_cover")[1]
    if window is not None and window.size > 1:
        return _layers_with_window(pattern, branches, num_tokens, num_heads, window.size - 1, is_causal=is_causal)
    if window is not None:  # a window of 1 adds nothing: each token keeps itself
        if not branches:
            return None
        pattern = replace(pattern, window=None)
    if is_causal:
        return _causal_layers(pattern, branches, num_tokens, num_heads)
    if math.lcm(*(branch.length for branch in branches)) < num_tokens or count_uncovered(pattern, num_tokens, num_heads):
        return None
    folded, tokens = _folded(branches, num_tokens)
    return _layers(tuple(folded), tokens)


@lru_cache(maxsize=4096)
def _layers(branches: tuple[Together, ...], num_tokens: int) -> int | None:
    """As `layers_to_cover`; cached, since many lengths fold to one."""
    return _farthest(_kinds(branches, num_tokens))


def _folded(branches: list[Together], num_tokens: int) -> tuple[list[Together], int]:
    """Branches and tokens of a shorter sequence that needs as many layers, where segments nest and rates divide the shortest."""
    lengths = sorted({branch.length for branch in branches})
    inner = lengths[:-1] if lengths[-1] == num_tokens else lengths
    period = math.lcm(*(branch.rate for branch in branches))
    chain = [period, *inner]
    if any(outer % part for part, outer in pairwise(chain)):
        return branches, num_tokens
    # Level by level: what a segment and the rest of the sequence hold of the segments of the level below.
    size, rest_size, below = period, num_tokens % period, period
    shorter = {}
    for length in inner:
        parts, num_whole = length // below, num_tokens % length // below
        few = min(parts, FEW)
        rest_size += min(num_whole, few - 1) * size
        below, size = length, few * size
        shorter[length] = size
    tokens = rest_size + min(num_tokens // below, FEW - 1) * size
    shorter[num_tokens] = tokens
    return [branch._replace(length=shorter[branch.length]) for branch in branches], tokens


def _kinds(branches: tuple[Together, ...], num_tokens: int) -> Integers:
    """`(kinds, branches)`: the cliques of each kind of token, -1 where a branch does not keep it."""
    period = math.lcm(*(branch.rate for branch in branches))
    start = borders(tuple(branch.length for branch in branches), num_tokens)
    size = np.minimum(np.diff(start, append=num_tokens), period)
    if size.sum() > MAX_KINDS:
        raise _too_many("kinds of tokens", int(size.sum()), MAX_KINDS, branches)
    token = np.repeat(start - np.cumsum(size) + size, size) + np.arange(size.sum())
    members, num_cliques = [], 0
    for length, rate, offsets in branches:
        residue = token % length % rate
        segment = token // length
        members.append(np.where(np.isin(residue, offsets), num_cliques + segment * rate + residue, -1))
        num_cliques += (-(-num_tokens // length)) * rate
    kinds = np.unique(np.stack(members, axis=1), axis=0)
    used, numbered = np.unique(kinds, return_inverse=True)
    numbered = numbered.reshape(kinds.shape) - (used[0] == -1)
    if len(used) > MAX_CLIQUES:
        raise _too_many("segments and offsets", len(used), MAX_CLIQUES, branches)
    return numbered


def _farthest(members: Integers) -> int | None:
    """The number of layers after which a token of every kind has seen all kinds."""
    distance = _distances(members)
    spare = np.full((1, distance.shape[1]), np.iinfo(distance.dtype).max, distance.dtype)
    distance = np.concatenate([distance, spare])  # -1 reads the last row, and below the last column
    distance = np.concatenate([distance, spare.reshape(-1)[:1].repeat(len(distance))[:, None]], axis=1)
    most = 0
    full_branches = [i for i in range(members.shape[1]) if (members[:, i] >= 0).all()]
    for kind in members:
        reached = distance[kind].min(axis=0)
        # The farthest clique of a branch that keeps every token is no nearer than the farthest token.
        if full_branches and min(int(reached[members[:, i]].max()) for i in full_branches) <= most:
            continue
        most = max(most, int(reached[members].min(axis=1).max()))
    return None if most == np.iinfo(distance.dtype).max else 1 + most


def _distances(members: Integers) -> NDArray[np.uint16]:
    """`(cliques, cliques)`: the number of layers from the whole of one clique to the whole of another."""
    cliques = int(members.max()) + 1
    joined = np.zeros((cliques, cliques), np.bool_)
    for i in range(members.shape[1]):
        for j in range(members.shape[1]):
            in_both = (members[:, i] >= 0) & (members[:, j] >= 0)
            joined[members[in_both, i], members[in_both, j]] = True
    packed = np.packbits(joined, axis=1)
    distance = np.full((cliques, cliques), np.iinfo(np.uint16).max, np.uint16)
    for source in range(cliques):
        visited = np.zeros(cliques, np.bool_)
        frontier, layer = np.array([source]), 0
        while len(frontier):
            visited[frontier] = True
            distance[source, frontier] = layer
            further = np.unpackbits(np.bitwise_or.reduce(packed[frontier], axis=0), count=cliques).astype(np.bool_)
            frontier, layer = np.flatnonzero(further & ~visited), layer + 1
    return distance


def _causal_layers(pattern: DilatedPattern, branches: list[Together], num_tokens: int, num_heads: int) -> int | None:
    undilated = [branch.length for branch in branches if branch.rate == 1]
    if not undilated or math.lcm(*undilated) < num_tokens:
        return None
    if max(undilated) == num_tokens:
        return 1
    if len(undilated) == len(branches) and num_tokens // max(undilated) <= MAX_STEPS:
        # What the last token has seen is a run of tokens that ends with it, and no other token has seen less far.
        earliest, layers = num_tokens - 1, 0
        while earliest > 0:
            earliest, layers = min(earliest // length * length for length in undilated), layers + 1
        return layers
    if num_tokens > MAX_CAUSAL:
        raise NotImplementedError(
            f"num_tokens must be at most {MAX_CAUSAL} for causal patterns whose undilated segments overlap beside dilated ones, "
            f"got {num_tokens}; use keys_seen for single queries"
        )
    return _count_layers(pattern, num_tokens, num_heads)


def _count_layers(pattern: DilatedPattern, num_tokens: int, num_heads: int) -> int:
    """Causal layers of a pattern that covers after enough layers, by a test of every pair."""
    layers, most = 1, int(np.tri(num_tokens, dtype=np.int64).sum())
    while int(reachable(pattern, num_tokens, num_heads, layers=layers, is_causal=True).sum()) < most:
        layers += 1
    return layers


def _layers_with_window(
    pattern: DilatedPattern, branches: list[Together], num_tokens: int, num_heads: int, step: int, *, is_causal: bool
) -> int:
    """`layers_to_cover` with a window that sees `step >= 1` tokens on each side."""
    undilated = [branch.length for branch in branches if branch.rate == 1]
    if num_tokens <= max([step + 1, *undilated]):
        return 1
    if not branches:
        return ceil_div(num_tokens - 1, step)
    if len(undilated) == len(branches) and num_tokens // max([step, *undilated]) <= MAX_STEPS:
        # What a token has seen is a run of tokens around it. The last one takes longest to see the first.
        at, layers = num_tokens - 1, 0
        while at > 0:
            at, layers = min([at - step, *(at // length * length for length in undilated)]), layers + 1
        return layers
    if not is_causal:
        return _layers_by_steps(branches, num_tokens, step)
    if num_tokens <= MAX_CAUSAL:
        return _count_layers(pattern, num_tokens, num_heads)
    return _layers_of_period(branches, num_tokens, step)


def _layers_of_period(branches: list[Together], num_tokens: int, step: int) -> int:
    """Causal layers if all segments span the sequence: who sees a token depends only on its residue and on the distance."""
    period, most = math.lcm(*(branch.rate for branch in branches)), 0
    if min(branch.length for branch in branches) < num_tokens or period * num_tokens > MAX_STEPS_AWAY:
        raise NotImplementedError(
            f"num_tokens must be at most {MAX_CAUSAL} for causal patterns of a window and dilated segments that do not span the "
            f"sequence, at most {MAX_STEPS_AWAY // period} for those that do, got {num_tokens}; use keys_seen for single queries"
        )
    for token in range(period):
        seen_by, layers = np.arange(num_tokens) == token, 0
        while not seen_by[token:].all():
            further = near_any(seen_by, step, 0)
            for _, rate, offsets in branches:
                for offset in offsets:
                    kept = seen_by[offset::rate]
                    if kept.any():
                        further[offset + int(kept.argmax()) * rate :: rate] = True
            seen_by, layers = further, layers + 1
        most = max(most, layers)
    return most


def _layers_by_steps(branches: list[Together], num_tokens: int, step: int) -> int:
    """Layers without causality. Shortest paths use window steps only, or window steps, cliques, and window steps again."""
    if sum(ceil_div(num_tokens, length) * len(offsets) for length, _, offsets in branches) * num_tokens > MAX_STEPS_AWAY:
        raise _too_few_steps(num_tokens)
    cliques = [
        range(start + offset, min(start + length, num_tokens), rate)
        for length, rate, offsets in branches
        for offset in offsets
        for start in range(0, num_tokens - offset, length)
    ]
    position, kind = np.arange(num_tokens), np.zeros(num_tokens, np.int64)
    away = np.empty((len(cliques), num_tokens), np.int32)  # window steps from a token to the nearest token of a clique
    for row, clique in zip(away, cliques):
        before = np.clip((position - clique.start) // clique.step, 0, len(clique) - 1)
        nearest = [abs(position - clique.start - i * clique.step) for i in (before, np.minimum(before + 1, len(clique) - 1))]
        row[:] = -(-np.minimum(*nearest) // step)
        first, kind = np.unique(kind * (num_tokens + 1) + row, return_index=True, return_inverse=True)[1:]
        if max(len(first), len(cliques)) > MAX_WINDOW_KINDS:
            raise _too_few_steps(num_tokens)
    kinds = away[:, first].T  # (kinds, cliques)
    onward = np.stack([away[:, clique].min(axis=1) for clique in cliques]) + 1  # layers from one clique to another
    np.fill_diagonal(onward, 0)
    for between in range(len(cliques)):
        onward = np.minimum(onward, onward[:, between, None] + onward[between])
    last = num_tokens - 1 - np.unique(kind[::-1], return_index=True)[1]
    most = 0
    for i, row in enumerate(kinds):
        by_cliques = (1 + (row[:, None] + onward).min(axis=0) + kinds).min(axis=1)
        by_steps = -(-np.maximum(last - first[i], last[i] - first) // step)
        most = max(most, int(np.minimum(by_cliques, by_steps).max()))
    return most


def _too_few_steps(num_tokens: int) -> NotImplementedError:
    return NotImplementedError(
        f"num_tokens must be such that tokens times segments and offsets are at most {MAX_STEPS_AWAY} beside a window, of at most "
        f"{MAX_WINDOW_KINDS} kinds, got {num_tokens}; use longer segments, fewer tokens, or keys_seen for single queries"
    )


def _too_many(kind: str, count: int, most: int, branches: tuple[Together, ...]) -> NotImplementedError:
    lengths = tuple(branch.length for branch in branches)
    return NotImplementedError(
        f"segment_lengths must give at most {most} {kind} to look at, got {count} of {lengths}; use lengths that divide one "
        "another and rates that divide the shortest, fewer tokens, or keys_seen for single queries"
    )
