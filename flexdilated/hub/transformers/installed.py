"""Whether the transformers library is there, in a version that works."""

from __future__ import annotations

LOWEST = (5, 12)  # as pyproject.toml says; nox -s tests_transformers runs it and the newest


def check_installed() -> None:
    """Say what to install where the library is missing or too old.

    Raises:
        ImportError: If it is.
    """
    wanted = ".".join(map(str, LOWEST))
    try:
        from transformers import __version__ as found
    except ImportError as error:
        raise ImportError(
            f"transformers must be installed, {wanted} or newer, got {error}; use pip install 'flexdilated[transformers]'"
        ) from error
    if tuple(map(int, found.split(".")[:2])) < LOWEST:
        raise ImportError(f"transformers must be {wanted} or newer, got {found}; use pip install -U 'transformers>={wanted}'")
