"""What the numbers of this run were measured on."""

from __future__ import annotations

import subprocess
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


@lru_cache(maxsize=1)
def describe() -> dict[str, Any]:
    """Engine, device, threads, versions, commit and date, as JSON types."""
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


@lru_cache(maxsize=1)
def driver() -> str:
    """The version of the NVIDIA driver, or `unknown`."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
