"""What the kernels share: where a program works, and how a tile of rows is read."""

import triton
import triton.language as tl

# What a launch says of its piece. Like strides, these integers never choose another compilation.
PIECE_FIELDS = (
    "tiles", "heads", "offsets", "segments", "token", "segment_stride", "key_shift", "head", "offset_head_step", "head_step",
    "row_stride", "queries", "keys", "zero_keys",
)  # fmt: skip
BAND = ("low", "high")  # two more columns, only in tables of windows
# A row of a table of pieces: `PIECE_FIELDS`, the first program that computes the piece, and the number of its programs.
COLUMNS = tl.constexpr(len(PIECE_FIELDS) + 2)


def strides(*tensors: str) -> tuple[str, ...]:
    """The names of the strides of tensors `(B, N, H, D)`."""
    return tuple(f"{x}_{axis}" for x in tensors for axis in ("batch", "token", "head"))


@triton.jit
def place(lane, group, heads, offsets, segments, token, segment_stride, head, offset_head_step, head_step):
    """One lane of a piece: `(sequence, key/value head, query head of it, first token)`, in 64 bits.

    Lanes that read the same keys are neighbours: they find them in the cache.
    """
    g = lane % group
    lane = lane // group
    j = lane % heads
    lane = lane // heads
    c = lane % offsets
    lane = lane // offsets
    s = (lane % segments).to(tl.int64)
    b = (lane // segments).to(tl.int64)
    kv_head = (head + c * offset_head_step + j * head_step).to(tl.int64)
    return b, kv_head, g.to(tl.int64), token + s * segment_stride + c


@triton.jit
def narrow(row, column):
    """A number of a table that fits 32 bits."""
    return tl.load(row + column).to(tl.int32)


@triton.jit
def own_piece(TABLE, OWNERS, WINDOWED: tl.constexpr):
    """In a launch of many pieces: this program's number within its piece, and the fields of the piece. `OWNERS` has its row."""
    program = tl.program_id(0)
    columns: tl.constexpr = COLUMNS + 2 if WINDOWED else COLUMNS
    row = TABLE + tl.load(OWNERS + program) * columns
    return (
        program - narrow(row, columns - 2),
        narrow(row, 0), narrow(row, 1), narrow(row, 2), narrow(row, 3),
        tl.load(row + 4), tl.load(row + 5), tl.load(row + 6),
        narrow(row, 7), narrow(row, 8), narrow(row, 9), narrow(row, 10), narrow(row, 11), narrow(row, 12), narrow(row, 13),
        narrow(row, 14) if WINDOWED else 0, narrow(row, 15) if WINDOWED else 0,
    )  # fmt: skip


@triton.jit
def band_tiles(begin, end, low, high, rows, BLOCK: tl.constexpr):
    """The tiles of `BLOCK` rows that rows `begin` to `end` join. Row `x` joins rows `x + low` to `x + high` of `rows` rows.

    Returns `(first, middle, stop, last)`: tiles are visited from row `first` to `last`, and need no mask from `middle` to `stop`.
    """
    first = tl.maximum(begin + low, 0) // BLOCK * BLOCK
    middle = tl.cdiv(tl.maximum(end - 1 + low, 0), BLOCK) * BLOCK
    stop = tl.maximum(tl.minimum(begin + 1 + high, rows), 0) // BLOCK * BLOCK
    return first, middle, tl.maximum(stop, middle), tl.minimum(end + high, rows)


@triton.jit
def step_of(row_stride, token, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """Elements from a row of a piece to the next."""
    if WIDE:
        row_stride = row_stride.to(tl.int64)
    return row_stride * token * UNIT


@triton.jit
def row_pointers(first, step, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """`(BLOCK, BLOCK_D)`: the elements of rows `step` elements apart, the first of which begins at `first`."""
    row = tl.arange(0, BLOCK)
    if WIDE:  # elsewhere the steps inside a tile fit 32 bits, which takes half the registers
        row = row.to(tl.int64)
    return first + row[:, None] * step + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_rows(pointers, there, in_row, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """A tile of rows, zeros where there are none. A whole tile is loaded without a mask."""
    if MASKED:
        rows = tl.load(pointers, mask=there[:, None] & in_row[None, :], other=0.0)
    elif PADDED:
        rows = tl.load(pointers, mask=in_row[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def rows_of(
    first, head_step, step, rows, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """What tiles of the rows of some heads are loaded from: pointers to the first one, or a descriptor that the program makes."""
    if DESCRIBED:
        return tl.make_tensor_descriptor(first, [HEADS, rows, D], [head_step, step, 1], [1, BLOCK, BLOCK_D])
    else:
        return row_pointers(first, step, BLOCK, BLOCK_D, WIDE)


@triton.jit
def load_described(rows, lane, start, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, HOST: tl.constexpr = False):
    """A tile of rows, zeros where there are none: the descriptor knows the end of rows and of elements.

    `lane` is a head, or in a descriptor that the host made (segment, offset, head).
    """
    if HOST:
        tile = rows.load([lane[0], lane[1], lane[2], tl.cast(start, tl.int32), 0])
    else:
        tile = rows.load([tl.cast(lane, tl.int32), tl.cast(start, tl.int32), 0])
    return tile.reshape(BLOCK, BLOCK_D)


@triton.jit
def load_visible(IGNORED, n, step, keys, IGNORES: tl.constexpr):
    """Which of the keys `n` may be seen."""
    visible = n < keys
    if IGNORES:
        visible = visible & (tl.load(IGNORED + n.to(tl.int64) * step, mask=visible, other=0) == 0)
    return visible


@triton.jit
def visible_range(IGNORED, step, begin, end, keys, BLOCK: tl.constexpr):
    """`(first, end)`: the part of `begin ... end` without the ignored keys at either side, which are not computed."""
    first = end
    last = 0
    for start in range(begin, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        visible = load_visible(IGNORED, n, step, tl.minimum(keys, end), True)
        first = tl.minimum(first, tl.min(tl.where(visible, n, end)))
        last = tl.maximum(last, tl.max(tl.where(visible, n + 1, 0)))
    return first, last
