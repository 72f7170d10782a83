"""Loop over all pieces of a pattern and run a kernel on each: forward and backward.

Every piece's backward is called with the output and the log-sum-exp of the whole mixture; since `exp(score - lse)` is then the
pair's weight in the one softmax over all branches, the gradients of the pieces add up to the exact gradient. Under `detach_weights`
a piece needs its own output instead: it is kept, or computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexdilated.backends import Choice, choose_kernel
from flexdilated.backends.dense.windows import dense_pieces
from flexdilated.backends.dropout import Dropout, fold_in
from flexdilated.backends.kernel import GRID_LIMIT, Kernel, Options, Windows
from flexdilated.backends.triton import backend as triton_backend
from flexdilated.core.bounded_cache import PIECE_BYTES, recent
from flexdilated.core.custom_op import Inputs, OpOptions
from flexdilated.core.dispatch_key import DispatchKey
from flexdilated.core.lse import accumulated, add_zero_keys_, for_backward, merge_
from flexdilated.core.pieces import Piece
from flexdilated.core.slabs import SlabLayout, Slabs, layouts, slabs_of

# Bytes of one packed tensor of a slab, on a CPU. Slabs that fit its caches are packed before they are computed: the kernels are up
# to a tenth faster than on strided rows, and the temporaries reuse the same memory instead of touching fresh pages. Elsewhere a
# piece is as few launches as its views allow. See docs/adr/0002.
CPU_SLAB_BYTES = 4 << 20
PACKED_ROWS = 256  # slabs of fewer rows are read once: their copies would take up to half of the time of the kernel


Strided = tuple[tuple[int, ...], tuple[int, ...]]  # size and strides of a tensor


class Slab(NamedTuple):
    """A part of a piece that is one call of a kernel, its place among all, and the options of that call."""

    number: int
    piece: Piece
    options: Options


class SlabPlan(NamedTuple):
    """What a loop does in every call of equal sizes: its pieces, and its slabs."""

    pieces: tuple[Piece, ...]
    parts: Slabs
    slabs: tuple[Slab, ...]


@recent(size=lambda plan, *arguments: 2 * PIECE_BYTES * (len(plan.pieces) + len(plan.slabs)))
def _plan(
    pieces: tuple[Piece, ...],
    windows: Windows,
    scale: float,
    cuts: tuple[int, int, int, int, int],
    offsets_apart: bool,
) -> SlabPlan:
    """The plan of pieces; `cuts`: sizes as `slabs_of` takes them."""
    pieces = dense_pieces(pieces, windows)
    parts, options = slabs_of(pieces, *cuts, offsets_apart=offsets_apart), Options(is_causal=False, scale=scale)
    return SlabPlan(pieces, parts, tuple(Slab(i, piece, options.within(piece)) for i, piece in enumerate(parts.pieces)))


@recent(size=lambda all_layouts, *arguments: 2 * PIECE_BYTES * sum(map(len, all_layouts)))
def _layouts(parts: Slabs, group: int, queries: tuple[Strided, ...], keys: tuple[Strided, ...]) -> list[tuple[SlabLayout, ...]]:
    """The layouts of slabs in tensors of queries, then in those of keys, of each `(size, strides)`."""
    of_queries = [layouts(parts, size, strides, group) for size, strides in queries]
    return of_queries + [layouts(parts, size, strides, 1, of_keys=True) for size, strides in keys]


class SlabRows(NamedTuple):
    """The rows of slabs in a tensor `(B, N, H, D)` or `(B, N, H)`."""

    x: Tensor
    first: int  # its storage offset
    layouts: tuple[SlabLayout, ...]

    def box(self, slab: Slab) -> Tensor:
        """The rows as `b s o h g r d`."""
        size, strides, first = self.layouts[slab.number].box
        return self.x.as_strided(size, strides, self.first + first)

    def view(self, slab: Slab) -> Tensor | None:
        """The rows as a kernel takes them, `(batch, heads, rows, D)`, where strides make that a view."""
        layout = self.layouts[slab.number].view
        return None if layout is None else self.x.as_strided(layout[0], layout[1], self.first + layout[2])


class PieceLoop:
    """The slabs of some pieces, the options of their kernel, and the seed of the dropout."""

    def __init__(
        self, inputs: Inputs, op_options: OpOptions, pieces: tuple[Piece, ...], seed: int | None, choice: Choice | None = None
    ) -> None:
        """`choice`: of the call, by which `inputs` came; None: it is made here."""
        q, k, _, key_padding_mask, cu_seqlens, _ = inputs
        self.device = q.device
        self.group = q.shape[2] // k.shape[2]
        pattern = op_options.pattern
        self.detaches = pattern.detaches
        self._backend = op_options.engine
        if choice is None or choice.kernel is None:
            self._request = DispatchKey.of(q, k, pattern, key_padding_mask, cu_seqlens, op_options.dropout_p)
            self.kernel = choose_kernel(op_options.engine, self._request)
        else:
            self._request, self.kernel = choice.request, choice.kernel
        self.pieces, self.in_place = pieces, None
        if self.kernel.in_place is not None:
            self.in_place = self.kernel.in_place()
            self.options = Options(op_options.is_causal, op_options.scale, key_padding_mask)
            return
        self._dropout = None if seed is None else Dropout(op_options.dropout_p, seed)
        self._packs = packs(q.device)
        self._merging: Any = None if self._packs else merging(self._request)
        # The mask has no heads: every head reads the same column.
        self._key_padding_mask = None if key_padding_mask is None else key_padding_mask[:, :, None].expand(-1, -1, k.shape[2])
        row_bytes, limit = (self.group * q.shape[3] * q.element_size(), CPU_SLAB_BYTES) if self._packs else (0, GRID_LIMIT)
        cuts, apart = (q.shape[0], q.shape[1], self.group, limit, row_bytes), key_padding_mask is not None or self.group > 1
        self.plan = _plan(pieces, self.kernel.windows, op_options.scale, cuts, apart)
        self.pieces = self.plan.pieces

    def rows(self, *queries: Tensor, keys: tuple[Tensor, ...] = ()) -> list[SlabRows]:
        """The rows of slabs in tensors that have rows of queries, then in those that have rows of keys."""
        sizes = (tuple((x.shape, x.stride()) for x in tensors) for tensors in (queries, keys))
        all_layouts = _layouts(self.plan.parts, self.group, *sizes)
        return [SlabRows(x, int(x.storage_offset()), layouts_of_x) for x, layouts_of_x in zip((*queries, *keys), all_layouts)]

    def differentiating(self, dlse: Tensor | None) -> Kernel:
        """The kernel of the backward: one more column, for a gradient of lse, may be too many for that of the forward."""
        return self.kernel if dlse is None else choose_kernel(self._backend, replace(self._request, dlse=True))

    def accumulator(self, shape: Sequence[int], dtype: torch.dtype, start: float, *, of_queries: bool = False) -> Tensor:
        """Memory to merge or add into, filled with `start` unless the first pieces write every row."""
        memory, first = torch.empty(shape, dtype=dtype, device=self.device), self.pieces[0] if self.pieces else None
        is_written = first is not None and (first.covers or (of_queries and first.writes and self.in_place is None))
        return memory if is_written else memory.fill_(start)

    def slabs(self) -> Iterable[Slab]:
        """All slabs, in the order of the pieces."""
        if self._key_padding_mask is None and self._dropout is None:
            return self.plan.slabs
        ignored = None if self._key_padding_mask is None else self.rows(keys=(self._key_padding_mask,))[0]
        return (self._with_values(slab, ignored) for slab in self.plan.slabs)

    def _with_values(self, slab: Slab, ignored: SlabRows | None) -> Slab:
        """A slab whose options hold the values of this call."""
        options = slab.options
        if ignored is not None:
            options = options._replace(ignored=ignored.box(slab)[:, :, :, 0, 0].flatten(0, 2))
        if self._dropout is not None:
            options = options._replace(dropout=self._dropout._replace(seed=fold_in(self._dropout.seed, slab.number)))
        return slab._replace(options=options)

    def inputs(self, slab: Slab, rows: Sequence[SlabRows]) -> list[Tensor]:
        """A slab's q, k, v and more tensors as the kernel takes them. Ignored keys and values are zeroed, whatever they hold."""
        tensors = []
        for x, first, layouts_of_x in rows:
            box, view, packed = layouts_of_x[slab.number]
            size, strides, start = view or box
            part = x.as_strided(size, strides, first + start)
            tensors.append(part if view else part.reshape(packed))
        if slab.options.ignored is not None:
            tensors[1:3] = (x.masked_fill(slab.options.ignored[:, None, :, None], 0.0) for x in tensors[1:3])
        if self._packs and tensors[1].shape[2] >= PACKED_ROWS:
            tensors[:3] = (x.contiguous() for x in tensors[:3])
        return tensors

    def attend(self, slab: Slab, inputs: Sequence[Tensor], into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A slab's own output and lse of its `inputs`; the output is written to `into` where given."""
        out, lse = self.kernel.forward(inputs[0], inputs[1], inputs[2], slab.options, into)
        if slab.piece.zero_keys:
            add_zero_keys_(out, lse, slab.piece.zero_keys)
        return out, lse

    def merge(self, slab: Slab, out: SlabRows, lse: SlabRows, out_i: Tensor, lse_i: Tensor) -> None:
        """Merge a slab's results, as a kernel gives them, into running results."""
        out_layout, lse_layout = out.layouts[slab.number], lse.layouts[slab.number]
        if self._merging and (view := out.view(slab)) is not None:
            # The lse of several sequences has strides of its own for sequences and segments.
            apart, rows = lse.box(slab), lse.view(slab)
            into = apart.view(*apart.shape[:2], -1, apart.shape[5]) if rows is None else rows
            if self._launches(self._merging.merge_into, view, into, out_i, lse_i):
                return
        if out_layout.view and lse_layout.view:
            (size, strides, first), (lse_size, lse_strides, lse_first) = out_layout.view, lse_layout.view
        else:
            (size, strides, first), (lse_size, lse_strides, lse_first) = out_layout.box, lse_layout.box
            out_i, lse_i = out_i.view(size), lse_i.view(lse_size)
        rows = out.x.as_strided(size, strides, out.first + first)
        merge_(rows, lse.x.as_strided(lse_size, lse_strides, lse.first + lse_first), out_i, lse_i)

    def add(self, slab: Slab, sums: Sequence[SlabRows], terms: Sequence[Tensor]) -> None:
        """Add a slab's gradients, as a kernel gives them, to running sums; the first pieces write every row."""
        for (x, first, layouts_of_x), term in zip(sums, terms):
            box, view, _ = layouts_of_x[slab.number]
            size, strides, start = view or box
            rows, term = x.as_strided(size, strides, first + start), term if view else term.view(size)
            if slab.piece.covers:
                rows.copy_(term)
            elif not (self._merging and view and self._launches(self._merging.add_to, rows, term)):
                rows.add_(term)

    def _launches(self, run: Callable[..., None], *tensors: Tensor) -> bool:
        """Whether a Triton kernel could do it; if not, torch's operations do this and all that follows."""
        if triton_backend.attempt(run, *tensors):
            return True
        self._merging = None
        return False


class OwnOutputs:
    """The outputs of slabs, one after another in memory `(rows, D)`."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.end = memory, 0

    def next(self, q: Tensor) -> Tensor:
        """The memory for the output of the next slab, whose queries are q `(batch, heads, rows, D)`."""
        first, self.end = self.end, self.end + q.shape[:3].numel()
        return self.memory[first : self.end].view(q.shape)


def packs(device: torch.device) -> bool:
    """Whether slabs are copied together before they are computed."""
    return device.type == "cpu"


def merging(request: DispatchKey) -> Any:
    """The module of the Triton kernels that merge and add on a GPU, or None where torch's operations do."""
    if request.hardware.device_type != "cuda" or triton_backend.why_not(replace(request, dropout=False)) or triton_backend.UNBUILT:
        return None
    # It imports triton, which is optional, and may be installed without being loadable.
    if not triton_backend.attempt(import_module, "flexdilated.backends.triton.merging"):
        return None
    from flexdilated.backends.triton import merging as kernels

    return kernels


def forward(q: Tensor, k: Tensor, v: Tensor, loop: PieceLoop, branch_outs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of the pieces. If `branch_outs` `(rows, D)` is given, the output of each piece is written to it."""
    out = loop.accumulator(q.shape, q.dtype, 0.0, of_queries=True)
    lse = loop.accumulator((q.shape[0], q.shape[2], q.shape[1]), accumulated(q.dtype), -torch.inf, of_queries=True)
    if loop.in_place is not None:
        loop.in_place.forward(out, lse, q, k, v, pieces=loop.pieces, options=loop.options)
        return out, lse
    q_rows, out_rows, lse_rows, *kv_rows = loop.rows(q, out, lse.transpose(1, 2), keys=(k, v))
    own_outputs = None if branch_outs is None else OwnOutputs(branch_outs)
    for slab in loop.slabs():
        inputs = loop.inputs(slab, (q_rows, *kv_rows))
        into = None if own_outputs is None else own_outputs.next(inputs[0])
        if not (slab.piece.covers or slab.piece.writes):
            loop.merge(slab, out_rows, lse_rows, *loop.attend(slab, inputs, into))
            continue
        view = out_rows.view(slab) if into is None else None
        out_i, lse_i = loop.attend(slab, inputs, into if view is None else view)
        if view is None:
            out_box = out_rows.box(slab)
            out_box.copy_(out_i.view(out_box.shape))
        lse_box = lse_rows.box(slab)
        lse_box.copy_(lse_i.view(lse_box.shape))
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    loop: PieceLoop,
    sums: torch.dtype | None = None,
    branch_outs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv` of the pieces, in the dtype `sums` (default: the dtype of the inputs). `branch_outs`: written by the forward."""
    # In the dtype of the inputs: a position has one term per branch, and adding those in bfloat16 adds 3 to 6 % to the error that
    # the kernels make anyway, where float32 sums cost three tensors of twice the size.
    dq, dk, dv = (loop.accumulator(x.shape, sums or x.dtype, 0.0) for x in (q, k, v))
    if loop.in_place is not None:
        grads = (dq, dk, dv)
        options = loop.options
        loop.in_place.backward(
            grads, dout, dlse, q, k, v, out=out, lse=lse, pieces=loop.pieces, options=options, detaches=loop.detaches
        )
        return grads
    lse, dlse = for_backward(lse, dlse)
    kernel = loop.differentiating(dlse)
    more = (*(() if loop.detaches else (out,)), *(() if dlse is None else (dlse.transpose(1, 2),)))
    by_query = (q, dq, dout, lse.transpose(1, 2), *more)
    q_rows, dq_rows, *more_rows, k_rows, v_rows, dk_rows, dv_rows = loop.rows(*by_query, keys=(k, v, dk, dv))
    input_rows, sum_rows = (q_rows, k_rows, v_rows, *more_rows), (dq_rows, dk_rows, dv_rows)
    own_outputs = None if branch_outs is None else OwnOutputs(branch_outs)
    for slab in loop.slabs():
        q_i, k_i, v_i, dout_i, lse_i, *more_inputs = loop.inputs(slab, input_rows)
        inputs, dlse_i = (q_i, k_i, v_i), None if dlse is None else more_inputs[-1]
        # In w p_i (dout v^T - rowsum(dout out_i)), only `out_i` belongs to this piece alone: w p_i = exp(score - lse).
        if not loop.detaches:
            out_i = more_inputs[0]
        elif own_outputs is None:
            out_i = loop.attend(slab, inputs)[0]
        else:
            out_i = own_outputs.next(q_i)
        into = None
        if slab.piece.covers and kernel.writes and dq.dtype == q.dtype:
            views = tuple(view for view in (rows.view(slab) for rows in sum_rows) if view is not None)
            into = views if len(views) == len(sum_rows) else None
        terms = kernel.backward(dout_i, dlse_i, *inputs, out=out_i, lse=lse_i, options=slab.options, into=into)
        if into is None:
            loop.add(slab, sum_rows, terms)
    return dq, dk, dv
