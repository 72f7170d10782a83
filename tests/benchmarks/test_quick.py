"""Benchmarks at their quick sizes: they run, compare results themselves, and say what they measured."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import slides, training
from benchmarks.lab import overlap
from benchmarks.test_context import PLANNING
from flexdilated.distributed.planner.plan import EXCHANGES


@pytest.mark.lab
def test_slides_have_a_line_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    slides.main(["--quick"])
    rows = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["tiles"], row["slides"]) for row in rows] == [(10, 2), (30, 2)]
    for way in ("alone", "authors"):
        assert all(row[f"packed over {way}"] > 0 for row in rows)


@pytest.mark.lab
@pytest.mark.slow
def test_training_says_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.lab
def test_overlap_has_a_line_for_each_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap.main(["--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(EXCHANGES)
    assert all(re.fullmatch(r"\w+: forward \S+ of \S+ s, backward \S+ of \S+ s", line) for line in lines)


def test_what_is_timed_as_planning_is_called_where_it_is_timed() -> None:
    for module, name in PLANNING:
        assert callable(getattr(module, name, None)), f"{module.__name__}.{name}"
