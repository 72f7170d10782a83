"""A model in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode inside; afterwards every module of it is in its own mode again, also after an error.

    `model.train(was_training)` would not do: it gives all modules one mode, so that a frozen part, kept in evaluation mode inside a
    model in training, would train on.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
