"""What this machine can run, and whether it computes the right numbers."""

from __future__ import annotations

import json
import math
import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexdilated import __version__, reference
from flexdilated.attention import dilated_attention
from flexdilated.backends import BACKENDS, Request, why_not
from flexdilated.backends.sdpa import KERNELS
from flexdilated.cost import Call, choose_layout, fused_cost, packed_cost
from flexdilated.hardware import Hardware, detect, recommended_dtype
from flexdilated.pattern import HEADS, OFFSETS, DilatedPattern
from flexdilated.refusal import refuse

__all__ = ["doctor"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CALLS = ("plain", "masked", "dropout", "functions")
QUANTITIES = ("out", "lse", "dq", "dk", "dv")
HEAD_DIM = 64
LAYOUT_TOKENS = tuple(4**i for i in range(5, 11))  # 1,024 to 1,048,576

# The largest error allowed in a tensor, as a share of its largest element. In low precision sixteen roundings of one number, in
# float32 and float64 the rounding of sums of some hundred terms.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 16 * 2.0**-11, torch.bfloat16: 16 * 2.0**-8}

# The switch of `torch.nn.attention.sdpa_kernel` that leaves one kernel of the sdpa engine as the only choice.
SWITCHES = {
    "cpu_flash": SDPBackend.FLASH_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Engine:
    """One row of the tables: a backend, or one kernel of the sdpa backend."""

    backend: str
    kernel: str | None = None

    def __str__(self) -> str:
        return self.backend if self.kernel is None else f"{self.backend} {self.kernel}"

    def why_not(self, request: Request) -> str | None:
        """The reason why it cannot run a request, or None."""
        if self.kernel is None:
            return why_not(self.backend, request)
        return next(kernel.why_not(request) for kernel in KERNELS if kernel.name == self.kernel)


@dataclass(frozen=True)
class Case:
    """One small call, by numbers that fix its tensors."""

    name: str
    pattern: DilatedPattern
    batch: int
    num_tokens: int
    kv_heads: int
    group: int
    head_dim: int
    is_causal: bool
    ignored: float | None  # share of keys that key_padding_mask ignores
    borders: tuple[int, ...] | None  # cu_seqlens
    seed: int

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, dout and dlse on the CPU, rounded to `dtype`."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.kv_heads * self.group
        q, k, v, dout = (
            torch.randn(self.batch, self.num_tokens, num, self.head_dim, generator=generator).to(dtype)
            for num in (heads, self.kv_heads, self.kv_heads, heads)
        )
        return q, k, v, dout, torch.randn(self.batch, heads, self.num_tokens, generator=generator)

    def options(self, device: str) -> dict[str, Any]:
        """The keyword arguments of the call."""
        options: dict[str, Any] = {"is_causal": self.is_causal}
        if self.ignored is not None:
            generator = torch.Generator().manual_seed(self.seed + 1)
            options["key_padding_mask"] = (torch.rand(self.batch, self.num_tokens, generator=generator) < self.ignored).to(device)
        if self.borders is not None:
            options["cu_seqlens"] = torch.tensor(self.borders, dtype=torch.int32, device=device)
        return options


@dataclass(frozen=True)
class Check:
    """One case by one engine in one dtype: the relative error of each quantity, or what the engine raised."""

    case: str
    errors: dict[str, float]
    raised: str | None
    passed: bool


@dataclass(frozen=True)
class Report:
    """All cases by one engine in one dtype."""

    engine: Engine
    dtype: torch.dtype
    tolerance: float
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def worst(self) -> dict[str, float]:
        """The largest error of each quantity over the cases that ran."""
        return {name: max((check.errors[name] for check in self.checks if check.errors), default=math.inf) for name in QUANTITIES}


def doctor(
    device: Annotated[
        str,
        typer.Option(help="The device to examine, as torch spells it: cpu, cuda, cuda:1, mps. auto: cuda, else mps, else cpu."),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what this machine can run and why not, and check every kernel against the definition. Exit code 1 if a check fails."""
    name = _default_device() if device == "auto" else device
    _check_device(name)
    hardware = detect(name)
    machine = _machine(name, hardware)
    console = Console()
    if not as_json:
        console.print(_machine_table(machine))
        console.print(_engine_table(hardware))
        console.print(_layout_table())
    with _one_thread():
        reports = _self_check(name, hardware)
    if as_json:
        typer.echo(json.dumps(_as_json(machine, hardware, reports), indent=2, allow_nan=False))
    else:
        _print_reports(console, reports)
    if not _passed(reports):
        raise typer.Exit(1)


# -- the machine --------------------------------------------------------------------------------------------------------------


def _default_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _check_device(name: str) -> None:
    """Ends the command unless torch can compute on the device."""
    try:
        torch.ones(1, device=torch.device(name)).item()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch's word for a build without CUDA
        refuse(f"--device must be a device that torch can use here, got '{name}': {_first_line(error)}")


def _machine(device: str, hardware: Hardware) -> dict[str, Any]:
    """Facts by name, as JSON types."""
    capability = None if hardware.capability is None else ".".join(map(str, hardware.capability))
    return {
        "flexdilated": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "devices": _devices(),
        "device": device,
        "capability": capability,
        "threads": torch.get_num_threads(),
        "has_fast_bfloat16": hardware.has_fast_bfloat16,
        "recommended_dtype": _spelled(recommended_dtype(hardware)),
    }


def _devices() -> list[str]:
    devices = [f"cpu: {platform.processor() or platform.machine()}"]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return devices


def _table(title: str) -> Table:
    """A table narrow enough for a terminal of 80 columns."""
    return Table(title=f"\n{title}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=0)


def _machine_table(machine: dict[str, Any]) -> Table:
    table = _table("machine")
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in machine.items():
        table.add_row(name.replace("_", " "), Text(_worded(value)))
    return table


def _worded(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


# -- what can run -------------------------------------------------------------------------------------------------------------


def _engines() -> list[Engine]:
    """Every backend in the order of `backend="auto"`, sdpa by its kernels, in their order."""
    return [
        engine
        for backend in BACKENDS
        for engine in ([Engine(backend, kernel.name) for kernel in KERNELS] if backend == "sdpa" else [Engine(backend)])
    ]


def _request(hardware: Hardware, dtype: torch.dtype, call: str) -> Request:
    return Request(
        hardware=hardware,
        dtype=dtype,
        head_dim=HEAD_DIM,
        masked=call == "masked",
        dropout=call == "dropout",
        modified=call == "functions",  # score_mod, mask_mod
        differentiable=True,
        wants_lse=True,
    )


def _reasons(engine: Engine, hardware: Hardware) -> dict[tuple[torch.dtype, str], str | None]:
    return {(dtype, call): engine.why_not(_request(hardware, dtype, call)) for dtype in DTYPES for call in CALLS}


def _engine_table(hardware: Hardware) -> Table:
    table = _table(f"what can run on {hardware}, head dim {HEAD_DIM}: of the engines that can, the first is used")
    table.add_column("engine", no_wrap=True)
    for dtype in DTYPES:
        table.add_column(_spelled(dtype), no_wrap=True)
    table.add_column("why not", overflow="fold")
    for engine in _engines():
        reasons = _reasons(engine, hardware)
        cells = []
        for dtype in DTYPES:
            able = [call for call in CALLS if reasons[dtype, call] is None]
            cells.append(
                Text("yes", "green") if len(able) == len(CALLS) else Text("\n".join(able) or "no", "yellow" if able else "dim")
            )
        table.add_row(str(engine), *cells, Text(_why(reasons)))
    return table


def _why(reasons: dict[tuple[torch.dtype, str], str | None]) -> str:
    """Each distinct reason once, after the dtypes and calls that it holds for, unless it holds for all of them."""
    lines = []
    for reason in dict.fromkeys(reason for reason in reasons.values() if reason is not None):
        where = [key for key, value in reasons.items() if value == reason]
        dtypes = list(dict.fromkeys(dtype for dtype, _ in where))
        calls = list(dict.fromkeys(call for _, call in where))
        limits = []
        if len(dtypes) < len(DTYPES):
            limits.append(", ".join(map(_spelled, dtypes)))
        if len(calls) < len(CALLS):
            limits.append(", ".join(calls))
        lines.append(f"{' '.join(limits)}: {reason}" if limits else reason)
    return "\n".join(lines)


def _layouts() -> list[dict[str, Any]]:
    """What the flex engine would do on a GPU with LongNet's branches, 12 heads of 64 elements in bfloat16, causal."""
    pattern, rows = DilatedPattern.longnet(), []
    for num_tokens in LAYOUT_TOKENS:
        call = Call(1, num_tokens, 12, 12, HEAD_DIM, 2, True)
        packed, fused = packed_cost(pattern, call), fused_cost(pattern, call)
        costs = {"packed": packed._asdict(), "fused": fused._asdict()}
        rows.append({"tokens": num_tokens, **costs, "layout": choose_layout(pattern, call)})
    return rows


def _layout_table() -> Table:
    table = _table(
        "backend='flex' on a GPU: one call over the raw layout (fused), or packed (LongNet, causal, 12 heads of 64, bfloat16)"
    )
    for column in ("tokens", "tiles packed", "tiles fused", "launches packed", "MB packed", "MB fused", "choice"):
        table.add_column(column, justify="left" if column == "choice" else "right")
    for row in _layouts():
        packed, fused = row["packed"], row["fused"]
        numbers = (
            row["tokens"],
            packed["tiles"],
            fused["tiles"],
            packed["launches"],
            packed["bytes"] // 2**20,
            fused["bytes"] // 2**20,
        )
        table.add_row(*(f"{n:,}" for n in numbers), row["layout"])
    return table


# -- the numbers --------------------------------------------------------------------------------------------------------------


def _cases() -> list[Case]:
    """Random small calls, the same ones every time: every kind under both offset rules, causal and not."""
    draw = random.Random(2307)
    kinds = (
        "plain",
        "grouped-query heads",
        "heads grouped by branch",
        "key padding mask",
        "packed documents",
        "torchscale's rules",
    )
    cases = []
    for kind in kinds:
        for offsets in OFFSETS:
            for is_causal in (False, True):
                num_tokens = draw.randint(17, 61)
                lengths = [draw.randint(3, num_tokens + 5) for _ in range(draw.randint(2, 3))]
                pattern = DilatedPattern(
                    tuple(lengths),
                    tuple(draw.randint(1, min(length, 7)) for length in lengths),
                    heads=HEADS[kind == "heads grouped by branch"],
                    offsets=offsets,
                    zero_padding=kind == "torchscale's rules",
                    detach_weights=kind == "torchscale's rules",
                )
                packed = kind == "packed documents"
                cases.append(
                    Case(
                        name=f"{kind}, {offsets} offsets, {'causal' if is_causal else 'not causal'}",
                        pattern=pattern,
                        batch=1 if packed else 2,
                        num_tokens=num_tokens,
                        kv_heads=draw.randint(3, 5),
                        group=draw.randint(2, 3) if kind == "grouped-query heads" else 1,
                        head_dim=draw.choice((16, 24, 32)),
                        is_causal=is_causal,
                        ignored=0.3 if kind == "key padding mask" else None,
                        borders=(0, *sorted(draw.sample(range(1, num_tokens), 2)), num_tokens) if packed else None,
                        seed=draw.randint(0, 2**31),
                    )
                )
    return cases


def _self_check(device: str, hardware: Hardware) -> list[Report]:
    """Every engine that can run, in every dtype, on every case that it accepts."""
    cases = _cases()
    reports = []
    for dtype in DTYPES:
        expected: dict[str, dict[str, Tensor]] = {}
        for engine in _engines():
            if engine.backend == "reference":
                continue
            checks = []
            for case in cases:
                if engine.why_not(_case_request(case, hardware, dtype)) is not None:
                    continue
                if case.name not in expected:
                    expected[case.name] = _differentiate(case, dtype, "cpu", "reference")
                checks.append(_check(case, dtype, device, engine, expected[case.name]))
            if checks:
                reports.append(Report(engine, dtype, TOLERANCES[dtype], tuple(checks)))
    return reports


def _case_request(case: Case, hardware: Hardware, dtype: torch.dtype) -> Request:
    return Request(
        hardware=hardware,
        dtype=dtype,
        head_dim=case.head_dim,
        group=case.group,
        masked=case.ignored is not None,
        dropout=False,
        differentiable=True,
        wants_lse=True,
    )


def _check(case: Case, dtype: torch.dtype, device: str, engine: Engine, expected: dict[str, Tensor]) -> Check:
    try:
        with _only(engine):
            actual = _differentiate(case, dtype, device, engine.backend)
    except RuntimeError as error:  # a kernel that this machine lacks after all: the thing to report, not to die of
        return Check(case.name, {}, f"{type(error).__name__}: {_first_line(error)}", passed=False)
    errors = {name: _relative_error(actual[name], expected[name]) for name in QUANTITIES}
    return Check(case.name, errors, None, passed=all(error <= TOLERANCES[dtype] for error in errors.values()))


def _differentiate(case: Case, dtype: torch.dtype, device: str, backend: str) -> dict[str, Tensor]:
    """`out, lse, dq, dk, dv` on the CPU; by the oracle in float64, whatever the dtype that the inputs are rounded to."""
    q, k, v, dout, dlse = (x.to(device) for x in case.tensors(dtype))
    if backend == "reference":
        q, k, v = (x.double() for x in (q, k, v))
    for x in (q, k, v):
        x.requires_grad_()
    if backend == "reference":
        out, lse = reference.dilated_attention(q, k, v, case.pattern, **case.options(device))
    else:
        out, lse = dilated_attention(q, k, v, case.pattern, backend=backend, return_lse=True, **case.options(device))
    reached = lse > -math.inf
    loss = (out * dout.to(out.dtype)).sum(dtype=lse.dtype) + (lse.masked_fill(~reached, 0.0) * dlse.to(lse.dtype)).sum()
    grads = torch.autograd.grad(loss, (q, k, v))
    return {name: x.detach().cpu().double() for name, x in zip(QUANTITIES, (out, lse, *grads))}


def _passed(reports: list[Report]) -> bool:
    return bool(reports) and all(report.passed for report in reports)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within it, torch computes on one thread: tensors this small gain nothing from more, and on a busy machine lose much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _only(engine: Engine) -> Iterator[None]:
    """Within it, a call runs on this engine and no other."""
    if engine.kernel is None:
        yield
        return
    with sdpa_kernel(SWITCHES[engine.kernel]):
        yield


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error as a share of the largest finite element; infinite where one is NaN or infinite and the other is not."""
    if actual.shape != expected.shape:
        return math.inf
    finite = expected.isfinite()
    if not torch.equal(actual[~finite], expected[~finite]) or not bool(actual[finite].isfinite().all()):
        return math.inf
    largest = expected[finite].abs().max().item() if bool(finite.any()) else 1.0
    error = (actual - expected)[finite].abs().max().item() if bool(finite.any()) else 0.0
    return error / largest if largest > 0.0 else error


def _print_reports(console: Console, reports: list[Report]) -> None:
    table = _table("self-check: largest error / largest element, against the definition")
    for column in ("engine", "dtype", "cases", *QUANTITIES, "allowed", "result"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("engine", "dtype", "result") else "right")
    for report in reports:
        errors = [f"{report.worst[name]:.0e}" for name in QUANTITIES]
        result = Text("pass", "green") if report.passed else Text("FAIL", "bold red")
        dtype = _spelled(report.dtype)
        table.add_row(str(report.engine), dtype, str(len(report.checks)), *errors, f"{report.tolerance:.0e}", result)
    console.print(table)
    for report in reports:
        for check in report.checks:
            if not check.passed:
                what = check.raised or ", ".join(
                    f"{name} {error:.1e}" for name, error in check.errors.items() if not error <= report.tolerance
                )
                console.print(Text(f"FAIL {report.engine} {_spelled(report.dtype)}, {check.case}: {what}"), soft_wrap=True)
    failed = sum(not check.passed for report in reports for check in report.checks)
    total = sum(len(report.checks) for report in reports)
    console.print(Text(f"{total - failed} of {total} checks pass" + (f", {failed} FAIL" if failed else "")))


def _as_json(machine: dict[str, Any], hardware: Hardware, reports: list[Report]) -> dict[str, Any]:
    """The report in JSON types. A reason of null: it can run. An error of null: not a finite number."""
    engines = [
        {
            "backend": engine.backend,
            "kernel": engine.kernel,
            "dtype": _spelled(dtype),
            "why_not": {call: reasons[dtype, call] for call in CALLS},
        }
        for engine in _engines()
        for reasons in (_reasons(engine, hardware),)
        for dtype in DTYPES
    ]
    checks = [
        {
            "backend": report.engine.backend,
            "kernel": report.engine.kernel,
            "dtype": _spelled(report.dtype),
            "tolerance": report.tolerance,
            "worst": {name: _finite(error) for name, error in report.worst.items()},
            "passed": report.passed,
            "cases": [
                {**asdict(check), "errors": {name: _finite(error) for name, error in check.errors.items()}}
                for check in report.checks
            ],
        }
        for report in reports
    ]
    return {"machine": machine, "engines": engines, "layouts": _layouts(), "checks": checks, "passed": _passed(reports)}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
