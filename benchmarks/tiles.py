"""Time the Triton kernels of a GPU under other tiles: what `flexdilated/backends/triton/tiles.py` is chosen by.

    python -m benchmarks.tiles --head-dims 128 --kernels attend        # keeps runs/tiles.json
    python -m benchmarks.tiles --tiles 64 64 4 3 --by device host      # queries, keys, warps, stages; by tensor descriptors
    python -m benchmarks.tiles --kernels differentiate_keys --by sums  # by the kernel that computes dq too

LongNet's pattern in bfloat16, not causal unless asked. A kernel's time is the sum over its launches in one call, the median of
several. Candidates are compiled side by side first, which takes about two seconds each.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.environment import provenance, save
from flexdilated import DilatedPattern, dilated_attention
from flexdilated.backends.triton.tiles import MOST_SUMS, TileConfig

OUTPUT = Path("runs/tiles.json")
PATTERN = DilatedPattern.longnet()
NUM_HEADS, ROUNDS = 12, 6
KERNELS = ("attend", "differentiate_keys", "differentiate_queries")
HEAD_DIMS = (64, 128, 256)
WAYS = ("pointers", "device", "host", "sums")
ONLY = {"host": "attend", "sums": "differentiate_keys"}  # the kernel that has this form
SMALL = 512  # tokens of a call that compiles: sizes choose no other compilation
# Of each kernel: what fits an H200 and spills little there (`python -m benchmarks.lab.cubins --tiles ...`).
CANDIDATES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "attend": (
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 32, 4, 2),
        (64, 128, 4, 2),
        (128, 64, 4, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
    ),
    "differentiate_keys": (
        (16, 64, 8, 2),
        (32, 64, 4, 3),
        (32, 64, 8, 2),
        (32, 128, 8, 3),
        (64, 64, 4, 2),
        (64, 128, 8, 2),
        (64, 128, 8, 3),
    ),
    "differentiate_queries": (
        (64, 32, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 32, 8, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
    ),
}


class Candidate(NamedTuple):
    kernel: str
    head_dim: int
    tiles: TileConfig
    is_causal: bool
    sums: bool = False


def candidates(options: argparse.Namespace) -> Iterator[Candidate]:
    """All that are asked for, through pointers and by descriptors of the device or the host; dq by sums, too."""
    for kernel, head_dim in itertools.product(options.kernels, options.head_dims):
        for tiles, by in itertools.product([options.tiles] if options.tiles else CANDIDATES[kernel], options.by):
            if ONLY.get(by, kernel) == kernel and (by != "sums" or head_dim <= MOST_SUMS):
                yield Candidate(kernel, head_dim, TileConfig(*tiles, by != "pointers", by == "host"), options.causal, by == "sums")


@contextmanager
def forced(candidate: Candidate, launched: Callable[..., None] | None = None) -> Iterator[None]:
    """Launches of a kernel take a candidate's tiles; `launched` takes the place of every launch."""
    launch = importlib.import_module("flexdilated.backends.triton.launch")  # imports triton, which need not be there
    tiles_of = launch._tiles

    def chosen(kernel: Any, *arguments: Any, **options: Any) -> TileConfig:
        return candidate.tiles if kernel.__name__ == candidate.kernel else tiles_of(kernel, *arguments, **options)

    with mock.patch.multiple(launch, _tiles=chosen, _launch=launched or launch._launch, SUMS=candidate.sums, PLANS={}):
        yield


