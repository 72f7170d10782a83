"""Attention of rows of one segment or window by flex_attention, for those that span more than one shard."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.backends.flex.backend import run_kernel
from flexdilated.backends.flex.cost import BLOCK
from flexdilated.backends.kernel import GRID_LIMIT
from flexdilated.core.branch import ceil_div
from flexdilated.core.call import Call
from flexdilated.core.functorch import in_no_mode
from flexdilated.masks.block_mask import assemble, by_head
from flexdilated.masks.blocks import BlockLists, band_lists


class Lanes(NamedTuple):
    """Positions of the rows of every lane: row `l` of lane `i` is token `tokens[i] + l * stride` of sequence `batch[i]`."""

    batch: Tensor  # (lanes,) int32: sequence
    heads: Tensor  # (lanes, group) int32: query heads
    tokens: Tensor  # (lanes,) int32: token of row 0
    stride: int  # tokens from one row to the next
    first_query: int  # row of query 0
    first_key: int  # row of key 0
    window: int | None = None  # size of the window, whose rows are tokens; None: the rows are those of one segment

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
    queries, keys, has_window = q.shape[2], k.shape[2], lanes.window is not None
    low = -queries if lanes.window is None else max(-queries, shift + 1 - lanes.window)
    high = shift if is_causal else keys if lanes.window is None else min(keys, shift + lanes.window - 1)
    # Tensors instead of numbers: one compiled kernel serves every segment.
    stride, first_query, first_key, low_tensor, high_tensor = (
        torch.full((), n, dtype=torch.int32, device=device) for n in (lanes.stride, lanes.first_query, lanes.first_key, low, high)
    )

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = kv_idx - q_idx <= high_tensor if is_causal or has_window else kv_idx >= 0
        if has_window:
            visible = visible & (kv_idx - q_idx >= low_tensor)
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

    narrows = ignored is not None or user_mask is not None
    kv, q_lists = _lists(queries, keys, (low, high), not narrows, device)
    block_mask = assemble(kv, q_lists, (queries, keys), (BLOCK, BLOCK), mask_mod)
    like = "rows of a window" if has_window else "rows"
    out, lse = run_kernel(q, k, v, call, score_mod=None if user_score is None else score_mod, block_mask=block_mask, like=like)
    assert lse is not None
    return out, lse


@lru_cache(maxsize=64)
@in_no_mode
def _lists(
    queries: int, keys: int, band: tuple[int, int], separate_full: bool, device: torch.device
) -> tuple[BlockLists, BlockLists]:
    """The blocks of keys that each block of queries sees, and the blocks of queries that see each block of keys.

    Args:
        queries: Number of queries; query `m` sees the keys `m + band[0] ... m + band[1]`.
        keys: Number of keys.
        band: As above.
        separate_full: Whether blocks whose every pair is seen are listed as full; a block past the end never is.
        device: Where they live.
    """
    kv = band_lists(queries, keys, band, BLOCK, separate_full=separate_full)
    q = band_lists(keys, queries, (-band[1], -band[0]), BLOCK, separate_full=separate_full)
    return by_head([kv], [0], ceil_div(keys, BLOCK), device), by_head([q], [0], ceil_div(queries, BLOCK), device)
