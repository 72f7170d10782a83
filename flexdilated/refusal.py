"""How every command refuses: one line on standard error, exit code 2."""

from __future__ import annotations

from typing import NoReturn

import typer

__all__ = ["refuse"]


def refuse(message: object) -> NoReturn:
    """End the command with `error: <message>`."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)
