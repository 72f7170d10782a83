"""The trade-off between the cost of patterns and the length of their local segments, by far rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flexdilated.analysis.choice import Choices
from flexdilated.core.pattern_svg import WINDOW_COLOR
from flexdilated.draw.figure import INK, new

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#08306b", "#2b8cbe", "#66c2a4", "#a6d854", "#bdbdbd")  # dark to light: low far rates to high
MARKERS = ("o", "s", "^", "D", "v")
YOURS = "#d95f02"
RADIUS = 5.0  # points, of a circle and of half a star
ANGLES = np.arange(1, 33, 2) * np.pi / 16
OFFSETS = [(r * np.cos(angle), r * np.sin(angle)) for r in (17.0, 22.0, 30.0, 40.0, 52.0) for angle in ANGLES]  # of a number


def draw_choices(choices: Choices) -> Figure:
    """A matplotlib figure of all patterns that were tried: share of the pairs of dense attention, and tokens per local segment.

    Colour and marker show the far rate, a magenta ring a window, a dashed line the budget. Circles are the patterns that are shown,
    stars are yours; a line leads from each number to its circle or star.
    """
    figure = new(6.0, 4.4, dpi=200, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.margins(y=0.15)  # room for numbers around the lowest points
    rates = sorted({max(choice.pattern.dilation_rates) for choice in choices.tried})  # no proposal is a window alone
    for i, rate in enumerate(rates):
        members = [choice for choice in choices.tried if max(choice.pattern.dilation_rates) == rate]
        shade, label = min(i, len(COLORS) - 1), f"far rate {rate}" if rate > 1 else "dense"
        if i >= len(COLORS) - 1 and len(rates) > len(COLORS):
            label = f"far rates from {rate}" if i == len(COLORS) - 1 else "_"
        x, y = [100 * choice.share for choice in members], [choice.local for choice in members]
        axes.scatter(x, y, s=16, color=COLORS[shade], marker=MARKERS[shade], linewidths=0, label=label, zorder=2)
    windows = [(100 * choice.share, choice.local) for choice in choices.tried if choice.pattern.window]
    if windows:
        ring: dict[str, Any] = {"s": 34, "facecolors": "none", "edgecolors": WINDOW_COLOR, "label": "window"}
        axes.scatter(*zip(*windows), linewidths=0.8, zorder=3, **ring)
    axes.axvline(100 * choices.budget, color=INK, linestyle="--", linewidth=1.2, label="budget", zorder=1)
    points = [(100 * choice.share, max(1, choice.local)) for choice in choices.shown]
    yours: dict[str, Any] = {"s": 120, "marker": "*", "facecolors": YOURS, "label": "yours"}
    for is_given, style in ((False, {"s": 70, "facecolors": "none", "label": "proposed, 1 = best"}), (True, yours)):
        marked = [point for point, choice in zip(points, choices.shown) if choice.is_given == is_given]
        if marked:
            axes.scatter(*zip(*marked), edgecolors=INK, linewidths=1.0, zorder=4, **style)
    axes.set_xlabel("% of the pairs of dense attention", fontsize=11, color=INK)
    axes.set_ylabel("tokens per near segment, or 2 x window", fontsize=11, color=INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.12g}")
    axes.tick_params(labelsize=10, colors=INK)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(0.12)  # room for numbers
    axes.spines[["top", "right"]].set_visible(False)
    kind = "causal" if choices.is_causal else "not causal"
    heads = f"{choices.num_kv_heads} key/value head{'s' * (choices.num_kv_heads != 1)}"
    axes.set_title(f"{choices.num_tokens:,} tokens, {heads}, {kind}", fontsize=11, weight="bold", color=INK)
    figure.legend(loc="outside lower center", ncols=4, fontsize=10, frameon=False, handletextpad=0.3, columnspacing=1.2)
    _number(axes, points, [(100 * choice.share, max(1, choice.local)) for choice in choices.tried], 100 * choices.budget)
    return figure


def _number(axes: Axes, points: Sequence[tuple[float, int]], tried: Sequence[tuple[float, int]], budget: float) -> None:
    """Write 1, 2, ... beside the points, each at the end of a line to its own point.

    A number covers no circle, no other number and no line. Of the remaining places it takes the one that covers the fewest tried
    patterns, and of several the nearest.
    """
    from matplotlib.path import Path
    from matplotlib.patheffects import withStroke
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    axes.figure.canvas.draw()  # places are in pixels of the final layout
    pixels, (centers, dots) = axes.figure.dpi / 72, (axes.transData.transform(places) for places in (points, tried))
    budget = axes.transData.transform((budget, 1))[0]
    circles = [Bbox([center, center]).padded(RADIUS * pixels) for center in centers]
    style: dict[str, Any] = {"fontsize": 11, "weight": "bold", "color": INK, "zorder": 6, "ha": "center", "va": "center"}
    style["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]
    style["arrowprops"] = {"arrowstyle": "-", "color": INK, "linewidth": 0.8, "shrinkA": 0.0, "shrinkB": RADIUS}
    boxes: list[Bbox] = []
    lines: list[Path] = []
    for number, (point, center) in enumerate(zip(points, centers), 1):
        text = axes.annotate(str(number), point, (0, 0), textcoords="offset points", in_layout=False, **style)
        half = np.array(Text.get_window_extent(text).size) / 2 + pixels
        obstacles = [circle for circle in circles if not circle.contains(*center)] + boxes
        free: list[tuple[Any, ...]] = []
        for offset in OFFSETS:
            middle = center + pixels * np.array(offset)
            box, line = Bbox([middle - half, middle + half]), Path([center, middle])
            is_inside = all(axes.bbox.contains(*corner) for corner in box.corners())
            covers = any(map(box.overlaps, [*circles, *boxes])) or any(map(line.intersects_bbox, obstacles))
            if is_inside and not covers and not any(drawn.intersects_bbox(box) for drawn in lines):
                covered = sum(box.contains(*dot) for dot in dots) + (box.x0 < budget < box.x1)
                free.append((covered, len(free), offset, box, line))
        if free:  # else the number stays in its circle
            *_, offset, box, line = min(free)
            text.set_position(offset)
            boxes.append(box)
            lines.append(line)
