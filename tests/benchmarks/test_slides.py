"""The benchmark of slides: whether it runs, and its three ways give the same embeddings, which it compares itself."""

from __future__ import annotations

import ast

import pytest

from benchmarks import slides

pytestmark = pytest.mark.lab


def test_a_line_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    slides.main(["--quick"])
    rows = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["tiles"], row["slides"]) for row in rows] == [(10, 2), (30, 2)]
    for way in ("alone", "authors"):
        assert all(row[f"packed over {way}"] > 0 for row in rows)
