"""Check candidates against the definition, time those that are right, and keep the result where `backend="auto"` reads it."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flexdilated.attention import dilated_attention
from flexdilated.backends import DispatchKey, measured, why_not
from flexdilated.backends.measured import LARGEST_RATIO, WRONG, faster
from flexdilated.backends.triton import backend as triton_backend
from flexdilated.core.files import replaced
from flexdilated.core.hardware import Hardware, detect, dtype_name, recommended_dtype
from flexdilated.core.pattern import DilatedPattern
from flexdilated.tuning.candidates import CANDIDATES, SLOW, Candidate, forced
from flexdilated.tuning.checks import ENDED, Case, Runnable, definition_jobs, examined, verdict
from flexdilated.tuning.timing import DENSE_ROWS, NUM_HEADS, PATTERN, TimedCall, attention_call, dense_call, in_turns, inputs

HEAD_DIMS, LENGTHS = (64, 128), (1024, 8192, 65536)
ALL_DTYPES, ALL_HEAD_DIMS, ALL_LENGTHS = (torch.bfloat16, torch.float16, torch.float32), (64, 128, 256), (*LENGTHS, 262144)
WAYS = ("forward", "backward")
NEAR, PART = 0.05, 128  # how far results of timed calls may differ from those of sdpa, of the largest element in PART tokens

Json = dict[str, Any]


class Plan(NamedTuple):
    """What is checked and timed. Checked segments are long enough for tensor descriptors, and one is cut."""

    candidates: tuple[Candidate, ...]
    settings: tuple[tuple[torch.dtype, int], ...]  # dtype and head dim
    lengths: tuple[int, ...] = LENGTHS
    checked: DilatedPattern = DilatedPattern((512, 1540), (1, 3), window=200)
    checked_tokens: int = 1700
    group: int = 3
    rounds: int = 7


class Tuning(NamedTuple):
    """The result of `tune`: the kept file and its content, or the reason why there is nothing to tune."""

    path: Path | None = None
    content: Json | None = None
    reason: str | None = None
    is_complete: bool = True


def tune(
    device: torch.device | str | None = None,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    head_dims: Sequence[int] | None = None,
    everything: bool = False,
    processes: int | None = None,
    progress: Callable[[str, float], object] | None = None,
) -> Tuning:
    """Check and time the backends on a GPU, and keep for `backend="auto"` what is right and faster than `"sdpa"`.

    Every candidate runs 8 calls per head dim: outputs, log-sum-exp and gradients are compared with
    `flexdilated.reference`. Correct candidates are timed in turns with `"sdpa"` and a dense kernel. The result is one file in
    `$FLEXDILATED_CACHE`, else `$XDG_CACHE_HOME/flexdilated`, else `~/.cache/flexdilated`. A process reads it when it first uses the
    GPU; this process reads it again, except where it is a rank of a process group. An interrupt keeps what is done. Calls of
    `dilated_attention` time nothing.

    >>> tune("cpu").reason
    "nothing to tune on cpu: backend='auto' takes 'sdpa' there"

    Args:
        device: The GPU. Default: the current one.
        dtypes: Of the inputs. Default: the recommended one of the GPU.
        head_dims: Elements per head. Default: 64 and 128.
        everything: Three dtypes, three head dims, a longer sequence and `backend="flex"`, which compiles for minutes.
        processes: Processes that compile and check side by side. Default: one per CPU, at most 8. They import the main program,
            which must call `tune` under `if __name__ == "__main__":`. 0: none.
        progress: Called with a description of the current step and the share of work done.

    Raises:
        ValueError: If a head dim is not positive, or `FLEXDILATED_CACHE=off`.
        OSError: If the file cannot be written.
        RuntimeError: If no process could run a check, or the device could not compute the definition.
    """
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    hardware = detect(place)
    if hardware.capability is None:
        return Tuning(reason=f"nothing to tune on {hardware}: backend='auto' takes 'sdpa' there")
    if head_dims is not None and min(head_dims, default=0) < 1:
        raise ValueError(f"head_dims must be positive, got {tuple(head_dims)}")
    folder = measured.folder()
    if folder is None:
        raise ValueError(f"{measured.VARIABLE} must be a folder for results to be kept, got {os.environ.get(measured.VARIABLE)!r}")
    dtypes = dtypes or (ALL_DTYPES if everything else (recommended_dtype(hardware),))
    head_dims = head_dims or (ALL_HEAD_DIMS if everything else HEAD_DIMS)
    names = [candidate for candidate in CANDIDATES if everything or candidate.name not in SLOW]
    plan = Plan(tuple(names), tuple(itertools.product(dtypes, head_dims)), ALL_LENGTHS if everything else LENGTHS)
    reasons = {c.backend: [_why_not(c, hardware, *setting) for setting in plan.settings] for c in plan.candidates}
    if all(reason is not None for backend_reasons in reasons.values() for reason in backend_reasons):
        why = "; ".join(f"{name}: {backend_reasons[0]}" for name, backend_reasons in reasons.items())
        return Tuning(reason=f"nothing to tune on {hardware}: backend='auto' takes 'sdpa' there ({why})")
    environment = measured.environment(torch.cuda.get_device_name(place), hardware.capability)
    processes = min(8, os.cpu_count() or 1) if processes is None else processes
    return run(measured.path_of(folder, environment), environment, plan, place, processes, progress or (lambda text, share: None))


class Progress:
    """Counts finished steps for a function that shows them; a timed length counts as several checks."""

    LENGTH = 4

    def __init__(self, plan: Plan, show: Callable[[str, float], object]) -> None:
        steps_per_setting = 8 * len(plan.candidates) + len(WAYS) * len(plan.lengths) * self.LENGTH
        self.done, self.total, self.text, self.show = 0, steps_per_setting * len(plan.settings), "", show

    def begin(self, text: str) -> None:
        self.text = text
        self.add(0)

    def add(self, steps: int = 1) -> None:
        self.done += steps
        self.show(self.text, min(1.0, self.done / self.total))


def run(
    path: Path,
    environment: Json,
    plan: Plan,
    device: torch.device,
    processes: int,
    show: Callable[[str, float], object] = lambda text, share: None,
) -> Tuning:
    """Measure a plan, and add the results to a file. An interrupt keeps the finished results."""
    progress, is_complete = Progress(plan, show), True
    path.parent.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=path.parent).close()  # fail before minutes of work
    try:
        for setting in plan.settings:
            checks = _check(plan, setting, device, processes, progress)
            rows: list[Json] = []
            constants: tuple[str, ...] = ()
            for way in WAYS:
                timed, faster_constants = _time(plan, setting, device, progress, checks, way=way, constants=constants)
                rows, constants = rows + timed, constants + faster_constants
                about = {"dtype": dtype_name(setting[0]), "head_dim": setting[1]}
                measured_parts = {"measured": rows, "forms": [{"constants": constants}], "checks": checks}
                content = _read(path, environment)  # another process may have added to it
                for part, entries in measured_parts.items():
                    other_entries = [e for e in content[part] if not about.items() <= e.items()]
                    content[part] = other_entries + [about | entry for entry in entries]
                save(content | {"date": datetime.now(timezone.utc).date().isoformat()}, path)
    except KeyboardInterrupt:
        is_complete = False
    if not (dist.is_available() and dist.is_initialized()):  # ranks that have compared what they read must not change it
        measured.loaded.cache_clear()
        launch = sys.modules.get("flexdilated.backends.triton.launch")
        if launch is not None:
            launch.PLANS.clear()  # launches planned in forms that this process read before
    content = _read(path, environment)
    return Tuning(path if "date" in content else None, content, is_complete=is_complete)


def _read(path: Path, environment: Json) -> Json:
    """The content of a kept file, or that of an empty one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged file, which the next one replaces
        is_known = measured.parsed(path, environment).path is not None
    return json.loads(path.read_text()) if is_known else {"environment": environment, "measured": [], "forms": [], "checks": []}


