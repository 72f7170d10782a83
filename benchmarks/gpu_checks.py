"""Whether backends are right on this device: what `python -m benchmarks.gpu --all` runs before it times them."""

from __future__ import annotations

import importlib
import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.attention import Inputs
from benchmarks.gpu_backends import BACKENDS, Backend, mask_name
from flexdilated import DilatedPattern, reference
from flexdilated.core.lse import merge_
from tests.cases import Case, dense_attention, differentiate

# Times the worst error of plain PyTorch in the same dtype. Tests allow half; here a false alarm costs the time of a GPU.
ERRORS = 4.0
LSE_ERROR = 5e-3  # absolute: sums of exact products in float32
WRONG = ("wrong", "failed")  # how a verdict begins that forbids timing
Verdicts = dict[str, str]  # of "forward" and "backward"


class Job(NamedTuple):
    """One examination of a backend; `examine` is a function of this file, so that another process finds it."""

    examine: Callable[[str, Case, str], Verdicts]
    backend: str
    name: str
    case: Case

    def form(self, direction: str) -> str:
        """As `benchmarks.environment.source_of` names it."""
        return f"{direction}, grouped heads" if self.case.group > 1 else direction


def definition_jobs(backend: str, pattern: DilatedPattern, num_tokens: int, group: int, head_dims: Sequence[int]) -> list[Job]:
    """Comparisons with the definition, those with grouped heads first: their backward has changed most since it ran."""
    one = Case(pattern, num_tokens=num_tokens, kv_heads=2, lse_gradient=False)
    # One of a token, an empty one, as many short ones as make pieces share a launch, and a long one.
    cut = (0, 1, 1, *(num_tokens * i // 30 for i in range(1, 11)), num_tokens)
    options = {
        "plain": one,
        "gradient of lse": replace(one, lse_gradient=True),
        "mask": replace(one, batch=2, ignored=0.3),
        "documents": replace(one, borders=cut),
    }
    return [
        Job(
            against_definition, backend, f"{name}, {mask_name(causal)}, D={d}", replace(case, group=g, head_dim=d, is_causal=causal)
        )
        for g in (group, 1)
        for name, case in options.items()
        for d in head_dims
        for causal in (False, True)
    ]


def verdict(compare: Callable[[], None]) -> str:
    """`"right"`, `"cannot run: ..."`, `"wrong: ..."` or `"failed: ..."`."""
    try:
        compare()
    except NotImplementedError as error:
        return f"cannot run: {error}"[:400]
    except AssertionError as error:
        return f"wrong: {' '.join(str(error).split())}"[:400]
    except Exception as error:  # whatever a compiler raises must not end the other examinations
        traceback.print_exc(limit=-3)
        return f"failed: {type(error).__name__}: {error}"[:400]
    return "right"


def backend_call(name: str, case: Case, device: str) -> tuple[Backend, Callable[..., tuple[Tensor, Tensor]], tuple[Any, ...]]:
    """A backend; its `out` and `lse` as a function of q, k, v; q, k, v, dout and dlse."""
    backend = next(e for e in BACKENDS if e.name == name)
    options = {**case.options(device), "return_lse": True}
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # triton's interpreter computes no bfloat16
    return backend, lambda q, k, v: backend.forward(Inputs(q, k, v, None), case.pattern, **options), case.tensors(dtype, device)


def against_definition(name: str, case: Case, device: str) -> Verdicts:
    """No element errs by more than `ERRORS` times the worst of plain PyTorch, without mask and documents."""
    backend, run, tensors = backend_call(name, case, device)
    exact = [None if x is None else x.double() for x in tensors]
    define = partial(reference.dilated_attention, pattern=case.pattern)
    plain = differentiate(lambda *qkv: (dense_attention(*qkv, case.pattern, is_causal=case.is_causal),) * 2, *tensors[:4])
    whole = differentiate(partial(define, is_causal=case.is_causal), *exact[:4])
    expected = differentiate(partial(define, **case.options(device)), *exact)
    allowed = {i: ERRORS * (plain[i].double() - whole[i]).abs().max().item() for i in (0, 2, 3, 4)} | {1: LSE_ERROR}

    def compare(actual: Iterable[Tensor], first: int) -> None:
        for i, x in enumerate(actual, first):
            said = partial("{}: {}".format, ("out", "lse", "dq", "dk", "dv")[i])
            torch.testing.assert_close(x.double(), expected[i], atol=allowed[i], rtol=0.0, msg=said)

    def forward() -> None:
        with backend.around(), torch.no_grad():
            compare(run(*tensors[:3]), 0)

    def backward() -> None:
        with backend.around():
            compare(differentiate(run, *tensors)[2:], 2)

    return {"forward": verdict(forward), "backward": verdict(backward)}


def repeatable(name: str, case: Case, device: str, *, calls: int = 100) -> Verdicts:
    """All calls give the same bits."""
    backend, run, tensors = backend_call(name, case, device)

    def compare(call: Callable[[], Sequence[Tensor]]) -> None:
        with backend.around():
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
    out, part, _, total, _ = replace(case, num_tokens=2 * case.num_tokens).tensors(
        torch.bfloat16 if device == "cuda" else torch.float16
    )
    out, part, total = (x[:, ::2].transpose(1, 2).to(device) for x in (out, part, total))
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


def examined(jobs: Sequence[Job], device: str, processes: int) -> list[Verdicts]:
    """Verdicts of all jobs, in several processes, so that kernels compile side by side; 0: in this one.

    A job that fails is tried again in a process of its own: a CUDA error of one job fails all later ones of its process.
    """
    if processes == 0:
        return [examine(job, device) for job in jobs]

    def verdicts(some: Sequence[Job], workers: int) -> list[Verdicts]:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(examine, job, device) for job in some]
            try:
                return [future.result() for future in futures]
            except BrokenProcessPool:
                return [dict.fromkeys(("forward", "backward"), "failed: the process ended") for _ in some]

    found = verdicts(jobs, processes)
    again = [i for i, each in enumerate(found) if any(text.startswith("failed") for text in each.values())]
    with ThreadPoolExecutor(processes) as threads:
        for i, (each,) in zip(again, threads.map(lambda i: verdicts([jobs[i]], 1), again)):
            found[i] = each
    return found


def examine(job: Job, device: str) -> Verdicts:
    """The verdicts of one job, also where the definition itself fails."""
    found: Verdicts = {}
    text = verdict(lambda: found.update(job.examine(job.backend, job.case, device)))
    return found or dict.fromkeys(("forward", "backward"), text)
