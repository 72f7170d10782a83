"""`dilated_attention`: what it computes, what its arguments mean, and the way to a backend."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NoReturn, overload

import torch
from torch import Tensor

from flexdilated.backends import dispatch
from flexdilated.core.call import Call, MaskMod, ScoreMod
from flexdilated.core.checks import LAYOUT, check
from flexdilated.core.losses import warn_of_losses
from flexdilated.core.lse import normalised, sink_scale
from flexdilated.core.pattern import DilatedPattern

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


#: Options of SDPA, FlexAttention, flash-attn and xformers, and what `dilated_attention` has in their place.
OPTIONS_ELSEWHERE = {
    "attn_mask": "key_padding_mask= to ignore keys (True ignores), mask_mod= to remove pairs, score_mod= to add a bias",
    "attn_bias": "is_causal=, cu_seqlens= for packed documents, mask_mod= to remove pairs, score_mod= to add a bias",
    "block_mask": "mask_mod= to remove pairs",
    "causal": "is_causal=",
    "cu_seqlens_q": "cu_seqlens=, one list for queries and keys",
    "cu_seqlens_k": "cu_seqlens=, one list for queries and keys",
    "max_seqlen_q": "cu_seqlens= alone, which needs no longest length",
    "max_seqlen_k": "cu_seqlens= alone, which needs no longest length",
    "dropout": "dropout_p=",
    "p": "dropout_p=",
    "enable_gqa": "k and v with fewer heads than q, which need no option",
    "return_attn_probs": "return_lse=, or flexdilated.attention_map for the weights of chosen queries",
    "return_aux": "return_lse=",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "kernel_options": "backend=",
    "op": "backend=",
    "softmax_scale": "scale=",
    "s_aux": "sinks=",
    "learnable_sink": "sinks=",
    "window": "DilatedPattern(..., window=)",
    "sliding_window": "DilatedPattern(..., window=)",
    "window_size": "DilatedPattern(window=w), where a causal window_size is (w - 1, 0), and another (w - 1, w - 1)",
    "softcap": "score_mod=, such as lambda score, b, h, q_idx, kv_idx: softcap * torch.tanh(score / softcap)",
    "alibi_slopes": "score_mod=, such as lambda score, b, h, q_idx, kv_idx: score - alibi_slopes[h] * (q_idx - kv_idx).abs()",
}


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
    sinks: Tensor | None = ...,
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
    sinks: Tensor | None = ...,
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
    dropout_p: float = 0,  # not 0.0: with dynamic=True a float is an input of the graph, which is then traced twice
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    mesh: DeviceMesh | None = None,
    exchange: str = "auto",
    shard_lengths: Sequence[int] | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Segment-local dilated attention, its branches mixed by log-sum-exp.

    >>> q, k, v = torch.randn(3, 1, 1024, 8, 64)  # (B, N, H, D) each
    >>> out = dilated_attention(q, k, v, DilatedPattern.causal(1024, 8), is_causal=True)
    >>> out.shape
    torch.Size([1, 1024, 8, 64])

    Branch `i` of the pattern is softmax attention among the positions `p` with `(p % w) % r == offset`, inside segments of `w`
    tokens, or in a sliding window; `lse = logsumexp_i lse_i`, `out = sum_i exp(lse_i - lse) out_i`. This is one softmax over the
    keys of all branches: a key in m of them counts m times. A query without keys has `out = 0`, `lse = -inf` and gradient 0. The
    last segment may be short.
    Gradients are exact, and only q, k, v, out and lse are kept (with `detach_weights` also up to 3 times `out`). Autocast casts q,
    k and v as for `scaled_dot_product_attention`.

    The layout is `(B, N, H, D)`, tokens before heads, as in flash-attn. `scaled_dot_product_attention` and `flex_attention` take
    `(B, H, N, D)`: transpose dims 1 and 2 of their tensors, since a wrong layout often raises no error. There is no `attn_mask`:
    `key_padding_mask` ignores keys (True ignores), `mask_mod` removes pairs, `score_mod` changes scores.

    With `mesh`, q, k, v, `key_padding_mask`, `out` and `lse` are this rank's contiguous shard of a longer sequence; segments,
    offsets and `cu_seqlens` follow positions in the whole sequence. The result equals that of one device, gradients included: every
    rank must call backward. DTensors carry their sharding: on tokens, on heads (offsets follow the whole model), or on the batch.
    Source: LongNet, arXiv 2307.02486, section 2 and, for the distributed algorithm, section 3.

    Args:
        q: Queries, `(B, N, H, D)`, float64, float32, bfloat16 or float16, any strides.
        k: Keys, `(B, N, Hkv, D)`, `H % Hkv == 0`. Key/value head `j` serves the query heads `j H / Hkv` and following, which share
            its offset and branch.
        v: Values, the shape of k.
        pattern: Which positions attend to which.
        is_causal: Whether a query sees only keys at its own position and before.
        scale: Multiplies `q @ k^T`. Default: `D ** -0.5`. Large scores lose digits in float32: scores of 400 can give dq a relative
            error of 1e-3 (the numerics guide has a table). Use float64, or subtract the mean of the keys, which moves no output
            unless there are zero keys or a `score_mod`.
        dropout_p: Probability of dropping an attention weight, in [0, 1). Active whenever it is above 0: pass 0 in evaluation.
            Reproducible under `torch.manual_seed`; `lse` ignores it. Shards drop differently, whatever the seeds of their ranks;
            replicas drop the same weights only under equal seeds.
        key_padding_mask: `(B, N)` bool, True where a key is ignored, as in `nn.MultiheadAttention`. What ignored keys and values
            hold, NaN included, has no effect.
        cu_seqlens: `(num_documents + 1,)` int32 or int64, for `B = 1`: boundaries of packed documents. Each document is computed
            exactly as if it were alone. Reading the boundaries waits for the device.
        score_mod: FlexAttention's score function, `(score, b, h, q_idx, kv_idx)` to a score: pointwise, in the positions of the
            tokens of this call. Tensors that it holds get their gradients.
        mask_mod: FlexAttention's mask function, `(b, h, q_idx, kv_idx)` to whether the query sees the key; it removes pairs of the
            pattern. Over a mesh both functions take positions in the whole sequence and must be the same on all ranks; the
            gradients of the tensors that they hold must be summed over ranks.
        sinks: `(H,)`, the score of one more key per head, of value 0, which every query sees once. It is not multiplied by `scale`.
            It counts in `lse` and has a gradient. Over a mesh each rank has the gradient of its own rows: sum it over ranks.
            Source: gpt-oss.
        backend: `"auto"`, or the name of a backend: `"sdpa"`, `"flash"`, `"triton"`, `"flex"`, `"reference"`. A named backend runs
            or raises, it is never replaced.
        return_lse: Whether to return `lse` too. It is differentiable.
        mesh: A 1-D `DeviceMesh`, or one axis of a larger one, whose ranks hold the sequence in their order.
        exchange: How rows travel over the mesh. `"gather"`: the keys and values that a rank needs, in one exchange. `"ring"`: keys
            and values of one rank after another, in memory that does not grow with the number of ranks. `"heads"`: rows to the
            ranks that compute a head of their segment, and outputs back. `"auto"`: the fastest by estimate (speeds from
            `FLEXDILATED_LINK_SPEED` and `FLEXDILATED_COMPUTE_SPEED`), in buffers of at most 128 MiB or twice q, k, v and out.
        shard_lengths: Tokens of each rank, 0 allowed, the same on all ranks. Default: as many as this rank's on every rank.

    Returns:
        `out` `(B, N, H, D)` in the dtype of q; with `return_lse`, `(out, lse)`, `lse` `(B, H, N)`, natural log, float32 (float64
        for float64 inputs).

    Raises:
        ValueError: If a shape, length, probability or name is wrong, or some branch would have no head.
        TypeError: If an argument has the wrong type or dtype, or is an option of SDPA, FlexAttention, flash-attn or xformers; the
            error names the option here.
        NotImplementedError: If the named backend cannot run the call, on a double backward, for score and mask functions with
            `exchange="ring"`, or for shifted positions (`DilatedPattern.zero_padding`) over ranks.

    Warns:
        UserWarning: Once, if no key/value head keeps some token, or some residue of a branch under `heads="all"`; if a causal call
            has a pattern that is not connected (`DilatedPattern.crosses_boundaries`), or more tokens than its longest segment.
            Packed documents warn of residues only; patterns with zero keys and compiled calls do not warn.
    """
    if unknown:
        name = next(iter(unknown))
        advice = f"; use {OPTIONS_ELSEWHERE[name]}" if name in OPTIONS_ELSEWHERE else ""
        raise TypeError(f"dilated_attention() got an unexpected keyword argument '{name}'{advice}")
    out, lse = attend(
        q,
        k,
        v,
        Call(
            pattern=pattern,
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            score_mod=score_mod,
            mask_mod=mask_mod,
            sinks=sinks,
            backend=backend,
            return_lse=return_lse,
            mesh=mesh,
            exchange=exchange,
            shard_lengths=shard_lengths,
        ),
    )
    if mesh is None and 64 < q.shape[2] > q.shape[1] and not torch.compiler.is_compiling():
        _warn_of_layout()
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


