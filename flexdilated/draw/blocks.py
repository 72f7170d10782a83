"""The picture of a pattern's FlexAttention block mask, per head: which tiles it visits, and which are full."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flexdilated.analysis.lattice import checked
from flexdilated.core.integers import at_least_one
from flexdilated.core.keywords import takes_num_kv_heads
from flexdilated.core.pattern import DilatedPattern
from flexdilated.draw.panels import APART, FUTURE, Panels, figure_of, head_panel, pattern_title, tick_step
from flexdilated.draw.tiles import Cell, HeadTiles, all_heads, head_tiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK_SIZE = 128
PICTURE_CELLS = 512  # per side

# By `Cell`, of the scale of `draw.pattern`: full tiles darkest.
CELL_COLORS = (FUTURE, APART, "#c7e9b4", "#7fcdbb", "#1d91c0", "#081d58")


@takes_num_kv_heads
def draw_blocks(
    pattern: DilatedPattern,
    num_tokens: int,
    num_kv_heads: int,
    *,
    block_size: int = BLOCK_SIZE,
    is_causal: bool = False,
    name: str | None = None,
) -> Figure:
    """A matplotlib figure of the block mask, one panel per distinct head: which tiles FlexAttention visits, and which are full.

    Beyond 512 tiles per side a cell of the picture stands for several, as its title says. The mask is that of
    `create_dilated_block_mask`, without zero keys.

    Args:
        pattern, num_tokens, num_kv_heads, is_causal, name: As in `draw`.
        block_size: Tokens per side of a tile.

    Raises:
        ValueError: If a number is below 1, or some branch would have no head.
        TypeError: If an argument has the wrong type.
    """
    num_tokens, num_kv_heads = checked(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    block_size = at_least_one("block_size", block_size)
    picture, _ = block_panels(pattern, num_tokens, num_kv_heads, block_size, PICTURE_CELLS, is_causal=is_causal, name=name)
    return figure_of(picture)


def block_panels(
    pattern: DilatedPattern,
    num_tokens: int,
    num_kv_heads: int,
    block_size: int,
    most: int,
    *,
    is_causal: bool,
    name: str | None = None,
) -> tuple[Panels, list[HeadTiles]]:
    """The panels of `draw_blocks`, with at most `most` cells per side, and the tiles that they show."""
    group = math.ceil(math.ceil(num_tokens / block_size) / most)
    groups = head_tiles(pattern, num_tokens, num_kv_heads, block_size, group, is_causal=is_causal)
    panels = []
    for heads, tally, cells in groups:
        lines = [f"{tally.density} visited", f"waste: raw {tally.waste_raw}, packed {tally.waste_packed}"]
        # More outlines than these would hide the tiles.
        panels.append(head_panel(pattern, heads, num_kv_heads, cells, lines, shortest=-(-num_tokens // 64)))
    labels = {Cell.NONE: "not visited", Cell.VISITED: "partial", Cell.FULL: "full"}
    if group > 1:
        labels = {
            Cell.NONE: "none visited",
            Cell.UNDER_HALF: "less than half",
            Cell.OVER_HALF: "half or more",
            Cell.VISITED: "all visited",
            Cell.FULL: "all full",
        }
    density = f"{all_heads(groups).density} of tiles visited"
    title = pattern_title(pattern, num_tokens, num_kv_heads, is_causal=is_causal, name=name, density=density)
    picture = Panels(
        title=[*title, "waste: pairs in visited tiles / useful pairs summed over branches"],
        panels=panels,
        num_tokens=num_tokens,
        cell=block_size * group,
        tick=tick_step(min(pattern.segment_lengths, default=num_tokens), len(groups[0].cells) * block_size * group, 4),
        is_causal=is_causal,
        colors=CELL_COLORS,
        glyphs=" ·-+o#",
        legend=f"tiles of {block_size} x {block_size} pairs" + (f", {group} x {group} of them per cell" if group > 1 else ""),
        labels={int(cell): label for cell, label in labels.items()} | ({int(Cell.FUTURE): "future"} if is_causal else {}),
        title_width=34,
    )
    return picture, groups
