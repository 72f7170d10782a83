"""The file of embeddings: written in parts, each whole or not there; put together at the end."""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from flexdilated.draw.figure import replaced
from flexdilated.hub.slides.encode import EncodedSlide, FailedSlide
from flexdilated.hub.slides.lock import StoreError
from flexdilated.hub.slides.source import Source

FORMAT = "flexdilated slides 2"
# What a run leaves beside its output until the end.
RUN, PART = "run.json", "part-*.h5"
# What a file holds of every slide beside its embedding.
TEXTS = ("names", "files", "file_digests", "coords_digests")
NUMBERS = ("num_tiles", "file_sizes", "file_times")
ANEW = "anew"  # says that the output is of an earlier run, which is to be replaced


class _DamagedError(StoreError):
    """A file that is not whole."""


def parts_folder(output: Path) -> Path:
    """Where the parts of an output lie until it is whole."""
    return output.with_name(output.name + ".parts")


def begin(
    output: Path, settings: Mapping[str, Any], versions: Mapping[str, Any], *, resume: bool, overwrite: bool
) -> dict[str, Source]:
    """Make the folder of parts, or go on in it; what is done already, by name.

    Args:
        output: The file.
        settings: What must be the same in every run of one output.
        versions: What is told of this run alone.
        resume: Whether to go on.
        overwrite: Whether to begin anew where there is something. The output stays until the new one replaces it.

    Raises:
        StoreError: If there is something and neither is asked for, or what is there was made with other settings.
        OSError: If the folder cannot be written.
    """
    folder = parts_folder(output)
    if overwrite:
        _remove(folder)
    elif not resume and (output.exists() or (folder / RUN).exists()):
        there = output if output.exists() else folder
        raise StoreError(f"--output must not exist, got '{there}'; use --resume, --overwrite or another name")
    done: dict[str, Source] = {}
    runs: list[Any] = []
    if kept := None if overwrite else _kept(output):
        with _opened(kept) as file:
            provenance = json.loads(file.attrs["provenance"])
            _check_settings(output, provenance["settings"], settings)
            done, runs = _listed(file), provenance["runs"]
    if (folder / RUN).exists():
        provenance = _read_run(folder / RUN)
        _check_settings(folder, provenance["settings"], settings)
        runs = provenance["runs"]
    for part in sorted(folder.glob(PART)):
        try:
            with _opened(part) as file:
                done |= _listed(file)
        except _DamagedError:  # of a machine that went down: its slides are encoded again
            part.unlink()
    folder.mkdir(exist_ok=True)
    if overwrite and output.exists():
        (folder / ANEW).touch()
    _write(folder / RUN, json.dumps({"settings": settings, "runs": [*runs, versions]}, indent=1).encode())
    return done


def write_part(output: Path, slides: Sequence[EncodedSlide]) -> None:
    """Keep some slides, all or none.

    Raises:
        OSError: If they cannot be written.
    """
    import h5py

    if not slides:
        return
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.attrs["format"] = FORMAT
        texts = zip(*((slide.name, slide.source.file, slide.source.digest, slide.source.beside) for slide in slides))
        numbers = zip(*((len(slide.coords), slide.source.size, slide.source.time) for slide in slides))
        _write_columns(file, dict(zip(TEXTS, texts)), dict(zip(NUMBERS, numbers)))
        file["embeddings"] = np.stack([slide.embedding.numpy() for slide in slides])
        for slide in slides:
            if slide.tiles is not None:
                group = file.create_group(f"tiles/{_quoted(slide.name)}")
                group["embeddings"], group["coords"] = slide.tiles.numpy(), slide.coords.numpy()
    with buffer.getbuffer() as contents:  # released whatever happens: an error's traceback would hold it, and the buffer not close
        _write(parts_folder(output) / f"part-{secrets.token_hex(8)}.h5", contents)


def finish(output: Path, order: Iterable[str], failed: Sequence[FailedSlide]) -> int:
    """Put the parts together, slides in this order and those of an earlier run that it lacks behind them; how many there are.

    The output is replaced at once, and the parts go after that: whatever happens, every slide is in one of the two.

    Raises:
        OSError: If it cannot be written.
    """
    import h5py

    folder = parts_folder(output)
    kept = _kept(output)
    sources = [*([] if kept is None else [kept]), *sorted(folder.glob(PART))]
    found: dict[str, tuple[Path, int]] = {}
    for path in sources:
        with _opened(path) as file:
            found |= {name: (path, row) for row, name in enumerate(_strings(file["names"]))}
    ordered = {name: found[name] for name in order if name in found}
    ordered |= found
    partial = folder / ".whole.h5"
    try:
        _reserve(partial, sum(path.stat().st_size for path in sources))
        with h5py.File(partial, "w") as whole:
            _copy(whole, ordered)
            failures = whole.create_group("failed")
            for key, values in (("names", [slide.name for slide in failed]), ("reasons", [slide.reason for slide in failed])):
                failures.create_dataset(key, data=values, dtype=h5py.string_dtype())
            whole.attrs["format"], whole.attrs["provenance"] = FORMAT, (folder / RUN).read_text()
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(output)
        (folder / ANEW).unlink(missing_ok=True)  # the output is this run's now
    except RuntimeError as error:  # h5py's, of a file that it could not close
        raise OSError(str(error)) from None
    finally:
        with suppress(OSError):
            partial.unlink()
    _remove(folder)
    return len(ordered)


