"""Compile the Triton kernels for GPUs that are not here: registers, spilled stores, shared memory, instructions.

`nox -s cubins` does so for everything that a launch can choose, and fails where a kernel does not fit, spills more than is kept in
`benchmarks/lab/cubins.json`, lacks the tensor-core instructions of its GPU, or has a fault that
`benchmarks/lab/sass.py` finds in loops. `--write` keeps what it finds there, and the dearest of each kernel
in `docs/gpu-kernels.md`.
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
from flexdilated.backends.triton.tiles import MOST_UNMEASURED, TileConfig, ahead_tiles, padded, tiles_of, unmeasured_tiles
from tests.backends.absent_gpu import SHARED_MEMORY

KEPT = Path(__file__).with_name("cubins.json")
PAGE = Path(__file__).parents[2] / "docs" / "gpu-kernels.md"
BORDERS = "<!-- cubins -->", "<!-- /cubins -->"
COMPARED = "<!-- descriptors -->", "<!-- /descriptors -->"

LEVELS = tuple(SHARED_MEMORY)
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
DESCRIBING_LEVEL = 90  # the first whose memory is read by tensor descriptors

DESCRIBING = "descriptors"
HOSTED = "host's descriptors", "host's descriptors, causal"
AHEAD = "products ahead", "products ahead, causal"
SUMMED = "sums of dq", "sums of dq, causal", "sums of dq, group of 4"
FOR_DESCRIPTORS = SHARING, MANY, DENSE = "descriptors, group of 4", "descriptors, many pieces", "descriptors, dense"
# What a kernel can be asked for, in its dearest form: added to what earlier branches gave. Not causal for wgmma alone, whose
# products may then wait for one another elsewhere.
ASKED: dict[str, dict[str, Any]] = {
    "causal": {},
    "mask, group of 4": {"IGNORES": True, "GROUP": 4},
    "rows far apart": {"WIDE": True},
    "many pieces": {"TABLED": True},
    "window": {"WINDOWED": True},
    "delta alone": {"END": "delta"},
    DESCRIBING: {"DESCRIBED": True},
    SHARING: {"DESCRIBED": True, "GROUP": 4},
    MANY: {"DESCRIBED": True, "TABLED": True},
    "dense": {"CAUSAL": False},
    "dense, group of 4": {"CAUSAL": False, "GROUP": 4},
    DENSE: {"CAUSAL": False, "DESCRIBED": True},
    HOSTED[0]: {"CAUSAL": False, "DESCRIBED": True, "HOST": True},
    HOSTED[1]: {"DESCRIBED": True, "HOST": True},
    AHEAD[0]: {"CAUSAL": False, "AHEAD": True},
    AHEAD[1]: {"AHEAD": True},
    SUMMED[0]: {"CAUSAL": False, "DESCRIBED": True, "SUMS": True},
    SUMMED[1]: {"DESCRIBED": True, "SUMS": True},
    SUMMED[2]: {"CAUSAL": False, "DESCRIBED": True, "SUMS": True, "GROUP": 4},
}
ONLY = {"END": "attend", "HOST": "attend", "AHEAD": "attend", "SUMS": "differentiate_keys"}  # constants of one kernel
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


def config_of(entry: dict[str, Any]) -> Config:
    """What a kept entry is of."""
    return Config(*(entry[name] for name in Config._fields))


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
    """Those of a launch; by descriptors, too, where it takes none."""
    if config.asked in AHEAD:
        return ahead_tiles(config.head_dim, DTYPES[config.dtype])
    if config.asked in HOSTED + SUMMED:
        return unmeasured_tiles(config.kernel, config.head_dim, DTYPES[config.dtype])
    described = 1 << 20 if _asks_descriptors(config.asked) else 0
    group = {**CONSTANTS, **ASKED[config.asked]}["GROUP"]
    level, element = divmod(config.level, 10), DTYPES[config.dtype]
    return tiles_of(config.kernel, level, config.head_dim, element, described_rows=described, group=group)


def cost_of(config: Config, tiles: TileConfig | None = None) -> Cost:
    """What the compiler made of a kernel with some tiles, or those that a launch takes."""
    if tiles is None:
        tiles = chosen_tiles(config)
    result = compiled(config, tiles)
    registers, spills, in_loops = read(result.asm["cubin"])
    if config.asked in AHEAD and not any(under for under, _ in sass.hidden(_dump(result.asm["cubin"], "-sass"))):
        raise AssertionError(f"{config}: no exp2 is issued while products are in flight")
    products = next((name for name, instruction in PRODUCTS.items() if instruction in result.asm["ptx"]), "none")
    return Cost(
        tiles,
        registers,
        spills,
        in_loops,
        result.metadata.shared,
        getattr(result.metadata, "tmem_size", None) or 0,
        products,
        *(sass.faults(_dump(result.asm["cubin"], "-sass")) if products == "HGMMA" else (0, 0)),
    )


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
    """What is compiled: everything in the causal form; what else costs registers at the usual head dims, in bfloat16.

    On sm_90 everything without a mask, too.
    """
    for kernel, level, head_dim, dtype in itertools.product(kernels, levels, head_dims, dtypes):
        is_usual = head_dim in USUAL_HEAD_DIMS
        if dtype != "tf32" or (is_usual and kernel not in PASSES):
            yield Config(kernel, level, head_dim, dtype, "causal")
        for asked, constants in ASKED.items() if dtype == "bf16" and kernel not in PASSES else ():
            config = Config(kernel, level, head_dim, dtype, asked)
            is_possible = not any(name in constants and kernel != only for name, only in ONLY.items())
            has_descriptors = level >= DESCRIBING_LEVEL or asked != DESCRIBING
            if constants.keys() & {"AHEAD", "SUMS"}:
                is_possible = is_possible and head_dim <= MOST_UNMEASURED
            if constants.keys() & {"CAUSAL", "HOST", "AHEAD", "SUMS"}:
                is_selected, is_possible = asked not in FOR_DESCRIPTORS, is_possible and TENSOR_CORES.get(level) == "HGMMA"
            else:
                is_selected = is_usual and has_descriptors and asked not in FOR_DESCRIPTORS
            if constants and is_possible and (is_selected or chosen_tiles(config).described):
                yield config


SUMMARY = "| kernel | GPU | compiled | most registers | most spilled (most in loops) | most shared KiB | multiplies by |"


def table(entries: list[dict[str, Any]]) -> str:
    """The dearest of every kernel on every GPU."""
    lines = [SUMMARY, "|---" * 7 + "|"]
    for kernel, level in itertools.product(dict.fromkeys(e["kernel"] for e in entries), LEVELS):
        matching = [e for e in entries if (e["kernel"], e["level"]) == (kernel, level) and _is_launched(e)]
        if not matching:
            continue
        by = ", ".join(sorted({e["products"] for e in matching}))
        registers, spills, in_loops, shared = (
            max(e[name] for e in matching) for name in ("registers", "spills", "in_loops", "shared")
        )
        lines.append(
            f"| {kernel} | sm_{level} | {len(matching)} | {registers} | {spills} ({in_loops}) | {shared / 1024:.0f} | {by} |"
        )
    return "\n".join(lines)


def _is_launched(e: dict[str, Any]) -> bool:
    """Whether a launch takes an entry unasked, and not only a comparison or a measurement."""
    if e["asked"] in HOSTED + AHEAD + SUMMED:
        return False
    return not _asks_descriptors(e["asked"]) or chosen_tiles(config_of(e)).described


def _asks_descriptors(asked: str) -> bool:
    return "DESCRIBED" in ASKED[asked]


def _tiles(e: dict[str, Any]) -> str:
    return ", ".join(map(str, e["tiles"]))


def comparison(entries: list[dict[str, Any]]) -> str:
    """Rows through pointers and by tensor descriptors, side by side."""
    lines = [
        "| kernel | GPU | D | queries, keys, warps, stages: pointers | descriptors | chosen | registers: pointers | descriptors "
        "| spilled (in loops): pointers | descriptors | shared KiB: pointers | descriptors |",
        "|---" * 12 + "|",
    ]
    entry_of = {config_of(e): e for e in entries}
    for config, by in entry_of.items():
        if config.asked == DESCRIBING:
            pair = entry_of[config._replace(asked="causal")], by
            tiles, registers, spills, shared = zip(
                *((_tiles(e), e["registers"], f"{e['spills']} ({e['in_loops']})", f"{e['shared'] / 1024:.0f}") for e in pair)
            )
            choice = "descriptors" if chosen_tiles(config).described else "pointers"
            cells = map(str, (*tiles, choice, *registers, *spills, *shared))
            lines.append(f"| {config.kernel} | sm_{config.level} | {config.head_dim} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(entries: list[dict[str, Any]]) -> None:
    entries.sort(key=lambda e: [e[name] for name in Config._fields])
    KEPT.write_text("[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n]\n")
    show(BORDERS, table(entries))
    show(COMPARED, comparison(entries))


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
    parser.add_argument("--missing", action="store_true", help="only what nothing is kept of")
    parser.add_argument("--tiles", type=int, nargs=4, help="try these queries, keys, warps and stages instead of the table's")
    parser.add_argument("--write", action="store_true", help="keep what is found")
    chosen = parser.parse_args()
    baseline = {config_of(e): e for e in json.loads(KEPT.read_text())} if KEPT.exists() else {}
    failed = False
    for config in configs(chosen.levels, chosen.head_dims, chosen.dtypes, chosen.kernels):
        if config.asked not in chosen.asked or (chosen.missing and config in baseline):
            continue
        tiles = TileConfig(*chosen.tiles) if chosen.tiles else None
        cost = cost_of(config, tiles)
        tries = chosen.write or tiles is not None
        wrong = list(faults(config, cost, sys.maxsize if tries else baseline[config]["spills"] if config in baseline else None))
        failed |= bool(wrong)
        print(*config, *cost, "; ".join(wrong), sep="  ", flush=True)
        if chosen.write:
            baseline[config] = {**config._asdict(), **cost._asdict(), "tiles": cost.tiles[:4]}
            write(list(baseline.values()))
    sys.exit(failed)


if __name__ == "__main__":
    main()
