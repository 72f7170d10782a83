"""`flexdilated train`: options in, a run under a progress bar, models, picture and sample out."""

from __future__ import annotations

import gzip
import inspect
import lzma
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flexdilated.analysis import missing_residues
from flexdilated.cli.generate import continued, printable
from flexdilated.cli.options import (
    CudaDeviceOption,
    DilationRatesOption,
    GlobalTokensOption,
    SegmentLengthsOption,
    WindowOption,
    connection,
    device_named,
    device_of_rank,
    pattern_named,
    require_matplotlib,
)
from flexdilated.cli.refusal import first_line, refuse
from flexdilated.core.files import replaced
from flexdilated.core.hardware import detect
from flexdilated.core.pattern import DilatedPattern
from flexdilated.draw.figure import write
from flexdilated.draw.losses import draw_losses
from flexdilated.nn.config import LongNetConfig
from flexdilated.nn.position import SCALE_BASE, scale_base_for
from flexdilated.training import checkpoint
from flexdilated.training.corpus import BYTES, Corpus, load_corpus
from flexdilated.training.distributed import TIMEOUT_SECONDS, ensure_equal, process_group, ranks_started
from flexdilated.training.options import TrainOptions, UserError
from flexdilated.training.trainer import Trainer
from flexdilated.training.weights import read_weights

if TYPE_CHECKING:  # one process needs no torch.distributed
    from torch.distributed.device_mesh import DeviceMesh

RUNS = ("dilated", "dense")  # the folders of a run, the second with --dense
PICTURE, SAMPLE = "loss.png", "sample.txt"
PROMPT_BYTES, SAMPLE_BYTES = 64, 240
DENSE_BITS = 3.39  # per held-out byte: --dense of the default run, torch 2.13.0, sources of Python 3.11, AMD EPYC, 2026-11-28
UNRELATED = {"output", "resume", "resume_if_any", "overwrite", "device", "checkpoint_every", "compiled", "timeout_seconds"}  # to it


