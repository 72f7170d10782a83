"""The counts that the page on evidence shows are those of the run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs import count_tests, kept

REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.backends.test_flash" name="test_a"/>
<testcase classname="tests.backends.test_flash.TestGroup" name="test_b"/>
<testcase classname="tests.backends.test_gpu" name="test_c"><skipped type="pytest.skip" message="needs a CUDA device"/></testcase>
<testcase classname="tests.hub.transformers.test_heads" name="test_d"><skipped type="pytest.xfail" message="known"/></testcase>
<testcase classname="tests.test_pattern" name="test_e"/>
<testcase classname="tests.test_pattern.TestGroup" name="test_f"/>
{}
</testsuite></testsuites>"""
FAILURES = (
    '<testcase classname="tests.nn.test_x" name="test_g"><failure message="no"/></testcase>',
    '<testcase classname="tests.nn.test_x" name="test_g"><error message="no"/></testcase>',
)


def write(folder: Path, more: str = "") -> Path:
    path = folder / "tests.xml"
    path.write_text(REPORT.format(more))
    return path


def test_counts_are_those_of_the_report(tmp_path: Path) -> None:
    output = tmp_path / "evidence.json"
    assert count_tests.main([str(write(tmp_path)), "--output", str(output)]) == 0
    kept = json.loads(output.read_text())
    assert kept["areas"] == {"backends": {"passed": 2, "skipped": 1}, "hub": {"xfailed": 1}, "others": {"passed": 2}}
    assert kept["skipped"] == {"needs a CUDA device": 1}
    assert {"date", "torch", "python", "commit", "command", "cpu", "cores"} <= set(kept)


@pytest.mark.parametrize("failure", FAILURES, ids=["failure", "error"])
def test_a_run_that_failed_is_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str], failure: str) -> None:
    output = tmp_path / "evidence.json"
    assert count_tests.main([str(write(tmp_path, failure)), "--output", str(output)]) == 1
    assert "1 tests failed: nothing is kept" in capsys.readouterr().out
    assert not output.exists()


@pytest.mark.parametrize(("areas", "row"), [({}, "| 1 | not counted | not counted |"), ({"core": {"passed": 5}}, "| 1 | 5 | 0 |")])
def test_the_page_says_which_folders_are_not_counted(areas: dict[str, Any], row: str, tmp_path: Path) -> None:
    about = dict.fromkeys(("command", "cpu", "device_class", "cores", "torch", "python", "date", "commit"), "x")
    counts = {**about, "areas": areas, "skipped": {}}
    for folder in ("docs", "tests/core"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs" / "evidence.json").write_text(json.dumps(counts))
    (tmp_path / "tests" / "core" / "test_x.py").write_text("def test_a(): pass")
    page = (kept.ROOT / "docs" / "evidence.md").read_text()
    cells = re.findall(r"^```\{code-cell\} python\n(?::.+\n)*((?:(?!```).*\n)*)```$", page, re.MULTILINE)
    names: dict[str, Any] = {"ROOT": tmp_path}
    for cell in cells:
        exec(cell.replace("from kept import ROOT,", "from docs.kept import"), names)
    assert next(line for line in str(names["Table"](names["header"], names["rows"])).splitlines() if "`core`" in line).endswith(row)
    assert ("`core`" in str(names["about"]).partition("newer than that run: ")[2]) == (not areas)
