"""What `flexdilated doctor` prints: what this machine can run and why not, and whether it computes the right numbers."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict, replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexdilated._version import __version__
from flexdilated.backends import DispatchKey, choose, measured, why_not
from flexdilated.backends.dense import flash
from flexdilated.backends.measured import DEFAULT, FILE, NOTHING, PROVEN, SHIPPED, Crossover
from flexdilated.cli.selfcheck import DTYPES, BackendKernel, Report, all_passed, candidates, self_check
from flexdilated.core.hardware import Hardware, detect, dtype_name, recommended_dtype
from flexdilated.tuning.candidates import CANDIDATES
from flexdilated.tuning.checks import QUANTITIES

CALLS = ("plain", "masked", "dropout", "functions")
HEAD_DIM = 64


def examine(device: torch.device, *, as_json: bool) -> bool:
    """Print what `auto` takes and why, then the machine, every backend and its checks; whether all checks pass."""
    hardware, console = detect(device), Console()
    machine = _machine(device, hardware)
    if not as_json:
        console.print(*(Text(text, "bold") for text in _preferences(hardware).values()), sep="\n")
        console.print(*(Text(fault, "yellow") for fault in _faults()), _machine_table(machine), _backend_table(hardware), sep="\n")
    with Console(stderr=True).status("checking kernels") as status:
        reports = self_check(device, hardware, report_progress=lambda progress: status.update(f"checking {progress}"))
    if as_json:
        print(json.dumps(_as_json(machine, hardware, reports), indent=2, allow_nan=False))
    else:
        _print_reports(console, reports)
    return all_passed(reports)


def _machine(device: torch.device, hardware: Hardware) -> dict[str, Any]:
    """Facts by name, as JSON types."""
    capability = None if hardware.capability is None else ".".join(map(str, hardware.capability))
    return {
        "flexdilated": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "devices": _devices(),
        "device": str(device),
        "capability": capability,
        "threads": torch.get_num_threads(),
        "has_fast_bfloat16": hardware.has_fast_bfloat16,
        "recommended_dtype": dtype_name(recommended_dtype(hardware)),
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


def _request(hardware: Hardware, dtype: torch.dtype, call: str, *, trains: bool = True) -> DispatchKey:
    return DispatchKey(
        hardware=hardware,
        dtype=dtype,
        head_dim=HEAD_DIM,
        key_padding_mask=call == "masked",
        dropout=call == "dropout",
        modified=call == "functions",  # score_mod, mask_mod
        differentiable=trains,
        wants_lse=trains,
    )


def _faults() -> list[str]:
    """What fails with the installed versions, though no check of this command runs it."""
    fault = flash.activation_fault()
    return [] if fault is None else [fault]


def _preferences(hardware: Hardware) -> dict[str, str]:
    """What `backend="auto"` takes on each level of CUDA that is here, and on the examined device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    all_hardware = dict.fromkeys((hardware, *(detect(torch.device("cuda", i)) for i in range(count))))
    return {str(hardware): f"{hardware}: {_preference(hardware)}" for hardware in all_hardware}


def _preference(hardware: Hardware) -> str:
    """What `backend="auto"` takes, and where that was measured."""
    local = NOTHING if hardware.capability is None else measured.loaded(hardware.capability)
    plain = _request(hardware, torch.bfloat16, "plain")
    if local.crossovers:
        head_dims = sorted({c.head_dim for c in local.crossovers})
        choices = [f"at head dim {n}: {_measured_choice(replace(plain, head_dim=n), local.crossovers)}" for n in head_dims]
        text = f"auto takes {'; '.join(choices)}, by flexdilated tune on {local.date} ({local.path})"
        for (dtype, head_dim), names in local.constants.items():
            text += "".join(
                f"; {c.name} in {dtype}, head dim {head_dim}" for c in CANDIDATES if c.constants and {*c.constants} <= names
            )
        failed = [f"{', '.join(form)}" for form, is_right in local.checked.items() if not is_right]
        text += f". It leaves out what did not pass all checks: {'; '.join(failed)}" if failed else ""
    elif package := SHIPPED.get(hardware.device_class, NOTHING).crossovers:
        provenance = json.loads(FILE.read_text())[hardware.device_class]["provenance"][-1]
        where = f"{provenance.get('hardware', provenance.get('device_class'))}, torch {provenance['torch']}, {provenance['date']}"
        text = f"auto takes {_measured_choice(plain, package)}, by measurements shipped with flexdilated ({where})"
    else:
        text = f"auto takes {', then '.join(DEFAULT)}: nothing has been measured on this class of device"
    for name in () if local.crossovers else PROVEN:
        reason = measured.unproven(name, plain) or measured.unproven(name, replace(plain, group=2))
        if reason is not None and why_not(name, plain) is None:
            text += f". It leaves {name} out: {reason}. To check and measure it, run flexdilated tune ({measured.ESTIMATE})"
    if hardware.capability is not None and local.path is None:
        unused = ", ".join(map(str, measured.files_of_device(hardware.capability)))
        text += f". Not used, because damaged or measured with other versions: {unused}" if unused else ""
        off = f". Measurements of flexdilated tune are not read: {measured.VARIABLE}={measured.OFF}, or there is no home folder"
        text += off if measured.folder() is None else ""
    return text


