"""Checks of the arguments of one call, before any work: every error names the argument, its value and what to do."""

from __future__ import annotations

import inspect
import math
import numbers
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexdilated.core.call import EXCHANGES, Call, MaskMod, ScoreMod
from flexdilated.core.hardware import autocast_dtype
from flexdilated.core.lse import accumulated
from flexdilated.core.pattern import DilatedPattern

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Where torch keeps its own context parallelism: in 2.11 and newer, and before.
TORCH_SHARDS = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)
# Said where shapes suggest that tokens and heads have changed places.
LAYOUT = "; the layout is (B, N, H, D): transpose dims 1 and 2 of tensors made for scaled_dot_product_attention"


def check(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Call]:
    """The tensors in the dtype of autocast, and the call with all fields set but `sinks`, which `attend` adds later.

    Raises:
        ValueError: If a shape, length, probability or name is wrong, or the pattern has more groups of heads than k has heads.
        TypeError: If an argument has the wrong type or dtype.
        NotImplementedError: If a size is a symbol outside of compiled and exported code.
    """
    check_exchange(call.exchange, call.mesh)
    if call.mesh is None and call.shard_lengths is not None:
        raise ValueError(f"shard_lengths must come with mesh, got {call.shard_lengths} and no mesh")
    check_tensors(q, k, v, call)
    if call.sinks is not None:
        check_sinks(call.sinks, q)
    if not torch.compiler.is_compiling():  # operators over ranks ask again when they run
        refuse_shards_of_torch(0 if call.mesh is None else call.mesh.size())
        if torch.SymInt in map(type, (*q.shape, *k.shape)):
            raise NotImplementedError(
                "q and k must have sizes that are numbers outside of torch.compile and torch.export, got "
                f"{(*q.shape,)} and {(*k.shape,)}; use torch.export, or make_fx with tracing_mode='real' or 'fake'"
            )
    if not isinstance(call.backend, str):
        raise TypeError(f"backend must be the name of a backend, got {call.backend!r}")
    num_kv_heads = k.shape[2] if call.num_kv_heads is None else call.num_kv_heads
    call.pattern.check_heads(num_kv_heads)
    dtype = autocast_dtype(q.device)
    if dtype is not None:  # as in a matrix product, which leaves float64 alone
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        refuse_dtypes(q, k, v)
    requires_grad = call.is_modified() and check_mods(call.score_mod, call.mask_mod, q)
    scale = q.shape[3] ** -0.5 if call.scale is None else float(call.scale)
    completed = {
        "scale": scale,
        "dropout_p": float(call.dropout_p),
        "num_kv_heads": num_kv_heads,
        "score_mod_requires_grad": requires_grad,
    }
    return q, k, v, call.replaced(**completed, sinks=None)


def check_exchange(exchange: str, mesh: object) -> None:
    """Raise ValueError for an exchange that is unknown, or named without a mesh."""
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES}, got {exchange!r}")
    if mesh is None and exchange != "auto":
        raise ValueError(f"exchange must come with mesh, got {exchange!r} and no mesh")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
    """Raise ValueError or TypeError for tensors that are wrong before autocast; a shard of a mesh may have no tokens."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided:
            check_dense(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have shape (B, N, H, D), got {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q={q.device}, got {x.device}")
    if (q.shape[1] < 1 and call.mesh is None) or q.shape[2] < 1 or q.shape[3] < 1:
        raise ValueError(f"q must have at least one token, head and element per head, got shape {tuple(q.shape)}")
    for name, x in (("k", k), ("v", v)):
        if (x.shape[0], x.shape[1], x.shape[3]) != (q.shape[0], q.shape[1], q.shape[3]):
            swapped = (q.shape[1] % max(1, x.shape[1]) == 0 and x.shape[2] == q.shape[2]) or x.shape[1:3] == q.shape[1:3][::-1]
            hint = LAYOUT if swapped and x.shape[1] != q.shape[1] and x.shape[3] == q.shape[3] else ""
            if not hint and x.shape[1] > q.shape[1] and (x.shape[0], x.shape[3]) == (q.shape[0], q.shape[3]):
                hint = "; use DilatedKVCache.attend for queries that follow cached keys"
            raise ValueError(f"{name} must match q in B, N and D, q={tuple(q.shape)}, got {tuple(x.shape)}{hint}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"v must have as many heads as k={k.shape[2]}, got {v.shape[2]}")
    if k.shape[2] < 1 or q.shape[2] % k.shape[2] != 0:
        raise ValueError(f"k must have a number of heads that divides that of q={q.shape[2]}, got {k.shape[2]}")
    check_options(call.pattern, call.is_causal, call.scale, call.dropout_p, q.dtype)
    if call.key_padding_mask is not None:
        _check_key_padding_mask(call.key_padding_mask, q)
    if call.cu_seqlens is not None:
        _check_cu_seqlens(call.cu_seqlens, q)


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raise ValueError or TypeError unless there is one score per query head of q, on the device of q."""
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        raise TypeError(f"sinks must be a floating-point tensor (H,), got {getattr(sinks, 'dtype', sinks)}")
    if q.dim() == 4 and sinks.shape != (q.shape[2],):
        raise ValueError(f"sinks must have shape (H,)=({q.shape[2]},), got {tuple(sinks.shape)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on the device of q={q.device}, got {sinks.device}")


