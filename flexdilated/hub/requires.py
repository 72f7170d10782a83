"""The versions of other libraries that an adapter works with, checked when its file is imported."""

from __future__ import annotations

import importlib.metadata
import re


def require(package: str, *, at_least: str, below: str | None = None, extra: str, python: str | None = None) -> None:
    """Raise ImportError if a package is missing or has an untested version.

    Args:
        package: Its name on the package index.
        at_least: The lowest version that works.
        below: The lowest one that is too new. Default: none is.
        extra: The extra of flexdilated that brings it.
        python: The lowest version of Python under which the extra does. Default: any that flexdilated supports.
    """
    requirement = f">={at_least}" if below is None else f">={at_least},<{below}"
    install = f"pip install 'flexdilated[{extra}]'" + (f" under Python {python} or newer" if python else "")
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{package} must be installed, got none; {install}", name=package) from None
    if _numbers(version) < _numbers(at_least) or (below is not None and _numbers(version) >= _numbers(below)):
        raise ImportError(f"{package} must be {requirement}, got {version}; {install}", name=package)


def _numbers(version: str) -> tuple[int, ...]:
    """What a version begins with: (2, 13, 0) of 2.13.0+cpu, (5, 0) of 5.0rc1."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()
