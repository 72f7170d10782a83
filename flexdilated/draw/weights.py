"""Checks, colours and surroundings that the pictures of attention weights share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flexdilated.draw.figure import INK, plain, wrapped, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

PICTURE_FORMATS = (".png", ".pdf", ".svg")
UNSEEN = "#a6e3f0"  # a weight of exactly 0: no branch joins the cell with the query. Cividis has dark blue, greys, and yellow
MARK = "#e31a1c"  # around the query


def check_weights(weights: Tensor, titles: Sequence[str] | None) -> Tensor:
    """Panels `(P, N)`, float64 on the CPU, each with a title or none of them."""
    if weights.dim() not in (1, 2) or weights.numel() < 1:
        advice = "; of attention_map's take one sequence and query, as weights[0, :, 0]" if weights.dim() == 4 else ""
        raise ValueError(f"weights must have shape (N,) or (P, N), got {tuple(weights.shape)}{advice}")
    panels = weights.detach().to("cpu", torch.float64).reshape(-1, weights.shape[-1])
    if not bool((panels.isfinite() & (panels >= 0)).all()):
        raise ValueError("weights must be finite and at least 0, got others")
    if titles is not None and len(titles) != len(panels):
        raise ValueError(f"titles must hold one text per panel={len(panels)}, got {titles!r}")
    return panels


def check_path(path: str | Path | None) -> Path | None:
    """The path of a picture, after a check of its ending."""
    path = None if path is None else Path(path)
    if path is not None and path.suffix.lower() not in PICTURE_FORMATS:
        raise ValueError(f"path must end in one of {PICTURE_FORMATS}, got {str(path)!r}")
    return path


def outline(axes: Axes, center: tuple[float, float], width: float, height: float) -> None:
    """Draw a red rectangle around the query, with a white halo: seen on dark and light cells, in grey too."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    corner = (center[0] - width / 2, center[1] - height / 2)
    halo = [withStroke(linewidth=4.0, foreground="white")]
    style: dict[str, Any] = {"edgecolor": MARK, "linewidth": 1.8, "path_effects": halo, "clip_on": False, "zorder": 5}
    axes.add_patch(Rectangle(corner, width, height, fill=False, **style))


def _plain_ticks(bar: Colorbar) -> None:
    """Few ticks, labelled with whole numbers: no offset, no powers of ten."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    norm: Any = bar.norm
    ratio = norm.vmax / norm.vmin if isinstance(bar.norm, LogNorm) else 1.0
    bar.minorticks_off()
    bar.locator = MaxNLocator(5) if ratio < 10 else LogLocator(subs=(1.0, 2.0, 5.0) if ratio < 1e3 else (1.0,))
    bar.formatter = FuncFormatter(lambda value, _: np.format_float_positional(value, 12, fractional=False, trim="-"))
    bar.update_ticks()


def finish(
    figure: Figure,
    axes: Sequence[Axes],
    path: Path | None,
    *,
    norm: Normalize,
    label: str,
    has_less: bool,
    titles: Sequence[str] | None,
    title: str | None,
    unseen: bool,
    query: bool,
    note: str | None,
    **bar_options: Any,
) -> Figure:
    """Add titles, a colour bar, and a legend of light blue cells, of the outline and of a note; write the picture."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.lines import Line2D

    for axis, text in zip(axes, titles or ()):
        axis.set_title(plain(text), fontsize=10.5, color=INK)
    extend = "min" if has_less else "neither"
    bar = figure.colorbar(ScalarMappable(norm, colormaps["cividis"]), ax=list(axes), extend=extend, **bar_options)
    bar.set_label(label, color=INK, fontsize=10.5)
    bar.ax.tick_params(labelsize=9.5, colors=INK)
    _plain_ticks(bar)
    styles: dict[str, dict[str, Any]] = {}
    if unseen:
        styles["exactly 0"] = {"marker": "s", "markerfacecolor": UNSEEN, "markeredgecolor": UNSEEN, "markersize": 5}
    if query:
        outlined = {"markerfacecolor": "none", "markeredgecolor": MARK, "markeredgewidth": 1.5}
        styles["the query"] = {"marker": "s", "markersize": 8, **outlined}
    if note is not None:
        styles[note] = {}
    if styles:
        handles = [Line2D([], [], linestyle="none", label=text, **style) for text, style in styles.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=10, frameon=False)
    if title is not None:
        lines = wrapped([title], 8 * figure.get_figwidth())  # names of slides are long
        figure.suptitle(plain("\n".join(lines)), fontsize=11.5, weight="bold", color=INK)
    if path is not None:
        write(figure, path)
    return figure
