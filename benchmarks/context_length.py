"""Bits per held-out byte against the length of the context: dilated, dense and a local window, at equal bytes seen.

    python -m benchmarks.context_length            # or `nox -s bench -- --context-length`; as much as fits in two hours, resumable
    python -m benchmarks.context_length --quick    # whether it runs

A small byte-level model learns the sources of Python's standard library by the trainer of `flexdilated train`. Every run sees as
many bytes per step, in as many steps, and is measured on the same held-out bytes; only the attention and the length of the
sequences differ. A run that is interrupted goes on from its checkpoint; finished runs are kept in the results and not repeated.

- dense: a query sees all bytes before it.
- window: a query sees the bytes before it in its own segment of 256, whatever the length: the control that a longer sequence alone
  brings nothing.
- dilated: segments of 256, 1,024, 4,096, ... up to the length at rates 1, 2, 4, ...; each branch costs as many pairs as the last,
  and at 8 heads every position is kept by some head at every rate.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.environment import commit, describe, driver, save
from flexdilated import DilatedPattern, LongNetConfig
from flexdilated.core.hardware import detect, recommended_dtype
from flexdilated.nn.position import scale_base_for
from flexdilated.training.corpus import BYTES, Corpus, load_corpus
from flexdilated.training.options import TrainOptions, UserError
from flexdilated.training.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "context_length.json"
FOLDER = Path("runs/context_length")
ATTENTIONS = ("dilated", "dense", "window")
WINDOW = 256


class Cell(NamedTuple):
    """One run."""

    attention: str
    length: int
    seed: int


@dataclass(frozen=True)
class Settings:
    """What all runs have in common."""

    lengths: tuple[int, ...]
    seeds: int
    steps: int
    bytes_per_step: int
    evaluated_bytes: int
    layers: int
    embed_dim: int
    heads: int
    learning_rate: float = 3e-3
    warmup_steps: int = 20

    def __post_init__(self) -> None:
        for length in self.lengths:
            if self.bytes_per_step % length or self.evaluated_bytes % length:
                totals = f"the {self.bytes_per_step} bytes of a step and the {self.evaluated_bytes} of a measurement"
                raise UserError(f"--lengths must divide {totals}, got {length}")


FULL = Settings((256, 1024, 4096, 16384), 3, 150, 16384, 131072, layers=2, embed_dim=128, heads=8)
QUICK = Settings((64, 512), 1, 4, 512, 1024, layers=1, embed_dim=16, heads=2, warmup_steps=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not yet kept, the first seed of all lengths first."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny runs, kept only under --output: whether it runs")
    parser.add_argument("--lengths", type=int, nargs="+", help="bytes of a sequence")
    parser.add_argument("--seeds", type=int, help="runs of each kind")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run")
    parser.add_argument("--bytes-per-step", type=int, help="sequences of a step times their length")
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no run after so many; the same command goes on")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files or folders; default: Python's standard library")
    parser.add_argument("--output", type=Path, help=f"the results; default: {RESULTS.relative_to(RESULTS.parents[2])}")
    parser.add_argument("--overwrite", action="store_true", help="begin anew where the results are of other settings or text")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="checkpoints of the run in progress")
    parser.add_argument("--layers", type=int, help="of the models")
    parser.add_argument("--embed-dim", type=int, help="elements of a token of the models")
    parser.add_argument("--device", default="cpu", help="where models run; seeds of the same device alone are comparable")
    parser.add_argument("--commit", help="of the code, where there is no git")
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words)

    overrides = {
        name: getattr(options, name)
        for name in ("seeds", "steps", "bytes_per_step", "layers", "embed_dim")
        if getattr(options, name) is not None
    }
    if options.lengths:
        overrides["lengths"] = tuple(options.lengths)
    output = options.output or (None if options.quick else RESULTS)
    try:
        settings = replace(QUICK if options.quick else FULL, **overrides)
        corpora = {length: load_corpus(options.text, length) for length in settings.lengths}
        report = read(output, settings, corpora[settings.lengths[0]], overwrite=options.overwrite)
        report["command"] = shlex.join(
            ["python", "-m", "benchmarks.context_length", *(sys.argv[1:] if arguments is None else arguments)]
        )
        finished = {Cell(run["attention"], run["length"], run["seed"]) for run in report["runs"]}
        start = time.monotonic()
        for cell in cells(settings):
            if cell in finished:
                continue
            if time.monotonic() - start > 60 * options.minutes:
                print(f"{options.minutes:g} minutes are over; the same command goes on")
                break
            result = run(cell, settings, corpora[cell.length], options.folder, options.device)
            if result is None:
                print("stopped; the same command goes on")
                return 130
            report["runs"].append(result | {"commit": options.commit or commit()})
            if output is not None:
                save(report, output)
    except UserError as error:
        parser.error(str(error))
    return 0


def read(output: Path | None, settings: Settings, corpus: Corpus, *, overwrite: bool) -> dict[str, Any]:
    """The report so far, or an empty one.

    Raises:
        UserError: If there is one of other settings or another text, or too little text is held out.
    """
    least, held_out = settings.evaluated_bytes, corpus.held_out.numel()
    if held_out <= least:
        raise UserError(f"--text must leave more than {least} held-out bytes, a twentieth of it, got {held_out}")
    common = json.loads(json.dumps(asdict(settings)))
    del common["lengths"], common["seeds"]  # more of them may be asked for later
    text = {"bytes": corpus.train.numel() + corpus.held_out.numel(), "sha256": corpus.digest}
    empty: dict[str, Any] = {"settings": common, "text": text, "runs": []}
    if output is None or not output.exists():
        return empty
    report: dict[str, Any] = json.loads(output.read_text())
    if overwrite and (report["settings"], report["text"]) != (common, text):
        return empty
    for name, current in (("settings", common), ("text", text)):
        if report[name] != current:
            raise UserError(f"--output must hold runs of the same {name}={report[name]}, got {current}; use another or --overwrite")
    return report


def cells(settings: Settings) -> list[Cell]:
    """All runs, the first seed of everything first. At one window's length or less all three are one: it is run as dense."""
    return [
        Cell(attention, length, seed)
        for seed in range(settings.seeds)
        for length in settings.lengths
        for attention in (ATTENTIONS if length > WINDOW else ("dense",))
    ]


