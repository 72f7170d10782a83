"""`dilated_attention`: check the arguments, choose the engine, run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from flexdilated import backends, reference
from flexdilated.backends.request import request_of
from flexdilated.flexed import flexed
from flexdilated.hardware import autocast_dtype
from flexdilated.materialised import materialised
from flexdilated.merge import accumulated
from flexdilated.mixture import documents, mixture
from flexdilated.mods import MaskMod, ScoreMod, check_mods
from flexdilated.pattern import DilatedPattern

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["EXCHANGES", "attend_local", "check_dense", "check_scale", "dilated_attention"]

EXCHANGES = ("auto", "gather", "ring", "heads")
# Said where shapes suggest that tokens and heads have changed places.
LAYOUT = "; the layout is (B, N, H, D): transpose dims 1 and 2 of tensors made for scaled_dot_product_attention"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@overload
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    key_padding_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    score_mod: ScoreMod | None = ...,
    mask_mod: MaskMod | None = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
    mesh: DeviceMesh | None = ...,
    exchange: str = ...,
    shard_lengths: Sequence[int] | None = ...,
) -> Tensor: ...
@overload
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    key_padding_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    score_mod: ScoreMod | None = ...,
    mask_mod: MaskMod | None = ...,
    backend: str = ...,
    return_lse: Literal[True],
    mesh: DeviceMesh | None = ...,
    exchange: str = ...,
    shard_lengths: Sequence[int] | None = ...,
) -> tuple[Tensor, Tensor]: ...
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    mesh: DeviceMesh | None = None,
    exchange: str = "auto",
    shard_lengths: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Segment-local dilated attention, its branches mixed by log-sum-exp.

    Branch `i` of the pattern is softmax attention among the positions `p` with `(p % w) % r == offset`, inside segments of `w`
    tokens; `lse = logsumexp_i lse_i`, `out = sum_i exp(lse_i - lse) out_i`. Equivalently: one softmax over the multiset union of
    the branches' keys. The last segment may be shorter; padding never takes part (but see `DilatedPattern.zero_padding`). A query
    that no key reaches has `out = 0`, `lse = -inf` and gradient 0. Gradients are exact, and only q, k, v, out and lse are kept.
    Under autocast q, k and v are cast as `scaled_dot_product_attention` casts them; it reaches no further, neither in the forward
    nor in the backward.

    The layout is `(B, N, H, D)`, tokens before heads, as in flash-attn. That of `scaled_dot_product_attention` and `flex_attention`
    is `(B, H, N, D)`: transpose dims 1 and 2 of what was made for them. With as many heads as q in k and v, nothing can tell one
    layout from the other, and heads would be taken for tokens.

    With `mesh`, q, k and v are this rank's contiguous shard of a longer sequence, and so are `key_padding_mask`, `out` and `lse`;
    segments, offsets and `cu_seqlens` follow positions in the whole sequence. The result is that of one device, gradients included:
    every rank must then call backward. A segment inside a shard needs no communication. DTensors say themselves how they are
    sharded: on the tokens, as with `mesh`; on the heads, whose offsets then follow their index in the whole model; on the batch.
    Source: LongNet, arXiv 2307.02486, section 2 and, for the distributed algorithm, section 3.

    Args:
        q: Queries, `(B, N, H, D)`, float64, float32, bfloat16 or float16, any strides.
        k: Keys, `(B, N, Hkv, D)`, `H % Hkv == 0`. Key/value head `j` serves the query heads `j H / Hkv` and following, which share
            its offset and branch.
        v: Values, the shape of k.
        pattern: Which positions attend to which.
        is_causal: Whether a query sees only keys at its own position and before.
        scale: Multiplies `q @ k^T`. Default: `D ** -0.5`.
        dropout_p: Probability of dropping an attention weight, in [0, 1). Active whenever it is above 0: pass 0 in evaluation.
            Reproducible under `torch.manual_seed`; `lse` is that of the undropped weights.
        key_padding_mask: `(B, N)` bool, True where a key is ignored, as in `nn.MultiheadAttention`. What ignored keys and values
            hold, NaN included, has no effect.
        cu_seqlens: `(num_documents + 1,)` int32 or int64, for `B = 1`: documents packed one after another begin and end at these
            tokens. Each is computed exactly as if it were alone: segments and offsets start anew. Reading it waits for the device.
        score_mod: FlexAttention's score function, `(score, b, h, q_idx, kv_idx)` to a score: pointwise, in the positions of the
            tokens as they are given here, whatever layout runs underneath. Tensors that it holds get their gradients.
        mask_mod: FlexAttention's mask function, `(b, h, q_idx, kv_idx)` to whether the query sees the key; it takes pairs away
            from the pattern.
        backend: `"auto"`, or the name of an engine: `"sdpa"`, `"flash"`, `"flex"`, `"reference"`. A named engine runs or raises, it
            is never replaced.
        return_lse: Whether to return `lse` too. It is differentiable.
        mesh: A 1-D `DeviceMesh`, or one axis of a larger one, whose ranks hold the sequence in their order.
        exchange: How rows travel over the mesh. `"gather"`: the keys and values that a rank needs, all at once. `"ring"`: those of
            one rank after another, in memory that does not grow with the number of ranks. `"heads"`: the rows of a segment to the
            ranks that compute its heads, and the outputs back. `"auto"`: the least bytes whose buffers are no larger than twice
            q, k, v and out.
        shard_lengths: Tokens of each rank, 0 allowed, the same on all ranks. Default: as many as this rank's on every rank.

    Returns:
        `out` `(B, N, H, D)` in the dtype of q; with `return_lse`, `(out, lse)`, `lse` `(B, H, N)`, natural log, float32 (float64
        for float64 inputs).

    Raises:
        ValueError: If a shape, length, probability or name is wrong, or the pattern has more groups of heads than k has heads.
        TypeError: If an argument has the wrong type or dtype.
        NotImplementedError: If the named backend cannot run the call, on a double backward, or for score and mask functions over
            a mesh.
    """
    attend: Callable[..., tuple[Tensor, Tensor | None]] = attend_local
    if _is_dtensor(q) or _is_dtensor(k) or _is_dtensor(v):
        from flexdilated.distributed.dtensors import attend_dtensors as attend  # not loaded with the package
    out, lse = attend(
        q,
        k,
        v,
        pattern,
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        score_mod=score_mod,
        mask_mod=mask_mod,
        backend=backend,
        return_lse=return_lse,
        mesh=mesh,
        exchange=exchange,
        shard_lengths=shard_lengths,
    )
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def attend_local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    backend: str,
    return_lse: bool,
    mesh: DeviceMesh | None,
    exchange: str,
    shard_lengths: Sequence[int] | None,
    within: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`dilated_attention` of plain tensors; `within` is `(first, total)` where the key/value heads are a part of a model's."""
    group_name, rank, num_ranks = "", 0, 1
    if mesh is not None:
        from flexdilated.distributed.sharding import group_of  # not loaded with the package

        group_name, rank, num_ranks = group_of(mesh)
    divides = num_ranks > 1
    try:
        lengths = _shard_lengths(q, mesh, rank, num_ranks, exchange, shard_lengths)
        _check(q, k, v, pattern, is_causal, scale, dropout_p, key_padding_mask, cu_seqlens, allow_empty=divides)
        pattern.check_heads(k.shape[2] if within is None else within[1])
        q, k, v = _autocast(q, k, v)
        _check_dtypes(q, k, v)
        modified = score_mod is not None or mask_mod is not None
        learns = modified and check_mods(score_mod, mask_mod, q)
        request = request_of(q, k, v, key_padding_mask, dropout_p, modified=modified, learns=learns, wants_lse=return_lse)
        if divides and request.transformed:
            raise NotImplementedError(
                "mesh must come without torch.func and forward-mode differentiation, got a call under one; use torch.autograd"
            )
        scale = q.shape[3] ** -0.5 if scale is None else float(scale)
        engine = backends.choose(backend, request, divided=divides or within is not None)
    except (ValueError, TypeError, NotImplementedError) as error:
        if divides and not torch.compiler.is_compiling():
            from flexdilated.sharded import withdraw_from

            withdraw_from(group_name, str(error))  # the other ranks would wait for this one
        raise
    if divides:
        from flexdilated.sharded import sharded  # not loaded with the package

        return sharded(
            q,
            k,
            v,
            pattern,
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            engine=engine,
            within=within,
            group_name=group_name,
            rank=rank,
            shard_lengths=lengths,
            exchange=exchange,
        )
    lse: Tensor | None
    if engine == "reference":
        documents(cu_seqlens, q.shape[1])  # refuses borders that do not tile the tokens
        out, lse = reference.dilated_attention(
            q,
            k,
            v,
            pattern,
            is_causal=is_causal,
            scale=scale,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            score_mod=score_mod,
            mask_mod=mask_mod,
        )
        out, lse = out.to(q.dtype), lse if q.dtype == torch.float64 else lse.float()
    elif engine == "flex":
        out, lse = flexed(
            q,
            k,
            v,
            pattern,
            is_causal=is_causal,
            scale=scale,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            score_mod=score_mod,
            mask_mod=mask_mod,
            want_lse=return_lse,
        )
    elif modified:
        out, lse = materialised(
            q,
            k,
            v,
            pattern,
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            score_mod=score_mod,
            mask_mod=mask_mod,
        )
    else:
        out, lse = mixture(
            q,
            k,
            v,
            pattern,
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            engine=engine,
            within=within,
        )
    return out, lse


