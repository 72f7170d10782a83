"""Our own kernels as a backend: where they run, and their place among the other kernels. Triton is imported when they run."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch

from flexdilated.backends.kernel import Kernel
from flexdilated.backends.triton.tiles import ROW_BYTES, is_aligned
from flexdilated.core.dispatch_key import DispatchKey
from flexdilated.core.hardware import ON_ROCM, dtype_name

LEAST_VERSION = (3, 5)  # of torch 2.9
LEAST_LEVEL = (8, 0)
MOST_HEAD_DIM = 256

# One module under several names: of releases, of torch's nightly builds, and of Windows.
DISTRIBUTIONS = ("triton", "pytorch-triton", "triton-windows")


def _installed() -> tuple[int, ...] | None:
    for name in DISTRIBUTIONS:
        try:
            return tuple(int(part) for part in re.findall(r"\d+", version(name))[:2])
        except PackageNotFoundError:
            continue
    return None


def _wanted() -> str:
    """The triton that this torch was built with, where its metadata say so: another one may not fit it."""
    try:
        requirements = requires("torch") or ()
    except PackageNotFoundError:  # a torch that was bundled without its metadata
        requirements = ()
    matches = [requirement.split(";")[0].strip() for requirement in requirements if "triton" in requirement.lower()]
    return f"{matches[0]}, which torch {torch.__version__} asks for" if matches else f"the one of torch {torch.__version__}"


# Asked once: metadata cannot be traced by torch.compile.
INSTALLED = _installed()
WANTED = _wanted()
# Triton's own switch, which it reads when it is imported: kernels then run on a CPU, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "on", "true", "yes", "y")
INTERPRETED_DTYPES = (torch.float32, torch.float16)  # it multiplies bfloat16 as the integers of its bits


def why_not(request: DispatchKey) -> str | None:
    """Why this backend cannot run a request, or None. What no installation would change comes first."""
    reason = _device_why_not(request)
    if reason is not None:
        return reason
    if request.dropout:
        return "the Triton kernels have no dropout; use backend='sdpa'"
    if request.modified:
        return "the Triton kernels have no score_mod or mask_mod; use backend='flex' or backend='sdpa'"
    if request.head_dim > MOST_HEAD_DIM:
        return f"head_dim must be at most {MOST_HEAD_DIM} for the Triton kernels, got {request.head_dim}; use backend='sdpa'"
    if INSTALLED is None:
        return f"triton is not installed; install {WANTED}, or use backend='sdpa'"
    if INSTALLED < LEAST_VERSION:
        least, installed = (".".join(map(str, numbers)) for numbers in (LEAST_VERSION, INSTALLED))
        return f"triton must be {least} or newer, got {installed}; use backend='sdpa'"
    return None


def why_not_unasked(request: DispatchKey) -> str | None:
    """Why `backend="auto"` leaves this backend out where it can run a request, or None."""
    if UNBUILT is not None:
        return UNBUILT
    if not is_aligned(request.head_dim, request.dtype.itemsize):
        return f"rows of {request.head_dim} elements are no whole number of {ROW_BYTES} bytes, which it loads slowly"
    return None


def _unbuilt() -> str | None:
    """What a first launch misses on this machine: triton compiles its launcher in C, once."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler, and found neither CC nor gcc nor clang"
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return "triton needs Python's headers, which are not installed"
    return None


UNBUILT = _unbuilt() if sys.platform == "linux" else None  # asked once; on Windows its package brings a compiler


def attempt(run: Callable[..., object], *arguments: Any) -> bool:
    """Whether triton could compile, load and launch what another backend can do without.

    Where it cannot, nothing was launched: warn, and do not try this again in this process.
    """
    global UNBUILT
    try:
        run(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:  # compilers, linkers, loaders and file systems raise errors of every class
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise  # a capture forbids what a first launch does; a call before the capture says whether triton works
        UNBUILT = f"triton could not launch a kernel in this process ({type(fault).__name__}: {fault})"
        warnings.warn(f"{UNBUILT}; backend='sdpa' and 'flash' combine branches by torch's operations instead", stacklevel=2)
        return False
    return True


def _device_why_not(request: DispatchKey) -> str | None:
    hardware, dtype = request.hardware, dtype_name(request.dtype)
    if hardware.device_type == "cpu" and INTERPRETED:
        if request.dtype not in INTERPRETED_DTYPES:
            return f"triton's interpreter computes no {dtype}; use backend='sdpa'"
        return None
    if hardware.device_type != "cuda" or hardware.capability is None:
        return "the Triton kernels run on CUDA only, or on a CPU under TRITON_INTERPRET=1; use backend='sdpa'"
    if ON_ROCM:
        return "the Triton kernels are made for NVIDIA's GPUs, and this torch for AMD's (ROCm); use backend='sdpa'"
    if hardware.capability < LEAST_LEVEL:
        return "the Triton kernels need sm_80 or newer; use backend='sdpa'"
    if request.dtype == torch.float64:
        return "the Triton kernels have no float64; use backend='sdpa'"
    return None


def _launches() -> Any:
    from flexdilated.backends.triton import launch  # imports triton, which is optional

    return launch


KERNEL = Kernel(
    "triton",
    why_not,
    lambda *arguments: _launches().dense_forward(*arguments),
    lambda *tensors, options, dlse=None: _launches().dense_backward(*tensors, options=options, dlse=dlse),
    takes_dlse=True,
    windows="bounds",
    in_place=_launches,
)
