"""The command line: its commands, and the entry point of the process.

Files of commands import torch, and modules that import torch, inside functions: help and usage errors do not load torch.
"""

from __future__ import annotations

import io
import sys
import traceback
from typing import Annotated

import typer

from flexdilated._version import __version__
from flexdilated.cli import choose, convert, doctor, explorer, generate, plan, show, slides, train, tune
from flexdilated.cli.refusal import Command, CommandGroup

app = typer.Typer(
    name="flexdilated",
    cls=CommandGroup,
    help="Dilated attention (LongNet) for PyTorch: train a model, draw a pattern, check this machine.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _module in (show, doctor, tune, plan, choose, explorer, convert, train, generate):
    app.command(cls=Command)(getattr(_module, _module.__name__.rpartition(".")[2]))
app.add_typer(slides.app)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """The entry point of `flexdilated`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # or a terminal of few characters ends a command
    try:
        app(sys.argv[1:] or ["--help"])
    except BaseException as end:
        if "torch.distributed" not in sys.modules:
            raise
        from flexdilated.training.distributed import is_rank, leave

        if not is_rank():
            raise
        if isinstance(end, SystemExit):
            leave(end.code if isinstance(end.code, int) else 0)
        traceback.print_exc()
        leave(1)
