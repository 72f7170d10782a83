"""Launches of the kernels: pieces in place, and dense boxes as other kernels take them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flexdilated.backends.kernel import Options, with_positive_scale
from flexdilated.backends.measured import constants as tuned_constants
from flexdilated.backends.triton.backward import differentiate_keys, differentiate_queries, prepare
from flexdilated.backends.triton.forward import attend
from flexdilated.backends.triton.groups import PieceGroup, graph_stage, groups, table_of
from flexdilated.backends.triton.tiles import (
    MOST_AHEAD,
    MOST_SUMS,
    ROW_BYTES,
    TileConfig,
    ahead_tiles,
    is_aligned,
    longer,
    padded,
    tiles_of,
    unmeasured_tiles,
)
from flexdilated.core.hardware import detect
from flexdilated.core.lse import accumulated
from flexdilated.core.pieces import UNBOUNDED, Piece

LOG2E = math.log2(math.e)
INTERPRETED = (8, 0)  # the level whose tiles the interpreter takes

# Whether loops may load rows by tensor descriptors; tiles.py selects them. `benchmarks.gpu` has a backend that turns it off.
DESCRIBES = True
# Forms that no GPU has run. HOSTS: the forward loads keys and values by descriptors that the host makes. AHEAD: its products come
# ahead of the softmax. LONG: longer tiles of the forward. SUMS: all gradients by one kernel; dq is summed in varying order, so not
# under deterministic algorithms of torch. None: on only where `flexdilated tune` found the form right and faster.
HOSTS: bool | None = None
AHEAD: bool | None = None
LONG: bool | None = None
SUMS: bool | None = None

# The launches of a call by its pieces, shapes, strides and options. Tests and benchmarks that replace tiles replace it too.
# Calls with more pieces are not kept: they are packed documents, whose boundaries rarely repeat.
PLANS: dict[tuple[Any, ...], tuple[Any, ...]] = {}
MOST_PLANS, MOST_PIECES = 256, 64


class Launch(NamedTuple):
    """The arguments of a launch except tensors and scales: `numbers` are strides, `PIECE_FIELDS` and `BAND`.

    In a launch of a table of pieces, the integers `PIECE_FIELDS` are 0. The integers `BAND` are None without a window.

    `hosted`: the piece whose keys and values the host describes.
    """

    kernel: Any
    programs: int
    table: tuple[Sequence[Any], Any] | None  # what `table_of` takes
    numbers: tuple[int | None, ...]
    constants: dict[str, Any]
    tiles: TileConfig
    hosted: Piece | None = None


def forward(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, pieces: tuple[Piece, ...], options: Options) -> None:
    """Merge pieces into `out` `(B, N, H, D)` and `lse` `(B, H, N)`, contiguous, one launch for each group of them."""
    q, options, _ = with_positive_scale(q, options)
    q, k, v, options = readable(q), readable(k), readable(v), _with_readable_mask(options)
    tensors, mask, scale = (q, k, v, out), _mask(options), options.scale * LOG2E
    for planned in _planned(_plan_attend, pieces, options, tensors):
        _run(planned, (*tensors, lse, mask, None, None), (), (scale,), q)


def backward(
    grads: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: tuple[Piece, ...],
    options: Options,
    *,
    detaches: bool = False,
) -> None:
    """Add the gradients of pieces to `dq, dk, dv`, contiguous: one pass over all rows, then two launches for each group.

    `detaches`: with constant mixing weights, and a third launch. A pair's gradient is then `p (dout v^T - rowsum(dout out_i))` with
    the output of the branch alone: no more than its delta is another.
    """
    q, options, factor = with_positive_scale(q, options)
    q, k, v, out, dout = (readable(x) for x in (q, k, v, out, dout))
    options = _with_readable_mask(options)
    (dq, dk, dv), mask, score_scale = grads, _mask(options), options.scale * LOG2E
    rows = torch.empty((*lse.shape, 2), dtype=torch.float32, device=out.device)
    (preparation,) = _planned(_plan_prepare, (), options, (out, dout, lse, *(() if dlse is None else (dlse,))), detaches)
    _run(preparation, (out, dout, lse, dlse, rows), (), (), out)
    deltas = _planned(_plan_attend, pieces, options, (q, k, v, dout), "delta") if detaches else ()
    may_sum = _asks("SUMS", q) and q.shape[3] <= MOST_SUMS and not torch.are_deterministic_algorithms_enabled()
    may_sum = may_sum and _may_describe(options, q, dout)
    sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if may_sum else None
    launches_per_group = 2 if sums is None else 1
    launches = _planned(_plan_differentiate, pieces, options, (q, k, v, dout, dq, dk, dv), sums is not None)
    for number in range(len(launches) // launches_per_group):
        branch_rows = rows
        if detaches:
            branch_rows = torch.empty_like(rows)
            _run(deltas[number], (q, k, v, dout, None, mask, rows, branch_rows), (), (score_scale,), q)
        loaded, into = (q, k, v, dout, branch_rows, mask), (dk, dv, dq if sums is None else sums)
        _run(launches[launches_per_group * number], loaded, into, (score_scale, options.scale), q)
        if sums is None:
            _run(launches[launches_per_group * number + 1], loaded, (dq,), (score_scale, options.scale * factor), q)
    if sums is not None and pieces and pieces[0].covers:
        torch.mul(sums, options.scale * factor, out=dq)
    elif sums is not None:
        dq.add_(sums, alpha=options.scale * factor)


def _planned(make: Any, pieces: tuple[Piece, ...], options: Options, tensors: tuple[Tensor, ...], *mode: Any) -> tuple[Launch, ...]:
    """The launches that `make` plans, kept for pieces, shapes, strides and options."""
    if len(pieces) > MOST_PIECES:
        return tuple(make(pieces, options, tensors, *mode))
    kind = (options.is_causal, _mask_strides(options), options.ignored is None, allows_tf32(), graph_stage(tensors[0].device))
    layouts = [(x.shape, x.stride()) for x in tensors]
    key = (make, pieces, tensors[0].dtype, tensors[0].device, kind, DESCRIBES, HOSTS, AHEAD, LONG, mode, *layouts)
    launches = PLANS.get(key)
    if launches is None:
        if len(PLANS) >= MOST_PLANS:
            PLANS.clear()
        launches = PLANS[key] = tuple(make(pieces, options, tensors, *mode))
    return launches


def dense_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """`out`, `lse` of `(batch, heads, rows, D)` tensors."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulated(q.dtype), device=q.device)
    forward(out, lse, q, k, v, pieces=_whole(q, k, options), options=options)
    return out.transpose(1, 2), lse


