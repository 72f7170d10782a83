"""Prov-GigaPath's published slide encoders, by their names, and their weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from flexdilated.hub.slide_encoder import LongNetViT as LongNetViT
from flexdilated.hub.slide_encoder import tile_positions as tile_positions

__all__ = ["ARCHITECTURES", "LongNetViT", "create_model", "load_weights", "tile_positions"]

#: Names of the published encoders, and their elements of a token and layers.
ARCHITECTURES = {
    "gigapath_slide_enc12l768d": (768, 12),
    "gigapath_slide_enc24l1024d": (1024, 24),
    "gigapath_slide_enc12l1536d": (1536, 12),
}

WEIGHTS_FILE = "slide_encoder.pth"


def create_model(
    pretrained: str | os.PathLike[str] | None,
    model_arch: str,
    in_chans: int,
    *,
    global_pool: bool = False,
    slide_ngrids: int = 1000,
    tile_size: int = 256,
    max_wsi_size: int = 262144,
    dropout: float = 0.25,
    drop_path_rate: float = 0.1,
    backend: str = "auto",
) -> LongNetViT:
    """The slide encoder of a name, as Prov-GigaPath's function of the same name gives it; nothing is downloaded.

    Args:
        pretrained: Path of `slide_encoder.pth`. None or `""`: random weights.
        model_arch: `gigapath_slide_enc12l768d` (the published weights), `gigapath_slide_enc24l1024d` or
            `gigapath_slide_enc12l1536d`.
        in_chans: Elements of a tile embedding, 1536 for the published weights.
        global_pool: As in `LongNetViT`, like all that follow.
        slide_ngrids: Cells along each side of the grid.
        tile_size: Side of a cell in pixels.
        max_wsi_size: Side of the largest slide in pixels.
        dropout: Probability of dropping an element, in training.
        drop_path_rate: Probability of dropping the branches of the last layer, in training.
        backend: Engine of the attention.

    Returns:
        The model, on the CPU, in float32 and in training mode; call `.eval()` before encoding.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the architecture is unknown, the weights do not fit it, or `pretrained` is a name to download from.
    """
    if model_arch not in ARCHITECTURES:
        raise ValueError(f"model_arch must be one of {list(ARCHITECTURES)}, got {model_arch!r}")
    name = "" if pretrained is None else os.fspath(pretrained)
    if name.startswith("hf_hub:"):
        raise ValueError(
            f"pretrained must be the path of a local file, got {name!r}; download {WEIGHTS_FILE} from "
            f"https://huggingface.co/{name.removeprefix('hf_hub:')} and pass its path"
        )
    if name and not Path(name).is_file():
        raise FileNotFoundError(f"pretrained must be the path of a file, None or '', no file at {name}")
    embed_dim, depth = ARCHITECTURES[model_arch]
    model = LongNetViT(
        in_chans=in_chans,
        embed_dim=embed_dim,
        depth=depth,
        slide_ngrids=slide_ngrids,
        tile_size=tile_size,
        max_wsi_size=max_wsi_size,
        global_pool=global_pool,
        dropout=dropout,
        drop_path_rate=drop_path_rate,
        backend=backend,
    )
    if name:
        load_weights(model, name)
    return model


def load_weights(model: LongNetViT, path: str | os.PathLike[str]) -> None:
    """Load a checkpoint whose state dict lies under `"model"` into a model, all of it or nothing.

    Raises:
        ValueError: If there is no such state dict, or its names and shapes are not exactly those of the model.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    weights = checkpoint.get("model") if isinstance(checkpoint, Mapping) else None
    if not isinstance(weights, Mapping):
        found = sorted(map(str, checkpoint)) if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
        raise ValueError(f"pretrained must hold a state dict under 'model', got {found} in {os.fspath(path)}")
    expected = model.state_dict()
    misfits = {
        "missing": [name for name in expected if name not in weights],
        "unexpected": [name for name in weights if name not in expected],
        "of another shape": [
            f"{name} {tuple(weights[name].shape)} for {tuple(value.shape)}"
            for name, value in expected.items()
            if name in weights and weights[name].shape != value.shape
        ],
    }
    if any(misfits.values()):
        found = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in misfits.items() if names)
        raise ValueError(f"pretrained must hold exactly the weights of the model, got {found}")
    model.load_state_dict(weights)
