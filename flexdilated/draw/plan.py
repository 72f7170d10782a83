"""The picture of a plan: bytes that the busiest rank receives against the number of ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flexdilated.analysis.strategies import Layer, traffic_by_ranks
from flexdilated.distributed.planner.plan import EXCHANGES
from flexdilated.draw.figure import INK, new, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["UNITS", "draw_traffic", "layer_lines"]

UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")  # each 1,000 times the one before

# Okabe and Ito's colours, safe for colour-blind readers.
COLORS = {"gather": "#0072b2", "ring": "#e69f00", "heads": "#009e73"}
MARKERS = {"gather": "o", "ring": "s", "heads": "^"}
GREYS = {"ring-all": "#4d4d4d", "all-gather": "#8c8c8c", "ulysses": "#b0b0b0"}
DASHES: dict[str, Any] = {"ring-all": (0, (6, 2)), "all-gather": (0, (3, 2)), "ulysses": (0, (1, 1.4))}


def draw_traffic(layer: Layer) -> Figure:
    """A matplotlib figure: bytes that the busiest rank receives per layer, forward and backward, against the number of ranks.

    The ranks are the powers of two from 2 to the layer's, and the layer's; both axes are logarithmic. What is 0 is drawn on a line
    of its own at the bottom. If listing all rows takes long, the bytes of our exchanges are upper bounds, and the title says so.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    lines, is_exact = traffic_by_ranks(layer)
    counts = [ranks for ranks, _ in lines[EXCHANGES[0]]]
    moved = [number for line in lines.values() for _, number in line if number]
    low, high = (10.0 ** math.floor(math.log10(min(moved))), max(moved)) if moved else (1.0, 10.0)
    has_zero = not all(number for line in lines.values() for _, number in line)
    zero = low / (10 * high / low) ** 0.16

    title = [
        f"Bytes received per rank, forward and backward: {layer.tokens:,} tokens",
        *([] if is_exact else ["upper bounds of the bytes of our exchanges"]),
        *wrapped(layer_lines(layer), 86),
    ]
    top, bottom, plot = 0.36 + 0.22 * len(title), 2.1, 3.4  # inches
    height = top + plot + bottom
    figure = new(6.4, height, facecolor="white")
    axes = figure.add_axes((0.15, bottom / height, 0.82, plot / height))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, line in lines.items():
        style: dict[str, Any]
        if name in EXCHANGES:
            # Lines that coincide stay visible: each is thinner than the one below it, its markers smaller.
            rank = EXCHANGES.index(name)
            style = {"color": COLORS[name], "marker": MARKERS[name], "linewidth": 4.0 - 1.3 * rank, "markersize": 10 - 2.5 * rank}
        else:
            style = {"color": GREYS[name], "linestyle": DASHES[name], "marker": ".", "linewidth": 1.6, "markersize": 5}
        x, y = [ranks for ranks, _ in line], [number or zero for _, number in line]
        axes.plot(x, y, label=_legend(name, layer), zorder=3 if name in EXCHANGES else 2, clip_on=False, **style)
    if has_zero:
        axes.axhline(math.sqrt(low * zero), color=INK, linewidth=0.6, linestyle=(0, (1, 3)))
        below = axes.get_yaxis_transform()
        halo = [withStroke(linewidth=2.5, foreground="white")]
        words: dict[str, Any] = {"transform": below, "ha": "right", "va": "bottom", "fontsize": 9.5, "color": INK}
        axes.text(0.995, zero * (low / zero) ** 0.2, "nothing travels", zorder=6, path_effects=halo, **words)
    axes.set_xlim(counts[0] / 2**0.25, counts[-1] * 2**0.25)
    axes.set_ylim(zero / (low / zero) ** 0.4 if has_zero else low / 1.1, high * 10**0.3)
    decades = range(round(math.log10(low)), math.floor(math.log10(high * 10**0.3)) + 1)
    step = -(-len(decades) // 9)
    axes.yaxis.set_major_locator(FixedLocator([zero] * has_zero + [10.0**decade for decade in decades[::step]]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: "0" if y < low / 1.5 else _decade(y)))
    # The asked number itself may lie too near to the power of two below it.
    shown = [ranks for ranks in counts if ranks == counts[-1] or 1.5 * ranks <= counts[-1]]
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color="#e6e6e6", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=2.5, width=0.5, labelsize=10, colors=INK)
    axes.set_xlabel("ranks that share the sequence", fontsize=11, color=INK)
    axes.set_ylabel("received by the busiest rank", fontsize=11, color=INK)
    for side, spine in axes.spines.items():
        spine.set(linewidth=0.6, color=INK, visible=side in ("left", "bottom"))
    for i, text in enumerate(title):
        font = {"fontsize": 11.5, "weight": "bold"} if i == 0 else {"fontsize": 9.5}
        figure.text(0.5, 1 - (0.16 + 0.22 * i + 0.06 * (i > 0)) / height, text, ha="center", va="top", color=INK, **font)
    figure.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 0.08 / height),
        ncols=1,
        fontsize=10,
        labelspacing=0.35,
        frameon=False,
        handlelength=3.6,
        columnspacing=1.6,
    )
    return figure


def layer_lines(layer: Layer) -> list[str]:
    """The layer in two lines: its pattern, its heads."""
    lengths, rates = (", ".join(map(str, values)) for values in (layer.pattern.segment_lengths, layer.pattern.dilation_rates))
    heads = f"{layer.heads} heads" if layer.group == 1 else f"{layer.heads} query and {layer.kv_heads} key/value heads"
    rule = "grouped by branch" if layer.pattern.heads == "grouped" else f"{layer.pattern.offsets} offsets"
    kind = f"{'causal' if layer.is_causal else 'not causal'}, {layer.dtype}" + (f", batch {layer.batch}" if layer.batch > 1 else "")
    some = layer.document_lengths
    documents = f"{len(some):,} documents of {min(some):,} to {max(some):,} tokens" if len(some) > 1 else "one document"
    return [f"segment lengths {lengths}; dilation rates {rates}", f"{heads} of {layer.head_dim}, {rule}, {kind}, {documents}"]


def _decade(number: float) -> str:
    """A power of ten: `100 MB`."""
    power = round(math.log10(number))
    return f"{10 ** (power % 3):,} {UNITS[power // 3]}"


def _legend(name: str, layer: Layer) -> str:
    meaning = {
        "gather": "gather: the rows that are needed, at once",
        "ring": "ring: the same rows in steps, in little memory",
        "heads": "heads: dealt to ranks, where that is less",
        "ring-all": "ring of everything: K and V pass every rank",
        "all-gather": "all-gather: K and V of all ranks at once",
        "ulysses": f"Ulysses: where ranks divide the {layer.kv_heads} key/value heads",
    }
    return ("ours, " if name in EXCHANGES else "") + meaning[name]
