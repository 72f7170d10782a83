"""`flexdilated doctor --roofline`: what engines for GPUs compute and move for published patterns, and the least time of that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from flexdilated.backends.flex.cost import Shape
from flexdilated.backends.roofline import DEVICES, ENGINES, Device, Engine, Work, seconds, useful_flops, work
from flexdilated.core.pattern import DilatedPattern

# As the benchmarks take them: GigaPath's branches without torchscale's zero keys and constant weights.
PATTERNS = {
    "longnet": DilatedPattern.longnet(),
    "gigapath": replace(DilatedPattern.gigapath(), zero_padding=False, detach_weights=False),
}
TOKENS = (1 << 15, 1 << 17, 1 << 20)
HEADS = 12
HEAD_DIMS = (64, 128)
DIRECTIONS = ("forward", "backward")

EXPLANATION = """\
each cell of a device: a lower bound in ms / an upper bound in useful TFLOP/s, from published peaks. A launch counts as the
  longer of its arithmetic and its memory traffic; caches and the launch itself are left out. Real kernels are slower
useful: 4 D operations per (query, key) pair of the pattern forward, 10 D backward
launches: a kernel of a library, or an operation of torch, is one
not causal, one sequence, 12 heads; bfloat16, and float16 on T4"""


def roofline(*, as_json: bool) -> None:
    """Print the model of every engine."""
    if as_json:
        devices = [device._asdict() for device in DEVICES]
        typer.echo(json.dumps({"devices": devices, "settings": [_as_json(*setting) for setting in _settings()]}, indent=2))
        return
    console = Console()
    console.print(EXPLANATION, soft_wrap=True)
    for name, shape in _settings():
        console.print(_table(name, shape))
    for device in DEVICES:
        rates = f"{device.flops_per_second / 1e12:g} TFLOP/s, {device.bytes_per_second / 1e12:g} TB/s"
        console.print(f"{device.name}: {rates} ({device.source})", soft_wrap=True)


def _settings() -> Iterator[tuple[str, Shape]]:
    for name in PATTERNS:
        for head_dim in HEAD_DIMS:
            for num_tokens in TOKENS:
                yield name, Shape(1, num_tokens, HEADS, HEADS, head_dim, 2, False)


def _table(name: str, shape: Shape) -> Table:
    useful = useful_flops(PATTERNS[name], shape)
    title = (
        f"{name}, {shape.num_tokens:,} tokens, D = {shape.head_dim}: {useful[0] / 1e12:.3g} + {useful[1] / 1e12:.3g} useful TFLOP"
    )
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for column in ("engine", "", "GB", "launches", *(device.name for device in DEVICES)):
        table.add_column(column, no_wrap=True, justify="left" if column in ("engine", "") else "right")
    for engine in ENGINES:
        for direction, flops, found in zip(DIRECTIONS, useful, work(engine, PATTERNS[name], shape)):
            bounds = (_bound(engine, found, flops, device) for device in DEVICES)
            first = engine.name if direction == "forward" else ""
            table.add_row(first, direction[:4], f"{found.bytes / 1e9:.4g}", str(found.launches), *bounds)
    return table


def _bound(engine: Engine, found: Work, useful: int, device: Device) -> str:
    if device.capability < engine.capability:
        return "-"
    least = seconds(found, device)
    milliseconds = f"{least * 1e3:.3g}" if least < 1.0 else f"{least * 1e3:.0f}"
    return f" {milliseconds}/{useful / least / 1e12:.0f}"


def _as_json(name: str, shape: Shape) -> dict[str, Any]:
    """Times of null: the engine does not run there."""
    pattern = PATTERNS[name]
    useful = dict(zip(DIRECTIONS, useful_flops(pattern, shape)))
    engines = []
    for engine in ENGINES:
        for direction, found in zip(DIRECTIONS, work(engine, pattern, shape)):
            least = {d.name: None if d.capability < engine.capability else seconds(found, d) for d in DEVICES}
            row = {"engine": engine.name, "direction": direction, "flops": found.flops, "bytes": found.bytes}
            engines.append({**row, "launches": found.launches, "least_seconds": least})
    return {"pattern": pattern.to_dict(), "name": name, **shape._asdict(), "useful_flops": useful, "engines": engines}
