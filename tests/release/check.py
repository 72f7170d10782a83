"""Every session that a release must pass, in order, one table of them, and what is left to a person: `nox -s release-check`.

    python tests/release/check.py lint types build    # in this order

On a clean working tree, what has passed at this commit is kept in `runs/release-check.json` and not run again: a check of an hour
or more may be stopped and go on. Delete the file to begin anew. Only what every Python has is imported.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
QUICK = ("-m", "not slow and not ranks and not gpu and not sweep and not lab")
ARGUMENTS = {"tests_torch": QUICK, "minimums": QUICK}  # other versions: the weekly workflow runs all of their tests
WORDS = {"success": "pass", "skipped": "not run"}  # of nox; any other is a failure

# What stands for what only a publisher has: the one place that names them all.
PLACEHOLDERS = {
    "flexdilated.example": "the project's address, and those of mail to it",
    "@flexdilated/maintainers": "the team that is asked to review",
}


class Row(NamedTuple):
    session: str
    result: str
    seconds: float
    why: str


def run(name: str, report: Path) -> list[Row]:
    given = ("--", *ARGUMENTS[name]) if name in ARGUMENTS else ()
    report.unlink(missing_ok=True)
    nox = ("-m", "nox", "--session", name, "--no-stop-on-first-error", "--no-error-on-missing-interpreters")
    subprocess.run([sys.executable, *nox, "--report", str(report), *given], cwd=ROOT)
    return rows(name, json.loads(report.read_text())["sessions"] if report.exists() else [])


def rows(name: str, found: Iterable[dict[str, object]]) -> list[Row]:
    made = [
        Row(
            str((each.get("signatures") or [each["name"]])[0]),  # type: ignore[index]
            WORDS.get(str(each["result"]), "FAIL"),
            float(str(each.get("duration") or 0)),
            str(each.get("reason") or ""),
        )
        for each in found
    ]
    return made or [Row(name, "FAIL", 0.0, "nox gave no report")]


def table(made: Sequence[Row]) -> str:
    width = max(len(row.session) for row in made)
    lines = [f"{'session':{width}}  {'result':7}  seconds"]
    lines += [f"{row.session:{width}}  {row.result:7}  {row.seconds:7.0f}  {row.why}".rstrip() for row in made]
    return "\n".join(lines)


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def left_to_a_person(files: dict[str, str], tags: Sequence[str]) -> list[str]:
    """What is to be set before the first upload and at the tag, by the text of files."""
    found = []
    for placeholder, what in PLACEHOLDERS.items():
        places = [name for name, text in files.items() if placeholder in text]
        if places:
            found.append(f"before the first upload: {placeholder} ({what}) in {', '.join(places)}")
    version = re.findall(r'^__version__ = "(.+)"$', files["flexdilated/_version.py"], flags=re.MULTILINE)[0]
    newest, dated = re.findall(r"^## (\S+)(?: \((.*)\))?$", files["CHANGELOG.md"], flags=re.MULTILINE)[0]
    cited = re.findall(r"^version: (.+)$", files["CITATION.cff"], flags=re.MULTILINE)[0]
    if {newest, cited} != {version}:
        found.append(f"before the tag: the version must be {version}, got {newest} in CHANGELOG.md and {cited} in CITATION.cff")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", dated):
        found.append(f'before the tag: CHANGELOG.md must date {version}, got "{dated}"')
    if f"date-released: {dated}" not in files["CITATION.cff"].splitlines():
        found.append("before the tag: CITATION.cff must say `date-released:`, the changelog's date")
    if not any(name.startswith(f"tests/release/artefacts/{version}/") for name in files):
        found.append(f"before the tag: python -m tests.release.save_artefacts tests/release/artefacts/{version}")
    found.append(f"v{version} is a tag already: raise the version" if f"v{version}" in tags else f"then: git tag -s v{version}")
    return found


def texts() -> dict[str, str]:
    names = (git("ls-files") or "").splitlines()
    ours = [name for name in names if not (name.startswith("tests/release/") and name.endswith(".py")) and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_bytes().decode(errors="replace") for name in ours}


def main(names: Sequence[str]) -> int:
    kept = ROOT / "runs" / "release-check.json"
    kept.parent.mkdir(exist_ok=True)
    commit = git("rev-parse", "HEAD") if git("status", "--porcelain") == "" else None
    before = json.loads(kept.read_text()) if kept.exists() else {}
    passed = {name: [Row(*row) for row in found] for name, found in before.get("passed", {}).items()}
    if commit is None or before.get("commit") != commit:
        passed = {}
    made: list[Row] = []
    for name in names:
        found = passed.get(name) or run(name, kept.with_name("release-check-session.json"))
        made += found
        if commit and all(row.result == "pass" for row in found):
            passed[name] = found
            kept.write_text(json.dumps({"commit": commit, "passed": passed}, indent=1) + "\n")
    print("", table(made), "", sep="\n")
    if files := texts():
        print(*left_to_a_person(files, (git("tag") or "").splitlines()), sep="\n")
    return 1 if any(row.result == "FAIL" for row in made) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
