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

from flexdilated.draw.figure import grid_of, new, require_matplotlib
from flexdilated.draw.weights import UNSEEN, check_path, check_weights, finish, outline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            thumbnail has another shape than the slide, or the file name has another ending.
        TypeError: If an argument has the wrong type.
        OSError: If a picture cannot be read or written.
    """
    panels = check_weights(weights, titles)
    corners = coords.detach().to("cpu", torch.float64)
    if corners.shape != (panels.shape[1], 2) or not bool(corners.isfinite().all()):
        raise ValueError(
            f"coords must be finite, of shape (N, 2) with N=tiles of weights={panels.shape[1]}, got {tuple(corners.shape)}"
        )
    if not bool(panels.any()):
        raise ValueError("weights must not all be 0, got only zeros")
    if not tile_size > 0:
        raise ValueError(f"tile_size must be above 0, got {tile_size}")
    if (slide_size is None) != (thumbnail is None):
        raise ValueError(f"slide_size must come with thumbnail, and a thumbnail with it, got {slide_size} and {thumbnail}")
    if query is not None and not 0 <= query < len(coords):
        raise ValueError(f"query must be in [0, N={len(coords)}), got {query}")
    path = check_path(path)

    require_matplotlib()
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, to_rgba
    from matplotlib.image import imread

    try:
        background = None if thumbnail is None else imread(str(thumbnail))
    except SyntaxError as error:  # of Pillow, about a .png file that is cut off
        raise ValueError(f"thumbnail must be a picture that can be read, got '{thumbnail}': {error}") from None
    low, high = corners.min(dim=0).values, corners.max(dim=0).values + tile_size
    if background is not None and slide_size is not None:
        _check_thumbnail(background, slide_size, low, high - tile_size)
        low, high = torch.zeros(2, dtype=torch.float64), torch.tensor(slide_size, dtype=torch.float64)
    width, height = (high - low).tolist()

    rows, columns = grid_of(len(panels))
    inches = (INCHES if columns == 1 else 1.5 * INCHES) / columns
    longest = max(width, height)
    pixels = max(1, int(inches * DPI * 0.8))
    wide = columns * max(inches * width / longest, NARROWEST) + 1.3
    tall = max(rows * (inches * height / longest + 0.35), LOWEST) + 0.5 + 0.6 * (title is not None)
    figure = new(wide, tall, layout="constrained", dpi=DPI)
    largest = panels.max().item()
    lowest = max(panels[panels > 0].min().item(), largest / DECADES)
    norm, colours = LogNorm(min(lowest, largest / 1.01), largest), colormaps["cividis"]
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, values in zip(axes, panels):
        image, extent = _raster(values, corners - low, tile_size, longest, pixels)
        faces = colours(norm(np.maximum(image, lowest)))
        faces[image == 0.0] = to_rgba(UNSEEN)
        faces[..., 3] = np.where(np.isnan(image), 0.0, 1.0 if background is None else OVER)
        if background is not None:
            axis.imshow(background, extent=(0, width, height, 0), cmap="gray", aspect="equal")
        axis.imshow(faces, extent=(0, extent[0], extent[1], 0), interpolation="nearest", aspect="equal")
        axis.set_xlim(0, width)
        axis.set_ylim(height, 0)
        if query is not None:
            x, y = (corners[query] - low + tile_size / 2).tolist()
            side = max(tile_size, 0.012 * longest)  # seen on the largest slide too
            outline(axis, (x, y), side, side)
    return finish(
        figure,
        list(axes),
        path,
        norm=norm,
        label=f"{label}, logarithmic",
        has_less=bool(((panels > 0) & (panels < lowest)).any()),
        titles=titles,
        title=title,
        unseen=bool((panels == 0).any()),
        query=query is not None,
        note=note,
        shrink=0.7,
    )


def _check_thumbnail(picture: NDArray[Any], slide_size: tuple[float, float], low: Tensor, high: Tensor) -> None:
    """Raise if the thumbnail does not fit the tiles: sizes of another level, a part of the slide, another slide."""
    width, height = slide_size
    if min(low.tolist()) < 0 or high[0] >= width or high[1] >= height:
        reach = f"from {low.tolist()} to {high.tolist()}"
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
    corner_pixels = ((corners + side / 2) / pixel - (scale - 1) / 2).floor().long()
    shape = (corner_pixels.max(dim=0).values + scale).tolist()
    image = torch.full((shape[1] * shape[0],), -math.inf, dtype=torch.float64)
    for dy in range(scale):
        for dx in range(scale):
            image.scatter_reduce_(0, (corner_pixels[:, 1] + dy) * shape[0] + corner_pixels[:, 0] + dx, values, "amax")
    raster = image.reshape(shape[1], shape[0]).numpy()
    raster[np.isinf(raster)] = np.nan
    return raster, (shape[0] * pixel, shape[1] * pixel)
