"""Check every kernel on a GPU, then time what is right: `python -m benchmarks.gpu --all`.

An estimated 25 minutes on one H100 or H200. Finished steps are kept in `runs/bench_gpu_all.json`: the same command continues there,
while the code is unchanged. `--minutes 9` ends before a limit of ten minutes. Only what is right is timed.
Each run ends with tables, and with these files, written from all finished steps:

    benchmarks/results/<device>-attention.json, <device>-tiles.json    what was measured
    flexdilated/backends/measured.json                                 what `backend="auto"` reads

Exit status: 0 all is done and right, 1 something is wrong or failed, 2 there is no GPU, 3 steps remain.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Column, Table
from torch.nn.attention import SDPBackend

from benchmarks import crossover, gpu_backends, tiles
from benchmarks.attention import SMALL_LONGNET
from benchmarks.environment import provenance, save, source_of
from benchmarks.gpu_backends import Backend, Device, Setting, mask_name
from benchmarks.gpu_checks import backend_call, merges, repeatable
from flexdilated import DilatedPattern
from flexdilated.backends.measured import CHALLENGERS, FILE, PROVEN, WRONG
from flexdilated.core.hardware import detect
from flexdilated.tuning.checks import Case, Job, definition_jobs, examined

STATE, RESULTS = Path("runs/bench_gpu_all.json"), Path(__file__).parent / "results"
CHECKED = ("triton", "triton_host", "triton_ahead", "triton_sums", "sdpa", "sdpa_flash", "sdpa_efficient", "flash")  # in this order
TIMED = ("sdpa", "sdpa_flash", "triton", "triton_host", "triton_ahead", "triton_sums", "flash")
REPEATABLE = {"triton", "triton_host", "triton_ahead"}  # in every bit: `triton_sums` adds dq in any order
FORMS = tuple(f"{direction}{heads}" for heads in ("", ", grouped heads") for direction in ("forward", "backward"))
ATTEMPTS = 2  # a step that was cut off so often is not started again: its kernel may never return
RATES = "useful TFLOP/s forward / backward"
WIDTH = 190  # of tables that go to a file
HANGS = 600.0  # seconds after which a step ends the program

Report = dict[str, Any]


class Sizes(NamedTuple):
    """What is checked and timed."""

    heads: int
    group: int  # query heads that share a key head, in settings with grouped heads
    head_dims: tuple[int, ...]
    pattern: DilatedPattern
    tokens: tuple[int, int]
    dense: tuple[tuple[int, int], ...]  # rows, and the number of sequences that makes equal work
    documents: int
    checked: DilatedPattern
    checked_tokens: int


# LongNet's pieces have 2,048 to 2,731 rows. The checked segments are long enough for tensor descriptors, and one is cut.
LONG = DilatedPattern((512, 1540), (1, 3))
FULL = Sizes(12, 3, (64, 128), DilatedPattern.longnet(), (1 << 17, 1 << 20), ((2048, 64), (16384, 1)), 24, LONG, 1700)
QUICK = Sizes(6, 3, (16,), SMALL_LONGNET, (64, 128), ((32, 2), (64, 1)), 3, DilatedPattern((16, 23), (1, 2)), 43)


class Step(NamedTuple):
    """`run` adds to the report; `seconds` is an estimate, until a step of the same `kind` has run."""

    kind: str
    name: str
    seconds: float
    run: Callable[[Report], None]


# -- steps ----------------------------------------------------------------------------------------------------------------------


def check(report: Report, jobs: Sequence[Job], device: str, processes: int) -> None:
    """Add the verdicts of jobs."""
    for job, verdicts in zip(jobs, examined(jobs, device, processes), strict=True):
        for direction, text in verdicts.items():
            report["checks"].append({"backend": job.candidate, "form": job.form(direction), "case": job.case.name, "found": text})


def wrong(report: Report, backend: str, form: str) -> str | None:
    """Why a backend must not be timed in a form, or None."""
    concerned = (backend, "merging") if backend.startswith(("sdpa", "flash")) else (backend,)
    for entry in report["checks"]:
        if entry["backend"] in concerned and entry["form"] == form and entry["found"].startswith(WRONG):
            return f"its {form} is not right ({entry['backend']}, {entry['case']}: {entry['found']})"
    step = report["steps"].get(f"check {backend}", {})
    return f"its check failed ({step['reason']})" if step.get("status") == "failed" else None


def time_one(report: Report, into: str, backend: Backend, pattern: DilatedPattern, setting: Setting, device: str) -> None:
    """Time a backend in the directions in which it is right."""
    heads = ", grouped heads" if setting.group > 1 else ""
    forward, backward = (wrong(report, backend.name, f"{direction}{heads}") for direction in ("forward", "backward"))
    record = {"status": "skipped", "reason": forward}
    if forward is None:
        timed_backend = backend if backward is None else backend._replace(why_no_training=lambda device: backward)
        record = gpu_backends.attempt(Device(device), timed_backend, pattern, setting)
    report[into].append({"backend": backend.name, **asdict(setting)} | record)


def time_device(report: Report, device: str) -> None:
    sizes = gpu_backends.FULL if device == "cuda" else gpu_backends.QUICK
    report["device"] = gpu_backends.device_rates(Device(device), sizes)


def time_tiles(report: Report, head_dim: int, folder: Path) -> None:
    """Time today's tiles of every kernel and others."""
    path = folder / f"tiles-{head_dim}.json"
    tiles.main(["--head-dims", str(head_dim), "--output", str(path), "--commit", report["commit"]])
    report["tiles"] += json.loads(path.read_text())["measurements"]


