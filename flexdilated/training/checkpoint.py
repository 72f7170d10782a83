"""Checkpoints in a folder: a state of JSON types and named tensors, written whole or not at all, also at a power failure."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flexdilated.core.files import sync
from flexdilated.training.options import UserError

STATE_FILE, TENSORS_FILE = "state.json", "model-00001-of-00001.safetensors"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter


def save(folder: Path, step: int, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the folder `checkpoint-<step>`, then remove earlier ones.

    Raises:
        UserError: If it cannot be written.
    """
    target = folder / f"checkpoint-{step}"
    part = folder / f".{target.name}.part"
    try:
        for stale in folder.glob(".checkpoint-*"):  # left by a killed process
            shutil.rmtree(stale)
        part.mkdir()
        save_file(tensors, part / TENSORS_FILE)
        (part / STATE_FILE).write_text(json.dumps(state))
        for path in (part / TENSORS_FILE, part / STATE_FILE, part):
            sync(path)
        part.replace(target)
        sync(folder)  # before earlier checkpoints go
        for path in _all(folder):
            if path != target:
                shutil.rmtree(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the checkpoint must be writable, got {target}: {error}") from None


def read(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state and the tensors of a checkpoint.

    Raises:
        OSError, ValueError, SafetensorError: If it cannot be read.
    """
    tensors = load_file(checkpoint / TENSORS_FILE)
    return json.loads((checkpoint / STATE_FILE).read_text()), {name: mapped.clone() for name, mapped in tensors.items()}


def tensors_of(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The weights of a model as `model/<name>` and, after the first step, its optimizer's state as `optimizer/<name>/<key>`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    for parameter, values in optimizer.state.items():
        tensors |= {f"optimizer/{names[parameter]}/{key}": value for key, value in values.items()}
    return tensors


def set_tensors(model: nn.Module, optimizer: torch.optim.AdamW, tensors: dict[str, Tensor]) -> None:
    """Load tensors that `tensors_of` returned.

    Raises:
        RuntimeError, KeyError: If one is missing or has another shape.
    """
    weights = {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
    model.load_state_dict(weights)
    if len(weights) == len(tensors):  # before the first step
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {i: {key: tensors[f"optimizer/{names[p]}/{key}"] for key in MOMENTS} for i, p in enumerate(parameters)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def latest(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step in a folder, or None."""
    return max(_all(folder), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _all(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]+", path.name) and path.is_dir()]
