"""A store whose silence has an end, as its own end has words."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

OWN_THREAD = "flexdilated"  # the name of those that make no calls


class AnsweringStore:
    """A store that answers within a time, or is taken for gone.

    torch's store over TCP waits for its host without a limit, whatever its timeout says: where the host is frozen or has lost
    power, no call returns. Each call here has a thread of its own, which may be left waiting. What it asked may yet be done.

    Args:
        store: Any of torch's.
        timeout: For one call.
    """

    def __init__(self, store: Store, timeout: timedelta) -> None:
        self.store, self.timeout = store, timeout
        self.gone: TimeoutError | dist.DistNetworkError | None = None

    def try_again(self) -> None:
        """Ask a store that was silent once more: its host may have been stopped for a while, a closed connection stays closed."""
        if isinstance(self.gone, TimeoutError):
            self.gone = None

    def add(self, key: str, amount: int) -> int:
        """The counter after adding."""
        return int(self._ask("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return bool(self._ask("check", keys))

    def get(self, key: str) -> bytes:
        """The value of a key that is set."""
        return bytes(self._ask("get", key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are set."""
        found: list[bytes] = self._ask("multi_get", keys)
        return found

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._ask("set", key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that has the expected value, or none; the value that it has then."""
        return bytes(self._ask("compare_set", key, expected, desired))

    def delete_key(self, key: str) -> None:
        """Forget a key."""
        self._ask("delete_key", key)

    def _ask(self, name: str, *arguments: Any) -> Any:
        told: list[tuple[Any, BaseException | None]] = []

        def call() -> None:
            try:
                told.append((getattr(self.store, name)(*arguments), None))
            except BaseException as error:
                told.append((None, error))

        if self.gone is None:
            thread = threading.Thread(target=call, daemon=True, name=OWN_THREAD)
            thread.start()
            thread.join(self.timeout.total_seconds())
            if not told:
                self.gone = TimeoutError(
                    f"the store of the ranks must answer within {self.timeout.total_seconds():g} s, it did not: the process that "
                    "hosts it is stopped, or its host is"
                )
            elif isinstance(told[0][1], dist.DistNetworkError):  # its text is of addresses and places in torch's sources
                self.gone = dist.DistNetworkError(
                    "the store of the ranks must answer, it is gone: the process that hosts it, rank 0 unless torchrun does, has "
                    "ended or cannot be reached"
                )
        if self.gone is not None:
            raise type(self.gone)(*self.gone.args)
        answer, error = told[0]
        if error is not None:
            raise error
        return answer
