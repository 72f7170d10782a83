"""The table of backends and the one choice among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from flexdilated.backends.dense import flash, sdpa
from flexdilated.backends.dense.math import operations_why_not
from flexdilated.backends.flex import kernel as flex_kernel
from flexdilated.backends.kernel import Kernel
from flexdilated.backends.measured import CHALLENGERS, advise, prefer, unproven
from flexdilated.backends.triton import backend as triton_backend
from flexdilated.core.dispatch_key import DispatchKey as DispatchKey


def _reference_why_not(request: DispatchKey) -> str | None:
    if request.dropout:
        return "the oracle has no dropout; use backend='sdpa'"
    return None


def _untransformed_why_not(backend: str, request: DispatchKey) -> str | None:
    if request.transformed:
        return "no transform of torch.func or forward mode reaches its kernels; use backend='sdpa'"
    return BACKENDS[backend](request)


# Each entry says why it cannot run a request, or None.
BACKENDS: dict[str, Callable[[DispatchKey], str | None]] = {
    "sdpa": sdpa.why_not,
    "flash": flash.why_not,
    "triton": triton_backend.why_not,
    "flex": flex_kernel.why_not,
    "reference": _reference_why_not,
}
# Calls with functions, and calls under torch.func, whose derivatives reach into no kernel, ask these first: "sdpa" is torch's own
# operations for such calls, and no switch of SDPA's kernels turns them off.
BY_OPERATIONS: dict[str, Callable[[DispatchKey], str | None]] = {
    "sdpa": operations_why_not,
    "flash": partial(_untransformed_why_not, "flash"),
    "triton": partial(_untransformed_why_not, "triton"),
}
# Those that run under the one differentiable operation, with their kernels in order of preference.
KERNEL_BACKENDS: dict[str, Callable[[DispatchKey], tuple[Kernel, ...]]] = {
    "sdpa": sdpa.preferred,
    "flash": lambda request: flash.KERNELS,
    "triton": lambda request: (triton_backend.KERNEL,),
}
WHOLE = f"it computes whole sequences of all heads, not shards; use backend={next(iter(KERNEL_BACKENDS))!r}"


def why_not(backend: str, request: DispatchKey) -> str | None:
    """The reason why a backend cannot run a request, or None; a ValueError if there is no backend of that name."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {('auto', *BACKENDS)}, got {backend!r}")
    table = BY_OPERATIONS if request.modified or request.transformed else BACKENDS
    return table.get(backend, BACKENDS[backend])(request)


class Choice(NamedTuple):
    """What runs a call: a backend, the request that it was chosen by, and the kernel where a kernel backend runs it."""

    backend: str
    request: DispatchKey
    kernel: Kernel | None


def _may_take_triton(request: DispatchKey) -> bool:
    return triton_backend.why_not(request) is None and triton_backend.why_not_unasked(request) is None


def choose(backend: str, request: DispatchKey, *, divided: bool = False) -> str:
    """The backend that runs a request, as `select`."""
    return select(backend, request, divided=divided).backend


def select(backend: str, request: DispatchKey, *, divided: bool = False) -> Choice:
    """The backend and kernel that run a request: of the named backend, or for `"auto"` of the first that can, fastest first.

    `divided` requests hold a part of the tokens or heads of a model, whose pieces merge by their lse.

    Raises:
        ValueError: If there is no backend of that name.
        NotImplementedError: If the named backend cannot run the request; the message has its reason.
    """
    if backend == "auto":
        if request.hardware.capability is not None and not request.modified and _may_take_triton(request):
            advise(request.hardware.capability)
        reasons = {}
        for name in prefer(request):
            kernel, reason = _first_kernel(name, request), None
            if kernel is None:
                reason = WHOLE if divided and name not in KERNEL_BACKENDS else why_not(name, request)
            if reason is None and name in CHALLENGERS:
                reason = unproven(name, request)
            if reason is None and name == "triton":
                reason = triton_backend.why_not_unasked(request)
            if reason is None:
                return Choice(name, request, kernel)
            reasons[name] = reason
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NotImplementedError(f"no backend can run this on {request.hardware.name}: {text}")
    kernel = _first_kernel(backend, request)
    reason = why_not(backend, request) if kernel is None else None
    if reason is None and divided and backend == "flex":
        reason = why_not(backend, replace(request, wants_lse=True))
    elif reason is None and divided and backend not in KERNEL_BACKENDS:
        reason = WHOLE
    if reason is not None:
        raise NotImplementedError(f"backend {backend!r} cannot run this on {request.hardware.name}: {reason}")
    return Choice(backend, request, kernel)


def _first_kernel(backend: str, request: DispatchKey) -> Kernel | None:
    """The kernel of a backend that runs a request; None where no kernel does."""
    if backend not in KERNEL_BACKENDS or request.modified or request.transformed:
        return None
    for kernel in KERNEL_BACKENDS[backend](request):
        if kernel.why_not(request) is None:
            return kernel
    return None


def choose_kernel(backend: str, request: DispatchKey) -> Kernel:
    """The first kernel of a backend that can run a request; a NotImplementedError with every reason if none can."""
    kernel = _first_kernel(backend, request)
    if kernel is None:
        raise NotImplementedError(f"backend {backend!r} cannot run this on {request.hardware.name}: {why_not(backend, request)}")
    return kernel
