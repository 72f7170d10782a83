"""The mixture under users' score and mask functions: scores held a bounded number at a time, differentiated by autograd.

Scores are computed for some segments and some of their queries at a time, and again in the backward (activation checkpointing), so
that never more than `SCORES` of them exist: autograd finds whatever tensors the functions hold, learnable tables included. Under
torch.func, which checkpoints nothing, the backward finds them all kept.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexdilated.call import Call, documents
from flexdilated.hardware import without_autocast
from flexdilated.merge import accumulated
from flexdilated.mixing import heads_of, mix, read, tokens_of
from flexdilated.mods import MaskMod, ScoreMod, modify, refuse_dynamic, refuse_zero_keys
from flexdilated.pieces import Piece, plan_pieces
from flexdilated.transforms import is_transformed, may_draw

__all__ = ["materialised"]

SCORES = 1 << 24  # at once: 64 MiB in float32, and a few times that while functions work on them


class _Options(NamedTuple):
    is_causal: bool
    scale: float
    dropout_p: float
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None


def materialised(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """`out` `(B, N, H, D)` and `lse` `(B, H, N)` of a checked call, differentiable, also in what the functions hold.

    Raises:
        NotImplementedError: If torchscale's zero keys take part: they have no position to tell the functions.
    """
    refuse_dynamic(q.shape[1], "score_mod and mask_mod")
    assert call.scale is not None
    pattern, key_padding_mask = call.pattern, call.key_padding_mask
    options = _Options(call.is_causal, call.scale, call.dropout_p, call.score_mod, call.mask_mod)
    spans = [(start, length) for start, length in documents(call.cu_seqlens, q.shape[1]) if length]
    plans = [plan_pieces(pattern, ((0, length),), k.shape[2], call.is_causal) for _, length in spans]
    if not all(piece.holds_tokens_alone for pieces in plans for piece in pieces):
        refuse_zero_keys(q.shape[1])
    if key_padding_mask is not None:
        # What ignored keys and values hold must not matter, and 0 times NaN would.
        k, v = (x.masked_fill(key_padding_mask[:, :, None, None], 0.0) for x in (k, v))
    lengths = [length for _, length in spans]
    # Split, not sliced: the gradients of the parts are then put together once.
    parts = zip(*(x.split(lengths, dim=1) for x in (q, k, v)))
    outs, lses = [], []
    with without_autocast(q.device):
        for (start, length), pieces, (q_d, k_d, v_d) in zip(spans, plans, parts):
            ignored = None if key_padding_mask is None else key_padding_mask[:, start : start + length]
            results = [(piece, *_piece(q_d, k_d, v_d, ignored, start, piece, options)) for piece in pieces]
            out, lse = mix(results, q_d, q.shape[2] // k.shape[2], detach_weights=pattern.detach_weights)
            outs.append(out)
            lses.append(lse)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


def _piece(
    q: Tensor, k: Tensor, v: Tensor, ignored: Tensor | None, start: int, piece: Piece, options: _Options
) -> tuple[Tensor, Tensor]:
    """Out `(B, S, C, G, group, R, D)` and lse `(B, S, C, G, group, R)` of a piece of a document that begins at token `start`."""
    group, device = q.shape[2] // k.shape[2], q.device
    lanes = piece.offsets * piece.heads
    per_row = max(1, q.shape[0] * lanes * group * piece.rows)
    segments = max(1, SCORES // (per_row * piece.rows))
    rows = max(1, SCORES // (per_row * min(segments, piece.segments)))

    position = start + tokens_of(piece, device)
    b = torch.arange(q.shape[0], device=device)[:, None, None, None, None, None, None]
    h = heads_of(piece, group, device)[None, None, ..., None, None]

    q_s, k_s, v_s = (x.split(segments, dim=1) for x in (read(q, piece, group=group), read(k, piece), read(v, piece)))
    hidden = None
    if ignored is not None:
        hidden = read(ignored[:, :, None, None].expand(-1, -1, k.shape[2], 1), piece)[..., None, :, 0].split(segments, dim=1)
    outs, lses = [], []
    for i, kv_idx in enumerate(position.split(segments)):
        chunks = []
        for q_c, q_idx in zip(q_s[i].split(rows, dim=5), kv_idx.split(rows, dim=2)):
            arguments = (
                q_c,
                k_s[i],
                v_s[i],
                None if hidden is None else hidden[i],
                b,
                h,
                q_idx[None, :, :, None, None, :, None],
                kv_idx[None, :, :, None, None, None, :],
                options,
            )
            if torch.is_grad_enabled() and not is_transformed(q, k, v):
                chunks.append(checkpoint(_attend, *arguments, use_reentrant=False))
            else:
                chunks.append(_attend(*arguments))
        outs.append(torch.cat([out for out, _ in chunks], dim=5))
        lses.append(torch.cat([lse for _, lse in chunks], dim=5))
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    options: _Options,
) -> tuple[Tensor, Tensor]:
    """Attention of some queries `(B, S, C, G, group, rows, D)` over the keys of their segments, `(B, S, C, G, 1, R, D)`."""
    q, k, v = (x.to(accumulated(x.dtype)) for x in (q, k, v))
    group, rows = q.shape[4:6]
    scores = _multiply(q.flatten(4, 5), k[:, :, :, :, 0].transpose(-1, -2)).unflatten(4, (group, rows)) * options.scale
    scores, visible = modify(scores, b, h, q_idx, kv_idx, options.score_mod, options.mask_mod)
    for seen in (visible, kv_idx <= q_idx if options.is_causal else None, None if hidden is None else ~hidden):
        if seen is not None:
            scores = torch.where(seen, scores, -math.inf)
    reached = (scores != -math.inf).any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~reached, 0.0)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = torch.exp(scores - lse) * reached
    if options.dropout_p > 0.0:
        with may_draw():
            weights = torch.nn.functional.dropout(weights, options.dropout_p)
    out = _multiply(weights.flatten(4, 5), v[:, :, :, :, 0]).unflatten(4, (group, rows))
    return out, lse.masked_fill(~reached, -math.inf)[..., 0]


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of matrices with the same other dims, whose gradients are products in their dtype too.

    Autograd's own would be in that of `torch.autocast` where a backward is called inside it.
    """
    transformed = is_transformed(a, b)
    if transformed and torch.compiler.is_compiling():
        return a @ b
    product: Any = _ProductWithTangent if transformed else _Product
    out: Tensor = product.apply(a, b)
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        with without_autocast(dout.device, traced_before=True):
            da = _multiply(dout, b.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
            db = _multiply(a.transpose(-1, -2), dout) if ctx.needs_input_grad[1] else None
        return da, db


class _ProductWithTangent(_Product):
    """For torch.func and forward mode; the compiler takes no Function that has a `jvp`."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        terms = [] if da is None else [_multiply(da, b)]
        terms += [] if db is None else [_multiply(a, db)]
        return sum(terms[1:], start=terms[0])
