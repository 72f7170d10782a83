"""The picture of an attention map: weights as coloured cells, in a grid or along a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import torch
from torch import Tensor

from flexdilated.core.integers import as_integer
from flexdilated.draw.figure import INK, grid_of, new, plain, require_matplotlib
from flexdilated.draw.weights import UNSEEN, check_path, check_weights, finish, outline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

UNSEEN_SIZE = 0.6  # of a side
SPREAD = 50  # largest weight over the median: beyond it a linear scale shows one cell alone
DECADES = 1e4  # largest weight over the darkest of a logarithmic scale: one tiny weight would give all others one colour
SMALLEST_MARK = 0.03  # of the picture's longer side: the mark of the query is larger than a small cell
LINE, WORDS = 64, 8  # cells per line of a strip, without and with words
MAX_CELLS = 4096  # in a strip; if there are more tokens, several share a cell
MAX_WORDS = 480


def draw_attention_map(
    weights: Tensor,
    path: str | Path | None = None,
    *,
    grid: tuple[int, int] | None = None,
    words: Sequence[str] | None = None,
    queries: SupportsIndex | Sequence[SupportsIndex] | None = None,
    title: str | None = None,
    titles: Sequence[str] | None = None,
    log_scale: bool | None = None,
) -> Figure:
    """Draw attention weights as coloured cells with one colour bar: patches of an image, or tokens of a text.

    >>> figure = draw_attention_map(torch.rand(6), grid=(2, 3))
    >>> len(figure.axes)  # the panel and the colour bar
    2

    Dark to light is small to large (cividis); a weight of exactly 0 is light blue. With more than 4,096 tokens a cell is the sum of
    several neighbours, and a note says so. For tiles of a slide use `flexdilated.slides.picture.draw_slide_map`.

    Args:
        weights: `(N,)`, or `(P, N)` for P panels on one scale: one non-negative number per token, without class tokens
            (`weights[0, :, 0, 1:]` of `attention_map`).
        path: Where to write the picture too: .png, .pdf or .svg.
        grid: `(rows, columns)` of an image whose N patches are in row-major order.
        words: N texts, written in the cells of a strip; at most 480.
        queries: The query token, outlined in red: a position in `[0, N)`, or one per panel.
        title: Above all panels.
        titles: One text per panel.
        log_scale: Whether colours follow the logarithm of the weights, down to 1e-4 of the largest. Default: if the largest is more
            than 50 times the median of the weights above 0.

    Returns:
        The figure, of matplotlib.

    Raises:
        ValueError: If shapes do not match, a weight is negative or not finite, all weights are 0 under `log_scale`, the file
            has another ending, or both `grid` and `words` are given.
        TypeError: If an argument has the wrong type.
        OSError: If the picture cannot be written.
    """
    panels = check_weights(weights, titles)
    path = check_path(path)
    places = places_of(panels.shape[1], grid, words)
    panels, marks = places.gathered(panels), _marks(queries, panels)
    largest = panels.max().item()
    if log_scale and largest == 0.0:
        raise ValueError("weights must not all be 0 under log_scale, got only zeros")
    if log_scale is None:
        log_scale = largest > 0.0 and largest > SPREAD * panels[panels > 0].median().item()

    require_matplotlib()
    from matplotlib.colors import LogNorm, Normalize

    norm, has_less = Normalize(0.0, largest or 1.0), False
    if log_scale:
        smallest = panels[panels > 0].min().item()
        has_less, lowest = smallest < largest / DECADES, max(smallest, largest / DECADES)
        norm = LogNorm(lowest, largest if largest > lowest else 10 * lowest)

    rows, columns = (len(panels), 1) if places.is_strip else grid_of(len(panels))
    low, high = places.extent
    width, height = (high - low).tolist()
    shape = min(max(height / width, 0.02 if places.is_strip else 0.25), 4.0)  # a strip of tiles still leaves room for its title
    inches = max(1.6, 5.0 / columns) / max(1.0, shape)
    title_height = 0.7 + 0.3 * (title is not None)
    # Beside a low picture there is no room for the scale.
    is_low = rows * inches * shape < 2.4
    size = rows * (max(0.3, inches * shape) + 0.35) + title_height + 0.7 * is_low
    figure = new(columns * inches + (0.6 if is_low else 1.6), size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for i, values in enumerate(panels):
        _fill(axes[i], values, places, norm, None if marks is None else marks[i] // places.tokens_per_cell)
    place = {"location": "bottom", "aspect": 40, "pad": 0.04} if is_low else {"location": "right"}
    return finish(
        figure,
        list(axes),
        path,
        norm=norm,
        label="attention weight" + (", logarithmic" if log_scale else ""),
        has_less=has_less,
        titles=titles,
        title=title,
        unseen=bool((panels == 0).any()),
        query=marks is not None,
        note=f"a cell is the sum of {places.tokens_per_cell} tokens" if places.tokens_per_cell > 1 else None,
        shrink=0.8,
        **place,
    )


def _fill(axes: Axes, values: Tensor, places: Places, norm: Normalize, mark: int | None) -> None:
    """Draw the cells of one panel."""
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

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
        label = text if len(text) <= 9 else text[:8] + "\N{HORIZONTAL ELLIPSIS}"
        color = INK if light else "white"
        axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=8, color=color, clip_on=True)
    for line, token in enumerate(places.lines if len(places.lines) > 1 else ()):
        if line % -(-len(places.lines) // 16) == 0:
            y = float(places.corners[line * places.cells_per_line, 1]) + height / 2
            axes.annotate(f"{token:,}", (0, y), (-4, 0), textcoords="offset points", ha="right", va="center", fontsize=9, color=INK)
    low, high = places.extent
    axes.set_xlim(low[0].item(), high[0].item())
    axes.set_ylim(high[1].item(), low[1].item())
    axes.set_aspect("equal")
    if mark is not None:
        center = (places.corners[mark] + torch.tensor(places.size) / 2).tolist()
        least = SMALLEST_MARK * (high - low).max().item()
        outline(axes, (center[0], center[1]), max(width, least), max(height, least))


def _marks(queries: SupportsIndex | Sequence[SupportsIndex] | None, panels: Tensor) -> list[int] | None:
    """The position of the query of each panel."""
    if queries is None:
        return None
    count, num_tokens = panels.shape
    panel_queries: Sequence[SupportsIndex] = queries if isinstance(queries, Sequence) else [queries] * count
    positions = [as_integer(f"queries[{i}]", value) for i, value in enumerate(panel_queries)]
    if len(positions) != count:
        raise ValueError(f"queries must be one position, or one per panel={count}, got {len(positions)}")
    for position in positions:
        if not 0 <= position < num_tokens:
            raise ValueError(f"queries must be in [0, N={num_tokens}), got {position}")
    return positions


@dataclass(frozen=True)
class Places:
    """The positions of the cells of a map."""

    corners: Tensor  # (cells, 2), upper left corners
    size: tuple[float, float]
    is_strip: bool
    tokens_per_cell: int = 1
    words: Sequence[str] | None = None
    lines: Sequence[int] = ()  # the first token of each line of a strip
    cells_per_line: int = 1

    @property
    def extent(self) -> tuple[Tensor, Tensor]:
        low, high = self.corners.min(dim=0).values, self.corners.max(dim=0).values
        return low, high + torch.tensor(self.size, dtype=torch.float64)

    def gathered(self, panels: Tensor) -> Tensor:
        """The weights of the cells: sums over the tokens of each cell."""
        if self.tokens_per_cell == 1:
            return panels
        padded = torch.nn.functional.pad(panels, (0, -panels.shape[1] % self.tokens_per_cell))
        return padded.unflatten(1, (-1, self.tokens_per_cell)).sum(dim=2)


def places_of(num_tokens: int, grid: tuple[int, int] | None, words: Sequence[str] | None) -> Places:
    """The positions of N tokens, by `grid` or `words`, or in lines without either."""
    if grid is not None and words is not None:
        raise ValueError("words must come without grid, got both")
    if grid is not None:
        if len(grid) != 2 or min(grid) < 1 or grid[0] * grid[1] != num_tokens:
            raise ValueError(
                f"grid must be (rows, columns) of N={num_tokens} patches, got {grid}; leave out tokens that are no patches"
            )
        return Places(_row_major(num_tokens, grid[1], 1.0), (1.0, 1.0), is_strip=False)
    if words is not None:
        if len(words) != num_tokens or num_tokens > MAX_WORDS:
            raise ValueError(f"words must hold one text per token={num_tokens}, at most {MAX_WORDS}, got {len(words)}")
        lines = range(0, num_tokens, WORDS)
        return Places(_row_major(num_tokens, WORDS, 0.5), (1.0, 0.5), is_strip=True, words=words, lines=lines, cells_per_line=WORDS)
    tokens_per_cell = -(-num_tokens // MAX_CELLS)
    lines, corners = range(0, num_tokens, LINE * tokens_per_cell), _row_major(-(-num_tokens // tokens_per_cell), LINE, 1.6)
    return Places(corners, (1.0, 1.4), is_strip=True, tokens_per_cell=tokens_per_cell, lines=lines, cells_per_line=LINE)


def _row_major(cells: int, columns: int, height: float) -> Tensor:
    index = torch.arange(cells)
    return torch.stack([(index % columns).double(), (index // columns) * height], dim=1)
