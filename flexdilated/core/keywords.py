"""Keyword arguments whose names changed."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Raise a TypeError for an old keyword, with the new name and its meaning; the signature stays as written."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in names:
                    raise TypeError(f"{function.__qualname__}() takes {names[name]}, got {name}")
            return function(*args, **kwargs)

        return checked

    return decorate


takes_num_kv_heads = renamed(num_heads="num_kv_heads, the number of key/value heads")
