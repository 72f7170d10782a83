"""`flexdilated show`: who attends to whom, or which tiles FlexAttention visits, in the terminal or as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexdilated.cli import options
from flexdilated.cli.refusal import refuse
from flexdilated.core.pattern import DilatedPattern
from flexdilated.draw.blocks import BLOCK_SIZE, PICTURE_CELLS, block_panels
from flexdilated.draw.panels import describe_heads, figure_of
from flexdilated.draw.pattern import draw, multiplicity_panels
from flexdilated.draw.terminal import print_panels
from flexdilated.draw.tiles import HeadTiles, all_heads

# More cells than this are neither drawn in reasonable time nor seen.
MAX_TOKENS = 512
MAX_HEADS = 64

# With --blocks. A dense mask of the most blocks takes some 5 GB, and 15 s per head on one core.
MAX_BLOCK_SIZE = 2**20
MAX_BLOCKS = 8192
MAX_BLOCK_TOKENS = 2**24
PRESET_BLOCK_TOKENS = 65536
TERMINAL_CELLS = 64  # per side

NAMES = {options.Preset.LONGNET: "LongNet", options.Preset.GIGAPATH: "Prov-GigaPath"}
# What a preset's segment lengths are divided by, and how many tokens are drawn by default, without --blocks: published segments
# start at 1024 and 2048 tokens.
MINIATURES = {options.Preset.LONGNET: (128, 256), options.Preset.GIGAPATH: (64, 256)}

EXPLANATION = """\
waste = visited tiles x pairs per tile / useful pairs
useful pairs: (query, key), one that m branches join counted m times
raw: one mask over the sequence as it is, where such a pair is computed once
packed: one mask per branch over its kept rows, segment after segment"""


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
        options.Preset | None,
        typer.Option(
            metavar="NAME",
            help="A published pattern, longnet or gigapath, in miniature, instead of lengths and rates: LongNet's lengths divided "
            "by 128, Prov-GigaPath's by 64; the rates are the published ones. With --blocks the published lengths, without "
            "torchscale's zero keys.",
        ),
    ] = None,
    heads_rule: options.HeadsRuleOption = options.HeadsRule.ALL,
    offsets: options.OffsetsOption = options.OffsetsRule.BLOCKED,
    num_heads: Annotated[int, typer.Option("--heads", help=f"Heads, one panel each, 1 to {MAX_HEADS}.")] = 4,
    tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Sequence length in tokens, 1 to {MAX_TOKENS}; with --blocks up to {MAX_BLOCKS} blocks and {MAX_BLOCK_TOKENS} "
            "tokens. Default: the longest segment; 256 for a preset. With --blocks: twice the longest segment; "
            f"{PRESET_BLOCK_TOKENS} for a preset."
        ),
    ] = None,
    causal: options.CausalOption = False,
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
    options.check_picture(output)
    options.check_range("--heads", num_heads, MAX_HEADS)
    if block_size is not None and not blocks:
        refuse(f"--block-size must come with --blocks, got {block_size}")
    block_size = BLOCK_SIZE if block_size is None else block_size
    options.check_range("--block-size", block_size, MAX_BLOCK_SIZE)
    pattern = options.pattern_named(
        segment_lengths,
        dilation_rates,
        preset,
        default_lengths="2048,4096,8192" if blocks else "16,32,64",
        divisor=1 if blocks or preset is None else MINIATURES[preset][0],
        heads_rule=heads_rule,
        offsets=offsets,
        heads=num_heads,
    )
    if blocks:
        _show_blocks(pattern, tokens, num_heads, block_size, is_causal=causal, preset=preset, output=output)
    else:
        _show_pattern(pattern, tokens, num_heads, is_causal=causal, preset=preset, output=output)


def _show_pattern(
    pattern: DilatedPattern,
    tokens: int | None,
    num_heads: int,
    *,
    is_causal: bool,
    preset: options.Preset | None,
    output: Path | None,
) -> None:
    num_tokens = _num_tokens(tokens, pattern, preset)
    name = None if preset is None else f"{NAMES[preset]} in miniature, segment lengths / {MINIATURES[preset][0]}"
    if output is not None:
        options.save_picture(draw(pattern, num_tokens, num_heads, is_causal=is_causal, name=name), output)
        return
    console = Console()
    if console.is_terminal and num_tokens > console.width:
        refuse(f"--tokens must be at most the terminal's width={console.width}, got {num_tokens}; or name a picture with --output")
    print_panels(console, multiplicity_panels(pattern, num_tokens, num_heads, is_causal=is_causal, name=name))


def _show_blocks(
    pattern: DilatedPattern,
    tokens: int | None,
    num_heads: int,
    block_size: int,
    *,
    is_causal: bool,
    preset: options.Preset | None,
    output: Path | None,
) -> None:
    num_tokens = _num_block_tokens(tokens, pattern, block_size, preset)
    name = None if preset is None else NAMES[preset] + (", without torchscale's zero keys" if pattern.zero_padding else "")
    console = Console()
    most = PICTURE_CELLS if output is not None else min(TERMINAL_CELLS, console.width)
    panels, found = block_panels(pattern, num_tokens, num_heads, block_size, most, is_causal=is_causal, name=name)
    if output is None:
        print_panels(console, panels)
        console.print()
    else:
        options.save_picture(figure_of(panels), output)
    options.print_table(console, _tile_table(found))
    console.print(Text(f"\n{EXPLANATION}"), soft_wrap=True)


def _num_tokens(tokens: int | None, pattern: DilatedPattern, preset: options.Preset | None) -> int:
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


def _num_block_tokens(tokens: int | None, pattern: DilatedPattern, block_size: int, preset: options.Preset | None) -> int:
    source = ""
    if tokens is None:
        tokens = 2 * max(pattern.segment_lengths) if preset is None else PRESET_BLOCK_TOKENS
        source = ", twice the longest segment" if preset is None else ", the preset's default"
    most = min(MAX_BLOCKS * block_size, MAX_BLOCK_TOKENS)
    if 1 <= tokens <= most:
        return tokens
    advice = f"; at most {MAX_BLOCKS} blocks can be drawn, of a larger --block-size" if most < tokens <= MAX_BLOCK_TOKENS else ""
    refuse(f"--tokens must be in [1, {most}] with --block-size={block_size}, got {tokens}{source}{advice}")


def _tile_table(found: Sequence[HeadTiles]) -> Table:
    """A row for heads that are alike, with the numbers of each single one of them; then the sum over all heads."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("\nhead", no_wrap=True)
    for name in ("partial\ntiles", "full\ntiles", "density\n", "packed\ntiles", "useful\npairs", "waste,\nraw", "waste,\npacked"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(f"each of {describe_heads(of.heads)}" if len(of.heads) > 1 else str(of.heads[0]), of.each) for of in found]
    num_heads = sum(len(of.heads) for of in found)
    if num_heads > 1:
        rows.append((f"all {num_heads}", all_heads(found)))
    for name, tally in rows:
        tiles = (f"{tally.partial:,}", f"{tally.full:,}", tally.density, f"{tally.packed:,}", f"{tally.pairs:,}")
        table.add_row(name, *tiles, tally.waste_raw, tally.waste_packed)
    return table