@lru_cache(maxsize=1)  # once: filters of warnings forget what was shown whenever any library changes them
def _warn_of_layout() -> None:
    warnings.warn(f"q has more heads than tokens{LAYOUT}", stacklevel=3)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """`dilated_attention` of a call, which may hold a part of a model's heads, and have sinks.

    With sinks, `out * exp(lse - logaddexp(lse, sinks))`: a row without keys stays 0.
    """
    if any(type(x).__name__ == "DTensor" for x in (q, k, v)):  # by name: their module takes a third of a second to import
        from flexdilated.distributed.dtensor import unwrapped

        q, k, v, call, wrap = unwrapped(q, k, v, call)
        return wrap.around(*attend(q, k, v, call))
    sinks, wants_lse = call.sinks, call.return_lse
    if sinks is not None:
        call = call.replaced(return_lse=True)
    if call.mesh is not None:
        from flexdilated.distributed import attention as ranks  # one process needs no torch.distributed

        result, shards = ranks.attend_sharded(q, k, v, call), call.shard_lengths
        num_tokens = q.shape[1] * call.mesh.size() if shards is None else sum(shards)
    else:
        result, num_tokens = dispatch.attend_whole(*check(q, k, v, call)), q.shape[1]
    if not torch.compiler.is_compiling() and type(num_tokens) is int:
        longest = num_tokens if call.cu_seqlens is None else None  # to read the lengths of documents waits for the device
        warn_of_losses(call.pattern, longest, call.num_kv_heads or k.shape[2], call.is_causal)
    if sinks is None:
        return result
    out, lse = result
    assert lse is not None
    _, total = normalised(torch.stack(torch.broadcast_tensors(lse, sinks.to(lse.dtype)[:, None])), dim=0)
    share = sink_scale(sinks.to(lse.dtype), lse.transpose(1, 2))  # (B, N, H)
    return (out * share[..., None]).to(out.dtype), total[0] if wants_lse else None
