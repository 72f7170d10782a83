"""Commands as the pages of this site show them: the line, and what it prints."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path


def show(line: str, *, until: str | None = None) -> None:
    """Run `line` and print it with what it writes to standard output, up to `until`; the page fails where the command does."""
    print("$", line, flush=True)
    done = subprocess.run(shlex.split(line), text=True, capture_output=True, env=environment(), check=False)
    if done.returncode:
        raise RuntimeError(f"`{line}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    text = "\n".join(row.rstrip() for row in done.stdout.rstrip().splitlines())
    print(text if until is None else text.partition(until)[0].rstrip())


def environment() -> dict[str, str]:
    """This environment's programs first, no colours, and lines that a page can hold."""
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    plain = {"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **plain, "PATH": programs}
