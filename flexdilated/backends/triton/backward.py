"""Backward: the pass over all rows before it, gradients of keys and values, gradients of queries, added in place."""

import triton
import triton.language as tl

from flexdilated.backends.triton.places import (
    BAND,
    PIECE_FIELDS,
    band_tiles,
    load_described,
    load_rows,
    load_visible,
    own_piece,
    place,
    row_pointers,
    rows_of,
    step_of,
    strides,
    visible_range,
)

LOG2E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))
ROWS_AND_MASK = ("rows_batch", "rows_head", "ignored_batch", "ignored_token")
SCANNED = tl.constexpr(1024)  # columns of a key padding mask at once


@triton.jit(do_not_specialize=(*strides("out", "dout", "lse", "dlse"), "tokens", "heads", "tiles"))
def prepare(
    OUT, DOUT, LSE, DLSE, ROWS,
    out_batch, out_token, out_head, dout_batch, dout_token, dout_head,
    lse_batch, lse_token, lse_head, dlse_batch, dlse_token, dlse_head, tokens, heads, tiles,
    HAS_DLSE: tl.constexpr, DETACHED: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """`ROWS = (lse, delta)` of every row: lse in base 2, `delta = rowsum(dout out) - dlse`.

    Both in one sector of memory, since strided rows are read alone. Where nothing was seen lse is +inf: the weights
    `exp2(score - lse)` are then 0, and no loop has to look for such rows; and delta is 0, whatever the gradient of -inf is.
    Constant mixing weights: delta lacks its sum.
    """
    tile = tl.program_id(0) % tiles
    lane = tl.program_id(0) // tiles
    h = (lane % heads).to(tl.int64)
    b = (lane // heads).to(tl.int64)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m.to(tl.int64)
    there = m < tokens
    delta = tl.zeros([BLOCK_M], tl.float32)
    if not DETACHED:
        d = tl.arange(0, BLOCK_D)
        in_row = d < D
        out = OUT + (b * out_batch + h * out_head) * UNIT + (row[:, None] * out_token * UNIT + d[None, :])
        dout = DOUT + (b * dout_batch + h * dout_head) * UNIT + (row[:, None] * dout_token * UNIT + d[None, :])
        out = load_rows(out, there, in_row, True, True).to(tl.float32)
        dout = load_rows(dout, there, in_row, True, True).to(tl.float32)
        delta = tl.sum(out * dout, 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + b * dlse_batch + h * dlse_head + row * dlse_token, mask=there, other=0.0)
    lse = tl.load(LSE + b * lse_batch + h * lse_head + row * lse_token, mask=there, other=0.0)
    at = 2 * ((b * heads + h) * tokens + row)
    reached = lse != -INFINITY
    tl.store(ROWS + at, tl.where(reached, lse * LOG2E, INFINITY), mask=there)
    tl.store(ROWS + at + 1, tl.where(reached, delta, 0.0), mask=there)


@triton.jit
def keys_tiles(
    dk, dv, k, v, Q, DOUT, ROWS, DQ, first, edges, last, tiles, q_head, q_step, dout_head, dout_step, rows_head, row_stride, n,
    keys, queries, scale, in_row, low, high, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, PADDED: tl.constexpr, DESCRIBED: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of keys `n` and their values after `tiles` more tiles of queries of each head. Queries after the end weigh nothing.

    The tiles are neighbours from query `first` on; where masked, only `edges` of them, and perhaps one that begins at `last`. For a
    window, any number of tiles begin there.
    """
    # The first tile of a loop is loaded ahead of it if there is one, and what leads to it is computed in any case: by a division by
    # 0 the compiler would conclude that there is one, and the load would arrive in shared memory that is used again by then.
    divisor = tl.maximum(tiles, 1)
    if tiles > 0:  # or no product overlaps another, as in `attend_tiles`
        for i in range(GROUP * tiles):
            g = (i // divisor).to(tl.int64) if GROUP > 1 else 0
            t = i % divisor if GROUP > 1 else i
            later = last + (t - edges) * BLOCK_M if WINDOWED else last
            j = tl.where(t < edges, first + t * BLOCK_M, later) if MASKED else first + t * BLOCK_M
            m = j + tl.arange(0, BLOCK_M)
            at = tl.cast(j, tl.int64)
            if DESCRIBED:
                q, dout = load_described(Q, g, j, BLOCK_M, BLOCK_D), load_described(DOUT, g, j, BLOCK_M, BLOCK_D)
            else:
                q = load_rows(Q + (g * q_head + at * q_step), m < queries, in_row, MASKED, PADDED)
                dout = load_rows(DOUT + (g * dout_head + at * dout_step), m < queries, in_row, MASKED, PADDED)
            rows = ROWS + 2 * (g * rows_head + m.to(tl.int64) * row_stride)
            lse = tl.load(rows, mask=m < queries, other=INFINITY) if MASKED else tl.load(rows)
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # keys down, queries across
            p = tl.exp2(scores * scale - lse[None, :])
            if MASKED and WINDOWED:
                apart = n[:, None] - m[None, :]
                joined = (apart >= low) & (apart <= high)
                p = tl.where(joined & (n < keys)[:, None] if SUMS else joined, p, 0.0)
            elif MASKED and CAUSAL:
                joined = m[None, :] >= n[:, None]
                p = tl.where(joined & (n < keys)[:, None] if SUMS else joined, p, 0.0)
            elif MASKED and SUMS:  # dq would have infinity times a key of zeros
                p = tl.where((n < keys)[:, None], p, 0.0)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            delta = tl.load(rows + 1, mask=m < queries, other=0.0) if MASKED else tl.load(rows + 1)
            dscores = (p * (dp - delta[None, :])).to(q.dtype)
            dk = tl.dot(dscores, q, dk, input_precision=PRECISION)
            if SUMS:
                # Not as trans(dscores) times k: a left operand transposed in registers gave wrong numbers on Hopper
                # (https://github.com/fla-org/flash-linear-attention/pull/826). Here dscores is the right one, in shared memory.
                dq = tl.trans(tl.dot(tl.trans(k), dscores, input_precision=PRECISION))
                DQ.atomic_add([tl.cast(g, tl.int32), tl.cast(j, tl.int32), 0], dq.reshape(1, BLOCK_M, BLOCK_D))
    return dk, dv


@triton.jit
def store(GRAD, grad, stored, in_row, ADDS: tl.constexpr):
    """A gradient in its place, added to that of earlier branches."""
    if ADDS:
        grad += load_rows(GRAD, stored, in_row, True, True).to(tl.float32)
    tl.store(GRAD, grad.to(GRAD.dtype.element_ty), mask=stored[:, None] & in_row[None, :])


@triton.jit(do_not_specialize=(*strides("q", "k", "v", "dout", "dk", "dv", "dq"), *ROWS_AND_MASK, *PIECE_FIELDS, *BAND))
def differentiate_keys(
    Q, K, V, DOUT, ROWS, IGNORED, TABLE, OWNERS, DK, DV, DQ,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, dout_batch, dout_token, dout_head,
    dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head, dq_batch, dq_token, dq_head, rows_batch, rows_head,
    ignored_batch, ignored_token,
    tiles, heads, offsets, segments, token, segment_stride, key_shift, head, offset_head_step, head_step, row_stride, queries, keys,
    zero_keys, low, high, score_scale, scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, IGNORES: tl.constexpr, ADDS: tl.constexpr,
    SUMS: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, TABLED: tl.constexpr,
    DESCRIBED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys: one flat loop over its queries, tile after tile and head after head of the group.

    A loop inside a loop would keep pointers of both in registers. `score_scale` is `scale` in base 2. `SUMS`, not with `IGNORES`:
    dq without its factor `scale` is added to `DQ`, float32, by programs in any order.
    """
    PADDED: tl.constexpr = BLOCK_D != D
    program = tl.program_id(0)
    if TABLED:
        (
            program, tiles, heads, offsets, segments, token, segment_stride, key_shift, head, offset_head_step, head_step,
            row_stride, queries, keys, _, low, high,
        ) = own_piece(TABLE, OWNERS, WINDOWED)  # fmt: skip
    tile = program % tiles
    b, kv_head, _, first = place(
        program // tiles, 1, heads, offsets, segments, token, segment_stride, head, offset_head_step, head_step
    )  # fmt: skip
    first_key = first + key_shift
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = tl.arange(0, BLOCK_D) < D
    begin_n = (tile * BLOCK_N).to(tl.int64)
    k_step, v_step = step_of(row_stride, k_token, UNIT, WIDE), step_of(row_stride, v_token, UNIT, WIDE)
    K += (b * k_batch + kv_head * k_head + first_key * k_token) * UNIT + begin_n * k_step
    V += (b * v_batch + kv_head * v_head + first_key * v_token) * UNIT + begin_n * v_step
    if IGNORES:
        IGNORED += b * ignored_batch + first_key * ignored_token
    visible = load_visible(IGNORED, n, row_stride * ignored_token, keys, IGNORES)
    k = load_rows(row_pointers(K, k_step, BLOCK_N, BLOCK_D, WIDE), visible, in_row, True, PADDED)
    v = load_rows(row_pointers(V, v_step, BLOCK_N, BLOCK_D, WIDE), visible, in_row, True, PADDED)

    h = kv_head * GROUP
    q_step, dout_step = step_of(row_stride, q_token, UNIT, WIDE), step_of(row_stride, dout_token, UNIT, WIDE)
    Q += (b * q_batch + h * q_head + first * q_token) * UNIT
    DOUT += (b * dout_batch + h * dout_head + first * dout_token) * UNIT
    q_head, dout_head = tl.cast(q_head, tl.int64) * UNIT, tl.cast(dout_head, tl.int64) * UNIT
    Q = rows_of(Q, q_head, q_step, queries, GROUP, D, BLOCK_M, BLOCK_D, WIDE, DESCRIBED)
    DOUT = rows_of(DOUT, dout_head, dout_step, queries, GROUP, D, BLOCK_M, BLOCK_D, WIDE, DESCRIBED)
    if SUMS:
        DQ += (b * dq_batch + h * dq_head + first * dq_token) * UNIT
        dq_head, dq_step = tl.cast(dq_head, tl.int64) * UNIT, step_of(row_stride, dq_token, UNIT, WIDE)
        DQ = rows_of(DQ, dq_head, dq_step, queries, GROUP, D, BLOCK_M, BLOCK_D, WIDE, True)
    ROWS += 2 * (b * rows_batch + h * rows_head + first)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    # Tiles of queries: `edges` on the diagonal, `wholes` that take no mask, and perhaps one at the ragged end.
    begin = tile * BLOCK_N // BLOCK_M * BLOCK_M if CAUSAL else 0
    edges = tl.maximum(tl.cdiv(tl.minimum(tile * BLOCK_N + BLOCK_N, queries) - begin, BLOCK_M), 0) if CAUSAL else 0
    if SUMS:  # keys after the end need a mask
        edges = tl.where(tile * BLOCK_N + BLOCK_N > keys, tl.maximum(tl.cdiv(queries - begin, BLOCK_M), 0), edges)
    middle = begin + edges * BLOCK_M
    wholes = tl.maximum(queries // BLOCK_M - middle // BLOCK_M, 0)
    last = middle + wholes * BLOCK_M
    masked = edges + (last < queries).to(tl.int32)
    if WINDOWED:  # edges before and after the wholes
        begin, middle, stop, end = band_tiles(
            tile * BLOCK_N, tl.minimum(tile * BLOCK_N + BLOCK_N, keys), -high, -low, queries, BLOCK_M
        )  # fmt: skip
        if SUMS:
            stop = tl.where(tile * BLOCK_N + BLOCK_N > keys, middle, stop)
        edges, wholes, last = (middle - begin) // BLOCK_M, (stop - middle) // BLOCK_M, stop
        masked = tl.maximum(tl.cdiv(end - begin, BLOCK_M) - wholes, 0)
    if IGNORES:
        any_visible = tl.max(visible.to(tl.int32))
        wholes, masked = wholes * any_visible, masked * any_visible
    dk, dv = keys_tiles(
        dk, dv, k, v, Q, DOUT, ROWS, DQ, middle, 0, 0, wholes, q_head, q_step, dout_head, dout_step, rows_head, row_stride, n, keys,
        queries, score_scale, in_row, low, high, GROUP, CAUSAL, WINDOWED, False, PADDED, DESCRIBED, SUMS, PRECISION, BLOCK_M,
        BLOCK_D,
    )  # fmt: skip
    dk, dv = keys_tiles(
        dk, dv, k, v, Q, DOUT, ROWS, DQ, begin, edges, last, masked, q_head, q_step, dout_head, dout_step, rows_head, row_stride, n,
        keys, queries, score_scale, in_row, low, high, GROUP, CAUSAL, WINDOWED, True, PADDED, DESCRIBED, SUMS, PRECISION, BLOCK_M,
        BLOCK_D,
    )  # fmt: skip

    if IGNORES:  # scores of ignored keys are no scores
        dk, dv = tl.where(visible[:, None], dk, 0.0), tl.where(visible[:, None], dv, 0.0)
    dk_step, dv_step = step_of(row_stride, dk_token, UNIT, WIDE), step_of(row_stride, dv_token, UNIT, WIDE)
    DK += (b * dk_batch + kv_head * dk_head + first_key * dk_token) * UNIT + begin_n * dk_step
    DV += (b * dv_batch + kv_head * dv_head + first_key * dv_token) * UNIT + begin_n * dv_step
    store(row_pointers(DK, dk_step, BLOCK_N, BLOCK_D, WIDE), dk * scale, n < keys, in_row, ADDS)
    store(row_pointers(DV, dv_step, BLOCK_N, BLOCK_D, WIDE), dv, n < keys, in_row, ADDS)


@triton.jit
def queries_tiles(
    dq, q, dout, lse, delta, K, V, IGNORED, start, end, k_step, v_step, ignored_step, m, keys, scale, in_row,
    low, high, middle, skipped, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, IGNORES: tl.constexpr,
    PADDED: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of queries `m` after keys `start` to `end`; of a window as in `attend_tiles`."""
    if start < end:  # or no product overlaps another, as in `attend_tiles`
        for i in range(start, end, BLOCK_N):
            j = tl.where(i < middle, i, i + skipped) if MASKED and WINDOWED else i
            n = j + tl.arange(0, BLOCK_N)
            at = tl.cast(j, tl.int64)
            there = load_visible(IGNORED, n, ignored_step, keys, IGNORES)
            if DESCRIBED:
                k, v = load_described(K, 0, j, BLOCK_N, BLOCK_D), load_described(V, 0, j, BLOCK_N, BLOCK_D)
            else:
                k = load_rows(K + at * k_step, there, in_row, MASKED, PADDED)
                v = load_rows(V + at * v_step, there, in_row, MASKED, PADDED)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            p = tl.exp2(scores * scale - lse[:, None])
            if MASKED:
                visible = there[None, :]
                if WINDOWED:
                    visible = visible & (n[None, :] - m[:, None] >= low) & (n[None, :] - m[:, None] <= high)
                elif CAUSAL:
                    visible = visible & (m[:, None] >= n[None, :])
                p = tl.where(visible, p, 0.0)
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
            dscores = (p * (dp - delta[:, None])).to(k.dtype)
            dq = tl.dot(dscores, k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=(*strides("q", "k", "v", "dout", "dq"), *ROWS_AND_MASK, *PIECE_FIELDS, *BAND))
def differentiate_queries(
    Q, K, V, DOUT, ROWS, IGNORED, TABLE, OWNERS, DQ,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, dout_batch, dout_token, dout_head,
    dq_batch, dq_token, dq_head, rows_batch, rows_head, ignored_batch, ignored_token,
    tiles, heads, offsets, segments, token, segment_stride, key_shift, head, offset_head_step, head_step, row_stride, queries, keys,
    zero_keys, low, high, score_scale, scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, IGNORES: tl.constexpr, ADDS: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, TABLED: tl.constexpr, DESCRIBED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries."""
    PADDED: tl.constexpr = BLOCK_D != D
    program = tl.program_id(0)
    if TABLED:
        (
            program, tiles, heads, offsets, segments, token, segment_stride, key_shift, head, offset_head_step, head_step,
            row_stride, queries, keys, _, low, high,
        ) = own_piece(TABLE, OWNERS, WINDOWED)  # fmt: skip
    tile = tiles - 1 - program % tiles  # where causal, the long ones first
    b, kv_head, g, first = place(
        program // tiles, GROUP, heads, offsets, segments, token, segment_stride, head, offset_head_step, head_step
    )  # fmt: skip
    h, first_key = kv_head * GROUP + g, first + key_shift
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_row = tl.arange(0, BLOCK_D) < D
    begin = (tile * BLOCK_M).to(tl.int64)
    q_step, dout_step = step_of(row_stride, q_token, UNIT, WIDE), step_of(row_stride, dout_token, UNIT, WIDE)
    k_step, v_step = step_of(row_stride, k_token, UNIT, WIDE), step_of(row_stride, v_token, UNIT, WIDE)
    Q += (b * q_batch + h * q_head + first * q_token) * UNIT + begin * q_step
    DOUT += (b * dout_batch + h * dout_head + first * dout_token) * UNIT + begin * dout_step
    K += (b * k_batch + kv_head * k_head + first_key * k_token) * UNIT
    V += (b * v_batch + kv_head * v_head + first_key * v_token) * UNIT
    K = rows_of(K, k_step, k_step, keys, 1, D, BLOCK_N, BLOCK_D, WIDE, DESCRIBED)
    V = rows_of(V, v_step, v_step, keys, 1, D, BLOCK_N, BLOCK_D, WIDE, DESCRIBED)
    if IGNORES:
        IGNORED += b * ignored_batch + first_key * ignored_token
    ignored_step = row_stride * ignored_token
    q = load_rows(row_pointers(Q, q_step, BLOCK_M, BLOCK_D, WIDE), m < queries, in_row, True, PADDED)
    dout = load_rows(row_pointers(DOUT, dout_step, BLOCK_M, BLOCK_D, WIDE), m < queries, in_row, True, PADDED)
    ROWS += 2 * (b * rows_batch + h * rows_head + first + m.to(tl.int64) * row_stride)
    lse = tl.load(ROWS, mask=m < queries, other=INFINITY)
    delta = tl.load(ROWS + 1, mask=m < queries, other=0.0)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start, middle = 0, 0
    end = tl.minimum(tile * BLOCK_M + BLOCK_M, keys) if CAUSAL else keys
    stop = (tl.minimum(tile * BLOCK_M, keys) if CAUSAL else keys) // BLOCK_N * BLOCK_N
    if WINDOWED:
        start, middle, stop, end = band_tiles(
            tile * BLOCK_M, tl.minimum(tile * BLOCK_M + BLOCK_M, queries), low, high, keys, BLOCK_N
        )  # fmt: skip
    if IGNORES:
        start, end = visible_range(IGNORED, ignored_step, start, end, keys, SCANNED)
        start = start // BLOCK_N * BLOCK_N
        stop = middle
    else:
        dq = queries_tiles(
            dq, q, dout, lse, delta, K, V, IGNORED, middle, stop, k_step, v_step, ignored_step, m, keys, score_scale, in_row,
            low, high, 0, 0, CAUSAL, WINDOWED, False, False, PADDED, DESCRIBED, PRECISION, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if WINDOWED:
            end -= stop - middle
        else:
            start = stop
    dq = queries_tiles(
        dq, q, dout, lse, delta, K, V, IGNORED, start, end, k_step, v_step, ignored_step, m, keys, score_scale, in_row,
        low, high, middle, stop - middle, CAUSAL, WINDOWED, True, IGNORES, PADDED, DESCRIBED, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    dq_step = step_of(row_stride, dq_token, UNIT, WIDE)
    DQ += (b * dq_batch + h * dq_head + first * dq_token) * UNIT + begin * dq_step
    store(row_pointers(DQ, dq_step, BLOCK_M, BLOCK_D, WIDE), dq * scale, m < queries, in_row, ADDS)
