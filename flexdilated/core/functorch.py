"""torch.func and forward-mode differentiation: whether one of them is at work on a call's tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

Made = TypeVar("Made", bound=Callable[..., object])

_BATCHED_GRADIENTS = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("VmapMode"))  # torch.func.vmap has another


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether torch.func (`grad`, `vjp`, `jvp`, `vmap`) or forward-mode differentiation wants more than autograd of a call.

    Raises:
        NotImplementedError: If traced code is under forward-mode differentiation: compiled operators would drop tangents. Where the
            compiler may, it then leaves that code uncompiled. And inside `functionalize` inside a derivative, for the same reason.
    """
    level = forward_ad._current_level
    if torch.compiler.is_compiling():
        if level >= 0:
            raise NotImplementedError(
                "dilated_attention must not be compiled under forward-mode differentiation (torch.func.jvp, jacfwd, forward_ad): "
                "call it without torch.compile, or use reverse mode"
            )
        return torch._C._are_functorch_transforms_active()
    if torch._C._are_functorch_transforms_active():
        top = peek_interpreter_stack()
        if top is None or top.key() != TransformType.Functionalize:
            return top is not None
        outer_kinds = {level.key() for level in get_interpreter_stack() or ()}
        if outer_kinds & {TransformType.Grad, TransformType.Jvp}:
            raise NotImplementedError(
                "dilated_attention must not be functionalized inside a derivative, got torch.func.functionalize inside grad, vjp "
                "or jvp, which would not reach the operators: leave functionalize out, since they write to no argument"
            )
        return False
    # An operation's own formulas are computed with forward mode switched off.
    if level < 0 or not torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    for x in tensors:  # noqa: SIM110 - a function of its own would be compiled, and see no tangents
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            return True
    return False


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether torch.func or forward mode takes a derivative of what is made of tensors; `vmap` alone takes none."""
    if torch._C._are_functorch_transforms_active():
        return any(x is not None and _is_wrapped(x, is_gradtrackingtensor) for x in tensors)
    return is_transformed(*tensors)


def in_no_mode(make: Made) -> Made:
    """Decorate a function whose tensors are cached: they are plain, whichever mode (inference, torch.func, fake) is active."""

    @functools.wraps(make)
    def plain(*args: object) -> object:
        with torch.inference_mode(False), torch._C._DisableFuncTorch(), _disable_current_modes():
            return make(*args)

    return plain  # type: ignore[return-value]


def may_draw() -> AbstractContextManager[object]:
    """Inside, allow random numbers of a fixed seed, also in a backward under `torch.autograd.grad(is_grads_batched=True)`.

    That refuses every random operation, though numbers drawn again for each gradient are those of the forward.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    guard: AbstractContextManager[object] = torch._C._ExcludeDispatchKeyGuard(_BATCHED_GRADIENTS)
    return guard


def is_mapped(x: Tensor) -> bool:
    """Whether torch.func.vmap maps over a tensor: its values then differ from sample to sample, and cannot be read."""
    return _is_wrapped(x, is_batchedtensor)


def _is_wrapped(x: Tensor, kind: Callable[[Tensor], bool]) -> bool:
    while not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(x):
        if kind(x):
            return True
        x = get_unwrapped(x)
    return False
