"""Attention of rows of one segment by flex_attention, for segments that span more than one shard."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.backends.flex.backend import run_kernel
from flexdilated.backends.flex.cost import BLOCK
from flexdilated.backends.kernel import GRID_LIMIT
from flexdilated.core.call import Call
from flexdilated.core.functorch import in_no_mode
from flexdilated.masks.block_mask import assemble
from flexdilated.masks.blocks import BlockLists


class Lanes(NamedTuple):
    """Positions of the rows of every lane: row `l` of lane `i` is token `tokens[i] + l * stride` of sequence `batch[i]`."""

    batch: Tensor  # (lanes,) int32: sequence
    heads: Tensor  # (lanes, group) int32: query heads
    tokens: Tensor  # (lanes,) int32: token of row 0
    stride: int  # tokens from one row to the next
    first_query: int  # row of query 0
    first_key: int  # row of key 0
    window: int | None = None  # size of the window that rows, which are then tokens, are near in; None: they are of one segment

    def part(self, span: slice) -> Lanes:
        """The positions of a range of lanes."""
        return self._replace(batch=self.batch[span], heads=self.heads[span], tokens=self.tokens[span])


def attend_rows(q: Tensor, k: Tensor, v: Tensor, ignored: Tensor | None, lanes: Lanes, call: Call) -> tuple[Tensor, Tensor]:
    """Out `(lane, group, row, D)` and lse `(lane, group, row)`.

    Args:
        q: `(lane, group, queries, D)`.
        k: `(lane, 1, keys, D)`.
        v: `(lane, 1, keys, D)`.
        ignored: Keys that no query may see, `(lane, keys)`.
        lanes: Positions of the rows.
        call: Checked.
    """
    outs, lses = [], []
    for first in range(0, q.shape[0], GRID_LIMIT):
        span = slice(first, first + GRID_LIMIT)
        out, lse = _attend(q[span], k[span], v[span], None if ignored is None else ignored[span], lanes.part(span), call)
        outs.append(out)
        lses.append(lse)
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))


def _attend(q: Tensor, k: Tensor, v: Tensor, ignored: Tensor | None, lanes: Lanes, call: Call) -> tuple[Tensor, Tensor]:
    device, shift = q.device, lanes.first_query - lanes.first_key
    is_causal, user_score, user_mask = call.is_causal, call.score_mod, call.mask_mod
    batch_of, head_of, token_of = lanes.batch, lanes.heads, lanes.tokens
    has_window = lanes.window is not None
    size = torch.full((), lanes.window or 0, dtype=torch.int32, device=device)
    # Tensors instead of numbers: one compiled kernel serves every segment.
    stride, first_query, first_key, shift_tensor = (
        torch.full((), n, dtype=torch.int32, device=device) for n in (lanes.stride, lanes.first_query, lanes.first_key, shift)
    )

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = kv_idx <= q_idx + shift_tensor if is_causal else kv_idx >= 0
        if has_window:
            visible = visible & ((q_idx + shift_tensor - kv_idx).abs() < size)
        if ignored is not None:
            visible = visible & ~ignored[b, kv_idx]
        if user_mask is not None:
            visible = visible & user_mask(batch_of[b], head_of[b, h], query_token(b, q_idx), key_token(b, kv_idx))
        return visible

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert user_score is not None
        return user_score(score, batch_of[b], head_of[b, h], query_token(b, q_idx), key_token(b, kv_idx))

    def query_token(lane: Tensor, row: Tensor) -> Tensor:
        return token_of[lane] + (first_query + row) * stride

    def key_token(lane: Tensor, row: Tensor) -> Tensor:
        return token_of[lane] + (first_key + row) * stride

    narrows = ignored is not None or user_mask is not None or has_window
    kv, queries = _lists(q.shape[2], k.shape[2], shift if is_causal else None, not narrows, device)
    block_mask = assemble(kv, queries, (q.shape[2], k.shape[2]), (BLOCK, BLOCK), mask_mod)
    out, lse = run_kernel(
        q, k, v, call, score_mod=None if user_score is None else score_mod, block_mask=block_mask, like=("rows", has_window)
    )
    assert lse is not None
    return out, lse


@lru_cache(maxsize=64)
@in_no_mode
def _lists(queries: int, keys: int, shift: int | None, separate_full: bool, device: torch.device) -> tuple[BlockLists, BlockLists]:
    """The blocks of keys that each block of queries sees, and the blocks of queries that see each block of keys.

    Args:
        queries: Number of queries; query `m` sees the keys `0 ... m + shift`.
        keys: Number of keys.
        shift: None: every query sees all keys.
        separate_full: Whether blocks whose every pair is seen are listed as full; a block past the end never is.
        device: Where they live.
    """
    first = torch.arange(0, queries, BLOCK, device="cpu")[:, None]  # query of a block of rows
    last = (first + BLOCK).clamp_max(queries) - 1
    begin = torch.arange(0, keys, BLOCK, device="cpu")  # key of a block of columns
    end = begin + BLOCK - 1
    visible = torch.ones(len(first), len(begin), dtype=torch.bool, device="cpu") if shift is None else begin <= last + shift
    is_full = (end < keys) & (first + BLOCK <= queries) & (visible if shift is None else end <= first + shift) & separate_full
    partial = visible & ~is_full
    kv, q = (BlockLists(*_listed(a, device), *_listed(b, device)) for a, b in ((partial, is_full), (partial.T, is_full.T)))
    return kv, q


def _listed(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts `(1, 1, rows)` of a boolean table of blocks, and indices `(1, 1, rows, columns)`, true blocks first."""
    counts = blocks.sum(dim=1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.uint8), dim=1, descending=True, stable=True)
    return counts[None, None].to(device), order.to(device, torch.int32)[None, None].contiguous()
