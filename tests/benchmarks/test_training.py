"""The training benchmark at its quick sizes: it runs, and says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import training

pytestmark = pytest.mark.lab


@pytest.mark.slow
def test_report_says_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report" / "training.json"
    assert training.main(["--quick", "--device", "cpu", "--output", str(path), "--commit", "abc"]) == 0
    report = json.loads(path.read_text())
    assert report["commit"] == "abc"
    assert report["torch"] == torch.__version__
    assert [(m["attention"], m["tokens"]) for m in report["measurements"]] == [("dilated", 64), ("dilated", 128), ("dense", 64)]
    for m in report["measurements"]:
        assert m["tokens_per_second"] == pytest.approx(m["tokens"] / m["step_seconds"])
        assert 0 < m["loss"] < 20
    assert "tokens/s" in capsys.readouterr().out
