"""Options of several commands: their spelling, meaning and errors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from flexdilated.cli.refusal import first_line, refuse
from flexdilated.core.checks import why_not_connected
from flexdilated.core.pattern import MAX_LENGTH as MAX_LENGTH
from flexdilated.core.pattern import DilatedPattern
from flexdilated.draw.figure import write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_HEADS = 1024
EXAMPLE = DilatedPattern((2048, 4096, 8192), (1, 2, 4))  # without options that name a pattern
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class HeadsRule(str, Enum):
    """`DilatedPattern.heads` as the command line spells it."""

    ALL = "all"
    GROUPED = "grouped"


class OffsetsRule(str, Enum):
    """`DilatedPattern.offsets` as the command line spells it."""

    BLOCKED = "blocked"
    INTERLEAVED = "interleaved"


class Preset(str, Enum):
    """Published patterns."""

    LONGNET = "longnet"
    GIGAPATH = "gigapath"

    def published(self) -> DilatedPattern:
        return DilatedPattern.longnet() if self is Preset.LONGNET else DilatedPattern.gigapath()


HeadsRuleOption = Annotated[
    HeadsRule,
    typer.Option(metavar="RULE", help="all: every head runs every branch. grouped: each branch has its own group of heads."),
]
OffsetsOption = Annotated[
    OffsetsRule,
    typer.Option(
        metavar="RULE", help="Which residue head h of H keeps at rate r. blocked: h // ceil(H / r). interleaved: h mod r."
    ),
]
CausalOption = Annotated[bool, typer.Option("--causal/--no-causal", help="Whether a query sees no key after itself.")]
SegmentLengthsOption = Annotated[str | None, typer.Option(help="Tokens per segment of each branch, comma separated.")]
DilationRatesOption = Annotated[
    str | None, typer.Option(help="Every r-th token of a segment is kept: one rate per segment length, comma separated.")
]
PresetOption = Annotated[
    Preset | None, typer.Option(metavar="NAME", help="A published pattern instead of lengths and rates: longnet, gigapath.")
]
HeadsOption = Annotated[int, typer.Option(min=1, metavar="N", help="Query heads H.")]
KvHeadsOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Key/value heads; they divide --heads.", show_default="as many as --heads")
]
PictureOption = Annotated[Path | None, typer.Option("--output", "-o", help="Draw a picture in this .png file.")]


def connection(pattern: DilatedPattern, tokens: int, kv_heads: int) -> str:
    """Whether causal information crosses all boundaries, in one line."""
    why = why_not_connected(pattern, tokens, kv_heads)
    return "connected: causal information crosses all boundaries" if why is None else why


def kv_heads_named(heads: int, kv_heads: int | None, most: int = MOST_HEADS) -> int:
    """Key/value heads: as many as query heads by default."""
    at_most("--heads", heads, most)
    if kv_heads is not None and heads % kv_heads:
        refuse(f"--kv-heads must divide --heads={heads}, got {kv_heads}")
    return heads if kv_heads is None else kv_heads


def at_most(option: str, value: int, most: int) -> None:
    """Reject a number above `most`: as a range of the option, a long number would make the help too wide."""
    if value > most:
        refuse(f"{option} must be at most {most}, got {value}")


def heads_in_words(heads: int, kv_heads: int) -> str:
    words = f"{heads} head{'s' * (heads != 1)}"
    return words if heads == kv_heads else f"{words}, {kv_heads} key/value head{'s' * (kv_heads != 1)}"


def pattern_named(
    segment_lengths: str | None,
    dilation_rates: str | None,
    preset: Preset | None,
    *,
    default: DilatedPattern | None = None,
    heads_rule: HeadsRule,
    offsets: OffsetsRule,
    heads: int,
) -> DilatedPattern:
    """The pattern that the options name, or the default without any, for so many key/value heads."""
    try:
        if preset is None and segment_lengths is None and dilation_rates is None and default is not None:
            pattern = default
        elif preset is None:
            if segment_lengths is None or dilation_rates is None:
                missing = "--segment-lengths" if segment_lengths is None else "--dilation-rates"
                refuse(f"{missing} must be given with the other of --segment-lengths and --dilation-rates, got none")
            pattern = DilatedPattern(integers("--segment-lengths", segment_lengths), integers("--dilation-rates", dilation_rates))
        else:
            for option, text in (("--segment-lengths", segment_lengths), ("--dilation-rates", dilation_rates)):
                if text is not None:
                    refuse(f"{option} must not be given with --preset={preset.value}, got {text}")
            pattern = preset.published()
        pattern = replace(pattern, heads=heads_rule.value, offsets=offsets.value)
        pattern.check_heads(heads)
    except (TypeError, ValueError, NotImplementedError) as error:
        refuse(error)
    return pattern


def python_of(pattern: DilatedPattern) -> str:
    """A pattern as a line of Python: its lengths and rates, and what differs from the defaults."""
    usual = DilatedPattern(pattern.segment_lengths, pattern.dilation_rates)
    names = ("heads", "offsets", "zero_padding", "detach_weights")
    values = {name: getattr(pattern, name) for name in names if getattr(pattern, name) != getattr(usual, name)}
    more = "".join(f", {name}={value!r}" for name, value in values.items())
    return f"DilatedPattern({pattern.segment_lengths}, {pattern.dilation_rates}{more})"


def integers(option: str, text: str) -> tuple[int, ...]:
    """Integers separated by commas."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        refuse(f"{option} must be integers separated by commas, got '{text}'")
    if max(values) > MAX_LENGTH:
        refuse(f"{option} must be at most {MAX_LENGTH}, got {max(values)}")
    return values


