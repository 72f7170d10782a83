"""Outputs of code cells, kept as text in the pages for readers of the repository, and compared with what the cells print.

A `text` block right after a code cell is its output. `text numbers` is compared without numbers, which depend on the machine;
`text varies` is not compared. The site shows the outputs of its own run. `nox -s docs -- --keep` writes the blocks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
NOTEBOOKS = DOCS / "_build" / "jupyter_execute"  # where myst-nb writes what it ran
CELL = re.compile(
    r"(?P<cell>^```\{code-cell\} python\n.*?^```\n)(?P<block>\n```text(?P<kind>| numbers| varies)\n(?P<kept>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"0x[0-9a-f]+|\d[\d,.]*(e[+-]\d+)?")


def hide(_: Any, __: str, content: list[str]) -> None:
    """Take the blocks from the source of a page before the site is made of it; line numbers stay."""
    content[0] = CELL.sub(lambda found: found["cell"] + "\n" * (found["block"] or "").count("\n"), content[0])


def printed(cell: dict[str, Any]) -> str:
    """What a cell of a notebook printed, and the text of the values that it shows; nothing for pictures."""
    streams = ["".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout"]
    texts = [stream.rstrip() for stream in streams[:1]]  # into which myst-nb has merged the others (nb_merge_streams)
    shown = [output["data"] for output in cell["outputs"] if "data" in output]
    texts += ["".join(data.get("text/plain", "")) for data in shown if not any(kind.startswith("image/") for kind in data)]
    return "".join(f"{line.rstrip()}\n" for text in texts for line in text.splitlines())


def comparable(kind: str, text: str) -> str:
    """What must be equal in the kept and in the printed text."""
    return {"": text, " numbers": " ".join(NUMBER.sub("#", text).split()), " varies": str(bool(text))}[kind]


def check(page: str, texts: list[str]) -> tuple[str, list[str]]:
    """The page with what its cells printed, one text per cell, and one line for each block that differs."""
    cells = list(CELL.finditer(page))
    if len(cells) != len(texts):
        return page, [f"has {len(cells)} cells, and {len(texts)} ran"]
    faults, parts, end = [], [], 0
    for number, (found, text) in enumerate(zip(cells, texts), start=1):
        kind, kept, block = found["kind"] or "", found["kept"] or "", found["block"] or ""
        if comparable(kind, text) != comparable(kind, kept):
            faults.append(f"cell {number} printed\n{text}and the page has\n{kept}")
            block = f"\n```text{kind}\n{text}```\n" if text else ""
        parts += [page[end : found.start()], found["cell"], block]
        end = found.end()
    return "".join([*parts, page[end:]]), faults


def main(*, keep: bool) -> None:
    faults = []
    for path in sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts):
        page = path.read_text()
        if CELL.search(page) is None:
            continue
        notebook = json.loads((NOTEBOOKS / path.relative_to(DOCS)).with_suffix(".ipynb").read_text())
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        texts = ["" if "remove-cell" in cell["metadata"].get("tags", ()) else printed(cell) for cell in cells]
        text, found = check(page, texts)
        if keep:
            path.write_text(text)
        faults += [f"{path.relative_to(DOCS)}: {fault}" for fault in found]
    if faults and not keep:
        sys.exit("\n".join([*faults, "To write these outputs into the pages: nox -s docs -- --keep"]))


if __name__ == "__main__":
    main(keep="--keep" in sys.argv)
