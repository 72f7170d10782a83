"""The trade-off between the cost of patterns and the length of their local segments, by far rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexdilated.analysis.choice import Choices
from flexdilated.core.pattern_svg import WINDOW_COLOR
from flexdilated.draw.figure import INK, new

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_choices"]

COLORS = ("#08306b", "#2b8cbe", "#66c2a4", "#a6d854", "#bdbdbd")  # dark to light: low far rates to high
MARKERS = ("o", "s", "^", "D", "v")
YOURS = "#d95f02"
PLACES = tuple((6 * x, 6 * y) for y in (1, -2, 3, -4, 5, -6) for x in (1, -2, 3, -4))  # of a number beside its point


def draw_choices(choices: Choices) -> Figure:
    """A matplotlib figure of all patterns that were tried: share of the pairs of dense attention, and tokens per local segment.

    Colour and marker show the far rate, a magenta ring a window, a dashed line the budget. Circles with numbers are patterns that
    are shown, stars are yours.

    Args:
        choices: The result of `choose_pattern`.
    """
    figure = new(6.0, 4.4, dpi=200, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    rates = sorted({max(each.pattern.dilation_rates) for each in choices.tried})  # no proposal is a window alone
    for i, rate in enumerate(rates):
        members = [each for each in choices.tried if max(each.pattern.dilation_rates) == rate]
        shade, label = min(i, len(COLORS) - 1), f"far rate {rate}" if rate > 1 else "dense"
        if i >= len(COLORS) - 1 and len(rates) > len(COLORS):
            label = f"far rates from {rate}" if i == len(COLORS) - 1 else "_"
        x, y = [100 * each.share for each in members], [each.local for each in members]
        axes.scatter(x, y, s=16, color=COLORS[shade], marker=MARKERS[shade], linewidths=0, label=label, zorder=2)
    windows = [(100 * each.share, each.local) for each in choices.tried if each.pattern.window]
    if windows:
        ring: dict[str, Any] = {"s": 34, "facecolors": "none", "edgecolors": WINDOW_COLOR, "label": "window"}
        axes.scatter(*zip(*windows), linewidths=0.8, zorder=3, **ring)
    axes.axvline(100 * choices.budget, color=INK, linestyle="--", linewidth=1.2, label="budget", zorder=1)
    points = [(100 * each.share, max(1, each.local)) for each in choices.shown]
    yours: dict[str, Any] = {"s": 120, "marker": "*", "facecolors": YOURS, "label": "yours"}
    for is_given, style in ((False, {"s": 70, "facecolors": "none"}), (True, yours)):
        at = [point for point, each in zip(points, choices.shown) if each.is_given == is_given]
        if at:
            axes.scatter(*zip(*at), edgecolors=INK, linewidths=1.0, zorder=4, **style)
    axes.set_xlabel("% of the pairs of dense attention", fontsize=11, color=INK)
    axes.set_ylabel("tokens per segment or two windows", fontsize=11, color=INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.12g}")
    axes.tick_params(labelsize=10, colors=INK)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    kind = "causal" if choices.is_causal else "not causal"
    heads = f"{choices.num_heads} key/value head{'s' * (choices.num_heads != 1)}"
    axes.set_title(f"{choices.num_tokens:,} tokens, {heads}, {kind}", fontsize=11, weight="bold", color=INK)
    figure.legend(loc="outside lower center", ncols=4, fontsize=10, frameon=False, handletextpad=0.3, columnspacing=1.2)
    _number(axes, points)
    return figure


def _number(axes: Axes, points: list[tuple[float, int]]) -> None:
    """Write 1, 2, ... beside the points, where no number covers another."""
    from matplotlib.patheffects import withStroke

    axes.figure.canvas.draw()  # places are in pixels of the final layout
    halo = [withStroke(linewidth=2.5, foreground="white")]
    style: dict[str, Any] = {"fontsize": 11, "weight": "bold", "color": INK, "zorder": 5, "path_effects": halo}
    taken: list[Any] = []
    for number, point in enumerate(points, 1):
        text = axes.annotate(str(number), point, (0, 0), textcoords="offset points", **style)
        for place in PLACES:
            text.set_position(place)
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