def check_options(pattern: DilatedPattern, is_causal: bool, scale: float | None, dropout_p: float, dtype: torch.dtype) -> None:
    """Raise ValueError or TypeError for options that are wrong for any q.

    Modules call it with float64, before there is a q.
    """
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}")
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
    if scale is not None:
        check_scale(scale, dtype)
    if type(dropout_p) is not float and not is_number(dropout_p):
        raise TypeError(f"dropout_p must be a number, got {dropout_p!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")


def refuse_shards_of_torch(num_ranks: int) -> None:
    """Reject shards of torch's own context parallelism that this library would read as other tokens.

    torch's load balancer gives a rank two chunks of a sequence, one from each half. torch reports this while its context manager is
    open; for its newer function `_context_parallel_shard`, it reports the last call only. Raises ValueError if a call over several
    ranks may receive such shards, or if a call without a mesh (`num_ranks` 0) receives any shards.
    """
    modules = [sys.modules[name] for name in TORCH_SHARDS if name in sys.modules]
    module = next((candidate for candidate in modules if hasattr(candidate, "_replaced_functions")), None)
    if module is None:
        return
    attention = torch.nn.functional.scaled_dot_product_attention
    is_open = attention in module._replaced_functions
    if is_open:
        mesh = inspect.getclosurevars(attention).nonlocals.get("device_mesh")
        if mesh is not None and mesh.size() == 1:
            return
    by_function = getattr(getattr(module, "_dispatch_mode", None), "name", "") == "MODULE_WRAPPER"
    if num_ranks > 1 and (is_open or by_function) and module._cp_options.enable_load_balance:
        raise ValueError(
            "mesh must come with contiguous shards, got shards that torch's context_parallel cut head-tail by its load balancer; "
            "set enable_load_balance = False in torch.distributed.tensor.experimental._attention._cp_options, pass "
            "load_balancer=None, or cut by flexdilated.distributed.shard_sequence"
        )
    if is_open and num_ranks == 0:
        raise ValueError("mesh must be given inside torch's context_parallel, which cuts sequences in shards, got None")


def check_dense(name: str, x: Tensor, nested: str = "pack the sequences in one row and give their borders as cu_seqlens") -> None:
    """Raise TypeError unless x is a tensor, NotImplementedError unless it is dense and strided.

    The error about a nested tensor ends in `nested`.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.is_nested:
        raise NotImplementedError(f"{name} must be a dense tensor, got a nested one; {nested}")
    if x.layout != torch.strided:
        raise NotImplementedError(f"{name} must be a dense tensor, got layout {x.layout}; use to_dense()")


def refuse_dtypes(q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    """Raise TypeError: keys or values have another dtype than the queries."""
    name, x = ("v", v) if k.dtype == q.dtype else ("k", k)
    raise TypeError(f"{name} must have the dtype of q={q.dtype}, got {x.dtype}")


def is_number(x: object) -> bool:
    """Whether x is a real number of Python or numpy, and no bool."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def check_scale(scale: float | None, dtype: torch.dtype) -> float | None:
    """The scale as a Python float, or None.

    Raises ValueError or TypeError for a scale that scores of q in `dtype` cannot be multiplied by.
    """
    if scale is None:
        return None
    if isinstance(scale, Tensor):  # compiled code has one of what is numpy's outside
        raise TypeError("scale must be a number or None, got a tensor; use scale.item(), or multiply q by it and give scale=1.0")
    if not is_number(scale):
        raise TypeError(f"scale must be a number or None, got {scale!r}")
    if not isinstance(scale, int):
        scale = float(scale)  # numpy would compare in the dtype of its own
    scores = accumulated(dtype)
    if not abs(scale) <= torch.finfo(scores).max:  # not of NaN either; the compiler traces no `isfinite`
        if isinstance(scale, float) and not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}")
        raise ValueError(f"scale must be finite in {scores}, in which {dtype} is scored, got {scale}")
    return float(scale)