def make(dtype: torch.dtype, name: str, case: Case, device: str) -> Runnable:
    """A candidate on a case."""
    candidate = next(c for c in CANDIDATES if c.name == name)
    options = {**case.options(torch.device(device)), "return_lse": True, "backend": candidate.backend}
    attend = lambda q, k, v: dilated_attention(q, k, v, case.pattern, **options)  # noqa: E731
    return Runnable(attend, partial(forced, candidate.backend, *candidate.constants), dtype)


def _why_not(candidate: Candidate, hardware: Hardware, dtype: torch.dtype, head_dim: int) -> str | None:
    request = DispatchKey(hardware, dtype, head_dim, differentiable=True)
    unasked = triton_backend.why_not_unasked(request) if candidate.backend == "triton" else None
    return why_not(candidate.backend, request) or unasked


def _check(plan: Plan, setting: tuple[torch.dtype, int], device: torch.device, processes: int, progress: Progress) -> list[Json]:
    """Check a dtype and head dim; a RuntimeError if no process could run a check."""
    dtype, head_dim = setting
    progress.begin(f"{dtype_name(dtype)}, head dim {head_dim}: compiling and checking")
    able = [c.name for c in plan.candidates if _why_not(c, detect(device), *setting) is None]
    job_options = (plan.checked, plan.checked_tokens, plan.group, (head_dim,))
    jobs = [job for c in able for job in definition_jobs(partial(make, dtype), c, *job_options, half=True)]
    verdicts = examined(jobs, str(device), processes, progress.add)
    if jobs and all(text == ENDED for job_verdicts in verdicts for text in job_verdicts.values()):
        raise RuntimeError('no check ran: its processes ended; call tune() under `if __name__ == "__main__":`, or with processes=0')
    return [
        {"candidate": job.candidate, "form": job.form(way), "case": job.case.name, "found": text}
        for job, job_verdicts in zip(jobs, verdicts)
        for way, text in job_verdicts.items()
    ]


