"""The picture of an attention map: weights as coloured tiles at their places on a slide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from flexdilated.draw.figure import INK, new, write

__all__ = ["draw_attention_map"]

PICTURE_FORMATS = (".png", ".pdf", ".svg")
MAX_PANELS = 64
UNSEEN = "#d9d9d9"  # a weight of exactly 0: no branch joins the tile with the query


def draw_attention_map(
    weights: Tensor,
    coords: Tensor,
    path: str | Path,
    *,
    tile_size: float | None = None,
    titles: Sequence[str] | None = None,
    log_scale: bool = False,
) -> None:
    """Draw attention weights as coloured tiles at their places on a slide, with one colour bar, and write the picture.

    Dark to light is small to large in cividis, which colour-blind readers see alike; a weight of exactly 0 is grey. The y axis
    points down, as on a slide.

    Args:
        weights: `(N,)`, or `(P, N)` for P panels (say, heads) on one scale: one non-negative number per tile. Of the weights of
            `attention_map`, leave out the columns of tokens that are no tiles (`weights[0, :, 0, 1:]` behind a CLS token).
        coords: `(N, 2)`: x and y of the tiles' upper left corners, in any unit.
        path: Where to write: .png, .pdf or .svg.
        tile_size: Side of a tile in the unit of `coords`. Default: the median distance between neighbours in a row or column.
        titles: One text per panel.
        log_scale: Whether colours follow the logarithm of the weights.

    Raises:
        ValueError: If shapes do not match, a weight is negative or not finite, all weights are 0 under `log_scale`, or the file
            name has another ending.
        TypeError: If an argument has the wrong type.
        OSError: If the picture cannot be written.
    """
    panels, places = _check_drawing(weights, coords)
    path = Path(path)
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise ValueError(f"path must end in one of {PICTURE_FORMATS}, got {str(path)!r}")
    if titles is not None and (isinstance(titles, str) or len(titles) != len(panels)):
        raise ValueError(f"titles must hold one text per panel={len(panels)}, got {titles!r}")
    if tile_size is not None and not (math.isfinite(tile_size) and tile_size > 0.0):
        raise ValueError(f"tile_size must be above 0 and finite, got {tile_size}")
    largest = panels.max().item()
    if log_scale and largest == 0.0:
        raise ValueError("weights must not all be 0 under log_scale, got only zeros")
    side = _tile_side(places) if tile_size is None else float(tile_size)

    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.patches import Patch

    if log_scale:
        smallest = panels[panels > 0].min().item()
        norm: Normalize = LogNorm(smallest, largest if largest > smallest else smallest * 10)
    else:
        norm = Normalize(0.0, largest if largest > 0.0 else 1.0)
    colors = colormaps["cividis"]

    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    low, high = places.min(dim=0).values, places.max(dim=0).values + side
    width, height = (high - low).tolist()
    shape = min(max(height / width, 0.25), 4.0)  # a strip of tiles still leaves room for its title
    inches = max(1.6, 5.0 / columns) / max(1.0, shape)
    figure = new(columns * inches + 1.6, rows * (inches * shape + 0.35) + 0.7, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    corners = torch.tensor([[0.0, 0.0], [side, 0.0], [side, side], [0.0, side]], dtype=torch.float64)
    squares = list((places[:, None] + corners).numpy())  # N of (4, 2)
    has_unseen = bool((panels == 0).any())
    for i, axis in enumerate(axes):
        axis.set_axis_off()
        if i >= len(panels):
            continue
        values = panels[i].numpy()
        faces = colors(norm(values))
        faces[values == 0.0] = _rgba(UNSEEN)
        # Edges in the colour of the faces close the hairlines that antialiasing leaves between neighbours.
        axis.add_collection(PolyCollection(squares, facecolors=faces, edgecolors=faces, linewidths=0.2))
        axis.set_xlim(low[0].item(), high[0].item())
        axis.set_ylim(high[1].item(), low[1].item())
        axis.set_aspect("equal")
        if titles is not None:
            axis.set_title(titles[i], fontsize=8, color=INK)
    bar = figure.colorbar(ScalarMappable(norm, colors), ax=list(axes), shrink=0.8)
    bar.set_label("attention weight" + (", logarithmic" if log_scale else ""), color=INK)
    bar.ax.tick_params(labelsize=7, colors=INK)
    if has_unseen:
        figure.legend(
            handles=[Patch(facecolor=UNSEEN, edgecolor=INK, linewidth=0.5, label="weight 0")],
            loc="outside lower center",
            fontsize=7,
            frameon=False,
        )
    write(figure, path)


def _check_drawing(weights: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
    """Panels `(P, N)` and places `(N, 2)`, float64 on the CPU."""
    for name, x in (("weights", weights), ("coords", coords)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.is_complex() or x.dtype == torch.bool:
            raise TypeError(f"{name} must hold numbers, got {x.dtype}")
    if coords.dim() != 2 or coords.shape[1] != 2 or coords.shape[0] < 1:
        raise ValueError(f"coords must have shape (N, 2), one row per tile, got {tuple(coords.shape)}")
    if weights.dim() not in (1, 2) or weights.shape[-1] != coords.shape[0]:
        raise ValueError(
            f"weights must have shape (N,) or (P, N) with N=rows of coords={coords.shape[0]}, got {tuple(weights.shape)}; "
            "leave out the columns of tokens that are no tiles"
        )
    panels, places = (x.detach().to("cpu", torch.float64) for x in (weights, coords))
    panels = panels.reshape(-1, coords.shape[0])
    if not 1 <= len(panels) <= MAX_PANELS:
        raise ValueError(f"weights must have from 1 to {MAX_PANELS} panels, got {len(panels)}")
    if not bool((panels.isfinite() & (panels >= 0)).all()):
        raise ValueError("weights must be finite and at least 0, got others")
    if not bool(places.isfinite().all()):
        raise ValueError("coords must be finite, got others")
    return panels, places


def _tile_side(places: Tensor) -> float:
    """The median distance between neighbours in a row or column; for scattered places, what would fill their extent."""
    gaps = []
    for along, across in ((0, 1), (1, 0)):
        lines: dict[float, list[float]] = {}
        for place in places.tolist():
            lines.setdefault(place[across], []).append(place[along])
        for line in lines.values():
            ordered = sorted(set(line))
            gaps += [b - a for a, b in pairwise(ordered)]
    if gaps:
        return float(torch.tensor(gaps, dtype=torch.float64).median())
    extent = (places.max(dim=0).values - places.min(dim=0).values).max().item()
    return extent / math.sqrt(len(places)) if extent > 0.0 else 1.0


def _rgba(color: str) -> tuple[float, float, float, float]:
    r, g, b = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return r, g, b, 1.0
