"""`flexdilated train`: options in, a run under a progress bar, models, picture and sample out."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from flexdilated.cli.options import (
    CudaDeviceOption,
    DilationRatesOption,
    GlobalTokensOption,
    SegmentLengthsOption,
    WindowOption,
    device_named,
    device_of_rank,
    pattern_named,
    require_matplotlib,
)
from flexdilated.cli.refusal import refuse
from flexdilated.core.description import connection
from flexdilated.core.pattern import DilatedPattern

# Options that do not change what the default run learns.
UNRELATED = {"output", "resume", "resume_if_any", "overwrite", "device", "checkpoint_every", "compiled", "timeout_seconds"}


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
    timeout_seconds: Annotated[int, typer.Option(min=1, help="How long a rank of torchrun waits for the others.")] = 300,
) -> None:
    """Train a byte-level LongNet on text and report bits per held-out byte (lower is better; raw bytes are 8).

    Without lengths, rates, window and global tokens the pattern is DilatedPattern.causal(tokens, heads), also with --weights.

    The default run takes about 2 to 6 minutes on 2 CPU cores. Ctrl-C saves a checkpoint first; --resume goes on exactly there.

    The P processes of torchrun --nproc-per-node P -m flexdilated train share each sequence. A checkpoint fits any P.
    With torchrun's --max-restarts, --resume-if-any is right for the first start and for every other.
    """
    values = dict(locals())
    import torch

    from flexdilated.analysis import missing_residues
    from flexdilated.cli.training import PICTURE, RUNS, SAMPLE, finish, prepare, run_trainer
    from flexdilated.core.hardware import detect
    from flexdilated.nn.config import LongNetConfig
    from flexdilated.nn.position import SCALE_BASE, scale_base_for
    from flexdilated.training.corpus import BYTES, load_corpus
    from flexdilated.training.distributed import process_group, ranks_started
    from flexdilated.training.options import TrainOptions
    from flexdilated.training.trainer import Trainer
    from flexdilated.training.weights import read_weights

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
    configs = {name: LongNetConfig(pattern=pattern, **sizes) for name, pattern in patterns.items()}
    corpus = load_corpus(text or [], sequence_length, without=[output / name for name in (*RUNS, PICTURE, SAMPLE)])
    with process_group(num_ranks, rank, place, timeout_seconds) as mesh:
        resume = prepare(output, resume=resume, resume_if_any=resume_if_any, overwrite=overwrite, mesh=mesh)
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
            trainers[name] = run_trainer(trainer, name, resume, console)
    if rank == 0:
        defaults = {name: parameter.default for name, parameter in inspect.signature(train).parameters.items()}
        changed = {name for name, default in defaults.items() if values[name] != default}
        finish(trainers, corpus, output, console, is_default=changed <= UNRELATED)
