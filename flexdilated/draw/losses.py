"""The picture of training runs: bits per byte against bytes seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from flexdilated.draw.figure import new, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colour of the held-out curve, of the training curve, line and marker: distinct in grey too.
STYLES = (
    ("#004c7a", "#8fbfe0", "-", "o"),
    ("#d55e00", "#f2c29b", "--", "s"),
    ("#007a56", "#9fd8c4", "-.", "^"),
    ("#333333", "#bdbdbd", ":", "D"),
)


def draw_losses(histories: Mapping[str, Sequence[Mapping[str, float]]], *, bytes_per_step: int) -> Figure:
    """A matplotlib figure of training and held-out bits per byte, one colour, line and marker per run.

    `histories`: by the name of a run, one entry per step: `step`, `train` and, where it was measured, `held_out`.
    """
    figure = new(6.4, 4.4, dpi=190, layout="constrained")
    axes = figure.add_subplot()
    for (colour, pale, line, marker), (name, history) in zip(cycle(STYLES), histories.items()):
        megabytes = [entry["step"] * bytes_per_step / 1e6 for entry in history]
        axes.plot(
            megabytes,
            [entry["train"] for entry in history],
            color=pale,
            linestyle=line,
            linewidth=1,
            label=plain(f"{name}: training batches"),
        )
        measured = [(x, entry["held_out"]) for x, entry in zip(megabytes, history) if "held_out" in entry]
        if measured:
            label = plain(f"{name}: {measured[-1][1]:.2f} bits per held-out byte")
            axes.plot(*zip(*measured), color=colour, linestyle=line, marker=marker, markersize=5, linewidth=1.8, label=label)
    axes.set_xlabel("bytes seen (millions)", fontsize=11)
    axes.set_ylabel("bits per byte (raw bytes are 8)", fontsize=11)
    axes.set_title("Training on text, and text held out", fontsize=11, weight="bold")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=10)
    return figure
