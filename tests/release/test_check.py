"""The release check: what it runs, how it tells it, and what it leaves to a person."""

import re
from pathlib import Path

import pytest

import flexdilated
from tests.release import check
from tests.release.test_release import constant, sessions

ROOT = Path(flexdilated.__file__).parents[1]
DONE = {
    "flexdilated/_version.py": '__version__ = "0.1.0"\n',
    "CHANGELOG.md": "# Changelog\n\n## 0.1.0 (2026-12-01)\n\n- All.\n\n## 0.0.1 (2025-01-01)\n",
    "CITATION.cff": "version: 0.1.0\ndate-released: 2026-12-01\n",
    "tests/release/artefacts/0.1.0/run/x.json": "",
}

pytestmark = pytest.mark.skipif(not (ROOT / ".github").exists(), reason="needs the repository")


def test_a_release_checks_sessions_that_exist_with_arguments_of_some_of_them() -> None:
    release = set(constant("RELEASE"))
    assert {"lint", "types_pythons", "hooks", "hosting", "api", "build", "tests", "minimums", "docs"} < release <= sessions()
    assert check.ARGUMENTS.keys() <= release


def test_every_version_of_a_session_has_a_row_and_a_skipped_one_has_not_passed() -> None:
    found = [
        {"name": "tests_python", "signatures": ["tests_python-3.10"], "result": "success", "duration": 71.4},
        {"name": "tests_python", "signatures": ["tests_python-3.14"], "result": "skipped", "reason": "Python 3.14 not found."},
        {"name": "docs", "signatures": [], "result": "failed", "duration": None},
        {"name": "types", "signatures": ["types"], "result": "aborted"},
    ]
    assert check.table([*check.rows("x", found), *check.rows("hooks", [])]).splitlines() == [
        "session            result   seconds",
        "tests_python-3.10  pass          71",
        "tests_python-3.14  not run        0  Python 3.14 not found.",
        "docs               FAIL           0",
        "types              FAIL           0",
        "hooks              FAIL           0  nox gave no report",
    ]


def test_what_is_left_to_a_person_is_named_until_it_is_done() -> None:
    assert check.left_to_a_person(DONE, ()) == ["then: git tag -s v0.1.0"]
    assert check.left_to_a_person(DONE, ("v0.1.0",)) == ["v0.1.0 is a tag already: raise the version"]
    undone = {
        "flexdilated/_version.py": '__version__ = "0.2.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## 0.1.0 (unreleased)\n",
        "CITATION.cff": 'version: 0.1.0\nurl: "https://flexdilated.example/"\n',
        ".github/CODEOWNERS": "* @flexdilated/maintainers\n",
    }
    assert check.left_to_a_person(undone, ()) == [
        "before the first upload: flexdilated.example (the project's address, and those of mail to it) in CITATION.cff",
        "before the first upload: @flexdilated/maintainers (the team that is asked to review) in .github/CODEOWNERS",
        "before the tag: the version must be 0.2.0, got 0.1.0 in CHANGELOG.md and 0.1.0 in CITATION.cff",
        'before the tag: CHANGELOG.md must date 0.2.0, got "unreleased"',
        "before the tag: CITATION.cff must say `date-released:`, the changelog's date",
        "before the tag: python -m tests.release.save_artefacts tests/release/artefacts/0.2.0",
        "then: git tag -s v0.2.0",
    ]


def test_every_address_in_metadata_is_a_placeholder_that_the_check_names() -> None:
    files = [ROOT / "pyproject.toml", ROOT / "CITATION.cff", *(path for path in (ROOT / ".github").rglob("*") if path.is_file())]
    for path in files:
        for name in re.findall(r"[\w.-]+\.example\b|(?<![\w/])@[\w-]+/[\w-]+", path.read_text()):
            assert name in check.PLACEHOLDERS, f"{path}: {name}"