def time_crossovers(report: Report, dtype: torch.dtype, head_dim: int, device: str) -> None:
    """Time the right backends beside sdpa, for `backend="auto"`."""
    right = {m["backend"] for m in report["measurements"] if "backward_ms" in m}
    backends = [name for name in CHALLENGERS if name in right and not any(wrong(report, name, form) for form in FORMS[:2])]
    if backends:
        report["crossovers"] += list(crossover.measure(backends, dtype, head_dim, crossover.GPU_LENGTHS, device))


def dense_settings(sizes: Sizes) -> Iterator[Setting]:
    for head_dim in sizes.head_dims:
        for rows, batch in sizes.dense:
            for is_causal in (False, True):
                yield Setting("dense", is_causal, sizes.heads, head_dim, rows, batch=batch)
        yield Setting("dense", True, sizes.heads, head_dim, sizes.dense[-1][0], group=sizes.group)
        yield Setting("dense", True, sizes.heads, head_dim, sizes.tokens[0], documents=sizes.documents)


def backend_settings(sizes: Sizes) -> Iterator[Setting]:
    short, long = sizes.tokens
    for num_tokens in sizes.tokens:
        for is_causal in (False, True):
            for head_dim in sizes.head_dims:
                yield Setting("longnet", is_causal, sizes.heads, head_dim, num_tokens)
    for head_dim in sizes.head_dims:
        base = Setting("longnet", True, sizes.heads, head_dim, short)
        yield replace(base, group=sizes.group)
        yield replace(base, group=sizes.group, is_causal=False)
        yield replace(base, documents=sizes.documents)
        yield replace(base, documents=sizes.documents, group=sizes.group)
        yield replace(base, num_tokens=long, group=sizes.group)
        yield replace(base, num_tokens=long, documents=sizes.documents)


def spelled(setting: Setting) -> str:
    """A setting in words."""
    words = [setting.pattern, mask_name(setting.is_causal), f"D={setting.head_dim}", f"N={setting.num_tokens}"]
    words += [f"B={setting.batch}"] if setting.batch > 1 else []
    words += [f"{setting.num_heads}:{setting.num_heads // setting.group} heads"] if setting.group > 1 else []
    words += [f"{setting.documents} documents"] if setting.documents > 1 else []
    return " ".join(words)


