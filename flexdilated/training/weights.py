"""Saved models, for a run to begin with and for `flexdilated generate`."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flexdilated.nn.config import LongNetConfig
from flexdilated.nn.longnet import WEIGHTS_FILE, LongNetLM
from flexdilated.training.options import UserError

SIZES = ("num_layers", "embed_dim", "num_heads", "vocab_size", "position", "tie_embeddings", "num_kv_heads", "ffn_dim")


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
        configs = [  # with defaults filled in
            replace(c, num_kv_heads=c.num_kv_heads or c.num_heads, ffn_dim=c.ffn_dim or 4 * c.embed_dim)
            for c in (self.config, config)
        ]
        for name in SIZES:
            saved_size, model_size = (getattr(c, name) for c in configs)
            if saved_size != model_size:
                raise UserError(f"--weights must hold a model of {name}={model_size}, got {saved_size}")
        model.load_state_dict(self.tensors)


def read_weights(folder: Path) -> Weights:
    """The weights in a folder; errors as `read_model`."""
    model = read_model("--weights", folder)
    return Weights(model.config, model.state_dict(), hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()[:16])


def read_model(option: str, folder: Path, device: torch.device | str = "cpu") -> LongNetLM:
    """The model in a folder.

    Raises:
        UserError: If there is no whole model in it, in which `option` names the folder.
    """
    try:
        return LongNetLM.from_pretrained(folder, device=device)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        advice = f"{option} must be the folder of a saved model, as <output>/dilated of a finished run"
        raise UserError(f"{advice}, got {folder}: {str(error).splitlines()[0]}") from None
