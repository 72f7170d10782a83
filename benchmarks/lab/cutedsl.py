"""Compile the kernels of flash-attn-4 that `backend="flash"` takes, for GPUs that this machine does not have.

It counts registers, spills and compilations.

`nox -s cutedsl` calls the backend on fake tensors: whole sequences and every view of LongNet's pieces, forward and backward. It
fails where an entry point of the package has changed, a kernel spills more than before, a view is copied, or the views of one form
need more than one compilation. It needs no GPU, any version of torch, and the disassembler in the package triton.
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
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexdilated import DilatedPattern
from flexdilated.backends.dense import flash_kernels
from flexdilated.backends.kernel import GRID_LIMIT, Options
from flexdilated.core.pieces import plan_pieces
from flexdilated.core.slabs import box, pack, view_parts

MULTIPROCESSORS = {90: 132, 100: 148, 103: 148, 110: 20}
USUAL_LEVELS, USUAL_HEAD_DIMS = (90, 100), (64, 128)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NUM_TOKENS, HEADS = 1 << 17, 12
SHORT = 40  # rows: one block, for which other kernels are compiled


class Form(NamedTuple):
    """What the backend asks of a kernel, besides the head dim and the dtype."""

    is_causal: bool = False
    group: int = 1
    is_deterministic: bool = False
    is_short: bool = False

    def __str__(self) -> str:
        words = ("causal" * self.is_causal, f"group of {self.group}" * (self.group > 1), "deterministic" * self.is_deterministic)
        return ", ".join(word for word in (*words, "short" * self.is_short) if word) or "plain"


FORMS = {
    str(form): form
    for form in (
        Form(),
        Form(is_causal=True),
        Form(group=3),
        Form(is_causal=True, group=3),
        Form(is_causal=True, is_deterministic=True),
        Form(group=3, is_deterministic=True),
        Form(is_causal=True, is_short=True),
    )
}


class Cost(NamedTuple):
    """One compiled kernel; `spills` are stores to local memory."""

    level: int
    head_dim: int
    dtype: str
    form: str
    kernel: str
    registers: int
    spills: int


def calls(form: Form, head_dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries and keys `(batch, heads, rows, D)` as the backend receives them, on the meta device."""
    kv_heads = HEADS // form.group
    if form.is_short:
        yield (torch.empty(3, HEADS, SHORT, head_dim, device="meta"),) * 2
        return
    q, k = (torch.empty(1, NUM_TOKENS, heads, head_dim, device="meta") for heads in (HEADS, kv_heads))
    yield q.transpose(1, 2), k.transpose(1, 2)
    has_groups = form.group > 1
    for piece in plan_pieces(DilatedPattern.longnet(), ((0, NUM_TOKENS),), kv_heads, form.is_causal):
        for part in view_parts(piece, 1, NUM_TOKENS, form.group, GRID_LIMIT, offsets_apart=has_groups):
            boxes = box(q, piece, group=form.group)[part], box(k, piece)[part]
            some_q, some_k = (pack(x, offsets_apart=has_groups) for x in boxes)
            assert some_q._is_view()
            assert some_k._is_view()
            yield some_q, some_k


def differentiate(like_q: Tensor, like_k: Tensor, form: Form, dtype: torch.dtype, *, takes_dlse: bool) -> None:
    """Call the backend forward, and backward with and without a gradient of lse, on fake tensors, into views."""
    from flash_attn.cute.interface import maybe_contiguous

    def make(like: Tensor) -> Tensor:
        memory = torch.empty(NUM_TOKENS * HEADS * like.shape[-1], dtype=dtype, device="cuda")
        x = memory.as_strided(like.shape, like.stride(), like.storage_offset())  # torch without CUDA cannot index fake tensors
        assert maybe_contiguous(x.transpose(1, 2)).untyped_storage()._cdata == memory.untyped_storage()._cdata, "a view is copied"
        return x

    q, k, v, out, dout, dq, dk, dv = (make(x) for x in (like_q, like_k, like_k, like_q, like_q, like_q, like_k, like_k))
    lse, options = torch.empty(q.shape[:3], device="cuda"), Options(form.is_causal, 0.125)
    flash_kernels.forward(q, k, v, options, into=out)
    torch.use_deterministic_algorithms(form.is_deterministic)
    for dlse in (None, lse) if takes_dlse else (None,):
        flash_kernels.backward(dout, q, k, v, out, lse, options, dlse=dlse, into=(dq, dk, dv))
    torch.use_deterministic_algorithms(False)


