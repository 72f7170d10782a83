"""Compile the Triton kernels for GPUs that are not here: registers, spilled stores, shared memory, instructions.

`nox -s cubins` does so for everything that a launch can choose. It fails where a kernel does not fit, spills more than
`benchmarks/lab/cubins.json` keeps for the installed triton, lacks the tensor-core instructions of its GPU, or has a fault that
`benchmarks/lab/sass.py` finds in loops. `--write` keeps the spills of each kernel after its compilation, and
`--missing` continues a run that was stopped.
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

from benchmarks.lab import sass
from flexdilated.backends.triton import backward, forward, merging
from flexdilated.backends.triton.launch import options_of
from flexdilated.backends.triton.places import BAND
from flexdilated.backends.triton.tiles import MOST_SUMS, TileConfig, ahead_tiles, longer, padded, tiles_of, unmeasured_tiles
from tests.backends.absent_gpu import SHARED_MEMORY

KEPT = Path(__file__).with_name("cubins.json")
PAGE = Path(__file__).parents[2] / "docs" / "gpu-kernels.md"
BORDERS = "<!-- cubins -->", "<!-- /cubins -->"

LEVELS = tuple(level for level in SHARED_MEMORY if level != 89)  # sm_89 gets the tiles and the code of sm_86
HEAD_DIMS = (32, 48, 64, 96, 128, 256)
USUAL_HEAD_DIMS = (64, 128)
DTYPES = {"bf16": 2, "fp32": 4, "tf32": 4, "fp16": 2}  # bytes of an element; tf32: float32 where torch allows TensorFloat-32
KEPT_DTYPES = ("bf16", "fp32", "tf32")  # float16 takes the tiles of bfloat16, and registers within a few
KERNELS = {
    "attend": forward.attend,
    "differentiate_keys": backward.differentiate_keys,
    "differentiate_queries": backward.differentiate_queries,
    "prepare": backward.prepare,
    "join_rows": merging.join_rows,
}
PASSES = ("prepare", "join_rows")  # over rows, without products
TENSOR_MEMORY = 512  # columns; where a kernel takes more, the compiler says nothing and gives an empty one
PRODUCTS = {"HGMMA": "wgmma.mma_async", "UTCHMMA": "tcgen05.mma", "HMMA": "mma.sync"}  # instructions, and how PTX writes them
TENSOR_CORES = {90: "HGMMA", 100: "UTCHMMA"}  # what 16-bit products must become; elsewhere HMMA

LONG, AHEAD, HOST, SUMS, DELTA = "longer tiles", "products ahead", "host's descriptors", "sums of dq", "delta alone"
GROUPED = "group of 4"
# Forms of one kernel. `GROUPED` changes the loop of this one alone.
ONLY = {**dict.fromkeys((LONG, AHEAD, HOST, DELTA), "attend"), **dict.fromkeys((SUMS, GROUPED), "differentiate_keys")}
HOPPER = (AHEAD, HOST, SUMS)  # forms that are compiled for sm_90 alone
# What a kernel can be asked for, in its most expensive form: added to what earlier branches gave.
FORMS: dict[str, dict[str, Any]] = {
    "causal": {},
    "dense": {"CAUSAL": False},
    GROUPED: {"CAUSAL": False, "GROUP": 4},
    "mask, group of 4": {"IGNORES": True, "GROUP": 4},
    "rows far apart": {"WIDE": True},
    "many pieces": {"TABLED": True},
    "window": {"CAUSAL": False, "WINDOWED": True},
    "window, mask": {"CAUSAL": False, "WINDOWED": True, "IGNORES": True},
    "window, many pieces": {"CAUSAL": False, "WINDOWED": True, "TABLED": True},
    DELTA: {"END": "delta"},
    LONG: {"CAUSAL": False},
    f"{LONG}, causal": {},
    HOST: {"CAUSAL": False, "DESCRIBED": True, "HOST": True},
    AHEAD: {"CAUSAL": False, "AHEAD": True},
    f"{AHEAD}, causal": {"AHEAD": True},
    SUMS: {"CAUSAL": False, "DESCRIBED": True, "SUMS": True},
    f"{SUMS}, group of 4": {"CAUSAL": False, "DESCRIBED": True, "SUMS": True, "GROUP": 4},
}
BY_DESCRIPTORS = ", descriptors"
ASKED = FORMS | {
    asked + BY_DESCRIPTORS: {**constants, "DESCRIBED": True}
    for asked, constants in FORMS.items()
    if not asked.startswith(HOPPER) and "IGNORES" not in constants
}
CONSTANTS = {
    "CAUSAL": True,
    "WINDOWED": False,
    "IGNORES": False,
    "GROUP": 1,
    "END": "merge",
    "ADDS": True,
    "WIDE": False,
    "TABLED": False,
    "DESCRIBED": False,
    "HOST": False,
    "AHEAD": False,
    "SUMS": False,
    "HAS_DLSE": True,
    "DETACHED": False,
    "MERGES": True,
}
POINTERS = {
    "PART_LSE": "fp32",
    "LSE": "fp32",
    "DLSE": "fp32",
    "ROWS": "fp32",
    "OWN": "fp32",
    "IGNORED": "u8",
    "TABLE": "i64",
    "OWNERS": "i64",
}


class Config(NamedTuple):
    kernel: str
    level: int
    head_dim: int
    dtype: str
    asked: str

    @property
    def key(self) -> str:
        """What the spills of the kernel are kept under."""
        tiles = " ".join(map(str, chosen_tiles(self)[:4]))
        return f"{self.kernel}, sm_{self.level}, {self.head_dim}, {self.dtype}, {tiles}: {self.asked}"


class Cost(NamedTuple):
    """What the compiler made of a kernel: `spills` are stores in all, `in_loops` stores and loads in loops with products.

    `serialised` and `overwritten` are loops with faults of wgmma, as `benchmarks.lab.sass.faults` finds them.
    """

    tiles: TileConfig
    registers: int
    spills: int
    in_loops: int
    shared: int
    tensor_columns: int
    products: str
    serialised: int
    overwritten: int


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


def compiled(config: Config, tiles: TileConfig) -> Any:
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
    }
    if not constants["IGNORES"]:
        constants["IGNORED"] = None
    if not constants["TABLED"]:
        constants |= {"TABLE": None, "OWNERS": None}
    if not constants["WINDOWED"]:
        constants |= dict.fromkeys(BAND)
    if config.kernel == "attend":
        constants |= {"LSE": None} if constants["END"] == "delta" else {"ROWS": None, "OWN": None}
    signature, fixed = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], fixed[(place,)] = "constexpr", constants[name]
        elif constants["HOST"] and name in ("K", "V"):
            signature[name] = f"tensordesc<{config.dtype}[1,1,1,{tiles.keys},{padded(config.head_dim)}]>"
        elif constants["SUMS"] and name == "DQ":
            signature[name] = "*fp32"
        elif name.isupper():
            signature[name] = f"*{POINTERS.get(name, 'fp32' if element == 4 else config.dtype)}"
        else:
            signature[name] = "fp32" if name.endswith("scale") else "i32"
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=aligned)
    result = triton.compile(source, target=GPUTarget("cuda", config.level, 32), options=options_of(tiles))
    if divisions := zero_divisors(result.asm["ttir"]):
        raise AssertionError(f"{config}: loops divide by what may be 0: {'; '.join(divisions)}")
    return result


def zero_divisors(ttir: str) -> list[str]:
    """Divisions in loops by what may be 0.

    Triton's pipeline runs the beginning of a loop ahead of it: loads under the condition that the loop has turns, arithmetic in any
    case. By a division by 0 the compiler proves that condition true: then loads of a loop without turns are made after all, and
    those of descriptors arrive in shared memory that already serves something else.
    """
    operations = dict(re.findall(r"^\s*(%\w+)(?::\d+)? = (.*)$", ttir, re.M))
    divisions, closing = [], ""
    for line in ttir.splitlines():
        if not closing and "scf.for" in line:
            closing = line[: len(line) - len(line.lstrip())] + "}"
        elif line.startswith(closing):
            closing = ""
        division = re.search(r"= arith\.(?:div|rem)[su]i %\w+, (%\w+)", line) if closing else None
        if division is not None and not _is_positive(division[1], operations):
            divisions.append(line.strip())
    return divisions


def _is_positive(name: str, operations: dict[str, str]) -> bool:
    operation = operations.get(name, "")
    constant = re.match(r"arith\.constant (-?\d+)", operation)
    if constant is not None:
        return int(constant[1]) > 0
    largest = re.match(r"arith\.maxsi (%\w+), (%\w+)", operation)
    return largest is not None and any(_is_positive(operand, operations) for operand in largest.groups())


def chosen_tiles(config: Config) -> TileConfig:
    """The tiles of a launch."""
    element = DTYPES[config.dtype]
    if config.asked.startswith(AHEAD):
        return ahead_tiles(config.head_dim, element)
    if config.asked.startswith((HOST, SUMS)):
        return unmeasured_tiles(config.kernel, config.head_dim, element)
    asked = {**CONSTANTS, **ASKED[config.asked]}
    described = 1 << 20 if asked["DESCRIBED"] else 0
    level = divmod(config.level, 10)
    tiles = tiles_of(config.kernel, level, config.head_dim, element, described_rows=described, group=asked["GROUP"])
    return longer(tiles, config.head_dim, element) if config.asked.startswith(LONG) else tiles


def cost_of(config: Config, tiles: TileConfig | None = None) -> Cost:
    """What the compiler made of a kernel with some tiles, or those that a launch takes."""
    if tiles is None:
        tiles = chosen_tiles(config)
    result = compiled(config, tiles)
    registers, spills, in_loops = read(result.asm["cubin"])
    products = next((name for name, instruction in PRODUCTS.items() if instruction in result.asm["ptx"]), "none")
    code = _dump(result.asm["cubin"], "-sass") if products == "HGMMA" else ""
    if config.asked.startswith(AHEAD) and not any(under for under, _ in sass.hidden(code)):
        raise AssertionError(f"{config}: no exp2 is issued while products are in flight")
    columns = getattr(result.metadata, "tmem_size", None) or 0
    return Cost(tiles, registers, spills, in_loops, result.metadata.shared, columns, products, *sass.faults(code))


def read(cubin: bytes) -> tuple[int, int, int]:
    """Registers, spilled stores in all, and those and loads in loops with products."""
    match = re.search(r"REG:(\d+) STACK:(\d+)", _dump(cubin, "--dump-resource-usage"))
    assert match is not None
    if int(match[2]) == 0:  # there is nowhere to spill to, and large kernels take long to disassemble
        return int(match[1]), 0, 0
    code = _dump(cubin, "-sass")
    return int(match[1]), len(re.findall(r"\bSTL\b", code)), sass.spilled(code)


def _dump(cubin: bytes, flag: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), flag, file.name], capture_output=True, text=True, check=True).stdout


def memory_faults(level: int, spills: int, shared: int, most_spills: int | None) -> Iterator[str]:
    """Too many spilled stores or bytes of shared memory; `most_spills` is None where nothing is kept of the kernel."""
    if most_spills is None:
        yield "is not kept: --write keeps it"
    elif spills > most_spills:
        yield f"spills {spills} stores, more than the {most_spills} kept"
    if shared > SHARED_MEMORY[level]:
        yield f"takes {shared} bytes of shared memory, more than {SHARED_MEMORY[level]}"


def faults(config: Config, cost: Cost, most_spills: int | None) -> Iterator[str]:
    """What is wrong with a kernel."""
    yield from memory_faults(config.level, cost.spills, cost.shared, most_spills)
    if cost.tensor_columns > TENSOR_MEMORY:
        yield f"takes {cost.tensor_columns} columns of tensor memory, more than {TENSOR_MEMORY}"
    if cost.serialised:
        yield f"waits for every product in {cost.serialised} loops"
    if cost.overwritten:
        yield f"overwrites operands of products in flight in {cost.overwritten} loops"
    expected = TENSOR_CORES.get(config.level, "HMMA")
    if config.kernel not in PASSES and DTYPES[config.dtype] == 2 and cost.products != expected:
        yield f"multiplies by {cost.products}, not {expected}"


def configs(
    levels: Iterable[int] = LEVELS,
    head_dims: Iterable[int] = HEAD_DIMS,
    dtypes: Iterable[str] = KEPT_DTYPES,
    kernels: Iterable[str] = tuple(KERNELS),
) -> Iterator[Config]:
    """What is compiled: everything in the causal form; every other form at the usual head dims, in bfloat16.

    On sm_90 the form without a mask at every head dim: the products of a causal loop may wait for other reasons. By descriptors
    where a launch uses them.
    """
    for level, kernel, head_dim, dtype in itertools.product(levels, kernels, head_dims, dtypes):
        is_usual = head_dim in USUAL_HEAD_DIMS
        if dtype != "bf16" and not (is_usual or (dtype == "fp32" and head_dim == max(HEAD_DIMS))):
            continue
        if dtype != "tf32" or kernel not in PASSES:
            yield Config(kernel, level, head_dim, dtype, "causal")
        for asked in ASKED if dtype == "bf16" and kernel not in PASSES else ():
            config = Config(kernel, level, head_dim, dtype, asked)
            form = asked.removesuffix(BY_DESCRIPTORS)
            is_hopper = TENSOR_CORES.get(level) == "HGMMA"
            is_possible = ONLY.get(form.split(",")[0], kernel) == kernel and (is_hopper or not form.startswith(HOPPER))
            is_possible &= head_dim <= MOST_SUMS or not form.startswith(SUMS)
            is_selected = is_usual or (is_hopper and form in ("causal", "dense"))
            if asked != "causal" and is_possible and is_selected and (form == asked or chosen_tiles(config).described):
                yield config


def ceilings() -> dict[str, dict[str, list[int]]]:
    """Spilled stores, and those and loads in loops, by `Config.key` and version of triton."""
    found: dict[str, dict[str, list[int]]] = json.loads(KEPT.read_text())
    return found


def table(kept: dict[str, dict[str, list[int]]]) -> str:
    """The kernels that spill in loops, with each version of triton."""
    versions = sorted({version for by in kept.values() for version in by})
    lines = [f"| kernel, GPU, D, dtype, tiles: form | {' | '.join(versions)} |", "|---" * (1 + len(versions)) + "|"]
    for key, by in kept.items():
        if any(in_loops for _, in_loops in by.values()):
            cells = ("{} ({})".format(*by[version]) if version in by else "" for version in versions)
            lines.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(kept: dict[str, dict[str, list[int]]]) -> None:
    """Keep the spills of what is still compiled, in the order of `configs`, and show them in the page."""
    ordered = {config.key: kept[config.key] for config in configs() if config.key in kept}
    KEPT.write_text("{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(by)}" for key, by in ordered.items()) + "\n}\n")
    show(BORDERS, table(ordered))


def show(borders: tuple[str, str], text: str) -> None:
    """Put a table in its place in the page."""
    before, remainder = PAGE.read_text().split(borders[0])
    _, after = remainder.split(borders[1])
    PAGE.write_text(f"{before}{borders[0]}\n{text}\n{borders[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", type=int, nargs="+", default=LEVELS)
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--dtypes", nargs="+", default=KEPT_DTYPES, choices=DTYPES)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--asked", nargs="+", default=list(ASKED), choices=ASKED)
    parser.add_argument("--missing", action="store_true", help="only what nothing is kept of for this triton")
    parser.add_argument("--tiles", type=int, nargs=4, help="try these queries, keys, warps and stages instead of the table's")
    parser.add_argument("--write", action="store_true", help="keep what is found")
    chosen = parser.parse_args()
    kept, version, failed = ceilings(), triton.__version__, False
    if not chosen.write and not any(version in by for by in kept.values()):
        print(f"nothing is kept for triton {version}, only for {', '.join(sorted({v for by in kept.values() for v in by}))}")
    for config in configs(chosen.levels, chosen.head_dims, chosen.dtypes, chosen.kernels):
        ceiling = kept.get(config.key, {}).get(version)
        if config.asked not in chosen.asked or (chosen.missing and ceiling is not None):
            continue
        tiles = TileConfig(*chosen.tiles) if chosen.tiles else None
        cost = cost_of(config, tiles)
        tries = chosen.write or tiles is not None
        wrong = list(faults(config, cost, sys.maxsize if tries else None if ceiling is None else ceiling[0]))
        failed |= bool(wrong)
        print(*config, *cost, "; ".join(wrong), sep="  ", flush=True)
        if chosen.write:
            kept.setdefault(config.key, {})[version] = [cost.spills, cost.in_loops]
            write(kept)
    sys.exit(failed)


if __name__ == "__main__":
    main()
