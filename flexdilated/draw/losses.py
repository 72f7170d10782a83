"""The picture of training runs: bits per byte against bytes seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flexdilated.draw.figure import new

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_losses"]


def draw_losses(histories: Mapping[str, Sequence[Mapping[str, float]]], *, bytes_per_step: int) -> Figure:
    """A matplotlib figure of training and held-out bits per byte, one colour per run.

    Args:
        histories: By the name of a run, one entry per step: `step`, `train` and, where it was measured, `held_out`.
        bytes_per_step: Of every run.
    """
    figure = new(8, 4.5, dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, history) in zip(("#0072b2", "#d55e00"), histories.items()):
        seen = [entry["step"] * bytes_per_step / 1e6 for entry in history]
        axes.plot(seen, [entry["train"] for entry in history], color=colour, alpha=0.35, linewidth=1)
        measured = [(x, entry["held_out"]) for x, entry in zip(seen, history) if "held_out" in entry]
        label = f"{name}: {measured[-1][1]:.2f} bits per held-out byte"
        axes.plot(*zip(*measured), color=colour, marker="o", markersize=4, label=label)
    axes.set_xlabel("bytes seen (millions)")
    axes.set_ylabel("bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
