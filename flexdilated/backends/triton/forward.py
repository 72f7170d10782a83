"""Forward: a tile of queries against the keys of its segment, merged in place with what earlier branches gave."""

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

LN2 = tl.constexpr(0.6931471805599453)
INFINITY = tl.constexpr(float("inf"))
SCANNED = tl.constexpr(1024)  # columns of a key padding mask at once


@triton.jit
def attend_tiles(
    top, total, acc, q, K, V, lane, IGNORED, start, end, k_step, v_step, ignored_step, m, keys, scale, in_row,
    low, high, middle, skipped, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, IGNORES: tl.constexpr,
    PADDED: tl.constexpr, DESCRIBED: tl.constexpr, HOST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The running softmax of queries `m` after keys `start` to `end`: largest score (base 2), sum of weights, weighted values.

    For a window, the masked loop skips `skipped` keys from key `middle` on: the tiles that the unmasked loop takes.

    The condition repeats what the loop tests itself. Without it ptxas makes a kernel for sm_90 wait after every product, because a
    loop may have no turns (its warning C7515).
    """
    if start < end:
        for i in range(start, end, BLOCK_N):
            j = tl.where(i < middle, i, i + skipped) if MASKED and WINDOWED else i
            n = j + tl.arange(0, BLOCK_N)
            at = tl.cast(j, tl.int64)
            there = load_visible(IGNORED, n, ignored_step, keys, IGNORES)
            if DESCRIBED:
                k = load_described(K, lane, j, BLOCK_N, BLOCK_D, HOST)
            else:
                k = load_rows(K + at * k_step, there, in_row, MASKED, PADDED)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if MASKED:
                visible = there[None, :]
                if WINDOWED:
                    visible = visible & (n[None, :] - m[:, None] >= low) & (n[None, :] - m[:, None] <= high)
                elif CAUSAL:
                    visible = visible & (m[:, None] >= n[None, :])
                scores = tl.where(visible, scores * scale, -INFINITY)
                new = tl.maximum(top, tl.max(scores, 1))
            else:
                new = tl.maximum(top, tl.max(scores, 1) * scale)
            base = tl.where(new == -INFINITY, 0.0, new)  # rows that no key has reached yet
            p = tl.exp2(scores - base[:, None]) if MASKED else tl.exp2(scores * scale - base[:, None])
            fade = tl.exp2(top - base)
            if DESCRIBED:
                v = load_described(V, lane, j, BLOCK_N, BLOCK_D, HOST)
            else:
                v = load_rows(V + at * v_step, there, in_row, MASKED, PADDED)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
            top, total = new, total * fade + tl.sum(p, 1)
    return top, total, acc


@triton.jit
def attend_tiles_ahead(
    top, total, acc, q, K, V, lane, start, end, k_step, v_step, scale, in_row, PADDED: tl.constexpr, DESCRIBED: tl.constexpr,
    HOST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`attend_tiles` without a mask, with the product of queries and the next keys issued before the softmax of these keys.

    Tensor cores then have work while `exp2` is computed. After the last keys that product is computed again, for nothing.
    """
    if start < end:
        scores = scores_of(q, K, lane, start, k_step, in_row, PADDED, DESCRIBED, HOST, PRECISION, BLOCK_N, BLOCK_D)
        for j in range(start, end, BLOCK_N):
            following = tl.minimum(j + BLOCK_N, end - BLOCK_N)
            ahead = scores_of(q, K, lane, following, k_step, in_row, PADDED, DESCRIBED, HOST, PRECISION, BLOCK_N, BLOCK_D)
            new = tl.maximum(top, tl.max(scores, 1) * scale)
            base = tl.where(new == -INFINITY, 0.0, new)
            p = tl.exp2(scores * scale - base[:, None])
            fade = tl.exp2(top - base)
            if DESCRIBED:
                v = load_described(V, lane, j, BLOCK_N, BLOCK_D, HOST)
            else:
                v = load_rows(V + tl.cast(j, tl.int64) * v_step, in_row, in_row, False, PADDED)
            top, total = new, total * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
            scores = ahead
    return top, total, acc


@triton.jit
def scores_of(
    q, K, lane, j, k_step, in_row, PADDED: tl.constexpr, DESCRIBED: tl.constexpr, HOST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The product of queries and a whole tile of keys from key `j` on."""
    if DESCRIBED:
        k = load_described(K, lane, j, BLOCK_N, BLOCK_D, HOST)
    else:
        k = load_rows(K + tl.cast(j, tl.int64) * k_step, in_row, in_row, False, PADDED)
    return tl.dot(q, tl.trans(k), input_precision=PRECISION)


@triton.jit
def merge(OUT, LSE, acc, lse, stored, in_row):
    """Store a partial attention, merged with the one that is there. Rows that neither side reaches stay 0 and -inf."""
    lse_before = tl.load(LSE, mask=stored, other=-INFINITY)
    high = tl.maximum(lse_before, lse)
    base = tl.where(high == -INFINITY, 0.0, high)
    keep, add = tl.exp(lse_before - base), tl.exp(lse - base)
    weight = keep + add
    reached = weight != 0.0  # NaN, too, was reached: it stays
    weight = tl.where(reached, weight, 1.0)
    share = 1.0 / weight
    before = load_rows(OUT, stored, in_row, True, True).to(tl.float32)
    merged = before * (keep * share)[:, None] + acc * (add * share)[:, None]
    tl.debug_barrier()  # warps that hold the same rows have all read them
    tl.store(OUT, merged.to(OUT.dtype.element_ty), mask=stored[:, None] & in_row[None, :])
    tl.store(LSE, tl.where(reached, base + tl.log(weight), -INFINITY), mask=stored)


@triton.jit(
    do_not_specialize=(
        *strides("q", "k", "v", "out"),
        "lse_batch",
        "lse_head",
        "ignored_batch",
        "ignored_token",
        *PIECE_FIELDS,
        *BAND,
    )
)
def attend(
    Q, K, V, OUT, LSE, IGNORED, ROWS, OWN, TABLE, OWNERS,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, out_batch, out_token, out_head,
    lse_batch, lse_head, ignored_batch, ignored_token,
    tiles, heads, offsets, segments, token, segment_stride, key_shift, head, offset_head_step, head_step, row_stride, queries, keys,
    zero_keys, low, high, scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, IGNORES: tl.constexpr, END: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, TABLED: tl.constexpr, DESCRIBED: tl.constexpr,
    HOST: tl.constexpr, AHEAD: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries. `END` is what becomes of its output: `"write"`, `"merge"`, or `"delta"`.

    That last one is for the backward under constant mixing weights, where OUT is dout: `OWN = (lse, delta)` of this branch alone,
    from `ROWS = (lse, -dlse)` of the mixture. Strides of q, k, v and out are in units of `UNIT` elements, so that the
    compiler knows how far loads are aligned; `scale` is positive, in base 2. `HOST`: K and V are descriptors of
    `(batch x segment, offset, head, row, element)`.
    """
    PADDED: tl.constexpr = BLOCK_D != D
    program = tl.program_id(0)
    if TABLED:
        (
            program, tiles, heads, offsets, segments, token, segment_stride, key_shift, head, offset_head_step, head_step,
            row_stride, queries, keys, zero_keys, low, high,
        ) = own_piece(TABLE, OWNERS, WINDOWED)  # fmt: skip
    tile = tiles - 1 - program % tiles  # where causal, the long ones first
    b, kv_head, g, first = place(
        program // tiles, GROUP, heads, offsets, segments, token, segment_stride, head, offset_head_step, head_step
    )  # fmt: skip
    h, first_key = kv_head * GROUP + g, first + key_shift
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_row = tl.arange(0, BLOCK_D) < D
    q_step = step_of(row_stride, q_token, UNIT, WIDE)
    k_step, v_step = step_of(row_stride, k_token, UNIT, WIDE), step_of(row_stride, v_token, UNIT, WIDE)
    begin = (tile * BLOCK_M).to(tl.int64)
    Q += (b * q_batch + h * q_head + first * q_token) * UNIT + begin * q_step
    at = program // tiles // GROUP
    lane = (at // heads // offsets, at // heads % offsets, at % heads) if HOST else 0
    if not HOST:
        K += (b * k_batch + kv_head * k_head + first_key * k_token) * UNIT
        V += (b * v_batch + kv_head * v_head + first_key * v_token) * UNIT
        K = rows_of(K, k_step, k_step, keys, 1, D, BLOCK_N, BLOCK_D, WIDE, DESCRIBED)
        V = rows_of(V, v_step, v_step, keys, 1, D, BLOCK_N, BLOCK_D, WIDE, DESCRIBED)
    if IGNORES:
        IGNORED += b * ignored_batch + first_key * ignored_token
    ignored_step = row_stride * ignored_token
    q = load_rows(row_pointers(Q, q_step, BLOCK_M, BLOCK_D, WIDE), m < queries, in_row, True, PADDED)

    # Zero keys have logit 0 and value 0.
    top = tl.where(m * 0 + zero_keys > 0, 0.0, -INFINITY)
    total = tl.zeros([BLOCK_M], tl.float32) + zero_keys
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
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
    else:  # tiles of keys that every query sees, before those that take a mask
        if AHEAD:
            top, total, acc = attend_tiles_ahead(
                top, total, acc, q, K, V, lane, middle, stop, k_step, v_step, scale, in_row, PADDED, DESCRIBED, HOST, PRECISION,
                BLOCK_N, BLOCK_D,
            )  # fmt: skip
        else:
            top, total, acc = attend_tiles(
                top, total, acc, q, K, V, lane, IGNORED, middle, stop, k_step, v_step, ignored_step, m, keys, scale, in_row,
                low, high, 0, 0, CAUSAL, WINDOWED, False, False, PADDED, DESCRIBED, HOST, PRECISION, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        if WINDOWED:
            end -= stop - middle
        else:
            start = stop
    top, total, acc = attend_tiles(
        top, total, acc, q, K, V, lane, IGNORED, start, end, k_step, v_step, ignored_step, m, keys, scale, in_row,
        low, high, middle, stop - middle, CAUSAL, WINDOWED, True, IGNORES, PADDED, DESCRIBED, HOST, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    reached = total != 0.0  # NaN is reached: it stays
    total = tl.where(reached, total, 1.0)
    acc = acc * (1.0 / total)[:, None]
    lse = tl.where(reached, (top + tl.log2(total)) * LN2, -INFINITY)
    out_step = step_of(row_stride, out_token, UNIT, WIDE)
    OUT += (b * out_batch + h * out_head + first * out_token) * UNIT + begin * out_step
    OUT = row_pointers(OUT, out_step, BLOCK_M, BLOCK_D, WIDE)
    at = b * lse_batch + h * lse_head + first + m.to(tl.int64) * row_stride
    stored = m < queries
    if END == "merge":
        merge(OUT, LSE + at, acc, lse, stored, in_row)
    elif END == "write":
        tl.store(OUT, acc.to(OUT.dtype.element_ty), mask=stored[:, None] & in_row[None, :])
        tl.store(LSE + at, lse, mask=stored)
    else:
        dout = load_rows(OUT, stored, in_row, True, PADDED).to(tl.float32)
        delta = tl.sum(acc * dout, 1) + tl.load(ROWS + 2 * at + 1, mask=stored, other=0.0)
        tl.store(OWN + 2 * at, tl.load(ROWS + 2 * at, mask=stored, other=0.0), mask=stored)
        tl.store(OWN + 2 * at + 1, delta, mask=stored)
