"""Initial weights that a layer's own `reset_parameters` draws again, as FSDP2 needs after the meta device."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


def set_initial_weights(layer: nn.Linear | nn.Embedding, draw: str, **options: float) -> None:
    """Draw the weight of a layer, set its bias to 0, and make `layer.reset_parameters` do both again.

    Its class stays, since quantizers choose layers by their exact class. `draw` names a function of `torch.nn.init`, such as
    `"xavier_normal_"`, and `options` are its arguments.
    """
    layer.__dict__["reset_parameters"] = _Reset(layer, draw, options)
    layer.reset_parameters()


def set_initial_projections(attention: nn.Module, gamma: float) -> None:
    """MAGNETO's initial weights of `q_proj` and `k_proj` with gain 1, of `v_proj` and `out_proj` with gain `gamma`."""
    for name, gain in (("q_proj", 1.0), ("k_proj", 1.0), ("v_proj", gamma), ("out_proj", gamma)):
        set_initial_weights(getattr(attention, name), "xavier_normal_", gain=gain)


def reset_modules(model: nn.Module) -> None:
    """Draw the constructor's initial weights again, also after `to_empty`, by the `reset_parameters` of every module inside.

    The order does not matter, since each `reset_parameters` touches the module's own parameters alone.
    """
    for module in model.modules():
        if (reset := getattr(module, "reset_parameters", None)) is not None:
            reset()


class _Reset:
    """The `reset_parameters` of one layer, which can be copied and pickled with the layer."""

    def __init__(self, layer: nn.Module, draw: str, options: dict[str, float]) -> None:
        # A strong reference would keep the memory of a deleted model until cycles are collected.
        self.layer, self.draw, self.options = weakref.ref(layer), draw, options

    def __call__(self) -> None:
        layer: Any = self.layer()
        # By name in each call: the transformers library replaces functions of `nn.init` to protect loaded weights.
        getattr(nn.init, self.draw)(layer.weight, **self.options)
        if getattr(layer, "bias", None) is not None:
            nn.init.zeros_(layer.bias)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reset, (self.layer(), self.draw, self.options)
