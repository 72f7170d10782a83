"""FlashAttention as a backend: the package flash-attn-4 on Hopper and Blackwell, flash-attn 2 on sm_80 and newer.

Both are optional (`pip install flexdilated[flash]` and `[flash2]`) and imported when they run. Both install into the folder
`flash_attn`. They work side by side if flash-attn-4 is installed last: flash-attn 2.8 contains an older `flash_attn/cute`, which
replaces the files of flash-attn-4 (PrimeIntellect-ai/prime-rl#1949).

`torch.nn.attention.activate_flash_attention_impl("FA4")` (torch 2.11 and newer) is another route to flash-attn-4: it replaces the
aten operators that the flash kernel of `backend="sdpa"` calls. Prefer this backend. On torch 2.11 to 2.13, that route raises
ValueError in every forward with 4.0.0b19 or newer. On every torch, it raises where a kernel is missing instead of falling back, and
it takes no gradient of lse: `sdpa` then adds a column, and a head dim of 64 becomes 72.

FlexAttention's `BACKEND="FLASH"` is not used: before torch 2.14 and flash-attn-4 4.0.0b21 its lse is wrong and masks can be ignored
(pytorch/pytorch#181645, #188322).
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.torch_version import TorchVersion

from flexdilated.backends.dense import flash_kernels
from flexdilated.backends.kernel import Kernel
from flexdilated.core.dispatch_key import DispatchKey

LEAST_VERSION = (2, 7)  # the first whose entry points take the window as two numbers
LEAST_BLACKWELL_VERSION = (2, 7, 3)  # before, it refuses levels above sm_90
MOST_HEAD_DIM = 256  # of both packages

# The entry points of flash-attn-4 are private. In all 24 versions between these they take the keywords used here (read in the
# source; b13, b18, b19, b30, b31 and b36 were compiled). Older ones have races and wrong results (Dao-AILab/flash-attention#2481,
# #2510).
VERSIONS_4 = (4, 0, 0, 13), (4, 0, 0, 36)
LEVELS_4 = ((9, 0), (10, 0), (10, 3), (11, 0))  # sm_80 has no backward, sm_120 no deterministic one
HEAD_DIMS_4, ANY_HEAD_DIM_VERSION_4 = (32, 64, 96, 128, 192, 256), (4, 0, 0, 31)  # older ones fail to compile most others


def _installed(distribution: str) -> tuple[int, ...] | None:
    """The numbers of a version: `4.0.0b36` is `(4, 0, 0, 36)`. Both packages have the import name `flash_attn`."""
    try:
        match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:b(\d+))?", version(distribution))
    except PackageNotFoundError:
        return None
    return None if match is None else tuple(int(part) for part in match.groups() if part is not None)


# Asked once: metadata cannot be traced by torch.compile.
INSTALLED, INSTALLED_4 = _installed("flash-attn"), _installed("flash-attn-4")


def why_not(request: DispatchKey) -> str | None:
    """Why this backend cannot run a request, or None. What no installation would change comes first."""
    reasons = [kernel.why_not(request) for kernel in KERNELS]
    return None if None in reasons else "; ".join(dict.fromkeys(str(reason) for reason in reasons))


def activation_fault() -> str | None:
    """Why `torch.nn.attention.activate_flash_attention_impl("FA4")` fails with the installed versions, or None."""
    if INSTALLED_4 is None or INSTALLED_4 < (4, 0, 0, 19) or not "2.11" <= TorchVersion(torch.__version__) < "2.14":
        return None
    return (
        f"torch.nn.attention.activate_flash_attention_impl('FA4') raises ValueError in every call with torch {torch.__version__} "
        f"and flash-attn-4 {_dotted(INSTALLED_4)}; use backend='flash'"
    )


def _neither(request: DispatchKey) -> str | None:
    """Why neither package can run a request."""
    capability = request.hardware.capability
    if request.hardware.device_type != "cuda" or capability is None:
        return "flash-attn runs on CUDA only; use backend='sdpa'"
    if capability < (8, 0):
        return "flash-attn needs sm_80 or newer; use backend='sdpa'"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn has no {str(request.dtype).removeprefix('torch.')} kernel; use backend='sdpa'"
    if request.key_padding_mask:
        return "flash-attn has no key padding mask; use backend='sdpa'"
    if request.dropout:
        return "flash-attn's dropout is not used here: the math kernel's is; use backend='sdpa'"
    if request.modified:
        return "flash-attn has no score_mod or mask_mod; use backend='flex' or backend='sdpa'"
    return None


def _why_not_4(request: DispatchKey) -> str | None:
    reason, capability = _neither(request), request.hardware.capability
    if reason is not None:
        return reason
    if capability not in LEVELS_4:
        return f"flash-attn-4 runs on {', '.join(f'sm_{major}{minor}' for major, minor in LEVELS_4)} only"
    head_dim = request.head_dim + -request.head_dim % 8  # what padding makes of it
    if head_dim > MOST_HEAD_DIM:
        return f"head_dim must be at most {MOST_HEAD_DIM} for flash-attn-4, got {request.head_dim}; use backend='sdpa'"
    if capability != (9, 0) and 128 < head_dim < 256:
        where = f"flash-attn-4 on {request.hardware.name}"
        return f"head_dim must be at most 128, or 256, for {where}, got {request.head_dim}; use backend='sdpa'"
    if capability != (9, 0) and head_dim == 256 and _has_lse_gradient(request):
        return f"flash-attn-4 has no gradient of lse at head_dim 256 on {request.hardware.name}; use backend='sdpa'"
    if capability != (9, 0) and head_dim == 256 and request.window:
        return f"flash-attn-4 has no window at head_dim 256 on {request.hardware.name}; use backend='sdpa'"
    if INSTALLED_4 is None:
        return "flash-attn-4 is not installed (pip install 'flexdilated[flash]')"
    least, newest = VERSIONS_4
    if head_dim not in HEAD_DIMS_4:
        least = ANY_HEAD_DIM_VERSION_4
    if not least <= INSTALLED_4 <= newest:
        return f"flash-attn-4 must be {_dotted(least)} to {_dotted(newest)}, got {_dotted(INSTALLED_4)}"
    return None


def _why_not_2(request: DispatchKey) -> str | None:
    reason, capability = _neither(request), request.hardware.capability
    if reason is not None or capability is None:
        return reason
    if INSTALLED_4 is not None and capability in LEVELS_4:
        return _why_not_4(request) or "flash-attn-4 is installed"
    most = MOST_HEAD_DIM - _has_lse_gradient(request)  # one more column
    if request.head_dim > most:
        return f"head_dim must be at most {most} for flash-attn, got {request.head_dim}; use backend='sdpa'"
    if INSTALLED is None:
        return "flash-attn is not installed (pip install 'flexdilated[flash2]')"
    least = LEAST_VERSION if capability < (10, 0) else LEAST_BLACKWELL_VERSION
    if least > INSTALLED:
        return f"flash-attn must be {_dotted(least)} or newer on {request.hardware.name}, got {_dotted(INSTALLED)}"
    return None


def _has_lse_gradient(request: DispatchKey) -> bool:
    return request.dlse or (request.wants_lse and request.differentiable)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers[:3])) + "".join(f"b{number}" for number in numbers[3:])


# In order of preference.
KERNELS = (
    Kernel(
        "flash_attn_4",
        _why_not_4,
        flash_kernels.forward,
        flash_kernels.backward,
        head_dim_multiple=8,
        takes_dlse=True,
        windows="bounds",
        writes=True,
    ),
    Kernel("flash_attn", _why_not_2, flash_kernels.forward_2, flash_kernels.backward_2, head_dim_multiple=8, windows="bounds"),
)