def steps(options: argparse.Namespace, sizes: Sizes) -> list[Step]:
    """All steps: checks before times, and what tells most first."""
    device, on_gpu, asked = options.device, options.device == "cuda", options.backends
    backends = [backend for backend in gpu_backends.BACKENDS if backend.name in asked]
    what = (sizes.checked, sizes.checked_tokens, sizes.group, sizes.head_dims)
    jobs = {name: definition_jobs(backend_call, name, *what) for name in asked}
    one = Case("", sizes.pattern, num_tokens=sizes.tokens[0] // 8, kv_heads=4, lse_gradient=False)
    cases = [replace(one, name=f"bits of 100 calls, D={d}", group=g, head_dim=d) for g in (sizes.group, 1) for d in sizes.head_dims]
    for name in REPEATABLE & set(asked):
        jobs[name] += [Job(repeatable, name, case) for case in cases]
    if on_gpu:
        rows = [
            Case(f"D={d}", sizes.checked, num_tokens=50, kv_heads=3, head_dim=d, group=g)
            for g in (1, sizes.group)
            for d in sizes.head_dims
        ]
        jobs["merging"] = [Job(merges, "merging", case) for case in rows]
    order = [name for name in ("triton", "merging", *CHECKED[1:]) if name in jobs]
    run = partial(check, device=device, processes=options.processes)
    planned = [Step("check", f"check {name}", 90.0, partial(run, jobs=jobs[name])) for name in order]
    planned.append(Step("device", "matrix product and copy", 15.0, partial(time_device, device=device)))

    kernels = [gpu_backends.dense(kernel) for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)[: 1 + on_gpu]]
    for setting in dense_settings(sizes):
        # cuDNN takes about a second for each new length, forward and backward.
        for backend in (*kernels[: 1 if setting.documents > 1 else 2], gpu_backends.dense_flash_4()):
            one_time = partial(time_one, into="dense", backend=backend, pattern=gpu_backends.WHOLE, setting=setting, device=device)
            planned.append(Step("dense", f"{backend.name}, {spelled(setting)}", 8.0, one_time))
    for i, setting in enumerate(backend_settings(sizes)):
        flex = [e for e in gpu_backends.BACKENDS if e.name == "flex_packed_flash" and on_gpu and i == 0]  # it compiles for long
        for backend in (*(e for e in backends if e.name in TIMED), *flex):
            one_time = partial(
                time_one, into="measurements", backend=backend, pattern=sizes.pattern, setting=setting, device=device
            )
            planned.append(Step(f"time N={setting.num_tokens}", f"{backend.name}, {spelled(setting)}", 8.0, one_time))
    if on_gpu and "triton" in asked:
        for head_dim in tiles.HEAD_DIMS:
            one_time = partial(time_tiles, head_dim=head_dim, folder=options.state.parent)
            planned.append(Step("tiles", f"tiles, D={head_dim}", 90.0, one_time))
    if on_gpu:
        for dtype, head_dim in itertools.product(crossover.GPU_DTYPES, crossover.HEAD_DIMS):
            one_time = partial(time_crossovers, dtype=dtype, head_dim=head_dim, device=device)
            planned.append(Step("crossovers", f"crossovers, {dtype}, D={head_dim}", 45.0, one_time))
    return planned


# -- the run --------------------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", required=True)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no step that would end later")
    parser.add_argument("--backends", nargs="+", choices=CHECKED, default=CHECKED, help="only these backends")
    parser.add_argument("--state", type=Path, default=STATE, help="the finished steps; delete it to start from the first")
    parser.add_argument("--keep", type=Path, help="a folder for the kept files, instead of their places in this checkout")
    parser.add_argument(
        "--processes",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="worker processes for the checks; 0: none, in this process",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to test the command itself; results go to a folder beside --state"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--commit", help="of the working tree; only needed where git cannot tell it")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    if options.device == "cpu" and not options.quick:
        print("--all needs a CUDA device, and torch sees none; --all --quick --device cpu shows whether it runs", file=sys.stderr)
        return 2
    report = loaded(options, words)
    if report["commit"] == "unknown" and not options.quick:
        parser.error("git cannot tell the commit: give --commit, which the kept files record")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # flash-attn-4 then keeps what it compiled
    torch.manual_seed(2307)
    keep = options.keep or (options.state.with_suffix("") if options.quick else None)
    crossovers = FILE if keep is None else keep / FILE.name
    if keep is not None and not crossovers.exists():
        keep.mkdir(parents=True, exist_ok=True)
        crossovers.write_text(FILE.read_text())
    all_steps = steps(options, QUICK if options.quick else FULL)
    run_steps(report, all_steps, options, words)
    files = write_kept(report, all_steps, keep or RESULTS, crossovers, options.device, words)
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    for table in tables(report):
        console.print(table)
    console.print("\n".join(map(str, (options.state, *files))), soft_wrap=True, markup=False)
    remaining = [step.name for step in all_steps if not is_finished(report, step)]
    if remaining:
        console.print(f"{len(remaining)} of {len(all_steps)} steps remain, from {remaining[0]!r} on: give the same command again")
        return 3
    verdicts = [entry["found"] for entry in report["checks"]]
    verdicts += [m["status"] for m in (*report["dense"], *report["measurements"], *report["steps"].values())]
    return int(any(text.startswith(WRONG) for text in verdicts))


