"""The rows of keys and values in a cache: attention to them, and their replacement by new tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdilated.backends.dense.sdpa import attend_masked
from flexdilated.core.call import Call
from flexdilated.core.lse import sink_scale
from flexdilated.core.tracing import reads_freely
from flexdilated.decode.layout import Layout, StepPlan
from flexdilated.decode.tokens import Tokens


class Overwritten(NamedTuple):
    """A copy of the rows of a store that new tokens overwrite."""

    places: Tensor | None  # (B, heads, R, 1) places among the stored rows; None: all rows
    rows: tuple[Tensor, ...]  # per tensor of `rows_held`, its rows `(B, heads, R, D or 1)`


class Past(NamedTuple):
    """One call of `attend`: the state before it, and the tokens that it stored. `lengths`, `added`: `(B,)`."""

    lengths: Tensor
    stores: tuple[Overwritten, ...]
    new: Tokens
    added: Tensor


@contextmanager
def restored_on_error(stores: Sequence[Store], positions: Tensor) -> Iterator[None]:
    """Restore the rows that tokens at `positions` `(B, T)` overwrite if an error ends the block."""
    saved = [store.overwritten(positions) for store in stores]
    try:
        yield
    except Exception:
        for store, overwritten in zip(stores, saved):
            store.put_back(overwritten)
        raise


class Store:
    """The rows of the key/value heads that run the same branches.

    `k`, `v` `(B, heads, sum of rows, D)`: the branches one after another, finite. `is_marked` `(B, heads, sum of rows, 1)`: which
    were not. `has_marks` `()` is False if none is marked. It is read and set on CPUs alone; calls that cannot read marks set it.

    After the segments come a window and the global tokens. Row `p % size` of a window stores position p until position `p + size`
    replaces it. Row `p` of the global tokens stores position p for good.

    Over several ranks, row `j` of a branch is row `j // num_ranks` of rank `j % num_ranks`. So every rank has the same number of
    rows, and a segment fills all ranks evenly.
    """

    def __init__(self, layout: Layout, batch_size: int) -> None:
        self.layout, self.heads, self.rows = layout, layout.heads, layout.rows
        shape, device = (batch_size, len(layout.heads), sum(layout.rows), layout.head_dim), layout.offsets.device
        self.k, self.v = (torch.zeros(shape, dtype=layout.dtype, device=device) for _ in range(2))
        self.is_marked = torch.zeros(*shape[:3], 1, dtype=torch.bool, device=device)
        self.has_marks = self.is_marked.new_zeros(())

    @property
    def rows_held(self) -> tuple[Tensor, ...]:
        """The stored tensors of the rows."""
        return self.k, self.v, self.is_marked

    def attend(self, q: Tensor, positions: Tensor, lengths: Tensor, call: Call, new: Tokens) -> Tensor:
        """Attention of queries `(B, T, H, D)` at `positions` `(B, T)` in these heads: `(B, T, heads * group, D)`.

        Keys are the stored rows below position `lengths` `(B,)`, and the tokens `new`, which are not stored yet. New tokens occur
        once per branch, so that a pair counts as often as branches join it.

        Over several ranks, each attends to its own stored rows and new tokens. It returns a partial result with its lse as the last
        element, `(B, T, heads * group, D + 1)`.
        """
        layout, num_tokens, has_marks = self.layout, q.shape[1], self._may_see_marks(new)
        keeps = layout.keeps(positions)
        masks = layout.stored_seen(positions, lengths, keeps) + layout.new_seen(positions, keeps)
        local, times = slice(layout.rank, None, layout.num_ranks), len(layout.branches)
        pairs = zip(self.rows_held, self._own_rows(new, has_marks))
        rows = [torch.cat([x, *[y[:, :, local]] * times], dim=2) for x, y in pairs]
        mask, unreached = torch.cat(masks, dim=-1), ~keeps.any(-1, keepdim=True)  # a kept token sees itself
        if layout.num_ranks == 1:
            mask = mask | unreached  # as in `Layout._plan`
        q = q.unflatten(2, (layout.num_kv_heads, -1))[:, :, self.heads.start : self.heads.stop]  # (B, T, heads, group, D)
        group = q.shape[3]
        # Query heads that share a key head become rows of one head, so that keys are not repeated.
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask, unreached = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3) for x in (mask, unreached))
        out = self._softmax(q, rows, mask, unreached, call)
        return out.unflatten(2, (group, num_tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def attend_one(self, q: Tensor, new: Tokens, plan: StepPlan, call: Call) -> Tensor:
        """Store one token per sequence by its plan, and attend to it and the other rows it sees: as `attend`, for T = 1."""
        has_marks = self._may_see_marks(new)
        for stored, x in zip(self.rows_held, self._own_rows(new, has_marks)):
            places = plan.places if x.shape[3] == self.layout.head_dim else plan.places[..., :1]
            if plan.unstored is not None:
                x = torch.where(plan.unstored, stored.gather(2, places), x)
            stored.scatter_(2, places, x.expand_as(places))
        q = q.reshape(q.shape[0], self.layout.num_kv_heads, -1, q.shape[3])
        if not self.layout.has_all_heads:
            q = q[:, self.heads.start : self.heads.stop]
        out = self._softmax(q, self.rows_held[: 3 if has_marks else 2], plan.bias, plan.unreached, call)
        return out.reshape(out.shape[0], 1, -1, out.shape[3])

    def _softmax(self, q: Tensor, rows: Sequence[Tensor], mask: Tensor, unreached: Tensor | None, call: Call) -> Tensor:
        """Attention of q `(B, heads, rows, D)` to k, v and, if rows may be marked, their marks.

        `mask` as `scaled_dot_product_attention` takes it. `unreached`: the rows of q that no branch keeps.
        """
        layout, (k, v, *marks) = self.layout, rows
        if layout.num_ranks == 1 and call.sinks is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale)
        else:
            scale = layout.head_dim**-0.5 if call.scale is None else call.scale
            out, lse = attend_masked(q, k, v, _seen(mask).expand(-1, -1, q.shape[2], -1), scale)
            if call.sinks is not None and layout.rank == 0:  # a part of the whole, to which the sinks belong once
                sinks = call.sinks.to(lse.dtype).view(layout.num_kv_heads, -1)[self.heads.start : self.heads.stop]
                sinks = sinks.repeat_interleave(q.shape[2] // sinks.shape[1], dim=1)
                out = (out * sink_scale(sinks, lse)[..., None]).to(out.dtype)
                lse = torch.logaddexp(lse, sinks)
            if layout.num_ranks > 1:
                out = torch.cat([out.to(lse.dtype), lse[..., None]], dim=-1)
        for is_marked in marks:
            out = out.masked_fill((_seen(mask) & is_marked.transpose(2, 3)).any(-1, keepdim=True), math.nan)
        return out if unreached is None or layout.num_ranks > 1 else out.masked_fill(unreached, 0.0)

    def first_marks(self, is_marked: Tensor) -> Tensor:
        """`(B, heads, T)`: which of the first tokens of all sequences see a mark `(B, T, Hkv)`, their own or an earlier one's."""
        layout = self.layout
        positions = torch.arange(is_marked.shape[1], device=is_marked.device)
        keeps = layout.keeps(positions[None])  # (1, heads, T, branches)
        is_marked = is_marked[:, :, self.heads.start : self.heads.stop].transpose(1, 2)
        sees = torch.zeros_like(is_marked)
        bounds = (x.clamp(0, len(positions)).unbind(-1) for x in layout.bounds(positions))
        for i, (first, end) in enumerate(zip(*bounds)):
            counts = F.pad((is_marked & keeps[..., i]).cumsum(-1), (1, 0))  # (B, heads, T + 1): marks before each token
            sees |= keeps[..., i] & (counts.index_select(-1, end) > counts.index_select(-1, first))
        return sees

    def put_last(self, new: Tokens, lengths: Tensor, added: Tensor) -> None:
        """From the first `added` `(B,)` of T tokens, which follow `lengths` `(B,)` others, store the rows in the last segment."""
        end, new_rows = lengths + added, self._own_rows(new, self._may_see_marks(new))
        for positions, start, rows in zip(self.layout.positions(end), self.layout.starts, self.rows):
            is_new = ((positions >= lengths[:, None, None]) & (positions < end[:, None, None]))[..., None]
            index = (positions - lengths[:, None, None]).clamp(0, new.k.shape[1] - 1)[..., None]
            for stored, x in zip(self.rows_held, new_rows):
                part = stored[:, :, start : start + rows]
                part.copy_(torch.where(is_new, x.gather(2, index.expand(-1, -1, -1, x.shape[3])), part))

    def overwritten(self, positions: Tensor) -> Overwritten:
        """The rows that tokens at `positions` `(B, T)` may take, as they are now."""
        if positions.shape[1] * len(self.rows) >= sum(self.rows):
            return Overwritten(None, tuple(x.clone() for x in self.rows_held))
        index = self.layout.index(positions).flatten(1)[:, None, :, None].expand(-1, self.k.shape[1], -1, 1)
        return Overwritten(index, tuple(x.gather(2, index.expand(*index.shape[:3], x.shape[3])) for x in self.rows_held))

    def rows_at(self, new: Tokens, index: Tensor) -> Tensor:
        """`(E, 2 D + 1)` keys, values and marks of the new tokens `index` `(B, heads, rows)`; an index below 0 gives no row."""
        b, head, row = (index >= 0).nonzero(as_tuple=True)
        k, v, is_marked = (x[b, head, index[b, head, row]] for x in self._own_rows(new, True))
        return torch.cat([k, v, is_marked.to(k.dtype)], dim=1)

    def put_rows(self, rows: Tensor, index: Tensor) -> None:
        """Store `rows`, which `rows_at` returned, where `index` `(B, heads, sum of rows)` is not below 0."""
        dim = self.k.shape[3]
        is_marked = rows[:, 2 * dim :] > 0
        self.has_marks |= is_marked.any()
        for stored, x in zip(self.rows_held, (rows[:, :dim], rows[:, dim : 2 * dim], is_marked)):
            stored[index >= 0] = x

    def put_back(self, overwritten: Overwritten) -> None:
        """Restore the rows that `overwritten` returned."""
        index = overwritten.places
        for stored, x in zip(self.rows_held, overwritten.rows):
            if index is None:
                stored.copy_(x)
            else:
                stored.scatter_(2, index.expand(*index.shape[:3], x.shape[3]), x)

    def select(self, indices: Tensor) -> None:
        """Replace the sequences by those at `indices`, in that order; their number may change."""
        self.k, self.v, self.is_marked = (x.index_select(0, indices) for x in self.rows_held)

    def clear(self) -> None:
        """Forget all rows."""
        for x in (*self.rows_held, self.has_marks):
            x.zero_()

    def _may_see_marks(self, new: Tokens) -> bool:
        """Whether stored or new rows may be marked. It is recorded in a tensor, which exported code writes to as well."""
        if new.is_marked is not None and self.has_marks.is_cpu:
            self.has_marks.fill_(True)
        return new.is_marked is not None or not reads_freely(self.has_marks) or bool(self.has_marks)

    def _own_rows(self, new: Tokens, with_marks: bool) -> tuple[Tensor, ...]:
        """k, v `(B, heads, T, D)` and, if wanted, marks `(B, heads, T, 1)` of new tokens in the heads of this store."""
        rows: tuple[Tensor, ...] = (new.k, new.v)
        if with_marks:
            rows = (*rows, new.marks()[..., None])
        if not self.layout.has_all_heads:
            rows = tuple(x[:, :, self.heads.start : self.heads.stop] for x in rows)
        return tuple(x.transpose(1, 2) for x in rows)


def with_marks(stores: Sequence[Store], out: Tensor, is_marked: Tensor, start: int = 0) -> Tensor:
    """The outputs of the first tokens, from the `start`-th on: NaN where they see a mark `(B, N, Hkv)`."""
    sees_mark = torch.cat([store.first_marks(is_marked) for store in stores], dim=1)  # (B, Hkv, N)
    group, span = out.shape[2] // sees_mark.shape[1], slice(start, start + out.shape[1])
    return out.masked_fill(sees_mark[..., span].transpose(1, 2).repeat_interleave(group, 2)[..., None], math.nan)


def _seen(mask: Tensor) -> Tensor:
    """A mask of numbers as bools."""
    return mask if mask.dtype == torch.bool else mask == 0
