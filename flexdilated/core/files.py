"""Replace files and folders so that the old or the new content survives a power failure."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

NO_FOLDER_SYNC = (errno.EACCES, errno.EBADF, errno.EINVAL)  # file systems that cannot sync a folder, or folders without read access


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk; an OSError if they cannot be written."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC or not path.is_dir():
            raise


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to write beside the final name, renamed at the end of the block: a reader never sees half of it.

    The content is on the disk before the rename, and the rename after the block. A link stays; its target is replaced. After an
    OSError the old content stays.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{secrets.token_hex(8)}.part")  # other containers may have equal process ids
    try:
        with partial.open("xb") as file:
            yield file
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        error.filename = str(path)  # the name that the user knows
        raise
    finally:
        with suppress(OSError):  # there is none after the rename, or where the folder is none
            partial.unlink()
