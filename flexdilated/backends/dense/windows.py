"""A sliding window as boxes for dense kernels, which know no window: chunks of queries under a mask, or triangles without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flexdilated.core.branch import ceil_div
from flexdilated.core.pieces import UNBOUNDED, Piece

# Queries of a chunk: half a window, within these bounds. With few more a mask hides most of what is computed, with few less kernels
# take too few rows at once. From `LONG` tokens on triangles are as fast, and fewer. Measured on 2 cores with AVX-512, torch 2.13,
# float32, head dim 64: times of segments with as many pairs, forward and backward, for windows of 128, 512, 1,024 and 2,048 tokens:
# chunks 1.1 and 1.0, 1.1 and 1.0, 1.3 and 1.2, 1.0 and 1.0; triangles 1.8 and 1.3, 1.5 and 1.3, 1.2 and 1.2, 1.0 and 1.0.
LEAST_CHUNK, MOST_CHUNK, LONG = 64, 512, 2048


def dense_pieces(pieces: tuple[Piece, ...], masks: bool, alone: bool) -> tuple[Piece, ...]:
    """Pieces whose windows are cut for dense kernels.

    Args:
        pieces: Those of a plan, in which a window is one box.
        masks: Whether the kernel takes a mask.
        alone: Whether each query must meet all its keys in one piece, whose lse is then the window's own; needs `masks`.
    """
    found: list[Piece] = []
    covered = True
    for piece in pieces:
        if piece.low == -UNBOUNDED:
            found.append(piece)
        elif masks and (alone or -piece.low < LONG):
            found += _chunks(piece)
            covered = covered and not piece.covers
        else:
            found += _triangles(piece)
    return tuple(found if covered else (piece._replace(covers=False) for piece in found))  # all first pieces cover, or none


def _chunks(piece: Piece) -> Iterator[Piece]:
    """Chunks of queries, with all keys that the window shows them; no piece reads a key twice."""
    before, after, num_tokens = -piece.low, piece.high, piece.rows
    size = min(max((before + 1) // 2, LEAST_CHUNK), MOST_CHUNK)
    # Chunks whose keys are all inside of the sequence are alike; those of one piece are so far apart that no key is in two.
    count = ceil_div(num_tokens, size)
    first, end = ceil_div(before, size), max((num_tokens - after) // size, 0)
    first = min(first, end)
    apart = ceil_div(size + before + after, size)
    runs = [(chunk, 1) for chunk in (*range(first), *range(end, count))]
    runs += [(first + i, ceil_div(end - first - i, apart)) for i in range(min(apart, end - first))]
    for chunk, times in sorted(runs):
        start = chunk * size
        key, rows = max(0, start - before), min(size, num_tokens - start)
        keys = min(num_tokens, start + rows + after) - key
        low, high = (bound + start - key for bound in (piece.low, piece.high))
        low, high = low if low > 1 - rows else -UNBOUNDED, high if high < keys - 1 or high == 0 else UNBOUNDED
        yield from _boxes(piece._replace(covers=False, low=low, high=high), (start, rows), (key, keys), times, apart * size)


def _triangles(piece: Piece) -> Iterator[Piece]:
    """Blocks as long as the window: each with itself, and the triangles of pairs between neighbours.

    Between a block and the one before it a pair joins where the key's row is behind the query's. Without the last query and the
    first key that is a causal mask, from the last row to the first.
    """
    size, is_causal = 1 - piece.low, piece.high == 0
    count, rest = divmod(piece.rows, size)
    itself = piece._replace(low=-UNBOUNDED, high=0 if is_causal else UNBOUNDED)
    whole, causal, mirrored = (
        piece._replace(covers=False, low=low, high=high) for low, high in ((-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 0), (0, UNBOUNDED))
    )
    last, shared = count * size, min(rest, size - 1)
    yield from _boxes(itself, (0, size), (0, size), count, size)
    yield from _boxes(itself, (last, rest), (last, rest))
    yield from _boxes(mirrored, (size, size - 1), (1, size - 1), count - 1, size)
    yield from _boxes(mirrored, (last, shared), (last - size + 1, shared))
    yield from _boxes(whole, (last, shared), (last - size + 1 + shared, size - 1 - shared))
    if not is_causal:
        yield from _boxes(causal, (1, size - 1), (size, size - 1), count - 1, size)
        yield from _boxes(causal, (last - size + 1, shared), (last, shared))
        yield from _boxes(whole, (last - size + 1 + shared, size - 1 - shared), (last, shared))


def _boxes(piece: Piece, queries: tuple[int, int], keys: tuple[int, int], times: int = 1, stride: int = 0) -> Iterator[Piece]:
    """Boxes of queries and keys, of each `(first row, rows)` of a piece, `times` times, `stride` rows apart, in each segment."""
    (first, rows), (first_key, num_keys) = queries, keys
    if times < 1 or not rows or not num_keys:
        return
    box: Any = {"token": piece.token + first, "key_token": piece.key_token + first_key, "rows": rows, "keys": num_keys}
    if piece.segments == 1:
        yield piece._replace(segments=times, segment_stride=stride, **box)
    elif piece.segments > times:
        for i in range(times):
            yield piece._replace(**box).moved(i * stride)
    else:
        for i in range(piece.segments):
            yield piece._replace(segments=times, segment_stride=stride, **box).moved(i * piece.segment_stride)
