"""The recipes by which weights that were on the meta device are set, and what a distribution of weights must be."""

import pytest
from torch import nn


def reset_forwards(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def reset_backwards(model: nn.Module) -> None:
    for module in reversed(list(model.modules())):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def init_weights(model: nn.Module) -> None:
    model.init_weights() if hasattr(model, "init_weights") else reset_forwards(model)  # type: ignore[operator]


RECIPES = {"forwards": reset_forwards, "backwards": reset_backwards, "init_weights": init_weights}


def moments(model: nn.Module) -> dict[str, tuple[float, float]]:
    return {name: (p.mean().item(), p.std().item()) for name, p in model.named_parameters()}


def check_distribution(model: nn.Module, expected: dict[str, tuple[float, float]]) -> None:
    """Means and standard deviations as expected, within 5 standard errors of two samples."""
    found = moments(model)
    assert found.keys() == expected.keys()
    for name, parameter in model.named_parameters():
        mean, std = expected[name]
        error = std * (2 / parameter.numel()) ** 0.5
        assert found[name][0] == pytest.approx(mean, abs=5 * error), name
        assert found[name][1] == pytest.approx(std, abs=5 * error / 2**0.5), name