def pattern_of(attention: str, length: int) -> DilatedPattern:
    """What attends to what."""
    if attention == "dense":
        return DilatedPattern((length,), (1,))
    if attention == "window":
        return DilatedPattern((WINDOW,), (1,))
    lengths = [WINDOW]
    while lengths[-1] < length:
        lengths.append(min(4 * lengths[-1], length))
    return DilatedPattern(tuple(lengths), tuple(2**i for i in range(len(lengths))))


def run(cell: Cell, settings: Settings, corpus: Corpus, folder: Path, device: str) -> dict[str, Any] | None:
    """Train one model to its end, from its checkpoint where it has one; None if it was interrupted."""
    pattern = pattern_of(cell.attention, cell.length)
    config = LongNetConfig(
        vocab_size=BYTES,
        embed_dim=settings.embed_dim,
        num_layers=settings.layers,
        num_heads=settings.heads,
        pattern=pattern,
        scale_base=scale_base_for(cell.length),
    )
    dtype = recommended_dtype(detect(device))
    options = TrainOptions(
        sequence_length=cell.length,
        batch_size=settings.bytes_per_step // cell.length,
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        weight_decay=0.1,
        clip=1.0,
        seed=cell.seed,
        eval_every=max(1, settings.steps // 2),
        eval_sequences=settings.evaluated_bytes // cell.length,
        checkpoint_every=max(1, settings.steps // 5),
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        compile=False,  # it takes longer than it saves in a run as short as these
    )
    place = folder / f"{cell.attention}-{cell.length}-{cell.seed}"
    trainer = Trainer(config, options, corpus, place, torch.device(device))
    if any(place.glob("checkpoint-*")):
        trainer.resume()
    if not trainer.run(lambda _: None):
        return None
    shutil.rmtree(place)
    held_out = [
        {"bytes_seen": entry["step"] * settings.bytes_per_step, "bits_per_byte": round(entry["held_out"], 4)}
        for entry in trainer.history
        if "held_out" in entry
    ]
    print(f"{cell.attention} {cell.length:,} seed {cell.seed}: {trainer.held_out:.3f} bits, {trainer.seconds:.0f} s", flush=True)
    columns = ("device_class", "threads", "torch", "date") if device == "cpu" else ("torch", "date")
    about = {key: value for key, value in describe().items() if key in columns}
    if device != "cpu":
        about |= {"device_class": torch.cuda.get_device_name(device), "driver": driver()}
    return {
        **cell._asdict(),
        "pattern": pattern.to_dict(),
        "pairs_per_byte": pattern.count_pairs(cell.length, settings.heads, is_causal=True) / cell.length / settings.heads,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "bits_per_byte": round(trainer.held_out, 4),
        "held_out": held_out,
        "dtype": options.dtype,
        **about,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
