"""Attention of some rows of a segment over some of its keys by flex_attention: what ranks make of segments that shards cut."""

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
    """The rows of every lane: its sequence, its query heads, the token of its row 0, and what all lanes share."""

    batch: Tensor  # (lane,)
    heads: Tensor  # (lane, group)
    tokens: Tensor  # (lane,)
    stride: int  # tokens from one row to the next
    first_query: int
    first_key: int

    def part(self, at: slice) -> Lanes:
        """Some of the lanes."""
        return self._replace(batch=self.batch[at], heads=self.heads[at], tokens=self.tokens[at])


def attend_rows(q: Tensor, k: Tensor, v: Tensor, ignored: Tensor | None, lanes: Lanes, call: Call) -> tuple[Tensor, Tensor]:
    """Out `(lane, group, row, D)` and lse `(lane, group, row)`.

    Args:
        q: `(lane, group, queries, D)`.
        k: `(lane, 1, keys, D)`.
        v: `(lane, 1, keys, D)`.
        ignored: Keys that no query may see, `(lane, keys)`.
        lanes: Where they stand.
        call: Checked.
    """
    outs, lses = [], []
    for first in range(0, q.shape[0], GRID_LIMIT):
        at = slice(first, first + GRID_LIMIT)
        out, lse = _attend(q[at], k[at], v[at], None if ignored is None else ignored[at], lanes.part(at), call)
        outs.append(out)
        lses.append(lse)
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))


def _attend(q: Tensor, k: Tensor, v: Tensor, ignored: Tensor | None, lanes: Lanes, call: Call) -> tuple[Tensor, Tensor]:
    device, ahead = q.device, lanes.first_query - lanes.first_key
    is_causal, user_score, user_mask = call.is_causal, call.score_mod, call.mask_mod
    batch_of, head_of, token_of = lanes.batch, lanes.heads, lanes.tokens
    # Tensors instead of numbers: one compiled kernel serves every segment.
    stride, first_query, first_key, behind = (
        torch.full((), n, dtype=torch.int32, device=device) for n in (lanes.stride, lanes.first_query, lanes.first_key, ahead)
    )

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = kv_idx <= q_idx + behind if is_causal else kv_idx >= 0
        if ignored is not None:
            seen = seen & ~ignored[b, kv_idx]
        if user_mask is not None:
            seen = seen & user_mask(batch_of[b], head_of[b, h], query_token(b, q_idx), key_token(b, kv_idx))
        return seen

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert user_score is not None
        return user_score(score, batch_of[b], head_of[b, h], query_token(b, q_idx), key_token(b, kv_idx))

    def query_token(lane: Tensor, row: Tensor) -> Tensor:
        return token_of[lane] + (first_query + row) * stride

    def key_token(lane: Tensor, row: Tensor) -> Tensor:
        return token_of[lane] + (first_key + row) * stride

    narrows = ignored is not None or user_mask is not None
    kv, queries = _lists(q.shape[2], k.shape[2], ahead if is_causal else None, not narrows, device)
    block_mask = assemble(kv, queries, (q.shape[2], k.shape[2]), (BLOCK, BLOCK), mask_mod)
    out, lse = run_kernel(q, k, v, call, score_mod=None if user_score is None else score_mod, block_mask=block_mask, like="rows")
    assert lse is not None
    return out, lse


@lru_cache(maxsize=64)
@in_no_mode
def _lists(queries: int, keys: int, ahead: int | None, separate_full: bool, device: torch.device) -> tuple[BlockLists, BlockLists]:
    """The blocks in which queries see keys: of keys per block of queries, and the other way round.

    Args:
        queries: Rows of them; row 0 sees the keys `0 ... ahead`, and each row one more.
        keys: Rows of them.
        ahead: None: every row sees all keys.
        separate_full: Whether blocks that all rows see whole are listed apart; none that sticks out is.
        device: Where they live.
    """
    first = torch.arange(0, queries, BLOCK, device="cpu")[:, None]  # query of a block of rows
    last = (first + BLOCK).clamp_max(queries) - 1
    begin = torch.arange(0, keys, BLOCK, device="cpu")  # key of a block of columns
    end = begin + BLOCK - 1
    seen = torch.ones(len(first), len(begin), dtype=torch.bool, device="cpu") if ahead is None else begin <= last + ahead
    whole = (end < keys) & (first + BLOCK <= queries) & (seen if ahead is None else end <= first + ahead) & separate_full
    partial = seen & ~whole
    kv, q = (BlockLists(*_listed(a, device), *_listed(b, device)) for a, b in ((partial, whole), (partial.T, whole.T)))
    return kv, q


def _listed(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many of a row's blocks there are, `(1, 1, rows)`, and which, those first, `(1, 1, rows, columns)`."""
    counts = blocks.sum(dim=1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.uint8), dim=1, descending=True, stable=True)
    return counts[None, None].to(device), order.to(device, torch.int32)[None, None].contiguous()
