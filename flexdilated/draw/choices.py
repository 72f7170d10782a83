"""The picture of `choose_pattern`: the cost of patterns against their longest undilated segment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexdilated.analysis.choice import UNITS, Choice, Choices
from flexdilated.draw.figure import INK, new

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_choices"]

COLORS = ("#08306b", "#2b8cbe", "#66c2a4", "#a6d854", "#bdbdbd")  # dark to light: few layers to many, distinct in grey too
MARKERS = ("o", "s", "^", "D", "v")
YOURS = "#d95f02"


def draw_choices(choices: Choices) -> Figure:
    """A matplotlib figure of the patterns that meet the goals: their cost against their longest undilated segment.

    Colour and marker give the number of layers until every token has seen every other; a line is the budget. The patterns shown
    have their numbers, and the caller's own are stars.

    Args:
        choices: What `choose_pattern` found.
    """
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=2.5, foreground="white")]
    figure = new(6.0, 4.4, dpi=200, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    for i, (layers, members) in enumerate(_by_layers(choices.tried)):
        label = "never all" if layers is None else f"{layers} layer{'s' * (layers != 1)}"
        style = min(i, len(COLORS) - 1)
        x, y = [max(1, each.cost) for each in members], [max(1, each.window) for each in members]
        axes.scatter(x, y, s=16, color=COLORS[style], marker=MARKERS[style], linewidths=0, label=label, zorder=2)
    axes.axvline(choices.budget, color=INK, linestyle="--", linewidth=1.2, label="budget", zorder=1)
    for number, each in enumerate(choices.shown, 1):
        place = max(1, each.cost), max(1, each.window)
        if each.is_given:
            axes.scatter(*place, s=120, marker="*", color=YOURS, edgecolors=INK, linewidths=0.6, zorder=4)
        else:
            axes.scatter(*place, s=70, facecolors="none", edgecolors=INK, linewidths=1.2, zorder=3)
        words: dict[str, Any] = {"fontsize": 11, "weight": "bold", "color": INK, "zorder": 5, "path_effects": halo}
        axes.annotate(str(number), place, (6, 5), textcoords="offset points", **words)
    if any(each.is_given for each in choices.shown):
        axes.scatter([], [], s=120, marker="*", color=YOURS, edgecolors=INK, linewidths=0.6, label="yours")
    axes.set_xlabel(UNITS[choices.measure], fontsize=11, color=INK)
    axes.set_ylabel("longest undilated segment, tokens", fontsize=11, color=INK)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    axes.tick_params(labelsize=10, colors=INK)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    kind = "causal" if choices.is_causal else "not causal"
    heads = f"{choices.num_heads} head{'s' * (choices.num_heads != 1)}"
    some = len(choices.document_lengths)
    documents = f" in {some:,} documents" if some > 1 else ""
    axes.set_title(f"{choices.num_tokens:,} tokens{documents}, {heads}, {kind}", fontsize=11, weight="bold", color=INK)
    figure.legend(loc="outside lower center", ncols=4, fontsize=10, frameon=False, handletextpad=0.3, columnspacing=1.2)
    return figure


def _by_layers(tried: tuple[Choice, ...]) -> list[tuple[int | None, list[Choice]]]:
    """Patterns by their number of layers, fewest first; patterns that never cover the sequence last."""
    found: dict[int | None, list[Choice]] = {}
    for each in tried:
        found.setdefault(each.layers, []).append(each)
    return sorted(found.items(), key=lambda item: (item[0] is None, item[0] or 0))
