"""Checks of arguments that are integers."""

from __future__ import annotations

import operator
from collections.abc import Iterable


def is_integer(x: object) -> bool:
    """Whether x is an int of Python, and no bool."""
    return isinstance(x, int) and not isinstance(x, bool)


def as_integer(name: str, value: object) -> int:
    """An integer of any kind as an int of Python, since those of numpy overflow; a TypeError for what is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # in compiled code, a symbol stays one
    is_bool = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))  # tensors of a bool have an index
    try:
        number = None if is_bool else operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # a float, in a tensor too; an array of several
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return number


def at_least_one(name: str, value: object) -> int:
    """`as_integer` for a number that must be at least 1; a ValueError for less."""
    number = as_integer(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def index_below(name: str, value: object, size: int) -> int:
    """`as_integer` for a number that must be in `[0, size)`."""
    number = as_integer(name, value)
    if not 0 <= number < size:
        raise ValueError(f"{name} must be in [0, {size}), got {number}")
    return number


def integer_tuple(name: str, values: object) -> tuple[int, ...]:
    """`as_integer` of each value."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}")
    return tuple(as_integer(f"{name}[{i}]", value) for i, value in enumerate(values))
