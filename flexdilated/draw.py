"""The pictures of a pattern, per head: how many branches join a query and a key, and which tiles FlexAttention visits."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexdilated.draw_blocks import EXPLANATION, Cell, HeadTiles, all_heads, describe_heads, head_tiles, tile_table
from flexdilated.pattern import DilatedPattern
from flexdilated.refusal import refuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "draw_blocks", "multiplicity", "show"]

# More cells than this are neither drawn in reasonable time nor seen.
MAX_TOKENS = 512
MAX_HEADS = 64
MAX_LENGTH = 2**40  # of a segment; positions are 64-bit integers
LEGEND_COLUMNS = 8

# With --blocks. A dense mask of the most blocks takes some 5 GB, and 15 s per head on one core.
BLOCK_SIZE = 128
MAX_BLOCK_SIZE = 2**20
MAX_BLOCKS = 8192
MAX_BLOCK_TOKENS = 2**24
PRESET_BLOCK_TOKENS = 65536
PICTURE_CELLS, TERMINAL_CELLS = 512, 64  # per side

# ColorBrewer's YlGnBu from its middle on: sequential, safe for colour-blind readers, readable in grey, and a single cell of its
# lightest colour still shows on white.
SCALE = ("#74c9bd", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")
APART = "#ffffff"  # no branch joins the pair
FUTURE = "#dedede"  # the pair is above the causal diagonal
# By `Cell`, of the same scale: full tiles darkest.
CELL_COLORS = (FUTURE, APART, "#c7e9b4", "#7fcdbb", "#1d91c0", "#081d58")
INK = "#222222"
NO_BREAK = "\N{NO-BREAK SPACE}"


class HeadsRule(str, Enum):
    """`DilatedPattern.heads` as the command line spells it."""

    ALL = "all"
    GROUPED = "grouped"


class OffsetsRule(str, Enum):
    """`DilatedPattern.offsets` as the command line spells it."""

    BLOCKED = "blocked"
    INTERLEAVED = "interleaved"


class Preset(str, Enum):
    """Published patterns, in miniature: the real ones start at segments of 1024 and 2048 tokens."""

    LONGNET = "longnet"
    GIGAPATH = "gigapath"


# What a preset's segment lengths are divided by, and how many tokens are drawn by default, without --blocks.
MINIATURES = {Preset.LONGNET: (128, 256), Preset.GIGAPATH: (64, 256)}


def show(
    segment_lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens per segment of each branch, comma separated. Default, without a preset: 16,32,64; "
            "with --blocks 2048,4096,8192."
        ),
    ] = None,
    dilation_rates: Annotated[
        str | None,
        typer.Option(
            help="Every r-th token of a segment is kept: one rate per segment length, comma separated, "
            "each from 1 to its segment length. Default, without a preset: 1,2,4."
        ),
    ] = None,
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="A published pattern in miniature, instead of lengths and rates: LongNet's lengths divided by 128, "
            "Prov-GigaPath's by 64; the rates are the published ones. With --blocks the published lengths, without torchscale's "
            "zero keys."
        ),
    ] = None,
    heads_rule: Annotated[
        HeadsRule, typer.Option(help="all: every head runs every branch. grouped: each branch has its own group of heads.")
    ] = HeadsRule.ALL,
    offsets: Annotated[
        OffsetsRule,
        typer.Option(help="Which residue head h of H keeps at rate r. blocked: h // ceil(H / r). interleaved: h mod r."),
    ] = OffsetsRule.BLOCKED,
    num_heads: Annotated[int, typer.Option("--heads", help=f"Heads, one panel each, 1 to {MAX_HEADS}.")] = 4,
    tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Sequence length in tokens, 1 to {MAX_TOKENS}; with --blocks up to {MAX_BLOCKS} blocks and {MAX_BLOCK_TOKENS} "
            "tokens. Default: the longest segment; 256 for a preset. With --blocks: twice the longest segment; "
            f"{PRESET_BLOCK_TOKENS} for a preset."
        ),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Whether a query sees no key after itself.")] = False,
    blocks: Annotated[
        bool,
        typer.Option(
            "--blocks",
            help="Draw the tiles that FlexAttention visits, one panel for heads that look alike, and print their number, density "
            "and waste: for one mask over the sequence (raw), and for a mask per branch over its kept rows (packed).",
        ),
    ] = False,
    block_size: Annotated[
        int | None,
        typer.Option(help=f"With --blocks: tokens per side of a tile, 1 to {MAX_BLOCK_SIZE}. Default: {BLOCK_SIZE}."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the picture, a .png file. Default: print to the terminal.")
    ] = None,
) -> None:
    """Draw who attends to whom: one panel per head, queries down, keys across, coloured by how many branches join the pair.

    With --blocks: the tiles of FlexAttention's block mask instead, and a table of how many there are and what they compute in vain.
    """
    if output is not None and output.suffix.lower() != ".png":
        refuse(f"--output must end in .png, got '{output}'")
    if not 1 <= num_heads <= MAX_HEADS:
        refuse(f"--heads must be in [1, {MAX_HEADS}], got {num_heads}")
    if block_size is not None and not blocks:
        refuse(f"--block-size must come with --blocks, got {block_size}")
    block_size = BLOCK_SIZE if block_size is None else block_size
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        refuse(f"--block-size must be in [1, {MAX_BLOCK_SIZE}], got {block_size}")
    try:
        pattern = _pattern(segment_lengths, dilation_rates, preset, is_published=blocks)
        pattern = replace(pattern, heads=heads_rule.value, offsets=offsets.value)
    except (TypeError, ValueError) as error:
        refuse(str(error))
    if heads_rule is HeadsRule.GROUPED and num_heads < len(pattern.branches):
        refuse(f"--heads must be at least the branches={len(pattern.branches)} with --heads-rule=grouped, got {num_heads}")
    if blocks:
        _show_blocks(pattern, tokens, num_heads, block_size, is_causal=causal, preset=preset, output=output)
        return
    num_tokens = _num_tokens(tokens, pattern, preset)
    name = None if preset is None else f"{_NAMES[preset]} in miniature, segment lengths / {MINIATURES[preset][0]}"
    if output is None:
        console = Console()
        if console.is_terminal and num_tokens > console.width:
            refuse(
                f"--tokens must be at most the terminal's width={console.width}, got {num_tokens}; or name a picture with --output"
            )
        _print(console, _multiplicity_panels(pattern, num_tokens, num_heads, is_causal=causal, name=name))
    else:
        _save(draw(pattern, num_tokens, num_heads, is_causal=causal, name=name), output)


def _show_blocks(
    pattern: DilatedPattern,
    tokens: int | None,
    num_heads: int,
    block_size: int,
    *,
    is_causal: bool,
    preset: Preset | None,
    output: Path | None,
) -> None:
    num_tokens = _num_block_tokens(tokens, pattern, block_size, preset)
    name = None if preset is None else _NAMES[preset] + (", without torchscale's zero keys" if pattern.zero_padding else "")
    console = Console()
    most = PICTURE_CELLS if output is not None else min(TERMINAL_CELLS, console.width)
    group = _group(num_tokens, block_size, most)
    found = head_tiles(pattern, num_tokens, num_heads, block_size, group, is_causal=is_causal)
    panels = _block_panels(pattern, num_tokens, num_heads, found, group, is_causal=is_causal, name=name)
    if output is None:
        _print(console, panels)
        console.print()
    else:
        _save(_figure(panels), output)
    table = tile_table(found)
    table.width = console.measure(table, options=console.options.update(max_width=1000)).maximum  # numbers are never cut
    console.print(table, soft_wrap=True)
    console.print(Text(f"\n{EXPLANATION}"), soft_wrap=True)


_NAMES = {Preset.LONGNET: "LongNet", Preset.GIGAPATH: "Prov-GigaPath"}


def multiplicity(pattern: DilatedPattern, num_tokens: int, num_heads: int, *, is_causal: bool = False) -> NDArray[np.int64]:
    """How many branches join each (query, key) pair: `m` in `softmax(score + log m)`.

    Zero keys of `zero_padding` are not counted.

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N.
        num_heads: Heads H. Under grouped-query attention these are key/value heads.
        is_causal: Whether a query sees only keys at its own position and before.

    Returns:
        `(H, N, N)`: head, query, key.
    """
    position = np.arange(num_tokens)
    counts = np.zeros((num_heads, num_tokens, num_tokens), dtype=np.int64)
    for branch, (length, rate) in enumerate(pattern.branches):
        same_segment = position[:, None] // length == position // length
        for head in pattern.head_range(branch, num_heads):
            kept = position % length % rate == pattern.offset(branch, head, num_heads)
            counts[head] += same_segment & kept[:, None] & kept
    return np.tril(counts) if is_causal else counts


def draw(pattern: DilatedPattern, num_tokens: int, num_heads: int, *, is_causal: bool = False, name: str | None = None) -> Figure:
    """A matplotlib figure with one panel per head: query rows down, key columns across, coloured by `multiplicity`.

    The outlined squares on the diagonal are the segments of each branch. Every token has the same whole number of pixels.

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N.
        num_heads: Heads H.
        is_causal: Whether a query sees only keys at its own position and before.
        name: What the pattern is called in the title, besides its lengths and rates.
    """
    return _figure(_multiplicity_panels(pattern, num_tokens, num_heads, is_causal=is_causal, name=name))


def draw_blocks(
    pattern: DilatedPattern,
    num_tokens: int,
    num_heads: int,
    *,
    block_size: int = BLOCK_SIZE,
    is_causal: bool = False,
    name: str | None = None,
) -> Figure:
    """A matplotlib figure of the block mask, one panel per distinct head: which tiles FlexAttention visits, and which are full.

    Beyond 512 tiles per side a cell of the picture stands for several, as its title says. The mask is that of
    `create_dilated_block_mask`, without zero keys.

    Args:
        pattern: As in `draw`.
        num_tokens: As in `draw`.
        num_heads: As in `draw`.
        block_size: Tokens per side of a tile.
        is_causal: As in `draw`.
        name: As in `draw`.
    """
    group = _group(num_tokens, block_size, PICTURE_CELLS)
    found = head_tiles(pattern, num_tokens, num_heads, block_size, group, is_causal=is_causal)
    return _figure(_block_panels(pattern, num_tokens, num_heads, found, group, is_causal=is_causal, name=name))


# -- what is drawn ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Panel:
    title: list[str]
    cells: NDArray[np.int64]  # (rows, columns), each a place in the colours
    lengths: list[int]  # of the segments to outline


@dataclass(frozen=True)
class _Panels:
    """A picture, wherever it is drawn."""

    title: list[str]
    panels: list[_Panel]
    num_tokens: int
    cell: int  # tokens per side of a cell
    has_grid: bool  # whether cells have borders, where there is room
    tick: int  # tokens from one tick to the next
    is_causal: bool
    colors: Sequence[str]
    glyphs: Sequence[str]  # the colours where there are none
    legend: str
    labels: dict[int, str]  # of colours, in the order of the legend
    title_width: int  # of a panel, in characters


def _multiplicity_panels(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, *, is_causal: bool, name: str | None = None
) -> _Panels:
    counts = multiplicity(pattern, num_tokens, num_heads, is_causal=is_causal)
    future = np.triu(np.ones((num_tokens, num_tokens), dtype=bool), k=1) & is_causal
    colors = [FUTURE, *_colors(counts)]
    panels = [
        _Panel(
            [_head_title(pattern, (head,), num_heads), _density(counts[head : head + 1], is_causal)],
            np.where(future, 0, counts[head] + 1),
            [pattern.segment_lengths[i] for i in _head_branches(pattern, head, num_heads)],
        )
        for head in range(num_heads)
    ]
    return _Panels(
        title=_title(pattern, num_tokens, num_heads, is_causal, name, _density(counts, is_causal)),
        panels=panels,
        num_tokens=num_tokens,
        cell=1,
        has_grid=False,
        tick=_tick(min(pattern.segment_lengths), num_tokens, 5),
        is_causal=is_causal,
        colors=colors,
        # Blank for the future, a dot for no branch, then the number of branches.
        glyphs=[" ", "·", *(str(count) if count < 10 else "+" for count in range(1, len(colors) - 1))],
        legend="branches that join query and key",
        labels={count + 1: str(count) for count in range(len(colors) - 1)} | ({0: "future"} if is_causal else {}),
        title_width=34 if pattern.heads == "grouped" else 24,
    )


def _block_panels(
    pattern: DilatedPattern,
    num_tokens: int,
    num_heads: int,
    found: Sequence[HeadTiles],
    group: int,
    *,
    is_causal: bool,
    name: str | None = None,
) -> _Panels:
    panels = [
        _Panel(
            [
                _head_title(pattern, heads, num_heads),
                f"{tally.density} visited".replace(" ", NO_BREAK),
                f"waste: raw {tally.waste_raw}, packed {tally.waste_packed}".replace(" ", NO_BREAK),
            ],
            cells,
            # More outlines than these would hide the tiles.
            [w for i in _head_branches(pattern, heads[0], num_heads) if num_tokens <= 64 * (w := pattern.segment_lengths[i])],
        )
        for heads, tally, cells in found
    ]
    tally = all_heads(found)
    size = tally.block_size
    labels = {Cell.NONE: "not visited", Cell.VISITED: "partial", Cell.FULL: "full"}
    if group > 1:
        labels = {
            Cell.NONE: "none visited",
            Cell.UNDER_HALF: "less than half",
            Cell.OVER_HALF: "half or more",
            Cell.VISITED: "all visited",
            Cell.FULL: "all full",
        }
    return _Panels(
        title=[
            *_title(pattern, num_tokens, num_heads, is_causal, name, f"{tally.density} of tiles visited".replace(" ", NO_BREAK)),
            "waste: pairs in visited tiles / useful pairs summed over branches",
        ],
        panels=panels,
        num_tokens=num_tokens,
        cell=size * group,
        has_grid=True,
        tick=_tick(min(pattern.segment_lengths), len(found[0].cells) * size * group, 4),
        is_causal=is_causal,
        colors=CELL_COLORS,
        glyphs=" ·-+o#",
        legend=f"tiles of {size} x {size} pairs" + (f", {group} x {group} of them per cell" if group > 1 else ""),
        labels={int(cell): label for cell, label in labels.items()} | ({int(Cell.FUTURE): "future"} if is_causal else {}),
        title_width=34,
    )


def _group(num_tokens: int, block_size: int, most: int) -> int:
    """Tiles per side of a cell, for at most so many cells per side."""
    return math.ceil(math.ceil(num_tokens / block_size) / most)


# -- how it is drawn ----------------------------------------------------------------------------------------------------------


def _figure(picture: _Panels) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    panels, num_tokens = picture.panels, picture.num_tokens
    cells = len(panels[0].cells)
    columns = _columns(len(panels))
    rows = -(-len(panels) // columns)
    # Laid out in pixels, so that cells are sharp and no text meets another.
    dpi, line, small = 160, 26, 22
    wanted = {1: 840, 2: 560}.get(len(panels), 400)
    side = cells * max(1, round(wanted / cells))
    left, right, gap = max(96, 68 + 9 * len(f"{num_tokens:,}")), 32, 28
    width = max(left + columns * side + (columns - 1) * gap + right, 760)
    left += (width - (left + columns * side + (columns - 1) * gap + right)) // 2
    legend_columns = _legend_columns(picture.labels.values(), width - 64)
    bottom = 122 + 28 * -(-len(picture.labels) // legend_columns)
    title = _wrap(picture.title, (width - 64) / 12)
    titles = [_wrap(panel.title, side / 10.5) for panel in panels]
    title_height = max(len(lines) for lines in titles) * small + 14
    top = 24 + len(title) * line + 10
    height = top + rows * (title_height + side) + (rows - 1) * 12 + bottom

    center = (left + (columns * side + (columns - 1) * gap) / 2) / width
    end = cells * picture.cell - 0.5

    figure = Figure(figsize=(width / dpi, height / dpi), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    for i, text in enumerate(title):
        weight = "bold" if i == 0 else "normal"
        y = 1 - (24 + i * line) / height
        figure.text(center, y, text, ha="center", va="top", fontsize=9.5 if i == 0 else 8.5, weight=weight, color=INK)
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        x = left + column * (side + gap)
        y = height - top - (row + 1) * (title_height + side) - row * 12
        axes = figure.add_axes((x / width, y / height, side / width, side / height))
        colors = ListedColormap(list(picture.colors))
        last = len(picture.colors) - 0.5
        axes.imshow(panel.cells, cmap=colors, vmin=-0.5, vmax=last, interpolation="nearest", extent=(-0.5, end, end, -0.5))
        if picture.has_grid and side >= 12 * cells:
            lines = [picture.cell * i - 0.5 for i in range(1, cells)]
            axes.hlines(lines, -0.5, end, colors=INK, linewidths=0.4, alpha=0.2)
            axes.vlines(lines, -0.5, end, colors=INK, linewidths=0.4, alpha=0.2)
        for length in panel.lengths:
            starts = range(0, num_tokens, length)
            borders = [_border(start, min(start + length, num_tokens), picture.is_causal) for start in starts]
            axes.add_collection(LineCollection(borders, colors=INK, linewidths=0.5, alpha=0.7))
        axes.set_title("\n".join(titles[i]), fontsize=7.5, color=INK, pad=4, linespacing=1.25)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MultipleLocator(picture.tick))
            axis.set_major_formatter(FuncFormatter(lambda token, _: f"{token:,.0f}"))
        is_last = i + columns >= len(panels)
        axes.tick_params(length=2.5, width=0.5, labelsize=7, colors=INK, labelbottom=is_last, labelleft=column == 0)
        if is_last:
            axes.set_xlabel("key", fontsize=8, color=INK, labelpad=2)
        if column == 0:
            axes.set_ylabel("query", fontsize=8, color=INK, labelpad=2)
        for spine in axes.spines.values():
            spine.set(linewidth=0.6, color=INK)
    figure.legend(
        handles=[
            Patch(facecolor=picture.colors[i], edgecolor=INK, linewidth=0.5, label=label) for i, label in picture.labels.items()
        ],
        title=picture.legend,
        loc="lower center",
        bbox_to_anchor=(center, 12 / height),
        ncols=legend_columns,
        fontsize=8,
        title_fontsize=8,
        frameon=False,
        handlelength=1.2,
        handleheight=1.2,
        columnspacing=1.4,
        borderaxespad=0,
    )
    return figure


def _print(console: Console, picture: _Panels) -> None:
    """The picture in coloured half blocks; in characters where the output has no colours."""
    has_colors = console.is_terminal and console.color_system is not None and not console.no_color
    panels = picture.panels
    panel_width = max(len(panels[0].cells), picture.title_width)
    columns = max(1, min(len(panels), (console.width + 2) // (panel_width + 2)))

    for line in picture.title:
        console.print(Text(line, style="bold"), soft_wrap=True)
    for start in range(0, len(panels), columns):
        console.print()
        grid = Table.grid(padding=(0, 2, 0, 0))
        drawn = panels[start : start + columns]
        for _ in drawn:
            grid.add_column(width=panel_width, no_wrap=False)
        grid.add_row(*(Text("\n".join(panel.title)) for panel in drawn))
        grid.add_row(
            *(
                _half_blocks(panel.cells, picture.colors) if has_colors else _characters(panel.cells, picture.glyphs)
                for panel in drawn
            )
        )
        console.print(grid, soft_wrap=True, crop=False)
    legend = Text(f"\n{picture.legend}, queries down, keys across:")
    for i, label in picture.labels.items():
        legend.append("  ")
        if has_colors:
            legend.append("  ", style=f"on {picture.colors[i]}")
            legend.append(f" {label}")
        else:
            legend.append(f"{'blank' if picture.glyphs[i] == ' ' else picture.glyphs[i]} = {label}")
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


def _characters(image: NDArray[np.int64], glyphs: Sequence[str]) -> Text:
    return Text("\n".join("".join(glyphs[cell] for cell in row) for row in image), no_wrap=True)


def _colors(counts: NDArray[np.int64]) -> list[str]:
    """A colour for 0, 1, ... up to the largest count, at least 1."""
    levels = max(1, int(counts.max()))
    # One level alone is drawn in a middle blue; two and more span the scale.
    stops = [3.0] if levels == 1 else [i * (len(SCALE) - 1) / (levels - 1) for i in range(levels)]
    return [APART, *(_blend(SCALE[int(stop)], SCALE[min(int(stop) + 1, len(SCALE) - 1)], stop % 1) for stop in stops)]


def _blend(a: str, b: str, share: float) -> str:
    pairs = ((int(a[i : i + 2], 16), int(b[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in pairs)


def _columns(num_heads: int) -> int:
    """Panels per row: up to 5 in one row, else the grid near a square that leaves the fewest places empty."""
    if num_heads <= 5:
        return num_heads
    root = math.ceil(math.sqrt(num_heads))
    return min(range(root, min(2 * root, 8) + 1), key=lambda columns: (-num_heads % columns, columns))


def _legend_columns(labels: Iterable[str], width: float) -> int:
    """Entries per row of the legend."""
    widths = sorted((60 + 9 * len(label) for label in labels), reverse=True)
    return max(1, sum(total <= width for total in accumulate(widths[:LEGEND_COLUMNS])))


def _title(pattern: DilatedPattern, num_tokens: int, num_heads: int, is_causal: bool, name: str | None, density: str) -> list[str]:
    lengths, rates = (", ".join(map(str, values)) for values in (pattern.segment_lengths, pattern.dilation_rates))
    rule = " grouped by branch" if pattern.heads == "grouped" else f", {pattern.offsets} offsets"
    heads = "1 head" if num_heads == 1 else f"{num_heads} heads"
    tokens = "1 token" if num_tokens == 1 else f"{num_tokens:,} tokens"
    return [
        *([] if name is None else [name]),
        f"segment lengths {lengths} · dilation rates {rates}",
        f"{tokens} · {heads}{rule} · {'causal' if is_causal else 'not causal'} · {density}",
    ]


def _head_branches(pattern: DilatedPattern, head: int, num_heads: int) -> list[int]:
    return [i for i in range(len(pattern.branches)) if head in pattern.head_range(i, num_heads)]


def _head_title(pattern: DilatedPattern, heads: Sequence[int], num_heads: int) -> str:
    """What heads keep that run the same branches."""
    branches = _head_branches(pattern, heads[0], num_heads)
    offsets = {", ".join(str(pattern.offset(i, head, num_heads)) for i in branches) for head in heads}
    name = f"head{'' if len(heads) == 1 else 's'} {describe_heads(heads)}"
    if pattern.heads == "grouped":
        length, rate = pattern.branches[branches[0]]
        return f"{name}: length {length}, rate {rate}, offset{NO_BREAK}{offsets.pop()}"
    if len(offsets) > 1:
        return f"{name}: {len(offsets)} choices of offsets"
    return f"{name}: offset{'' if len(branches) == 1 else 's'} {offsets.pop()}"


def _border(start: int, stop: int, is_causal: bool) -> list[tuple[float, float]]:
    """The outline of a segment on the diagonal; under causality its left and lower edges, since no pair is above."""
    a, b = start - 0.5, stop - 0.5
    corners = [(a, a), (a, b), (b, b)]
    return corners if is_causal else [*corners, (b, a), (a, a)]


def _tick(segment_length: int, num_tokens: int, most: int) -> int:
    """Tokens between ticks: at most about so many, on borders of the shortest segments where there are several."""
    if 2 * segment_length > num_tokens:
        return max(1, num_tokens // (most - 1))
    return segment_length * -(-num_tokens // (most * segment_length))


def _density(counts: NDArray[np.int64], is_causal: bool) -> str:
    """The share of pairs that attend, of all pairs or of those that causality allows."""
    num_heads, num_tokens = counts.shape[:2]
    pairs = num_heads * (num_tokens * (num_tokens + 1) // 2 if is_causal else num_tokens**2)
    share = 100 * np.count_nonzero(counts) / pairs
    return f"{share:.1f} % of {'causal' if is_causal else 'all'} pairs".replace(" ", NO_BREAK)


def _wrap(lines: Sequence[str], width: float) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, max(12, int(width)))]


def _save(figure: Figure, output: Path) -> None:
    """Write the picture beside its final name, then rename it: a reader never sees half of it."""
    partial = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with partial.open("xb") as file:
            figure.savefig(file, format="png")
        partial.replace(output)
    except OSError as error:
        refuse(f"--output must be a file that can be written, got '{output}': {error.strerror or error}")
    finally:
        with suppress(OSError):  # there is none after the rename, or where the folder is none
            partial.unlink()


def _pattern(
    segment_lengths: str | None, dilation_rates: str | None, preset: Preset | None, *, is_published: bool
) -> DilatedPattern:
    """The pattern that the options name; a preset in miniature unless it is to be as published."""
    if preset is None:
        default = "2048,4096,8192" if is_published else "16,32,64"
        return DilatedPattern(
            _integers("--segment-lengths", default if segment_lengths is None else segment_lengths),
            _integers("--dilation-rates", "1,2,4" if dilation_rates is None else dilation_rates),
        )
    for option, value in (("--segment-lengths", segment_lengths), ("--dilation-rates", dilation_rates)):
        if value is not None:
            refuse(f"{option} must not be given with --preset={preset.value}, got {value}")
    published = DilatedPattern.longnet() if preset is Preset.LONGNET else DilatedPattern.gigapath()
    if is_published:
        return published
    divisor = MINIATURES[preset][0]
    return DilatedPattern(tuple(length // divisor for length in published.segment_lengths), published.dilation_rates)


def _integers(option: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        refuse(f"{option} must be integers separated by commas, got '{text}'")
    if max(values) > MAX_LENGTH:
        refuse(f"{option} must be at most {MAX_LENGTH}, got {max(values)}")
    return values


def _num_tokens(tokens: int | None, pattern: DilatedPattern, preset: Preset | None) -> int:
    source = ""
    if tokens is None:
        tokens = max(pattern.segment_lengths) if preset is None else MINIATURES[preset][1]
        source = ", the longest segment"
    if 1 <= tokens <= MAX_TOKENS:
        return tokens
    advice = ""
    if tokens > MAX_TOKENS:
        advice = "; divide all segment lengths and the tokens by one number, which keeps the shape"
    refuse(f"--tokens must be in [1, {MAX_TOKENS}], got {tokens}{source}{advice}")


def _num_block_tokens(tokens: int | None, pattern: DilatedPattern, block_size: int, preset: Preset | None) -> int:
    source = ""
    if tokens is None:
        tokens = 2 * max(pattern.segment_lengths) if preset is None else PRESET_BLOCK_TOKENS
        source = ", twice the longest segment" if preset is None else ", the preset's default"
    most = min(MAX_BLOCKS * block_size, MAX_BLOCK_TOKENS)
    if 1 <= tokens <= most:
        return tokens
    advice = f"; at most {MAX_BLOCKS} blocks can be drawn, of a larger --block-size" if most < tokens <= MAX_BLOCK_TOKENS else ""
    refuse(f"--tokens must be in [1, {most}] with --block-size={block_size}, got {tokens}{source}{advice}")