def _check_key_padding_mask(mask: Tensor, q: Tensor) -> None:
    check_dense("key_padding_mask", mask)
    if mask.dtype != torch.bool:
        hint = "" if mask.is_floating_point() else "; use mask.bool(), or mask == 0 where 1 is a key to keep"
        raise TypeError(f"key_padding_mask must be bool, True for a key to ignore, got {mask.dtype}{hint}")
    if mask.shape != q.shape[:2]:
        hint = LAYOUT if mask.shape == (q.shape[0], q.shape[2]) else ""
        raise ValueError(f"key_padding_mask must have shape (B, N)={tuple(q.shape[:2])}, got {tuple(mask.shape)}{hint}")
    if mask.device != q.device:
        raise ValueError(f"key_padding_mask must be on the device of q={q.device}, got {mask.device}")


def _check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    """Raise for a wrong shape or dtype of `cu_seqlens`; its values are checked where they are read."""
    check_dense("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape (num_documents + 1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.is_meta and not q.is_meta:
        raise ValueError(f"cu_seqlens must hold values for q on {q.device}, got a tensor on meta")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens must come with q of batch size 1, got batch size {q.shape[0]}; pack the batch in one row")


def check_mods(score_mod: ScoreMod | None, mask_mod: MaskMod | None, q: Tensor) -> bool:
    """Whether tensors that the score function reads may need a gradient; False for traced functions.

    Raises TypeError or ValueError for a wrong score or mask function, by calling it as `first_pair` says.
    """
    score, *pair = first_pair(q)
    requires_grad = False
    # Compiled code calls them too: numbers and tensors that they read are then inputs of the whole graph, and known to the parts
    # of it that are computed again in the backward. The compiler alone does not make them so (torch 2.13).
    if score_mod is not None:
        result = _call("score_mod", score_mod, ("score", "b", "h", "q_idx", "kv_idx"), score, *pair)
        if not result.is_floating_point():
            raise TypeError(f"score_mod must return a floating-point score, got {result.dtype}")
        requires_grad = result.requires_grad
    if mask_mod is not None:
        check_seen(_call("mask_mod", mask_mod, ("b", "h", "q_idx", "kv_idx"), *pair))
    return requires_grad


def first_pair(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Score, sequence, head and positions of the first pair of q `(B, N, H, D)`, for score functions; no pair if B is 0."""
    batch = 1 if torch.compiler.is_compiling() else min(q.shape[0], 1)  # for B = 0 a table that is read by b may have no row
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=q.device)
    return torch.zeros((batch, 1, 1, 1), dtype=accumulated(q.dtype), device=q.device), zero[:batch], zero, zero, zero


def check_seen(visible: Tensor) -> None:
    """Raise TypeError if a mask function returns no bool."""
    if visible.dtype != torch.bool:
        raise TypeError(f"mask_mod must return a bool, True where the query sees the key, got {visible.dtype}")


def _call(name: str, function: Any, parameters: tuple[str, ...], *arguments: Tensor) -> Tensor:
    if not callable(function):
        raise TypeError(f"{name} must be a function of ({', '.join(parameters)}), got {type(function).__name__}")
    if torch.compiler.is_compiling():
        return function(*arguments)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        raise TypeError(f"{name} must take ({', '.join(parameters)}), got {inspect.signature(function)}") from None
    except ValueError:  # a builtin has no signature: the call below raises
        pass
    try:
        result: object = call_mod(name, function, *arguments)
    except RuntimeError as error:
        if "device" not in str(error):
            raise
        device = arguments[0].device
        raise ValueError(f"{name} must use tensors on the device of q={device}, got: {str(error).splitlines()[0]}") from None
    if not isinstance(result, Tensor):
        raise TypeError(f"{name} must return a tensor, got {type(result).__name__}")
    if result.device != arguments[0].device:
        raise ValueError(f"{name} must use tensors on the device of q={arguments[0].device}, got a result on {result.device}")
    if not arguments[0].numel() <= result.numel() <= 1 or result.dim() > len(arguments[0].shape):
        raise ValueError(f"{name} must return one value per pair, got shape {tuple(result.shape)} for one pair")
    return result


def call_mod(name: str, function: ScoreMod | MaskMod, *arguments: Tensor) -> Tensor:
    """Call a score or mask function; a note on its errors says that the function raised them."""
    if torch.compiler.is_compiling():  # the tracer reports errors
        return function(*arguments)
    try:
        return function(*arguments)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        if hasattr(error, "add_note"):  # from Python 3.11
            error.add_note(
                f"This was raised by {name}. It is called with tensors of many pairs at once: choose by torch.where instead of if, "
                "and index tables from 0 to N - 1."
            )
        raise


def refuse_zero_keys(num_tokens: int) -> NoReturn:
    """Reject torchscale's zero keys beside functions: zero keys have no position to pass to them."""
    raise NotImplementedError(
        f"score_mod and mask_mod must come with a pattern that adds no zero keys at N={num_tokens}, got zero_padding=True: those "
        "keys have no token position; use dataclasses.replace(pattern, zero_padding=False)"
    )
