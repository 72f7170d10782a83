"""What a built wheel and sdist must hold and must not. `nox -s build` runs this on what it built."""

import re
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

# The one place of the version, read: this runs where no torch is.
VERSION_FILE = Path(__file__).parents[2] / "flexdilated" / "_version.py"
VERSION = re.findall(r'^__version__ = "(.+)"$', VERSION_FILE.read_text(), flags=re.MULTILINE)[0]
EXPLORER = {path.name for path in (VERSION_FILE.parent / "explorer").iterdir()}


def relative_links(description: str) -> list[str]:
    """Targets of Markdown links and images that lead nowhere from the page of an index."""
    text = re.sub(r"^(```.*?^```|    .*?$)", "", description, flags=re.MULTILINE | re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)", text) if not re.match(r"https?://|mailto:|#", target)]


def problems(folder: Path) -> list[str]:
    """What is wrong with the one wheel and the one sdist of a folder, in words."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        (metadata,) = (name for name in packed if name.endswith(".dist-info/METADATA"))
        message = message_from_bytes(archive.read(metadata))
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    description = str(message.get_payload())
    checks = {
        f"the version must be {VERSION}, got {message['Version']}": message["Version"] == VERSION,
        "the wheel must hold flexdilated/py.typed": "flexdilated/py.typed" in packed,
        "the wheel must hold the explorer": {f"flexdilated/explorer/{name}" for name in EXPLORER} <= packed,
        "the wheel must hold the licence": any(name.endswith("/licenses/LICENSE") for name in packed),
        "the wheel must hold nothing but the package": all(name.startswith("flexdilated") for name in packed),
        "the sdist must hold tests, docs and noxfile.py": {"tests/test_pattern.py", "docs/index.md", "noxfile.py"} <= sources,
        "there must be a description": "dilated_attention" in description,
        f"links must be absolute, got {relative_links(description)}": not relative_links(description),
    }
    found = [problem for problem, holds in checks.items() if not holds]
    hosted = sorted(name for name in sources if name.startswith((".ci", ".github", ".pre-commit", ".nox", "runs")))
    return found + [f"the sdist must not hold {name}" for name in hosted]


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]))
    print("\n".join(wrong) or f"wheel and sdist of {VERSION} hold what they must")
    sys.exit(bool(wrong))
