"""How much of each tile reaches the class token, or another tile, through all layers; and files for viewers."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flexdilated.attention import dilated_attention
from flexdilated.core.files import replaced
from flexdilated.core.integers import is_integer
from flexdilated.core.lse import accumulated
from flexdilated.core.pattern import DilatedPattern
from flexdilated.ordering import coordinate_order
from flexdilated.slides.model import LongNetViT

TABLES = (".csv", ".geojson")


@torch.no_grad()
def tile_relevance(model: LongNetViT, x: Tensor, coords: Tensor, *, tile: int | None = None) -> Tensor:
    """How much of each tile reaches the class token, or another tile, through all layers, over its value under equal scores.

    Attention rollout: the row `r` of the query begins as 1 at the query and becomes `(r + r A) / 2` in every layer, from the last
    to the first, where `A` `(N, N)` is the mean of the heads' attention. It is divided by the same rollout with all scores 0, which
    is what the pattern alone gives a tile at its place in the sequence: 1 means neither more nor less than that. Memory and time
    grow with the number of tiles, never with its square.
    Source: attention rollout, Abnar and Zuidema, arXiv 2005.00928.

    Args:
        model: In evaluation mode, without a mesh.
        x: Tile embeddings, `(N, in_chans)`.
        coords: Their corners as the model takes them, `(N, 2)`.
        tile: Which tile asks, in `[0, N)`. Default: the class token.

    Returns:
        `(N,)`, float32 (float64 for a float64 model), on the device of the model; 0 for a tile that does not reach the query.

    Raises:
        ValueError: If the model is in training mode, or the tile is none of the slide's.
        NotImplementedError: If the model has a mesh.
    """
    _check_mode(model)
    if model.mesh is not None:
        raise NotImplementedError("model must come without mesh, got one: a rank holds a part of the keys alone")
    if tile is not None and (not is_integer(tile) or not 0 <= tile < len(x)):
        raise ValueError(f"tile must be in [0, N={len(x)}), got {tile!r}")
    places = torch.arange(len(x), device=x.device)  # of the tiles in the sequence, without the class token
    if model.order is not None:
        places = coordinate_order((coords.long() // model.tile_size).flip(-1), order=model.order).inverse
    query = 0 if tile is None else 1 + int(places[tile])
    inputs: list[Tensor] = []
    with ExitStack() as stack:
        for block in model.encoder.layers:
            attention: Any = block.self_attn
            stack.callback(attention.q_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0])).remove)
        model(x[None], coords[None])
    rows = torch.zeros(2, 1 + len(x), dtype=accumulated(x.dtype), device=x.device)  # with the scores, and with scores of 0
    rows[:, query] = 1.0
    for block in reversed(model.encoder.layers):
        attention, hidden = block.self_attn, inputs.pop()
        q, k = (p(hidden).unflatten(-1, (-1, attention.head_dim)).to(rows.dtype) for p in (attention.q_proj, attention.k_proj))
        rows = (rows + _times_attention(rows, q, k, model.pattern)) / 2
    actual, equal = rows[:, 1:][:, places]
    return torch.where(equal > 0, actual / equal, 0.0)


def _times_attention(rows: Tensor, q: Tensor, k: Tensor, pattern: DilatedPattern) -> Tensor:
    """`rows[0] @ A` and `rows[1] @ A0`, with the mean `A` of the heads' attention, and `A0` that of scores of 0; `(2, N)`.

    Output is linear in v, so its gradient with respect to v is the product with the transposed matrix, which is never built.
    """
    q, k = torch.cat([q, torch.zeros_like(q)]), torch.cat([k, torch.zeros_like(k)])
    v = torch.zeros_like(k, requires_grad=True)
    with torch.enable_grad():
        out = dilated_attention(q, k, v, pattern)
    upstream = torch.zeros_like(out)
    upstream[..., 0] = rows[..., None] / out.shape[2]
    (gradient,) = torch.autograd.grad(out, v, upstream)
    return gradient[..., 0].sum(dim=-1)


def class_relevance(model: LongNetViT, head: nn.Linear, x: Tensor, coords: Tensor, *, index: int) -> Tensor:
    """How much each tile speaks for a class: its part of the change of the class's score from a slide of zeros to this one.

    Integrated gradients: `x * mean of d score(t x) / dx` over `t` in [0, 1], at 8 points of Gauss and Legendre, summed over the
    elements of a tile. The score is the logit of the class minus the mean of the other logits. The values add up to
    `score(x) - score(0)`, up to the error of the 8 points. Memory and time grow with the number of tiles, never with its square.
    Source: integrated gradients, Sundararajan et al., arXiv 1703.01365.

    Args:
        model: In evaluation mode.
        head: From an embedding to the logits of at least two classes.
        x: Tile embeddings, `(N, in_chans)`.
        coords: Their corners as the model takes them, `(N, 2)`.
        index: The class, in `[0, classes)`.

    Returns:
        `(N,)`, in the dtype of `x`: above 0 for the class, below 0 against it.

    Raises:
        ValueError: If the model is in training mode, or the class is not one of at least two.
    """
    _check_mode(model)
    if head.out_features < 2 or not is_integer(index) or not 0 <= index < head.out_features:
        raise ValueError(f"index must be in [0, classes={head.out_features}), of at least two classes, got {index!r}")
    sign = torch.full((head.out_features,), -1.0 / (head.out_features - 1), dtype=x.dtype, device=x.device)
    sign[index] = 1.0
    total = torch.zeros_like(x)
    with ExitStack() as stack:
        exact = replace(model.pattern, detach_weights=False)  # published models train with gradients that lack a term
        layer: Any
        for layer in model.encoder.layers:
            stack.enter_context(patch.object(layer.self_attn.attention, "pattern", exact))
            # The backward computes a layer again: memory for one of them.
            stack.enter_context(patch.object(layer, "forward", partial(checkpoint, layer.forward, use_reentrant=False)))
        for t, weight in zip(*leggauss(8)):
            scaled = ((1 + t) / 2 * x).requires_grad_()
            with torch.enable_grad():
                score = head(model(scaled[None], coords[None])[0])[0] @ sign
            total += weight / 2 * torch.autograd.grad(score, scaled)[0]
    return (total * x).sum(dim=1)


def _check_mode(model: LongNetViT) -> None:
    if model.training:
        raise ValueError("model must be in evaluation mode, got training mode, in which dropout is active; call model.eval()")


def write_table(
    path: Path, coords: Tensor, tile_size: float, columns: Mapping[str, Tensor], *, tile_ids: Tensor | None = None
) -> None:
    """Numbers of tiles as a file that viewers of slides read.

    `.geojson`: QuPath's tiles, squares in pixels of level 0 with a measurement per column. `.csv`: `tile_id`, `x`, `y` and a
    column each, as LazySlide's tables of tiles have them.

    Args:
        path: Ends in one of `TABLES`.
        coords: Upper left corners, `(N, 2)` pixels of level 0.
        tile_size: Side of a tile in those pixels.
        columns: `(N,)` finite numbers by name, at least one column.
        tile_ids: `(N,)` integers. Default: from 0 on.

    Raises:
        ValueError: If the ending or a shape is another, or a number is not finite, which JSON cannot hold.
        OSError: If it cannot be written.
    """
    if path.suffix.lower() not in TABLES:
        raise ValueError(f"table must end in {', '.join(TABLES)}, got '{path}'")
    ids = torch.arange(len(coords)) if tile_ids is None else tile_ids
    for name, column in {"tile_ids": ids, **columns}.items():
        if column.shape != coords.shape[:1] or not bool(column.isfinite().all()):
            raise ValueError(f"{name} must be (N,) finite numbers for N={len(coords)}, got {tuple(column.shape)}")
    rows = zip(ids.tolist(), coords.tolist(), zip(*(column.tolist() for column in columns.values())))
    with replaced(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        if path.suffix.lower() == ".geojson":
            text.writelines(_features(rows, tile_size, list(columns)))
        else:
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(["tile_id", "x", "y", *columns])
            writer.writerows([tile, *corner, *values] for tile, corner, values in rows)
        text.detach()


def _features(rows: Iterator[Any], side: float, names: Sequence[str]) -> Iterator[str]:
    """A FeatureCollection, feature by feature: a string of all would take as much memory as the slide."""
    yield '{"type": "FeatureCollection", "features": ['
    for i, (tile, (x, y), values) in enumerate(rows):
        corners = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
        feature = {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [corners]},
            "properties": {"objectType": "tile", "name": str(tile), "measurements": dict(zip(names, values))},
        }
        yield ("\n" if i == 0 else ",\n") + json.dumps(feature)
    yield "\n]}\n"
