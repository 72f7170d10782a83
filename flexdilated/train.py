"""Train a byte-level LongNet on text: data, schedule, loop, checkpoints, sample, picture."""

from __future__ import annotations

import json
import math
import os
import signal
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdilated.nn.longnet import LongNetConfig, LongNetLM
from flexdilated.pattern import DilatedPattern

__all__ = ["Corpus", "TrainOptions", "Trainer", "UserError", "draw_losses", "load_corpus", "sample"]

BYTES = 256
CHECKPOINT_FILE = "checkpoint.pt"
HELD_OUT_FRACTION = 0.05


class UserError(Exception):
    """Something that the user can put right; its text is one line."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What determines a training run: a checkpoint resumes only under the same options and text.

    Args:
        sequence_length: Bytes per sequence.
        batch_size: Sequences per step.
        steps: Optimizer steps.
        learning_rate: Peak of the schedule.
        warmup_steps: Steps of linear warm-up, before a cosine down to a tenth of the peak.
        weight_decay: Of the matrices.
        clip: Largest norm of the gradient.
        seed: Of the initial weights, the batches and dropout.
        eval_every: Steps between measurements on held-out text.
        eval_sequences: Held-out sequences per measurement.
        checkpoint_every: Steps between checkpoints.
        dtype: `"bfloat16"` trains under autocast, `"float32"` does not.
        compile: Whether the step is compiled, with `fullgraph=True`.
    """

    sequence_length: int
    batch_size: int
    steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip: float
    seed: int
    eval_every: int
    eval_sequences: int
    checkpoint_every: int
    dtype: str
    compile: bool


# -- text ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, `uint8`, and a hash of both."""

    train: Tensor
    held_out: Tensor
    digest: str

    def batch(self, step: int, options: TrainOptions) -> Tensor:
        """`(batch_size, sequence_length + 1)` bytes at random places: a function of the seed and the step alone."""
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
        last = self.train.numel() - options.sequence_length
        starts = torch.randint(last, (options.batch_size,), generator=generator).tolist()
        return torch.stack([self.train[s : s + options.sequence_length + 1] for s in starts]).long()

    def held_out_batches(self, options: TrainOptions) -> Iterator[Tensor]:
        """Up to `eval_sequences` held-out sequences, one after another, `batch_size` at a time."""
        length = options.sequence_length
        count = min(options.eval_sequences, (self.held_out.numel() - 1) // length)
        rows = [self.held_out[i * length : (i + 1) * length + 1] for i in range(count)]
        for i in range(0, len(rows) - len(rows) % options.batch_size or len(rows), options.batch_size):
            yield torch.stack(rows[i : i + options.batch_size]).long()


def load_corpus(paths: Sequence[Path], sequence_length: int) -> Corpus:
    """The bytes of files and of all files below folders; by default the sources of Python's standard library.

    Files come in the order of a hash of their names, so that the held-out end of the text is not one corner of it.

    Raises:
        UserError: If a path is missing, unreadable or empty, or the text is too short for the sequence length.
    """
    files = sorted(_files(paths), key=lambda path: sha256(path.name.encode()).digest())
    parts = []
    for path in files:
        try:
            parts.append(path.read_bytes())
        except OSError as error:
            raise UserError(f"--text must be readable, got {path}: {error.strerror}") from None
    text = b"".join(parts)
    if not text:
        raise UserError(f"--text must hold some bytes, got {len(files)} empty file(s)")
    held_out = max(int(len(text) * HELD_OUT_FRACTION), sequence_length + 1)
    if len(text) - held_out < sequence_length + 1:
        raise UserError(
            f"--text must hold at least {2 * (sequence_length + 1)} bytes for --sequence-length {sequence_length}, got {len(text)}"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(data[:-held_out], data[-held_out:], sha256(text).hexdigest())


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    if not paths:
        root = Path(sysconfig.get_paths()["stdlib"])
        yield from (p for p in root.rglob("*.py") if not {"site-packages", "test", "tests", "idlelib"} & set(p.parts))
        return
    for path in paths:
        if path.is_dir():
            yield from (p for p in path.rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.parts))
        elif path.is_file():
            yield path
        else:
            raise UserError(f"--text must be a file or folder that exists, got {path}")


# -- the loop -----------------------------------------------------------------------------------------------------------------


class Trainer:
    """A model, its optimizer and where the run stands.

    Args:
        config: The model.
        options: The run.
        corpus: The text.
        folder: Where the checkpoint goes; made if missing.
        device: Where it runs.

    Raises:
        UserError: If the folder cannot be written.
    """

    def __init__(self, config: LongNetConfig, options: TrainOptions, corpus: Corpus, folder: Path, device: torch.device) -> None:
        self.config, self.options, self.corpus, self.folder, self.device = config, options, corpus, folder, device
        _ensure_writable(folder)
        torch.manual_seed(options.seed)
        self.model = LongNetLM(config).to(device)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.learning_rate,
            betas=(0.9, 0.95),
        )
        self.loss = torch.compile(self._loss, fullgraph=True, dynamic=False) if options.compile else self._loss
        self.step = 0
        self.seconds = 0.0
        self.history: list[dict[str, float]] = []

    # -- one step

    def _loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats."""
        bfloat16 = self.options.dtype == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def _learning_rate(self, step: int) -> float:
        options = self.options
        if step < options.warmup_steps:
            return options.learning_rate * (step + 1) / options.warmup_steps
        done = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
        return options.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))

    def _advance(self) -> float:
        """One optimizer step; returns bits per byte."""
        torch.manual_seed(self.options.seed * 1_000_003 + self.step)  # dropout too is a function of the step
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(self.step)
        loss = self.loss(self.corpus.batch(self.step, self.options).to(self.device))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        value = float(loss.detach()) / math.log(2)
        if not math.isfinite(value):
            raise UserError(f"the loss must stay finite, got {value} at step {self.step}; lower --learning-rate (checkpoint kept)")
        self.optimizer.step()
        self.step += 1
        return value

    def evaluate(self) -> float:
        """Bits per byte of the held-out sequences; not compiled, since a second graph would take longer to build than to save."""
        self.model.eval()
        with torch.no_grad():
            losses = [float(self._loss(tokens.to(self.device))) for tokens in self.corpus.held_out_batches(self.options)]
        self.model.train()
        return sum(losses) / len(losses) / math.log(2)

    # -- the whole run

    def run(self, report: Callable[[Trainer], None]) -> bool:
        """Train to the last step, calling `report` after every one; the checkpoint is written as often as the options say.

        Ctrl-C or SIGTERM end the run after the step in progress and a checkpoint. Returns whether the last step is done.
        """
        self.model.train()
        with _stop_requested() as stop:
            while self.step < self.options.steps:
                start = time.perf_counter()
                value = self._advance()
                # The first step of a process compiles: it says nothing of the speed.
                self.history.append({"step": self.step, "train": value, "seconds": time.perf_counter() - start})
                if self.step % self.options.eval_every == 0 or self.step == self.options.steps:
                    self.history[-1]["held_out"] = self.evaluate()
                self.seconds += time.perf_counter() - start
                report(self)
                if stop():
                    self.save()
                    break
                if self.step % self.options.checkpoint_every == 0 or self.step == self.options.steps:
                    self.save()
        return self.step == self.options.steps

    @property
    def bytes_per_second(self) -> float:
        """Speed over the latest steps, compilation and measurements left out."""
        times = sorted(entry["seconds"] for entry in self.history[-20:])
        return self.options.batch_size * self.options.sequence_length / times[len(times) // 2]

    @property
    def held_out(self) -> float | None:
        """The latest held-out bits per byte."""
        return next((entry["held_out"] for entry in reversed(self.history) if "held_out" in entry), None)

    # -- checkpoints

    def _identity(self) -> dict[str, Any]:
        return {**self.config.to_dict(), **asdict(self.options), "text": self.corpus.digest[:16]}

    def save(self) -> None:
        """Write the checkpoint; the old one is replaced only by a complete one.

        Raises:
            UserError: If it cannot be written.
        """
        state = {
            "identity": json.dumps(self._identity()),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
        }
        target = self.folder / CHECKPOINT_FILE
        part = target.with_suffix(".part")
        try:
            torch.save(state, part)
            part.replace(target)
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            raise UserError(f"the checkpoint must be writable, got {target}: {error}".splitlines()[0]) from None

    def resume(self) -> None:
        """Go on from the checkpoint in the folder.

        Raises:
            UserError: If there is none, it is damaged, or it was written under another configuration.
        """
        path = self.folder / CHECKPOINT_FILE
        if not path.is_file():
            raise UserError(f"--resume must find a checkpoint, none in {self.folder}")
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            identity = json.loads(state["identity"])
        except (OSError, RuntimeError, KeyError, ValueError, EOFError) as error:
            raise UserError(f"--resume must find a whole checkpoint, got {path}: {error}".splitlines()[0]) from None
        mine = json.loads(json.dumps(self._identity()))
        for name, value in mine.items():
            if identity.get(name) != value:
                raise UserError(f"--resume must use the checkpoint's {name}={identity.get(name)}, got {value}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]


def _ensure_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--output must be a folder that can be written, got {folder}: {error.strerror}") from None


@contextmanager
def _stop_requested() -> Iterator[Callable[[], bool]]:
    """Signals ask to stop instead of stopping: a second one stops at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# -- results ------------------------------------------------------------------------------------------------------------------


