"""Which file a slide was read from: a run that goes on must not take another one for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """A slide's file, or folder, by its absolute path.

    Of it and the files beside it that hold coordinates and metadata: bytes, time of the last change in nanoseconds, and SHA-256.
    """

    file: str
    size: int
    time: int
    digest: str


def source_of(path: Path, beside: Sequence[Path] = ()) -> Source:
    """What a slide's file, and those beside it that belong to it, hold now.

    Raises:
        OSError: If one cannot be read.
    """
    return Source(str(path.absolute()), *_stat((path, *beside)), digest_of(path, *beside))


def is_same(source: Source, path: Path, beside: Sequence[Path] = ()) -> bool:
    """Whether the files have the same content, at any path; they are read if the place or the time differs."""
    try:
        size, time = _stat((path, *beside))
        is_untouched = (str(path.absolute()), time) == (source.file, source.time)
        return size == source.size and (is_untouched or digest_of(path, *beside) == source.digest)
    except OSError:
        return False


def digest_of(*paths: Path) -> str:
    """SHA-256 of a file; of a folder or several files, that of the digests of all files in them."""
    digests = []
    for path in _files(paths):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        digests.append(digest.hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _files(paths: Sequence[Path]) -> list[Path]:
    """Files, and of folders those inside, in the order of their names."""
    return [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if not file.is_dir()]


def _stat(paths: Sequence[Path]) -> tuple[int, int]:
    stats = [file.stat() for file in _files(paths)]
    return sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)