def _measured_choice(plain: DispatchKey, crossovers: tuple[Crossover, ...]) -> str:
    """The backends of training calls, by dtype and number of tokens."""
    lengths = sorted({0} | {crossover.tokens for crossover in crossovers})
    dtypes_by_choice: dict[str, list[str]] = {}
    for name, dtype in DTYPES.items():
        parts, last = [], None
        for tokens in lengths:
            backend = choose("auto", replace(plain, dtype=dtype, num_tokens=tokens))
            if backend != last:
                parts.append(backend if last is None else f"from {tokens:,} tokens {backend}")
            last = backend
        dtypes_by_choice.setdefault(", ".join(parts), []).append(name)
    return "; ".join(f"{choice} in {', '.join(names)}" for choice, names in dtypes_by_choice.items())


def _reasons(candidate: BackendKernel, hardware: Hardware) -> dict[tuple[torch.dtype, str], str | None]:
    return {(dtype, call): candidate.why_not(_request(hardware, dtype, call)) for dtype in DTYPES.values() for call in CALLS}


def _backend_table(hardware: Hardware) -> Table:
    table = _table(f"what can run on {hardware}, head dim {HEAD_DIM}")
    table.add_column("backend", no_wrap=True)
    for dtype in DTYPES.values():
        table.add_column(dtype_name(dtype), no_wrap=True)
    table.add_column("why not", overflow="fold")
    for candidate in candidates():
        reasons = _reasons(candidate, hardware)
        cells = []
        for dtype in DTYPES.values():
            calls = [call for call in CALLS if reasons[dtype, call] is None]
            if not calls and candidate.why_not(_request(hardware, dtype, "plain", trains=False)) is None:
                calls = ["inference"]
            cells.append(
                Text("yes", "green") if len(calls) == len(CALLS) else Text("\n".join(calls) or "no", "yellow" if calls else "dim")
            )
        table.add_row(str(candidate), *cells, Text(_why(reasons)))
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
            limits.append(", ".join(map(dtype_name, dtypes)))
        if len(calls) < len(CALLS):
            limits.append(", ".join(calls))
        lines.append(f"{' '.join(limits)}: {reason}" if limits else reason)
    return "\n".join(lines)


def _print_reports(console: Console, reports: list[Report]) -> None:
    table = _table("self-check: largest error / largest element, against the definition")
    for column in ("backend", "dtype", "cases", *QUANTITIES, "allowed", "result"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("backend", "dtype", "result") else "right")
    for report in reports:
        errors = [f"{report.worst[name]:.0e}" for name in QUANTITIES]
        result = Text("pass", "green") if report.passed else Text("FAIL", "bold red")
        dtype = dtype_name(report.dtype)
        cases = f"{len(report.checks)}" if len(report.checks) == report.accepted else f"{len(report.checks)} of {report.accepted}"
        table.add_row(str(report.candidate), dtype, cases, *errors, f"{report.tolerance:.0e}", result)
    console.print(table)
    for report in reports:
        for check in report.checks:
            if not check.passed:
                failure = check.raised or ", ".join(
                    f"{name} {error:.1e}" for name, error in check.errors.items() if not error <= report.tolerance
                )
                console.print(Text(f"FAIL {report.candidate} {dtype_name(report.dtype)}, {check.case}: {failure}"), soft_wrap=True)
    failed = sum(not check.passed for report in reports for check in report.checks)
    total = sum(len(report.checks) for report in reports)
    console.print(Text(f"{total - failed} of {total} checks pass" + (f", {failed} FAIL" if failed else "")))


def _as_json(machine: dict[str, Any], hardware: Hardware, reports: list[Report]) -> dict[str, Any]:
    """The report in JSON types. A reason of null: it can run. An error of null: not a finite number."""
    rows = [
        {
            "backend": candidate.backend,
            "kernel": candidate.kernel,
            "dtype": dtype_name(dtype),
            "why_not": {call: reasons[dtype, call] for call in CALLS},
        }
        for candidate in candidates()
        for reasons in (_reasons(candidate, hardware),)
        for dtype in DTYPES.values()
    ]
    checks = [
        {
            "backend": report.candidate.backend,
            "kernel": report.candidate.kernel,
            "dtype": dtype_name(report.dtype),
            "tolerance": report.tolerance,
            "worst": {name: _finite(error) for name, error in report.worst.items()},
            "passed": report.passed,
            "accepted": report.accepted,
            "cases": [
                {**asdict(check), "errors": {name: _finite(error) for name, error in check.errors.items()}}
                for check in report.checks
            ],
        }
        for report in reports
    ]
    return {
        "machine": machine,
        "backends": rows,
        "auto": _preferences(hardware),
        "checks": checks,
        "faults": _faults(),
        "passed": all_passed(reports),
    }


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
