"""How many functions of the package one call passes, in how many calls: on one device, and on each of two ranks.

    python -m benchmarks.steps

A count of Python's own calls, by `sys.setprofile`: no clock, and the same on every machine. First a call whose plans are made, then
one for which everything is kept, and its backward.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

import flexdilated
from benchmarks.ranks import Ranks
from flexdilated import DilatedPattern, dilated_attention

PACKAGE = f"{Path(flexdilated.__file__).parent}/"
INLINE = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")  # frames of their own in some versions of Python only
NUM_TOKENS, NUM_HEADS, HEAD_DIM = 1024, 8, 16
PATTERN, WINDOW = DilatedPattern.causal(NUM_TOKENS, NUM_HEADS), DilatedPattern((NUM_TOKENS,), (4,), window=32)

Steps = Counter[tuple[str, str, int]]  # calls of each function: file, name, line


def steps_of(work: Callable[[], object]) -> Steps:
    """The functions of the package that some work passes, and how often."""
    steps: Steps = Counter()

    def see(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in INLINE:
            steps[code.co_filename.removeprefix(PACKAGE), code.co_name, code.co_firstlineno] += 1

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return steps


def measure(mesh: DeviceMesh | None = None, pattern: DilatedPattern = PATTERN) -> dict[str, Steps]:
    """The steps of a first call, a second call and its backward, of this rank's shard where there is a mesh."""
    shape = (1, NUM_TOKENS // (1 if mesh is None else mesh.size()), NUM_HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    outs: list[torch.Tensor] = []

    def forward() -> None:
        outs.append(dilated_attention(q, k, v, pattern, is_causal=True, mesh=mesh))

    steps = {"first call": steps_of(forward)}
    outs.pop().sum().backward()
    steps["second call"] = steps_of(forward)
    loss = outs.pop().sum()
    return steps | {"backward": steps_of(loss.backward)}


def main() -> None:
    """Print the table; `--functions` prints each function too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--functions", action="store_true", help="each function and how often it is called")
    shows_functions = parser.parse_args().functions
    table = Table(title=f"causal({NUM_TOKENS}, {NUM_HEADS}), head dim {HEAD_DIM}")
    for column in ("", "files", "functions", "calls"):
        table.add_column(column, justify="left" if not column else "right")
    console = Console()
    with Ranks(2) as ranks:
        over_two, _ = ranks(measure)
    for name, steps_of_call in (("one process", measure()), ("a window", measure(pattern=WINDOW)), ("two ranks", over_two)):
        for call, steps in steps_of_call.items():
            files = len({file for file, _, _ in steps})
            table.add_row(f"{name}, {call}", str(files), str(len(steps)), str(steps.total()))
            if shows_functions:
                console.print(f"{name}, {call}:")
                for (file, function, line), times in sorted(steps.items()):
                    console.print(f"  {times:4} {file}:{line} {function}", highlight=False, markup=False)
    console.print(table)


if __name__ == "__main__":
    main()
