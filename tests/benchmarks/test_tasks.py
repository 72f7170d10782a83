"""The four tasks: what each kind of attention scores, what is run and kept, and what the page quotes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tasks
from benchmarks.tasks import HEADS, IGNORED, KINDS, RESULTS, TASKS

pytestmark = pytest.mark.lab

SPARSE = [name for name in KINDS if name != "dense"]


@pytest.mark.parametrize("num_tokens", sorted({task.tokens for task in TASKS.values()}))
def test_sparse_kinds_score_25_pairs_per_token_within_5_percent(num_tokens: int) -> None:
    for name in SPARSE:
        pairs = KINDS[name].count_pairs(num_tokens, HEADS, is_causal=True)
        assert pairs / HEADS / num_tokens == pytest.approx(25, rel=0.05), name


@pytest.mark.parametrize("name", TASKS)
def test_every_answer_is_in_the_sequence_where_the_task_says(name: str) -> None:
    task = TASKS[name]
    tokens, targets = task.draw(3, task.tokens, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (3, task.tokens)
    assert set(tokens.unique().tolist()) <= set(range(tasks.VOCABULARY))
    for row, answers in zip(tokens.tolist(), targets.tolist()):
        asked = [n for n, answer in enumerate(answers) if answer != IGNORED]
        if name == "bigrams":
            assert answers[:-1] == row[1:]
            continue
        if name == "topic":
            (topic,) = set(answers) - {IGNORED}
            assert [n for n, token in enumerate(row) if token < 16] == [n for n, token in enumerate(row[:64]) if token == topic]
            assert min(asked) >= 64
            continue
        for n in asked:  # the answer follows the first occurrence of the same token
            before = row.index(row[n])
            assert row[before + 1] == answers[n]
            nearest, farthest = (184, 511) if name == "recall" else (128, 256)
            assert nearest <= n - before <= farthest


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASKS", {"copy": TASKS["copy"]._replace(steps=1, batch=1, kinds=("dense", "local + far"))})
    monkeypatch.setattr(tasks, "EVALUATED", 2)


def test_finished_runs_are_not_repeated(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "tasks.json"
    words = ["--task", "copy", "--workers", "1", "--output", str(output), "--seeds"]

    def runs() -> list[dict[str, Any]]:
        return json.loads(output.read_text())["runs"]

    tasks.main([*words, "1"])
    first = runs()
    assert [(each["kind"], each["seed"]) for each in first] == [("dense", 0), ("local + far", 0)]
    assert {"command", "hardware", "date", "torch", "commit"} <= set(first[0])
    tasks.main([*words, "2"])
    assert runs()[:2] == first
    assert [(each["kind"], each["seed"]) for each in runs()[2:]] == [("dense", 1), ("local + far", 1)]
    kept = runs()
    monkeypatch.setattr(tasks, "run", None)
    tasks.main([*words, "2"])
    assert runs() == kept


def test_every_number_of_the_page_has_three_seeds() -> None:
    runs = json.loads(RESULTS.read_text())["runs"]
    for name, task in TASKS.items():
        for kind in task.kinds:
            wanted = [tasks.settings(name, kind, seed) for seed in range(3)]
            found = [each for each in runs if any(cell.items() <= each.items() for cell in wanted)]
            assert len(found) == 3, (name, kind)
