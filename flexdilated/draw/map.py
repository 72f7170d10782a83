"""The picture of an attention map: weights as coloured cells, on a slide, in a grid, or along a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from flexdilated.core.pattern import as_integer
from flexdilated.draw.figure import INK, new, plain, write
from flexdilated.draw.places import Places, places_of
from flexdilated.draw.weights import MARK, UNSEEN, add_legend, check_path, check_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

__all__ = ["draw_attention_map"]

UNSEEN_SIZE = 0.6  # of a side
SPREAD = 50  # largest weight over the median: beyond it a linear scale shows one cell alone
DECADES = 1e4  # largest weight over the darkest of a logarithmic scale: one vanishing weight would give all others one colour
SMALL = 9.0  # points of a cell's side, below which the mark of the query is larger than the cell


def draw_attention_map(
    weights: Tensor,
    coords: Tensor | None = None,
    path: str | Path | None = None,
    *,
    grid: tuple[int, int] | None = None,
    words: Sequence[str] | None = None,
    queries: SupportsIndex | Sequence[SupportsIndex] | None = None,
    title: str | None = None,
    titles: Sequence[str] | None = None,
    tile_size: float | None = None,
    log_scale: bool | None = None,
) -> Figure:
    """Draw attention weights as coloured cells with one colour bar: tiles of a slide, patches of an image, or tokens of a text.

    Dark to light is small to large in cividis, safe for colour-blind readers; a weight of exactly 0 is small and light blue.
    Tiles lie where `coords` says, the y axis down, as on a slide; patches lie row by row in a `grid`; without either, tokens follow
    one another in lines as in a text; with more than 4,096 tokens a cell is the sum of several neighbours, and a note says so.

    Args:
        weights: `(N,)`, or `(P, N)` for P panels (say, heads) on one scale: one non-negative number per token. Of the weights of
            `attention_map`, leave out the columns of tokens that have no place (`weights[0, :, 0, 1:]` behind a CLS token).
        coords: `(N, 2)`: x and y of the tiles' upper left corners, in any unit.
        path: Where to write the picture too: .png, .pdf or .svg.
        grid: `(rows, columns)` of an image whose N patches are in row-major order.
        words: N texts, written in the cells of a strip; at most 480.
        queries: The query token, outlined in red: a position in `[0, N)`, or one per panel.
        title: Above all panels.
        titles: One text per panel.
        tile_size: Side of a tile in the unit of `coords`. Default: the median distance between neighbours in a row or column.
        log_scale: Whether colours follow the logarithm of the weights. Default: where the largest is more than 50 times the median
            of those above 0; what is below a ten thousandth of it is as dark as that then.

    Returns:
        The figure, of matplotlib.

    Raises:
        ValueError: If shapes do not match, a weight is negative or not finite, all weights are 0 under `log_scale`, the file name
            has another ending, or options of different kinds of pictures meet.
        TypeError: If an argument has the wrong type.
        OSError: If the picture cannot be written.
    """
    panels = check_weights(weights, titles)
    path = check_path(path)
    places = places_of(panels, coords, grid, words, tile_size)
    panels, marks = places.gathered(panels), _marks(queries, panels)
    largest = panels.max().item()
    if log_scale and largest == 0.0:
        raise ValueError("weights must not all be 0 under log_scale, got only zeros")
    is_automatic = log_scale is None
    if log_scale is None:
        log_scale = largest > 0.0 and largest > SPREAD * panels[panels > 0].median().item()

    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize

    if log_scale:
        smallest = panels[panels > 0].min().item()
        beyond = is_automatic and smallest < largest / DECADES
        smallest = largest / DECADES if beyond else smallest
        norm: Normalize = LogNorm(smallest, largest if largest > smallest else smallest * 10)
    else:
        beyond, norm = False, Normalize(0.0, largest if largest > 0.0 else 1.0)

    columns = 1 if places.is_strip else math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    low, high = places.extent
    width, height = (high - low).tolist()
    shape = min(max(height / width, 0.02 if places.is_strip else 0.25), 4.0)  # a strip of tiles still leaves room for its title
    inches = max(1.6, 5.0 / columns) / max(1.0, shape)
    above = 0.7 + 0.3 * (title is not None)
    # Beside a low picture there is no room for the scale.
    is_low = rows * inches * shape < 2.4
    size = rows * (max(0.3, inches * shape) + 0.35) + above + 0.7 * is_low
    figure = new(columns * inches + (0.6 if is_low else 1.6), size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for i, axis in enumerate(axes):
        axis.set_axis_off()
        if i < len(panels):
            mark = None if marks is None else marks[i] // places.shared
            _fill(axis, panels[i], places, norm, mark, points=72 * inches * places.size[0] / width)
            if titles is not None:
                axis.set_title(plain(titles[i]), fontsize=10, color=INK)
    place: dict[str, Any] = {"location": "right", "shrink": 0.8}
    if is_low:
        place = {"location": "bottom", "aspect": 40, "shrink": 0.8, "pad": 0.04}
    bar = figure.colorbar(ScalarMappable(norm, colormaps["cividis"]), ax=list(axes), extend="min" if beyond else "neither", **place)
    bar.set_label("attention weight" + (", logarithmic" if log_scale else ""), color=INK, fontsize=10)
    bar.ax.tick_params(labelsize=9.5, colors=INK)
    note = f"a cell is the sum of {places.shared} tokens" if places.shared > 1 else None
    add_legend(figure, unseen=bool((panels == 0).any()), query=marks is not None, note=note)
    if title is not None:
        figure.suptitle(plain(title), fontsize=11, weight="bold", color=INK)
    if path is not None:
        write(figure, path)
    return figure


def _fill(axes: Axes, values: Tensor, places: Places, norm: Normalize, mark: int | None, *, points: float) -> None:
    """Draw the cells of one panel, each `points` wide."""
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    width, height = places.size
    corners = torch.tensor([[0.0, 0.0], [width, 0.0], [width, height], [0.0, height]], dtype=torch.float64)
    faces = colormaps["cividis"](norm(values.numpy()))
    unseen = values.numpy() == 0.0
    faces[unseen] = to_rgba(UNSEEN)
    # Smaller, so that they differ from the largest weights where the picture is printed in grey.
    shape = torch.where(values[:, None, None] == 0.0, UNSEEN_SIZE, 1.0) * (corners - corners[2] / 2) + corners[2] / 2
    # Edges in the colour of the faces close the hairlines that antialiasing leaves between neighbours.
    polygons = list((places.corners[:, None] + shape).numpy())
    axes.add_collection(PolyCollection(polygons, facecolors=faces, edgecolors=faces, linewidths=0.2))
    for word, (x, y), face, is_small in zip(places.words or (), places.corners.tolist(), faces, unseen):
        light = is_small or 0.299 * face[0] + 0.587 * face[1] + 0.114 * face[2] > 0.5
        text = plain(word.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"))
        shown = text if len(text) <= 9 else text[:8] + "\N{HORIZONTAL ELLIPSIS}"
        color = INK if light else "white"
        axes.text(x + width / 2, y + height / 2, shown, ha="center", va="center", fontsize=8, color=color, clip_on=True)
    for line, token in enumerate(places.lines if len(places.lines) > 1 else ()):
        if line % -(-len(places.lines) // 16) == 0:
            y = float(places.corners[line * places.line, 1]) + height / 2
            axes.annotate(f"{token:,}", (0, y), (-4, 0), textcoords="offset points", ha="right", va="center", fontsize=9, color=INK)
    if mark is not None:
        x, y = places.corners[mark].tolist()
        halo = [withStroke(linewidth=4.2, foreground="white")]  # seen on dark and light cells, in grey too
        outline = {"fill": False, "edgecolor": MARK, "linewidth": 1.8, "clip_on": False, "zorder": 5, "path_effects": halo}
        axes.add_patch(Rectangle((x, y), width, height, **outline))  # type: ignore[arg-type]
        if points < SMALL:
            ring = {"markerfacecolor": "none", "markeredgecolor": MARK, "markeredgewidth": 1.8, "path_effects": halo}
            axes.plot(
                x + width / 2,
                y + height / 2,
                marker="s",
                markersize=1.6 * SMALL,
                clip_on=False,
                zorder=6,
                **ring,  # type: ignore[arg-type]
            )
    low, high = places.extent
    axes.set_xlim(low[0].item(), high[0].item())
    axes.set_ylim(high[1].item(), low[1].item())
    axes.set_aspect("equal")


def _marks(queries: SupportsIndex | Sequence[SupportsIndex] | None, panels: Tensor) -> list[int] | None:
    """The position of the query of each panel."""
    if queries is None:
        return None
    count, num_tokens = panels.shape
    given: Sequence[SupportsIndex] = queries if isinstance(queries, Sequence) else [queries] * count
    found = [as_integer(f"queries[{i}]", value) for i, value in enumerate(given)]
    if len(found) != count:
        raise ValueError(f"queries must be one position, or one per panel={count}, got {len(found)}")
    for position in found:
        if not 0 <= position < num_tokens:
            raise ValueError(f"queries must be in [0, N={num_tokens}), got {position}")
    return found
