"""Which file a slide was read from: a run that goes on must not take another one for it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """A file, or a folder that is one slide: its absolute path, bytes, time of the last change in nanoseconds, and SHA-256."""

    file: str
    size: int
    time: int
    digest: str


def source_of(path: Path) -> Source:
    """What a file holds now.

    Raises:
        OSError: If it cannot be read.
    """
    size, time = _stat(path)
    return Source(str(path.absolute()), size, time, digest_of(path))


def is_same(source: Source, path: Path) -> bool:
    """Whether a file still holds what it held, wherever it lies; it is read only where its place or time is another."""
    try:
        size, time = _stat(path)
        if size != source.size:
            return False
        return (str(path.absolute()), time) == (source.file, source.time) or digest_of(path) == source.digest
    except OSError:
        return False


def digest_of(path: Path) -> str:
    """SHA-256 of a file; of a folder, of the names and digests in it."""
    digest = hashlib.sha256()
    if path.is_dir():
        for inner in _within(path):
            digest.update(f"{inner.relative_to(path).as_posix()}\0{digest_of(inner)}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _within(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _stat(path: Path) -> tuple[int, int]:
    found = [inner.stat() for inner in (_within(path) if path.is_dir() else [path])]
    return sum(each.st_size for each in found), max((each.st_mtime_ns for each in found), default=0)
