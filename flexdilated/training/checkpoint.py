"""Checkpoints in a folder: a state of JSON types and named tensors, written whole or not at all.

`torch.distributed.checkpoint` is imported where it is used: with DTensor and FSDP it takes more than a second.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from flexdilated.training.options import UserError

STATE_FILE = "state.json"  # what is no tensor in a checkpoint
MODEL, OPTIMIZER = "model/", "optimizer/"  # how the names of its tensors begin


def save(folder: Path, step: int, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the folder `checkpoint-<step>`; earlier ones are removed when it is whole.

    Raises:
        UserError: If it cannot be written.
    """
    target = folder / f"checkpoint-{step}"
    part = folder / f".{target.name}.part"
    try:
        for left in folder.glob(".checkpoint-*"):  # by a process that was killed
            _remove(left)
        part.mkdir()
        _write_tensors(tensors, part)
        with (part / STATE_FILE).open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():  # of the same step; a folder cannot replace another in one move
            target.replace(part.with_suffix(".old"))
        part.replace(target)
        for old in (*folder.glob(".checkpoint-*"), *(path for path in _all(folder) if path != target)):
            _remove(old)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(f"the checkpoint must be writable, got {target}: {error}".splitlines()[0]) from None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `save` was given beside the tensors.

    Raises:
        OSError, ValueError: If it cannot be read.
    """
    return json.loads((checkpoint / STATE_FILE).read_text())


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """The weights of a model and, of an optimizer that has made a step, its state, by name."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    tensors: dict[str, Any] = {MODEL + name: value for name, value in get_model_state_dict(model).items()}
    if optimizer is not None:
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        for name, values in state["state"].items():
            tensors |= {f"{OPTIMIZER}{name}/{key}": value for key, value in values.items()}
    return tensors


def set_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give a model and, where there are any of it, its optimizer the tensors that `tensors_of` names."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict

    weights: dict[str, Any] = {name.removeprefix(MODEL): value for name, value in tensors.items() if name.startswith(MODEL)}
    if len(weights) == len(tensors):
        set_model_state_dict(model, weights)
        return
    state: dict[str, Any] = get_state_dict(model, optimizer)[1]  # the groups' options are those of the run
    for name, values in state["state"].items():
        values |= {key: tensors[f"{OPTIMIZER}{name}/{key}"] for key in values}
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def latest(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step in a folder, or None."""
    return max(_all(folder), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _all(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]+", path.name) and path.is_dir()]


def _remove(folder: Path) -> None:
    """A folder, or the link to one."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _write_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """By torch.distributed.checkpoint in its safetensors format: the default one would be unpickled when read."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _quiet_checkpoint():
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder)), no_dist=True)


def read_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
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


def ensure_writable(folder: Path) -> None:
    """Make a folder if it is missing.

    Raises:
        UserError: If nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"  # ranks share the folder
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--output must be a folder that can be written, got {folder}: {error.strerror}") from None