def sample(model: LongNetLM, prompt: bytes, *, num_bytes: int, temperature: float, seed: int) -> bytes:
    """`prompt` continued by `num_bytes` bytes drawn from the model."""
    tokens = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    generator = torch.Generator().manual_seed(seed)
    drawn = model.generate(tokens, max_new_tokens=num_bytes, temperature=temperature, generator=generator)
    return prompt + bytes(drawn[0].tolist())


def draw_losses(curves: dict[str, Trainer], path: Path) -> None:
    """A picture of training and held-out bits per byte against bytes seen, one colour per run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, trainer) in zip(("#0072b2", "#d55e00"), curves.items()):
        per_step = trainer.options.batch_size * trainer.options.sequence_length / 1e6
        seen = [entry["step"] * per_step for entry in trainer.history]
        axes.plot(seen, [entry["train"] for entry in trainer.history], color=colour, alpha=0.35, linewidth=1)
        measured = [(entry["step"] * per_step, entry["held_out"]) for entry in trainer.history if "held_out" in entry]
        label = f"{name}: {measured[-1][1]:.2f} bits per held-out byte"
        axes.plot(*zip(*measured), color=colour, marker="o", markersize=4, label=label)
    axes.set_xlabel("bytes seen (millions)")
    axes.set_ylabel("bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    part = path.with_name(path.name + ".part")
    figure.savefig(part, dpi=150, format="png")
    os.replace(part, path)


def dense(pattern: DilatedPattern, sequence_length: int) -> DilatedPattern:
    """Full attention as a pattern, for comparison."""
    return DilatedPattern((max(sequence_length, *pattern.segment_lengths),), (1,))