def train(
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            exists=True,
            help="Files or folders to learn, as bytes, whatever they hold, but hidden ones and what the run writes; repeatable. "
            "Default: the sources of Python's standard library.",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", file_okay=False, writable=True, help="Folder for checkpoint, weights, picture and sample."),
    ] = Path("runs/longnet"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --output, with the same options.")] = False,
    resume_if_any: Annotated[
        bool,
        typer.Option("--resume-if-any", help="Go on where --output holds a checkpoint, else start: for torchrun --max-restarts."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Discard an earlier run in --output.")] = False,
    begin_with: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            metavar="FOLDER",
            help="Begin with a saved model, as <output>/dilated of another run: same sizes, any pattern.",
        ),
    ] = None,
    dense_too: Annotated[bool, typer.Option("--dense", help="Then train the same model with dense attention, to compare.")] = False,
    sequence_length: Annotated[int, typer.Option("--tokens", min=2, help="Length of a sequence; a token is a byte.")] = 4096,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    segment_lengths: SegmentLengthsOption = None,
    dilation_rates: DilationRatesOption = None,
    window: WindowOption = None,
    global_tokens: GlobalTokensOption = 0,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the model.")] = 4,
    embed_dim: Annotated[int, typer.Option(min=2, help="Elements per token.")] = 192,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 6,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate of AdamW.")] = 3e-3,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps of linear warm-up; then a cosine to a tenth.")] = 20,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Decay of the weight matrices.")] = 0.1,
    clip: Annotated[float, typer.Option(min=1e-6, help="Largest norm of the gradient.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**40, help="Of weights and batches.")] = 0,
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between measurements on held-out text.")] = 20,
    eval_sequences: Annotated[int, typer.Option(min=1, help="Held-out sequences per measurement.")] = 8,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 40,
    device: CudaDeviceOption = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="bfloat16: under autocast. auto: bfloat16 where it is fast.")
    ] = "auto",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the step, with fullgraph=True.")] = True,
    context_parallel: Annotated[int, typer.Option(min=0, help="The ranks that share each sequence: all of torchrun, or 0.")] = 0,
    timeout_seconds: Annotated[
        int, typer.Option(min=1, help="How long a rank of torchrun waits for the others.")
    ] = TIMEOUT_SECONDS,
) -> None:
    """Train a byte-level LongNet on text and report bits per held-out byte (lower is better; raw bytes are 8).

    Without lengths, rates, window and global tokens the pattern is DilatedPattern.causal(tokens, heads), also with --weights.

    The default run takes about 2 to 6 minutes on 2 CPU cores. Ctrl-C saves a checkpoint first; --resume goes on exactly there.

    The P processes of torchrun --nproc-per-node P -m flexdilated train share each sequence. A checkpoint fits any P.
    With torchrun's --max-restarts, --resume-if-any is right for the first start and for every other.
    """
    given = dict(locals())
    warnings.filterwarnings("ignore", "pattern with segments", UserWarning)  # printed below, in one line
    require_matplotlib()  # which draws the losses at the end
    rank, num_ranks = ranks_started()
    if context_parallel not in (0, num_ranks):
        command = f"torchrun --nproc-per-node {context_parallel} -m flexdilated train"
        refuse(f"--context-parallel must be 0 or the number of ranks={num_ranks}, got {context_parallel}; start with {command}")
    console = Console(quiet=rank > 0)
    place = device_named(device, auto=["cuda"]) if num_ranks == 1 else device_of_rank(device)
    causal = DilatedPattern.causal(sequence_length, heads)
    pattern = pattern_named(
        segment_lengths, dilation_rates, window=window, global_tokens=global_tokens, default=causal, heads=heads
    )
    options = TrainOptions(
        sequence_length=sequence_length,
        batch_size=batch_size,
        steps=steps,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        clip=clip,
        seed=seed,
        eval_every=eval_every,
        eval_sequences=eval_sequences,
        checkpoint_every=checkpoint_every,
        dtype=dtype if dtype != "auto" else "bfloat16" if detect(place).has_fast_bfloat16 else "float32",
        compile=compiled,
    )
    weights = None if begin_with is None else read_weights(begin_with)
    begun_with = SCALE_BASE if weights is None else weights.config.scale_base
    scale_base = scale_base_for(sequence_length, begun_with)
    patterns = {"dilated": pattern}
    if dense_too:
        patterns["dense"] = DilatedPattern((max(sequence_length, *pattern.segment_lengths, 1),), (1,))
    sizes: dict[str, Any] = {
        "vocab_size": BYTES,
        "embed_dim": embed_dim,
        "num_layers": layers,
        "num_heads": heads,
        "scale_base": scale_base,
    }
    configs = {name: LongNetConfig(pattern=each, **sizes) for name, each in patterns.items()}
    corpus = load_corpus(text or [], sequence_length, without=[output / name for name in (*RUNS, PICTURE, SAMPLE)])
    with process_group(num_ranks, rank, place, timeout_seconds) as mesh:
        resume = _prepare(output, resume=resume, resume_if_any=resume_if_any, overwrite=overwrite, mesh=mesh)
        ranks = "" if mesh is None else f" over {num_ranks} ranks"
        console.print(
            f"{len(corpus.train) / 1e6:.1f} MB of text, {len(corpus.held_out) / 1e3:.0f} kB held out; "
            f"{place} in {options.dtype}{ranks}, torch {torch.__version__}"
        )
        if scale_base != begun_with and weights is not None:
            console.print(f"positions decay over {scale_base:g} tokens, not {begun_with:g} as in --weights: sequences are longer")
        lost = [rate for rate, residues in zip(pattern.dilation_rates, missing_residues(pattern, heads)) if residues]
        if lost:
            console.print(f"no head keeps some rows of branches of rate {', '.join(map(str, lost))}: there are {heads} heads")
        if not pattern.crosses_boundaries(sequence_length, heads):
            console.print(connection(pattern, sequence_length, heads), soft_wrap=True)
        trainers = {}
        for name, config in configs.items():
            trainer = Trainer(config, options, corpus, output / name, place, mesh=mesh, weights=weights)
            trainers[name] = _train(trainer, name, resume, console)
    if rank == 0:
        defaults = {name: parameter.default for name, parameter in inspect.signature(train).parameters.items()}
        changed = {name for name, default in defaults.items() if given[name] != default}
        _finish(trainers, corpus, output, console, is_default=changed <= UNRELATED)


