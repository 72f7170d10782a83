"""Train a byte-level LongNet on text, in one process or many: data, schedule, loop, checkpoints, sample, picture."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from flexdilated.nn.longnet import LongNetConfig, LongNetLM
from flexdilated.nn.modes import evaluating
from flexdilated.pattern import DilatedPattern

if TYPE_CHECKING:  # one process needs no torch.distributed
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Corpus",
    "RankLostError",
    "TrainOptions",
    "Trainer",
    "UserError",
    "draw_losses",
    "latest_checkpoint",
    "load_corpus",
    "sample",
    "wait_for_all",
]

BYTES = 256
STATE_FILE = "state.json"  # what is no tensor in a checkpoint
MODEL, OPTIMIZER = "model/", "optimizer/"  # how the names of its tensors begin
HELD_OUT_FRACTION = 0.05


class UserError(Exception):
    """Something that the user can put right; its text is one line."""


class RankLostError(UserError):
    """Another rank was killed, failed or is silent for longer than the group's timeout."""


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

    Files come in the order of a hash of their names, so that the held-out end of the text is not one corner of it; those of one
    name in the order of their places below the given folders, whatever order the filesystem lists them in.

    Raises:
        UserError: If a path is missing, unreadable or empty, or the text is too short for the sequence length.
    """
    files = sorted(_files(paths), key=_order)
    parts = []
    for _, _, path in files:
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
            f"--text must hold at least {2 * (sequence_length + 1)} bytes for --tokens {sequence_length}, got {len(text)}"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(data[:-held_out], data[-held_out:], sha256(text).hexdigest())


def _order(file: tuple[Path, int, Path]) -> tuple[bytes, bytes, int]:
    place, given, _ = file
    return sha256(os.fsencode(place.name)).digest(), os.fsencode(place.as_posix()), given


def _files(paths: Sequence[Path]) -> Iterator[tuple[Path, int, Path]]:
    """Each file: its place below the path that was given, which path that was, and where it is."""
    if not paths:
        root = Path(sysconfig.get_paths()["stdlib"])
        for path in root.rglob("*.py"):
            place = path.relative_to(root)
            if not {"site-packages", "test", "tests", "idlelib"} & set(place.parts):
                yield place, 0, path
        return
    for i, given in enumerate(paths):
        if given.is_dir():
            for path in given.rglob("*"):
                place = path.relative_to(given)
                if path.is_file() and not any(part.startswith(".") for part in place.parts):
                    yield place, i, path
        elif given.is_file():
            yield Path(given.name), i, given
        else:
            raise UserError(f"--text must be a file or folder that exists, got {given}")


# -- the loop -----------------------------------------------------------------------------------------------------------------


class Trainer:
    """A model, its optimizer and where the run stands.

    With a mesh of P ranks each takes its own `sequence_length / P` bytes of every sequence and the parameters are the same on all:
    losses and updates are those of one process, to rounding. Rank 0 alone writes; a checkpoint of P ranks serves any other P.

    Args:
        config: The model.
        options: The run.
        corpus: The text.
        folder: Where checkpoints go; made if missing. Every rank reads it.
        device: Where it runs.
        mesh: The 1-D mesh over which the sequences are sharded. Default: one process.

    Raises:
        ValueError: If the mesh is not 1-D.
        UserError: If the folder cannot be written, the ranks do not divide the sequence, or they differ in options or text.
        RankLostError: If another rank ends.
    """

    def __init__(
        self,
        config: LongNetConfig,
        options: TrainOptions,
        corpus: Corpus,
        folder: Path,
        device: torch.device,
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(f"mesh must have 1 axis, got {mesh.ndim}")
        self.config, self.options, self.corpus, self.folder, self.device = config, options, corpus, folder, device
        self.mesh = mesh
        self._place = "before its first step"
        self.rank, self.num_ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        if options.sequence_length % self.num_ranks:
            length = options.sequence_length
            raise UserError(f"--tokens must be a multiple of --context-parallel={self.num_ranks}, got {length}")
        _ensure_writable(folder)
        torch.manual_seed(options.seed)
        self.model = (LongNetLM(config) if mesh is None else LongNetLM(config, mesh=mesh)).to(device)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.learning_rate,
            betas=(0.9, 0.95),
        )
        self.loss: Callable[[Tensor], Tensor] = self._loss
        if options.compile:
            self.loss = torch.compile(self._loss, fullgraph=True, dynamic=False)
        if mesh is not None:
            with _losses_of_ranks(mesh, self.lost):
                digest = sha256(json.dumps(self._identity()).encode()).digest()
                if len(_span(mesh, int.from_bytes(digest[:7], "big"))) > 1:
                    raise UserError("every rank must train with the same options and text, got different ones")
                # The shards are equal, so the mean of the ranks' mean losses is the mean loss, and its gradient the mean of theirs:
                # what DistributedDataParallel computes. The compiled function is inside: outside, its hooks would break the graph.
                module = _LossModule(self.model, self.loss)
                self.loss = nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group())
        self.step = 0
        self.seconds = 0.0
        self.history: list[dict[str, float]] = []

    # -- one step

    def _shard(self, tokens: Tensor) -> Tensor:
        """This rank's part of `(B, sequence_length + 1)` bytes: its inputs, and behind them the target of the last."""
        length = self.options.sequence_length // self.num_ranks
        return tokens[:, self.rank * length : (self.rank + 1) * length + 1].to(self.device)

    def _mean(self, value: float) -> float:
        """Over the ranks: the same number on each."""
        if self.mesh is None:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total, group=self.mesh.get_group())
        return total.item() / self.num_ranks

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
        # Dropout too is a function of the step, and of the rank, whose elements are others.
        torch.manual_seed(self.options.seed * 1_000_003 + self.step + self.rank * 1_000_000_007)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(self.step)
        loss = self.loss(self._shard(self.corpus.batch(self.step, self.options)))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        value = self._mean(float(loss.detach())) / math.log(2)
        self._ensure_finite("loss", value)
        self._ensure_finite("gradient's norm", self._mean(float(norm)))
        self.optimizer.step()
        self.step += 1
        return value

    def _ensure_finite(self, name: str, value: float) -> None:
        if math.isfinite(value):
            return
        latest = latest_checkpoint(self.folder)
        kept = "" if latest is None else f" (the checkpoint of step {_step_of(latest)}, of finite losses, is kept)"
        raise UserError(
            f"the {name} must stay finite, got {value} at step {self.step}; "
            f"start anew with a lower --learning-rate, by --overwrite or in another --output{kept}"
        )

    def _save_finite(self) -> None:
        """Save, unless the loss of the next step is not finite: a run that diverges keeps its last checkpoint that can go on.

        Every rank must call it.
        """
        self.model.eval()
        with torch.no_grad():
            value = float(self._loss(self._shard(self.corpus.batch(self.step, self.options))))
        self.model.train()
        self._ensure_finite("loss", self._mean(value))
        self.save()

    def evaluate(self) -> float:
        """Bits per byte of the held-out sequences; not compiled, since a second graph would take longer to build than to save."""
        with evaluating(self.model), torch.no_grad():
            losses = [float(self._loss(self._shard(tokens))) for tokens in self.corpus.held_out_batches(self.options)]
        return self._mean(sum(losses) / len(losses)) / math.log(2)

    # -- the whole run

    def run(self, report: Callable[[Trainer], None]) -> bool:
        """Train to the last step, calling `report` after every one; the checkpoint is written as often as the options say.

        Ctrl-C or SIGTERM, at any rank, end the run after the step in progress and a checkpoint. Returns whether the last step is
        done. Every rank must call it.

        Raises:
            UserError: If a loss is not finite, the checkpoint cannot be written, or the ranks stand at different steps.
            RankLostError: If another rank ends. SIGTERM is ignored from then on: torchrun sends it to the ranks that are left.
        """
        self.model.train()
        with _stop_requested() as stop, _losses_of_ranks(self.mesh, self.lost):
            steps = _span(self.mesh, self.step)
            if len(steps) > 1:
                raise UserError(f"--resume must find the same checkpoint on every rank, got steps {steps[0]} to {steps[1]}")
            while self.step < self.options.steps:
                self._place = f"in step {self.step + 1}"
                start = time.perf_counter()
                value = self._advance()
                # The first step of a process compiles: it says nothing of the speed.
                self.history.append({"step": self.step, "train": value, "seconds": time.perf_counter() - start})
                if self.step % self.options.eval_every == 0 or self.step == self.options.steps:
                    self.history[-1]["held_out"] = self.evaluate()
                self.seconds += time.perf_counter() - start
                report(self)
                if _span(self.mesh, int(stop()))[-1]:
                    self._save_finite()
                    break
                if self.step % self.options.checkpoint_every == 0 or self.step == self.options.steps:
                    self._save_finite()
            self._place = f"after step {self.step}"
            _span(self.mesh, self.step)  # returns when rank 0 has written the checkpoint
        return self.step == self.options.steps

    def lost(self, cause: str) -> RankLostError:
        """The error that tells of a lost rank: where this one stands, why, and what is kept."""
        latest = latest_checkpoint(self.folder)
        kept = "there is no checkpoint yet"
        if latest is not None:
            kept = f"the checkpoint of step {_step_of(latest)} is whole: the same command with --resume goes on"
        return RankLostError(f"a rank was lost {self._place}: {cause}; {kept}")

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
        """Write the folder `checkpoint-<step>`, at rank 0; earlier ones are removed when it is whole.

        Raises:
            UserError: If it cannot be written.
        """
        if self.rank:
            return
        state = {"identity": self._identity(), "step": self.step, "seconds": self.seconds, "history": self.history}
        target = self.folder / f"checkpoint-{self.step}"
        part = self.folder / f".{target.name}.part"
        try:
            for left in self.folder.glob(".checkpoint-*"):  # by a process that was killed
                _remove(left)
            part.mkdir()
            _write_tensors(self._tensors(optimizer=self.step > 0), part)
            with (part / STATE_FILE).open("w") as file:
                json.dump(state, file)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():  # of the same step; a folder cannot replace another in one move
                target.replace(part.with_suffix(".old"))
            part.replace(target)
            for old in (*self.folder.glob(".checkpoint-*"), *(path for path in _checkpoints(self.folder) if path != target)):
                _remove(old)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise UserError(f"the checkpoint must be writable, got {target}: {error}".splitlines()[0]) from None

    def resume(self) -> None:
        """Go on from the latest checkpoint in the folder, written by any number of ranks.

        Raises:
            UserError: If there is none, it is damaged, or it was written under another configuration.
        """
        path = latest_checkpoint(self.folder)
        if path is None:
            raise UserError(f"--resume must find a checkpoint, none in {self.folder}")
        try:
            state = json.loads((path / STATE_FILE).read_text())
            identity = dict(state["identity"])
            step, seconds, history = int(state["step"]), float(state["seconds"]), list(state["history"])
            mine = json.loads(json.dumps(self._identity()))
            for name, value in mine.items():
                if identity.get(name) != value:
                    raise UserError(f"--resume must use the checkpoint's {name}={identity.get(name)}, got {value}")
            tensors = self._tensors(optimizer=step > 0)
            _read_tensors(tensors, path)
        except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"--resume must find a whole checkpoint, got {path}: {error}".splitlines()[0]) from None
        self._set_tensors(tensors)
        self.step, self.seconds, self.history = step, seconds, history

    def _tensors(self, *, optimizer: bool) -> dict[str, Tensor]:
        """What a checkpoint keeps of the model and, once it has made a step, of the optimizer, by name."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        tensors: dict[str, Any] = {MODEL + name: value for name, value in get_model_state_dict(self.model).items()}
        if optimizer:  # asking for the state of an optimizer that has not begun would begin it
            state: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimizer)
            for name, values in state["state"].items():
                tensors |= {f"{OPTIMIZER}{name}/{key}": value for key, value in values.items()}
        return tensors

    def _set_tensors(self, tensors: dict[str, Tensor]) -> None:
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict

        weights: dict[str, Any] = {name.removeprefix(MODEL): value for name, value in tensors.items() if name.startswith(MODEL)}
        if len(weights) == len(tensors):
            set_model_state_dict(self.model, weights)
            return
        state: dict[str, Any] = get_state_dict(self.model, self.optimizer)[1]  # the groups' options are those of the run
        for name, values in state["state"].items():
            values |= {key: tensors[f"{OPTIMIZER}{name}/{key}"] for key in values}
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=state)


def latest_checkpoint(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step in a folder, or None."""
    return max(_checkpoints(folder), key=_step_of, default=None)


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]+", path.name) and path.is_dir()]


