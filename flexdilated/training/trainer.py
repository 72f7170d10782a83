"""The training loop, in one process or many."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from flexdilated.nn.config import LongNetConfig
from flexdilated.nn.longnet import LongNetLM, evaluating
from flexdilated.training import checkpoint
from flexdilated.training.corpus import Corpus
from flexdilated.training.distributed import ensure_equal, mean, stop_requested
from flexdilated.training.options import TrainOptions, UserError
from flexdilated.training.weights import Weights

if TYPE_CHECKING:  # one process needs no torch.distributed
    from torch.distributed.device_mesh import DeviceMesh


class Trainer:
    """A training run: a model, its optimizer, its step and its history.

    With a mesh of P ranks each takes its own part of the bytes of every sequence, equal parts but for one byte, and the parameters
    are the same on all: losses and updates are those of one process, to rounding. Rank 0 alone writes; a checkpoint of P ranks
    serves any other P.

    Args:
        config: The model.
        options: The run.
        corpus: The text.
        folder: Where checkpoints go; made if missing. Every rank reads it.
        device: Where it runs.
        mesh: The 1-D mesh over which the sequences are sharded. Default: one process.
        weights: What the model begins with. Default: weights drawn by the seed.

    Raises:
        OSError: If the folder cannot be made.
        UserError: If a sequence has fewer bytes than there are ranks, the weights are of another model, or ranks differ in options,
            text, weights or version.
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
        weights: Weights | None = None,
    ) -> None:
        self.config, self.options, self.corpus, self.folder, self.device = config, options, corpus, folder, device
        self.mesh = mesh
        self.rank, self.num_ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        if options.sequence_length < self.num_ranks:
            raise UserError(f"--tokens must be at least the number of ranks={self.num_ranks}, got {options.sequence_length}")
        self._lengths: tuple[int, ...] = (options.sequence_length,)
        if mesh is not None:
            from flexdilated.distributed.sharding import even_shard_lengths  # not in every build, as above

            self._lengths = even_shard_lengths(options.sequence_length, self.num_ranks)
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(options.seed)
        self.model = (LongNetLM(config) if mesh is None else LongNetLM(config, mesh=mesh)).to(device)
        self.begins_with = "" if weights is None else weights.digest
        if weights is not None:
            weights.give(self.model, config)
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
            ensure_equal(mesh, self._identity())
            # Losses are weighted by the shards: the mean of the ranks' is the mean loss, and its gradient the mean of theirs,
            # which DistributedDataParallel computes. The compiled function is inside: outside, its hooks would break the graph.
            module = _LossModule(self.model, self.loss)
            self.loss = nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group())
        self.step = 0
        self.seconds = 0.0
        self.history: list[dict[str, float]] = []

    def _shard(self, tokens: Tensor) -> Tensor:
        """This rank's part of `(B, sequence_length + 1)` bytes: its inputs, then the target of the last."""
        start = sum(self._lengths[: self.rank])
        return tokens[:, start : start + self._lengths[self.rank] + 1].to(self.device)

    def _loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats, of a shard weighted by its part of the mean over ranks."""
        bfloat16 = self.options.dtype == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            logits = self.model(tokens[:, :-1], shard_lengths=None if self.mesh is None else self._lengths)
        weight = self._lengths[self.rank] * self.num_ranks / self.options.sequence_length
        return weight * F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def _learning_rate(self, step: int) -> float:
        options = self.options
        if step < options.warmup_steps:
            return options.learning_rate * (step + 1) / options.warmup_steps
        progress = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
        return options.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))

    def _advance(self) -> float:
        """One optimizer step; returns bits per byte."""
        # Dropout too is a function of the step, and of the rank, whose elements are others.
        torch.manual_seed(self.options.seed * 1_000_003 + self.step + self.rank * 1_000_000_007)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(self.step)
        loss = self.loss(self._shard(self.corpus.batch(self.step, self.options)))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        try:  # the gradient is the mean of the ranks', so all of them raise
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip, error_if_nonfinite=True)
        except RuntimeError:
            raise UserError(
                f"the gradient must stay finite, got another at step {self.step} with a loss of {float(loss.detach())}; "
                "start again with a lower --learning-rate, by --overwrite or in another --output"
            ) from None
        self.optimizer.step()
        self.step += 1
        return mean(self.mesh, float(loss.detach())) / math.log(2)

    def evaluate(self) -> float:
        """Bits per byte of the held-out sequences; not compiled, since a second graph would take longer to build than to save."""
        with evaluating(self.model), torch.no_grad():
            losses = [float(self._loss(self._shard(tokens))) for tokens in self.corpus.held_out_batches(self.options)]
        return mean(self.mesh, sum(losses) / len(losses)) / math.log(2)

    def run(self, report: Callable[[Trainer], None]) -> bool:
        """Train to the last step, calling `report` after every one; the checkpoint is written as often as the options say.

        Ctrl-C or SIGTERM, at any rank, end the run after the step in progress and a checkpoint. Returns whether the last step is
        done. Every rank must call it.

        Raises:
            UserError: If a gradient is not finite, the checkpoint cannot be written, or the ranks stand at different steps.
        """
        self.model.train()
        with stop_requested(self.mesh) as stop:
            ensure_equal(self.mesh, {"the step of the checkpoint": self.step})
            while self.step < self.options.steps:
                start = time.perf_counter()
                try:
                    value = self._advance()
                except RuntimeError:
                    if self.mesh is not None or not stop():
                        raise
                    self.save()  # a terminal's Ctrl-C also ends the C++ compiler, before this step changed a weight
                    break
                # The first step of a process compiles: it says nothing of the speed.
                self.history.append({"step": self.step, "train": value, "seconds": time.perf_counter() - start})
                if self.step % self.options.eval_every == 0 or self.step == self.options.steps:
                    self.history[-1]["held_out"] = self.evaluate()
                self.seconds += time.perf_counter() - start
                report(self)
                if mean(self.mesh, stop()) > 0:
                    self.save()
                    break
                if self.step % self.options.checkpoint_every == 0 or self.step == self.options.steps:
                    self.save()
            ensure_equal(self.mesh, {})  # returns when rank 0 has written the checkpoint
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

    def _identity(self) -> dict[str, Any]:
        return {**self.config.to_dict(), **asdict(self.options), "text": self.corpus.digest[:16], "weights": self.begins_with}

    def save(self) -> None:
        """Write the folder `checkpoint-<step>`, at rank 0; earlier ones are removed when it is whole.

        Raises:
            UserError: If it cannot be written.
        """
        if self.rank:
            return
        state = {"identity": self._identity(), "step": self.step, "seconds": self.seconds, "history": self.history}
        checkpoint.save(self.folder, self.step, state, checkpoint.tensors_of(self.model, self.optimizer))

    def resume(self) -> None:
        """Go on from the latest checkpoint in the folder, written by any number of ranks.

        Raises:
            UserError: If there is none, it is damaged, or it was written under another configuration.
        """
        path = checkpoint.latest(self.folder)
        if path is None:
            raise UserError(f"--resume must find a checkpoint, none in {self.folder}")
        try:
            state, tensors = checkpoint.read(path)
            # An older checkpoint lacks fields that came later: its run had their defaults.
            defaults = {field.name: field.default for kind in (LongNetConfig, TrainOptions) for field in fields(kind)}
            identity = {**defaults, "weights": "", **state["identity"]}
            for name, value in json.loads(json.dumps(self._identity())).items():
                if (checkpoint_value := identity.get(name)) != value:
                    # The schedule of the learning rate ends with the steps: more of them would be another run from the start.
                    advice = "give the options and text of that run, or begin another in another --output with --weights"
                    raise UserError(f"--resume must use the checkpoint's {name}={checkpoint_value!r}, got {value!r}; {advice}")
            checkpoint.set_tensors(self.model, self.optimizer, tensors)
            self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, SafetensorError) as error:
            raise UserError(f"--resume must find a whole checkpoint, got {path}: {error}") from None


class _LossModule(nn.Module):
    """A loss and the model that it trains, as one module."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(tokens)
