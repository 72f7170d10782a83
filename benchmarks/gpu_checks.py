"""Further checks of `python -m benchmarks.gpu --all`: equal bits in all calls, and the kernels that merge."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention import Inputs
from benchmarks.gpu_backends import BACKENDS
from flexdilated.core.lse import merge_
from flexdilated.tuning.checks import Case, Runnable, Verdicts, differentiate, verdict


def backend_call(name: str, case: Case, device: str) -> Runnable:
    """A backend on a case."""
    backend = next(e for e in BACKENDS if e.name == name)
    options = {**case.options(torch.device(device)), "return_lse": True}
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # triton's interpreter computes no bfloat16
    return Runnable(lambda q, k, v: backend.forward(Inputs(q, k, v, None), case.pattern, **options), backend.around, dtype)


def repeatable(name: str, case: Case, device: str, *, calls: int = 100) -> Verdicts:
    """All calls give the same bits."""
    run, around, dtype = backend_call(name, case, device)
    tensors = case.tensors(dtype, device)

    def compare(call: Callable[[], Sequence[Tensor]]) -> None:
        with around():
            first = [x.clone() for x in call()]
            for i in range(2, calls + 1):
                assert all(map(torch.equal, first, call())), f"bits of call {i} differ from those of call 1"

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return run(*tensors[:3])

    backward = lambda: differentiate(run, *tensors)[2:]  # noqa: E731
    return {"forward": verdict(partial(compare, forward)), "backward": verdict(partial(compare, backward))}


def merges(name: str, case: Case, device: str) -> Verdicts:
    """The kernels that merge and add what dense kernels return equal torch, in strided rows that one side or neither reaches."""
    kernels: Any = importlib.import_module("flexdilated.backends.triton.merging")
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    tensors = replace(case, num_tokens=2 * case.num_tokens).tensors(dtype, device)
    out, part, total = (x[:, ::2].transpose(1, 2) for x in (tensors[0], tensors[1], tensors[3]))
    lse, part_lse = (x.float().sum(-1).to(device) for x in (out, part))
    for x, y, rows in ((out, lse, slice(0, 20)), (part, part_lse, slice(10, 30))):
        x[:, 0, rows], y[:, 0, rows] = 0.0, -math.inf
    expected, added = (out.float(), lse.clone()), (total.float() + part.float()).to(total.dtype)
    merge_(*expected, part.float(), part_lse)

    def forward() -> None:
        kernels.merge_into(out, lse, part, part_lse)
        torch.testing.assert_close(out, expected[0].to(out.dtype), rtol=2 * torch.finfo(out.dtype).eps, atol=1e-5)
        torch.testing.assert_close(lse, expected[1])

    def backward() -> None:
        kernels.add_to(total, part)
        torch.testing.assert_close(total, added)

    return {"forward": verdict(forward), "backward": verdict(backward)}
