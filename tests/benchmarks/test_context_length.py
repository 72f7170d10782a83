"""The experiment of context lengths at its quick sizes: what it runs, keeps and repeats."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import context_length

pytestmark = pytest.mark.lab


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """30 kB, of which a twentieth is held out: more than a measurement takes."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(i * i % 251 for i in range(30_011)))
    return path


def run(text: Path, *options: str) -> dict[str, Any]:
    output = text.with_name("results.json")
    folder = text.with_name("runs")
    common = ("--quick", "--text", str(text), "--output", str(output), "--folder", str(folder), "--commit", "abc")
    assert context_length.main([*common, *options]) == 0
    assert not any(folder.glob("*"))  # the checkpoints of finished runs are gone
    return json.loads(output.read_text())


def test_every_attention_sees_and_is_measured_on_as_many_bytes(text: Path) -> None:
    report = run(text)
    assert [(r["attention"], r["length"]) for r in report["runs"]] == [
        ("dense", 64),
        ("dilated", 512),
        ("dense", 512),
        ("window", 512),
    ]
    seen = report["settings"]["steps"] * report["settings"]["bytes_per_step"]
    for entry in report["runs"]:
        assert entry["held_out"][-1] == {"bytes_seen": seen, "bits_per_byte": entry["bits_per_byte"]}
        assert 0 < entry["bits_per_byte"] < 9
        assert (entry["commit"], entry["seed"]) == ("abc", 0)
    assert len({entry["parameters"] for entry in report["runs"]}) == 1


@pytest.mark.slow
def test_what_is_kept_is_not_run_again(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(text)["runs"]
    after = run(text, "--seeds", "2")["runs"]
    assert after[:4] == before
    assert [entry["seed"] for entry in after] == [0] * 4 + [1] * 4
    assert after[0]["bits_per_byte"] != after[4]["bits_per_byte"]
    monkeypatch.setattr(context_length, "run", None)
    assert run(text, "--seeds", "2")["runs"] == after


@pytest.mark.slow
def test_results_of_other_settings_are_refused(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(text)
    with pytest.raises(SystemExit):
        run(text, "--steps", "5")
    assert "--output must hold runs of the same settings=" in capsys.readouterr().err
    text.write_bytes(text.read_bytes()[::-1])
    with pytest.raises(SystemExit):
        run(text)
    assert "--output must hold runs of the same text=" in capsys.readouterr().err


def test_lengths_that_leave_bytes_over_are_refused(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(text, "--lengths", "96")
    assert "--lengths must divide the 512 bytes of a step and the 1024 of a measurement, got 96" in capsys.readouterr().err


@pytest.mark.parametrize("length", context_length.FULL.lengths[1:])
def test_dilated_branches_cost_the_same_and_reach_every_byte_with_all_heads(length: int) -> None:
    pattern = context_length.pattern_of("dilated", length)
    assert max(pattern.segment_lengths) == length
    assert len({w // r**2 for w, r in pattern.branches}) == 1
    heads = context_length.FULL.heads
    for branch, rate in enumerate(pattern.dilation_rates):
        assert {pattern.offset(branch, head, heads) for head in range(heads)} == set(range(rate))
