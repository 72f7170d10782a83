"""The picture of a pattern in a terminal: coloured half blocks, or characters where there are no colours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexdilated.draw.panels import Panels


def print_panels(console: Console, picture: Panels) -> None:
    """Print a picture, with as many panels side by side as fit."""
    is_ascii = console.options.ascii_only
    has_colors = console.is_terminal and console.color_system is not None and not console.no_color and not is_ascii
    panels, marks = picture.panels, {ord("·"): ".", ord("\N{NO-BREAK SPACE}"): " "} if is_ascii else {}
    glyphs = [glyph.translate(marks) for glyph in picture.glyphs]
    panel_width = max(len(panels[0].cells), picture.title_width)
    columns = max(1, min(len(panels), (console.width + 2) // (panel_width + 2)))

    for line in picture.title:
        console.print(Text(line.translate(marks), style="bold"), soft_wrap=True)
    for start in range(0, len(panels), columns):
        console.print()
        grid = Table.grid(padding=(0, 2, 0, 0))
        drawn = panels[start : start + columns]
        for _ in drawn:
            grid.add_column(width=panel_width, no_wrap=False)
        grid.add_row(*(Text("\n".join(panel.title).translate(marks)) for panel in drawn))
        if has_colors:
            grid.add_row(*(_half_blocks(panel.cells, picture.colors) for panel in drawn))
        else:
            texts = ("\n".join("".join(glyphs[cell] for cell in row) for row in panel.cells) for panel in drawn)
            grid.add_row(*(Text(text, no_wrap=True) for text in texts))
        grid.width = len(drawn) * (panel_width + 2) - 2  # not the width of the console, which is 80 in a pipe
        console.print(grid, soft_wrap=True, crop=False)
    legend = Text(f"\n{picture.legend}, queries down, keys across:")
    for i, label in picture.labels.items():
        legend.append("  ")
        if has_colors:
            legend.append("  ", style=f"on {picture.colors[i]}")
            legend.append(f" {label}")
        else:
            legend.append(f"{'blank' if glyphs[i] == ' ' else glyphs[i]} = {label}")
    console.print(legend, soft_wrap=True)


def _half_blocks(image: NDArray[np.int64], colors: Sequence[str]) -> Text:
    """Two rows of cells per line of half blocks."""
    text = Text(no_wrap=True)
    for y in range(0, len(image), 2):
        if y:
            text.append("\n")
        for x in range(image.shape[1]):
            style = colors[image[y, x]]
            if y + 1 < len(image):
                style += f" on {colors[image[y + 1, x]]}"
            text.append("▀", style=style)
    return text
