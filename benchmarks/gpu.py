"""Measure this library on a GPU.

    python -m benchmarks.gpu --needs          # which packages are missing here, and how to bring them to a machine without network
    python -m benchmarks.gpu --all            # everything: results checked first, then timed; start it again to continue
    python -m benchmarks.gpu --show           # the backends alone: see --help

`nox -s bench_gpu -- --all` is another spelling. This file imports the standard library alone, so that `--needs` always runs.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version

# What `--all` imports beside torch and triton, with what those packages import.
IMPORTED = (
    *("pytest", "iniconfig", "packaging", "pluggy", "pygments"),
    *("rich", "markdown-it-py", "mdurl", "numpy", "safetensors"),
)
# FlashAttention-4 and what it imports beside torch, as it was compiled for sm_90 (CUDA 13, Python 3.11, 2026-11-27). Without its
# dependencies pip takes no second torch, and no libraries of CUDA 12.
FLASH = {
    "flash-attn-4": "4.0.0b36",
    "quack-kernels": "0.6.5",
    "nvidia-cutlass-dsl": "4.8.1",
    "nvidia-cutlass-dsl-libs-base": "4.8.1",
    "nvidia-cutlass-dsl-libs-core": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu13": "4.8.1",
    "apache-tvm-ffi": "0.1.15.post2",
    "torch-c-dlpack-ext": "0.1.5",
    "cuda-bindings": "13.5.0",
    "cuda-pathfinder": "1.9.1",
    "protobuf": "7.36.2",
    "einops": "0.8.2",
}
# pip takes a wheel of one of these, by name: an older one is not implied by a newer one.
PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def missing() -> list[str]:
    """The requirements that this Python has no distribution of: any version satisfies."""
    requirements = []
    for name in (*IMPORTED, *FLASH):
        try:
            version(name)
        except PackageNotFoundError:
            requirements.append(f"{name}=={FLASH[name]}" if name in FLASH else name)
    return requirements


def needs(python: tuple[int, int] = sys.version_info[:2]) -> str:
    """The packages that are missing, one a line, and the commands that fetch them elsewhere and install them here."""
    requirements = missing()
    if not requirements:
        return "Nothing is missing."
    platforms = " ".join(f"--platform {name}_x86_64" for name in PLATFORMS)
    chosen = f"--python-version {python[0]}.{python[1]} --implementation cp {platforms}"
    return "\n".join(
        (
            *requirements,
            "",
            "Fetch them on a machine with network, into the folder wheels:",
            f"python -m pip download --no-deps --only-binary :all: {chosen} --dest wheels {' '.join(requirements)}",
            "",
            "Install them here, from that folder:",
            f"{sys.executable} -m pip install --no-index --no-deps --find-links wheels {' '.join(requirements)}",
        )
    )


def main(arguments: list[str] | None = None) -> int:
    """The exit status of what is asked for."""
    words = sys.argv[1:] if arguments is None else arguments
    if "--needs" in words:
        print(needs())
        return 0
    module = "gpu_steps" if "--all" in words else "gpu_backends"
    return int(importlib.import_module(f"benchmarks.{module}").main(words))


if __name__ == "__main__":
    sys.exit(main())
