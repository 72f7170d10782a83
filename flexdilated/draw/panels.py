"""A picture of a pattern with one panel per head: its data, its titles, its figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.pattern_svg import WINDOW_COLOR
from flexdilated.draw.figure import INK, grid_of, new, plain, require_matplotlib, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NARROW = 840  # pixels of panels side by side, up to which text has its usual size
APART = "#ffffff"  # no branch joins the pair
FUTURE = "#dedede"  # the pair is above the causal diagonal
NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Panel:
    """The picture of one head, or of heads that are equal."""

    title: list[str]
    cells: NDArray[np.int64]  # (rows, columns), each a place in the colours
    lengths: list[int]  # of the segments to outline
    window: int  # tokens of the window to outline, 0 without one


@dataclass(frozen=True)
class Panels:
    """The picture of a pattern, as data for a figure or a terminal."""

    title: list[str]
    panels: list[Panel]
    num_tokens: int
    cell: int  # tokens per side of a cell
    tick: int  # tokens from one tick to the next
    is_causal: bool
    colors: Sequence[str]
    glyphs: Sequence[str]  # the colours where there are none
    legend: str
    labels: dict[int, str]  # of colours, in the order of the legend
    title_width: int  # of a panel, in characters


def head_panel(
    pattern: DilatedPattern,
    heads: Sequence[int],
    num_kv_heads: int,
    cells: NDArray[np.int64],
    lines: Sequence[str],
    *,
    shortest: int = 1,
) -> Panel:
    """The panel of heads that are equal, with segments of at least `shortest` tokens outlined."""
    lengths = [branch.length for branch in pattern.kept(heads[0], num_kv_heads, "pictures")]
    title = [_head_title(pattern, heads, num_kv_heads), *map(_unbroken, lines)]
    return Panel(title, cells, [length for length in lengths if length >= shortest], pattern.window or 0)


def pattern_title(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, *, is_causal: bool, name: str | None, density: str
) -> list[str]:
    """The title of a picture, in lines."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str, got {name!r}")
    rule = " grouped by branch" if pattern.heads == "grouped" else f", {pattern.offsets} offsets"
    heads = "1 head" if num_kv_heads == 1 else f"{num_kv_heads} heads"
    tokens = "1 token" if num_tokens == 1 else f"{num_tokens:,} tokens"
    return [
        *([] if name is None else [name]),
        " · ".join(branch_words(pattern)),
        f"{tokens} · {heads}{rule} · {'causal' if is_causal else 'not causal'} · {_unbroken(density)}",
    ]


def branch_words(pattern: DilatedPattern) -> list[str]:
    """The lengths, the rates, the window and the global tokens of a pattern."""
    numbers = {
        "segment lengths": pattern.segment_lengths,
        "dilation rates": pattern.dilation_rates,
        "window": (pattern.window or "",),
        "global tokens": (pattern.global_tokens or "",),
    }
    return [f"{name} {', '.join(map(str, values))}" for name, values in numbers.items() if any(values)]


def _unbroken(text: str) -> str:
    return text.replace(" ", NO_BREAK)


def _head_title(pattern: DilatedPattern, heads: Sequence[int], num_kv_heads: int) -> str:
    """The title of a panel of heads that run the same branches."""
    branches = pattern.kept(heads[0], num_kv_heads, "pictures")
    offsets = {", ".join(str(branch.offset) for branch in pattern.kept(head, num_kv_heads, "pictures")) for head in heads}
    name = f"head{'' if len(heads) == 1 else 's'} {describe_heads(heads)}"
    if not branches:
        return name
    if pattern.heads == "grouped":
        return f"{name}: length {branches[0].length}, rate {branches[0].rate}, offset{NO_BREAK}{offsets.pop()}"
    if len(offsets) > 1:
        return f"{name}: {len(offsets)} choices of offsets"
    return f"{name}: offset{'' if len(branches) == 1 else 's'} {offsets.pop()}"


