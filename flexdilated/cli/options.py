"""Options of several commands: their spelling, meaning and errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flexdilated.cli.refusal import first_line, refuse
from flexdilated.core.pattern import DilatedPattern
from flexdilated.draw.figure import require_matplotlib as check_matplotlib
from flexdilated.draw.figure import write

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

EXAMPLE = DilatedPattern((2048, 4096, 8192), (1, 2, 4))  # without options that name a pattern
PRESETS = {"longnet": DilatedPattern.longnet, "gigapath": DilatedPattern.gigapath}


def integers(text: str) -> tuple[int, ...]:
    """Integers separated by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"must be integers separated by commas, got '{text}'") from None


Integers = Sequence[int]  # an abstract type, since typer would take a tuple for several values of one option
HeadsRuleOption = Annotated[
    Literal["all", "grouped"],
    typer.Option(metavar="RULE", help="all: every head runs every branch. grouped: each branch has its own group of heads."),
]
OffsetsOption = Annotated[
    Literal["blocked", "interleaved"],
    typer.Option(
        metavar="RULE", help="Which residue head h of H keeps at rate r. blocked: h // ceil(H / r). interleaved: h mod r."
    ),
]
CausalOption = Annotated[bool, typer.Option("--causal/--no-causal", help="Whether a query sees no key after itself.")]
SegmentLengthsOption = Annotated[
    Integers | None, typer.Option(parser=integers, metavar="N,N", help="Tokens per segment of each branch, comma separated.")
]
DilationRatesOption = Annotated[
    Integers | None,
    typer.Option(
        parser=integers, metavar="N,N", help="Every r-th token of a segment is kept: one rate per segment length, comma separated."
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Tokens of a sliding window, the query's own among them: beside the segments, or alone."),
]
GlobalTokensOption = Annotated[
    int,
    typer.Option(
        min=0, metavar="N", help="First tokens of the sequence, which every query sees: beside segments and window, or alone."
    ),
]
PresetOption = Annotated[
    Literal["causal", "longnet", "gigapath"] | None,
    typer.Option(
        metavar="NAME",
        help="A pattern instead of lengths and rates: causal (for --tokens and key/value heads; add --causal), longnet, gigapath.",
    ),
]
HeadsOption = Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="Query heads H.")]
KvHeadsOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Key/value heads; they divide --heads.", show_default="as many as --heads")
]
PictureOption = Annotated[Path | None, typer.Option("--output", "-o", help="Draw a picture in this .png file.")]
DeviceOption = Annotated[
    str, typer.Option(help="The device, as torch spells it: cpu, cuda, cuda:1, mps. auto: cuda, else mps, else cpu.")
]
CudaDeviceOption = Annotated[str, typer.Option(help="Torch device, or 'auto': CUDA where there is one, else CPU.")]


def _share(text: str | float) -> float:
    """The number 0.1 for `10%` or `0.1`."""
    share = str(text)
    try:
        return float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        raise typer.BadParameter(f"must be a share such as 10% or 0.1, got '{share}'") from None


BudgetOption = Annotated[
    float, typer.Option(parser=_share, metavar="SHARE", help="Largest share of dense attention's pairs.", show_default="10%")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def kv_heads_named(heads: int, kv_heads: int | None) -> int:
    """Key/value heads: as many as query heads by default."""
    if kv_heads is not None and heads % kv_heads:
        refuse(f"--kv-heads must divide --heads={heads}, got {kv_heads}")
    return heads if kv_heads is None else kv_heads


def heads_in_words(heads: int, kv_heads: int) -> str:
    words = f"{heads} head{'s' * (heads != 1)}"
    return words if heads == kv_heads else f"{words}, {kv_heads} key/value head{'s' * (kv_heads != 1)}"


def pattern_named(
    segment_lengths: Integers | None,
    dilation_rates: Integers | None,
    preset: str | None = None,
    *,
    window: int | None = None,
    global_tokens: int = 0,
    default: DilatedPattern = EXAMPLE,
    heads_rule: Literal["all", "grouped"] = "all",
    offsets: Literal["blocked", "interleaved"] = "blocked",
    heads: int,
    tokens: int | None = None,
) -> DilatedPattern:
    """The pattern that the options name, or the default without any, for so many key/value heads and tokens."""
    pattern = default
    if preset is not None:
        if segment_lengths is not None or dilation_rates is not None:
            refuse(f"--preset must come without --segment-lengths and --dilation-rates, got '{preset}' and some of them")
        if preset == "causal" and tokens is None:
            refuse("--preset causal must come with --tokens, got none")
        pattern = PRESETS[preset]() if preset in PRESETS else DilatedPattern.causal(tokens or 1, heads)
    elif segment_lengths is not None and dilation_rates is not None:
        pattern = DilatedPattern(tuple(segment_lengths), tuple(dilation_rates))
    elif segment_lengths is not None or dilation_rates is not None:
        refuse("--segment-lengths and --dilation-rates must come together, got one of them")
    elif window is not None or global_tokens:
        pattern = DilatedPattern(window=window, global_tokens=global_tokens)
    window, global_tokens = pattern.window if window is None else window, global_tokens or pattern.global_tokens
    pattern = replace(pattern, window=window, global_tokens=global_tokens, heads=heads_rule, offsets=offsets)
    pattern.check_heads(heads)
    return pattern


def device_named(name: str, *, auto: Sequence[str] = ("cuda", "mps")) -> torch.device:
    """The device of a name; of "auto" the first kind of `auto` that is there, else the CPU."""
    import torch

    if name == "auto":
        is_there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        return torch.device(next((kind for kind in auto if is_there[kind]), "cpu"))
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch's word for a build without CUDA
        refuse(f"--device must be a device that torch can use here, got '{name}': {first_line(error)}")
    return device


def device_of_rank(name: str) -> torch.device:
    """The CPU, or the GPU of this rank of torchrun."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        refuse(f"--device must be auto, cpu or cuda (a rank takes cuda:LOCAL_RANK) with several ranks, got '{name}'")
    if device_named(name, auto=["cuda"]).type == "cpu":
        return torch.device("cpu")
    device = device_named(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(device)
    return device


def check_picture(output: Path | None) -> None:
    """Reject, before any work, a name that is not one of a picture, and any picture without matplotlib."""
    if output is not None:
        require_matplotlib()
        if output.suffix.lower() != ".png":
            refuse(f"--output must end in .png, got '{output}'")
        if not output.parent.is_dir():
            refuse(f"--output must be in a folder that exists, got '{output}'")


def write_picture(figure: Figure, output: Path, *, as_json: bool = False) -> None:
    """Write a picture and print its name, beside JSON on standard error."""
    write(figure, output)
    typer.echo(f"wrote '{output}'", err=as_json)


def require_matplotlib() -> None:
    """Reject to draw without the extra `plot`, before any work."""
    try:
        check_matplotlib()
    except ImportError as error:
        refuse(str(error))


def print_table(console: Console, table: Table) -> None:
    """Print a table as wide as its numbers are, which are never cut."""
    table.width = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.print(table, soft_wrap=True)
