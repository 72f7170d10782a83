"""`flexdilated show`: who attends to whom, or which tiles FlexAttention visits, in the terminal or as a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexdilated.cli import options
from flexdilated.cli.refusal import refuse
from flexdilated.core.description import connection
from flexdilated.core.pattern import DilatedPattern

if TYPE_CHECKING:
    from flexdilated.draw.tiles import HeadTiles

MAX_HEADS = 64
PIPED_WIDTH, PIPED_CELLS = 100, 512  # columns of text, and cells per side, where no terminal says how wide it is

# With --blocks. A dense mask of the most blocks takes some 5 GB, and 15 s per head on one core.
MAX_BLOCKS = 8192
MAX_BLOCK_TOKENS = 2**24
DEFAULT_BLOCK_TOKENS = 65536
TERMINAL_CELLS = 64  # per side

SMALL = DilatedPattern((16, 32, 64), (1, 2, 4))
NAMES = {"causal": "DilatedPattern.causal", "longnet": "LongNet", "gigapath": "Prov-GigaPath"}

EXPLANATION = """\
waste = visited tiles x pairs per tile / useful pairs
useful pairs: (query, key), one that m branches join counted m times
raw: one mask over the sequence as it is, where such a pair is computed once
packed: one mask per branch over its kept rows, segment after segment"""


def show(
    segment_lengths: options.SegmentLengthsOption = None,
    dilation_rates: options.DilationRatesOption = None,
    window: options.WindowOption = None,
    global_tokens: options.GlobalTokensOption = 0,
    preset: options.PresetOption = None,
    heads_rule: options.HeadsRuleOption = "all",
    offsets: options.OffsetsOption = "blocked",
    heads: options.HeadsOption = 4,
    kv_heads: options.KvHeadsOption = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Sequence length in tokens.", show_default="the longest segment; without segments, 4 windows"
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
        int | None, typer.Option(min=1, help="With --blocks: tokens per side of a tile.", show_default="128")
    ] = None,
    output: options.PictureOption = None,
) -> None:
    """Draw who attends to whom: one panel per head, queries down, keys across, coloured by how many branches join the pair.

    Long sequences are drawn in cells of many pairs, coloured by the joins per pair. Without options that name a pattern it is
    16,32,64 at 1,2,4; with --blocks 2048,4096,8192. With --blocks and no --tokens at most 65,536 tokens are drawn.
    """
    from flexdilated.draw.blocks import BLOCK_SIZE, PICTURE_CELLS, block_panels
    from flexdilated.draw.panels import figure_of
    from flexdilated.draw.pattern import CELLS, multiplicity_panels
    from flexdilated.draw.terminal import print_panels

    options.check_picture(output)
    if block_size is not None and not blocks:
        refuse(f"--block-size must come with --blocks, got {block_size}")
    block_size = block_size or BLOCK_SIZE
    kv_heads = options.kv_heads_named(heads, kv_heads)
    if kv_heads > MAX_HEADS:
        refuse(f"--heads must be at most {MAX_HEADS} key/value heads, one panel each, got {kv_heads}")
    named, default = (segment_lengths, dilation_rates, preset), options.EXAMPLE if blocks else SMALL
    rules: dict[str, Any] = {"window": window, "global_tokens": global_tokens, "heads_rule": heads_rule, "offsets": offsets}
    pattern = options.pattern_named(*named, default=default, heads=kv_heads, tokens=tokens, **rules)
    longest = max(pattern.segment_lengths, default=4 * max(pattern.window or 1, global_tokens))
    num_tokens = (min(longest, DEFAULT_BLOCK_TOKENS) if blocks else longest) if tokens is None else tokens
    name, console = None if preset is None else NAMES[preset], Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    if blocks:
        if num_tokens > (limit := min(MAX_BLOCKS * block_size, MAX_BLOCK_TOKENS)):
            refuse(f"--tokens must be in [1, {limit}] with --block-size={block_size}, got {num_tokens}; use a larger --block-size")
        most = PICTURE_CELLS if output is not None else min(TERMINAL_CELLS, console.width)
        name = name and name + (", without torchscale's zero keys" if pattern.zero_padding else "")
        panels, groups = block_panels(pattern, num_tokens, kv_heads, block_size, most, is_causal=causal, name=name)
    else:
        width = console.width if console.is_terminal else PIPED_CELLS
        most = CELLS if output is not None else width if num_tokens <= width else min(TERMINAL_CELLS, console.width)
        panels, groups = multiplicity_panels(pattern, num_tokens, kv_heads, is_causal=causal, name=name, most=most), []
    if output is None:
        print_panels(console, panels)
    else:
        options.write_picture(figure_of(panels), output)
    if causal:
        console.print(Text(connection(pattern, num_tokens, kv_heads)), soft_wrap=True)
    if blocks:
        console.print()
        options.print_table(console, _tile_table(groups))
        console.print(Text(f"\n{EXPLANATION}"), soft_wrap=True)


def _tile_table(groups: Sequence[HeadTiles]) -> Table:
    """A row for heads that are equal, with the numbers of one head; then the sum over all heads."""
    from flexdilated.draw.panels import describe_heads
    from flexdilated.draw.tiles import all_heads

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("\nhead", no_wrap=True)
    for name in ("partial\ntiles", "full\ntiles", "density\n", "packed\ntiles", "useful\npairs", "waste,\nraw", "waste,\npacked"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [
        (f"each of {describe_heads(group.heads)}" if len(group.heads) > 1 else str(group.heads[0]), group.tally) for group in groups
    ]
    num_kv_heads = sum(len(group.heads) for group in groups)
    if num_kv_heads > 1:
        rows.append((f"all {num_kv_heads}", all_heads(groups)))
    for name, tally in rows:
        tiles = (f"{tally.partial:,}", f"{tally.full:,}", tally.density, f"{tally.packed:,}", f"{tally.pairs:,}")
        table.add_row(name, *tiles, tally.waste_raw, tally.waste_packed)
    return table
