"""The picture of weights over a slide of any size: an image of tiles, transparent where there is none, over a thumbnail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexdilated.draw.figure import INK, new, plain, wrapped, write
from flexdilated.draw.places import check_numbers
from flexdilated.draw.weights import MARK, UNSEEN, add_legend, check_path, check_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_slide_map"]

INCHES, DPI = 8.0, 200  # of one panel; several share three halves of that
NARROWEST, LOWEST = 2.4, 2.4  # inches of a panel, and of all panels: a strip of tissue has titles and a legend as any
FINEST = 64  # pixels along a tile, where there are few: more show nothing
DECADES = 1e3  # largest weight over the darkest colour: what is below differs by nothing that matters
SHAPE_ERROR = 0.02  # of a thumbnail's width over its height, beyond the rounding of both
OVER = 0.65  # of a tile over a thumbnail


def draw_slide_map(
    weights: Tensor,
    coords: Tensor,
    path: str | Path | None = None,
    *,
    tile_size: float,
    thumbnail: str | Path | None = None,
    slide_size: tuple[float, float] | None = None,
    query: int | None = None,
    title: str | None = None,
    titles: Sequence[str] | None = None,
    label: str = "attention weight",
    note: str | None = None,
) -> Figure:
    """Draw weights over a slide as an image, legible from ten tiles to hundreds of thousands.

    Dark to light is small to large in cividis, on a logarithmic scale from the smallest to the largest weight, three decades at
    most. A weight of exactly 0 is light blue, a colour that cividis does not contain. Where a panel has fewer pixels than the slide
    has tiles, a pixel shows the largest weight of its tiles, so none is lost. Places without a tile are white, or show the
    thumbnail, over which tiles are drawn a little transparent.

    Args:
        weights: `(N,)`, or `(P, N)` for P panels on one scale, not negative.
        coords: Upper left corners of the tiles, `(N, 2)`, in pixels of level 0.
        path: Where to write the picture too: .png, .pdf or .svg.
        tile_size: Side of a tile in those pixels.
        thumbnail: Path of a picture of the whole slide, of any size.
        slide_size: Width and height of the slide in pixels of level 0, with a thumbnail and needed with one.
        query: Which tile asked, outlined in red.
        title: Above all panels.
        titles: One text per panel.
        label: What the weights are, beside the scale.
        note: A text below the panels.

    Returns:
        The figure, of matplotlib.

    Raises:
        ValueError: If shapes do not match, a weight is negative or not finite, all are 0, tiles lie outside the slide, the
            thumbnail is damaged or of another shape than the slide, or the file name has another ending.
        TypeError: If an argument has the wrong type.
        OSError: If a picture cannot be read or written.
    """
    panels = check_weights(weights, titles)
    check_numbers("coords", coords)
    if coords.shape != (panels.shape[1], 2):
        raise ValueError(f"coords must have shape (N, 2) with N=tiles of weights={panels.shape[1]}, got {tuple(coords.shape)}")
    if not bool(panels.any()):
        raise ValueError("weights must not all be 0, got only zeros")
    if not (math.isfinite(tile_size) and tile_size > 0):
        raise ValueError(f"tile_size must be above 0 and finite, got {tile_size}")
    if (slide_size is None) != (thumbnail is None):
        raise ValueError(f"slide_size must come with thumbnail, and a thumbnail with it, got {slide_size} and {thumbnail}")
    if query is not None and not 0 <= query < len(coords):
        raise ValueError(f"query must be in [0, N={len(coords)}), got {query}")
    path = check_path(path)

    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, to_rgba
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    corners = coords.detach().to("cpu", torch.float64)
    below = None if thumbnail is None else _picture(Path(thumbnail))
    low, high = corners.min(dim=0).values, corners.max(dim=0).values + tile_size
    if below is not None and slide_size is not None:
        _check_thumbnail(below, slide_size, low, high - tile_size)
        low, high = torch.zeros(2, dtype=torch.float64), torch.tensor(slide_size, dtype=torch.float64)
    width, height = (high - low).tolist()

    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    inches = (INCHES if columns == 1 else 1.5 * INCHES) / columns
    longest = max(width, height)
    pixels = max(1, int(inches * DPI * 0.8))
    wide = columns * max(inches * width / longest, NARROWEST) + 1.3
    heading = [] if title is None else wrapped([title], 8 * wide)  # names of slides are long
    figure = new(
        wide,
        max(rows * (inches * height / longest + 0.35), LOWEST) + 0.5 + 0.3 * len(heading),
        layout="constrained",
        dpi=DPI,
    )
    largest = panels.max().item()
    lowest = max(panels[panels > 0].min().item(), largest / DECADES)
    norm, colours = LogNorm(min(lowest, largest / 1.01), largest), colormaps["cividis"]
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for i, axis in enumerate(axes):
        axis.set_axis_off()
        if i >= len(panels):
            continue
        image, extent = _raster(panels[i], corners - low, tile_size, longest, pixels)
        faces = colours(norm(np.maximum(image, lowest)))
        faces[image == 0.0] = to_rgba(UNSEEN)
        faces[..., 3] = np.where(np.isnan(image), 0.0, 1.0 if below is None else OVER)
        if below is not None:
            axis.imshow(below, extent=(0, width, height, 0), cmap="gray", aspect="equal")
        axis.imshow(faces, extent=(0, extent[0], extent[1], 0), interpolation="nearest", aspect="equal")
        axis.set_xlim(0, width)
        axis.set_ylim(height, 0)
        if titles is not None:
            axis.set_title(plain(titles[i]), fontsize=11, color=INK)
        if query is not None:
            x, y = (corners[query] - low).tolist()
            side = max(tile_size, 0.012 * longest)  # seen on the largest slide too
            middle = [x + tile_size / 2 - side / 2, y + tile_size / 2 - side / 2]
            halo = [withStroke(linewidth=3.6, foreground="white")]
            drawn: dict[str, Any] = {"edgecolor": MARK, "linewidth": 1.8, "path_effects": halo, "clip_on": False}
            axis.add_patch(Rectangle((middle[0], middle[1]), side, side, fill=False, **drawn))
    bar = figure.colorbar(
        ScalarMappable(norm, colours),
        ax=list(axes),
        extend="min" if bool(((panels > 0) & (panels < lowest)).any()) else "neither",
        shrink=0.7,
    )
    bar.set_label(f"{label}, logarithmic", color=INK, fontsize=11)
    bar.ax.tick_params(labelsize=10, colors=INK)
    add_legend(figure, unseen=bool((panels == 0).any()), query=query is not None, note=note)
    if heading:
        figure.suptitle(plain("\n".join(heading)), fontsize=12, weight="bold", color=INK)
    if path is not None:
        write(figure, path)
    return figure


def _picture(path: Path) -> NDArray[Any]:
    from matplotlib.image import imread
    from PIL.Image import DecompressionBombError  # of matplotlib's own reader

    try:
        return imread(str(path))
    except (SyntaxError, DecompressionBombError) as error:  # no whole .png file; more pixels than memory should be trusted with
        raise ValueError(f"thumbnail must be a picture that can be read, got '{path}': {error}") from None


def _check_thumbnail(picture: NDArray[Any], slide_size: tuple[float, float], first: Tensor, last: Tensor) -> None:
    """Raise if the thumbnail does not fit the tiles: sizes of another level, a part of the slide, another slide."""
    width, height = slide_size
    if min(first.tolist()) < 0 or last[0] >= width or last[1] >= height:
        reach = f"from {first.tolist()} to {last.tolist()}"
        raise ValueError(
            f"slide_size must be that of level 0, in which all tiles begin, got {width:g} x {height:g} and tiles {reach}"
        )
    rows, columns = picture.shape[:2]
    if abs(columns * height / (rows * width) - 1) > SHAPE_ERROR + 1 / min(rows, columns):
        raise ValueError(f"thumbnail must have the shape of the slide={width:g} x {height:g}, got {columns} x {rows} pixels")


def _raster(
    values: Tensor, corners: Tensor, side: float, longest: float, pixels: int
) -> tuple[NDArray[np.float64], tuple[float, float]]:
    """The weights as an image, NaN where no tile is, the largest where several are; and its width and height in pixels of level 0.

    A tile is `scale` pixels wide, or a pixel several tiles: whichever comes next to `pixels` along the longer side.
    """
    cells = longest / side
    scale = min(FINEST, max(1, round(pixels / cells)))
    pixel = side * max(1.0, cells / pixels) / scale
    first = ((corners + side / 2) / pixel - (scale - 1) / 2).floor().long()
    shape = (first.max(dim=0).values + scale).tolist()
    image = torch.full((shape[1] * shape[0],), -math.inf, dtype=torch.float64)
    for dy in range(scale):
        for dx in range(scale):
            image.scatter_reduce_(0, (first[:, 1] + dy) * shape[0] + first[:, 0] + dx, values, "amax")
    found = image.reshape(shape[1], shape[0]).numpy()
    found[np.isinf(found)] = np.nan
    return found, (shape[0] * pixel, shape[1] * pixel)
