"""The table of engines and the one choice among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from flexdilated.backends.dense import flash, sdpa
from flexdilated.backends.dense.math import operations_why_not
from flexdilated.backends.flex import kernel as flex_kernel
from flexdilated.backends.kernel import Kernel
from flexdilated.backends.triton import engine as triton_engine
from flexdilated.backends.tuned import advise, prefer, unproven
from flexdilated.core.request import Request as Request


def _reference_why_not(request: Request) -> str | None:
    if request.dropout:
        return "the oracle has no dropout; use backend='sdpa'"
    return None


def _untransformed_why_not(backend: str, request: Request) -> str | None:
    if request.transformed:
        return "no transform of torch.func or forward mode reaches its kernels; use backend='sdpa'"
    return BACKENDS[backend](request)


# Each entry says why it cannot run a request, or None.
BACKENDS: dict[str, Callable[[Request], str | None]] = {
    "sdpa": sdpa.why_not,
    "flash": flash.why_not,
    "triton": triton_engine.why_not,
    "flex": flex_kernel.why_not,
    "reference": _reference_why_not,
}
# Calls with functions, and calls under torch.func, whose derivatives reach into no kernel, ask these first: "sdpa" is torch's own
# operations for such calls, and no switch of SDPA's kernels turns them off.
BY_OPERATIONS: dict[str, Callable[[Request], str | None]] = {
    "sdpa": operations_why_not,
    "flash": partial(_untransformed_why_not, "flash"),
    "triton": partial(_untransformed_why_not, "triton"),
}
# Those that run under the one differentiable operation, with their kernels in order of preference.
KERNEL_ENGINES: dict[str, Callable[[Request], tuple[Kernel, ...]]] = {
    "sdpa": sdpa.preferred,
    "flash": lambda request: flash.KERNELS,
    "triton": lambda request: (triton_engine.KERNEL,),
}
WHOLE = f"it computes whole sequences of all heads, not shards; use backend={next(iter(KERNEL_ENGINES))!r}"


def why_not(backend: str, request: Request) -> str | None:
    """The reason why an engine cannot run a request, or None.

    Raises:
        ValueError: If there is no engine of that name.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {('auto', *BACKENDS)}, got {backend!r}")
    own = BY_OPERATIONS if request.modified or request.transformed else BACKENDS
    return own.get(backend, BACKENDS[backend])(request)


def _may_take_triton(request: Request) -> bool:
    return triton_engine.why_not(request) is None and triton_engine.why_not_unasked(request) is None


def choose(backend: str, request: Request, *, divided: bool = False) -> str:
    """The engine that runs a request: the named one, or for `"auto"` the first that can, fastest first.

    `divided` requests hold a part of the tokens or heads of a model, whose pieces merge by their lse.

    Raises:
        ValueError: If there is no engine of that name.
        NotImplementedError: If the named engine cannot run the request; the message has its reason.
    """
    if backend == "auto":
        if request.hardware.capability is not None and not request.modified and _may_take_triton(request):
            advise(request.hardware.capability)
        own = BY_OPERATIONS if request.modified or request.transformed else BACKENDS
        reasons = {}
        for name in prefer(request):
            whole = divided and name not in KERNEL_ENGINES
            reasons[name] = WHOLE if whole else own.get(name, BACKENDS[name])(request)
            if reasons[name] is None:
                reasons[name] = unproven(name, request) or (triton_engine.why_not_unasked(request) if name == "triton" else None)
            if reasons[name] is None:
                return name
        said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NotImplementedError(f"no backend can run this on {request.hardware.name}: {said}")
    reason = why_not(backend, request)
    if reason is None and divided and backend == "flex":
        reason = why_not(backend, replace(request, wants_lse=True))
    elif reason is None and divided and backend not in KERNEL_ENGINES:
        reason = WHOLE
    if reason is not None:
        raise NotImplementedError(f"backend {backend!r} cannot run this on {request.hardware.name}: {reason}")
    return backend


def choose_kernel(engine: str, request: Request) -> Kernel:
    """The first kernel of an engine that can run a request.

    Raises:
        NotImplementedError: If none can, with every reason.
    """
    for kernel in KERNEL_ENGINES[engine](request):
        if kernel.why_not(request) is None:
            return kernel
    raise NotImplementedError(f"backend {engine!r} cannot run this on {request.hardware.name}: {why_not(engine, request)}")