def _time(
    plan: Plan,
    setting: tuple[torch.dtype, int],
    device: torch.device,
    progress: Progress,
    checks: list[Json],
    *,
    way: str,
    constants: tuple[str, ...],
) -> tuple[list[Json], tuple[str, ...]]:
    """The times of a dtype, head dim and way, and the constants of the fastest right form. Adds wrong results to `checks`.

    Calls run with `constants`. Lengths for which the memory of the device does not suffice are left out.
    """
    (dtype, head_dim), training = setting, way == "backward"
    able = [c for c in plan.candidates if _is_right(c, way, checks)]
    rows: list[Json] = []
    for tokens in plan.lengths:
        call = "training" if training else "inference"
        progress.begin(f"{dtype_name(dtype)}, head dim {head_dim}: timing {call} at {tokens:,} tokens")
        verdicts: dict[str, str] = {}
        with suppress(torch.OutOfMemoryError):
            calls = dict(_calls(able, inputs(tokens, head_dim, dtype, device), constants, verdicts, training=training))
            times = in_turns(calls, device, plan.rounds)
            rows.append({"training": training, "tokens": tokens, "ms": {c: round(1e3 * s, 4) for c, s in times.items()}})
        able = [c for c in able if not verdicts.get(c.name, "").startswith(WRONG)]
        checks += [{"candidate": c, "form": way, "case": f"beside sdpa at {tokens} tokens", "found": verdicts[c]} for c in verdicts]
        progress.add(Progress.LENGTH)
    best = _best(able, rows)
    for row in rows:
        ms = row["ms"]
        for c in able:
            if not c.is_form:
                backend_ms = ms.get(best.name if c.backend == "triton" and best else c.name)
                row[f"{c.backend}_over_sdpa"] = None if backend_ms is None else round(backend_ms / ms["sdpa"], 3)
        row["form"] = best.name if best else None
        if "dense" in ms:
            least = min(ms[c] for c in ("sdpa", *(c.name for c in able)) if c in ms)
            row["of_dense"] = round(_pairs(row["tokens"]) / least * ms["dense"], 3)
    return rows, best.constants if best else ()


