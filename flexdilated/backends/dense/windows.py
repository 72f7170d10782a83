"""Bands cut to boxes that dense kernels take: chunks of queries under a mask, or triangles and rectangles without a mask."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from flexdilated.backends.kernel import Windows, is_mirrored
from flexdilated.core.bounded_cache import PIECE_BYTES, recent
from flexdilated.core.branch import ceil_div
from flexdilated.core.pieces import UNBOUNDED, Piece

# A chunk has half a window of queries, within these bounds. In longer chunks the mask hides most computed pairs; in shorter ones a
# kernel has too few rows. From `LONG` tokens on, triangles are as fast, and fewer. Time relative to segments with as many pairs,
# forward and backward, for windows of 128, 512, 1,024 and 2,048 tokens (2 cores with AVX-512, torch 2.13, float32, head dim 64):
# chunks 1.1 and 1.0, 1.1 and 1.0, 1.3 and 1.2, 1.0 and 1.0; triangles 1.8 and 1.3, 1.5 and 1.3, 1.2 and 1.2, 1.0 and 1.0.
LEAST_CHUNK, MOST_CHUNK, LONG = 64, 512, 2048


@recent(size=lambda cut, *arguments, **options: PIECE_BYTES * len(cut))
def dense_pieces(pieces: tuple[Piece, ...], windows: Windows, alone: bool = False) -> tuple[Piece, ...]:
    """Cut pieces for kernels whose causal masks have as many queries as keys, and whose bands are as `windows` says.

    Args:
        pieces: Pieces of a plan.
        windows: How the kernel takes a band.
        alone: Whether each query must have all keys of its piece in one of the cut pieces, so that their lse is that of the piece.
            The kernel then takes every band, and chunks may share keys: only windows are cut, to skip pairs.
    """
    cut: list[Piece] = []
    covered = written = True
    for piece in pieces:
        is_square, masked = piece.rows == piece.keys, windows == "mask" and (alone or -piece.low < LONG)
        if (piece.low == -UNBOUNDED or piece.high == UNBOUNDED) if alone else _fits(piece, windows):
            cut.append(piece)
        elif not masked and is_square and -piece.rows < piece.low <= 0 and piece.high in (0, -piece.low):
            cut += _triangles(piece)
        else:
            cut += _chunks(_trimmed(piece), alone) if masked and piece.is_banded else _cut(piece)
            covered = covered and not piece.covers
            written = written and not (piece.writes and piece.is_banded and not masked)
    # Either all pieces of the first branch cover, or none.
    if covered and written:
        return tuple(cut)
    return tuple(piece._replace(covers=piece.covers and covered, writes=piece.writes and written) for piece in cut)


def _fits(piece: Piece, windows: Windows) -> bool:
    """Whether a kernel takes a piece as it is."""
    is_square = piece.rows == piece.keys
    if not piece.is_banded:
        return is_square or piece.high == UNBOUNDED
    return is_mirrored((piece.low, piece.high), piece.rows, piece.keys) or (
        windows == "bounds" and is_square and piece.low <= 0 <= piece.high
    )


def _trimmed(piece: Piece) -> Piece:
    """The piece without queries that see no key and keys that no query sees."""
    first, end = max(0, -piece.high), min(piece.rows, piece.keys - piece.low)
    first_key, end_key = max(0, piece.low), min(piece.keys, piece.rows + piece.high)
    return piece._replace(
        token=piece.token + first * piece.row_stride,
        rows=end - first,
        key_token=piece.key_token + first_key * piece.row_stride,
        keys=end_key - first_key,
        low=piece.low + first - first_key,
        high=piece.high + first - first_key,
    )


def _chunks(piece: Piece, shares: bool) -> Iterator[Piece]:
    """Chunks of queries, each with all keys of their windows. `shares`: the chunks of one piece may share keys."""
    before, after = min(-piece.low, piece.rows), min(piece.high, piece.keys)
    size = min(max((before + 1) // 2, LEAST_CHUNK), MOST_CHUNK)
    # Chunks whose keys are all inside the sequence have equal shapes. Every `apart`-th of them is in one piece: they share no key.
    count = ceil_div(piece.rows, size)
    first, end = max(ceil_div(before, size), 0), max(min((piece.keys - after) // size, piece.rows // size), 0)
    first = min(first, end)
    apart = 1 if shares else ceil_div(size + before + after, size)
    runs = [(0, first, 1), (end, count - end, 1)] if shares else [(chunk, 1, 1) for chunk in (*range(first), *range(end, count))]
    runs += [(first + i, 1, ceil_div(end - first - i, apart)) for i in range(min(apart, end - first))]
    for chunk, chunks, times in sorted(runs):
        start = chunk * size
        key, rows = max(0, start - before), min(chunks * size, piece.rows - start)
        keys = min(piece.keys, start + rows + after) - key
        low, high = (bound + start - key for bound in (piece.low, piece.high))
        if low <= 1 - rows and (high != 0 or rows == keys):  # else it would be causal, of fewer keys than queries
            low = -UNBOUNDED
        high = high if high < keys - 1 or high == 0 else UNBOUNDED
        yield from _boxes(piece._replace(covers=False, low=low, high=high), (start, rows), (key, keys), times, apart * size)


def _triangles(piece: Piece) -> Iterator[Piece]:
    """Blocks as long as the window: the pairs inside each block, and the triangles of pairs between neighbouring blocks.

    A query sees the keys of the block before its own whose row number is above its own. Without the last query and the first key
    these pairs are a causal mask in reverse row order.
    """
    size, is_causal = 1 - piece.low, piece.high == 0
    count, remainder = divmod(piece.rows, size)
    itself = piece._replace(low=-UNBOUNDED, high=0 if is_causal else UNBOUNDED)
    dense, causal, mirrored = (
        piece._replace(covers=False, writes=False, low=low, high=high)
        for low, high in ((-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 0), (0, UNBOUNDED))
    )
    last, shared = count * size, min(remainder, size - 1)
    yield from _boxes(itself, (0, size), (0, size), count, size)
    yield from _boxes(itself, (last, remainder), (last, remainder))
    yield from _boxes(mirrored, (size, size - 1), (1, size - 1), count - 1, size)
    yield from _boxes(mirrored, (last, shared), (last - size + 1, shared))
    yield from _boxes(dense, (last, shared), (last - size + 1 + shared, size - 1 - shared))
    if not is_causal:
        yield from _boxes(causal, (1, size - 1), (size, size - 1), count - 1, size)
        yield from _boxes(causal, (last - size + 1, shared), (last, shared))
        yield from _boxes(dense, (last - size + 1 + shared, size - 1 - shared), (last, shared))


class Block(NamedTuple):
    """One kernel call: the numbers of its query rows and key rows, and which pairs join."""

    rows: slice
    columns: slice
    is_causal: bool = False
    band: tuple[int, int] | None = None


@lru_cache(maxsize=4096)
def band_blocks(queries: tuple[int, int], keys: tuple[int, int], band: tuple[int, int]) -> tuple[Block, ...]:
    """The kernel calls for the pairs of a band. Each is a rectangle, or the lower or upper triangle of a square.

    Rows that see no key are in no call.
    """

    def within(row: int, low: int, high: int) -> int:
        return max(low, min(row, high))

    (low, high), blocks = band, []
    size = max(1, min(queries[1] - queries[0], high - low))  # among so few queries, a key leaves or enters the band, but not both
    for first in range(*queries, size):
        end = min(first + size, queries[1])
        # Keys before `early` have left the band of some queries; all queries see those before `late`; the rest have yet to enter.
        early = within(end + low, *keys)
        late = within(first + high, early, keys[1])
        middle, last = (within(key - low, first, end) for key in (keys[0], early))
        blocks.append(Block(slice(first, middle), slice(keys[0], early)))
        blocks.append(Block(slice(middle, last), slice(middle + low, last + low), band=(0, last - middle - 1)))
        blocks.append(Block(slice(first, end), slice(early, late)))
        middle, last = (within(key - high, first, end) for key in (late, keys[1]))
        blocks.append(Block(slice(middle, last), slice(middle + high, last + high), is_causal=True))
        blocks.append(Block(slice(last, end), slice(late, keys[1])))
    return tuple(block for block in blocks if block.rows.start < block.rows.stop and block.columns.start < block.columns.stop)


def _cut(piece: Piece) -> Iterator[Piece]:
    """The blocks of a band."""
    assert not piece.zero_keys  # else they would count once per block
    for block in band_blocks((0, piece.rows), (0, piece.keys), (piece.low, piece.high)):
        low, high = (0, UNBOUNDED) if block.band else (-UNBOUNDED, 0 if block.is_causal else UNBOUNDED)
        queries, keys = ((span.start, span.stop - span.start) for span in (block.rows, block.columns))
        writes = piece.writes and not piece.is_banded  # blocks of a band share queries
        yield from _boxes(piece._replace(covers=False, writes=writes, low=low, high=high), queries, keys)


def _boxes(piece: Piece, queries: tuple[int, int], keys: tuple[int, int], times: int = 1, stride: int = 0) -> Iterator[Piece]:
    """A box of queries and a box of keys, each `(first row, rows)`, repeated `times` times every `stride` rows in each segment."""
    (first, rows), (first_key, num_keys) = queries, keys
    if min(times, rows, num_keys) < 1:
        return
    step = piece.row_stride
    stride *= step
    box: Any = {
        "token": piece.token + first * step,
        "key_token": piece.key_token + first_key * step,
        "rows": rows,
        "keys": num_keys,
    }
    if piece.segments == 1:
        yield piece._replace(segments=times, segment_stride=stride, **box)
    elif piece.segments > times:
        for i in range(times):
            yield piece._replace(**box).moved(i * stride)
    else:
        for i in range(piece.segments):
            yield piece._replace(segments=times, segment_stride=stride, **box).moved(i * piece.segment_stride)
