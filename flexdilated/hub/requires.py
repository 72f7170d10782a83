"""The versions of other libraries that an adapter works with, checked when its file is imported."""

from __future__ import annotations

import importlib.metadata
import itertools


def require(package: str, *, at_least: str, below: str, extra: str | None = None) -> None:
    """Raise ImportError if a package is missing or has an untested version.

    Args:
        package: Its name on the package index.
        at_least: The lowest version that works.
        below: The lowest one that is too new.
        extra: The extra of flexdilated that brings it. Default: none does.

    Raises:
        ImportError: If it is not installed, or its version is another one.
    """
    wanted = f"{package}>={at_least},<{below}"
    install = f"pip install '{wanted}'" if extra is None else f"pip install 'flexdilated[{extra}]'"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{package} must be installed, got none; {install}", name=package) from None
    if not _numbers(at_least) <= _numbers(version) < _numbers(below):
        raise ImportError(f"{package} must be {wanted.removeprefix(package)}, got {version}; {install}", name=package)


def _numbers(version: str) -> tuple[int, ...]:
    """What a version begins with: (2, 13, 0) of 2.13.0+cpu, (5, 0) of 5.0rc1."""
    numbers = []
    for part in version.split("."):
        digits = "".join(itertools.takewhile(str.isdigit, part))
        if digits:
            numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
