"""flash-attn 2 as an engine: optional (`pip install flexdilated[flash]`), imported when it runs, never chosen by `backend="auto"`.

FlashAttention 3 and 4 need no engine: `torch.nn.attention.activate_flash_attention_impl("FA3")` or `("FA4")` (torch 2.11 to 2.15;
2.9 has none) puts them behind the very aten operators that the flash kernel of `backend="sdpa"` calls, within their own limits.
FlexAttention's `BACKEND="FLASH"` is not used: before torch 2.14 and flash-attn-4 4.0.0b21 its lse is wrong and masks can be ignored
(pytorch/pytorch#181645, #188322).
"""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from flexdilated.backends.kernel import Kernel, Options, aligned
from flexdilated.core.request import Request

LEAST_VERSION = (2, 7)  # the first whose entry points take the window as two numbers
LEAST_BLACKWELL_VERSION = (2, 7, 3)  # before, it refuses levels above sm_90
MOST_HEAD_DIM = 248  # 256, less the column that a gradient of lse adds
# What both directions must be told, and is not used.
UNUSED = {"dropout_p": 0.0, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}


def _installed() -> tuple[int, ...] | None:
    # Its metadata and not its import name: flash-attn-4 installs a `flash_attn` too, without what is called here.
    try:
        found = version("flash-attn")
    except PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", found)[:3])


INSTALLED = _installed()  # asked once: metadata cannot be traced by torch.compile


def why_not(request: Request) -> str | None:
    """Why this engine cannot run a request, or None. What no installation would change comes first."""
    capability = request.hardware.capability
    if request.hardware.device_type != "cuda" or capability is None:
        return "flash-attn runs on CUDA only; use backend='sdpa'"
    if capability < (8, 0):
        return "flash-attn needs sm_80 or newer; use backend='sdpa'"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn has no {str(request.dtype).removeprefix('torch.')} kernel; use backend='sdpa'"
    if request.masked:
        return "flash-attn has no key padding mask; use backend='sdpa'"
    if request.dropout:
        return "flash-attn's dropout is not used here: the math kernel's is; use backend='sdpa'"
    if request.modified:
        return "flash-attn has no score_mod or mask_mod; use backend='flex' or backend='sdpa'"
    if request.head_dim > MOST_HEAD_DIM:
        return f"head_dim must be at most {MOST_HEAD_DIM} for flash-attn, got {request.head_dim}; use backend='sdpa'"
    if INSTALLED is None:
        return "flash-attn is not installed; pip install flash-attn"
    least = LEAST_VERSION if capability < (10, 0) else LEAST_BLACKWELL_VERSION
    if least > INSTALLED:
        return f"flash-attn must be {_dotted(least)} or newer on {request.hardware.name}, got {_dotted(INSTALLED)}"
    return None


def _forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    # No row is empty: without a mask every query sees at least the key at its own row.
    out, lse, _, _ = _interface()._flash_attn_forward(
        _readable(q),
        _readable(k),
        _readable(v),
        softmax_scale=options.scale,
        causal=options.is_causal,
        return_softmax=False,
        **UNUSED,
    )
    return out.transpose(1, 2), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = (_readable(x) for x in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    _interface()._flash_attn_backward(
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
    """`(batch, heads, rows, D)` as flash-attn takes it, `(batch, rows, heads, D)`: a view where every row begins aligned."""
    return aligned(x.transpose(1, 2))


def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


KERNEL = Kernel("flash_attn", why_not, _forward, _backward, head_dim_multiple=8)
