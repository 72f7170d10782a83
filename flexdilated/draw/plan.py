"""The picture of a plan: bytes that the busiest rank receives against the number of ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flexdilated.analysis.strategies import Layer, traffic_by_ranks
from flexdilated.distributed.planner.plan import EXCHANGES
from flexdilated.draw.figure import INK, new, wrapped
from flexdilated.draw.panels import branch_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Okabe and Ito's colours, safe for colour-blind readers, and greys for other systems. Lines that coincide stay visible: each is
# thinner than the one below it, its markers smaller.
def _ours(color: str, marker: str, width: float) -> dict[str, Any]:
    return {"color": color, "marker": marker, "linewidth": width, "markersize": 2 + 2 * width}


STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "gather": ("ours, gather: the rows that are needed, at once", _ours("#0072b2", "o", 4.0)),
    "ring": ("ours, ring: the same rows in steps, in little memory", _ours("#e69f00", "s", 2.7)),
    "heads": ("ours, heads: heads assigned to ranks, where that is less", _ours("#009e73", "^", 1.4)),
    "ring-all": ("ring of everything: K and V pass every rank", {"color": "#4d4d4d", "linestyle": (0, (6, 2))}),
    "all-gather": ("all-gather: K and V of all ranks at once", {"color": "#8c8c8c", "linestyle": (0, (3, 2))}),
    "ulysses": ("Ulysses: where ranks divide the key/value heads", {"color": "#b0b0b0", "linestyle": (0, (1, 1.4))}),
}


def draw_traffic(layer: Layer) -> Figure:
    """A matplotlib figure: bytes that the busiest rank receives per layer, forward and backward, against the number of ranks.

    The ranks are the powers of two from 2 to the layer's, and the layer's; both axes are logarithmic, with 0 at the bottom. If
    listing all rows takes long, the bytes of our exchanges are upper bounds, and the title says so.
    """
    from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

    lines, is_exact = traffic_by_ranks(layer)
    counts = [ranks for ranks, _ in lines[EXCHANGES[0]]]
    moved = [number for line in lines.values() for _, number in line if number]
    figure = new(6.4, 6.6, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    low, high = (math.floor(math.log10(find(moved, default=1))) for find in (min, max))
    axes.set_yscale("symlog", linthresh=10**low)
    for name, line in lines.items():
        label, style = STYLES[name]
        axes.plot(*zip(*line), label=label, clip_on=False, **style)
    axes.set_ylim(0, 2 * max(moved, default=1))
    # The asked number may lie too near to the power of two below it.
    axes.xaxis.set_major_locator(FixedLocator([ranks for ranks in counts if ranks == counts[-1] or 1.5 * ranks <= counts[-1]]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_locator(FixedLocator([0, *(10**decade for decade in range(low, high + 1, -(-(high + 1 - low) // 9)))]))
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ranks that share the sequence", fontsize=11, color=INK)
    axes.set_ylabel("received by the busiest rank", fontsize=11, color=INK)
    title = f"Bytes received per rank, forward and backward: {layer.tokens:,} tokens"
    bounds = [] if is_exact else ["upper bounds of the bytes of our exchanges"]
    figure.suptitle(title, fontsize=11.5, weight="bold", color=INK)
    axes.set_title("\n".join([*bounds, *wrapped(layer_lines(layer), 86)]), fontsize=9.5, color=INK)
    figure.legend(loc="outside lower center", ncols=1, fontsize=10, frameon=False, handlelength=3.6)
    return figure


def layer_lines(layer: Layer) -> list[str]:
    """The layer in two lines: its pattern, its heads."""
    heads = f"{layer.heads} heads" if layer.group == 1 else f"{layer.heads} query and {layer.kv_heads} key/value heads"
    rule = "grouped by branch" if layer.pattern.heads == "grouped" else f"{layer.pattern.offsets} offsets"
    kind = f"{'causal' if layer.is_causal else 'not causal'}, {layer.dtype}" + (f", batch {layer.batch}" if layer.batch > 1 else "")
    sizes = layer.document_lengths
    documents = f"{len(sizes):,} documents of {min(sizes):,} to {max(sizes):,} tokens" if len(sizes) > 1 else "one document"
    return ["; ".join(branch_words(layer.pattern)), f"{heads} of {layer.head_dim}, {rule}, {kind}, {documents}"]