def compile_level(level: int, head_dims: list[int], dtypes: list[str], forms: list[str], folder: Path) -> None:
    """Compile forms for one GPU, in a process of its own: the package reads its environment once."""
    from cutlass.utils.hardware_info import HardwareInfo
    from flash_attn.cute import interface

    # What is asked of a driver meanwhile.
    for owner, name, stand_in in (
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_of", lambda x: nullcontext()),
        (HardwareInfo, "__init__", lambda self, *arguments, **options: None),
        (HardwareInfo, "get_device_multiprocessor_count", lambda self: MULTIPROCESSORS[level]),
    ):
        setattr(owner, name, stand_in)
    caches = {
        "forward": interface._flash_attn_fwd,
        "preprocess": interface._bwd_preprocess,
        "backward": interface._flash_attn_bwd,
        "postprocess": interface._bwd_postprocess_convert,
    }
    kernel_ids: set[int] = set()
    cost_of_file: dict[str, Cost] = {}
    for head_dim, dtype, form in itertools.product(head_dims, dtypes, forms):
        for q, k in calls(FORMS[form], head_dim):
            with FakeTensorMode():
                differentiate(q, k, FORMS[form], DTYPES[dtype], takes_dlse=head_dim < 256 or level == 90)
            for kernel, function in caches.items():
                for compiled in function.compile_cache.cache.values():
                    if id(compiled) not in kernel_ids:
                        kernel_ids.add(id(compiled))
                        cubin, path = compiled.artifacts.CUBIN, folder / f"{len(cost_of_file)}.cubin"
                        path.write_bytes(cubin if isinstance(cubin, bytes) else Path(cubin).read_bytes())
                        cost_of_file[str(path)] = Cost(level, head_dim, dtype, form, kernel, 0, 0)
    (folder / "found.json").write_text(json.dumps({path: cost._asdict() for path, cost in cost_of_file.items()}))


def costs(
    level: int, head_dims: Iterable[int], dtypes: Iterable[str] = ("bf16",), forms: Iterable[str] = tuple(FORMS)
) -> list[Cost]:
    """What the compiler made of every kernel for one GPU.

    Raises:
        subprocess.CalledProcessError: If a call fails, for example because an entry point has other arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "FLASH_ATTENTION_ARCH": f"sm_{level}",
            "FLASH_ATTENTION_NUM_SMS": str(MULTIPROCESSORS[level]),
            "CUTE_DSL_ARCH": f"sm_{level}a",
            "CUTE_DSL_KEEP": "cubin",
            "CUTE_DSL_DUMP_DIR": folder,
        }
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.lab.cutedsl", "--folder", folder, "--levels", str(level)]
        command += ["--head-dims", *map(str, head_dims), "--dtypes", *dtypes, "--forms", *forms]
        subprocess.run(command, env=environment, check=True)
        entries = json.loads((Path(folder) / "found.json").read_text())
        return [Cost(**entry)._replace(**read(path)) for path, entry in entries.items()]


def read(path: str) -> dict[str, int]:
    """Most registers of a file's kernels, and their spilled stores."""
    used = re.findall(r"REG:(\d+) STACK:(\d+)", _dump("--dump-resource-usage", path))
    spills = len(re.findall(r"\bSTL\b", _dump("-sass", path))) if any(int(stack) for _, stack in used) else 0
    return {"registers": max(int(registers) for registers, _ in used), "spills": spills}


def _dump(flag: str, path: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([str(tool), flag, path], capture_output=True, text=True, check=True).stdout


def most_spills(cost: Cost) -> int:
    """What 4.0.0b36 spills on sm_100, by nvidia-cutlass-dsl 4.8.1: two addresses, and more in the backward at head dim 256."""
    return 0 if cost.level == 90 else 4 if cost.head_dim < 256 else 60


def faults(kernel_costs: list[Cost]) -> Iterator[str]:
    """What is wrong with the kernels of some forms."""
    for cost in kernel_costs:
        if cost.spills > most_spills(cost):
            yield f"{_named(cost)} spills {cost.spills} stores, more than {most_spills(cost)}"
    for name, count in Counter(_named(cost) for cost in kernel_costs if cost.kernel in ("forward", "backward")).items():
        if count > 1:
            yield f"{name} is compiled {count} times"


def _named(cost: Cost) -> str:
    return f"{cost.kernel} (sm_{cost.level}, D = {cost.head_dim}, {cost.dtype}, {cost.form})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", type=int, nargs="+", default=USUAL_LEVELS, choices=MULTIPROCESSORS)
    parser.add_argument("--head-dims", type=int, nargs="+", default=USUAL_HEAD_DIMS)
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=DTYPES)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.folder is not None:
        compile_level(chosen.levels[0], chosen.head_dims, chosen.dtypes, chosen.forms, chosen.folder)
        return
    kernel_costs = []
    for level in chosen.levels:
        kernel_costs += costs(level, chosen.head_dims, chosen.dtypes, chosen.forms)
    for cost in kernel_costs:
        print(*cost, sep="  ")
    wrong = list(faults(kernel_costs))
    print(f"flash-attn-4 {version('flash-attn-4')}: {len(kernel_costs)} kernels, {len(wrong)} faults", *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