def loaded(options: argparse.Namespace, words: Sequence[str]) -> Report:
    """The report so far, or an empty one if there is none of this code, device and kind of sizes."""
    report: Report = {
        **provenance("gpu", options.device, words, options.commit),
        "all": True,
        "quick": options.quick,
        "dtype": str(gpu_backends.DTYPE).removeprefix("torch."),
        "note": "memory is relative to q, k, v, out and their gradients",
        "source": {backend: {form: source_of(backend, form) for form in FORMS} for backend in PROVEN},
        **{name: {} for name in ("steps", "device")},
        **{name: [] for name in ("checks", "dense", "measurements", "tiles", "crossovers")},
    }
    previous = json.loads(options.state.read_text()) if options.state.exists() else {}
    is_current = all(previous.get(key) == report[key] for key in ("commit", "hardware", "torch", "triton", "quick", "source"))
    return previous if is_current else report


def is_finished(report: Report, step: Step) -> bool:
    return report["steps"].get(step.name, {"status": "started"})["status"] != "started"


def run_steps(report: Report, all_steps: Sequence[Step], options: argparse.Namespace, words: Sequence[str]) -> None:
    """Run the steps that are not finished, until the next one would not end in time."""
    start, records = time.monotonic(), report["steps"]
    for i, step in enumerate(all_steps):
        if is_finished(report, step):
            continue
        attempt = records.get(step.name, {"attempts": 0})["attempts"] + 1
        if attempt > ATTEMPTS:
            records[step.name] = {"status": "failed", "reason": f"it was cut off {ATTEMPTS} times"}
            continue
        before = [record["seconds"] for record in records.values() if record.get("kind") == step.kind]
        began = time.monotonic()
        if began - start + max(before, default=step.seconds) > options.minutes * 60:
            break
        print(f"{(began - start) / 60:5.1f} min, step {i + 1} of {len(all_steps)}: {step.name}", flush=True)
        records[step.name] = {"status": "started", "attempts": attempt}
        save(report, options.state)
        if options.device == "cuda":
            faulthandler.dump_traceback_later(HANGS, exit=True)
        measured = len(report["dense"]), len(report["measurements"])
        ended = {"status": "done", "kind": step.kind}
        try:
            step.run(report)
        except (Exception, SystemExit) as error:  # the other steps are still of use
            ended |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:400]}
        faulthandler.cancel_dump_traceback_later()
        records[step.name] = {**ended, "seconds": time.monotonic() - began}
        save(report, options.state)
        for entry in (ended, *report["dense"][measured[0] :], *report["measurements"][measured[1] :]):
            if "CUDA error" in str(entry.get("reason")):  # nothing runs in this process any more
                minutes_left = options.minutes - (time.monotonic() - start) / 60
                os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *words, "--minutes", str(minutes_left)])
    save(report, options.state)


# -- what is kept and shown -----------------------------------------------------------------------------------------------------


