"""Options of a training run, and the error that a user can fix."""

from __future__ import annotations

from dataclasses import dataclass


class UserError(Exception):
    """An error that the user can fix; its text is one line."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of a training run. A checkpoint resumes only under the same options and text."""

    sequence_length: int  # bytes
    batch_size: int  # sequences per step
    steps: int
    learning_rate: float  # at the peak of the schedule
    warmup_steps: int  # linear, before a cosine down to a tenth of the peak
    weight_decay: float  # of the matrices
    clip: float  # largest norm of the gradient
    seed: int  # of the initial weights, the batches and dropout
    eval_every: int  # steps between measurements on held-out text
    eval_sequences: int  # held-out ones per measurement
    checkpoint_every: int
    dtype: str  # "bfloat16" trains under autocast, "float32" does not
    compile: bool  # the step, with `fullgraph=True`
