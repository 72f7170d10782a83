"""The four tasks: what each kind of attention scores, what is run and kept, and what the page quotes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import tasks
from benchmarks.tasks import HEADS, IGNORED, KINDS, RESULTS, TASKS, Kind

pytestmark = pytest.mark.lab

# Kinds of equal cost that differ in the near keys alone: connected segments, and a sliding window.
SPARSE = [name for name in KINDS if name != "dense"]


def pairs_by_definition(kind: Kind, num_tokens: int) -> np.ndarray:
    """`(H, N, N)`, by loops over integers."""
    found = np.zeros((HEADS, num_tokens, num_tokens), dtype=np.int64)
    for head in range(HEADS):
        for query in range(num_tokens):
            found[head, query, max(0, query - kind.window + 1) : query + 1] += kind.window > 0
            for branch, (length, rate) in enumerate(kind.pattern.branches if kind.pattern else ()):
                assert kind.pattern is not None
                if head not in kind.pattern.head_range(branch, HEADS):
                    continue
                offset = kind.pattern.offset(branch, head, HEADS)
                if query % length % rate == offset:
                    found[head, query, query - query % length + offset : query + 1 : rate] += 1
    return found


@pytest.mark.parametrize("name", KINDS)
def test_attention_of_a_kind_is_softmax_over_the_pairs_of_its_definition(name: str) -> None:
    kind, num_tokens, head_dim = KINDS[name], 293, 5
    expected = pairs_by_definition(kind, num_tokens)
    assert np.array_equal(kind.multiplicity(num_tokens), expected)
    q, k, v = torch.randn(3, 2, num_tokens, HEADS, head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = torch.from_numpy(expected).double()
    weights = pairs * torch.exp(torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(head_dim))
    weights = weights / weights.sum(-1, keepdim=True).clamp(
        min=1e-300
    )  # grouped heads leave tokens without keys: their output is 0
    out = kind.attend(q, k, v) if kind.window else kind.attend(q.float(), k.float(), v.float()).double()
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", weights, v), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", sorted({task.tokens for task in TASKS.values()}))
def test_sparse_kinds_score_25_pairs_per_token_within_5_percent(num_tokens: int) -> None:
    for name in SPARSE:
        assert KINDS[name].multiplicity(num_tokens).sum() / HEADS / num_tokens == pytest.approx(25, rel=0.05), name


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


def test_runs_of_other_settings_are_not_taken_for_finished(tiny: None, tmp_path: Path) -> None:
    output = tmp_path / "tasks.json"
    output.write_text(json.dumps({"runs": [tasks.settings("copy", "dense", 0) | {"steps": 2, "accuracy": 0.5}]}))
    tasks.main(["--task", "copy", "--kind", "dense", "--seeds", "1", "--workers", "1", "--output", str(output)])
    assert [each["steps"] for each in json.loads(output.read_text())["runs"]] == [2, 1]


def test_every_number_of_the_page_has_three_seeds() -> None:
    runs = json.loads(RESULTS.read_text())["runs"]
    for name, task in TASKS.items():
        for kind in task.kinds:
            wanted = [tasks.settings(name, kind, seed) for seed in range(3)]
            found = [each for each in runs if any(cell.items() <= each.items() for cell in wanted)]
            assert len(found) == 3, (name, kind)
