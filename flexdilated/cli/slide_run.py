"""The run behind `flexdilated encode-slides`: which slides, on which rank, under a progress bar, into parts."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flexdilated._version import __version__
from flexdilated.cli.refusal import first_line, refuse
from flexdilated.hub.slide_encoder import LongNetViT
from flexdilated.hub.slides import encode, lock, store
from flexdilated.hub.slides.encode import Clock, EncodedSlide, FailedSlide
from flexdilated.hub.slides.formats import count_tiles
from flexdilated.hub.slides.ranks import sharded, spread
from flexdilated.hub.slides.source import Source, is_same

if TYPE_CHECKING:  # one process needs no torch.distributed
    from torch.distributed.device_mesh import DeviceMesh

    from flexdilated.distributed.answering import AnsweringStore

PART_SECONDS, PART_BYTES = 2.0, 2**28  # after which what is encoded is written
SOME_FAILED = 1  # the exit code
CHANGED = "is not the file that was encoded under its name, or has other coordinates; use --overwrite or another output"


class Job(NamedTuple):
    """What is to be done."""

    model: LongNetViT
    slides: Mapping[str, Path]
    output: Path
    options: Mapping[str, Any]  # of encode.encode_slides
    split_above: int | None
    told: Mapping[str, str | None]  # of this run, in the provenance


class Ranks(NamedTuple):
    """This process among those of the run."""

    rank: int
    mesh: DeviceMesh | None
    counters: AnsweringStore | None


@dataclass
class _Kept:
    """What a run has encoded: written in parts, every few seconds."""

    output: Path
    slides: list[EncodedSlide] = field(default_factory=list)
    seconds: float = 0.0  # of writing
    since: float = field(default_factory=time.perf_counter)
    encoded: int = 0
    tiles: int = 0

    def add(self, slide: EncodedSlide) -> None:
        self.slides.append(slide)
        self.encoded += 1
        self.tiles += len(slide.coords)
        if sum(kept.tiles.nbytes for kept in self.slides if kept.tiles is not None) > PART_BYTES:
            self.write()

    def rest(self) -> None:
        """Between two packs: what is held would be lost with the process while the next one is encoded."""
        if time.perf_counter() - self.since > PART_SECONDS:
            with _writing(self.output):
                self.write()

    def write(self) -> None:
        start = time.perf_counter()
        store.write_part(self.output, self.slides)
        self.slides = []
        self.since = time.perf_counter()
        self.seconds += self.since - start


def run(job: Job, settings: Mapping[str, Any], ranks: Ranks, *, resume: bool, overwrite: bool) -> int:
    """Encode what is not done yet; the exit code."""
    start = time.perf_counter()
    clock, kept, failed = Clock(), _Kept(job.output), []
    with ExitStack() as stack:
        plan: list[Any] = []
        if ranks.rank == 0:
            try:
                with _writing(job.output):
                    stack.enter_context(lock.locked(job.output))
                    done = store.begin(job.output, settings, {**_versions(), **job.told}, resume=resume, overwrite=overwrite)
                plan = [*_left(job, done, 1 if ranks.mesh is None else ranks.mesh.size()), len(done)]
            except (lock.StoreError, typer.Exit) as refusal:  # the others wait to be told
                plan = [refusal]
        plan = _told(ranks, plan)
        if len(plan) == 1:
            raise plan[0]
        changed, together, shares, num_done = plan
        if ranks.rank == 0:
            failed += [_echoed(failure) for failure in changed]
        own = shares[ranks.rank]
        total = num_done + len(together) + sum(len(share) for share in shares)
        options = {"clock": clock, "between": kept.rest, **job.options}
        results = encode.encode_slides(job.model, {name: job.slides[name] for name in own}, **options)
        if together:
            assert ranks.mesh is not None
            large = {name: job.slides[name] for name in together}
            results = chain(encode.encode_slides(sharded(job.model, ranks.mesh), large, **options), results)
        try:
            for result in _shown(results, ranks, total, num_done, len(together)):
                if isinstance(result, FailedSlide):
                    failed.append(_echoed(result))
                    continue
                with _writing(job.output):
                    kept.add(result)
                if result.note is not None:
                    typer.echo(f"note: '{result.path}': {result.note}", err=True)
        except (KeyboardInterrupt, RuntimeError, TimeoutError) as error:  # the latter of a rank that is lost, or of a defect
            with _writing(job.output):
                kept.write()
            if isinstance(error, KeyboardInterrupt):
                typer.echo("what is done is kept: the same command with --resume goes on", err=True)
            raise
        with _writing(job.output):
            kept.write()
        everything = _gathered(ranks, (failed, kept.encoded, kept.tiles))
        try:
            return 0 if ranks.rank > 0 else _finished(job, kept, clock, everything, num_done, start)
        finally:
            _gathered(ranks, None)  # torchrun ends all ranks as soon as one has ended with a code that is not 0


def _finished(job: Job, kept: _Kept, clock: Clock, everything: list[Any], num_done: int, start: float) -> int:
    """Put the output together and say what has been done; the exit code."""
    failures = [failure for part in everything for failure in part[0]]
    encoded, tiles = (sum(part[i] for part in everything) for i in (1, 2))
    if num_done + encoded == 0:
        store.discard(job.output)
        typer.echo("no slide could be encoded, and nothing is written", err=True)
        return SOME_FAILED
    finishing = time.perf_counter()
    with _writing(job.output):
        written = store.finish(job.output, job.slides, failures)
    end = time.perf_counter()
    seconds, writing = end - start, kept.seconds + end - finishing
    typer.echo(
        f"encoded {encoded:,} slides of {tiles:,} tiles in {seconds:.1f} s, {encoded / seconds:.2f} slides/s, "
        f"{tiles / seconds:,.0f} tiles/s; waited {clock.reading / seconds:.1%} for files, wrote {writing / seconds:.1%}"
    )
    typer.echo(f"wrote {written:,} slides to '{job.output}'" + (f", {len(failures):,} failed" if failures else ""))
    return SOME_FAILED if failures else 0


def _left(job: Job, done: Mapping[str, Source], count: int) -> tuple[list[FailedSlide], list[str], list[list[str]]]:
    """Slides whose file has changed since they were encoded; those for all ranks together; those of each rank."""
    changed = [
        FailedSlide(name, path, CHANGED)
        for name, path in job.slides.items()
        if name in done and not is_same(done[name], path, job.options["reading"].files_beside(name, path))
    ]
    left = [name for name in job.slides if name not in done]
    if count == 1:
        return changed, [], [left]
    sizes = {name: count_tiles(job.slides[name], job.options["reading"].table) for name in left}
    together = [name for name in left if job.split_above is not None and sizes[name] > job.split_above]
    return changed, together, spread({name: sizes[name] for name in left if name not in together}, count)


def _told(ranks: Ranks, plan: list[Any]) -> list[Any]:
    """What rank 0 says."""
    if ranks.mesh is None:
        return plan
    import torch.distributed as dist

    box = [plan]
    dist.broadcast_object_list(box, src=0, group=ranks.mesh.get_group())
    return box[0]


def _gathered(ranks: Ranks, value: Any) -> list[Any]:
    """Of every rank."""
    if ranks.mesh is None:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * ranks.mesh.size()
    dist.all_gather_object(values, value, group=ranks.mesh.get_group())
    return values


def _shown(
    results: Iterator[EncodedSlide | FailedSlide], ranks: Ranks, total: int, done: int, shared: int
) -> Iterator[EncodedSlide | FailedSlide]:
    """The results that this rank keeps, under a bar that counts those of all ranks; the first ones, `shared`, are rank 0's."""
    console = Console(stderr=True)
    columns = (
        TextColumn("slides"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    start, tiles, slides = time.perf_counter(), 0, 0
    with Progress(*columns, console=console, disable=ranks.rank > 0 or not console.is_terminal) as progress:
        task = progress.add_task("slides", total=total, completed=done, status="")
        for i, result in enumerate(results):
            if i < shared and ranks.rank > 0:
                continue
            size = len(result.coords) if isinstance(result, EncodedSlide) else 0
            slides, tiles = slides + 1, tiles + size
            if ranks.counters is not None:
                slides, tiles = ranks.counters.add("slides", 1), ranks.counters.add("tiles", size)
            seconds = time.perf_counter() - start
            status = f"{slides / seconds:.2f} slides/s  {tiles / seconds:,.0f} tiles/s"
            progress.update(task, completed=min(total, done + slides), status=status)
            yield result


def _echoed(failure: FailedSlide) -> FailedSlide:
    typer.echo(f"error: '{failure.path}' {failure.reason}", err=True)
    return failure


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        refuse(f"--output must be a file that can be written, got '{output}': {reason}; what is done is kept for --resume")


def _versions() -> dict[str, str]:
    return {
        "flexdilated": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "begun": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