DocumentLengthsOption = Annotated[
    str | None,
    typer.Option(help="Tokens of packed documents, as in cu_seqlens: comma separated, --tokens in all. Default: one document."),
]


def documents_named(text: str | None, tokens: int) -> tuple[int, ...]:
    """The lengths of `--document-lengths`; of one document where there is none."""
    documents = (tokens,) if text is None else integers("--document-lengths", text)
    least, total = min(documents), sum(documents)
    if least < 0 or total != tokens:
        refuse(f"--document-lengths must add up to --tokens={tokens}, each at least 0, got {total}, the least {least}")
    return documents


CudaDeviceOption = Annotated[str, typer.Option(help="Torch device, or 'auto': CUDA where there is one, else CPU.")]


def device_named(name: str, *, auto: Sequence[str]) -> torch.device:
    """The device of a name; of "auto" the first kind of `auto` that is there, else the CPU."""
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
    if name not in ("auto", "cpu", "cuda"):
        refuse(f"--device must be auto, cpu or cuda (a rank takes cuda:LOCAL_RANK) with several ranks, got '{name}'")
    if device_named(name, auto=["cuda"]).type == "cpu":
        return torch.device("cpu")
    device = device_named(f"cuda:{os.environ['LOCAL_RANK']}", auto=[])
    torch.cuda.set_device(device)
    return device


def dtype_named(name: str, choices: Sequence[str] = tuple(DTYPES)) -> torch.dtype:
    """The dtype of a name, one of `choices`."""
    if name not in choices:
        refuse(f"--dtype must be one of {', '.join(choices)}, got '{name}'")
    return DTYPES[name]


def spelled(*dtypes: torch.dtype) -> str:
    """As options spell them."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_picture(output: Path | None) -> None:
    """Reject a name that is not one of a picture, and any picture without matplotlib."""
    if output is None:
        return
    require_matplotlib()
    if output.suffix.lower() != ".png":
        refuse(f"--output must end in .png, got '{output}'")
    if not output.parent.exists():
        refuse(f"--output must be a file that can be written, got '{output}': No such file or directory")


def require_matplotlib() -> None:
    """Reject to draw without the extra `plot`, before any work."""
    if find_spec("matplotlib") is None:
        refuse("matplotlib must be installed for pictures, got none; pip install 'flexdilated[plot]'")


def save_picture(figure: Figure, output: Path) -> None:
    """Write a picture, or refuse."""
    with writing(output):
        write(figure, output)


def print_table(console: Console, table: Table) -> None:
    """Print a table as wide as its numbers are, which are never cut."""
    table.width = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.print(table, soft_wrap=True)


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Reject where the file cannot be written in the block."""
    try:
        yield
    except OSError as error:
        refuse(f"--output must be a file that can be written, got '{output}': {error.strerror or error}")
