"""The command line: its commands, and the entry point of the process."""

from __future__ import annotations

import io
import sys
import traceback
from typing import Annotated

import typer

from flexdilated._version import __version__
from flexdilated.cli import choose, convert, doctor, explorer, generate, plan, show, slides, train, tune
from flexdilated.cli.refusal import Command, CommandGroup
from flexdilated.training.distributed import is_rank, leave

app = typer.Typer(
    name="flexdilated",
    cls=CommandGroup,
    help="Dilated attention (LongNet) for PyTorch: train a model, draw a pattern, check this machine.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (show.show, doctor.doctor, tune.tune, plan.plan, choose.choose, convert.convert, train.train, generate.generate):
    app.command(cls=Command)(_command)
app.command(cls=Command)(explorer.explorer)
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
    except SystemExit as end:
        if not is_rank():
            raise
        leave(end.code if isinstance(end.code, int) else 0)
    except BaseException:
        if not is_rank():
            raise
        traceback.print_exc()
        leave(1)
