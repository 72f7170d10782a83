"""Compile FlexAttention's kernels for GPUs that are not here, with torch's tiles and with ours: registers, spills, shared memory.

`python -m benchmarks.lab.flex_cubins` prints the kernels of a call as inductor does for such a GPU, and compiles them with the
assembler that triton brings. It needs a torch that was built for CUDA, and no GPU. It fails where ours do not fit, or spill more
than is kept in `benchmarks/lab/flex_cubins.json`; `--write` keeps what it finds, there and in `docs/gpu-kernels.md`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

import flexdilated.backends.flex.backend
from benchmarks.lab import cubins
from flexdilated import DilatedPattern
from flexdilated.attention import attend
from flexdilated.backends.flex import kernel
from flexdilated.core import dispatch_key
from flexdilated.core.call import Call
from flexdilated.core.hardware import Hardware
from flexdilated.masks import block_mask
from tests.backends import printed_kernels
from tests.backends.absent_gpu import SHARED_MEMORY

KEPT = Path(__file__).with_name("flex_cubins.json")
BORDERS = "<!-- flex cubins -->", "<!-- /flex cubins -->"
LEVELS = tuple(SHARED_MEMORY)
HEAD_DIMS = (64, 128, 256)
LAYOUTS = ("packed", "fused")
CHOOSERS = ("torch", "flexdilated")
BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1")  # of the backward's other half, the same the other way round
PATTERN = DilatedPattern((256, 512, 1024), (1, 2, 4))
NUM_TOKENS, HEADS = 4096, 4


class Config(NamedTuple):
    level: int
    head_dim: int
    layout: str
    tiles_by: str


class Cost(NamedTuple):
    """What the compiler made of a kernel; `spills` and `in_loops` as in `benchmarks.lab.cubins`."""

    direction: str
    blocks: list[int]
    num_warps: int
    num_stages: int
    registers: int
    spills: int
    in_loops: int
    shared: int


class Collector(printed_kernels.Printer):
    """Keeps the printed kernels, and runs none."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kernels: list[tuple[Any, dict[str, Any]]] = []

    def __getattr__(self, kind: str) -> Any:
        if kind.startswith("_"):
            raise AttributeError(kind)

        def keep(*_: Any, **options: Any) -> Any:
            def decorate(function: Any) -> Any:
                if kind == "template":
                    self.kernels.append((function, options))
                return function

            return decorate

        return keep

    def lower(self, *arguments: Any, **options: Any) -> Any:
        super().lower(*arguments, **options)
        from torch._functorch.aot_autograd import make_boxed_func

        return make_boxed_func(_stop)


class PrintedError(Exception):
    """There is nothing more to see."""


def _stop(*arguments: Any) -> None:
    raise PrintedError


