"""`python -m benchmarks.gpu --all` at its quick sizes: order, resuming, limits of time, and what a wrong backend stops."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import crossover, environment, gpu, gpu_backends, gpu_checks, gpu_steps
from benchmarks.gpu_steps import CHECKED, FORMS, QUICK, TIMED
from flexdilated.backends import measured
from flexdilated.core.pieces import plan_pieces
from flexdilated.tuning import checks

pytestmark = [pytest.mark.lab, pytest.mark.filterwarnings("ignore:pattern with segments:UserWarning")]


class CutOff(BaseException):
    """The end of the program in the middle of a step."""


class Clock:
    """Time that passes only in steps, `seconds` each."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any], list[str]]]:
    """Run the command; the exit status, the report, and what ran: backends checked (`check sdpa`) and timed, in order.

    No kernel runs: every comparison is right and every backend takes 1 ms, unless `verdicts` and `attempts` say otherwise.
    """
    happened: list[str] = []

    def run(
        *words: str,
        verdicts: Callable[[Any], dict[str, str]] = lambda job: {"forward": "right", "backward": "right"},
        attempts: Callable[[Any, Any], dict[str, Any]] | None = None,
        clock: Clock | None = None,
    ) -> tuple[int, dict[str, Any], list[str]]:
        def examine(job: Any, device: str) -> dict[str, str]:
            if f"check {job.candidate}" not in happened:
                happened.append(f"check {job.candidate}")
            return verdicts(job)

        def attempt(device: Any, backend: Any, pattern: Any, setting: Any) -> dict[str, Any]:
            if clock is not None:
                clock.now += clock.seconds
            happened.append(backend.name)
            if attempts is not None:
                return attempts(backend, setting)
            trained = {} if backend.why_no_training("cpu") else {"backward_ms": 1.0, "backward_tflops": 2.0}
            return {"status": "measured", "forward_ms": 1.0, "forward_tflops": 1.0, **trained}

        monkeypatch.setattr(checks, "examine", examine)
        monkeypatch.setattr(gpu_backends, "attempt", attempt)
        if clock is not None:
            monkeypatch.setattr(gpu_steps.time, "monotonic", clock.monotonic)
        happened.clear()
        state = tmp_path / "state.json"
        status = gpu.main(["--all", "--quick", "--device", "cpu", "--processes", "0", "--state", str(state), *words])
        return status, json.loads(state.read_text()), list(happened)

    return run


def kept(folder: Path, name: str) -> Any:
    (path,) = (folder / "state").glob(name)
    return json.loads(path.read_text())


