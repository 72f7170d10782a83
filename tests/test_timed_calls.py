"""What `flexdilated tune` compares with `"sdpa"`, and how it ends."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern, tuning
from flexdilated.tuning import run as tuning_run
from flexdilated.tuning.checks import Case, Job, examined


def test_timed_calls_must_agree_with_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    x = tuning_run.inputs(16, 8, torch.float32, torch.device("cpu"))
    found: dict[str, str] = {}
    able = [tuning.candidates.Candidate(name, name) for name in ("reference", "flash")]
    plain = tuning_run.attention_call
    names = lambda: [name for name, _ in tuning_run._calls(able, x, (), found, training=True)]  # noqa: E731
    assert names() == ["sdpa", "reference", "dense"]
    assert found == {}  # "flash" cannot run here: it is left out

    def off(backend: str, *arguments: Any, **options: Any) -> Any:
        call, last = plain(backend, *arguments, **options), 1.1 if backend == "reference" else 1.0
        return lambda: (*(results := call())[:-1], results[-1] * last)

    monkeypatch.setattr(tuning_run, "attention_call", off)
    assert names() == ["sdpa", "dense"]
    assert found["reference"].startswith("wrong: dv differs from that of sdpa by ")


def test_each_part_of_a_sequence_is_compared_with_its_own_largest_element() -> None:
    """Causal results decrease along the sequence: zeros at its end are small beside its first elements."""
    out = torch.randn(1, 512, 2, 8) * torch.linspace(10, 0.01, 512)[:, None, None]
    near = out * 1.04
    tuning_run._assert_near((near,), (out,))
    for wrong in (0.0, float("nan")):
        near[:, -100:] = wrong
        with pytest.raises(AssertionError, match="out differs from that of sdpa by "):
            tuning_run._assert_near((near,), (out,))


def hang(name: str, case: Case, device: str) -> dict[str, str]:
    Path(name).touch()
    time.sleep(100)
    return {}


@pytest.mark.slow
def test_an_interrupt_ends_processes_that_hang(tmp_path: Path) -> None:
    started, main = tmp_path / "started", threading.get_ident()

    def interrupt() -> None:
        while not started.exists():
            time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    # A shell ignores Ctrl-C in its background jobs.
    begin, before = time.monotonic(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            examined([Job(hang, str(started), Case("hangs", DilatedPattern((8,), (1,))))] * 2, "cpu", 1)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert time.monotonic() - begin < 90