def _is_right(candidate: Candidate, way: str, checks: Sequence[Json]) -> bool:
    """Whether to time a candidate: a form only in its own direction, and only if it is right for all numbers of heads."""
    if candidate.direction not in (None, way):
        return False
    forms = [f"{form}{heads}" for form in WAYS[: WAYS.index(way) + 1] for heads in ("", ", grouped heads")[: 1 + candidate.is_form]]
    verdicts = [c["found"] for c in checks if c["candidate"] == candidate.name and c["form"] in forms]
    return "right" in verdicts and not any(text.startswith(WRONG) for text in verdicts)


def _calls(
    able: Sequence[Candidate], x: tuple[Any, ...], constants: tuple[str, ...], verdicts: dict[str, str], *, training: bool
) -> Iterator[tuple[str, TimedCall]]:
    """Calls that run and agree with sdpa, after one call each. `verdicts` receives the other verdicts, except out of memory."""
    expected: tuple[torch.Tensor, ...] = ()
    for candidate in (Candidate("sdpa", "sdpa"), *able, Candidate("dense", "dense")):
        name, plain = candidate.name, dense_call(x, training=training) if candidate.name == "dense" else None
        call = plain or _within(candidate, attention_call(candidate.backend, x, training=training), constants)
        try:
            actual = call()
        except (torch.OutOfMemoryError, NotImplementedError):
            if name == "sdpa":
                raise
            continue
        except Exception as error:  # compilers and drivers raise errors of any kind: leave the candidate out
            if name == "sdpa":
                raise
            if name != "dense":
                verdicts[name] = f"failed: {type(error).__name__}: {error}"[:400]
            continue
        expected = expected or actual
        if name != "dense" and (text := verdict(partial(_assert_near, actual, expected))) != "right":
            verdicts[name] = text
            continue
        yield name, call


def _within(candidate: Candidate, call: TimedCall, constants: tuple[str, ...]) -> TimedCall:
    """A call in the form of a candidate and with the chosen `constants`; launches are planned once."""
    plans: dict[Any, Any] = {}

    def formed() -> tuple[torch.Tensor, ...]:
        with forced(candidate.backend, *constants, *candidate.constants, plans=plans):
            return call()

    return formed


def _assert_near(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Results decrease along a causal sequence: compare each part with its own largest element."""
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected):
        errors, sizes = (x.float().abs().amax((0, 2, 3)).split(PART) for x in (a.float() - e.float(), e))
        largest = torch.stack([error.max() / size.max() for error, size in zip(errors, sizes)]).max().item()
        assert largest <= NEAR, f"{name} differs from that of sdpa by {largest:.1e} of the largest element in {PART} tokens"


def _best(able: Sequence[Candidate], rows: Sequence[Json]) -> Candidate | None:
    """The fastest form of the Triton kernels over all lengths; the usual form unless another one gains enough."""
    usual = next((c for c in able if c.backend == "triton" and not c.is_form), None)
    best, least = usual, LARGEST_RATIO
    for form in [c for c in able if c.is_form] if usual else []:
        ratios = [row["ms"][form.name] / row["ms"]["triton"] for row in rows if {form.name, "triton"} <= row["ms"].keys()]
        if ratios and statistics.geometric_mean(ratios) < least:
            best, least = form, statistics.geometric_mean(ratios)
    return best


def _pairs(tokens: int) -> float:
    """The scored pairs of the pattern, divided by the scored pairs of the dense call."""
    rows = min(DENSE_ROWS, tokens)
    return PATTERN.count_pairs(tokens, NUM_HEADS, is_causal=True) / (NUM_HEADS * (tokens // rows) * rows * (rows + 1) / 2)


def chosen(content: Json, entry: Json) -> str:
    """What `backend="auto"` takes for the calls of a measured entry: a backend, or a form of the Triton kernels."""
    backend, is_right = faster(entry), measured.checked(content["checks"])
    if any(is_right.get((backend, way, entry["dtype"])) is False for way in WAYS[: 1 + entry["training"]]):
        return "sdpa"
    return str(entry["form"]) if backend == "triton" else backend


def save(report: dict[str, Any], path: Path) -> None:
    """Write a report completely or not at all. Makes the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        file.write((json.dumps(report, indent=1) + "\n").encode())
