"""New figures, and files of pictures. matplotlib takes a second to import: only functions that draw import it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexdilated.core.files import replaced

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#222222"


def require_matplotlib() -> None:
    """Raise ImportError, with the extra that installs it, if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ImportError("matplotlib must be installed for pictures, got none; pip install 'flexdilated[plot]'", name="matplotlib")


def new(width: float, height: float, **options: Any) -> Figure:
    """An empty figure of `width` by `height` inches; `options` are those of matplotlib's `Figure`."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **{"dpi": 160, **options})
    FigureCanvasAgg(figure)
    return figure


def write(figure: Figure, path: Path) -> None:
    """Write a picture in the format of the file name's ending.

    Raises:
        OSError: If it cannot be written. What was there stays.
    """
    with replaced(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower())


def plain(text: str) -> str:
    """A text with dollar signs escaped: matplotlib reads text between them as a formula."""
    return text.replace("$", r"\$")


def wrapped(lines: Sequence[str], width: float) -> list[str]:
    """The lines, cut in parts of at most `width` characters; a dot between two parts is left out."""
    return [part.rstrip(" ·") for line in lines for part in textwrap.wrap(line, max(12, int(width)))]


def grid_of(panels: int) -> tuple[int, int]:
    """Rows and columns of panels, near a square."""
    columns = math.ceil(math.sqrt(panels))
    return math.ceil(panels / columns), columns
