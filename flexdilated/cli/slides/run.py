"""The run of `flexdilated slides encode-all`: slides that are left, with a progress bar, one file each."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import track

from flexdilated._version import __version__
from flexdilated.cli.refusal import first_line, refuse
from flexdilated.slides import encode, store
from flexdilated.slides.encode import FailedSlide
from flexdilated.slides.model import LongNetViT
from flexdilated.slides.source import is_same

SOME_FAILED = 1  # the exit code
SHOWN = 3  # names of slides that failed for one reason


class EncodingJob(NamedTuple):
    """What one process has to do."""

    model: LongNetViT
    slides: Mapping[str, Path]  # of this process
    output: Path  # a folder
    options: Mapping[str, Any]  # of encode.encode_slides
    settings: Mapping[str, Any]  # what determines the numbers, written into every file
    overwrite: bool
    shows: bool  # whether it has the progress bar


def run(job: EncodingJob) -> int:
    """Encode the slides that have no file yet; the exit code."""
    start, console = time.perf_counter(), Console(stderr=True)
    versions = {"flexdilated": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    remaining, failures = _remaining(job)
    encoded = tiles = 0
    results = encode.encode_slides(job.model, remaining, **job.options)
    is_hidden = not (job.shows and console.is_terminal)
    for result in track(results, "slides", total=len(remaining), console=console, disable=is_hidden):
        if isinstance(result, FailedSlide):
            failures.add(result.path, result.reason)
            continue
        with writing_slides(job.output):
            store.write_slide(job.output, result, job.settings, versions)
        encoded, tiles = encoded + 1, tiles + len(result.coords)
        if result.note is not None:
            typer.echo(f"note: '{result.path}': {result.note}", err=True)
    failures.say_others()
    seconds = time.perf_counter() - start
    skipped = len(job.slides) - len(remaining)
    parts = [f"wrote {_slides(encoded)} of {tiles:,} tiles to '{job.output}' in {seconds:.1f} s"]
    parts += [f"{skipped:,} had files"] if skipped else []
    num_failed = sum(map(len, failures.values()))
    parts += [f"{num_failed:,} failed"] if num_failed else []
    typer.echo(", ".join(parts))
    return SOME_FAILED if num_failed else 0


class _Failures(dict[str, list[Path]]):
    """Failed slides by reason. The first slide of each reason is printed immediately, the others in one line at the end."""

    def add(self, path: Path, reason: str) -> None:
        if reason not in self:
            typer.echo(f"error: '{path}' {reason}", err=True)
        self.setdefault(reason, []).append(path)

    def say_others(self) -> None:
        for reason, (path, *more_paths) in self.items():
            if more_paths:
                names = ", ".join(f"'{path}'" for path in more_paths[:SHOWN])
                dots = ", ..." if len(more_paths) > SHOWN else ""
                typer.echo(f"error: as '{path}', {len(more_paths):,} more ({names}{dots}): {reason}", err=True)


def _slides(count: int) -> str:
    return f"{count:,} slide{'s' * (count != 1)}"


def collected(job: EncodingJob, path: Path) -> None:
    """Join the files of the job's slides, those that have one."""
    names = [name for name in job.slides if store.file_of(job.output, name).is_file()]
    if not names:
        typer.echo("no slide has a file of embeddings, and nothing is collected", err=True)
        return
    with writing_slides(path, "--collect"):
        store.collect(job.output, names, path)
    typer.echo(f"collected {_slides(len(names))} in '{path}'")


def _remaining(job: EncodingJob) -> tuple[dict[str, Path], _Failures]:
    """The slides without a file, and those with one that was computed from another source file."""
    remaining, changed = {}, _Failures()
    for name, path in job.slides.items():
        file = store.file_of(job.output, name)
        if job.overwrite or not file.exists():
            remaining[name] = path
            continue
        with writing_slides(file):
            source = store.read_source(file, job.settings)
        if not is_same(source, path, job.options["reading"].files_beside(name, path)):
            changed.add(
                path,
                f"is not the file, or has not the coordinates, of its file in '{job.output}'; use --overwrite or another folder",
            )
    return remaining, changed


@contextmanager
def writing_slides(path: Path, option: str = "--output") -> Iterator[None]:
    """End with one line where a file cannot be written or read."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        refuse(
            f"{option} must be a place that can be written, got '{path}': {reason}; the same command goes on where this one ended"
        )