def inputs(head_dim: int, num_tokens: int, device: str) -> list[Tensor]:
    """q, k, v, dout."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # triton's interpreter computes no bfloat16
    return [torch.randn(1, num_tokens, NUM_HEADS, head_dim, dtype=dtype, device=device) for _ in range(4)]


def call(candidate: Candidate, x: Sequence[Tensor], pattern: DilatedPattern) -> None:
    """A forward, or for the kernels of the backward both directions."""
    trains = candidate.kernel != "attend"
    with torch.set_grad_enabled(trains):
        leaves = [t.detach().requires_grad_(trains) for t in x[:3]]
        out = dilated_attention(*leaves, pattern, is_causal=candidate.is_causal, backend="triton")
    if trains:
        torch.autograd.grad(out, leaves, x[3])


def compile_one(candidate: Candidate) -> str | None:
    """Leave a candidate's kernels in triton's cache on disk; why it cannot, or None."""
    try:
        with forced(candidate):
            call(candidate, inputs(candidate.head_dim, SMALL, "cuda"), PATTERN)
        torch.cuda.synchronize()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def milliseconds(candidate: Candidate, x: Sequence[Tensor], pattern: DilatedPattern) -> float:
    """The median over some calls of the time in a candidate's kernel."""
    launch = importlib.import_module("flexdilated.backends.triton.launch")
    plain, marks = launch._launch, []

    def timed(kernel: Any, *arguments: Any) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        plain(kernel, *arguments)
        end.record()
        marks.append((kernel.__name__, start, end))

    totals = []
    with forced(candidate, timed):
        for _ in range(1 + ROUNDS):
            marks.clear()
            call(candidate, x, pattern)
            torch.cuda.synchronize()
            total: Counter[str] = Counter()
            for name, start, end in marks:
                total[name] += start.elapsed_time(end)
            totals.append(total[candidate.kernel])
    return statistics.median(totals[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile all candidates, then time them one after another."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--tiles", type=int, nargs=4, help="these queries, keys, warps and stages alone")
    parser.add_argument(
        "--by",
        nargs="+",
        default=list(WAYS),
        choices=WAYS,
        help="how rows are loaded: through pointers, by descriptors of the device or the host; sums: with dq in one kernel",
    )
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--tokens", type=int, default=1 << 17)
    parser.add_argument("--segment", type=int, help="one branch of segments of this length instead of LongNet's five")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1), help="that compile")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--commit", help="of the working tree, where git cannot tell")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("tiles are timed on a CUDA device, torch sees none; `benchmarks.lab.cubins` compiles for absent ones")

    pattern = PATTERN if options.segment is None else DilatedPattern((options.segment,), (1,))
    all_candidates = list(candidates(options))
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        reasons = list(pool.map(compile_one, all_candidates))
    report: dict[str, Any] = {**provenance("tiles", "cuda", words, options.commit), "tokens": options.tokens, "measurements": []}
    x: list[Tensor] = []
    for candidate, reason in zip(all_candidates, reasons, strict=True):
        entry = {**candidate._asdict(), "tiles": candidate.tiles[:4], **dict(zip(("described", "host"), candidate.tiles[4:]))}
        if reason is None:
            if not x or x[0].shape[3] != candidate.head_dim:
                x = inputs(candidate.head_dim, options.tokens, "cuda")
            entry["ms"] = round(milliseconds(candidate, x, pattern), 4)
        report["measurements"].append(entry if reason is None else entry | {"reason": reason})
        save(report, options.output)
    Console().print(table(report))
    return 0


def table(report: dict[str, Any]) -> Table:
    """The candidates of each kernel, the fastest first."""
    rows = Table("kernel", title=f"{report['hardware']}, torch {report['torch']}, triton {report['triton']}, {report['date']}")
    for column in ("D", "queries, keys, warps, stages", "rows by", "ms"):
        rows.add_column(column, justify="right")
    for m in sorted(report["measurements"], key=lambda m: (m["kernel"], m["head_dim"], m.get("ms", float("inf")))):
        tiles, by = ", ".join(map(str, m["tiles"])), "sums" if m["sums"] else WAYS[m["described"] + m["host"]]
        rows.add_row(m["kernel"], str(m["head_dim"]), tiles, by, f"{m['ms']:.3f}" if "ms" in m else m["reason"][:40])
    return rows


if __name__ == "__main__":
    sys.exit(main())
