"""Attention under users' score and mask functions: scores are computed, modified and differentiated by autograd.

At most `SCORES` of them exist at once: scores of some segments and some of their queries are computed together, and again in the
backward, from the record of the functions (`records.py`) or by activation checkpointing in compiled code. Tensors that the
functions read, learnable tables included, get gradients. Under torch.func, and in programs exported for training, all scores are
kept.

Compiled code reads branches as padded grids instead of pieces: few operations, and few graphs for every number of tokens.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from flexdilated.backends.autograd.combine import PartialOutput, heads_of, mix, read, tokens_of, unshared
from flexdilated.backends.autograd.grids import Grid, Tile, draw_grids, num_parts, tiles
from flexdilated.backends.autograd.records import attend_recorded
from flexdilated.backends.dense.windows import dense_pieces
from flexdilated.backends.dropout import draw_seed, fold_in, refuse_draws_again, seeded_draws
from flexdilated.core.branch import Near
from flexdilated.core.call import Call, documents, refuse_compiled_borders
from flexdilated.core.checks import call_mod, check_mods, refuse_zero_keys
from flexdilated.core.functorch import is_transformed, may_draw
from flexdilated.core.hardware import without_autocast
from flexdilated.core.lse import accumulated, mix_branches, normalised, with_zero_keys
from flexdilated.core.pieces import UNBOUNDED, Piece, arrange, plan_pieces, runs_of
from flexdilated.core.slabs import box
from flexdilated.core.tracing import TRACES_UNKNOWN_SIZES, is_exporting, is_symbolic, refuse_traced_derivatives, uncached

Band = tuple[int, int]  # the smallest and the largest `kv_idx - q_idx` of joined pairs, UNBOUNDED where there is none
SCORES = 1 << 24  # at once: 64 MiB in float32, and a few times that while functions work on them


class Rows(NamedTuple):
    """Queries `(B, ..., group, rows, D)` and the keys of their piece or tile, `(B, ..., 1, R, D)`, with what functions see.

    `ignored`, of a key padding mask, and the positions `b`, `h`, `q_idx` and `kv_idx` broadcast to `(B, ..., group, rows, R)`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    ignored: Tensor | None
    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor


def attend_by_operations(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """`out` `(B, N, H, D)` and `lse` `(B, H, N)` of a checked call, differentiable, also in what the functions hold.

    Raises:
        NotImplementedError: If torchscale's zero keys take part: functions take positions, and zero keys have none. In compiled
            code also for documents, and before torch 2.11 for a dynamic number of tokens.
    """
    refuse_traced_derivatives(of_operators=False)
    refuse_draws_again(call.dropout_p)
    if call.part_of_heads(k.shape[2]) is not None and call.dropout_p > 0.0:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "dropout_p must be 0 with score_mod and mask_mod on a part of a model's heads in compiled code, got "
                f"{call.dropout_p}"
            )
        seed = draw_seed(call.dropout_p, call.first_sequence)
        assert seed is not None
        with seeded_draws(fold_in(int(seed.item()), 1 + call.first_head), q.device):
            return _pieces(q, k, v, call)
    refuse_compiled_borders(call, "score_mod and mask_mod")
    traced, transformed = torch.compiler.is_compiling(), is_transformed(q, k, v)
    if call.cu_seqlens is not None or (transformed and not traced):
        # Where a caller has left its graph for this, each function below would become a graph of its own, without tangents.
        return torch.compiler.disable(_pieces)(q, k, v, call)
    if traced and is_symbolic(q.shape[1]):
        if not TRACES_UNKNOWN_SIZES:
            raise NotImplementedError(
                "q must have a static number of tokens for score_mod and mask_mod in code compiled by torch before 2.11, got a "
                "dynamic one; use torch.compile(dynamic=False), or torch._dynamo.mark_static(q, 1) before the call"
            )
        return _padded(q, k, v, call)
    # Pieces are plain operations, as torch.func and exported programs need them; they take zero keys and a symbol for the heads.
    needs_pieces = transformed or call.pattern.zero_padding or not call.is_modified()
    if traced and not (needs_pieces or is_exporting() or is_symbolic(q.shape[2])):
        return _padded(q, k, v, call)
    return _pieces(q, k, v, call)