def _train(trainer: Trainer, name: str, resume: bool, console: Console) -> Trainer:
    """Run a trainer to its end under a progress bar."""
    # The dense run, which comes second, may not have begun when the first was stopped.
    if resume and (name == "dilated" or checkpoint.latest(trainer.folder) is not None):
        trainer.resume()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    options, begun = trainer.options, trainer.step
    size = f"{options.batch_size * options.sequence_length:,} bytes"
    console.print(f"{name}: {parameters / 1e6:.2f} M parameters, step {begun} of {options.steps}, {size} each", soft_wrap=True)
    if trainer.begins_with and trainer.step == 0:
        console.print(f"{name}: the weights that it begins with give {trainer.evaluate():.3f} bits per held-out byte")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    if options.compile and begun < options.steps:
        console.print(
            f"{name}: compiling, in the first step, for about a minute on an idle CPU; step 2 says how long the rest takes"
        )
    with Progress(*columns, console=console) as progress:
        status = "compiling" if options.compile else ""
        task = progress.add_task(name, total=options.steps, completed=begun, status=status)

        def report(now: Trainer) -> None:
            held_out = "" if now.held_out is None else f", held out {now.held_out:.2f}"
            status = f"{now.bytes_per_second / 1e3:.1f} kB/s  bits/byte: train {now.history[-1]['train']:.2f}{held_out}"
            progress.update(task, completed=now.step, status=status)
            if now.step == begun + 2:  # the first step compiles
                first, second = (entry["seconds"] for entry in now.history[-2:])
                left = _duration((options.steps - now.step) * second)
                console.print(
                    f"{name}: the first step took {_duration(first)}; steps left: {options.steps - now.step}, for about {left}"
                )

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


def _finish(trainers: dict[str, Trainer], corpus: Corpus, output: Path, console: Console, *, is_default: bool) -> None:
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
    return f"bits per byte: raw bytes have 8; of all held-out text gzip makes {gzip_bits:.2f}, xz {xz_bits:.2f}"


def beside_dense(trainers: dict[str, Trainer], *, is_default: bool) -> str:
    found = trainers["dense"].held_out if "dense" in trainers else DENSE_BITS if is_default else None
    if found is None:
        return "a dense model of this size and these steps: the same command with --dense --overwrite trains it too"
    kept = "" if "dense" in trainers else ", measured once with the default options; --dense --overwrite measures it here"
    return f"a dense model of this size and these steps: {found:.2f} bits per held-out byte{kept}"


def _next_commands(output: Path, options: TrainOptions) -> str:
    more = f"flexdilated train --text FOLDER --steps {10 * options.steps} --output runs/longer"
    return f"next: flexdilated generate --model {output / 'dilated'} --prompt 'def '; your own text, longer: {more}"


def _prepare(output: Path, *, resume: bool, resume_if_any: bool, overwrite: bool, mesh: DeviceMesh | None) -> bool:
    """Whether to go on from a checkpoint. Refuses to write over an earlier run that nobody said to resume or discard."""
    asked = {"--resume": resume, "--resume-if-any": resume_if_any, "--overwrite": overwrite}
    given = [option for option, is_given in asked.items() if is_given]
    if len(given) > 1:
        raise UserError(f"{given[0]} must come without {given[1]}, got both")
    found = {name: checkpoint.step_of(path) for name in RUNS if (path := checkpoint.latest(output / name)) is not None}
    # Every rank has looked before rank 0 discards or writes, and goes on when it has.
    ensure_equal(mesh, {"what to do with an earlier run": given, "the checkpoints that they see in --output": found})
    if resume or (resume_if_any and RUNS[0] in found):
        return True
    if found and not overwrite:
        folder = output / next(iter(found))
        raise UserError(f"--output must hold no earlier run, got {folder}; use --resume, --overwrite or another folder")
    if mesh is None or mesh.get_local_rank() == 0:
        for name in found:
            shutil.rmtree(output / name)
    ensure_equal(mesh, {})
    return False
