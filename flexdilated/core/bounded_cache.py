"""Results that are kept to be used again: many small ones, few large ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
Value = TypeVar("Value")

DOCUMENT, PIECE = 128, 400  # bytes of `(first token, number of tokens)`, and of a tuple of a dozen numbers


class Recent(Generic[P, Value]):
    """A function whose last results are kept, and are the same objects where its arguments are equal.

    Args:
        function: Of hashable arguments.
        size: Bytes of a result, and of the arguments that it is kept under: it is called with both.
        room: Bytes of all that are kept beyond the fewest.
        most: Results that are kept at most.
        fewest: Results that are kept however large they are.
    """

    def __init__(
        self, function: Callable[P, Value], size: Callable[..., int], room: int, most: int = 1024, fewest: int = 8
    ) -> None:
        self.function, self.size, self.room, self.most, self.fewest = function, size, room, most, fewest
        self._found: dict[Hashable, tuple[Value, int]] = {}  # the last ones used, at the end
        self.nbytes = 0  # of what is kept
        self._turn = threading.Lock()
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Value:
        key = args, tuple(kwargs.items())
        with self._turn:
            entry = self._found.pop(key, None)  # a key of many documents takes long to hash and to compare
            if entry is not None:
                self._found[key] = entry
                return entry[0]
        result = self.function(*args, **kwargs)
        with self._turn:
            entry = self._found.pop(key, None)
            if entry is None:  # else another thread was as fast: all take what came first
                entry = result, self.size(result, *args, **kwargs)
                self.nbytes += entry[1]
            self._found[key] = entry
            while len(self._found) > self.most or (len(self._found) > self.fewest and self.nbytes > self.room):
                self.nbytes -= self._found.pop(next(iter(self._found)))[1]
        return entry[0]

    def __len__(self) -> int:
        return len(self._found)

    def cache_clear(self) -> None:
        """Forget all."""
        with self._turn:
            self._found, self.nbytes = {}, 0


def recent(size: Callable[..., int], room: int = 1 << 26) -> Callable[[Callable[P, Value]], Recent[P, Value]]:
    """Keep the last results of a function, in some bytes."""
    return lambda function: Recent(function, size, room)
