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
        found = run(
            place,
            dtypes=None if dtype is None else [getattr(torch, dtype)],
            head_dims=None if head_dim is None else [head_dim],
            everything=everything,
            progress=lambda text, share: bar.update(task, description=text, completed=share),
        )
    if as_json:
        path = None if found.path is None else str(found.path)
        report = {"reason": found.reason, "path": path, "is_complete": found.is_complete, "kept": found.kept}
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(found)
    if not found.is_complete:
        raise typer.Exit(130)  # as shells say it of Ctrl-C


def _print(found: Tuning) -> None:
    from flexdilated.tuning.run import chosen

    if found.kept is None:
        typer.echo(found.reason)
        return
    console = Console()
    wrong = {f"{c['candidate']}, {c['form']}, {c['case']}: {c['found']}" for c in found.kept["checks"] if c["found"] != "right"}
    console.print(*sorted(wrong), sep="\n", markup=False, soft_wrap=True)
    columns = ("dtype", "D", "call", "tokens", "sdpa, ms", "auto, ms", "of dense rate", "auto takes")
    table = Table(*columns)
    for entry in found.kept["measured"]:
        call, name = "training" if entry["training"] else "inference", chosen(found.kept, entry)
        times = [f"{entry['ms'][each]:,.2f}" for each in ("sdpa", name)]
        rate = f"{entry['of_dense']:.0%}" if "of_dense" in entry else "-"
        setting = (entry["dtype"], str(entry["head_dim"]), call, f"{entry['tokens']:,}")
        table.add_row(*setting, *times, rate, name)
    options.print_table(console, table)
    console.print(
        f"kept in {found.path}" if found.path else "nothing is kept", "" if found.is_complete else "(interrupted)", soft_wrap=True
    )
