"""What the numbers of this run were measured on."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from flexdilated.backends import measured
from flexdilated.backends.measured import driver as driver
from flexdilated.tuning.run import save as save

BACKENDS = Path(measured.__file__).parent
SOURCES = {
    "triton": {
        way: [f"triton/{name}.py" for name in (way, "launch", "places", "tiles", "groups")] for way in ("forward", "backward")
    },
    "flash": {way: ["dense/flash.py", "dense/flash_kernels.py"] for way in ("forward", "backward")},
}


@lru_cache(maxsize=1)
def describe() -> dict[str, Any]:
    """Backend, device, threads, versions, commit and date, as JSON types."""
    return {
        "backend": "sdpa",
        "device": "cpu",
        "device_class": device_class(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def device_class() -> str:
    """Machines whose ratios may be compared: the same vector instructions and as many threads, e.g. `cpu-avx512-amx-2threads`."""
    # Private in torch, and younger than the oldest torch supported.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    parts = ["cpu", torch.backends.cpu.get_cpu_capability().lower(), *(["amx"] if has_amx else [])]
    return "-".join([*parts, f"{torch.get_num_threads()}threads"])


def commit() -> str:
    """The commit of the working tree, or `unknown` outside of one."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def provenance(program: str, device: str, arguments: Sequence[str], commit_given: str | None = None) -> dict[str, Any]:
    """What a program of this folder measured on, with what, when and how; `commit_given` where git cannot tell."""
    triton = importlib.util.find_spec("triton")
    on_gpu = device == "cuda"
    return {
        "hardware": torch.cuda.get_device_name() if on_gpu else device_class(),
        "driver": driver() if on_gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": None if triton is None else importlib.import_module("triton").__version__,
        "commit": commit() if commit_given is None else commit_given,
        "date": describe()["date"],
        "command": shlex.join(["python", "-m", f"benchmarks.{program}", *arguments]),
    }


def source_of(backend: str, form: str) -> str:
    """A hash of the code that computes a form of `"triton"` or `"flash"`.

    Forms are `"forward"` and `"backward"`, each also with `", grouped heads"`.
    """
    return digest("".join((BACKENDS / name).read_text() for name in SOURCES[backend][form.partition(",")[0]]))


def digest(code: str) -> str:
    """A hash of Python code that comments, docstrings and layout do not change."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
            node.body = [x for x in node.body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]
