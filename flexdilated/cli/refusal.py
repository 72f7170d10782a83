"""How every command refuses: one line, exit code 2; and how it ends where nobody reads on, or Ctrl-C is pressed."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

SHORTER = {"num_heads": "--heads", "sequence_length": "--tokens"}  # options whose arguments in Python have longer names

# What the command that runs calls an argument of Python's: {"embed_dim": "--embed-dim", "num_heads": "--heads"}.
_options: ContextVar[Mapping[str, str] | None] = ContextVar("_options", default=None)

# Names of arguments, and what Python prints of an object, in which they stay.
NAMES = re.compile(r"\b[A-Z]\w*\((?:[^()]|\([^()]*\))*\)|\b[a-z]+(?:_[a-z]+)+\b")
INTERRUPTED = 130  # the exit code of a command that Ctrl-C ends: 128 + SIGINT

# click's, of which newer versions of typer hold a copy.
ClickException: Any = typer.BadParameter.__mro__[2]


def refuse(message: object) -> NoReturn:
    """End the command with `error: <message>`, in which arguments are called what the command's options are."""
    options = _options.get() or {}
    line = " ".join(str(message).splitlines())
    typer.echo("error: " + NAMES.sub(lambda found: options.get(found[0], found[0]), line), err=True)
    raise typer.Exit(2)


def first_line(error: BaseException) -> str:
    """The first line of the text of an error, or the name of its class if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Command(TyperCommand):
    """A command whose refusals call arguments what its options are called."""

    def invoke(self, ctx: Any) -> Any:
        names = [name for parameter in self.params for name in parameter.opts]
        python = {argument: option for argument, option in SHORTER.items() if option in names}
        token = _options.set(python | {name.removeprefix("--").replace("-", "_"): name for name in names})
        try:
            return super().invoke(ctx)
        finally:
            _options.reset(token)


class Group(TyperGroup):
    """Commands that end with an exit code and one line of what is wrong: no box, no traceback of a user's mistake."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        if not os.environ.get("COLUMNS", "1").strip("0"):  # what some shells say of no terminal: rich would print nothing
            del os.environ["COLUMNS"]
        if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
            sys.stdout.reconfigure(errors="replace")  # what the terminal cannot write
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            # Where a command raises typer.Exit, its code is what comes back.
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra) or 0
            if sys.stdout is not None:  # as where the shell has closed it
                sys.stdout.flush()
        except ClickException as error:
            context = getattr(error, "ctx", None)
            advice = "" if context is None else f"; see {context.command_path} --help"
            code = _refused(" ".join(error.format_message().split()).rstrip(".") + advice)
        except BrokenPipeError:
            _close_stdout()
            code = 1
        except OSError as error:
            if error.filename is None:  # the disk is full behind standard output
                _close_stdout()
            where = "standard output" if error.filename is None else f"'{error.filename}'"
            code = _refused(f"{where} must be there and writable, got: {error.strerror}")
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("error: stopped by Ctrl-C", err=True)
            raise typer.Exit(INTERRUPTED) from None


def _refused(message: str) -> int:
    with suppress(typer.Exit):
        refuse(message)
    return 2


def _close_stdout() -> None:
    """What is still in the buffer goes nowhere: the interpreter would try once more and complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
