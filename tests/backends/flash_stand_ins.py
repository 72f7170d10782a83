"""flash-attn 2 and flash-attn-4 by dense operations, with the checks of their entry points.

The entry points of flash-attn 2.7.0 to 2.8.3 by name and order, and the checks of its csrc/flash_attn/flash_api.cpp; those of
flash-attn-4 4.0.0b13 to b36 by the keywords used, and the checks of its flash_attn/cute/interface.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import backends
from flexdilated.backends import BACKENDS
from flexdilated.backends.dense import flash
from flexdilated.core.dispatch_key import DispatchKey
from tests.hardware import simulate

KERNEL = {kernel.name: kernel for kernel in flash.KERNELS}


def _check(q: Tensor, k: Tensor, v: Tensor, *like_q: Tensor) -> None:
    batch, _, heads, head_dim = q.shape
    assert batch > 0
    assert head_dim % 8 == 0
    assert head_dim <= 256
    assert k.shape == v.shape == (batch, *k.shape[1:3], head_dim)
    assert heads % k.shape[2] == 0
    for x in (q, k, v, *like_q):
        assert x.dtype == q.dtype
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
    assert all(x.shape == q.shape for x in like_q)


Bounds = tuple[int | None, int | None]  # keys before a query's place among the keys and after it; the last rows are aligned


def _bounds_2(causal: bool, left: int, right: int) -> Bounds:
    """`mha_fwd` and `set_params_fprop` in csrc/flash_attn/flash_api.cpp; the mask is `apply_mask_local` in src/mask.h."""
    return None if left < 0 else left, 0 if causal else None if right < 0 else right


def _bounds_4(causal: bool, window_size_left: int | None, window_size_right: int | None) -> Bounds:
    """`_resolve_causal_local_window` in flash_attn/cute/interface.py; the mask is `AttentionMask.apply_mask` in mask.py."""
    assert window_size_left is None or window_size_left >= 0  # others mean different things in different versions
    assert window_size_right is None or window_size_right >= 0
    return window_size_left, 0 if causal else window_size_right


def _scores(q: Tensor, k: Tensor, scale: float, bounds: Bounds) -> Tensor:
    """`(batch, kv heads, group, queries, keys)`."""
    assert isinstance(scale, float)
    assert all(bound is None or type(bound) is int for bound in bounds)
    scores = torch.einsum("bqhgd,bkhd->bhgqk", q.unflatten(2, (k.shape[2], -1)), k) * scale
    left, right = (q.shape[1] + k.shape[1] if bound is None else bound for bound in bounds)
    apart = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    return scores.masked_fill((apart < -left) | (apart > right), -torch.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bounds: Bounds) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(_accumulated(x)) for x in (q, k, v))
    scores = _scores(q, k, scale, bounds)
    return torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(-1), v).flatten(2, 3), scores.logsumexp(-1).flatten(1, 2)


def _differentiate(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bounds: Bounds
) -> tuple[Tensor, Tensor, Tensor]:
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert lse.is_contiguous()
    assert lse.dtype == _accumulated(q)
    assert not lse.isneginf().any()  # an empty row is +inf
    dtype, kv_heads = _accumulated(q), k.shape[2]
    dout, q, k, v, out = (x.to(dtype) for x in (dout, q, k, v, out))
    weights = torch.exp(_scores(q, k, scale, bounds) - lse.unflatten(1, (kv_heads, -1))[..., None])
    softmax_d = (dout * out).sum(-1).transpose(1, 2)  # (batch, heads, rows)
    if dlse is not None:
        assert dlse.is_contiguous()
        assert dlse.dtype == lse.dtype
        softmax_d = softmax_d - dlse
    dout, q = (x.unflatten(2, (kv_heads, -1)) for x in (dout, q))
    dweights = torch.einsum("bqhgd,bkhd->bhgqk", dout, v) - softmax_d.unflatten(1, (kv_heads, -1))[..., None]
    dscores = weights * dweights * scale
    dq = torch.einsum("bhgqk,bkhd->bqhgd", dscores, k).flatten(2, 3)
    return dq, torch.einsum("bhgqk,bqhgd->bkhd", dscores, q), torch.einsum("bhgqk,bqhgd->bkhd", weights, dout)


def _of_flash_attn_2(
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, **options: object
) -> tuple[float, Bounds]:
    assert isinstance(causal, bool)
    assert options == {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
    return softmax_scale, _bounds_2(causal, window_size_left, window_size_right)


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, *, return_softmax: bool, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(q, k, v)
    assert return_softmax is False  # the package gives it under dropout only
    out, lse = _attend(q, k, v, *_of_flash_attn_2(**options))
    return torch.empty_like(q).copy_(out), lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_backward(*tensors: Tensor, deterministic: bool, **options: Any) -> None:
    dout, q, k, v, out, softmax_lse, *written = tensors
    _check(q, k, v, dout, out)
    assert deterministic is torch.are_deterministic_algorithms_enabled()
    grads = _differentiate(dout, None, q, k, v, out, softmax_lse, *_of_flash_attn_2(**options))
    for memory, grad, x in zip(written, grads, (q, k, v), strict=True):
        assert memory.shape == x.shape
        assert memory.dtype == x.dtype
        assert memory.stride(-1) == 1
        memory.copy_(grad)


def _flash_attn_fwd(
    *, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, out: Tensor, lse: Tensor, **window: int | None
) -> tuple[Tensor, Tensor, None, None, None]:
    _check(q, k, v, out)
    assert not any(0 in x.stride() for x in (q, k, v, out))  # of others it compiles one more kernel
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert lse.dtype == _accumulated(q)
    assert lse.stride(-1) == 1
    for memory, result in zip((out, lse), _attend(q, k, v, softmax_scale, _bounds_4(causal, **window))):
        memory.copy_(result)
    return out, lse, None, None, None


def _flash_attn_bwd(
    *, deterministic: bool, dlse: Tensor | None, lse: Tensor, softmax_scale: float, causal: bool, **tensors: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, dout, dq, dk, dv = (tensors.pop(name) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"))
    _check(q, k, v, out, dout, dq)
    _check(q, dk, dv)
    assert not any(0 in x.stride() for x in (q, k, v, out, dout, dq, dk, dv))
    assert deterministic is torch.are_deterministic_algorithms_enabled()
    grads = _differentiate(dout, dlse, q, k, v, out, lse, softmax_scale, _bounds_4(causal, **tensors))
    for memory, grad in zip((dq, dk, dv), grads):
        memory.copy_(grad)
    return dq, dk, dv


def _accumulated(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


ENTRY_POINTS = {
    "flash_attn.flash_attn_interface": {"forward": _flash_attn_forward, "backward": _flash_attn_backward},
    "flash_attn.cute.interface": {"forward": _flash_attn_fwd, "backward": _flash_attn_bwd},
}


class Calls(list[str]):
    """`"forward"` and `"backward"` in the order of calls, and the tensors of the last call by name."""

    last: dict[str, object]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The stand-ins as the package `flash_attn`; gives the calls of its entry points."""
    calls = Calls()
    for module in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    for module, functions in ENTRY_POINTS.items():
        interface = ModuleType(module)
        for direction, function in functions.items():

            def record(*args: object, direction: str = direction, function: object = function, **kwargs: object) -> object:
                calls.append(direction)
                calls.last = kwargs
                return function(*args, **kwargs)  # type: ignore[operator]

            setattr(interface, function.__name__, record)
        monkeypatch.setitem(sys.modules, module, interface)
    return calls


def place(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the flash backend run one of its kernels on this CPU in every dtype."""

    def why_not(request: DispatchKey) -> str | None:
        asked = replace(request, hardware=simulate("sm_90"), dtype=torch.bfloat16)
        return flash._neither(asked)

    placed = replace(KERNEL[kernel], why_not=why_not)
    monkeypatch.setitem(backends.KERNEL_BACKENDS, "flash", lambda request: (placed,))
    monkeypatch.setitem(BACKENDS, "flash", why_not)
