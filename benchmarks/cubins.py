"""Compile the Triton kernels for GPUs that are not here: registers, spilled stores, shared memory, instructions.

`nox -s cubins` does so for everything that a launch can choose, and fails where a kernel does not fit, spills more than is kept in
`benchmarks/cubins.json`, or lacks the tensor-core instructions of its GPU. `--write` keeps what it finds, there and in
`docs/gpu-kernels.md`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from flexdilated.backends.triton import backward, forward
from flexdilated.backends.triton.launch import options_of
from flexdilated.backends.triton.tiles import Tiles, padded, tiles_of

KEPT = Path(__file__).with_name("cubins.json")
PAGE = Path(__file__).parents[1] / "docs" / "gpu-kernels.md"
BORDERS = "<!-- cubins -->", "<!-- /cubins -->"

LEVELS = (80, 86, 89, 90, 100, 120)
HEAD_DIMS = (32, 48, 64, 96, 128, 256)
DTYPES = {"bf16": 2, "fp32": 4}
KERNELS = {
    "attend": forward.attend,
    "differentiate_keys": backward.differentiate_keys,
    "differentiate_queries": backward.differentiate_queries,
    "prepare": backward.prepare,
}
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes that one program may take
UNKEPT_SPILLS = 64  # stores, where nothing is kept yet
TENSOR_MEMORY = 512  # columns; where a kernel takes more, the compiler says nothing and gives an empty one
TENSOR_CORES = {90: "HGMMA", 100: "UTCHMMA"}  # what 16-bit products must become; elsewhere HMMA
LOADED = re.compile(r"\b(STL|LDL)\b")

# The dearest of what a kernel can be asked for: causal, added to what earlier branches gave.
ASKED = {
    "causal": {"CAUSAL": True, "IGNORES": False, "GROUP": 1},
    "mask, group of 4": {"CAUSAL": True, "IGNORES": True, "GROUP": 4},
}
CONSTANTS = {"END": "merge", "ADDS": True, "WIDE": False, "HAS_DLSE": True, "DETACHED": False}


class Config(NamedTuple):
    kernel: str
    level: int
    head_dim: int
    dtype: str
    asked: str


class Cost(NamedTuple):
    """What the compiler made of a kernel: `spills` are stores in all, `in_loops` stores and loads in loops with products."""

    tiles: Tiles
    registers: int
    spills: int
    in_loops: int
    shared: int
    tensor_columns: int
    products: str


def pretend(level: int) -> None:
    """The compiler asks the driver for nothing but the target."""
    target = GPUTarget("cuda", level, 32)
    properties = {"max_shared_mem": SHARED_MEMORY[level], "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            is_active=lambda: True,
            utils=SimpleNamespace(get_device_properties=lambda device: properties),
        )
    )


def compiled(config: Config, tiles: Tiles) -> Any:
    """The kernel as a launch on such a GPU would compile it."""
    kernel, element = KERNELS[config.kernel], DTYPES[config.dtype]
    pretend(config.level)
    constants = {
        **CONSTANTS,
        **ASKED[config.asked],
        "PRECISION": "ieee" if config.dtype == "fp32" else "tf32",
        "UNIT": min(config.head_dim, 16 // element),
        "D": config.head_dim,
        "BLOCK_D": padded(config.head_dim),
        "BLOCK_M": tiles.queries,
        "BLOCK_N": tiles.keys,
        "ROWS": None,
        "OWN": None,
        "IGNORED": None,
    }
    pointers = {"LSE": "fp32", "DLSE": "fp32", "ROWS": "fp32"}
    if ASKED[config.asked]["IGNORES"]:
        pointers["IGNORED"] = "u8"
    if config.kernel != "attend":
        del constants["ROWS"]
    signature, fixed = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants and name not in (pointers if name != "ROWS" else ()):
            signature[name], fixed[(place,)] = "constexpr", constants[name]
        elif name.isupper():
            signature[name] = f"*{pointers.get(name, config.dtype)}"
        else:
            signature[name] = "fp32" if name.endswith("scale") else "i32"
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", config.level, 32), options=options_of(tiles))


def cost_of(config: Config, tiles: Tiles | None = None) -> Cost:
    """What the compiler made of a kernel with some tiles, or those that a launch takes."""
    if tiles is None:
        tiles = tiles_of(config.kernel, divmod(config.level, 10), config.head_dim, DTYPES[config.dtype])
    result = compiled(config, tiles)
    usage, code = (_dump(result.asm["cubin"], flag) for flag in ("--dump-resource-usage", "-sass"))
    found = re.search(r"REG:(\d+)", usage)
    assert found is not None
    products = {name: len(re.findall(rf"\b{name}\b", code)) for name in ("HGMMA", "UTCHMMA", "HMMA")}
    return Cost(
        tiles,
        int(found[1]),
        len(re.findall(r"\bSTL\b", code)),
        _spilled_in_loops(code),
        result.metadata.shared,
        getattr(result.metadata, "tmem_size", None) or 0,
        next((name for name, count in products.items() if count), "none"),
    )


def _dump(cubin: bytes, flag: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), flag, file.name], capture_output=True, text=True, check=True).stdout


def _spilled_in_loops(code: str) -> int:
    """Spilled stores and loads between a backward jump and its target, where products are computed too."""
    lines = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)]
    jumps = ((at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", what)) for at, what in lines)
    loops = [(int(to[1], 16), at) for at, to in jumps if to is not None and int(to[1], 16) < at]
    inside: set[int] = set()
    for low, high in loops:
        body = [(at, what) for at, what in lines if low <= at <= high]
        if any("MMA" in what for _, what in body):
            inside |= {at for at, what in body if LOADED.search(what)}
    return len(inside)


def faults(config: Config, cost: Cost, most_spills: int) -> Iterator[str]:
    """What is wrong with a kernel."""
    if cost.shared > SHARED_MEMORY[config.level]:
        yield f"takes {cost.shared} bytes of shared memory, more than {SHARED_MEMORY[config.level]}"
    if cost.tensor_columns > TENSOR_MEMORY:
        yield f"takes {cost.tensor_columns} columns of tensor memory, more than {TENSOR_MEMORY}"
    if cost.spills > most_spills:
        yield f"spills {cost.spills} stores, more than the {most_spills} kept"
    wanted = TENSOR_CORES.get(config.level, "HMMA")
    if config.kernel != "prepare" and config.dtype != "fp32" and cost.products != wanted:
        yield f"multiplies by {cost.products}, not {wanted}"


def configs(levels: Iterable[int], head_dims: Iterable[int], dtypes: Iterable[str], kernels: Iterable[str]) -> Iterator[Config]:
    """What is compiled: everything in the causal form; masks and groups, which cost registers, at the usual head dims."""
    for kernel, level, head_dim, dtype in itertools.product(kernels, levels, head_dims, dtypes):
        yield Config(kernel, level, head_dim, dtype, "causal")
        if kernel != "prepare" and dtype == "bf16" and head_dim in (64, 128):
            yield Config(kernel, level, head_dim, dtype, "mask, group of 4")


def table(entries: Iterable[dict[str, Any]]) -> str:
    lines = [
        "| kernel | GPU | D | dtype | asked | queries, keys, warps, stages | registers | spilled (in loops) | shared KiB | by |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for e in entries:
        tiles = ", ".join(map(str, e["tiles"]))
        lines.append(
            f"| {e['kernel']} | sm_{e['level']} | {e['head_dim']} | {e['dtype']} | {e['asked']} | {tiles} | {e['registers']} "
            f"| {e['spills']} ({e['in_loops']}) | {e['shared'] / 1024:.0f} | {e['products']} |"
        )
    return "\n".join(lines)


def write(entries: list[dict[str, Any]]) -> None:
    entries.sort(key=lambda e: [e[name] for name in Config._fields])
    KEPT.write_text("[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n]\n")
    before, rest = PAGE.read_text().split(BORDERS[0])
    _, after = rest.split(BORDERS[1])
    PAGE.write_text(f"{before}{BORDERS[0]}\n{table(entries)}\n{BORDERS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", type=int, nargs="+", default=LEVELS)
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--tiles", type=int, nargs=4, help="try these queries, keys, warps and stages instead of the table's")
    parser.add_argument("--write", action="store_true", help="keep what is found")
    chosen = parser.parse_args()
    kept = {Config(*(e[name] for name in Config._fields)): e for e in json.loads(KEPT.read_text())} if KEPT.exists() else {}
    failed = False
    for config in configs(chosen.levels, chosen.head_dims, chosen.dtypes, chosen.kernels):
        tiles = Tiles(*chosen.tiles) if chosen.tiles else None
        cost = cost_of(config, tiles)
        tries = chosen.write or tiles is not None
        most = sys.maxsize if tries else kept[config]["spills"] if config in kept else UNKEPT_SPILLS
        wrong = list(faults(config, cost, most))
        failed |= bool(wrong)
        print(*config, *cost, "; ".join(wrong), sep="  ", flush=True)
        kept[config] = {**config._asdict(), **cost._asdict()}
    if chosen.write:
        write(list(kept.values()))
    sys.exit(failed)


if __name__ == "__main__":
    main()