def write_kept(
    report: Report, all_steps: Sequence[Step], folder: Path, crossovers: Path, device: str, words: Sequence[str]
) -> list[Path]:
    """Write the kept files from all finished steps; their paths."""
    name = report["hardware"].removeprefix("NVIDIA ").split()[0].lower()
    attention, tiled = folder / f"{name}-attention.json", folder / f"{name}-tiles.json"
    old = next((path for path in (attention, RESULTS / attention.name) if path.exists()), None)
    runs = [] if old is None else [run for run in json.loads(old.read_text())["runs"] if not run.get("all")]
    save({"runs": [*runs, {key: value for key, value in report.items() if key not in ("tiles", "crossovers")}]}, attention)
    table, level = json.loads(crossovers.read_text()), detect(device).device_class
    kept = table.setdefault(level, {"provenance": [], "measured": [], "forms": [], "checks": []})
    if report["crossovers"] and all(is_finished(report, step) for step in all_steps):  # replace what this level had, whole
        kept |= {"measured": report["crossovers"], "provenance": [crossover.about(device, words, report["commit"], "gpu")]}
    proven = ran(report, sorted({entry["dtype"] for entry in kept["measured"]}))
    forms = {(entry["candidate"], entry["form"]) for entry in proven}
    kept["checks"] = [e for e in kept["checks"] if (e["candidate"], e["form"]) not in forms] + proven
    kept["date"] = report["date"]
    save(table, crossovers)
    if {m["head_dim"] for m in report["tiles"]} < set(tiles.HEAD_DIMS):
        return [attention, crossovers]
    save(
        {key: value for key, value in report.items() if not isinstance(value, (dict, list))} | {"measurements": report["tiles"]},
        tiled,
    )
    return [attention, crossovers, tiled]


def ran(report: Report, dtypes: Sequence[str]) -> list[dict[str, str]]:
    """The entries of `checks` in `measured.json`: forms that are correct and timed, once per dtype compared with sdpa."""
    proven = []
    for backend in PROVEN:
        for form in FORMS:
            right = any((e["backend"], e["form"], e["found"]) == (backend, form, "right") for e in report["checks"])
            timed = any(
                m["backend"] == backend and (m["group"] > 1) == ("," in form) and f"{form.partition(',')[0]}_ms" in m
                for m in report["measurements"]
            )
            if right and timed and wrong(report, backend, form) is None:
                about = {"commit": report["commit"], "source": report["source"][backend][form], "date": report["date"]}
                entry = {"candidate": backend, "form": form, "found": "right", **about}
                proven += [entry | {"dtype": dtype} for dtype in dtypes]
    return proven


def tables(report: Report) -> Iterator[Table]:
    """Verdicts, rates of the dense kernels and of the backends, tiles, and steps that failed."""
    title = f"{report['hardware']}, torch {report['torch']}, triton {report['triton']}, {report['date']}, {report['commit'][:9]}"
    checks = Table("backend", "form", "compared with the definition", title=title)
    for backend, form in dict.fromkeys((entry["backend"], entry["form"]) for entry in report["checks"]):
        entries = [entry for entry in report["checks"] if (entry["backend"], entry["form"]) == (backend, form)]
        bad = [f"{entry['case']}: {entry['found']}" for entry in entries if entry["found"].startswith(WRONG)]
        right = sum(entry["found"] == "right" for entry in entries)
        verdict = f"{right} of {len(entries)} cases right" if right else entries[0]["found"][:200]
        checks.add_row(backend, form, f"[red]{len(bad)} of {len(entries)} cases not right: {bad[0][:200]}[/]" if bad else verdict)
    yield checks
    for key, caption in (("dense", RATES), ("measurements", f"{RATES}; peak memory as a multiple of q, k, v, out and gradients")):
        names = list(dict.fromkeys(m["backend"] for m in report[key]))
        rates = Table(
            Column("setting", no_wrap=True),
            *names,
            caption=caption,
            title=" and ".join(dict.fromkeys(m["pattern"] for m in report[key])),
        )
        cells: dict[str, dict[str, str]] = {}
        for m in report[key]:
            _, _, row = spelled(Setting(**{field.name: m[field.name] for field in fields(Setting)})).partition(" ")
            cells.setdefault(row, {})[m["backend"]] = _cell(m)
        for row, own_cells in cells.items():
            rates.add_row(row, *(own_cells.get(name, "") for name in names))
        yield rates
    if report["tiles"]:
        yield tiles.table({**report, "measurements": report["tiles"]})
    failed = Table("step that failed", "why")
    for name, step in report["steps"].items():
        if step["status"] == "failed":
            failed.add_row(name, step["reason"])
    if failed.row_count:
        yield failed


def _cell(m: dict[str, Any]) -> str:
    if "forward_tflops" not in m:
        return "-" if m["status"] == "skipped" else str(m["status"])
    memory = m.get("memory") if m["pattern"] != "dense" else None
    text = " / ".join(f"{m[key]:.0f}" if key in m else "-" for key in ("forward_tflops", "backward_tflops"))
    return text if memory is None else f"{text}; {memory:.2f}"
