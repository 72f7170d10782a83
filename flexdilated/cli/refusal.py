"""How a command ends where the user must change something: one line on standard error, exit code 2."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from flexdilated.training.options import UserError

SHORTER = {"num_heads": "--heads", "num_layers": "--layers", "sequence_length": "--tokens"}  # longer names in Python

# Names of arguments, and what Python prints of an object, in which they stay.
NAMES = re.compile(r"\b[A-Z]\w*\((?:[^()]|\([^()]*\))*\)|\b[a-z]+(?:_[a-z]+)+\b")

# click's, of which newer versions of typer hold a copy.
ClickException: Any = typer.BadParameter.__mro__[2]


def refuse(message: str) -> NoReturn:
    """End the command with `error: <message>`."""
    raise UserError(message)


def first_line(error: BaseException) -> str:
    """The first line of the text of an error, or the name of its class if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Command(TyperCommand):
    """A command that prints an error of its arguments in one line, in which each argument is called what its option is."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (UserError, ValueError, NotImplementedError) as error:
            names = [name for parameter in self.params for name in parameter.opts]
            options = {argument: option for argument, option in SHORTER.items() if option in names}
            options |= {name.removeprefix("--").replace("-", "_"): name for name in names}
            _print(NAMES.sub(lambda match: options.get(match[0], match[0]), str(error)))
            raise typer.Exit(2) from None


class CommandGroup(TyperGroup):
    """Commands whose errors of usage and of files are one line: no box, no traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        options["standalone_mode"] = False
        if not standalone_mode:
            return super().main(*args, **options)
        try:
            # Where a command raises typer.Exit, its code is what comes back.
            raise SystemExit(super().main(*args, **options) or 0)
        except ClickException as error:
            context = getattr(error, "ctx", None)
            advice = "" if context is None else f"; see {context.command_path} --help"
            _print(error.format_message().replace("Value error, ", "").rstrip(".") + advice)
        except OSError as error:
            _print(f"{error.filename or 'the output'} must be a file that can be read or written, got: {error.strerror or error}")
        raise SystemExit(2)


def _print(message: str) -> None:
    typer.echo("error: " + " ".join(message.split()), err=True)
