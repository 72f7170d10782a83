"""The mixture by flex_attention: one call over the raw layout, or one per piece over its kept rows, merged by their lse."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexdilated.backends.autograd.combine import heads_of, mix, read, tokens_of
from flexdilated.backends.flex import kernel
from flexdilated.backends.flex.cost import Layout, Shape, choose_layout, mergeable
from flexdilated.backends.kernel import GRID_LIMIT
from flexdilated.core.call import Call, ScoreMod, documents, refuse_compiled_borders
from flexdilated.core.checks import refuse_zero_keys
from flexdilated.core.hardware import without_autocast
from flexdilated.core.lse import with_zero_keys
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.pieces import UNBOUNDED, Piece, plan_pieces
from flexdilated.core.tracing import TRACES_FUNCTIONS, uncached
from flexdilated.masks.block_mask import block_mask_for
from flexdilated.masks.functions import has_several, mask_mod_of, score_mod_of


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


def _layout(q: Tensor, k: Tensor, length: int, call: Call) -> Layout:
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
    results = [
        (piece, *attend_piece(q, k, v, key_padding_mask=key_padding_mask, start=start, piece=piece, call=call))
        for piece in _pieces(q.shape[1], k, call)
    ]
    return mix([[part] for part in results], q, q.shape[2] // k.shape[2], detach_weights=call.pattern.detach_weights)


def _pieces(length: int, k: Tensor, call: Call) -> tuple[Piece, ...]:
    """The pieces of a document of `length` tokens, for the key/value heads held here."""
    kv_heads = k.shape[2]
    return plan_pieces(call.pattern, ((0, length),), call.num_heads or kv_heads, call.is_causal, call.part_of_heads(kv_heads))


def attend_piece(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, start: int, piece: Piece, call: Call
) -> tuple[Tensor, Tensor]:
    """Out `b s o h g r d` and lse `b s o h g r` of a piece of a document that begins at token `start`.

    Where rows allow, all segments are one sequence under a block-diagonal mask; else every segment is a sequence of its own.
    """
    group = q.shape[2] // k.shape[2]
    # The order of a lane's heads and rows, and how it is read back.
    order = "(b o) (h g) (s r)" if mergeable(piece) else "(b s o) (h g) r"
    sizes = {"s": piece.segments, "o": piece.offsets, "h": piece.heads, "g": group}
    lanes = [rearrange(x, f"b s o h g r d -> {order} d") for x in (read(q, piece, group=group), read(k, piece), read(v, piece))]
    outs, lses = [], []
    for first in range(0, lanes[0].shape[0], GRID_LIMIT):
        part = [x[first : first + GRID_LIMIT] for x in lanes]
        out, lse = _lanes(part, key_padding_mask, piece, start=start, first=first, batch=q.shape[0], group=group, call=call)
        outs.append(out)
        lses.append(lse)
    out, lse = (torch.cat(xs) if len(xs) > 1 else xs[0] for xs in (outs, lses))
    out = rearrange(out, f"{order} d -> b s o h g r d", **sizes)
    lse = rearrange(lse, f"{order} -> b s o h g r", **sizes)
    return with_zero_keys(out, lse, piece.zero_keys)


def _lanes(
    lanes: list[Tensor], key_padding_mask: Tensor | None, piece: Piece, start: int, first: int, batch: int, group: int, call: Call
) -> tuple[Tensor, Tensor]:
    """Out and lse of lanes `first ...` of a piece, `lane (h g) r d`, each a sequence of kept rows."""
    q, k, v = lanes
    device, rows = q.device, q.shape[2]
    # Tensors instead of numbers: one compiled kernel serves every branch and length.
    length, stride = (torch.full((), n, dtype=torch.int32, device=device) for n in (piece.rows, piece.row_stride))
    segment_stride = torch.full((), piece.segment_stride, dtype=torch.int32, device=device)
    is_causal, user_score, user_mask = call.is_causal, call.score_mod, call.mask_mod
    is_window = piece.low > -UNBOUNDED
    window_size = torch.full((), 1 - piece.low, dtype=torch.int32, device=device) if is_window else length
    positioned = user_score is not None or user_mask is not None or key_padding_mask is not None
    batch_of = token_of = head_of = begin = length  # a compiler reads all that a function holds, unused too
    if positioned:
        batch_of, token_of, head_of = (x[first : first + q.shape[0]] for x in _tables(piece, batch, group, device))
        begin = torch.full((), start, dtype=torch.int32, device=device)

    def position(lane: Tensor, row: Tensor) -> Tensor:
        return token_of[lane] + row // length * segment_stride + row % length * stride

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = q_idx - kv_idx < window_size if is_window else q_idx // length == kv_idx // length
        if is_window and not is_causal:
            visible = visible & (kv_idx - q_idx < window_size)
        if is_causal:
            visible = visible & (q_idx >= kv_idx)
        if key_padding_mask is not None:
            visible = visible & ~key_padding_mask[batch_of[b], position(b, kv_idx)]
        if user_mask is not None:
            visible = visible & user_mask(batch_of[b], head_of[b, h], begin + position(b, q_idx), begin + position(b, kv_idx))
        return visible

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert user_score is not None
        return user_score(score, batch_of[b], head_of[b, h], begin + position(b, q_idx), begin + position(b, kv_idx))

    diagonal = DilatedPattern(window=1 - piece.low) if is_window else DilatedPattern((piece.rows,), (1,))
    narrows = key_padding_mask is not None or user_mask is not None
    out, lse = run_kernel(
        q,
        k,
        v,
        call,
        score_mod=None if user_score is None else score_mod,
        block_mask=block_mask_for(
            diagonal, 1, 1, seq_len=rows, is_causal=is_causal, device=device, mask_mod=mask_mod, narrows=narrows
        ),
        like="window" if is_window else None,
    )
    assert lse is not None
    return out, lse


def _tables(piece: Piece, batch: int, group: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Per lane: its sequence, its first token in the document, and the query heads that it holds."""
    tokens = tokens_of(piece, device)[:, :, 0]  # (S, C)
    if mergeable(piece):
        tokens = tokens[:1]
    lane = torch.arange(batch * tokens.numel(), device=device)
    heads = heads_of(piece, group, device).flatten(1)  # (C, G group)
    return (lane // tokens.numel()).int(), tokens.flatten().int()[lane % tokens.numel()], heads.int()[lane % piece.offsets]
