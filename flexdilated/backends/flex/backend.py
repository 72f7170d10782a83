"""The mixture by flex_attention: one call over the raw layout, or one per piece over its kept rows, merged by their lse."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexdilated.backends.autograd.combine import mix, unshared
from flexdilated.backends.flex.cost import Packing, Shape, choose_layout
from flexdilated.backends.flex.rows import attend_piece, run_kernel
from flexdilated.core.call import Call, documents, refuse_compiled_borders
from flexdilated.core.checks import refuse_zero_keys
from flexdilated.core.hardware import without_autocast
from flexdilated.core.pieces import Piece, plan_pieces
from flexdilated.core.tracing import uncached
from flexdilated.masks.block_mask import block_mask_for
from flexdilated.masks.functions import has_several, mask_mod_of, score_mod_of


def attend_flex(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """`out` `(B, N, H, D)` and, on request, `lse` `(B, H, N)` of a checked call; differentiable where flex_attention is.

    Raises:
        NotImplementedError: If torchscale's zero keys take part where there is no lse. If users' functions cannot be compiled, or
            hold ever new floats. For documents in compiled code.
    """
    refuse_compiled_borders(call, "backend='flex'")
    key_padding_mask = call.key_padding_mask
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.contiguous()  # flex_attention reads no other on CPUs
        k, v = (x.masked_fill(key_padding_mask[:, :, None, None], 0.0) for x in (k, v))
    spans = [(start, length) for start, length in documents(call.cu_seqlens, q.shape[1]) if length]
    layouts = [_layout(q, k, length, call) for _, length in spans]
    parts = zip(*(x.split([length for _, length in spans], dim=1) for x in (q, k, v)))
    outs, lses = [], []
    for (start, length), layout, (q_d, k_d, v_d) in zip(spans, layouts, parts):
        mask_d = None if key_padding_mask is None else key_padding_mask[:, start : start + length]
        run = _fused if layout == "fused" else _packed
        with without_autocast(q.device):
            out, lse = run(q_d, k_d, v_d, mask_d, start, call)
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, dim=1), torch.cat([lse for lse in lses if lse is not None], dim=2) if call.return_lse else None


def _layout(q: Tensor, k: Tensor, length: int, call: Call) -> Packing:
    """The layout for a document of `length` tokens."""
    pattern = call.pattern
    zero_keys = any(piece.zero_keys for piece in _pieces(length, k, call))
    if zero_keys and call.is_modified():
        refuse_zero_keys(length)
    if _on_cpu(q):  # there is no lse to merge pieces by
        if zero_keys:
            raise NotImplementedError(
                f"pattern must add no zero keys at {length} tokens for backend='flex' on CPU, got zero_padding=True; "
                "use backend='sdpa'"
            )
        return "fused"
    if zero_keys or pattern.detach_weights or call.part_of_heads(k.shape[2]) is not None:
        return "packed"
    batch, _, heads, head_dim = q.shape
    return choose_layout(
        pattern,
        Shape(
            batch=batch,
            num_tokens=length,
            num_heads=heads,
            num_kv_heads=k.shape[2],
            head_dim=head_dim,
            element=q.element_size(),
            is_causal=call.is_causal,
        ),
    )


def _on_cpu(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _fused(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, start: int, call: Call
) -> tuple[Tensor, Tensor | None]:
    """The pattern as mask and score function of the document that begins at token `start`."""
    num_tokens, heads, kv_heads, device = q.shape[1], q.shape[2], k.shape[2], q.device
    pattern, is_causal = call.pattern, call.is_causal
    plain = replace(pattern, zero_padding=False, detach_weights=False)
    joined, multiplicity = (uncached(make)(plain, heads, kv_heads, is_causal) for make in (mask_mod_of, score_mod_of))
    # A tensor: the kernels take no numbers that change from call to call.
    first = torch.full((), start, dtype=torch.int32, device=device)
    user_score, user_mask = call.score_mod, call.mask_mod

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = joined(b, h, q_idx, kv_idx)
        if key_padding_mask is not None:
            visible = visible & ~key_padding_mask[b, kv_idx]
        if user_mask is not None:
            visible = visible & user_mask(b, h, q_idx + first, kv_idx + first)
        return visible

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if user_score is not None:
            score = user_score(score, b, h, q_idx + first, kv_idx + first)
        return multiplicity(score, b, h, q_idx, kv_idx)

    narrows = key_padding_mask is not None or user_mask is not None
    out, lse = run_kernel(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        call,
        score_mod=score_mod if has_several(pattern) or user_score is not None else None,
        block_mask=block_mask_for(
            plain,
            heads,
            kv_heads,
            seq_len=num_tokens,
            is_causal=is_causal,
            device=device,
            mask_mod=mask_mod if narrows else joined,
            narrows=narrows,
        ),
        want_lse=call.return_lse,
        like=plain,
    )
    return out.transpose(1, 2), lse


def _packed(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, start: int, call: Call
) -> tuple[Tensor, Tensor | None]:
    q, k, v = (unshared(x) for x in (q, k, v))
    results = [
        (piece, *attend_piece(q, k, v, key_padding_mask=key_padding_mask, start=start, piece=piece, call=call))
        for piece in _pieces(q.shape[1], k, call)
    ]
    return mix([[part] for part in results], q, q.shape[2] // k.shape[2], detach_weights=call.pattern.detach_weights)


def _pieces(length: int, k: Tensor, call: Call) -> tuple[Piece, ...]:
    """The pieces of a document of `length` tokens, for the key/value heads held here."""
    kv_heads = k.shape[2]
    return plan_pieces(call.pattern, ((0, length),), call.num_kv_heads or kv_heads, call.is_causal, call.part_of_heads(kv_heads))
