"""`flexdilated tune`: measure the backends on this GPU, for `backend="auto"`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flexdilated.cli import options

if TYPE_CHECKING:
    from flexdilated.tuning import Tuning


def tune(
    device: options.DeviceOption = "auto",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Of the inputs.", show_default="the recommended one of the GPU"),
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, metavar="N", help="Elements per head.", show_default="64 and 128")] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Three dtypes, head dims 64, 128 and 256, a longer sequence, and FlexAttention; much longer."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Check and time the backends on a GPU, and keep what is right and faster for backend="auto".

    An estimated 2 to 4 minutes for one dtype and two head dims. Ctrl-C keeps what is done. The results are for this GPU and these
    versions of torch, CUDA, triton, flash-attn, the driver and this library, in a file of ~/.cache/flexdilated.
    """
    import torch

    from flexdilated.backends.measured import ESTIMATE
    from flexdilated.tuning import tune as run

    place = options.device_named(device)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(ESTIMATE, total=1.0)
        tuning = run(
            place,
            dtypes=None if dtype is None else [getattr(torch, dtype)],
            head_dims=None if head_dim is None else [head_dim],
            everything=everything,
            progress=lambda text, share: bar.update(task, description=text, completed=share),
        )
    if as_json:
        path = None if tuning.path is None else str(tuning.path)
        report = {"reason": tuning.reason, "path": path, "is_complete": tuning.is_complete, "kept": tuning.content}
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(tuning)
    if not tuning.is_complete:
        raise typer.Exit(130)  # as shells say it of Ctrl-C


def _print(tuning: Tuning) -> None:
    from flexdilated.tuning.run import chosen

    if tuning.content is None:
        typer.echo(tuning.reason)
        return
    console = Console()
    wrong = {f"{c['candidate']}, {c['form']}, {c['case']}: {c['found']}" for c in tuning.content["checks"] if c["found"] != "right"}
    console.print(*sorted(wrong), sep="\n", markup=False, soft_wrap=True)
    columns = ("dtype", "D", "call", "tokens", "sdpa, ms", "auto, ms", "of dense rate", "auto takes")
    table = Table(*columns)
    for entry in tuning.content["measured"]:
        call, name = "training" if entry["training"] else "inference", chosen(tuning.content, entry)
        times = [f"{entry['ms'][backend]:,.2f}" for backend in ("sdpa", name)]
        rate = f"{entry['of_dense']:.0%}" if "of_dense" in entry else "-"
        setting = (entry["dtype"], str(entry["head_dim"]), call, f"{entry['tokens']:,}")
        table.add_row(*setting, *times, rate, name)
    options.print_table(console, table)
    console.print(
        f"kept in {tuning.path}" if tuning.path else "nothing is kept",
        "" if tuning.is_complete else "(interrupted)",
        soft_wrap=True,
    )
