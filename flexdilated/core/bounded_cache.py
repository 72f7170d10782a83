"""Results that are kept to be used again: many small ones, few large ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
Value = TypeVar("Value")

DOCUMENT_BYTES, PIECE_BYTES = 128, 480  # bytes of `(first token, number of tokens)`, and of a tuple of some 17 numbers


class Recent(Generic[P, Value]):
    """A cached function: its last results are kept, and equal arguments return the same object.

    Args:
        function: Of hashable arguments.
        size: Function of a result and its arguments: the bytes of both.
        room: Bytes above which only `fewest` results are kept.
        most: Largest number of kept results.
        fewest: Number of results that are kept at any size.
    """

    def __init__(
        self, function: Callable[P, Value], size: Callable[..., int], room: int, most: int = 1024, fewest: int = 8
    ) -> None:
        self.function, self.size, self.room, self.most, self.fewest = function, size, room, most, fewest
        self._entries: dict[Hashable, tuple[Value, int]] = {}  # the most recently used last
        self.nbytes = 0  # of what is kept
        self._lock = threading.Lock()
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Value:
        key = args, tuple(kwargs.items())
        with self._lock:
            entry = self._entries.pop(key, None)  # a key of many documents takes long to hash and to compare
            if entry is not None:
                self._entries[key] = entry
                return entry[0]
        result = self.function(*args, **kwargs)
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:  # else another thread was faster: all threads return its result
                entry = result, self.size(result, *args, **kwargs)
                self.nbytes += entry[1]
            self._entries[key] = entry
            while len(self._entries) > self.most or (len(self._entries) > self.fewest and self.nbytes > self.room):
                self.nbytes -= self._entries.pop(next(iter(self._entries)))[1]
        return entry[0]

    def __len__(self) -> int:
        return len(self._entries)

    def cache_clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._entries, self.nbytes = {}, 0


def recent(size: Callable[..., int], room: int = 1 << 26) -> Callable[[Callable[P, Value]], Recent[P, Value]]:
    """Decorate a function with `Recent`: a cache of `room` bytes."""
    return lambda function: Recent(function, size, room)
