"""The mutants and their runs: every mutant is a change, and what is kept of them is of today."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import flexdilated
from tests.release import mutation
from tests.release.mutants import Loader, mutants, mutated, unchanged

ROOT = Path(flexdilated.__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "noxfile.py").exists(), reason="needs the repository")


def test_every_mutant_differs_from_its_file_and_from_the_others() -> None:
    file = "flexdilated/core/lse.py"
    found = mutants(file)
    sources = {ast.unparse(mutated(mutant)) for mutant in found}
    assert len(sources) == len(found) > 10
    source = ast.unparse(ast.parse((ROOT / file).read_text()))
    assert source not in sources
    assert source == ast.unparse(mutated(unchanged(file)))


def test_mutants_change_what_computes_and_no_words() -> None:
    lines = (ROOT / "flexdilated/core/pattern.py").read_text().splitlines()
    for mutant in mutants("flexdilated/core/pattern.py"):
        assert not lines[mutant.line - 1].lstrip().startswith(("raise", '"""', "@", "import", "from"))
        first, last = mutant.span
        assert first <= mutant.line <= last


def test_no_two_mutants_are_kept_under_one_name() -> None:
    keys = [mutant.key for file in mutation.TESTS for mutant in mutants(file)]
    assert len(set(keys)) == len(keys) > 1000


def test_a_statement_that_holds_others_begins_and_ends_before_them() -> None:
    spans = {mutant.change: mutant.span for mutant in mutants("flexdilated/masks/block_mask.py")}
    lines = (ROOT / "flexdilated/masks/block_mask.py").read_text().splitlines()
    first, last = spans["sizes != (128, 128)  ->  sizes == (128, 128)"]
    assert (first, lines[first - 1].strip()) == (last, "if sizes != (128, 128):")


def test_a_loader_gives_the_mutant_and_nothing_else() -> None:
    mutant = next(each for each in mutants("flexdilated/core/lse.py") if each.change == "-1  ->  1")
    loader = Loader(mutant)
    assert loader.find_spec("flexdilated.core.lse", None).loader is loader
    assert loader.find_spec("flexdilated.core.pieces", None) is None


def test_a_mutant_meets_the_tests_of_its_statement_first_and_all_where_every_import_runs_it() -> None:
    mutant = next(each for each in mutants("flexdilated/core/lse.py") if each.change == "-1  ->  1")
    first, last = mutant.span
    seconds = {"slow": 3.0, "fast": 1.0, "other": 2.0}
    clean = mutation.Clean(1.0, seconds, {first: {"slow"}, last: {"fast", "slow"}, last + 1: {"other"}})
    assert clean.of(mutant) == ["fast", "slow"]
    assert mutation.Clean(1.0, seconds, {first: {"", "slow"}}).of(mutant) == ["slow", "fast", "other"]
    assert mutation.Clean(1.0, seconds, {}).of(mutant) == []


def test_every_explained_survivor_is_a_mutant_of_today_and_has_a_reason() -> None:
    kept = json.loads(mutation.SURVIVORS.read_text())
    today = {mutant.key for file in mutation.TESTS for mutant in mutants(file)}
    for each in kept:
        assert (each["file"], each["line"], each["change"]) in today
        assert len(each["why"]) > 20


def test_what_is_kept_of_the_runs_adds_up_and_leaves_none_open() -> None:
    kept = json.loads(mutation.KEPT.read_text())
    assert kept
    assert list(kept) == [file for file in mutation.TESTS if file in kept]
    explained = [each["file"] for each in json.loads(mutation.SURVIVORS.read_text())]
    for file, counts in kept.items():
        assert counts["open"] == 0
        assert counts["killed"] + counts["stopped"] + counts["explained"] == counts["run"] <= counts["mutants"]
        assert counts["explained"] <= explained.count(file)


def test_the_mutants_tests_exist() -> None:
    assert all((ROOT / test).is_file() for tests in mutation.TESTS.values() for test in tests)
