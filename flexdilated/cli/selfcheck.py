"""The self-check: every kernel that can run here, on small calls, against the definition."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexdilated.attention import dilated_attention
from flexdilated.backends import BACKENDS, DispatchKey, why_not
from flexdilated.backends.dense.sdpa import KERNELS
from flexdilated.cli.refusal import first_line
from flexdilated.core.hardware import Hardware, dtype_name
from flexdilated.core.pattern import DilatedPattern
from flexdilated.tuning.checks import QUANTITIES, Case, definition, differentiate, largest_error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

# The largest error allowed in a tensor, as a share of its largest element. In low precision sixteen roundings of one number, in
# float32 and float64 the rounding of sums of some hundred terms.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 16 * 2.0**-11, torch.bfloat16: 16 * 2.0**-8}

# How many of the cases backends take that compile a kernel for most of them, which lasts seconds to half a minute.
COMPILED = {"flex": 2, "triton": 6, "flash": 4}

# The switch of `torch.nn.attention.sdpa_kernel` that leaves one kernel of the sdpa backend as the only choice.
SWITCHES = {
    "cpu_flash": SDPBackend.FLASH_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class BackendKernel:
    """One row of the tables: a backend, or one kernel of the sdpa backend."""

    backend: str
    kernel: str | None = None

    def __str__(self) -> str:
        return self.backend if self.kernel is None else f"{self.backend} {self.kernel}"

    def why_not(self, request: DispatchKey) -> str | None:
        """The reason why it cannot run a request, or None."""
        if self.kernel is None:
            return why_not(self.backend, request)
        return next(kernel.why_not(request) for kernel in KERNELS if kernel.name == self.kernel)


@dataclass(frozen=True)
class Check:
    """One case by one backend in one dtype: the relative error of each quantity, or what the backend raised."""

    case: str
    errors: dict[str, float]
    raised: str | None
    passed: bool


@dataclass(frozen=True)
class Report:
    """Cases by one backend in one dtype: all of those that it accepts, or some."""

    candidate: BackendKernel
    dtype: torch.dtype
    tolerance: float
    checks: tuple[Check, ...]
    accepted: int

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def worst(self) -> dict[str, float]:
        """The largest error of each quantity over the cases that ran."""
        return {name: max((check.errors[name] for check in self.checks if check.errors), default=math.inf) for name in QUANTITIES}


def candidates() -> list[BackendKernel]:
    """Every backend in the order of `backend="auto"`, sdpa by its kernels, in their order."""
    return [
        candidate
        for backend in BACKENDS
        for candidate in (
            [BackendKernel(backend, kernel.name) for kernel in KERNELS] if backend == "sdpa" else [BackendKernel(backend)]
        )
    ]


def _cases() -> list[Case]:
    """Several tiles of rows as models have them, then every kind of call, offset rule and order of tokens on short sequences."""
    long, short = DilatedPattern((640, 1100), (1, 2)), DilatedPattern((13, 31), (3, 5))
    interleaved = replace(short, offsets="interleaved")
    grouped, torchscale = replace(interleaved, heads="grouped"), replace(short, zero_padding=True, detach_weights=True)
    return [
        Case("long, causal, grouped-query heads", long, num_tokens=1200, kv_heads=2, group=2, head_dim=64, is_causal=True),
        Case("key padding mask, causal", short, batch=2, is_causal=True, ignored=0.3),
        Case("heads grouped by branch, causal", grouped, batch=2, is_causal=True),
        Case("torchscale's rules", torchscale, batch=2),
        Case("packed documents, causal", interleaved, is_causal=True, borders=(0, 9, 30, 47)),
        Case("grouped-query heads", interleaved, batch=2, group=3, head_dim=32),
        Case("long, head dim 128", long, num_tokens=1200, kv_heads=2, head_dim=128),
        Case("plain", short, batch=2, head_dim=24),
        Case("key padding mask", interleaved, batch=2, ignored=0.3),
        Case("packed documents", short, borders=(0, 9, 30, 47)),
        Case("torchscale's rules, causal", torchscale, batch=2, is_causal=True),
    ]


@contextmanager
def _quietly_on_one_thread() -> Iterator[None]:
    """No warnings, and one thread for torch: tensors this small gain nothing from more threads, and on a busy machine lose much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # random patterns need not be connected
            yield
    finally:
        torch.set_num_threads(threads)


@_quietly_on_one_thread()
def self_check(
    device: torch.device, hardware: Hardware, *, report_progress: Callable[[str], None] = lambda progress: None
) -> list[Report]:
    """Every backend that can run, in every dtype, on the cases that it accepts.

    Args:
        device: Where to compute.
        hardware: What the device is.
        report_progress: Called with the next check in words.
    """
    cases = _cases()
    reports = []
    for dtype in DTYPES.values():
        expected: dict[str, tuple[Tensor, ...]] = {}
        for candidate in candidates():
            if candidate.backend == "reference":
                continue
            accepted = [case for case in cases if candidate.why_not(_request(case, dtype, hardware)) is None]
            chosen = accepted[: COMPILED.get(candidate.backend)]
            checks = []
            for number, case in enumerate(chosen, 1):
                report_progress(f"{candidate} in {dtype_name(dtype)}: {number} of {len(chosen)}")
                if case.name not in expected:
                    expected[case.name] = definition(case, dtype, "cpu")
                checks.append(_check(case, dtype, device, candidate, expected[case.name]))
            if checks:
                reports.append(Report(candidate, dtype, TOLERANCES[dtype], tuple(checks), len(accepted)))
    return reports


def _request(case: Case, dtype: torch.dtype, hardware: Hardware) -> DispatchKey:
    return DispatchKey(hardware, dtype, case.head_dim, case.group, case.ignored is not None, differentiable=True, wants_lse=True)


def _check(case: Case, dtype: torch.dtype, device: torch.device, candidate: BackendKernel, expected: Sequence[Tensor]) -> Check:
    try:
        with nullcontext() if candidate.kernel is None else sdpa_kernel(SWITCHES[candidate.kernel]):
            options = {**case.options(device), "return_lse": True, "backend": candidate.backend}
            attend = lambda q, k, v: dilated_attention(q, k, v, case.pattern, **options)  # noqa: E731
            actual = [x.cpu() for x in differentiate(attend, *case.tensors(dtype, device))]
    except RuntimeError as error:  # a kernel that this machine lacks after all: the thing to report, not to die of
        return Check(case.name, {}, f"{type(error).__name__}: {first_line(error)}", passed=False)
    sizes = [x.nan_to_num(0.0, 0.0, 0.0).abs().max().item() or 1.0 for x in expected]
    errors = {name: largest_error(a, e) / size for name, a, e, size in zip(QUANTITIES, actual, expected, sizes)}
    return Check(case.name, errors, None, passed=all(error <= TOLERANCES[dtype] for error in errors.values()))


def all_passed(reports: list[Report]) -> bool:
    """Whether something was checked and nothing failed."""
    return bool(reports) and all(report.passed for report in reports)
