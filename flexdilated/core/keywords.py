"""Keyword arguments whose names changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed(**arguments: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function raise a TypeError for a keyword that it no longer takes; its signature stays as written.

    Args:
        **arguments: By old name: the new name, and what the argument means.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, instead in arguments.items():
                if name in kwargs:
                    raise TypeError(f"{function.__qualname__}() takes {instead}, got {name}")
            return function(*args, **kwargs)

        return checked

    return decorate
