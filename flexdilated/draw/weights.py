"""Checks, colours and legend that the pictures of attention weights share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexdilated.draw.places import check_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_FORMATS = (".png", ".pdf", ".svg")
MAX_PANELS = 64
UNSEEN = "#a6e3f0"  # a weight of exactly 0: no branch joins the cell with the query. Cividis has dark blue, greys, and yellow
MARK = "#e31a1c"  # around the query


def check_weights(weights: Tensor, titles: Sequence[str] | None) -> Tensor:
    """Panels `(P, N)`, float64 on the CPU, each with a title or none of them."""
    check_numbers("weights", weights)
    if weights.dim() not in (1, 2) or weights.shape[-1] < 1:
        advice = "; of attention_map's take one sequence and query, as weights[0, :, 0]" if weights.dim() == 4 else ""
        raise ValueError(f"weights must have shape (N,) or (P, N), got {tuple(weights.shape)}{advice}")
    panels = weights.detach().to("cpu", torch.float64).reshape(-1, weights.shape[-1])
    if not 1 <= len(panels) <= MAX_PANELS:
        raise ValueError(f"weights must have from 1 to {MAX_PANELS} panels, got {len(panels)}")
    if not bool((panels.isfinite() & (panels >= 0)).all()):
        raise ValueError("weights must be finite and at least 0, got others")
    if titles is not None and (isinstance(titles, str) or len(titles) != len(panels)):
        raise ValueError(f"titles must hold one text per panel={len(panels)}, got {titles!r}")
    return panels


def check_path(path: str | Path | None) -> Path | None:
    """The path of a picture, after a check of its ending."""
    path = None if path is None else Path(path)
    if path is not None and path.suffix.lower() not in PICTURE_FORMATS:
        raise ValueError(f"path must end in one of {PICTURE_FORMATS}, got {str(path)!r}")
    return path


def add_legend(figure: Figure, *, unseen: bool, query: bool, note: str | None = None) -> None:
    """Add a legend of light blue cells and of the red outline, where there are any, and a note."""
    from matplotlib.lines import Line2D

    styles: list[tuple[str, dict[str, Any]]] = []
    if unseen:
        styles.append(("weight 0", {"marker": "s", "markerfacecolor": UNSEEN, "markeredgecolor": UNSEEN, "markersize": 5}))
    if query:
        outline = {"markerfacecolor": "none", "markeredgecolor": MARK, "markeredgewidth": 1.5}
        styles.append(("the query", {"marker": "s", "markersize": 8, **outline}))
    if note is not None:
        styles.append((note, {}))
    if styles:
        handles = [Line2D([], [], linestyle="none", label=label, **style) for label, style in styles]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=10, frameon=False)
