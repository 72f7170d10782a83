"""Public names and signatures of this tree against those of a commit: `nox -s api`. Public is what the reference lists there.

    python tests/release/api.py v0.1.0

Exits with 1 if something of it is gone, or takes other arguments or defaults.
"""

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = "flexdilated"
REFERENCE = Path("docs", "reference")


def entries(reference: Path) -> set[str]:
    found = set()
    for page in reference.glob("*.md"):
        directives = re.findall(r"^\.\. (?:auto|py:)(\w+):: (\S+)\n((?:   .*\n)*)", page.read_text(), flags=re.MULTILINE)
        for kind, name, options in directives:
            members = re.search(r":members: (.+)", options) if kind == "module" else None
            found |= {f"{name}.{member}" for member in members[1].split(", ")} if members else {name}
    return found


def breaking(before: Path, now: Path) -> Iterator[Any]:
    """What breaks of the public names of one tree in another, as griffe tells it."""
    import griffe

    old, new = (
        griffe.load(PACKAGE, search_paths=[tree], try_relative_path=False, allow_inspection=False) for tree in (before, now)
    )
    public = set()
    documented = entries(before / REFERENCE) - {PACKAGE}
    for name in documented:
        try:
            entry = old[name.removeprefix(f"{PACKAGE}.")]
            if not entry.is_module:
                public |= {name, entry.canonical_path}
        except (KeyError, griffe.AliasResolutionError):  # made when the package is imported: griffe only reads
            print(f"not compared: {name}")
    for breakage in griffe.find_breaking_changes(old, new):
        path = breakage.obj.path
        if any(path == name or path.startswith((f"{name}.", f"{name}(")) for name in public) or any(
            name.startswith(f"{path}.")
            for name in documented  # a module that is gone
        ):
            yield breakage


def main(commit: str) -> int:
    packed = subprocess.run(["git", "archive", commit, PACKAGE, str(REFERENCE)], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
        before = Path(folder)
        found = [breakage.explain() for breakage in breaking(before, ROOT)]
        names = len(entries(before / REFERENCE))
    print(*found, f"{names} names of {commit}, {len(found)} changes that break", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
