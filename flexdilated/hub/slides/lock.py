"""One run writes an output at a time."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class StoreError(ValueError):
    """Why an output cannot be written, in one line."""


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """This process alone writes the output, until the block or the process ends.

    Raises:
        StoreError: If another run does.
        OSError: If the file of the lock cannot be written, or the file system has no locks.
    """
    path = output.with_name(f".{output.name}.lock")
    while True:
        file = path.open("ab")
        try:
            _lock(file.fileno())
        except OSError as error:
            file.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):  # of a file system that knows no locks
                raise
            raise StoreError(
                f"--output must not be written by two runs at once, got '{output}', which another one writes"
            ) from None
        # The run before may have removed the file between the two calls.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        file.close()


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
