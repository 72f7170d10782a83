"""The run of `flexdilated train`: what it prints, and what it writes beside models."""

from __future__ import annotations

import gzip
import lzma
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flexdilated.cli.generate import continued, printable
from flexdilated.cli.refusal import first_line, refuse
from flexdilated.core.files import replaced
from flexdilated.draw.figure import write
from flexdilated.draw.losses import draw_losses
from flexdilated.training import checkpoint
from flexdilated.training.corpus import Corpus
from flexdilated.training.distributed import ensure_equal
from flexdilated.training.options import TrainOptions, UserError
from flexdilated.training.trainer import Trainer

if TYPE_CHECKING:  # one process needs no torch.distributed
    from torch.distributed.device_mesh import DeviceMesh

RUNS = ("dilated", "dense")  # the folders of a run, the second with --dense
PICTURE, SAMPLE = "loss.png", "sample.txt"
PROMPT_BYTES, SAMPLE_BYTES = 64, 240
DENSE_BITS = 3.39  # per held-out byte: --dense of the default run, torch 2.13.0, sources of Python 3.11, AMD EPYC, 2026-11-28


def run_trainer(trainer: Trainer, name: str, resume: bool, console: Console) -> Trainer:
    """Run a trainer to its end under a progress bar."""
    # The dense run is the second one: it may not have begun when the first run was stopped.
    if resume and (name == "dilated" or checkpoint.latest(trainer.folder) is not None):
        trainer.resume()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    options, begun = trainer.options, trainer.step
    size = f"{options.batch_size * options.sequence_length:,} bytes"
    console.print(f"{name}: {parameters / 1e6:.2f} M parameters, step {begun} of {options.steps}, {size} each", soft_wrap=True)
    if trainer.begins_with and trainer.step == 0:
        console.print(f"{name}: the initial weights give {trainer.evaluate():.3f} bits per held-out byte")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    if options.compile and begun < options.steps:
        console.print(
            f"{name}: the first step compiles, about a minute on an idle CPU; after step 2, an estimate of the rest follows"
        )
    with Progress(*columns, console=console) as progress:
        status = "compiling" if options.compile else ""
        task = progress.add_task(name, total=options.steps, completed=begun, status=status)

        def report(latest: Trainer) -> None:
            held_out = "" if latest.held_out is None else f", held out {latest.held_out:.2f}"
            status = f"{latest.bytes_per_second / 1e3:.1f} kB/s  bits/byte: train {latest.history[-1]['train']:.2f}{held_out}"
            progress.update(task, completed=latest.step, status=status)
            if latest.step == begun + 2:  # the first step compiles
                compiling, step_time = (entry["seconds"] for entry in latest.history[-2:])
                steps_left = options.steps - latest.step
                left = _duration(steps_left * step_time)
                console.print(f"{name}: the first step took {_duration(compiling)}; {steps_left} steps are left, about {left}")

        try:
            finished = trainer.run(report)
        except RuntimeError as error:
            if not options.compile or "compiler" not in str(error).lower():
                raise
            refuse(f"--compile must find a C++ compiler; install one or use --no-compile ({first_line(error)})")
    if not finished:
        console.print("stopped; the checkpoint is saved: the same command with --resume goes on")
        raise typer.Exit(130)
    return trainer


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def finish(trainers: dict[str, Trainer], corpus: Corpus, output: Path, console: Console, *, is_default: bool) -> None:
    """Save the models, the picture and a sample, and print the result."""
    table = Table("attention", "bits per held-out byte", "kB/s", "minutes")
    for name, trainer in trainers.items():
        trainer.model.save_pretrained(trainer.folder)
        speed, minutes = f"{trainer.bytes_per_second / 1e3:.1f}", f"{trainer.seconds / 60:.1f}"
        table.add_row(name, f"{trainer.held_out:.3f}", speed, minutes)
    model, options = trainers["dilated"].model, trainers["dilated"].options
    histories = {name: trainer.history for name, trainer in trainers.items()}
    write(draw_losses(histories, bytes_per_step=options.batch_size * options.sequence_length), output / PICTURE)
    prompt = bytes(corpus.held_out[:PROMPT_BYTES].tolist())
    written = continued(model, prompt, num_bytes=SAMPLE_BYTES, temperature=0.7, seed=options.seed)
    with replaced(output / SAMPLE) as file:
        file.write(written)
    console.print(table)
    console.print("sample (prompt in bold):")
    shown = Text(printable(prompt), style="bold")
    console.print(shown.append(printable(written[len(prompt) :]), style="not bold"))
    console.print(f"saved in {output}: dilated/model.safetensors, loss.png, sample.txt", soft_wrap=True)
    for line in (_meaning(corpus), beside_dense(trainers, is_default=is_default), _next_commands(output, options)):
        console.print(line, soft_wrap=True, highlight=False)


def _meaning(corpus: Corpus) -> str:
    text = corpus.held_out.numpy().tobytes()
    gzip_bits, xz_bits = (8 * len(packed) / len(text) for packed in (gzip.compress(text, 9), lzma.compress(text, preset=9)))
    return f"bits per byte: raw bytes have 8; gzip compresses all held-out text to {gzip_bits:.2f}, xz to {xz_bits:.2f}"


def beside_dense(trainers: dict[str, Trainer], *, is_default: bool) -> str:
    bits = trainers["dense"].held_out if "dense" in trainers else DENSE_BITS if is_default else None
    if bits is None:
        return "a dense model of this size, trained for as many steps: add --dense --overwrite to the command"
    source = "" if "dense" in trainers else ", measured once with the default options; --dense --overwrite measures it here"
    return f"a dense model of this size, trained for as many steps: {bits:.2f} bits per held-out byte{source}"


def _next_commands(output: Path, options: TrainOptions) -> str:
    more = f"flexdilated train --text FOLDER --steps {10 * options.steps} --output runs/longer"
    return f"next: flexdilated generate --model {output / 'dilated'} --prompt 'def '; your own text, longer: {more}"


def prepare(output: Path, *, resume: bool, resume_if_any: bool, overwrite: bool, mesh: DeviceMesh | None) -> bool:
    """Whether to resume from a checkpoint. Raises UserError for an earlier run if no option says what to do with it."""
    flags = {"--resume": resume, "--resume-if-any": resume_if_any, "--overwrite": overwrite}
    named = [option for option, is_set in flags.items() if is_set]
    if len(named) > 1:
        raise UserError(f"{named[0]} must come without {named[1]}, got both")
    earlier = {name: checkpoint.step_of(path) for name in RUNS if (path := checkpoint.latest(output / name)) is not None}
    # All ranks look at the folder before rank 0 discards an earlier run, and continue after it.
    ensure_equal(mesh, {"what to do with an earlier run": named, "the checkpoints that they see in --output": earlier})
    if resume or (resume_if_any and RUNS[0] in earlier):
        return True
    if earlier and not overwrite:
        folder = output / next(iter(earlier))
        raise UserError(f"--output must hold no earlier run, got {folder}; use --resume, --overwrite or another folder")
    if mesh is None or mesh.get_local_rank() == 0:
        for name in earlier:
            shutil.rmtree(output / name)
    ensure_equal(mesh, {})
    return False