def tick_step(segment_length: int, num_tokens: int, most: int) -> int:
    """Tokens between ticks: about `most` ticks at most, at boundaries of the shortest segments where there are several."""
    if 2 * segment_length > num_tokens:
        return max(1, num_tokens // (most - 1))
    return segment_length * -(-num_tokens // (most * segment_length))


def describe_heads(heads: Sequence[int]) -> str:
    """`0-3`, `0, 4`, or `0, 4, ..., 28 (8 heads)`."""
    if len(heads) > 2 and heads[-1] - heads[0] == len(heads) - 1:
        return f"{heads[0]}-{heads[-1]}"
    if len(heads) > 4:
        return f"{heads[0]}, {heads[1]}, ..., {heads[-1]} ({len(heads)} heads)"
    return ", ".join(map(str, heads))


def figure_of(picture: Panels) -> Figure:
    """A figure with sharp cells: every token has the same whole number of pixels, and no texts overlap."""
    require_matplotlib()
    from matplotlib.patches import Patch

    panels, cells, labels = picture.panels, len(picture.panels[0].cells), dict(picture.labels)
    handles = [Patch(facecolor=picture.colors[i], edgecolor=INK, linewidth=0.5, label=label) for i, label in labels.items()]
    if window := panels[0].window:
        labels[-1] = f"edge of the window of {window:,}"
        handles.append(Patch(facecolor="none", edgecolor=WINDOW_COLOR, linewidth=1.2, label=labels[-1]))
    rows, columns = grid_of(len(panels))
    # Laid out in pixels.
    dpi = 160
    target_side = {1: 840, 2: 560}.get(len(panels), 400)
    side = cells * max(1, round(target_side / cells))
    # Text grows with the picture, so that it is read on a narrow page too.
    zoom = min(max(1.0, columns * side / NARROW), max(1.0, side / (10.5 * picture.title_width)))
    line, small, low = round(26 * zoom), round(22 * zoom), round(28 * zoom)
    left, right, gap = round(max(96, 68 + 9 * len(f"{picture.num_tokens:,}")) * zoom), round(32 * zoom), low
    width = max(left + columns * side + (columns - 1) * gap + right, 760)
    left += (width - (left + columns * side + (columns - 1) * gap + right)) // 2
    longest = max(len(label) for label in labels.values())
    legend_columns = max(1, min(len(labels), 8, int((width / zoom - 64) / (60 + 9 * longest))))
    bottom = round(122 * zoom) + low * -(-len(labels) // legend_columns)
    center = (left + (columns * side + (columns - 1) * gap) / 2) / width
    title = wrapped(picture.title, (2 * min(center, 1 - center) * width / zoom - 64) / 12)
    titles = [wrapped(panel.title, side / (10.5 * zoom)) for panel in panels]
    title_height = max(len(lines) for lines in titles) * small + round(14 * zoom)
    title_top = round(24 * zoom)
    top = title_top + len(title) * line + round(10 * zoom)
    height = top + rows * (title_height + side) + (rows - 1) * 12 + bottom

    figure = new(width / dpi, height / dpi, dpi=dpi, facecolor="white")
    for i, text in enumerate(title):
        font = {"fontsize": 9.5 * zoom, "weight": "bold"} if i == 0 else {"fontsize": 8.5 * zoom}
        figure.text(center, 1 - (title_top + i * line) / height, plain(text), ha="center", va="top", color=INK, **font)
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        x = left + column * (side + gap)
        y = height - top - (row + 1) * (title_height + side) - row * 12
        axes = figure.add_axes((x / width, y / height, side / width, side / height))
        _fill(axes, panel, picture)
        axes.set_title("\n".join(titles[i]), fontsize=7.5 * zoom, color=INK, pad=4 * zoom, linespacing=1.25)
        is_last = i + columns >= len(panels)
        axes.tick_params(length=2.5, width=0.5, labelsize=7 * zoom, colors=INK, labelbottom=is_last, labelleft=column == 0)
        if is_last:
            axes.set_xlabel("key", fontsize=8 * zoom, color=INK, labelpad=2)
        if column == 0:
            axes.set_ylabel("query", fontsize=8 * zoom, color=INK, labelpad=2)
    figure.legend(
        handles=handles,
        title=picture.legend,
        loc="lower center",
        bbox_to_anchor=(center, 12 * zoom / height),
        ncols=legend_columns,
        fontsize=8 * zoom,
        title_fontsize=8 * zoom,
        frameon=False,
        handlelength=1.2,
        handleheight=1.2,
        columnspacing=1.4,
        borderaxespad=0,
    )
    return figure


def _fill(axes: Axes, panel: Panel, picture: Panels) -> None:
    """Draw the cells of a panel, the outlines of segments, and ticks in tokens."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    cells = len(panel.cells)
    end = cells * picture.cell - 0.5
    colors, last = ListedColormap(list(picture.colors)), len(picture.colors) - 0.5
    axes.imshow(panel.cells, cmap=colors, vmin=-0.5, vmax=last, interpolation="nearest", extent=(-0.5, end, end, -0.5))
    for length in panel.lengths:
        starts = range(0, picture.num_tokens, length)
        outlines = [_outline(start, min(start + length, picture.num_tokens), picture.is_causal) for start in starts]
        axes.add_collection(LineCollection(outlines, colors=INK, linewidths=0.5, alpha=0.7))
    if 0 < panel.window < picture.num_tokens:
        edge = [(-0.5, panel.window - 1.0), (picture.num_tokens - panel.window, picture.num_tokens - 0.5)]
        edges = [edge] if picture.is_causal else [edge, [(y, x) for x, y in edge]]
        axes.add_collection(LineCollection(edges, colors=WINDOW_COLOR, linewidths=1.2))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(picture.tick))
        axis.set_major_formatter(FuncFormatter(lambda token, _: f"{token:,.0f}"))
    for spine in axes.spines.values():
        spine.set(linewidth=0.6, color=INK)


def _outline(start: int, stop: int, is_causal: bool) -> list[tuple[float, float]]:
    """The outline of a segment on the diagonal; under causality its left and lower edges, since no pair is above."""
    a, b = start - 0.5, stop - 0.5
    corners = [(a, a), (a, b), (b, b)]
    return corners if is_causal else [*corners, (b, a), (a, a)]
