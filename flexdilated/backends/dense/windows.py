"""A sliding window as boxes for dense kernels without windows: chunks of queries under a mask, or triangles without a mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flexdilated.core.bounded_cache import PIECE_BYTES, recent
from flexdilated.core.branch import ceil_div
from flexdilated.core.pieces import UNBOUNDED, Piece

# A chunk has half a window of queries, within these bounds. In longer chunks the mask hides most computed pairs; in shorter ones a
# kernel has too few rows. From `LONG` tokens on, triangles are as fast, and fewer. Time relative to segments with as many pairs,
# forward and backward, for windows of 128, 512, 1,024 and 2,048 tokens (2 cores with AVX-512, torch 2.13, float32, head dim 64):
# chunks 1.1 and 1.0, 1.1 and 1.0, 1.3 and 1.2, 1.0 and 1.0; triangles 1.8 and 1.3, 1.5 and 1.3, 1.2 and 1.2, 1.0 and 1.0.
LEAST_CHUNK, MOST_CHUNK, LONG = 64, 512, 2048


@recent(size=lambda found, *arguments, **options: PIECE_BYTES * len(found))
def dense_pieces(pieces: tuple[Piece, ...], masks: bool, alone: bool) -> tuple[Piece, ...]:
    """Cut pieces of windows for dense kernels; pieces of segments stay as they are.

    Args:
        pieces: Pieces of a plan, in which a window is one box.
        masks: Whether the kernel takes a mask.
        alone: Whether all keys of a query must be in one piece, so that its lse is the lse of the window; needs `masks`.
    """
    found: list[Piece] = []
    covered = True
    for piece in pieces:
        if not piece.is_banded:
            found.append(piece)
        elif masks and (alone or -piece.low < LONG):
            found += _chunks(piece)
            covered = covered and not piece.covers
        else:
            found += _triangles(piece)
    # Either all pieces of the first branch cover, or none.
    return tuple(found if covered else (piece._replace(covers=False) for piece in found))


def _chunks(piece: Piece) -> Iterator[Piece]:
    """Chunks of queries, each with all keys of their windows; the chunks of one piece share no key."""
    before, after, num_tokens = -piece.low, piece.high, piece.rows
    size = min(max((before + 1) // 2, LEAST_CHUNK), MOST_CHUNK)
    # Chunks whose keys are all inside the sequence have equal shapes. Every `apart`-th of them is in one piece: they share no key.
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
    """Blocks as long as the window: the pairs inside each block, and the triangles of pairs between neighbouring blocks.

    A query sees the keys of the block before its own whose row number is above its own. Without the last query and the first key
    these pairs are a causal mask in reverse row order.
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
    """A box of queries and a box of keys, each `(first row, rows)`, repeated `times` times every `stride` rows in each segment."""
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
