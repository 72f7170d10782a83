"""The GPU benchmark at its quick sizes: it runs, and its report adds up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_backends as gpu
from flexdilated import DilatedPattern

pytestmark = pytest.mark.lab

ONE_GROUP = ("--patterns", "longnet", "--heads", "2", "--head-dims", "16", "--masks", "causal", "--tokens", "256")


def run(folder: Path, *options: str) -> dict[str, Any]:
    path = folder / "report" / "gpu.json"
    assert gpu.main(["--quick", "--device", "cpu", "--output", str(path), *options]) == 0
    return json.loads(path.read_text())


def test_useful_work_is_that_of_the_pairs() -> None:
    """Segments of 4 at rate 2 keep 2 x 2 pairs each, 3 of them when causal; 8 tokens have 2 segments."""
    pattern = DilatedPattern((4,), (2,))
    full, causal = (gpu.useful_flops(pattern, gpu.Setting("p", is_causal, 3, 16, 8)) for is_causal in (False, True))
    assert full == {"forward": 3 * 8 * 4 * 16, "backward": 2.5 * 3 * 8 * 4 * 16}
    assert causal["forward"] == 3 * 6 * 4 * 16


@pytest.mark.slow
def test_report_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(tmp_path, "--backends", "sdpa", "flash", *ONE_GROUP, "--commit", "abc")
    assert report["commit"] == "abc"
    assert report["torch"] == torch.__version__
    assert "--backends sdpa flash" in report["command"]
    assert {"hardware", "driver", "triton", "cuda", "date", "targets", "note"} <= set(report)
    assert min(report["device"].values()) > 0
    measured, skipped = report["measurements"]
    assert (skipped["backend"], skipped["status"]) == ("flash", "skipped")
    assert skipped["reason"]
    assert (measured["backend"], measured["status"], measured["num_tokens"]) == ("sdpa", "measured", 256)
    dense = report["dense"][0]
    pairs = {"sdpa": gpu.QUICK.patterns["longnet"].count_pairs(256, 2, is_causal=True), "dense": 2 * 256 * 257 // 2}
    for entry, count in ((measured, pairs["sdpa"]), (dense, pairs["dense"])):
        for side, factor in (("forward", 4 * 16), ("backward", 10 * 16)):
            assert entry[f"{side}_tflops"] == pytest.approx(factor * count / entry[f"{side}_ms"] / 1e9)
    for side in ("forward", "backward"):
        assert measured[f"{side}_of_dense"] == pytest.approx(measured[f"{side}_tflops"] / dense[f"{side}_tflops"])
    assert "matrix product" in capsys.readouterr().out
    assert (tmp_path / "report" / "gpu.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory"),
        (AssertionError("out: Tensor-likes are not close!"), "wrong result"),
        (RuntimeError("no kernel"), "failed"),
        (NotImplementedError("head_dim must be at most 120"), "skipped"),
    ],
)
def test_an_error_in_the_backward_keeps_the_forward(error: Exception, status: str) -> None:
    def forward(x: gpu.Inputs, pattern: DilatedPattern, is_causal: bool) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise error
        return gpu.dilated(x, pattern, is_causal, backend="sdpa")

    backend = gpu.Backend("sdpa", forward, lambda pattern, device: None)
    found = gpu.attempt(gpu.Device("cpu"), backend, gpu.QUICK.patterns["longnet"], gpu.Setting("longnet", False, 2, 16, 64))
    assert found["status"] == status
    assert found["reason"].endswith(str(error))
    assert found["forward_ms"] > 0


def test_a_wrong_result_is_reported() -> None:
    backend = gpu.Backend("zeros", lambda x, pattern, is_causal: torch.zeros_like(x.q), lambda pattern, device: None)
    found = gpu.attempt(gpu.Device("cpu"), backend, gpu.QUICK.patterns["longnet"], gpu.Setting("longnet", False, 2, 16, 64))
    assert found["status"] == "wrong result"
    assert "forward_ms" not in found


def test_switches_hold_in_either_direction_and_end_with_their_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from flexdilated.backends.triton import launch

    for name in ("HOSTS", "AHEAD", "SUMS"):
        monkeypatch.setattr(launch, name, False, raising=False)  # a checkout may have none
    monkeypatch.setitem(launch.PLANS, ("planned",), ())
    held: list[tuple[bool, ...]] = []

    def switches() -> tuple[bool, ...]:
        return launch.DESCRIBES, launch.HOSTS, launch.AHEAD, launch.SUMS, bool(launch.PLANS)

    monkeypatch.setattr(gpu, "measure", lambda *arguments: held.append(switches()))
    for backend in (e for e in gpu.BACKENDS if e.name.startswith("triton")):
        able = backend._replace(why_not=lambda pattern, device: None)
        gpu.attempt(gpu.Device("cpu"), able, gpu.QUICK.patterns["longnet"], gpu.Setting("longnet", False, 2, 16, 64))
    usual, form = (True, False, False, False, True), (True, False, False, False, False)
    assert held == [usual, *((*form[:i], not form[i], *form[i + 1 :]) for i in range(4))]
    assert switches() == usual
