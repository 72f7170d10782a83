"""The rows of keys and values in a cache: those that a query sees, and those that a new token overwrites."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdilated.backends.dense.sdpa import attend_masked
from flexdilated.core.branch import Kept, Segments, num_kept
from flexdilated.core.call import Call
from flexdilated.core.lse import sink_scale
from flexdilated.core.pattern import DilatedPattern
from flexdilated.decode.tokens import Tokens


class Overwritten(NamedTuple):
    """A copy of the rows of a store that new tokens overwrite."""

    places: Tensor | None  # (B, heads, R, 1) places among the stored rows; None: all rows
    rows: tuple[Tensor, ...]  # per tensor of `rows_held`, its rows `(B, heads, R, D or 1)`
    held: Tensor  # (B, branches), as in `Store`


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
    were not. `held` `(B, branches)`: the number of the segment that each branch holds, -1 before the first token.

    A window is the last branch. Row `p % size` stores position p until position `p + size` replaces it. For a window `held` is the
    position of the last stored token, which determines the positions of all rows.

    Over several ranks, row `j` of a branch is row `j // num_ranks` of rank `j % num_ranks`. So every rank has the same number of
    rows, and a segment fills all ranks evenly. `held` is equal on all ranks.
    """

    def __init__(
        self,
        pattern: DilatedPattern,
        branches: Sequence[int],
        heads: range,
        num_heads: int,
        max_length: int | None,
        like: Tensor,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Allocate the rows of the heads among `heads` that run the branches.

        `num_heads`: heads of the model. `max_length`: tokens of the longest sequence. `like` `(B, ..., D)` has the batch size, head
        dim, dtype and device. `self.heads` count from the first of `heads`.
        """
        self.rank, self.num_ranks = rank, num_ranks
        device, batch_size, head_dim = like.device, like.shape[0], like.shape[-1]
        model_heads = [head for head in pattern.head_range(branches[0], num_heads) if head in heads]
        first = model_heads[0] - heads.start
        self.num_kv_heads, self.heads = len(heads), range(first, first + len(model_heads))
        segments, window = pattern.split("DilatedKVCache")
        self.window = None if window is None else window.size  # of the last branch
        self.branches = [segments[i] if i < len(segments) else Segments(pattern.branches[i][0], 1) for i in branches]
        longest = math.inf if max_length is None else max_length
        self.rows = [-(-num_kept(int(min(w, longest)), r, 0) // num_ranks) for w, r in self.branches]
        self.starts = [sum(self.rows[:i]) for i in range(len(self.rows))]
        shape = (batch_size, len(self.heads), sum(self.rows), head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=like.dtype, device=device) for _ in range(2))
        self.is_marked = torch.zeros(*shape[:3], 1, dtype=torch.bool, device=device)
        self.held = torch.full((batch_size, len(branches)), -1, dtype=torch.int64, device=device)
        offsets = [[pattern.offset(i, head, num_heads) for i in branches] for head in model_heads]
        self.offsets = torch.tensor(offsets, device=device)  # (heads, branches)
        columns = (*zip(*self.branches), self.starts, [rows - 1 for rows in self.rows])
        self.lengths_of_segments, self.rates, self.first_rows, self.last_rows = (torch.tensor(x, device=device) for x in columns)
        self.tokens_per_held = self.lengths_of_segments.clone()  # `held` is a position over this
        if self.window is not None:
            self.tokens_per_held[-1] = 1
        self.places = self._places(rank)

    def _places(self, rank: int) -> list[Tensor]:
        """The position of each row of a rank in its segment, per branch: `(heads, rows)`.

        If the number of rows is no multiple of the ranks, the last row of some ranks is past the end of the segment and unused.
        """
        return [
            (torch.arange(rows, device=self.offsets.device) * self.num_ranks + rank) * r + self.offsets[:, i, None]
            for i, ((_, r), rows) in enumerate(zip(self.branches, self.rows))
        ]

    def _positions(self, held: Tensor, places: list[Tensor]) -> list[Tensor]:
        """The position that each row stores, per branch `(B, heads, rows)`: below 0, or past the last token, if it stores none."""
        positions = [held[:, i, None, None] * w + x for i, ((w, _), x) in enumerate(zip(self.branches, places))]
        if self.window is not None:
            last = held[:, -1, None, None]
            positions[-1] = torch.where(places[-1] < self.window, last - (last - places[-1]) % self.window, -1)
        return positions

    def _last_held(self, end: Tensor) -> Tensor:
        """`held` `(B, branches)` after `end` `(B,)` tokens; unchanged where `end` is 0."""
        return torch.where(end[:, None] > 0, (end[:, None] - 1) // self.tokens_per_held, self.held)

    @property
    def rows_held(self) -> tuple[Tensor, ...]:
        """The stored tensors of the rows."""
        return self.k, self.v, self.is_marked

    def keeps(self, positions: Tensor) -> Tensor:
        """Whether a head's branch keeps a position: `(B, heads, T, branches)` of `(B, T)`."""
        branches = Kept(self.lengths_of_segments, self.rates, self.offsets[:, None])
        return branches.keeps(positions[:, None, :, None])

    def attend(
        self,
        q: Tensor,
        positions: Tensor,
        lengths: Tensor,
        call: Call,
        new: Tokens | None = None,
    ) -> Tensor:
        """Attention of queries `(B, T, H, D)` at `positions` `(B, T)` in these heads: `(B, T, heads * group, D)`.

        Keys are the stored rows below position `lengths` `(B,)`, and the tokens `new` if they are not stored yet. New tokens occur
        once per branch, so that a pair counts as often as branches join it.

        Over several ranks, each attends to its own stored rows and new tokens. It returns a partial result with its lse as the last
        element, `(B, T, heads * group, D + 1)`.
        """
        batch, num_tokens = positions.shape
        keeps = self.keeps(positions)
        # The end of the stored keys inside the segment of the query, 0 where the query is in another one.
        ends = (lengths[:, None] - self.held * self.lengths_of_segments).clamp(min=0)  # (B, branches)
        segments = positions[..., None] // self.lengths_of_segments  # (B, T, branches)
        sees = keeps & (segments == self.held[:, None])[:, None]
        limits = torch.where(sees, ends[:, None, None], 0)  # (B, heads, T, branches)
        of_segments = self.places if self.window is None else self.places[:-1]
        masks = [places[:, None] < limits[..., i, None] for i, places in enumerate(of_segments)]  # (B, heads, T, rows)
        if self.window is not None:
            stored = self._positions(self.held, self.places)[-1]
            first = (positions - self.window + 1).clamp(min=0)[:, None, :, None]  # a window's first position, (B, 1, T, 1)
            masks.append((stored[:, :, None] >= first) & (stored < lengths[:, None, None])[:, :, None])
        k, v, is_marked = self.rows_held
        if new is not None:
            local = slice(self.rank, None, self.num_ranks)
            at_or_before = positions[:, None, local] <= positions[:, :, None]  # (B, T, local)
            for i in range(len(self.branches)):
                if self.window is not None and i == len(self.branches) - 1:
                    together = at_or_before & (positions[:, :, None] - positions[:, None, local] < self.window)
                else:
                    together = at_or_before & (segments[:, None, local, i] == segments[:, :, None, i])
                masks.append(together[:, None] & keeps[..., i, None] & keeps[:, :, None, local, i])
            k, v, is_marked = (
                torch.cat([x, *[y[:, :, local]] * len(self.branches)], dim=2) for x, y in zip(self.rows_held, self._own_rows(new))
            )
        mask = torch.cat(masks, dim=-1)
        sees_mark = (mask & is_marked[..., 0][:, :, None]).any(-1)  # (B, heads, T)
        reached = keeps.any(-1, keepdim=True)  # a kept token sees itself
        if self.num_ranks == 1:
            # Kernels disagree on a row without a key: let it see everything, and drop what it gives.
            mask = mask | ~reached
        k_heads = k.shape[1]
        q = q.unflatten(2, (self.num_kv_heads, -1))[:, :, self.heads.start : self.heads.stop]  # (B, T, heads, group, D)
        group, head_dim = q.shape[3:]
        # Query heads that share a key head become rows of one head, so that keys are not repeated.
        q = q.permute(0, 2, 3, 1, 4).reshape(batch, k_heads, group * num_tokens, head_dim)
        mask = mask[:, :, None].expand(-1, -1, group, -1, -1).reshape(batch, k_heads, group * num_tokens, -1)
        if self.num_ranks == 1 and call.sinks is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale)
        else:
            out, lse = attend_masked(q, k, v, mask, head_dim**-0.5 if call.scale is None else call.scale)
            if call.sinks is not None and self.rank == 0:  # a part of the whole, to which the sinks belong once
                sinks = call.sinks.to(lse.dtype).view(self.num_kv_heads, group)[self.heads.start : self.heads.stop]
                sinks = sinks.repeat_interleave(num_tokens, dim=1)
                out = (out * sink_scale(sinks, lse)[..., None]).to(out.dtype)
                lse = torch.logaddexp(lse, sinks)
            if self.num_ranks > 1:
                out = torch.cat([out.to(lse.dtype), lse[..., None]], dim=-1)
        out = out.unflatten(2, (group, num_tokens))  # (B, heads, group, T, D or D + 1)
        out = out.masked_fill(~reached[:, :, None], 0.0) if self.num_ranks == 1 else out
        out = out.masked_fill(sees_mark[:, :, None, :, None], math.nan)
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def first_marks(self, is_marked: Tensor) -> Tensor:
        """`(B, heads, T)`: which of the first tokens of all sequences see a mark `(B, T, Hkv)`, their own or an earlier one's."""
        positions = torch.arange(is_marked.shape[1], device=self.held.device)
        keeps = self.keeps(positions[None])  # (1, heads, T, branches)
        is_marked = is_marked[:, :, self.heads.start : self.heads.stop].transpose(1, 2)
        sees = torch.zeros_like(is_marked)
        for i, (w, _) in enumerate(self.branches):
            counts = F.pad((is_marked & keeps[..., i]).cumsum(-1), (1, 0))  # (B, heads, T + 1): marks before each token
            is_window = self.window is not None and i == len(self.branches) - 1
            first = (positions - w + 1).clamp(min=0) if is_window else positions // w * w
            sees |= keeps[..., i] & (counts[..., 1:] > counts.index_select(-1, first))
        return sees

    def put(self, new: Tokens, positions: Tensor, is_new: Tensor) -> None:
        """Store one token per sequence, at `positions` `(B,)`, where `is_new` `(B,)`."""
        keeps = self.keeps(positions[:, None])[:, :, 0] & is_new[:, None, None]  # (B, heads, branches)
        rows = positions[:, None] % self.lengths_of_segments // self.rates  # (B, branches)
        if self.num_ranks > 1:
            keeps = keeps & (rows % self.num_ranks == self.rank)[:, None]
        index = self._index(rows)[:, None, :, None].expand(-1, self.k.shape[1], -1, self.k.shape[3])  # (B, heads, branches, D)
        for stored, x in zip(self.rows_held, self._own_rows(new)):
            x_index = index[..., : x.shape[3]]
            stored.scatter_(2, x_index, torch.where(keeps[..., None], x, stored.gather(2, x_index)))
        self.held.copy_(self._last_held(torch.where(is_new, positions + 1, 0)))

    def put_last(self, new: Tokens, lengths: Tensor, added: Tensor) -> None:
        """From the first `added` `(B,)` of T tokens, which follow `lengths` `(B,)` others, store the rows in the last segment."""
        end = lengths + added
        held, new_rows = self._last_held(torch.where(added > 0, end, 0)), self._own_rows(new)
        for positions, start, rows in zip(self._positions(held, self.places), self.starts, self.rows):
            is_new = ((positions >= lengths[:, None, None]) & (positions < end[:, None, None]))[..., None]
            index = (positions - lengths[:, None, None]).clamp(0, new.k.shape[1] - 1)[..., None]
            for stored, x in zip(self.rows_held, new_rows):
                part = stored[:, :, start : start + rows]
                part.copy_(torch.where(is_new, x.gather(2, index.expand(-1, -1, -1, x.shape[3])), part))
        self.held.copy_(held)

    def overwritten(self, positions: Tensor) -> Overwritten:
        """The rows that tokens at `positions` `(B, T)` may take, as they are now."""
        if positions.shape[1] * len(self.branches) >= sum(self.rows):
            return Overwritten(None, tuple(x.clone() for x in self.rows_held), self.held.clone())
        rows = positions[..., None] % self.lengths_of_segments // self.rates  # (B, T, branches)
        index = self._index(rows).flatten(1)[:, None, :, None].expand(-1, self.k.shape[1], -1, 1)
        return Overwritten(
            index, tuple(x.gather(2, index.expand(*index.shape[:3], x.shape[3])) for x in self.rows_held), self.held.clone()
        )

    def _index(self, rows: Tensor) -> Tensor:
        """The places of rows `(..., branches)` among the stored ones; rows of other ranks get the places of their neighbours.

        The next row of a full sequence is after the last one. Nothing is added to it, but its index must exist.
        """
        return (rows // self.num_ranks).clamp(max=self.last_rows) + self.first_rows

    def last_positions(self, rank: int, end: Tensor) -> Tensor:
        """`(B, heads, sum of rows)`: the position that each row of a rank holds after the first `end` `(B,)` tokens, or -1."""
        held = (end[:, None] - 1).clamp(min=0) // self.tokens_per_held
        positions = torch.cat(self._positions(held, self._places(rank)), dim=-1)
        return torch.where(positions < end[:, None, None], positions, -1).clamp(min=-1)

    def rows_at(self, new: Tokens, index: Tensor) -> Tensor:
        """`(E, 2 D + 1)` keys, values and marks of the new tokens `index` `(B, heads, rows)`; an index below 0 gives no row."""
        b, head, row = (index >= 0).nonzero(as_tuple=True)
        k, v, is_marked = (x[b, head, index[b, head, row]] for x in self._own_rows(new))
        return torch.cat([k, v, is_marked.to(k.dtype)], dim=1)

    def put_rows(self, rows: Tensor, index: Tensor) -> None:
        """Store `rows`, which `rows_at` returned, where `index` `(B, heads, sum of rows)` is not below 0."""
        dim = self.k.shape[3]
        for stored, x in zip(self.rows_held, (rows[:, :dim], rows[:, dim : 2 * dim], rows[:, 2 * dim :] > 0)):
            stored[index >= 0] = x

    def hold(self, end: Tensor) -> None:
        """Record that the stored rows are those after the first `end` `(B,)` tokens."""
        self.held.copy_(self._last_held(end))

    def put_back(self, overwritten: Overwritten) -> None:
        """Restore the rows that `overwritten` returned."""
        index = overwritten.places
        for stored, x in zip(self.rows_held, overwritten.rows):
            if index is None:
                stored.copy_(x)
            else:
                stored.scatter_(2, index.expand(*index.shape[:3], x.shape[3]), x)
        self.held.copy_(overwritten.held)

    def why_lost(self, sequence: int, new: int, old: int) -> str | None:
        """Why a sequence of `old` tokens cannot be cut to `new` by what is stored alone; None if it can."""
        held = self.held[sequence].tolist()
        # Token p replaced token p - window. The queries up to p - 1 see the replaced token.
        if self.window is not None and min(new, self.window - 1) > 0 and held[-1] >= max(self.window, new + 1):
            return (
                f"length must keep the keys of the window={self.window} before it stored, got {new} of {old} tokens in sequence "
                f"{sequence}: later tokens replaced some of them; decode that sequence again, or set records_past before the calls"
            )
        for (w, _), segment in zip(self.branches, held if self.window is None else held[:-1]):
            if new % w and segment != new // w:
                return (
                    f"length must end in the segment that is stored, or where one begins, got {new} of {old} tokens in "
                    f"sequence {sequence}: segment {new // w} of segment_length={w} is overwritten; decode that sequence again"
                )
        return None

    def select(self, indices: Tensor) -> None:
        """Replace the sequences by those at `indices`, in that order; their number may change."""
        self.k, self.v, self.is_marked, self.held = (x.index_select(0, indices) for x in (*self.rows_held, self.held))

    def _own_rows(self, new: Tokens) -> tuple[Tensor, ...]:
        """k, v `(B, heads, T, D)` and marks `(B, heads, T, 1)` of new tokens in the heads of this store."""
        heads = slice(self.heads.start, self.heads.stop)
        return tuple(x[:, :, heads].transpose(1, 2) for x in (new.k, new.v, new.is_marked[..., None]))