def kernels_of(config: Config, dtype: torch.dtype) -> list[tuple[Any, dict[str, Any]]]:
    """The printed forward and backward kernels of a call, and what inductor asks the compiler for."""
    hardware = Hardware("cuda", divmod(config.level, 10), has_fast_bfloat16=True)
    q, k, v = (torch.zeros(1, NUM_TOKENS, HEADS, config.head_dim, dtype=dtype, requires_grad=True) for _ in range(3))
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        stack.enter_context(mock.patch.object(printed_kernels, "Printer", Collector))
        printer: Any = stack.enter_context(printed_kernels.printing(config.level, Path(folder)))

        def call(q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, block_mask: Any, scale: float, **_: Any) -> Any:
            torch._dynamo.reset()
            run = torch.compile(lambda *x, **y: flex_attention(*x, **y), fullgraph=True, backend=printed_kernels.backend(printer))
            kernel_options = (
                kernel.options_of(q, scored=score_mod is not None) if config.tiles_by == "flexdilated" else kernel.SHORT_QUERIES
            )
            options = {"kernel_options": kernel_options, "return_aux": AuxRequest(lse=True)}
            return run(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, **options)

        for owner, name, value in (
            (flexdilated.backends.flex.backend, "_on_cpu", lambda q: False),
            (flexdilated.backends.flex.backend, "choose_layout", lambda pattern, shape: config.layout),
            (kernel, "call", call),
            (kernel, "detect", lambda device: hardware),
            (dispatch_key, "detect", lambda device: hardware),
            (
                block_mask,
                "_full_width",
                lambda flat, heads, rows, width, columns: flat[: heads * rows * width].view(heads, rows, width),
            ),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        block_mask._find_lists.cache_clear()
        try:
            attend(q, k, v, Call(PATTERN, is_causal=True, backend="flex"))
        except PrintedError:
            pass
        finally:
            block_mask._find_lists.cache_clear()
        return printer.kernels


def costs_of(config: Config, dtype: torch.dtype) -> Iterator[Cost]:
    """What the compiler makes of each of them."""
    for function, options in kernels_of(config, dtype):
        cubins.pretend(config.level)
        meta, names = options["triton_meta"], function.arg_names
        constants = {key if isinstance(key, tuple) else (names.index(key),): value for key, value in meta["constants"].items()}
        source = cubins.ASTSource(fn=function, signature=meta["signature"], constexprs=constants, attrs=meta["configs"][0])
        compiler_options = {name: options[name] for name in ("num_warps", "num_stages")}
        result = cubins.triton.compile(source, target=cubins.GPUTarget("cuda", config.level, 32), options=compiler_options)
        registers, spills, in_loops = cubins.read(result.asm["cubin"])
        sizes = dict(re.findall(r"^    (BLOCK_[MN]\d?) *: *tl\.constexpr = (\d+)", function.src, re.M))
        blocks = [int(sizes[name]) for name in BLOCKS if name in sizes]
        direction = "backward" if "backward" in function.__name__ else "forward"
        yield Cost(direction, blocks, *compiler_options.values(), registers, spills, in_loops, result.metadata.shared)


def table(entries: list[dict[str, Any]]) -> str:
    """Torch's tiles and ours, side by side where they differ."""
    lines = [
        "| GPU | D | layout | direction | torch's: warps, stages | registers | spilled (in loops) | shared KiB "
        "| ours: warps, stages | registers | spilled (in loops) | shared KiB |",
        "|---" * 12 + "|",
    ]
    pairs: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for e in entries:
        pairs.setdefault((e["level"], e["head_dim"], e["layout"], e["direction"]), {})[e["tiles_by"]] = e
    for (level, head_dim, layout, direction), by in pairs.items():
        rows = {owner: _row(by[owner]) for owner in ("torch", "flexdilated")}
        if len(set(rows.values())) > 1:
            lines.append(f"| sm_{level} | {head_dim} | {layout} | {direction} | {' | '.join(rows.values())} |")
    return "\n".join(lines)


def _row(e: dict[str, Any]) -> str:
    tiles = f"{' x '.join(map(str, e['blocks']))}, {e['num_warps']}, {e['num_stages']}"
    return f"{tiles} | {e['registers']} | {e['spills']} ({e['in_loops']}) | {e['shared'] / 1024:.0f}"


def faults(config: Config, cost: Cost, most_spills: int | None) -> Iterator[str]:
    """What is wrong with a kernel that has our tiles."""
    return cubins.memory_faults(config.level, cost.spills, cost.shared, most_spills)


def write(entries: list[dict[str, Any]]) -> None:
    entries.sort(key=lambda e: [e["level"], e["head_dim"], LAYOUTS.index(e["layout"]), e["direction"] != "forward", e["tiles_by"]])
    KEPT.write_text("[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n]\n")
    cubins.show(BORDERS, table(entries))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", type=int, nargs="+", default=LEVELS, choices=LEVELS)
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--float32", action="store_true", help="of float32 instead, of which nothing is kept")
    parser.add_argument("--write", action="store_true", help="keep what is found")
    chosen = parser.parse_args()
    if chosen.float32 and chosen.write:
        parser.error("--write must come without --float32")
    names = (*Config._fields, "direction")
    baseline = {tuple(e[name] for name in names): e for e in json.loads(KEPT.read_text())} if KEPT.exists() else {}
    failed = False
    for config in map(Config._make, itertools.product(chosen.levels, chosen.head_dims, chosen.layouts, CHOOSERS)):
        for cost in costs_of(config, torch.float32 if chosen.float32 else torch.bfloat16):
            key = (*config, cost.direction)
            most = (
                sys.maxsize
                if chosen.write or chosen.float32 or config.tiles_by == "torch"
                else baseline[key]["spills"]
                if key in baseline
                else None
            )
            wrong = list(faults(config, cost, most))
            failed |= bool(wrong)
            print(*config, *cost, "; ".join(wrong), sep="  ", flush=True)
            baseline[key] = {**config._asdict(), **cost._asdict()}
        if chosen.write and all(
            (*config[:3], by, direction) in baseline for by in CHOOSERS for direction in ("forward", "backward")
        ):
            write(list(baseline.values()))
    sys.exit(failed)


if __name__ == "__main__":
    main()