def test_everything_is_checked_then_timed_and_kept(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = measured.FILE.read_text()
    status, report, happened = command()
    assert status == 0
    checks = [f"check {name}" for name in CHECKED]
    assert happened[: len(checks)] == checks
    dense = [name for name in happened if name.startswith("dense")]
    assert happened[len(checks) : len(checks) + len(dense)] == dense
    settings = list(gpu_steps.backend_settings(QUICK))
    assert happened[len(checks) + len(dense) :] == list(TIMED) * len(settings) == [m["backend"] for m in report["measurements"]]
    assert len(settings) == len(set(settings))
    assert {(s.group > 1, s.documents > 1, s.is_causal, s.num_tokens) for s in settings} >= {
        (grouped, packed, True, n) for grouped, packed in ((False, False), (True, False), (False, True)) for n in QUICK.tokens
    }
    assert {step["status"] for step in report["steps"].values()} == {"done"}
    assert [run["all"] for run in kept(tmp_path, "*-attention.json")["runs"]] == [True]
    found = kept(tmp_path, "measured.json")["cpu"]["checks"]
    assert [(e["candidate"], e["form"], e["dtype"]) for e in found] == [
        (backend, form, dtype) for backend in measured.PROVEN for form in FORMS for dtype in ("bfloat16", "float32")
    ]
    for entry in found:
        assert entry["source"] == environment.source_of(entry["candidate"], entry["form"])
        assert (entry["commit"], entry["date"]) == (report["commit"], report["date"])
    shown = capsys.readouterr().out
    assert "8 of 8 cases right" in shown
    assert "1 / 2" in shown
    assert measured.FILE.read_text() == before


def test_the_checked_pieces_take_every_way_of_the_triton_kernels() -> None:
    """Loads by descriptors and through pointers, and launches that pieces share."""
    groups = pytest.importorskip("flexdilated.backends.triton.groups")
    sizes = gpu_steps.FULL
    for job in checks.definition_jobs(gpu_checks.backend_call, "triton", sizes.checked, sizes.checked_tokens, sizes.group, (64,)):
        case = job.case
        borders = tuple(itertools.pairwise(case.borders or (0, case.num_tokens)))
        pieces = plan_pieces(case.pattern, borders, case.kv_heads, case.is_causal)
        assert {piece.rows >= groups.LEAST_DESCRIBED_ROWS for piece in pieces} == {False, True}
        assert any(len(some) > 1 for some in groups.together(pieces)) == (case.borders is not None)


def test_a_run_that_was_cut_off_goes_on_after_its_last_step(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def attempts(backend: Any, setting: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise CutOff
        return {"status": "measured", "forward_ms": 1.0, "forward_tflops": 1.0}

    with pytest.raises(CutOff):
        command("--backends", "sdpa", attempts=attempts)
    status, report, happened = command("--backends", "sdpa", attempts=attempts)
    assert status == 0
    assert "check sdpa" not in happened
    dense = [(m["backend"], m["num_tokens"], m["is_causal"], m["group"], m["documents"]) for m in report["dense"]]
    assert dense == [
        (backend, s.num_tokens, s.is_causal, s.group, s.documents)
        for s in gpu_steps.dense_settings(QUICK)
        for backend in ("dense flash_attention", "dense flash-attn-4")
    ]
    assert command("--backends", "sdpa")[2] == []
    assert command("--backends", "sdpa", "--commit", "other")[2][0] == "check sdpa"
    monkeypatch.setattr(gpu_steps, "source_of", lambda backend, form: "changed")
    assert command("--backends", "sdpa", "--commit", "other")[2][0] == "check sdpa"


def test_no_step_starts_that_would_not_end_in_time(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every time takes 25 seconds: of 156, a seventh would end after 175."""
    status, report, happened = command("--backends", "sdpa", "--minutes", "1.4", clock=Clock(25.0), verdicts=dict)
    assert status == 3
    assert happened == []  # 90 seconds are expected of a check
    assert "steps remain, from 'check sdpa' on: give the same command again" in " ".join(capsys.readouterr().out.split())
    status, _, happened = command("--backends", "sdpa", "--minutes", "2.6", clock=Clock(25.0))
    assert (status, happened[0], len(happened)) == (3, "check sdpa", 1 + 6)
    assert len(kept(tmp_path, "*-attention.json")["runs"][0]["dense"]) == 6
    assert kept(tmp_path, "measured.json")["cpu"]["checks"] == []
    assert report["checks"] == []


@pytest.mark.parametrize(
    ("form", "verdict"),
    [*((form, "wrong: dq") for form in FORMS), (FORMS[0], "failed: CompilationError"), (FORMS[3], "cannot run")],
)
def test_a_form_that_is_wrong_is_not_timed_and_all_others_are(
    form: str, verdict: str, command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verdicts(job: Any) -> dict[str, str]:
        bad = job.candidate == "triton" and job.case.ignored is not None
        return {name: verdict if bad and job.form(name) == form else "right" for name in ("forward", "backward")}

    status, report, _ = command(verdicts=verdicts)
    stops = not verdict.startswith("cannot")
    assert status == int(stops)
    direction, grouped = form.partition(",")[0], "," in form
    for m in report["measurements"]:
        hit = stops and m["backend"] == "triton" and (m["group"] > 1) == grouped
        assert ("forward_ms" in m) == (not hit or direction == "backward")
        assert ("backward_ms" in m) == (not hit)
        if hit and direction == "forward":
            assert m["reason"].startswith(f"its {form} is not right (triton, mask, ")
            assert m["reason"].endswith(f"{verdict})")
    ran = [(entry["candidate"], entry["form"]) for entry in kept(tmp_path, "measured.json")["cpu"]["checks"]]
    lost = {form, f"backward{', grouped heads' * grouped}"} if stops else set()
    assert list(dict.fromkeys(ran)) == [
        (backend, f) for backend in measured.PROVEN for f in FORMS if (backend, f) not in {("triton", x) for x in lost}
    ]
    assert (verdict in " ".join(capsys.readouterr().out.split())) == stops


def test_crossovers_are_of_backends_that_are_right_and_run(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They replace those of the device once no step remains."""
    asked: list[list[str]] = []

    def measure(backends: list[str], dtype: torch.dtype, head_dim: int, lengths: Any, device: str) -> list[dict[str, Any]]:
        asked.append(backends)
        return [{"dtype": str(dtype), "head_dim": head_dim}]

    monkeypatch.setattr(crossover, "measure", measure)
    _, report, _ = command()
    before = json.loads(measured.FILE.read_text())
    file = tmp_path / "state" / "measured.json"

    def kept_file(*steps: gpu_steps.Step) -> Any:
        gpu_steps.write_kept(report, steps, tmp_path, file, "cpu", ["--all"])
        return json.loads(file.read_text())

    gpu_steps.time_crossovers(report, torch.float32, 64, "cpu")
    assert kept_file(gpu_steps.Step("", "remains", 0.0, print))["cpu"]["measured"] == before["cpu"]["measured"]
    report["checks"].append({"backend": "triton", "form": "backward", "case": "", "found": "wrong: dq"})
    gpu_steps.time_crossovers(report, torch.float32, 128, "cpu")
    report["measurements"] = [m for m in report["measurements"] if m["backend"] != "flash"]
    gpu_steps.time_crossovers(report, torch.float32, 256, "cpu")
    assert asked == [["triton", "flash"], ["flash"]]
    found = kept_file()
    assert found["sm_90"] == before["sm_90"]
    assert found["cpu"]["measured"] == [{"dtype": "torch.float32", "head_dim": d} for d in (64, 128)]
    (about,) = found["cpu"]["provenance"]
    assert (about["command"], about["commit"]) == ("python -m benchmarks.gpu --all", report["commit"])


def test_a_cuda_error_goes_on_in_another_process(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(BaseException):
        pass

    def execv(program: str, words: list[str]) -> None:
        raise Replaced(words)

    def attempts(backend: Any, setting: Any) -> dict[str, Any]:
        return {"status": "failed", "reason": "RuntimeError: CUDA error: an illegal memory access was encountered"}

    monkeypatch.setattr(gpu_steps.os, "execv", execv)
    with pytest.raises(Replaced) as caught:
        command("--backends", "sdpa", "--minutes", "8", attempts=attempts)
    words = caught.value.args[0]
    assert words[1:4] == ["-m", "benchmarks.gpu", "--all"]
    assert 7 < float(words[-1]) < 8
    status, report, _ = command("--backends", "sdpa")
    assert status == 1
    assert [m["status"] for m in report["dense"]].count("failed") == 1


def ends_its_process(name: str, case: Any, device: str) -> dict[str, str]:
    """What a job does to the others: one process ends, another has a fault at first."""
    if name == "ends":
        os._exit(3)
    path = Path(name)
    path.write_text(path.read_text() + "." if path.exists() else "")
    return {"forward": "right", "backward": "right" if path.read_text() else "failed: CUDA error"}


@pytest.mark.slow
def test_a_process_that_ends_fails_its_own_job_alone(tmp_path: Path) -> None:
    case = checks.Case("", QUICK.checked)
    jobs = [checks.Job(ends_its_process, name, case) for name in (str(tmp_path / "a"), "ends", str(tmp_path / "b"))]
    right = {"forward": "right", "backward": "right"}
    ended = {"forward": "failed: the process ended", "backward": "failed: the process ended"}
    found = checks.examined(jobs, "cpu", 1)
    assert (found[1], len(found)) == (ended, 3)
    assert checks.examined(jobs[::2], "cpu", 1) == [right, right]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in triton's interpreter")
@pytest.mark.parametrize("planted", [None, "out", "dk"])
def test_checks_find_what_is_wrong_in_the_direction_where_it_is(planted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the Triton kernels, with grouped heads; the output or a gradient is off by a twentieth in one row."""
    launch = pytest.importorskip("flexdilated.backends.triton.launch")
    forward, backward = launch.forward, launch.backward

    def off(*arguments: Any, **options: Any) -> None:
        forward(*arguments, **options)
        arguments[0][0, 7] *= 1.05

    def off_backward(grads: Any, *arguments: Any, **options: Any) -> None:
        backward(grads, *arguments, **options)
        grads[1][0, 7] *= 1.05

    monkeypatch.setattr(launch, "forward", off if planted == "out" else forward)
    monkeypatch.setattr(launch, "backward", off_backward if planted == "dk" else backward)
    job = checks.definition_jobs(
        gpu_checks.backend_call, "triton", QUICK.checked, QUICK.checked_tokens, QUICK.group, QUICK.head_dims
    )[1]
    found = checks.examine(job, "cpu")
    assert (found["forward"] == "right") == (planted != "out")
    assert found["backward"].startswith("wrong: dk: " if planted == "dk" else ("wrong", "right"))
    assert found["backward"] == "right" or planted is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in triton's interpreter")
@pytest.mark.parametrize("planted", [None, "forward", "backward"])
def test_merging_is_checked(planted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    merging = pytest.importorskip("flexdilated.backends.triton.merging")
    if planted is not None:
        monkeypatch.setattr(merging, "merge_into" if planted == "forward" else "add_to", lambda *tensors: None)
    case = checks.Case("", QUICK.checked, num_tokens=50, kv_heads=3, head_dim=16)
    found = gpu_checks.merges("merging", case, "cpu")
    assert {name for name, text in found.items() if text != "right"} == ({planted} if planted else set())


def test_calls_of_other_bits_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def attend(x: Any, pattern: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        return x.q * 1.0 + (calls == 3) * 2**-10, x.q.float().sum(-1)

    backend = gpu_backends.Backend("triton", attend, lambda pattern, device: None)
    monkeypatch.setattr(gpu_checks, "BACKENDS", (backend,))
    case = checks.Case("", QUICK.checked, head_dim=16, lse_gradient=False)
    found = gpu_checks.repeatable("triton", case, "cpu", calls=5)
    assert found["forward"] == "wrong: bits of call 3 differ from those of call 1"


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--all", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("--all needs a CUDA device, and torch sees none")
