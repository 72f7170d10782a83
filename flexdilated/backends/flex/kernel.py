"""FlexAttention as a backend: where it runs, the guards for what its versions get wrong, and the one call of it."""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import lru_cache, partial
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from flexdilated.backends.flex.tiles import tiles_of
from flexdilated.backends.kernel import GRID_LIMIT
from flexdilated.core.call import ScoreMod
from flexdilated.core.dispatch_key import DispatchKey
from flexdilated.core.hardware import detect

TORCH = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])

INT32_LIMIT = 1 << 31
LEAST_HEAD_DIM = 16  # what Triton's matrix product takes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Offsets into q, k, v are 32-bit integers in the kernels up to 2.13 and wrap silently (pytorch/pytorch#190857).
WIDE_OFFSETS = TORCH >= (2, 14)

# Keys that are read through strides once had garbage gradients (pytorch/pytorch#146377), so older backwards are given rows of their
# own. The kernels that newer ones print give the right ones: `nox -s emulated` runs them.
TRUST_STRIDED_GRADIENTS = TORCH >= (2, 11)

# Fewer than 128 queries would go to the decoding kernel, which has no backward and other limits.
SHORT_QUERIES: dict[str, Any] = {"BACKEND": "TRITON"} if TORCH >= (2, 11) else {"FORCE_USE_FLEX_ATTENTION": True}

# Graphs per kind of call: each new float that users' functions hold is one, and takes seconds. Models have some per layer.
GRAPHS_LIMIT = 64

_kinds = count()


@lru_cache(maxsize=128)
def _compiled(kind: Hashable) -> Any:
    """flex_attention compiled for one kind of call: calls of a kind differ only in the numbers of sequences and tokens.

    Every kind has code and a name of its own, by which the compiler counts recompilations and remembers what changes: one graph
    for the first sizes, and one more for each of the two that is seen to change, or to be 1. And it is compiled whole: at its limit
    of recompilations the compiler then raises, where it would otherwise go on with a dense eager implementation and say nothing.
    """

    def flex(*args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)

    code = flex.__code__.replace(co_name=f"flex_{next(_kinds)}")
    return torch.compile(FunctionType(code, flex.__globals__), fullgraph=True)


def _call_compiled(compiled: Any, *args: Any, **kwargs: Any) -> Any:
    """A compiled call, compiled again for each float in its functions: inductor has no symbols for floats in these kernels."""
    from torch._dynamo import config  # not loaded with the package

    with config.patch(specialize_float=True, recompile_limit=GRAPHS_LIMIT):
        return compiled(*args, **kwargs)


def why_not(request: DispatchKey) -> str | None:
    """Why this backend cannot run a request, or None."""
    hardware = request.hardware
    if request.dropout:
        return "flex_attention has no dropout; use backend='sdpa'"
    if request.dtype not in DTYPES:
        return f"flex_attention has no {str(request.dtype).removeprefix('torch.')} kernel; use backend='sdpa'"
    if request.transformed:
        return "flex_attention is compiled here, and no transform of torch.func or forward mode reaches it; use backend='sdpa'"
    if request.dynamic:
        return (
            "the block mask of one graph holds for one number of tokens, got a dynamic one; use backend='sdpa', "
            "torch.compile(dynamic=False), or torch._dynamo.mark_static(q, 1) before the call"
        )
    if hardware.device_type == "cpu":
        if request.wants_lse:
            return "flex_attention gives no lse on CPU; use backend='sdpa'"
        if request.differentiable:
            return "flex_attention has no backward on CPU; use backend='sdpa', or torch.no_grad() for inference"
        return None
    if hardware.device_type != "cuda" or hardware.capability is None:
        return "flex_attention runs on CPU and CUDA only; use backend='sdpa'"
    if hardware.capability < (8, 0):  # pytorch/pytorch#164813
        return "flex_attention needs sm_80 or newer; use backend='sdpa'"
    if request.head_dim < LEAST_HEAD_DIM:
        return f"head_dim must be at least {LEAST_HEAD_DIM} for flex_attention on CUDA, got {request.head_dim}; use backend='sdpa'"
    return None


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float,
    want_lse: bool,
    kind: Hashable,
) -> tuple[Tensor, Tensor | None]:
    """`out` `(B, H, N, D)` and, on request, `lse` `(B, H, N)`, natural log, float32.

    Args:
        q: `(B, H, N, D)`, any strides.
        k: `(B, Hkv, N, D)`.
        v: `(B, Hkv, N, D)`.
        score_mod: As in `flex_attention`.
        block_mask: As in `flex_attention`.
        scale: Multiplies `q @ k^T`.
        want_lse: Whether to return lse.
        kind: What the functions depend on; calls of one kind share their compiled code.

    Raises:
        NotImplementedError: If the tensors reach past what the kernels of this torch can address, or a launch past its grid.
    """
    on_cpu = q.device.type == "cpu"
    if not on_cpu and max(q.shape[0], q.shape[1]) > GRID_LIMIT:
        raise NotImplementedError(
            f"q must have at most {GRID_LIMIT} sequences and heads for flex_attention on a GPU, got {q.shape[0]} and {q.shape[1]}; "
            "split the batch, or use backend='sdpa'"
        )
    q, k, v = (_readable(x) for x in (q, k, v))
    if on_cpu:
        # It refuses inputs that require a gradient even under no_grad, and inputs that share a buffer, as one tensor given twice
        # and, in a larger graph, the parts of one projection do. There it also takes a view of a product for a tensor of the
        # product's two dims, and the compiler drops a copy in the strides of its source.
        traced = torch.compiler.is_compiling()
        shared = (traced, traced or k is q, traced or v is q or v is k)
        q, k, v = (
            x.detach().clone(memory_format=torch.contiguous_format) if copy else x.detach() for x, copy in zip((q, k, v), shared)
        )
    elif not TRUST_STRIDED_GRADIENTS and torch.is_grad_enabled():
        k, v = k.contiguous(), v.contiguous()
    run: Any = flex_attention
    if not torch.compiler.is_compiling():
        sizes = (q.shape[1], k.shape[1], q.shape[3])
        options = (scale, want_lse, torch.is_grad_enabled() and q.requires_grad)
        run = partial(_call_compiled, _compiled((kind, sizes, q.dtype, q.device.type, options)))
    result = run(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=None if on_cpu else options_of(q, scored=score_mod is not None),
        **({"return_aux": AuxRequest(lse=True)} if want_lse else {}),
    )
    return (result[0], result[1].lse) if want_lse else (result, None)


def options_of(q: Tensor, *, scored: bool) -> dict[str, Any]:
    """`kernel_options` of `flex_attention` on a GPU; `scored`: whether there is a `score_mod`."""
    return SHORT_QUERIES | tiles_of(detect(q.device).capability, q.shape[3], q.dtype, scored=scored)


def _readable(x: Tensor) -> Tensor:
    """x in a layout whose offsets the kernels can count."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if WIDE_OFFSETS or x.device.type != "cuda":
        return x
    if (x.shape[2] - 1) * x.stride(2) >= INT32_LIMIT:
        x = x.contiguous()
    if (x.shape[2] - 1) * x.stride(2) >= INT32_LIMIT:
        raise NotImplementedError(
            f"q, k and v must have fewer than {INT32_LIMIT} elements per head for flex_attention in torch {torch.__version__}, got "
            f"{x.shape[2]} x {x.stride(2)}; use torch 2.14 or newer, or backend='sdpa'"
        )
    return x
