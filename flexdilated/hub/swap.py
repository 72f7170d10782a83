"""Replace modules of a model: all of them or, after an error, none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn


def find_modules(model: nn.Module, predicate: Callable[[nn.Module], bool]) -> dict[nn.Module, list[str]]:
    """The modules that are wanted, each with every path at which the model holds it; the model's own path is `""`."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if predicate(module):
            paths.setdefault(module, []).append(path)
    return paths


def put_modules(model: nn.Module, places: Mapping[str, nn.Module]) -> None:
    """Put a module at each path below the model, in place."""
    # Read before anything moves: a path may lead through a module that another path shares.
    parents = {path: model.get_submodule(path.rpartition(".")[0]) for path in places}
    for path, module in places.items():
        setattr(parents[path], path.rpartition(".")[2], module)


def check_unhooked(module: nn.Module) -> None:
    """Raise ValueError for a module with hooks, parametrizations or a changed call, which a replacement would lose."""
    calls = ("forward", "forward_pre", "backward", "backward_pre")
    states = ("state_dict", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post")
    attachments = {  # accelerate's hooks, and wrappers of a method, set the forward of the instance
        "forward": "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__,
        "parametrized weights": nn.utils.parametrize.is_parametrized(module),
        "hooks": any(getattr(module, f"_{name}_hooks") for name in (*calls, *states)),
    }
    for name, is_there in attachments.items():
        if is_there:
            raise ValueError(f"module must have no {name} of its own, got some; take that away, and add it again afterwards")
