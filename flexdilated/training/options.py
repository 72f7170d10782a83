"""What determines a training run, and what a user can put right about it."""

from __future__ import annotations

from dataclasses import dataclass


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
