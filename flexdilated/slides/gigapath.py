"""Prov-GigaPath's published slide encoders, by their names, and their weights."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.core.pattern import DilatedPattern
from flexdilated.ordering import Curve
from flexdilated.slides.model import LongNetViT as LongNetViT
from flexdilated.slides.model import tile_positions as tile_positions

__all__ = ["ARCHITECTURES", "Architecture", "LongNetViT", "create_model", "load_weights", "tile_positions"]


class Architecture(NamedTuple):
    """The sizes of a named model: width, layers, heads, `mlp_ratio`, and the number of branches that run."""

    embed_dim: int
    depth: int
    num_heads: int = 16
    mlp_ratio: float = 4.0
    branches: int = 5


# torchscale's configurations LongNet_{depth}_layers_{embed_dim}_dim, of which Prov-GigaPath's encoder takes all but the segments.
_DEPTHS = {256: (8, 12), 384: (3, 6, 12), 768: (3, 6, 8, 12), 1024: (8, 24), 1536: (3, 6, 8, 12)}

#: The encoders by name, those published and those of torchscale, as `LongNet_8_layers_256_dim`.
ARCHITECTURES: dict[str, Architecture] = {
    "gigapath_slide_enc12l768d": Architecture(768, 12),
    "gigapath_slide_enc24l1024d": Architecture(1024, 24),
    "gigapath_slide_enc12l1536d": Architecture(1536, 12),
    **{f"LongNet_{depth}_layers_{dim}_dim": Architecture(dim, depth) for dim, depths in _DEPTHS.items() for depth in depths},
    "LongNet_8_layers_256_dim_mlp2": Architecture(256, 8, mlp_ratio=2.0, branches=3),
    "LongNet_12_layers_256_dim_mlp2": Architecture(256, 12, mlp_ratio=2.0, branches=3),
    "LongNet_12_layers_512_dim": Architecture(512, 12, num_heads=8, mlp_ratio=2.0, branches=3),
}

WEIGHTS_FILE = "slide_encoder.pth"
EMBEDDING = "patch_embed.proj.weight"  # (embed_dim, in_chans)


def create_model(
    pretrained: str | os.PathLike[str] | None,
    model_arch: str,
    in_chans: int,
    *,
    global_pool: bool = False,
    slide_ngrids: int = 1000,
    tile_size: int = 256,
    max_wsi_size: int = 262144,
    pattern: DilatedPattern | None = None,
    order: Curve | None = None,
    dropout: float = 0.25,
    drop_path_rate: float = 0.1,
    backend: str = "auto",
    mesh: DeviceMesh | None = None,
) -> LongNetViT:
    """The slide encoder of a name, as Prov-GigaPath's function of the same name returns it; nothing is downloaded.

    Args:
        pretrained: Path of `slide_encoder.pth`, or of a classifier of slides. None or `""`: random weights.
        model_arch: `gigapath_slide_enc12l768d` (the published weights), `gigapath_slide_enc24l1024d`,
            `gigapath_slide_enc12l1536d`, or one of torchscale's, as `LongNet_8_layers_256_dim`.
        in_chans: Elements of a tile embedding, 1536 for the published weights.
        global_pool, slide_ngrids, tile_size, max_wsi_size, pattern, order, dropout, drop_path_rate, backend, mesh: As in
            `LongNetViT`. Defaults are those of the published weights.

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
    sizes = Architecture(*ARCHITECTURES[model_arch])._asdict()
    run = slice(sizes.pop("branches"))
    if pattern is None:
        published = DilatedPattern.gigapath(max_wsi_size, tile_size)
        pattern = replace(published, segment_lengths=published.segment_lengths[run], dilation_rates=published.dilation_rates[run])
    model = LongNetViT(
        in_chans=in_chans,
        **sizes,
        slide_ngrids=slide_ngrids,
        tile_size=tile_size,
        max_wsi_size=max_wsi_size,
        pattern=pattern,
        order=order,
        global_pool=global_pool,
        dropout=dropout,
        drop_path_rate=drop_path_rate,
        backend=backend,
        mesh=mesh,
    )
    if name:
        load_weights(model, name)
    return model


class Checkpoint(NamedTuple):
    """The contents of a file of weights: of a slide encoder, or of a classifier of slides on one."""

    path: str
    weights: dict[str, Tensor]  # of the encoder
    order: Curve | None
    pattern: DilatedPattern | None
    arch: str | None
    head: nn.Linear | None  # of a classifier
    classes: tuple[str, ...]  # of a classifier, in the order of the outputs of `head`

    @property
    def in_chans(self) -> int | None:
        """Elements of a tile embedding."""
        embedding = self.weights.get(EMBEDDING)
        return None if embedding is None else embedding.shape[-1]

    def load_into(self, model: LongNetViT) -> None:
        """Load the weights of the encoder into a model; errors as `load_weights`."""
        if self.order != model.order:
            raise ValueError(
                f"order must be that of the weights={self.order!r}, got {model.order!r}; weights are trained in one order"
            )
        if self.pattern is not None and self.pattern != model.pattern:
            raise ValueError(f"pattern must be that of the weights={self.pattern}, got {model.pattern}")
        try:
            model.load_state_dict(self.weights)
        except RuntimeError as error:
            misfits = textwrap.shorten(str(error), 500)  # one line: torch lists hundreds of names
            raise ValueError(f"pretrained must hold exactly the weights of the model, got others: {misfits}") from error


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file of weights, whose state dict is under `"model"`: of an encoder, or of `docs/slide_training/finetune.py`.

    A classifier has the weights of its encoder under names that begin with `encoder.`, `head.weight` `(classes, embed_dim)`,
    `head.bias`, and the names of the classes under `"classes"`.

    Raises:
        ValueError: If there is no such state dict, or a classifier lacks the names of its classes.
        KeyError: If a classifier lacks its head.
        TypeError: As `DilatedPattern.from_dict`.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True)
    weights = saved.get("model") if isinstance(saved, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        content = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(f"pretrained must hold a state dict of tensors under 'model', got {content} in {os.fspath(path)}")
    assert isinstance(saved, Mapping)
    pattern = DilatedPattern.from_dict(saved["pattern"]) if "pattern" in saved else None
    weights, classes, head = dict(weights), tuple(map(str, saved.get("classes", ()))), None
    if f"encoder.{EMBEDDING}" in weights:
        parts = {name: weights.pop(f"head.{name}") for name in ("weight", "bias")}
        head = nn.Linear(*reversed(parts["weight"].shape))
        head.load_state_dict(parts)
        if len(classes) != head.out_features:
            raise ValueError(
                f"pretrained must name {head.out_features} classes under 'classes', got {classes} in {os.fspath(path)}"
            )
        weights = {name.removeprefix("encoder."): value for name, value in weights.items()}
    order, arch = saved.get("order"), saved.get("arch")
    return Checkpoint(os.fspath(path), weights, order=order, pattern=pattern, arch=arch, head=head, classes=classes)


def load_weights(model: LongNetViT, path: str | os.PathLike[str]) -> None:
    """Load a checkpoint, whose state dict is under `"model"`, into a model; from a classifier of slides, the encoder.

    The model must have the checkpoint's order of tiles, under `"order"` (absent: None, as in the published weights), and its
    pattern, if present, under `"pattern"` as `DilatedPattern.to_dict` gives it.

    Raises:
        ValueError: If there is no such state dict, its names and shapes are not exactly those of the model, or it was trained
            under another order or pattern.
        TypeError: As `DilatedPattern.from_dict`.
    """
    read_checkpoint(path).load_into(model)
