"""Which file a slide was read from: a run that goes on must not take another one for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """A file, or a folder that is one slide: its absolute path, bytes, time of the last change in nanoseconds, and SHA-256.

    `beside` is that of the files of coordinates and metadata beside it, empty where there are none.
    """

    file: str
    size: int
    time: int
    digest: str
    beside: str = ""


def source_of(path: Path, beside: Sequence[Path] = ()) -> Source:
    """What a file, and those beside it that belong to it, hold now.

    Raises:
        OSError: If it cannot be read.
    """
    size, time = _stat(path)
    return Source(str(path.absolute()), size, time, digest_of(path), _digest_of_all(beside))


def is_same(source: Source, path: Path, beside: Sequence[Path] = ()) -> bool:
    """Whether the files have the same content, at any path; `path` is read if its place or time differs."""
    try:
        size, time = _stat(path)
        if size != source.size or _digest_of_all(beside) != source.beside:
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


def _digest_of_all(paths: Sequence[Path]) -> str:
    """Of one file its own, of several that of theirs."""
    digests = [digest_of(path) for path in paths]
    return "".join(digests) if len(digests) < 2 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _within(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _stat(path: Path) -> tuple[int, int]:
    found = [inner.stat() for inner in (_within(path) if path.is_dir() else [path])]
    return sum(each.st_size for each in found), max((each.st_mtime_ns for each in found), default=0)