def _shard_lengths(
    q: Tensor, mesh: DeviceMesh | None, rank: int, num_ranks: int, exchange: str, shard_lengths: Sequence[int] | None
) -> tuple[int, ...]:
    """Tokens of each rank; the arguments of a mesh are checked without one too."""
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES}, got {exchange!r}")
    if mesh is None:
        if shard_lengths is not None:
            raise ValueError(f"shard_lengths must come with mesh, got {tuple(shard_lengths)} and no mesh")
        if exchange != "auto":
            raise ValueError(f"exchange must come with mesh, got {exchange!r} and no mesh")
        return ()
    if not isinstance(q, Tensor) or q.is_nested or q.dim() != 4:
        return ()  # refused with the other arguments
    if q.device.type != mesh.device_type:
        raise ValueError(f"q must be on the device of mesh={mesh.device_type}, got {q.device}")
    from flexdilated.distributed.sharding import declared_lengths  # not loaded with the package

    lengths = declared_lengths(rank, num_ranks, q.shape[1], shard_lengths)
    if sum(lengths) < 1:
        raise ValueError(f"shard_lengths must hold at least 1 token in all, got {lengths}")
    return lengths


def _is_dtensor(x: object) -> bool:
    # By name: torch.distributed.tensor takes a third of a second to import.
    return type(x).__name__ == "DTensor"


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the dtype that autocast gives a matrix product; float64 is left alone, as there."""
    dtype = autocast_dtype(q.device)
    if dtype is None:
        return q, k, v
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    allow_empty: bool = False,
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        check_dense(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have shape (B, N, H, D), got {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q={q.device}, got {x.device}")
    if (q.shape[1] < 1 and not allow_empty) or q.shape[2] < 1 or q.shape[3] < 1:
        raise ValueError(f"q must have at least one token, head and element per head, got shape {tuple(q.shape)}")
    for name, x in (("k", k), ("v", v)):
        if (x.shape[0], x.shape[1], x.shape[3]) != (q.shape[0], q.shape[1], q.shape[3]):
            hint = LAYOUT if q.shape[1] % max(1, x.shape[1]) == 0 and x.shape[2] == q.shape[2] else ""
            raise ValueError(f"{name} must match q in B, N and D, q={tuple(q.shape)}, got {tuple(x.shape)}{hint}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"v must have as many heads as k={k.shape[2]}, got {v.shape[2]}")
    if k.shape[2] < 1 or q.shape[2] % k.shape[2] != 0:
        raise ValueError(f"k must have a number of heads that divides that of q={q.shape[2]}, got {k.shape[2]}")
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}")
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
    check_scale(scale, q.dtype)
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p must be a number, got {dropout_p!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if key_padding_mask is not None:
        _check_key_padding_mask(key_padding_mask, q)
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, q)


def check_dense(name: str, x: Tensor, nested: str = "pack the sequences in one row and give their borders as cu_seqlens") -> None:
    """Refuse tensors whose elements do not lie in strides.

    Raises:
        NotImplementedError: If x is nested (the error ends in `nested`), sparse, or in another such layout.
    """
    if x.is_nested:
        raise NotImplementedError(f"{name} must be a dense tensor, got a nested one; {nested}")
    if x.layout != torch.strided:
        raise NotImplementedError(f"{name} must be a dense tensor, got layout {x.layout}; use to_dense()")


def check_scale(scale: float | None, dtype: torch.dtype) -> None:
    """Refuse what the scores of q in a dtype cannot be multiplied by.

    Raises:
        ValueError: If it is not finite, or not in the dtype of the scores.
        TypeError: If it is not a number or None.
    """
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"scale must be a number or None, got {scale!r}")
    if isinstance(scale, float) and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    scores = accumulated(dtype)
    if scale is not None and abs(scale) > torch.finfo(scores).max:
        raise ValueError(f"scale must be finite in {scores}, in which {dtype} is scored, got {scale}")


def _check_key_padding_mask(mask: Tensor, q: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"key_padding_mask must be a tensor, got {type(mask).__name__}")
    check_dense("key_padding_mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be bool, True for a key to ignore, got {mask.dtype}")
    if mask.shape != q.shape[:2]:
        hint = LAYOUT if mask.shape == (q.shape[0], q.shape[2]) else ""
        raise ValueError(f"key_padding_mask must have shape (B, N)={tuple(q.shape[:2])}, got {tuple(mask.shape)}{hint}")
    if mask.device != q.device:
        raise ValueError(f"key_padding_mask must be on the device of q={q.device}, got {mask.device}")


def _check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    """What can be said without reading it; its values are checked where they are read, before any work."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a tensor, got {type(cu_seqlens).__name__}")
    check_dense("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape (num_documents + 1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.is_meta and not q.is_meta:
        raise ValueError(f"cu_seqlens must hold values for q on {q.device}, got a tensor on meta")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens must come with q of batch size 1, got batch size {q.shape[0]}; pack the batch in one row")


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q={q.dtype}, got {x.dtype}")