def _remove(folder: Path) -> None:
    """A folder, or the link to one."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _write_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """By torch.distributed.checkpoint in its safetensors format: the default one would be unpickled when read."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _quiet_checkpoint():
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder)), no_dist=True)


def _read_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Overwrite `tensors` with those of the same names and shapes in a folder.

    Raises:
        RuntimeError: If one is missing, has another shape or cannot be read.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    try:
        reader.read_metadata()  # load() logs a traceback where this fails
    except SafetensorError as error:
        raise RuntimeError(str(error)) from None
    with _quiet_checkpoint():
        load(tensors, storage_reader=reader, no_dist=True)


@contextmanager
def _quiet_checkpoint() -> Iterator[None]:
    """Only the narrow fact of a failure, and no warning of what is meant."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # no_dist is that
            warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # in torch 2.9
            yield
    except CheckpointException as error:  # not an Exception
        cause, _ = next(iter(error.failures.values()))
        raise RuntimeError(str(cause)) from None


def _ensure_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"  # ranks share the folder
        probe.touch()
        probe.unlink(missing_ok=True)
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
    except RankLostError:
        previous[signal.SIGTERM] = signal.SIG_IGN  # torchrun's, which would come before what there is to say
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# -- ranks --------------------------------------------------------------------------------------------------------------------


class _LossModule(nn.Module):
    """A loss and the model that it trains, as one module."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(tokens)


