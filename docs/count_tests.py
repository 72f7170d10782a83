"""Keep what a run of all tests gave, for the page on evidence: `nox -s tests -- --keep`.

pytest --junitxml=tests.xml
python -m docs.count_tests tests.xml
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpuinfo import get_cpu_info

from benchmarks.environment import describe
from tests.doors.cases import CASES, KINDS, VARIANTS
from tests.doors.doors import DOORS
from tests.doors.ranks import EXCHANGES, refusal

OUTPUT = Path(__file__).parent / "evidence.json"
OUTCOMES = ("passed", "skipped", "xfailed", "failed")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a test failed. Nothing is kept then."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path, help="what pytest wrote under --junitxml")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    found = count(options.report)
    failed = sum(area.get("failed", 0) for area in found["areas"].values())
    if failed:
        print(f"{failed} tests failed: nothing is kept")
        return 1
    about = {key: value for key, value in describe().items() if key in ("device_class", "torch", "commit", "date")}
    machine = {"python": platform.python_version(), "cpu": get_cpu_info()["brand_raw"], "cores": os.cpu_count()}
    kept = {"command": "nox -s tests", **about, **machine, **found, "doors": doors()}
    options.output.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"kept in {options.output}")
    return 0


def count(report: Path) -> dict[str, Any]:
    """Outcomes by area, a folder of `tests` or a file beside the folders, and why tests were skipped."""
    areas: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        names = case.get("classname", "").split(".")
        area = names[1] if len(names) > 2 and not names[1].startswith("test_") else "others"
        found = outcome(case)
        areas.setdefault(area, Counter())[found] += 1
        skipped = case.find("skipped")
        if found == "skipped" and skipped is not None:
            reasons[skipped.get("message", "")] += 1
    ordered = {area: {name: areas[area][name] for name in OUTCOMES if areas[area][name]} for area in sorted(areas)}
    return {"areas": ordered, "skipped": dict(reasons.most_common())}


def doors() -> dict[str, dict[str, list[int]]]:
    """By door and kind of pattern: the cases that equal the definition, and those that are refused by name (`tests/doors`)."""
    asked: dict[str, dict[str, list[int]]] = {}
    for name, door in DOORS.items():
        for kind in KINDS:
            cases = [CASES[kind, variant] for variant in door.asked() if door.lacks(CASES[kind, variant]) is None]
            refused = sum(door.accepts(case) is not None for case in cases)
            asked.setdefault(name, {})[kind] = [len(cases) - refused, refused]
    for exchange in EXCHANGES:
        for kind in KINDS:
            refused = sum(refusal(CASES[kind, variant], exchange) is not None for variant in VARIANTS)
            asked.setdefault(f"2 and 3 ranks, {exchange}", {})[kind] = [2 * (len(VARIANTS) - refused), 2 * refused]
    return asked


def outcome(case: ElementTree.Element) -> str:
    """How a test ended."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


if __name__ == "__main__":
    sys.exit(main())
