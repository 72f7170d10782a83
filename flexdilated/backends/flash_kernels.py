"""Forward and backward of the packages flash-attn-4 and flash-attn 2, in the contract of `Kernel`.

Both packages take `(batch, rows, heads, D)`. Tensors are read in place where every row begins aligned. No row is empty: without a
mask every query sees at least the key at its own row.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from flexdilated.backends.kernel import Options, aligned
from flexdilated.core.lse import accumulated

# Arguments that both directions of flash-attn 2 require and that are not used.
UNUSED = {"dropout_p": 0.0, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """`out` and `lse` by flash-attn-4, written into the views `into` where given."""
    q, k, v = (_readable(x) for x in (q, k, v))
    given_out, given_lse = (None, None) if into is None else into
    out = _memory(given_out, q)
    lse = given_lse
    if lse is None or lse.stride(-1) != 1:
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulated(q.dtype))
    with torch.cuda.device_of(q):
        _cute()._flash_attn_fwd(q=q, k=k, v=v, softmax_scale=options.scale, causal=options.is_causal, out=out, lse=lse)
    if given_lse is not None and given_lse is not lse:
        given_lse.copy_(lse)
    return _delivered(given_out, out), lse if given_lse is None else given_lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    dlse: Tensor | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv` by flash-attn-4, written into the views `into` where given. Empty rows have an `lse` of +inf."""
    dout, q, k, v, out = (_readable(x) for x in (dout, q, k, v, out))
    given = (None, None, None) if into is None else into
    dq, dk, dv = (_memory(view, x) for view, x in zip(given, (q, k, v)))
    with torch.cuda.device_of(q):
        _cute()._flash_attn_bwd(
            q=q,
            k=k,
            v=v,
            out=out,
            dout=dout,
            lse=lse.contiguous(),
            softmax_scale=options.scale,
            causal=options.is_causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dq=dq,
            dk=dk,
            dv=dv,
            dlse=None if dlse is None else dlse.contiguous(),
        )
    return _delivered(given[0], dq), _delivered(given[1], dk), _delivered(given[2], dv)


def forward_2(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """`out` and `lse` by flash-attn 2."""
    out, lse, _, _ = _flash_attn_2()._flash_attn_forward(
        _readable(q),
        _readable(k),
        _readable(v),
        softmax_scale=options.scale,
        causal=options.is_causal,
        return_softmax=False,
        **UNUSED,
    )
    return out.transpose(1, 2), lse


def backward_2(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv` by flash-attn 2."""
    dout, q, k, v, out = (_readable(x) for x in (dout, q, k, v, out))
    dq, dk, dv = (_memory(None, x) for x in (q, k, v))
    _flash_attn_2()._flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous(),  # read as such, whatever its strides
        dq,
        dk,
        dv,
        softmax_scale=options.scale,
        causal=options.is_causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **UNUSED,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _readable(x: Tensor) -> Tensor:
    """`(batch, heads, rows, D)` as `(batch, rows, heads, D)`: a view where every row begins aligned.

    Tensors that repeat elements (`expand`) are copied: flash-attn-4 would compile one more kernel for them, in seconds.
    """
    x = x.transpose(1, 2)
    return x.contiguous() if 0 in x.stride() else aligned(x)


def _memory(view: Tensor | None, like: Tensor) -> Tensor:
    """Memory for a result like `like` `(batch, rows, heads, D)`: `view` `(batch, heads, rows, D)` if a kernel can write it."""
    if view is not None:
        turned = view.transpose(1, 2)
        if aligned(turned) is turned:
            return turned
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _delivered(view: Tensor | None, result: Tensor) -> Tensor:
    """A result `(batch, rows, heads, D)` as `(batch, heads, rows, D)`, copied into `view` unless it was written there."""
    result = result.transpose(1, 2)
    if view is None:
        return result
    return view if result.data_ptr() == view.data_ptr() else view.copy_(result)


def _cute() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def _flash_attn_2() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")