def _span(mesh: DeviceMesh | None, value: int) -> tuple[int, ...]:
    """The least and the largest `value` of the ranks, or the only one."""
    if mesh is None:
        return (value,)
    ends = torch.tensor([-value, value], device=mesh.device_type)
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
    least, largest = -int(ends[0]), int(ends[1])
    return (least,) if least == largest else (least, largest)


def wait_for_all(mesh: DeviceMesh | None) -> None:
    """Return when every rank has come here.

    Raises:
        RankLostError: If another rank ends.
    """
    with _losses_of_ranks(mesh, lambda cause: RankLostError(f"a rank was lost before the others began: {cause}")):
        _span(mesh, 0)


@contextmanager
def _losses_of_ranks(mesh: DeviceMesh | None, lost: Callable[[str], RankLostError]) -> Iterator[None]:
    """Raise what `lost` makes of the cause where a collective fails: by the end or the silence of another rank."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        # gloo raises plain RuntimeErrors, which name a file of its sources.
        told = "gloo" in str(error) or isinstance(error, TimeoutError)
        if mesh is None or not (told or isinstance(error, torch.distributed.DistError)):
            raise
        raise lost(_cause_of(error)) from None


def _cause_of(error: BaseException) -> str:
    """What a collective says of its failure, without the place in its sources and without advice."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0]


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
