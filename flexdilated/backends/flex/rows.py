"""Attention of rows by flex_attention, for pieces, and for segments and windows that span more than one shard."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexdilated.backends.autograd.combine import heads_of, read, tokens_of
from flexdilated.backends.flex import kernel
from flexdilated.backends.flex.cost import BLOCK, is_one_sequence
from flexdilated.backends.kernel import GRID_LIMIT
from flexdilated.core.branch import ceil_div
from flexdilated.core.call import Call, MaskMod, ScoreMod
from flexdilated.core.functorch import in_no_mode
from flexdilated.core.lse import with_zero_keys
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.pieces import UNBOUNDED, Piece
from flexdilated.core.tracing import TRACES_FUNCTIONS
from flexdilated.masks.block_mask import assemble, block_mask_for, by_head
from flexdilated.masks.blocks import BlockLists, band_lists


class Lanes(NamedTuple):
    """What flex_attention needs of lanes: positions of rows, and the pairs that join.

    Query `l` of lane `i` is token `tokens[i] + l * stride` of sequence `batch[i]`; key `l` is `key_shift` tokens after query `l`.
    Pairs with `low <= key - query <= high` join.
    """

    batch: Tensor  # (lanes,) int32: sequence
    heads: Tensor  # (lanes, query heads) int32
    tokens: Tensor  # (lanes,) int32: token of query 0
    stride: int  # tokens from one row to the next
    key_shift: int
    band: tuple[int, int]  # (low, high)
    segment: int | None = None  # rows of a segment, where a lane has as many keys as queries in segments that join no others

    def part(self, span: slice) -> Lanes:
        """The positions of a range of lanes."""
        return self._replace(batch=self.batch[span], heads=self.heads[span], tokens=self.tokens[span])


def _kind(call: Call) -> tuple[Hashable, ...]:
    """A hashable key: equal for calls whose mask and score functions compile to the same code."""
    return call.is_causal, call.key_padding_mask is not None, _code(call.score_mod), _code(call.mask_mod)


def _code(function: Any) -> Hashable:
    """The code object of a callable: a function defined in a model's forward is a new object at each call, with equal code."""
    while isinstance(function, partial):
        function = function.func
    code: Hashable = getattr(function, "__code__", function.__class__)
    return code if TRACES_FUNCTIONS else (code, repr(getattr(function, "__defaults__", None)))


@contextmanager
def _in_their_names(call: Call) -> Iterator[None]:
    """Raise the compiler's errors inside as errors about `score_mod` and `mask_mod`.

    Raises:
        NotImplementedError: If they cannot be compiled, or would be at call after call.
    """
    if torch.compiler.is_compiling() or not call.is_modified():
        yield
        return
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # not loaded with the package

    try:
        yield
    except FailOnRecompileLimitHit as error:
        raise NotImplementedError(
            "score_mod and mask_mod must hold what changes from call to call in tensors for backend='flex', which is compiled for "
            f"each float, got more than {kernel.GRAPHS_LIMIT} of them; hold torch.tensor(number), or use backend='sdpa'"
        ) from error
    except TorchDynamoException as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise NotImplementedError(
            f"score_mod and mask_mod must be functions that flex_attention compiles for backend='flex', got: {reason}; "
            "use backend='sdpa'"
        ) from error


def run_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    *,
    score_mod: ScoreMod | None,
    block_mask: BlockMask,
    want_lse: bool = True,
    like: Hashable = None,
) -> tuple[Tensor, Tensor | None]:
    """`kernel.call` for a checked call; `like`: what its mask and score functions depend on besides the call."""
    with _in_their_names(call):
        return kernel.call(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=call.checked_scale(),
            want_lse=want_lse,
            kind=(like, _kind(call)),
        )


