"""Checks of backends and forms of kernels on this device: out, lse and gradients against the definition."""

from __future__ import annotations

import math
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import active_children, get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexdilated import reference
from flexdilated.core.pattern import DilatedPattern

# Allowed error, as a multiple of the largest error of plain PyTorch in the same dtype. Tests allow half; here a false alarm would
# exclude a correct kernel.
ERRORS = 4.0
LEAST_ERROR = 16 * torch.finfo(torch.float32).eps  # absolute: in float32 the error of plain PyTorch may be smaller by chance
LSE_ERROR = 5e-3  # absolute: sums of exact products in float32
QUANTITIES = ("out", "lse", "dq", "dk", "dv")
ENDED = "failed: the process ended"
Verdicts = dict[str, str]  # of "forward" and "backward"
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """One small call, as numbers from which its tensors are made."""

    name: str
    pattern: DilatedPattern
    batch: int = 1
    num_tokens: int = 47
    kv_heads: int = 4
    group: int = 1
    head_dim: int = 16
    is_causal: bool = False
    ignored: float | None = None  # share of keys that key_padding_mask ignores
    borders: tuple[int, ...] | None = None  # cu_seqlens
    lse_gradient: bool = True
    seed: int = 11

    def tensors(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """q, k, v, dout, and dlse if lse has a gradient, drawn on the CPU and rounded to `dtype`."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.kv_heads * self.group
        drawn = [
            torch.randn(self.batch, self.num_tokens, num, self.head_dim, generator=generator).to(device, dtype)
            for num in (heads, self.kv_heads, self.kv_heads, heads)
        ]
        dlse = torch.randn(self.batch, heads, self.num_tokens, generator=generator)
        return (*drawn, dlse.to(device, torch.promote_types(dtype, torch.float32)))[: 5 if self.lse_gradient else 4]

    def options(self, device: torch.device) -> dict[str, Any]:
        """The keyword arguments of the call."""
        options: dict[str, Any] = {"is_causal": self.is_causal}
        if self.ignored is not None:
            generator = torch.Generator().manual_seed(self.seed + 1)
            options["key_padding_mask"] = (torch.rand(self.batch, self.num_tokens, generator=generator) < self.ignored).to(device)
        if self.borders is not None:
            options["cu_seqlens"] = torch.tensor(self.borders, dtype=torch.int32, device=device)
        return options


class Runnable(NamedTuple):
    """`run(q, k, v)` returns out and lse; both directions run inside `around()`."""

    run: Attend
    around: Callable[[], AbstractContextManager[object]]
    dtype: torch.dtype


Make = Callable[[str, Case, str], Runnable]  # by a candidate's name, a case and a device; other processes find it by its name


class Job(NamedTuple):
    """One check of a candidate. `examine` is a top-level function, so that another process can import it."""

    examine: Callable[[str, Case, str], Verdicts]
    candidate: str
    case: Case

    def form(self, direction: str) -> str:
        """The form that is checked, as `flexdilated.backends.measured.unproven` spells it."""
        return f"{direction}, grouped heads" if self.case.group > 1 else direction


def definition_jobs(
    make: Make, name: str, pattern: DilatedPattern, num_tokens: int, group: int, head_dims: Sequence[int], *, half: bool = False
) -> list[Job]:
    """Comparisons with the definition, 16 per head dim; `half`: 8 of them, which cover every option and both masks.

    Calls with grouped heads come first: their backward has changed most since its last run on a GPU.
    """
    plain = Case("plain", pattern, num_tokens=num_tokens, kv_heads=2, lse_gradient=False)
    # Documents: one token, an empty one, enough short ones that pieces share a launch, and a long one.
    cut = (0, 1, 1, *(num_tokens * i // 30 for i in range(1, 11)), num_tokens)
    options = (
        plain,
        replace(plain, name="gradient of lse", lse_gradient=True),
        replace(plain, name="mask", batch=2, ignored=0.3),
        replace(plain, name="documents", borders=cut),
    )

    def job(case: Case, group: int, head_dim: int, is_causal: bool) -> Job:
        named = f"{case.name}, {'causal' if is_causal else 'full'}, D={head_dim}"
        return Job(
            partial(against_definition, make),
            name,
            replace(case, name=named, group=group, head_dim=head_dim, is_causal=is_causal),
        )

    return [
        job(case, g, d, causal)
        for g in (group, 1)
        for i, case in enumerate(options)
        for d in head_dims
        for causal in (False, True)
        if not half or (causal == (g > 1)) == i % 2
    ]


def differentiate(attend: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None) -> tuple[Tensor, ...]:
    """`out, lse, dq, dk, dv` of `attend(q, k, v)`, which returns `out, lse`."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves)
    outputs, weights = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    grads = torch.autograd.grad(outputs, leaves, weights)
    return out.detach(), lse.detach(), *grads


def definition(case: Case, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    """`out, lse, dq, dk, dv` of a case by the definition, in float64 from inputs rounded to a dtype."""
    attend = partial(reference.dilated_attention, pattern=case.pattern, **case.options(torch.device(device)))
    return differentiate(attend, *(x.double() for x in case.tensors(dtype, device)))


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute error. Infinite if shapes differ, or if NaN or infinities differ in place or value."""
    actual, finite = actual.to(expected), expected.isfinite()
    if (
        actual.shape != expected.shape
        or not torch.equal(actual.isfinite(), finite)
        or not torch.equal(actual[~finite], expected[~finite])
    ):
        return math.inf
    return (actual - expected)[finite].abs().max().item() if bool(finite.any()) else 0.0


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Plain PyTorch in the dtype of q: one softmax of `score + log m`, m branches joining a pair. No empty rows."""
    num_tokens, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
    branches = range(len(pattern.branches))
    rows = (reference.joined_rows(pattern, i, num_tokens, kv_heads, is_causal=is_causal)[1] for i in branches)
    joined = torch.stack([x[:, :num_tokens, :num_tokens] for x in rows]).sum(0)
    bias = joined.log().to(q).repeat_interleave(heads // kv_heads, dim=0)
    k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale) + bias
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)


def verdict(compare: Callable[[], None]) -> str:
    """`"right"`, `"cannot run: ..."`, `"wrong: ..."` or `"failed: ..."`."""
    try:
        compare()
    except NotImplementedError as error:
        return f"cannot run: {error}"[:400]
    except AssertionError as error:
        return f"wrong: {' '.join(str(error).split())}"[:400]
    except Exception as error:  # an error of any kind must not end the other checks
        traceback.print_exc(limit=-3)
        return f"failed: {type(error).__name__}: {error}"[:400]
    return "right"


def against_definition(make: Make, name: str, case: Case, device: str) -> Verdicts:
    """Check that no error exceeds `ERRORS` times the largest error of plain PyTorch without mask and documents."""
    run, around, dtype = make(name, case, device)
    tensors, unmasked = case.tensors(dtype, device), replace(case, ignored=None, borders=None, lse_gradient=False)
    plain = differentiate(
        lambda q, k, v: (dense_attention(q, k, v, case.pattern, is_causal=case.is_causal),) * 2, *unmasked.tensors(dtype, device)
    )
    exact_unmasked, expected = definition(unmasked, dtype, device), definition(case, dtype, device)
    allowed = [LSE_ERROR if i == 1 else max(LEAST_ERROR, ERRORS * largest_error(x, exact_unmasked[i])) for i, x in enumerate(plain)]

    def compare(actual: Iterable[Tensor], first: int) -> None:
        for i, x in enumerate(actual, first):
            error = largest_error(x, expected[i])
            if error > allowed[i]:
                raise AssertionError(f"{QUANTITIES[i]}: the largest error must be at most {allowed[i]:.1e}, got {error:.1e}")

    def forward() -> None:
        with around(), torch.no_grad():
            compare(run(*tensors[:3]), 0)

    def backward() -> None:
        with around():
            compare(differentiate(run, *tensors)[2:], 2)

    return {"forward": verdict(forward), "backward": verdict(backward)}


def examined(jobs: Sequence[Job], device: str, processes: int, done: Callable[[], object] = lambda: None) -> list[Verdicts]:
    """Verdicts of all jobs. Several processes compile kernels in parallel; `processes=0` runs all jobs in this process.

    A job that fails is tried again in a process of its own: a CUDA error of one job fails all later ones of its process. `done` is
    called after each job, from any thread.

    Raises:
        Exception: If a job cannot compute the expected results.
    """
    if processes == 0:
        verdicts = []
        for job in jobs:
            verdicts.append(examine(job, device))
            done()
        return verdicts

    def outcomes(batch: Sequence[Job], workers: int) -> list[Verdicts | BaseException]:
        ignore = (signal.SIGINT, signal.SIG_IGN)  # only this process acts on Ctrl-C
        pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=signal.signal, initargs=ignore)
        with pool, _children_end_with_interrupts():
            futures = [pool.submit(examine, job, device) for job in batch]
            for future in futures:
                future.add_done_callback(lambda future: done())
            return [future.exception() or future.result() for future in futures]

    results = outcomes(jobs, processes)
    failed = [i for i, result in enumerate(results) if isinstance(result, BaseException) or _failed(result)]
    with ThreadPoolExecutor(processes) as threads, _children_end_with_interrupts():
        for i, (result,) in zip(failed, threads.map(lambda i: outcomes([jobs[i]], 1), failed)):
            results[i] = result
    verdicts = []
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, BrokenProcessPool):
            raise result
        verdicts.append(dict.fromkeys(("forward", "backward"), ENDED) if isinstance(result, BaseException) else result)
    return verdicts


@contextmanager
def _children_end_with_interrupts() -> Iterator[None]:
    """End the processes that started inside the block, which may hang on the device, on Ctrl-C."""
    before = set(active_children())
    try:
        yield
    except KeyboardInterrupt:
        for child in set(active_children()) - before:
            child.terminate()
        raise


def examine(job: Job, device: str) -> Verdicts:
    """The verdicts of one job. Expected results are computed outside of `verdict`, so their errors are raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # checked patterns need not be connected
        return job.examine(job.candidate, job.case, device)


def _failed(verdicts: Verdicts) -> bool:
    return any(text.startswith("failed") for text in verdicts.values())
