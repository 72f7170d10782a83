"""`flexdilated doctor`: what `backend="auto"` takes on this machine, what else can run, and whether the numbers are right."""

from __future__ import annotations

from typing import Annotated

import typer

from flexdilated.cli.options import device_named


def doctor(
    device: Annotated[
        str, typer.Option(help="The device to examine, as torch spells it: cpu, cuda, cuda:1, mps. auto: cuda, else mps, else cpu.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what this machine can run and why not, and check every kernel against the definition. Exit code 1 if a check fails.

    The first line says what backend="auto" takes on the device, and why.
    """
    from flexdilated.cli.diagnosis import examine

    if not examine(device_named(device, auto=["cuda", "mps"]), as_json=as_json):
        raise typer.Exit(1)
