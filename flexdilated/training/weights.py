"""The weights of a saved model, for a run to begin with."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor, nn

from flexdilated.nn.config import LongNetConfig
from flexdilated.nn.longnet import CONFIG_FILE, WEIGHTS_FILE, LongNetLM
from flexdilated.training.checkpoint import latest
from flexdilated.training.options import UserError

CHOSEN = {"num_layers": "--layers", "embed_dim": "--embed-dim", "num_heads": "--heads"}  # by options of the command


class Weights(NamedTuple):
    """A model that `LongNetLM.save_pretrained` wrote."""

    config: LongNetConfig
    tensors: dict[str, Tensor]
    digest: str  # of the file of weights

    def give(self, model: nn.Module, config: LongNetConfig) -> None:
        """Load these weights into a model. Its pattern, and with it its longest sequence, may be another: no weight depends on it.

        Raises:
            UserError: If its sizes, or what its weights mean, are others.
        """
        found, wanted = _shape(self.config), _shape(config)
        for name, value in wanted.items():
            if found[name] != value:
                option = f"use {CHOSEN[name]} {found[name]}" if name in CHOSEN else "this command trains no other models"
                raise UserError(f"--weights must hold a model of {CHOSEN.get(name, name)}={value}, got {found[name]}; {option}")
        model.load_state_dict(self.tensors)


def read_weights(folder: Path) -> Weights:
    """The weights in a folder.

    Raises:
        UserError: If there is no whole model in it.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"--weights must be the folder of a saved model, got {folder}: {what_is(folder)}")
    try:
        model = LongNetLM.from_pretrained(folder)
        digest = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
    except (OSError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        raise UserError(f"--weights must be the folder of a saved model, got {folder}: {error}".splitlines()[0]) from None
    return Weights(model.config, model.state_dict(), digest[:16])


def what_is(folder: Path) -> str:
    """Why a place holds no model, and where one may be."""
    if folder.is_file():
        return "a file; give the folder that it is in"
    if not folder.is_dir():
        return "no such folder"
    for inner in (folder, *(path for path in sorted(folder.iterdir()) if path.is_dir())):
        if (inner / CONFIG_FILE).is_file():
            return f"{inner} holds one"
        if latest(inner) is not None:
            return f"the run in {inner} is not finished; go on with it by --resume first"
    return f"it holds no {CONFIG_FILE}"


def _shape(config: LongNetConfig) -> dict[str, Any]:
    """Sizes that determine which weights fit, with defaults filled in."""
    return {
        **{name: getattr(config, name) for name in (*CHOSEN, "vocab_size", "position", "tie_embeddings")},
        "num_kv_heads": config.num_kv_heads or config.num_heads,
        "ffn_dim": config.ffn_dim or 4 * config.embed_dim,
    }