def dense_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv` of `(batch, heads, rows, D)` tensors."""
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    backward((dq, dk, dv), dout, dlse, q, k, v, out=out, lse=lse, pieces=_whole(q, k, options), options=options)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _whole(q: Tensor, k: Tensor, options: Options) -> tuple[Piece]:
    """All queries `(B, M, H, D)` against all keys `(B, N, Hkv, D)`, or those in the band of the options."""
    low, high = (-UNBOUNDED, 0 if options.is_causal else UNBOUNDED) if options.band is None else options.band
    piece = Piece(
        token=0,
        segments=1,
        segment_stride=0,
        offsets=1,
        offset_head_step=0,
        head=0,
        heads=k.shape[2],
        head_step=1,
        rows=q.shape[1],
        row_stride=1,
        key_token=0,
        keys=k.shape[1],
        low=low,
        high=high,
        zero_keys=0,
        covers=True,
        branch=0,
    )
    return (piece,)


def unit_of(x: Tensor) -> int:
    """Elements that every row of D is aligned to, if its memory is: what one load takes, 16 bytes at most."""
    return math.gcd(x.shape[-1], ROW_BYTES // min(ROW_BYTES, x.element_size()))


def readable(x: Tensor) -> Tensor:
    """x itself if its rows are contiguous and aligned, else a copy."""
    if x.is_contiguous() and x.data_ptr() % ROW_BYTES == 0:  # as most are
        return x
    unit = unit_of(x)
    steps = (x.data_ptr() // x.element_size(), *(stride for size, stride in zip(x.shape[:-1], x.stride()[:-1]) if size > 1))
    if (x.stride(-1) == 1 or x.shape[-1] == 1) and all(step % unit == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _plan_attend(pieces: tuple[Piece, ...], options: Options, tensors: tuple[Tensor, ...], end: str = "") -> Iterator[Launch]:
    """One launch of `attend` for each group; for `"delta"`, the last tensor is dout."""
    q, k, v, out = tensors
    strides = (*_strides(*tensors), q.shape[2] * out.shape[1], out.shape[1], *_mask_strides(options))
    forms = ("HOSTS", "AHEAD", "LONG")  # `flexdilated tune` checks no other end
    hosts, forward_ahead, long = (HOSTS, AHEAD, LONG) if end else (_asks(form, q) for form in forms)
    for group in groups(pieces, q.device):
        sample, stacked = group
        hosted = bool(hosts) and stacked is sample and _may_describe(options, k, v) and all(_may_host(x, sample) for x in (k, v))
        # The tiles of this form fit the memory of Hopper. With a window, ptxas of triton 3.6.0 puts no product ahead.
        ahead = bool(forward_ahead) and not hosted and options.ignored is None and q.shape[3] <= MOST_AHEAD
        ahead = ahead and not sample.is_banded
        ahead = ahead and (_level(q)[0] == 9 or not q.is_cuda)
        tiles = _tiles(attend, q, sample, options=options, loaded=(k, v), group=q.shape[2] // k.shape[2], unmeasured=hosted)
        tiles = longer(tiles, q.shape[-1], q.element_size()) if long and not hosted else tiles
        if ahead:
            tiles = ahead_tiles(q.shape[3], q.element_size())
        count = -(-stacked.rows // tiles.queries)
        constants = _constants(*tensors, group=group, options=options, tiles=tiles)
        constants |= {"END": end or ("write" if sample.covers else "merge"), "HOST": tiles.host, "AHEAD": ahead}
        planned = _over(
            attend, stacked, tiles=count, lanes=_lanes(stacked, q, k), strides=strides, constants=constants, config=tiles
        )
        yield planned._replace(hosted=sample) if tiles.host else planned


def _plan_prepare(pieces: tuple[()], options: Options, tensors: tuple[Tensor, ...], detaches: bool) -> Iterator[Launch]:
    """The launch of `prepare`, which writes `(B, H, N, 2)`: lse in base 2 and delta of every row."""
    out, dout, lse, dlse = *tensors[:3], tensors[-1]
    batch, tokens, heads, head_dim = out.shape
    tiles = tiles_of(prepare.__name__, _level(out), head_dim, out.element_size())
    count = -(-tokens // tiles.queries)
    constants = {"HAS_DLSE": len(tensors) > 3, "DETACHED": detaches, "UNIT": unit_of(out)}
    constants |= {"D": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_M": tiles.queries}
    lse_strides = (stride for x in (lse, dlse) for stride in (x.stride(0), x.stride(2), x.stride(1)))
    numbers = (*_strides(out, dout), *lse_strides, tokens, heads, count)
    yield Launch(prepare, count * batch * heads, None, numbers, constants, tiles)


def _plan_differentiate(pieces: tuple[Piece, ...], options: Options, tensors: tuple[Tensor, ...], sums: bool) -> Iterator[Launch]:
    """Two launches for each group: the gradients of keys and values, then that of queries. With `sums`, the first computes all."""
    q, k, v, dout, dq, dk, dv = tensors
    rows, mask = (q.shape[2] * dout.shape[1], dout.shape[1]), _mask_strides(options)
    for group in groups(pieces, q.device):
        sample, piece = group
        for kernel, loaded, into, length, lanes in (
            (differentiate_keys, (q, dout), (dk, dv, dq), piece.keys, _lanes(piece, k, k)),
            (differentiate_queries, (k, v), (dq,), piece.rows, _lanes(piece, q, k)),
        )[: 1 if sums else 2]:
            tiles = _tiles(kernel, q, sample, options=options, loaded=loaded, group=q.shape[2] // k.shape[2], unmeasured=sums)
            count = -(-length // (tiles.keys if kernel is differentiate_keys else tiles.queries))
            strides = (*_strides(q, k, v, dout, *into), *rows, *mask)
            constants = _constants(q, k, v, dout, *into, group=group, options=options, tiles=tiles)
            constants |= {"ADDS": not sample.covers, **({"SUMS": sums} if kernel is differentiate_keys else {})}
            yield _over(kernel, piece, tiles=count, lanes=lanes, strides=strides, constants=constants, config=tiles)


def _run(
    planned: Launch, tensors: tuple[Tensor | None, ...], into: tuple[Tensor, ...], scales: tuple[float, ...], on: Tensor
) -> None:
    """Run a planned launch; its table, if it has one, comes between `tensors` and `into`."""
    table: tuple[Tensor | None, ...] = () if planned.kernel is prepare else (None, None)
    if planned.table is not None:
        table = table_of(*planned.table, on.device)
    if planned.hosted is not None:
        described = (_described_by_host(x, planned.hosted.of_keys(), planned.tiles) for x in tensors[1:3] if x is not None)
        tensors = (tensors[0], *described, *tensors[3:])
    arguments = (*tensors, *table, *into, *planned.numbers, *scales)
    _launch(planned.kernel, planned.programs, arguments, planned.constants, planned.tiles, on)


def _launch(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], tiles: TileConfig, on: Tensor
) -> None:
    if programs == 0:
        return
    with on_device(on):
        run = partial(kernel[(programs,)], *arguments, **constants, **options_of(tiles))
        if tiles.described and not tiles.host:
            copy_context().run(_with_allocator, run)  # a program's own allocator stays what it is
        else:
            run()


def _with_allocator(launch: Callable[[], object]) -> None:
    triton.set_allocator(_allocate)
    launch()


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for the descriptors of a launch's programs, 128 bytes each."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def options_of(tiles: TileConfig) -> dict[str, Any]:
    """What the compiler is asked for beside constants. Newer ones fuse no multiplication with an addition unasked."""
    return {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": True}


def on_device(x: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _tiles(
    kernel: Any, q: Tensor, piece: Piece, options: Options, loaded: tuple[Tensor, Tensor], group: int, unmeasured: bool
) -> TileConfig:
    if unmeasured:
        return unmeasured_tiles(kernel.__name__, q.shape[-1], q.element_size())
    length = piece.rows if kernel is differentiate_keys else piece.keys
    rows = length if DESCRIBES and options.ignored is None and all(_describable(x) for x in loaded) else 0
    return tiles_of(kernel.__name__, _level(q), q.shape[-1], q.element_size(), described_rows=rows, group=group)


def _asks(form: str, q: Tensor) -> bool:
    """Whether the constant of a form is on: as set in this file, else as kept by `flexdilated tune` for such rows."""
    constant: bool | None = globals()[form]
    return form in tuned_constants(q.device, q.dtype, q.shape[-1]) if constant is None else constant


def _describable(x: Tensor) -> bool:
    """Whether a descriptor takes the rows of a readable tensor: whole units of 16 bytes, none over another."""
    return is_aligned(x.shape[3], x.element_size()) and min(x.stride(1), x.stride(2)) >= x.shape[3]


def _may_describe(options: Options, *loaded: Tensor) -> bool:
    """Whether forms that need descriptors can run: without a mask, where hardware or the interpreter has descriptors."""
    return options.ignored is None and all(_describable(x) and (_level(x) >= (9, 0) or not x.is_cuda) for x in loaded)


def _may_host(x: Tensor, piece: Piece) -> bool:
    """Whether one descriptor covers the keys or values of a piece: a single stride leads over sequences and segments."""
    is_even = x.shape[0] == 1 or piece.segments == 1 or x.stride(0) == piece.segments * piece.segment_stride * x.stride(1)
    return (x.shape[0] == 1 or x.stride(0) > 0) and is_even


def _described_by_host(x: Tensor, piece: Piece, tiles: TileConfig) -> TensorDescriptor:
    """The keys or values of a piece as `(batch x segment, offset, head, row, element)`: hardware takes five dims."""
    batch, token, head = x.stride()[:3]
    segment = piece.segment_stride * token if piece.segments > 1 else batch
    sizes = (x.shape[0] * piece.segments, piece.offsets, piece.heads, piece.rows, x.shape[3])
    steps = (segment, token + piece.offset_head_step * head, piece.head_step * head, piece.row_stride * token, 1)
    strides = [step if size > 1 else x.shape[3] for step, size in zip(steps, sizes)]  # a single one needs an aligned step, too
    block = [1, 1, 1, tiles.keys, padded(x.shape[3])]
    return TensorDescriptor(x[:, piece.token :, piece.head :], list(sizes), [*strides[:-1], 1], block)


def _level(x: Tensor) -> tuple[int, int]:
    return detect(x.device).capability or INTERPRETED


def _lanes(piece: Piece, x: Tensor, k: Tensor) -> int:
    """Independent softmaxes of a piece, by heads of q or k; of each piece, where its fields are arrays."""
    return x.shape[0] * piece.segments * piece.offsets * piece.heads * (x.shape[2] // k.shape[2])


def _over(
    kernel: Any,
    piece: Piece,
    tiles: int,
    lanes: int,
    strides: tuple[int, ...],
    constants: dict[str, Any],
    config: TileConfig,
) -> Launch:
    """The launch over a piece, or by a table over many: of a piece of arrays, `_numbers` are columns of that table."""
    numbers, programs = _numbers(piece, tiles), tiles * lanes
    band: tuple[Any, ...] = ()
    if constants["WINDOWED"]:  # kernels hold them in 32 bits
        band = np.maximum(piece.low, -piece.rows), np.minimum(piece.high, piece.keys)
        band = band if isinstance(piece.rows, np.ndarray) else tuple(map(int, band))
    absent = () if band else (None, None)
    numbers += band
    if isinstance(programs, int):
        return Launch(kernel, programs, None, (*strides, *numbers, *absent), constants, config)
    return Launch(kernel, int(programs.sum()), (numbers, programs), (*strides, *(0,) * len(numbers), *absent), constants, config)


def _numbers(piece: Piece, tiles: int) -> tuple[int, ...]:
    """The integers `PIECE_FIELDS`."""
    return (
        tiles,
        piece.heads,
        piece.offsets,
        piece.segments,
        piece.token,
        piece.segment_stride,
        piece.key_token - piece.token,
        piece.head,
        piece.offset_head_step,
        piece.head_step,
        piece.row_stride,
        piece.rows,
        piece.keys,
        piece.zero_keys,
    )


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    unit = unit_of(tensors[0])
    return tuple(stride // unit for x in tensors for stride in x.stride()[:3])


def _with_readable_mask(options: Options) -> Options:
    """The arguments with a contiguous mask: kernels count its places in 32 bits."""
    if options.ignored is None or options.ignored.stride(1) == 1:
        return options
    return options._replace(ignored=options.ignored.contiguous())


def _mask(options: Options) -> Tensor | None:
    return None if options.ignored is None else options.ignored.view(torch.uint8)


def _mask_strides(options: Options) -> tuple[int, int]:
    return (0, 0) if options.ignored is None else (options.ignored.stride(0), options.ignored.stride(1))


def _constants(q: Tensor, k: Tensor, *tensors: Tensor, group: PieceGroup, options: Options, tiles: TileConfig) -> dict[str, Any]:
    """What every launch over a group is compiled for."""
    widest = max(x.stride(1) for x in (q, k, *tensors))
    precision = "tf32" if q.dtype != torch.float32 or allows_tf32() else "ieee"
    sample, stacked = group
    windowed = sample.is_banded
    call = {"GROUP": q.shape[2] // k.shape[2], "CAUSAL": sample.high == 0 and not windowed, "WINDOWED": windowed}
    call["IGNORES"] = options.ignored is not None
    memory = {"UNIT": unit_of(q), "WIDE": sample.row_stride * widest * 256 >= 1 << 31, "TABLED": stacked is not sample}
    blocks = {"D": q.shape[3], "BLOCK_D": padded(q.shape[3]), "BLOCK_M": tiles.queries, "BLOCK_N": tiles.keys}
    return {**call, **memory, **blocks, "PRECISION": precision, "DESCRIBED": tiles.described}


def allows_tf32() -> bool:
    """Whether torch may round float32 products to TensorFloat-32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
