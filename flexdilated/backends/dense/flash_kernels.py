"""Forward and backward of the packages flash-attn-4 and flash-attn 2, in the contract of `Kernel`.

Both packages take `(batch, rows, heads, D)`. Tensors are read in place where every row begins aligned. No row is empty: without a
mask every query sees at least the key at its own row.

A window is two numbers: the keys before a query's own, and those after it. Where there are more keys than queries, both packages
align the last rows. They take the causal argument for a right bound of 0. Unbounded is None to flash-attn-4, to which a negative
number can be a bound, and -1 to flash-attn 2, to which every negative number is unbounded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flexdilated.backends.kernel import Options, aligned
from flexdilated.core.lse import accumulated

# Arguments that both directions of flash-attn 2 require and that are not used.
UNUSED = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`out` and `lse` by flash-attn-4, out written into the view `into` where given."""
    q, k, v = (_readable(x) for x in (q, k, v))
    window = _window(options, q, k, None)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if into is None else into.transpose(1, 2)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulated(q.dtype))
    with torch.cuda.device_of(q):
        _cute()._flash_attn_fwd(q=q, k=k, v=v, softmax_scale=options.scale, causal=options.is_causal, out=out, lse=lse, **window)
    return out.transpose(1, 2), lse


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
    dq, dk, dv = _like(q, k, v) if into is None else (x.transpose(1, 2) for x in into)
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
            **_window(options, q, k, None),
        )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def forward_2(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """`out` and `lse` by flash-attn 2."""
    q, k, v = (_readable(x) for x in (q, k, v))
    out, lse, _, _ = _flash_attn_2()._flash_attn_forward(
        q,
        k,
        v,
        softmax_scale=options.scale,
        causal=options.is_causal,
        return_softmax=False,
        **_window(options, q, k, -1),
        **UNUSED,
    )
    return out.transpose(1, 2), lse


def backward_2(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv` by flash-attn 2."""
    dout, q, k, v, out = (_readable(x) for x in (dout, q, k, v, out))
    dq, dk, dv = _like(q, k, v)
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
        **_window(options, q, k, -1),
        **UNUSED,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _window(options: Options, q: Tensor, k: Tensor, unbounded: int | None) -> dict[str, Any]:
    """The arguments of a window, for `(batch, rows, heads, D)` tensors.

    Raises:
        NotImplementedError: If there are fewer keys than queries, or a query does not see the key at its own place, counted from
            the last row: flash-attn 2 has no negative bound, and the lse of an empty row differs between the packages.
    """
    if options.band is None:
        return {"window_size_left": unbounded, "window_size_right": unbounded}
    rows, keys = q.shape[1], k.shape[1]
    left, right = keys - rows - options.band[0], options.band[1] - (keys - rows)
    if min(keys - rows, left, right) < 0:
        raise NotImplementedError(
            "band must hold the keys that are as far from the last as their queries for flash-attn, got "
            f"{options.band} of {rows} queries and {keys} keys; use backend='sdpa'"
        )
    return {
        "window_size_left": left if left < keys - 1 else unbounded,
        "window_size_right": right if right < rows - 1 else unbounded,
    }


def _readable(x: Tensor) -> Tensor:
    """`(batch, heads, rows, D)` as `(batch, rows, heads, D)`: a view where every row begins aligned.

    Tensors that repeat elements (`expand`) are copied: flash-attn-4 would compile one more kernel for them, in seconds.
    """
    x = x.transpose(1, 2)
    return x.contiguous() if 0 in x.stride() else aligned(x)


def _like(*tensors: Tensor) -> Iterator[Tensor]:
    return (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


def _cute() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def _flash_attn_2() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")
