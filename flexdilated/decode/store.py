"""The rows of keys and values that a cache holds: what a query sees of them, and which a new token overwrites."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdilated.backends.hardware import holds_values
from flexdilated.pattern import DilatedPattern, num_kept

# Tokens attended at once where a chunk begins behind stored keys: its mask has as many rows, and a column per stored row.
BLOCK = 128


class Tokens(NamedTuple):
    """New keys and values `(B, T, Hkv, D)`, finite: 0 where `is_marked` `(B, T, Hkv)`, known to be nowhere if `is_plain`."""

    k: Tensor
    v: Tensor
    is_marked: Tensor
    is_plain: bool

    def block(self, start: int) -> Tokens:
        block = slice(start, start + BLOCK)
        return Tokens(self.k[:, block], self.v[:, block], self.is_marked[:, block], self.is_plain)


class Overwritten(NamedTuple):
    """Rows of a store as they were before tokens took them.

    `at` `(B, heads, R, 1)`: which; None: all. `rows`: what `rows_held` held there. `held`: as in `Store`.
    """

    at: Tensor | None
    rows: tuple[Tensor, ...]
    held: Tensor


def marked(k: Tensor, v: Tensor) -> Tokens:
    """Keys and values whose non-finite rows are marks: masked or not, they would reach every output through 0 * inf."""
    # The largest absolute value, by a reduction that keeps NaN and needs no temporary of the size of k.
    largest = torch.maximum(*(torch.linalg.vector_norm(x, math.inf, dim=-1) for x in (k, v)))
    is_marked = ~(largest < math.inf)  # NaN too
    # Copies are worth a look at the mark where tokens are many, as in a prompt; where they are few, a look makes the device wait.
    looks = k.shape[1] > BLOCK and not torch.compiler.is_compiling() and holds_values(k)
    if looks and not bool(is_marked.any()):
        return Tokens(k, v, is_marked, is_plain=True)
    k, v = (x.masked_fill(is_marked[..., None], 0.0) for x in (k, v))
    return Tokens(k, v, is_marked, is_plain=False)


class Store:
    """The rows of the key/value heads that run the same branches.

    `k`, `v` `(B, heads, sum of rows, D)`: the branches one after another, finite. `is_marked` `(B, heads, sum of rows, 1)`: which
    were not. `held` `(B, branches)`: the number of the segment that each branch holds, -1 before the first token.
    """

    def __init__(
        self,
        pattern: DilatedPattern,
        branches: Sequence[int],
        heads: range,
        num_heads: int,
        max_length: int | None,
        like: Tensor,
    ) -> None:
        """Of those of `heads` that run the branches, of `num_heads` in the model, and sequences of at most `max_length` tokens.

        `like` `(B, ..., D)` has the batch size, head dim, dtype and device. `self.heads` are counted from the first of `heads`.
        """
        device, batch_size, head_dim = like.device, like.shape[0], like.shape[-1]
        of_model = [head for head in pattern.head_range(branches[0], num_heads) if head in heads]
        first = of_model[0] - heads.start
        self.num_kv_heads, self.heads = len(heads), range(first, first + len(of_model))
        self.branches = [pattern.branches[i] for i in branches]
        longest = math.inf if max_length is None else max_length
        self.rows = [num_kept(int(min(w, longest)), r, 0) for w, r in self.branches]
        self.starts = [sum(self.rows[:i]) for i in range(len(self.rows))]
        shape = (batch_size, len(self.heads), sum(self.rows), head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=like.dtype, device=device) for _ in range(2))
        self.is_marked = torch.zeros(*shape[:3], 1, dtype=torch.bool, device=device)
        self.held = torch.full((batch_size, len(branches)), -1, dtype=torch.int64, device=device)
        offsets = [[pattern.offset(i, head, num_heads) for i in branches] for head in of_model]
        self.offsets = torch.tensor(offsets, device=device)  # (heads, branches)
        self.lengths_of_segments, self.rates, self.first_rows, self.last_rows = (
            torch.tensor(values, device=device)
            for values in (
                [w for w, _ in self.branches],
                [r for _, r in self.branches],
                self.starts,
                [rows - 1 for rows in self.rows],
            )
        )
        # Where each row lies in its segment, per head.
        self.places = [
            torch.arange(rows, device=device) * r + self.offsets[:, i, None]  # (heads, rows)
            for i, ((_, r), rows) in enumerate(zip(self.branches, self.rows))
        ]

    @property
    def rows_held(self) -> tuple[Tensor, ...]:
        """All that is stored of the rows."""
        return self.k, self.v, self.is_marked

    def keeps(self, positions: Tensor) -> Tensor:
        """Whether a head's branch keeps a position: `(B, heads, T, branches)` of `(B, T)`."""
        residues = positions[..., None] % self.lengths_of_segments % self.rates  # (B, T, branches)
        return residues[:, None] == self.offsets[:, None]

    def attend(
        self,
        q: Tensor,
        positions: Tensor,
        lengths: Tensor,
        scale: float | None,
        new: Tokens | None = None,
    ) -> Tensor:
        """What queries `(B, T, H, D)` of these heads at `positions` `(B, T)` see: `(B, T, heads * group, D)`.

        Stored rows below position `lengths` `(B,)`, and the queries' own tokens where they are not stored yet. Those stand once per
        branch, so that each counts as often as branches join the pair.
        """
        batch, num_tokens = positions.shape
        keeps = self.keeps(positions)
        # The end of the stored keys inside the segment of the query, 0 where the query is in another one.
        ends = (lengths[:, None] - self.held * self.lengths_of_segments).clamp(min=0)  # (B, branches)
        segments = positions[..., None] // self.lengths_of_segments  # (B, T, branches)
        sees = keeps & (segments == self.held[:, None])[:, None]
        limits = torch.where(sees, ends[:, None, None], 0)  # (B, heads, T, branches)
        masks = [places[:, None] < limits[..., i, None] for i, places in enumerate(self.places)]  # (B, heads, T, rows)
        k, v, is_marked = self.rows_held
        if new is not None:
            at_or_before = positions[:, None, :] <= positions[:, :, None]  # (B, T, T)
            for i in range(len(self.branches)):
                together = at_or_before & (segments[:, None, :, i] == segments[:, :, None, i])
                masks.append(together[:, None] & keeps[..., i, None] & keeps[:, :, None, :, i])
            k, v, is_marked = (
                torch.cat([x, *[y] * len(self.branches)], dim=2) for x, y in zip(self.rows_held, self._own_rows(new))
            )
        reached = keeps.any(-1, keepdim=True)  # a kept token sees itself
        mask = torch.cat(masks, dim=-1)
        sees_mark = (mask & is_marked[..., 0][:, :, None]).any(-1)  # (B, heads, T)
        # Kernels disagree on a row without a key: let it see everything, and drop what it gives.
        mask = mask | ~reached
        k_heads = k.shape[1]
        q = q.unflatten(2, (self.num_kv_heads, -1))[:, :, self.heads.start : self.heads.stop]  # (B, T, heads, group, D)
        group, head_dim = q.shape[3:]
        # Query heads that share a key stand one after another as rows of one head: keys are read where they lie, not repeated.
        q = q.permute(0, 2, 3, 1, 4).reshape(batch, k_heads, group * num_tokens, head_dim)
        mask = mask[:, :, None].expand(-1, -1, group, -1, -1).reshape(batch, k_heads, group * num_tokens, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out = out.unflatten(2, (group, num_tokens))  # (B, heads, group, T, D)
        out = out.masked_fill(~reached[:, :, None], 0.0).masked_fill(sees_mark[:, :, None, :, None], math.nan)
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def first_marks(self, new: Tokens) -> Tensor:
        """`(B, heads, T)`: which of the first tokens of all sequences see a mark, their own or an earlier one's."""
        positions = torch.arange(new.k.shape[1], device=self.held.device)
        keeps = self.keeps(positions[None])  # (1, heads, T, branches)
        is_marked = self._own_rows(new)[2][..., 0]
        sees = torch.zeros_like(is_marked)
        for i, (w, _) in enumerate(self.branches):
            counts = F.pad((is_marked & keeps[..., i]).cumsum(-1), (1, 0))  # (B, heads, T + 1): marks before each token
            in_segment = counts[..., 1:] - counts.index_select(-1, positions // w * w)
            sees |= keeps[..., i] & (in_segment > 0)
        return sees

    def put(self, new: Tokens, positions: Tensor, is_new: Tensor) -> None:
        """Store one token per sequence, at `positions` `(B,)`, where `is_new` `(B,)`."""
        keeps = self.keeps(positions[:, None])[:, :, 0] & is_new[:, None, None]  # (B, heads, branches)
        # A full sequence, to which nothing is added, stands behind the last row: its index must exist all the same.
        rows = (positions[:, None] % self.lengths_of_segments // self.rates).clamp(max=self.last_rows) + self.first_rows
        index = rows[:, None, :, None].expand(-1, self.k.shape[1], -1, self.k.shape[3])  # (B, heads, branches, D)
        for stored, x in zip(self.rows_held, self._own_rows(new)):
            at = index[..., : x.shape[3]]
            stored.scatter_(2, at, torch.where(keeps[..., None], x, stored.gather(2, at)))
        self.held.copy_(torch.where(is_new[:, None], positions[:, None] // self.lengths_of_segments, self.held))

    def put_last(self, new: Tokens, lengths: Tensor, added: Tensor) -> None:
        """Store of the first `added` `(B,)` of T tokens, which follow `lengths` `(B,)` others, what lies in the segment of the last
        one."""
        end = lengths + added
        segments = torch.where(added[:, None] > 0, (end[:, None] - 1) // self.lengths_of_segments, self.held)  # (B, branches)
        own = self._own_rows(new)
        for i, (places, start, rows) in enumerate(zip(self.places, self.starts, self.rows)):
            positions = segments[:, i, None, None] * self.lengths_of_segments[i] + places  # (B, heads, rows)
            is_new = ((positions >= lengths[:, None, None]) & (positions < end[:, None, None]))[..., None]
            index = (positions - lengths[:, None, None]).clamp(0, new.k.shape[1] - 1)[..., None]
            for stored, x in zip(self.rows_held, own):
                part = stored[:, :, start : start + rows]
                part.copy_(torch.where(is_new, x.gather(2, index.expand(-1, -1, -1, x.shape[3])), part))
        self.held.copy_(segments)

    def overwritten(self, positions: Tensor) -> Overwritten:
        """The rows that tokens at `positions` `(B, T)` may take, as they are now."""
        if positions.shape[1] * len(self.branches) >= sum(self.rows):
            return Overwritten(None, tuple(x.clone() for x in self.rows_held), self.held.clone())
        rows = (positions[..., None] % self.lengths_of_segments // self.rates).clamp(max=self.last_rows) + self.first_rows
        index = rows.flatten(1)[:, None, :, None].expand(-1, self.k.shape[1], -1, 1)
        return Overwritten(
            index, tuple(x.gather(2, index.expand(*index.shape[:3], x.shape[3])) for x in self.rows_held), self.held.clone()
        )

    def put_back(self, overwritten: Overwritten) -> None:
        """Store what `overwritten` gave."""
        index = overwritten.at
        for stored, x in zip(self.rows_held, overwritten.rows):
            if index is None:
                stored.copy_(x)
            else:
                stored.scatter_(2, index.expand(*index.shape[:3], x.shape[3]), x)
        self.held.copy_(overwritten.held)

    def select(self, indices: Tensor) -> None:
        """Hold what the sequences `indices` hold, in that order; their number may change."""
        self.k, self.v, self.is_marked, self.held = (x.index_select(0, indices) for x in (*self.rows_held, self.held))

    def _own_rows(self, new: Tokens) -> tuple[Tensor, ...]:
        """What `rows_held` holds of new tokens, `(B, heads, T, D)` and `(B, heads, T, 1)`: the heads of this store."""
        heads = slice(self.heads.start, self.heads.stop)
        return tuple(x[:, :, heads].transpose(1, 2) for x in (new.k, new.v, new.is_marked[..., None]))
