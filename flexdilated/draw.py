"""The picture of a pattern: which query attends to which key, per head, and how many branches join the pair."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexdilated.pattern import DilatedPattern
from flexdilated.refusal import refuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "multiplicity", "show"]

# More cells than this are neither drawn in reasonable time nor seen.
MAX_TOKENS = 512
MAX_HEADS = 64
LEGEND_COLUMNS = 8

# ColorBrewer's YlGnBu from its middle on: sequential, safe for colour-blind readers, readable in grey, and a single cell of its
# lightest colour still shows on white.
SCALE = ("#74c9bd", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")
APART = "#ffffff"  # no branch joins the pair
FUTURE = "#dedede"  # the pair is above the causal diagonal
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


# What a preset's segment lengths are divided by, and how many tokens are drawn by default.
MINIATURES = {Preset.LONGNET: (128, 256), Preset.GIGAPATH: (64, 256)}


def show(
    segment_lengths: Annotated[
        str | None,
        typer.Option(help="Tokens per segment of each branch, comma separated. Default, without a preset: 16,32,64."),
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
            "Prov-GigaPath's by 64; the rates are the published ones."
        ),
    ] = None,
    heads_rule: Annotated[
        HeadsRule, typer.Option(help="all: every head runs every branch. grouped: each branch has its own group of heads.")
    ] = HeadsRule.ALL,
    offsets: Annotated[
        OffsetsRule,
        typer.Option(help="Which residue head h of H keeps at rate r. blocked: h // ceil(H / r). interleaved: h mod r."),
    ] = OffsetsRule.BLOCKED,
    num_heads: Annotated[int, typer.Option(help=f"Heads, one panel each, 1 to {MAX_HEADS}.")] = 4,
    tokens: Annotated[
        int | None,
        typer.Option(help=f"Sequence length in tokens, 1 to {MAX_TOKENS}. Default: the longest segment; 256 for a preset."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Whether a query sees no key after itself.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the picture, a .png file. Default: print to the terminal.")
    ] = None,
) -> None:
    """Draw who attends to whom: one panel per head, queries down, keys across, coloured by how many branches join the pair."""
    if output is not None and output.suffix.lower() != ".png":
        refuse(f"--output must end in .png, got '{output}'")
    if not 1 <= num_heads <= MAX_HEADS:
        refuse(f"--num-heads must be in [1, {MAX_HEADS}], got {num_heads}")
    try:
        pattern = _pattern(segment_lengths, dilation_rates, preset)
        pattern = replace(pattern, heads=heads_rule.value, offsets=offsets.value)
    except (TypeError, ValueError) as error:
        refuse(str(error))
    num_tokens = _num_tokens(tokens, pattern, preset)
    name = None if preset is None else f"{_NAMES[preset]} in miniature, segment lengths / {MINIATURES[preset][0]}"
    if output is None:
        console = Console()
        if console.is_terminal and num_tokens > console.width:
            refuse(
                f"--tokens must be at most the terminal's width={console.width}, got {num_tokens}; or name a picture with --output"
            )
        _print(console, pattern, num_tokens, num_heads, is_causal=causal, name=name)
    else:
        _save(draw(pattern, num_tokens, num_heads, is_causal=causal, name=name), output)


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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MultipleLocator

    counts = multiplicity(pattern, num_tokens, num_heads, is_causal=is_causal)
    colors = _colors(counts)
    future = np.triu(np.ones((num_tokens, num_tokens), dtype=bool), k=1) & is_causal

    columns = _columns(num_heads)
    rows = -(-num_heads // columns)
    # Laid out in pixels, so that cells are sharp and no text meets another.
    dpi, line, small = 160, 26, 22
    wanted = {1: 840, 2: 560}.get(num_heads, 400)
    side = num_tokens * max(1, round(wanted / num_tokens))
    entries = len(colors) + is_causal
    left, right, gap, bottom = 96, 32, 28, 122 + 28 * -(-entries // LEGEND_COLUMNS)
    width = max(left + columns * side + (columns - 1) * gap + right, 760)
    left += (width - (left + columns * side + (columns - 1) * gap + right)) // 2
    title = _wrap(_title(pattern, counts, is_causal, name), (width - 64) / 12)
    titles = [_wrap(_panel_title(pattern, counts, head, is_causal), side / 10.5) for head in range(num_heads)]
    title_height = max(len(lines) for lines in titles) * small + 14
    top = 24 + len(title) * line + 10
    height = top + rows * (title_height + side) + (rows - 1) * 12 + bottom

    center = (left + (columns * side + (columns - 1) * gap) / 2) / width
    tick = _tick(min(pattern.segment_lengths), num_tokens)

    figure = Figure(figsize=(width / dpi, height / dpi), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    for i, text in enumerate(title):
        weight = "bold" if i == 0 else "normal"
        y = 1 - (24 + i * line) / height
        figure.text(center, y, text, ha="center", va="top", fontsize=9.5 if i == 0 else 8.5, weight=weight, color=INK)
    for head in range(num_heads):
        row, column = divmod(head, columns)
        x = left + column * (side + gap)
        y = height - top - (row + 1) * (title_height + side) - row * 12
        axes = figure.add_axes((x / width, y / height, side / width, side / height))
        image = np.where(future, 0, counts[head] + 1)
        axes.imshow(image, cmap=ListedColormap([FUTURE, *colors]), vmin=-0.5, vmax=len(colors) + 0.5, interpolation="nearest")
        for branch, (length, _) in enumerate(pattern.branches):
            if head in pattern.head_range(branch, num_heads):
                borders = [_border(start, min(start + length, num_tokens), is_causal) for start in range(0, num_tokens, length)]
                axes.add_collection(LineCollection(borders, colors=INK, linewidths=0.5, alpha=0.7))
        axes.set_title("\n".join(titles[head]), fontsize=7.5, color=INK, pad=4, linespacing=1.25)
        axes.xaxis.set_major_locator(MultipleLocator(tick))
        axes.yaxis.set_major_locator(MultipleLocator(tick))
        is_last = head + columns >= num_heads
        axes.tick_params(length=2.5, width=0.5, labelsize=7, colors=INK, labelbottom=is_last, labelleft=column == 0)
        if is_last:
            axes.set_xlabel("key", fontsize=8, color=INK, labelpad=2)
        if column == 0:
            axes.set_ylabel("query", fontsize=8, color=INK, labelpad=2)
        for spine in axes.spines.values():
            spine.set(linewidth=0.6, color=INK)
    labels = _labels(colors)
    handles = [Patch(facecolor=color, edgecolor=INK, linewidth=0.5, label=label) for color, label in zip(colors, labels)]
    if is_causal:
        handles.append(Patch(facecolor=FUTURE, edgecolor=INK, linewidth=0.5, label="future"))
    figure.legend(
        handles=handles,
        title="branches that join query and key",
        loc="lower center",
        bbox_to_anchor=(center, 12 / height),
        ncols=min(entries, LEGEND_COLUMNS),
        fontsize=8,
        title_fontsize=8,
        frameon=False,
        handlelength=1.2,
        handleheight=1.2,
        columnspacing=1.4,
        borderaxespad=0,
    )
    return figure


def _print(
    console: Console, pattern: DilatedPattern, num_tokens: int, num_heads: int, *, is_causal: bool, name: str | None = None
) -> None:
    """The picture in coloured half blocks; in digits where the output has no colours."""
    counts = multiplicity(pattern, num_tokens, num_heads, is_causal=is_causal)
    colors = _colors(counts)
    has_colors = console.is_terminal and console.color_system is not None and not console.no_color
    future = np.triu(np.ones((num_tokens, num_tokens), dtype=bool), k=1) & is_causal
    panel_width = max(num_tokens, 34 if pattern.heads == "grouped" else 24)  # room for the panel's title
    columns = max(1, min(num_heads, (console.width + 2) // (panel_width + 2)))

    for line in _title(pattern, counts, is_causal, name):
        console.print(Text(line, style="bold"), soft_wrap=True)
    for start in range(0, num_heads, columns):
        console.print()
        grid = Table.grid(padding=(0, 2, 0, 0))
        heads = range(start, min(start + columns, num_heads))
        for _ in heads:
            grid.add_column(width=panel_width, no_wrap=False)
        grid.add_row(*(Text("\n".join(_panel_title(pattern, counts, head, is_causal))) for head in heads))
        cells = [np.where(future, 0, counts[head] + 1) for head in heads]
        grid.add_row(*(_blocks(image, [FUTURE, *colors]) if has_colors else _digits(image) for image in cells))
        console.print(grid, soft_wrap=True, crop=False)
    legend = Text("\nbranches that join query (down) and key (across):")
    for i, (color, label) in enumerate(zip(colors, _labels(colors))):
        legend.append("  ")
        legend.append("  " if has_colors else _glyph(i + 1), style=f"on {color}" if has_colors else "")
        legend.append(f" {label}" if has_colors else f" = {label}")
    if is_causal:
        legend.append("  ")
        legend.append("  " if has_colors else "blank", style=f"on {FUTURE}" if has_colors else "")
        legend.append(" future" if has_colors else " = future")
    console.print(legend, soft_wrap=True)


def _blocks(image: NDArray[np.int64], colors: Sequence[str]) -> Text:
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


def _digits(image: NDArray[np.int64]) -> Text:
    return Text("\n".join("".join(_glyph(int(cell)) for cell in row) for row in image), no_wrap=True)


def _glyph(cell: int) -> str:
    """Blank for the future, a dot for no branch, then the number of branches."""
    return " ·123456789"[cell] if cell <= 10 else "+"


def _labels(colors: Sequence[str]) -> list[str]:
    return [str(count) for count in range(len(colors))]


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


def _title(pattern: DilatedPattern, counts: NDArray[np.int64], is_causal: bool, name: str | None) -> list[str]:
    lengths, rates = (", ".join(map(str, values)) for values in (pattern.segment_lengths, pattern.dilation_rates))
    num_heads, num_tokens = counts.shape[:2]
    rule = " grouped by branch" if pattern.heads == "grouped" else f", {pattern.offsets} offsets"
    heads = "1 head" if num_heads == 1 else f"{num_heads} heads"
    tokens = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
    return [
        *([] if name is None else [name]),
        f"segment lengths {lengths} · dilation rates {rates}",
        f"{tokens} · {heads}{rule} · {'causal' if is_causal else 'not causal'} · {_density(counts, is_causal)}",
    ]


def _panel_title(pattern: DilatedPattern, counts: NDArray[np.int64], head: int, is_causal: bool) -> list[str]:
    num_heads = len(counts)
    branches = [i for i in range(len(pattern.branches)) if head in pattern.head_range(i, num_heads)]
    offsets = ", ".join(str(pattern.offset(i, head, num_heads)) for i in branches)
    if pattern.heads == "grouped":
        length, rate = pattern.branches[branches[0]]
        first = f"head {head}: length {length}, rate {rate}, offset {offsets}"
    else:
        first = f"head {head}: offset{'' if len(branches) == 1 else 's'} {offsets}"
    return [first, _density(counts[head : head + 1], is_causal)]


def _border(start: int, stop: int, is_causal: bool) -> list[tuple[float, float]]:
    """The outline of a segment on the diagonal; under causality its left and lower edges, since no pair is above."""
    a, b = start - 0.5, stop - 0.5
    corners = [(a, a), (a, b), (b, b)]
    return corners if is_causal else [*corners, (b, a), (a, a)]


def _tick(segment_length: int, num_tokens: int) -> int:
    """Tokens between ticks: at most five ticks, on borders of the shortest segments where there are several."""
    if 2 * segment_length > num_tokens:
        return max(1, num_tokens // 4)
    return segment_length * -(-num_tokens // (5 * segment_length))


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


def _pattern(segment_lengths: str | None, dilation_rates: str | None, preset: Preset | None) -> DilatedPattern:
    if preset is None:
        return DilatedPattern(
            _integers("--segment-lengths", "16,32,64" if segment_lengths is None else segment_lengths),
            _integers("--dilation-rates", "1,2,4" if dilation_rates is None else dilation_rates),
        )
    for option, value in (("--segment-lengths", segment_lengths), ("--dilation-rates", dilation_rates)):
        if value is not None:
            refuse(f"{option} must not be given with --preset={preset.value}, got {value}")
    published = DilatedPattern.longnet() if preset is Preset.LONGNET else DilatedPattern.gigapath()
    divisor = MINIATURES[preset][0]
    return DilatedPattern(tuple(length // divisor for length in published.segment_lengths), published.dilation_rates)


def _integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        refuse(f"{option} must be integers separated by commas, got '{text}'")


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