def discard(output: Path) -> None:
    """End a run that has nothing to keep."""
    _remove(parts_folder(output))


def _copy(whole: Any, slides: Mapping[str, tuple[Path, int]]) -> None:
    """Rows of several files as one; one of the files is open at a time, since a long run leaves thousands."""
    rows_of: dict[Path, list[tuple[int, str, int]]] = {}
    for place, (name, (path, row)) in enumerate(slides.items()):
        rows_of.setdefault(path, []).append((place, name, row))
    texts = {key: [""] * len(slides) for key in TEXTS}
    numbers = {key: [0] * len(slides) for key in NUMBERS}
    for path, rows in rows_of.items():
        with _opened(path) as file:
            embeddings = file["embeddings"]
            if "embeddings" not in whole:
                whole.create_dataset("embeddings", (len(slides), *embeddings.shape[1:]), embeddings.dtype)
            strings, integers = {key: _strings(file[key]) for key in TEXTS}, {key: file[key][:].tolist() for key in NUMBERS}
            for place, name, row in rows:
                whole["embeddings"][place] = embeddings[row]
                for key, found in strings.items():
                    texts[key][place] = found[row]
                for key, counts in integers.items():
                    numbers[key][place] = counts[row]
                group = f"tiles/{_quoted(name)}"
                if group in file:
                    file.copy(group, whole.require_group("tiles"), name=_quoted(name))
    _write_columns(whole, texts, numbers)


def _write_columns(file: Any, texts: Mapping[str, Sequence[str]], numbers: Mapping[str, Sequence[int]]) -> None:
    import h5py

    for key, values in texts.items():
        file.create_dataset(key, data=list(values), dtype=h5py.string_dtype())
    for key, counts in numbers.items():
        file[key] = np.array(counts, np.int64)


def _write(path: Path, data: bytes | memoryview) -> None:
    """A whole file, or none, also where the machine goes down."""
    with replaced(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _quoted(name: str) -> str:
    """A name as that of one group, whatever folders stand in it."""
    return name.replace("%", "%25").replace("/", "%2F")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import h5py

    try:
        file = h5py.File(path, "r")
    except OSError as error:
        if error.errno is not None:  # it may be whole, where it cannot be read now
            raise
        raise _DamagedError(f"--output must be a whole file of embeddings, got '{path}': {str(error).splitlines()[0]}") from None
    with file:
        if (found := file.attrs.get("format")) != FORMAT:
            version = f" as '{found}', not '{FORMAT}'" if str(found).startswith(FORMAT.rstrip("0123456789")) else ""
            raise StoreError(
                f"--output must be a file that encode-slides wrote, got '{path}'{version}; use --overwrite or another name"
            )
        yield file


def _kept(output: Path) -> Path | None:
    """The output, where it is one to go on from and none that is being replaced."""
    return output if output.exists() and not (parts_folder(output) / ANEW).exists() else None


def _listed(file: Any) -> dict[str, Source]:
    texts = [_strings(file[key]) for key in TEXTS]
    numbers = [file[key][:].tolist() for key in NUMBERS[1:]]
    columns = zip(*texts, *numbers)
    return {name: Source(path, size, time, digest, beside) for name, path, digest, beside, size, time in columns}


def _strings(dataset: Any) -> list[str]:
    return [text.decode() for text in dataset[:]]


def _read_run(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise StoreError(f"--resume must find a whole '{path}', got: {error}; use --overwrite or another name") from None


def _check_settings(path: Path, kept: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    asked = json.loads(json.dumps(settings))
    other = sorted(key for key in {*kept, *asked} if kept.get(key) != asked.get(key))
    if other:
        told = ", ".join(f"{key} {kept.get(key)!r}, now {asked.get(key)!r}" for key in other)
        raise StoreError(f"--resume must come with the settings of '{path}', which has {told}; use --overwrite or another name")


def _reserve(path: Path, size: int) -> None:
    """Find out before it begins whether a file has room: h5py does not end well where the disk is full."""
    if not hasattr(os, "posix_fallocate"):  # not on Windows and macOS
        return
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(size, 1))
    path.unlink()


def _remove(folder: Path) -> None:
    """What runs have left there, and the folder unless it holds something else.

    What says whose the parts are goes after them: no later run may take parts of other settings for its own.
    """
    for pattern in (PART, ".*.part", ".whole.h5", RUN, ANEW):
        for path in folder.glob(pattern):
            path.unlink()
    with suppress(OSError):
        folder.rmdir()