def attend_piece(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, start: int, piece: Piece, call: Call
) -> tuple[Tensor, Tensor]:
    """Out `b s o h g r d` and lse `b s o h g r` of a piece of a document that begins at token `start`.

    Where rows allow, all segments are one sequence under a block-diagonal mask; else every segment is a sequence of its own.
    """
    group, device, of_keys = q.shape[2] // k.shape[2], q.device, piece.of_keys()
    is_merged = is_one_sequence(piece)
    # The order of a lane's heads and rows, and how it is read back.
    order = "(b o) (h g) (s r)" if is_merged else "(b s o) (h g) r"
    sizes = {"s": piece.segments, "o": piece.offsets, "h": piece.heads, "g": group}
    boxes = read(q, piece, group=group), read(k, of_keys), read(v, of_keys)
    lanes_q, lanes_k, lanes_v = (rearrange(x, f"b s o h g r d -> {order} d") for x in boxes)
    tokens = tokens_of(piece, device)[:, :, 0][: 1 if is_merged else None]  # (S, C)
    lane = torch.arange(q.shape[0] * tokens.numel(), device=device)
    lanes = Lanes(
        batch=(lane // tokens.numel()).int(),
        heads=heads_of(piece, group, device).flatten(1).int()[lane % piece.offsets],  # (lanes, G group)
        tokens=(start + tokens.flatten()).int()[lane % tokens.numel()],
        stride=piece.row_stride,
        key_shift=piece.key_token - piece.token,
        band=(piece.low, piece.high),
        segment=None if piece.is_banded or piece.rows != piece.keys else piece.rows,
    )
    ignored = None
    if key_padding_mask is not None:
        row = torch.arange(lanes_k.shape[2], device=device)
        keys = lanes.tokens.long()[:, None] - start + lanes.key_shift + row * lanes.stride
        ignored = key_padding_mask[lanes.batch.long()[:, None], keys]
    out, lse = attend_rows(lanes_q, lanes_k, lanes_v, ignored, lanes, call)
    out = rearrange(out, f"{order} d -> b s o h g r d", **sizes)
    lse = rearrange(lse, f"{order} -> b s o h g r", **sizes)
    return with_zero_keys(out, lse, piece.zero_keys)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, ignored: Tensor | None, lanes: Lanes, call: Call) -> tuple[Tensor, Tensor]:
    """Out `(lane, query head, row, D)` and lse `(lane, query head, row)`.

    Args:
        q: `(lane, query heads, queries, D)`.
        k: `(lane, key heads, keys, D)`.
        v: As k.
        ignored: Keys that no query may see, `(lane, keys)`.
        lanes: Positions of the rows, and the pairs that join.
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
    device, queries, keys = q.device, q.shape[2], k.shape[2]
    user_score, user_mask = call.score_mod, call.mask_mod
    batch_of, head_of, token_of = lanes.batch, lanes.heads, lanes.tokens
    has_low, has_high = lanes.band[0] != -UNBOUNDED, lanes.band[1] != UNBOUNDED
    in_segments, length = lanes.segment is not None, keys if lanes.segment is None else lanes.segment
    band = max(lanes.band[0], -queries), min(lanes.band[1], keys)
    # Tensors instead of numbers: one compiled kernel serves every branch and length.
    stride, shift, low, high, segment = (
        torch.full((), n, dtype=torch.int32, device=device) for n in (lanes.stride, lanes.key_shift, *band, length)
    )

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = q_idx // segment == kv_idx // segment if in_segments else kv_idx >= 0
        if has_low:
            visible = visible & (kv_idx - q_idx >= low)
        if has_high:
            visible = visible & (kv_idx - q_idx <= high)
        if ignored is not None:
            visible = visible & ~ignored[b, kv_idx]
        if user_mask is not None:
            visible = visible & user_mask(batch_of[b], head_of[b, h], query_token(b, q_idx), key_token(b, kv_idx))
        return visible

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert user_score is not None
        return user_score(score, batch_of[b], head_of[b, h], query_token(b, q_idx), key_token(b, kv_idx))

    def query_token(lane: Tensor, row: Tensor) -> Tensor:
        return token_of[lane] + row * stride

    def key_token(lane: Tensor, row: Tensor) -> Tensor:
        return token_of[lane] + shift + row * stride

    narrows = ignored is not None or user_mask is not None
    out, lse = run_kernel(
        q,
        k,
        v,
        call,
        score_mod=None if user_score is None else score_mod,
        block_mask=_block_mask(lanes._replace(band=band), queries, keys, device, mask_mod, narrows=narrows),
        like=(in_segments, has_low, has_high),
    )
    assert lse is not None
    return out, lse


def _block_mask(lanes: Lanes, queries: int, keys: int, device: torch.device, mask_mod: MaskMod, *, narrows: bool) -> BlockMask:
    """The block mask of lanes. In compiled code an opaque operator makes it for segments and windows; others list all blocks."""
    low, high = lanes.band
    is_window = queries == keys and low <= 0 and high in (0, -low)
    if lanes.segment is not None or (torch.compiler.is_compiling() and is_window):
        pattern = DilatedPattern(window=1 - low) if lanes.segment is None else DilatedPattern((lanes.segment,), (1,))
        return block_mask_for(
            pattern, 1, 1, seq_len=queries, is_causal=high == 0, device=device, mask_mod=mask_mod, narrows=narrows
        )
    if torch.compiler.is_compiling():
        kv, q = (_all_blocks(ceil_div(a, BLOCK), ceil_div(b, BLOCK), device) for a, b in ((queries, keys), (keys, queries)))
    else:
        kv, q = _lists(queries, keys, (low, high), not narrows, device)
    return assemble(kv, q, (queries, keys), (BLOCK, BLOCK), mask_mod)


def _all_blocks(rows: int, columns: int, device: torch.device) -> BlockLists:
    """Lists in which every block is partial."""
    counts = torch.full((1, 1, rows), columns, dtype=torch.int32, device=device)
    indices = torch.arange(columns, dtype=torch.int32, device=device).repeat(1, 1, rows, 1)
    return BlockLists(counts, indices, torch.zeros_like(counts), torch.zeros_like(indices))


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