def _pieces(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Attend to every piece of every document, and mix the branches."""
    pattern, key_padding_mask = call.pattern, call.key_padding_mask
    spans, order = arrange(documents(call.cu_seqlens, q.shape[1]), q.device)
    runs = runs_of(spans)
    num_kv_heads, within = call.num_kv_heads or k.shape[2], call.part_of_heads(k.shape[2])
    plans = [
        plan_pieces(pattern, tuple((i * length, length) for i in range(count)), num_kv_heads, call.is_causal, within)
        for _, length, count in runs
    ]
    if call.is_modified() and any(piece.zero_keys for pieces in plans for piece in pieces):
        refuse_zero_keys(q.shape[1])
    q, k, v = (unshared(order.take(x)) for x in (q, k, v))
    if key_padding_mask is not None:
        key_padding_mask = order.take(key_padding_mask)
        # What ignored keys and values hold must not matter, and 0 times NaN would.
        k, v = (x.masked_fill(key_padding_mask[:, :, None, None], 0.0) for x in (k, v))
    lengths = [length * count for _, length, count in runs]
    # Split, not sliced: the gradients of the parts are then put together once.
    parts = zip(*(x.split(lengths, dim=1) for x in (q, k, v)))
    outs, lses = [], []
    with without_autocast(q.device):
        for (start, _, _), length, pieces, (q_d, k_d, v_d) in zip(runs, lengths, plans, parts):
            mask_d = None if key_padding_mask is None else key_padding_mask[:, start : start + length]
            tokens = start if order.tokens is None else order.tokens[start : start + length]
            results = [
                (piece, *attend_piece(q_d, k_d, v_d, key_padding_mask=mask_d, tokens=tokens, piece=piece, call=call))
                for piece in uncached(dense_pieces)(pieces, "mask", alone=True)
            ]
            layers: dict[tuple[int, int], list[PartialOutput]] = {(i, 0): [] for i in range(len(pattern.branches))}
            for result in results:
                layers.setdefault((result[0].branch, result[0].part), []).append(result)
            out, lse = mix([*layers.values()], q_d, q.shape[2] // k.shape[2], detach_weights=pattern.detach_weights)
            outs.append(out)
            lses.append(lse)
    return order.put(torch.cat(outs, dim=1)), order.put(torch.cat(lses, dim=2), 2)


def attend_piece(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, tokens: int | Tensor, piece: Piece, call: Call
) -> tuple[Tensor, Tensor]:
    """Out `b s o h g r d` and lse `b s o h g r` of a piece; `tokens`: the first token that q holds, or `(N,)`, all of them."""
    group, device, of_keys = q.shape[2] // k.shape[2], q.device, piece.of_keys()
    positions = tokens_of(piece, device), tokens_of(of_keys, device)
    queries, keys = (tokens[x] if isinstance(tokens, Tensor) else tokens + x for x in positions)
    b = torch.arange(q.shape[0], device=device)[:, None, None, None, None, None, None]
    h = heads_of(piece, group, device)[None, None, ..., None, None]
    ignored = None
    if key_padding_mask is not None:
        ignored = read(key_padding_mask[:, :, None, None].expand(-1, -1, k.shape[2], 1), of_keys)[..., None, :, 0]
    pairs = queries[None, :, :, None, None, :, None], keys[None, :, :, None, None, None, :]
    shift = piece.key_token - piece.token
    band = [bound if abs(bound) == UNBOUNDED else shift + bound * piece.row_stride for bound in (piece.low, piece.high)]
    read_rows = read if torch.compiler.is_compiling() or is_transformed(q, k, v) else box
    tensors = read_rows(q, piece, group=group), read_rows(k, of_keys), read_rows(v, of_keys)
    rows = Rows(*tensors, ignored=ignored, b=b, h=h, q_idx=pairs[0], kv_idx=pairs[1])
    out, lse = attend_lanes(rows, call, (band[0], band[1]))
    return with_zero_keys(out, lse, piece.zero_keys) if piece.zero_keys else (out, lse)


def attend_lanes(rows: Rows, call: Call, band: Band) -> tuple[Tensor, Tensor]:
    """`attend_rows` in chunks of lanes (dim 1) and queries, each with about `SCORES` scores."""
    lanes, num_rows = rows.q.shape[1], rows.q.shape[-2]
    batch = known_batch(rows.q.shape[0]) if torch.compiler.is_compiling() else rows.q.shape[0]
    per_row = max(1, batch * math.prod(rows.q.shape[2:-2]) * rows.k.shape[-2])
    if lanes * num_rows * per_row <= SCORES:
        return attend_rows(rows, call, band)
    lanes_per_part = max(1, SCORES // max(1, per_row * num_rows))
    max_rows = max(1, SCORES // (per_row * min(lanes_per_part, lanes)))
    count = -(-lanes // lanes_per_part)
    # Split, not sliced: the gradients of the parts are then put together once.
    split = [[x] * count if x is None or x.shape[1] == 1 else x.split(lanes_per_part, dim=1) for x in rows]
    outs, lses = [], []
    for part in map(Rows._make, zip(*split)):
        queries = zip(part.q.split(max_rows, dim=-2), part.q_idx.split(max_rows, dim=-2))
        chunks = [attend_rows(part._replace(q=q, q_idx=q_idx), call, band) for q, q_idx in queries]
        outs.append(torch.cat([out for out, _ in chunks], dim=-2))
        lses.append(torch.cat([lse for _, lse in chunks], dim=-1))
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def known_batch(batch: int) -> int:
    """The batch size for counting scores; 1 if it is symbolic in an exported program, which must serve every batch size."""
    return 1 if is_exporting() and is_symbolic(batch) else batch


def attend_rows(rows: Rows, call: Call, band: Band, apart: Near | None = None) -> tuple[Tensor, Tensor]:
    """Attention of some queries over the keys of their segments, window or tile, without the pairs of `apart`.

    The backward computes scores again, but where a checkpoint cannot run: in torch.func and in programs exported strictly.
    """
    is_traced = torch.compiler.is_compiling()
    if not torch.is_grad_enabled() or is_transformed(*rows[:3]) or (is_traced and is_exporting()):
        return _attend(*rows, call, band, apart)
    if is_traced:
        # Symbols must be used outside of checkpoints first, or a second checkpoint does not find them (torch 2.13).
        call = call.replaced(scale=call.checked_scale() * 1.0, dropout_p=call.dropout_p if call.dropout_p > 0.0 else 0.0)
        return checkpoint(_attend, *rows, call, band, apart, use_reentrant=False)
    return attend_recorded(partial(_attend, band=band, apart=apart), rows, call)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ignored: Tensor | None,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    call: Call,
    band: Band,
    apart: Near | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend_rows` without recomputation: the one place that scales scores, applies the functions, and masks.

    The functions receive tensors that broadcast to the scores instead of one pair. The result is the same for pointwise functions
    that index tables by positions.
    """
    dtype = accumulated(q.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    group, rows = q.shape[-3:-1]
    scores = _multiply(q.flatten(-3, -2), k[..., 0, :, :].transpose(-1, -2)).unflatten(-2, (group, rows)) * call.checked_scale()
    if call.score_mod is not None:
        scores = call_mod("score_mod", call.score_mod, scores, *(b, h, q_idx, kv_idx)).to(scores.dtype).expand_as(scores)
    visible = None if call.mask_mod is None else call_mod("mask_mod", call.mask_mod, b, h, q_idx, kv_idx)
    low, high = band
    late = None if high == UNBOUNDED else kv_idx <= q_idx if high == 0 else kv_idx - q_idx <= high
    early = None if low == -UNBOUNDED else kv_idx - q_idx >= low
    far = None if apart is None else ~apart.joins(q_idx, kv_idx)
    for condition in (visible, late, early, far, None if ignored is None else ~ignored):
        if condition is not None:
            scores = torch.where(condition, scores, -math.inf)
    weights, lse = normalised(scores, dim=-1)
    if call.dropout_p > 0.0:
        with may_draw():
            weights = torch.nn.functional.dropout(weights, call.dropout_p)
    out = _multiply(weights.flatten(-3, -2), v[..., 0, :, :]).unflatten(-2, (group, rows))
    return out, lse[..., 0]


def _padded(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """`_pieces` for compilers, by padded grids: fewer than the pieces, and valid for a symbolic number of tokens."""
    pattern, key_padding_mask, is_causal = call.pattern, call.key_padding_mask, call.is_causal
    (batch, num_tokens), num_held = q.shape[:2], k.shape[2]
    group, kv_heads = q.shape[2] // num_held, call.num_kv_heads or num_held
    within = call.part_of_heads(num_held) or range(num_held)
    parts = num_parts(pattern, known_batch(batch), num_tokens, kv_heads, group=group, is_causal=is_causal, scores=SCORES)
    grids = draw_grids(pattern, num_tokens, kv_heads, within, group=group, is_causal=is_causal, parts=parts, device=q.device)
    check_mods(call.score_mod, call.mask_mod, q)  # again: without fullgraph a graph break above loses the first check
    if key_padding_mask is not None:
        k, v = (x.masked_fill(key_padding_mask[:, :, None, None], 0.0) for x in (k, v))
    own_tiles = [tile for tile in tiles(pattern, "grids", is_causal=is_causal) if tile.heads(pattern, kv_heads, within)]
    with without_autocast(q.device):
        results = [_attend_grid(q, k, v, tile=tile, grid=grid, call=call) for tile, grid in zip(own_tiles, grids)]
        return mix_branches(results, q.dtype, detach_weights=pattern.detach_weights)


def _attend_grid(q: Tensor, k: Tensor, v: Tensor, tile: Tile, grid: Grid, call: Call) -> tuple[Tensor, Tensor]:
    """A tile's out `(B, N, H, D)` and lse `(B, N, H)`, 0 and -inf at tokens that a head does not keep."""
    band = -UNBOUNDED, 0 if call.is_causal else UNBOUNDED
    if tile.window is not None:
        band = tile.window.band(is_causal=call.is_causal)
    # Padding is set to zero, so that values of other tokens have no effect.
    k, v = (x[:, grid.keys, grid.kv_heads].masked_fill(grid.is_ignored[..., None], 0.0)[:, :, None] for x in (k, v))
    ignored = grid.is_ignored[None] if call.key_padding_mask is None else grid.is_ignored | call.key_padding_mask[:, grid.keys]
    b = torch.arange(q.shape[0], device=q.device)[:, None, None, None, None]
    outs, lses = [], []
    for token, head, is_unread in zip(grid.queries.unbind(), grid.heads.unbind(), grid.is_unread.unbind()):
        rows = Rows(
            q[:, token, head].masked_fill(is_unread[..., None], 0.0)[:, :, None],
            k,
            v,
            ignored=ignored[:, :, None, None, :],
            b=b,
            h=head[None, :, None, :, None],
            q_idx=token[None, :, None, :, None],
            kv_idx=grid.keys[None, :, None, None, :],
        )
        out, lse = attend_rows(rows, call, band, tile.apart or None)
        outs.append(out[:, :, 0])
        lses.append(lse[:, :, 0])
    index = slice(None), grid.lanes, grid.rows
    out, lse = torch.cat(outs, dim=2)[index], torch.cat(lses, dim=2)[index]
    return out.masked_fill(~grid.is_kept[..., None], 0.0), lse.masked_fill(~grid.is_kept, -math.inf)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of matrices with the same other dims, whose gradients are products in their dtype too.

    Autograd's own would be in that of `torch.autocast` where a backward is called inside it.
    """
    if not torch.is_grad_enabled():
        return a @ b
    transformed = is_transformed(a, b)
    if forward_ad._current_level >= 0 or (transformed and torch.compiler.is_compiling()):
        return a @ b  # the tangents of a Function have no tangents (torch 2.13)
    product: Any = _MappedProduct if transformed else _Product
    out: Tensor = product.apply(a, b)
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        with without_autocast(dout.device, traced_before=True):
            da = _multiply(dout, b.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
            db = _multiply(a.transpose(-1, -2), dout) if ctx.needs_input_grad[1] else None
        return da, db


class _MappedProduct(_Product):
    """`_Product` for torch.func.vmap. A class of its own: the compiler rejects a Function with a vmap rule."""

    generate_vmap_rule = True
