"""Measure every backend on a GPU beside dense flash attention of the same run (`benchmarks/gpu.py` is the command).

Useful TFLOP/s forward and backward, time and peak memory, from 8k to 1M tokens in bfloat16. Useful work is that of the pattern's
own pairs, `4 D` floating-point operations each forward and 2.5 times that backward, whatever a backend computes beside them.
GigaPath's branches are taken without torchscale's zero keys and constant weights, so that all backends compute the same.

The most informative settings come first; what the time does not suffice for is listed as such. The JSON is complete after every
measurement.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexdilated.backends.flex.backend
from benchmarks.attention import SMALL_LONGNET, Inputs, Results, assert_rows_match_definition
from benchmarks.environment import provenance, save
from flexdilated import DilatedPattern, dilated_attention
from flexdilated.backends.flex import kernel as flex_kernel
from flexdilated.backends.flex.cost import Shape, fused_cost
from flexdilated.tuning.candidates import switched

DTYPE = torch.bfloat16
OUTPUT = Path("runs/bench_gpu.json")
BACKWARD_WORK = 2.5  # of the forward's: five matrix products instead of two
TARGETS = {"forward_of_dense": 0.7, "backward_of_dense": 0.6, "memory_of_tensors": 3.0}
MEMORY_TOKENS = 1 << 20  # where the memory target holds

LEAST_CALLS, MOST_CALLS = 3, 20
SECONDS_PER_TIMING = 0.6
LONGEST_CALL = 2.0  # estimated seconds of a forward that is not worth its time: fused calls that compute far more than the pattern
CACHE_MULTIPLE = 3  # inputs rotate over so many times the L2 cache
CHECKED_ROWS = 8
WHOLE = DilatedPattern((1 << 40,), (1,))  # dense
WIDTH = 150  # of tables that go to a file

Forward = Callable[..., Any]  # of inputs, a pattern, is_causal and options of `dilated_attention`


@dataclass(frozen=True)
class Setting:
    """One cell of the table, but for the backend."""

    pattern: str
    is_causal: bool
    num_heads: int
    head_dim: int
    num_tokens: int
    group: int = 1  # query heads that share a key head
    documents: int = 1  # packed in the sequence, of different lengths
    batch: int = 1

    def borders(self) -> list[int]:
        """Where documents begin, and the end of the last."""
        inner = random.Random(2307).sample(range(1, self.num_tokens), self.documents - 1)
        return [0, *sorted(inner), self.num_tokens]


@dataclass(frozen=True)
class Sizes:
    """What a run measures, its most informative values first."""

    patterns: dict[str, DilatedPattern]
    heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    tokens: tuple[int, ...]
    key_tokens: tuple[int, ...]
    dense_tokens: int
    matmul: int
    copy_bytes: int


FULL = Sizes(
    patterns={
        "longnet": DilatedPattern.longnet(),
        "gigapath": replace(DilatedPattern.gigapath(), zero_padding=False, detach_weights=False),
        "window2048": DilatedPattern((2048,), (1,)),  # what NATTEN can compute too
    },
    heads=(12, 16),
    head_dims=(64, 128),
    tokens=tuple(1 << n for n in range(13, 21)),
    key_tokens=(1 << 16, 1 << 20),
    dense_tokens=1 << 14,
    matmul=8192,
    copy_bytes=4 << 30,
)
QUICK = Sizes(
    patterns={
        "longnet": SMALL_LONGNET,
        "gigapath": DilatedPattern((16, 90, 512), (1, 2, 4)),
        "window2048": DilatedPattern((32,), (1,)),
    },
    heads=(2, 3),
    head_dims=(16, 32),
    tokens=(256, 512),
    key_tokens=(512,),
    dense_tokens=256,
    matmul=128,
    copy_bytes=1 << 20,
)


# -- backends --------------------------------------------------------------------------------------------------------------------


class Backend(NamedTuple):
    """`forward` is differentiable where `why_no_training` says nothing to the contrary; both directions run inside `around`."""

    name: str
    forward: Forward
    why_not: Callable[[DilatedPattern, str], str | None]
    why_no_training: Callable[[str], str | None] = lambda device: None
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def dilated(x: Inputs, pattern: DilatedPattern, is_causal: bool, *, backend: str, layout: str | None = None, **options: Any) -> Any:
    """`dilated_attention` by one backend, in one of flex's layouts."""
    forced = mock.patch.object(flexdilated.backends.flex.backend, "choose_layout", return_value=layout) if layout else nullcontext()
    with forced:
        return dilated_attention(x.q, x.k, x.v, pattern, is_causal=is_causal, backend=backend, **options)


def neighbourhood(x: Inputs, pattern: DilatedPattern, is_causal: bool) -> Tensor:
    """NATTEN's 1-D neighbourhood attention, whose windows are segments when the stride is the window."""
    natten = importlib.import_module("natten")
    length = min(pattern.segment_lengths[0], x.q.shape[1])
    return natten.na1d(x.q, x.k, x.v, kernel_size=length, stride=length, dilation=1, is_causal=is_causal)


def _packed_why_not(pattern: DilatedPattern, device: str) -> str | None:
    return "flex_attention gives no lse on CPU" if device == "cpu" else None


def _flex_why_no_training(device: str) -> str | None:
    return "flex_attention has no backward on CPU" if device == "cpu" else None


def _needs_cuda(pattern: DilatedPattern, device: str) -> str | None:
    return "it runs on CUDA" if device == "cpu" else None


def _flex_flash_why_not(pattern: DilatedPattern, device: str) -> str | None:
    if flex_kernel.TORCH < (2, 14):  # a wrong lse, and masks that can be ignored (pytorch/pytorch#181645, #188322)
        return f"FlexAttention's BACKEND='FLASH' is right from torch 2.14 on, got {torch.__version__}"
    return _needs_cuda(pattern, device)


def _flex_flash() -> AbstractContextManager[object]:
    return mock.patch.object(flex_kernel, "options_of", return_value={"BACKEND": "FLASH"})


def _natten_why_not(pattern: DilatedPattern, device: str) -> str | None:
    if device == "cpu" or importlib.util.find_spec("natten") is None:
        return "NATTEN is not installed, or there is no CUDA device"
    if pattern.dilation_rates != (1,):
        return "NATTEN computes one branch, at every residue: only a single branch of rate 1 is the same work"
    return None


BACKENDS = (
    Backend("sdpa", partial(dilated, backend="sdpa"), lambda pattern, device: None),
    Backend("sdpa_cudnn", partial(dilated, backend="sdpa"), _needs_cuda, around=partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)),
    Backend("sdpa_flash", partial(dilated, backend="sdpa"), _needs_cuda, around=partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
    Backend(
        "sdpa_efficient", partial(dilated, backend="sdpa"), _needs_cuda, around=partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION)
    ),
    Backend("triton", partial(dilated, backend="triton"), _needs_cuda),
    Backend("triton_pointers", partial(dilated, backend="triton"), _needs_cuda, around=partial(switched, DESCRIBES=False)),
    Backend("triton_host", partial(dilated, backend="triton"), _needs_cuda, around=partial(switched, HOSTS=True)),
    Backend("triton_ahead", partial(dilated, backend="triton"), _needs_cuda, around=partial(switched, AHEAD=True)),
    Backend("triton_sums", partial(dilated, backend="triton"), _needs_cuda, around=partial(switched, SUMS=True)),
    Backend("flex_packed", partial(dilated, backend="flex", layout="packed"), _packed_why_not, _flex_why_no_training),
    Backend("flex_packed_flash", partial(dilated, backend="flex", layout="packed"), _flex_flash_why_not, around=_flex_flash),
    Backend("flex_fused", partial(dilated, backend="flex", layout="fused"), lambda pattern, device: None, _flex_why_no_training),
    Backend("flash", partial(dilated, backend="flash"), _needs_cuda),
    Backend("natten", neighbourhood, _natten_why_not),
)


# -- arithmetic -----------------------------------------------------------------------------------------------------------------


def useful_flops(pattern: DilatedPattern, setting: Setting) -> dict[str, float]:
    """Floating-point operations that the pattern's pairs need, forward and backward."""
    heads, copies = setting.num_heads // setting.group, setting.batch * setting.group
    lengths = (end - start for start, end in itertools.pairwise(setting.borders()))
    pairs = copies * sum(pattern.count_pairs(length, heads, is_causal=setting.is_causal) for length in lengths)
    return {"forward": 4.0 * setting.head_dim * pairs, "backward": BACKWARD_WORK * 4.0 * setting.head_dim * pairs}


def settings(sizes: Sizes) -> Iterator[Setting]:
    """All settings: the first of every list first, at the telling lengths, then what differs from that in more and more."""
    lists = (tuple(sizes.patterns), (False, True), sizes.heads, sizes.head_dims)
    groups = list(itertools.product(*lists))

    def rank(group: tuple[Any, ...], num_tokens: int) -> tuple[int, int, int]:
        differences = sum(value != values[0] for value, values in zip(group, lists))
        return 2 * differences + (num_tokens not in sizes.key_tokens), groups.index(group), num_tokens

    for group, num_tokens in sorted(itertools.product(groups, sizes.tokens), key=lambda pair: rank(*pair)):
        yield Setting(*group, num_tokens)


# -- the device -----------------------------------------------------------------------------------------------------------------


class Device:
    """Clock and memory of the device that is measured."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.on_gpu = name != "cpu"

    def milliseconds(self, *steps: Callable[[], object]) -> list[float]:
        """The median time of each step of a sequence that is repeated, after two rounds that are not counted.

        Rounds follow one another without a pause, so that a launch is not waited for where the device is the slower side.
        """
        self.synchronize()
        start = time.perf_counter()
        for _ in range(2):
            self._round(steps)
        self.synchronize()
        round_seconds = (time.perf_counter() - start) / 2
        rounds = min(MOST_CALLS, max(LEAST_CALLS, int(SECONDS_PER_TIMING / max(round_seconds, 1e-6))))
        marks = [self._round(steps) for _ in range(rounds)]
        self.synchronize()
        return [statistics.median(self._elapsed(m[i], m[i + 1]) for m in marks) for i in range(len(steps))]

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        """The most memory that a call held beyond what was held before it; its result is dropped."""
        if not self.on_gpu:
            return None
        self.release()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def cache_bytes(self) -> int:
        """The size of its last cache."""
        return torch.cuda.get_device_properties(0).L2_cache_size if self.on_gpu else 0

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Hand back what no tensor holds."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _round(self, steps: Iterable[Callable[[], object]]) -> list[Any]:
        marks = [self._mark()]
        for step in steps:
            step()
            marks.append(self._mark())
        return marks

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) if self.on_gpu else (end - start) * 1e3


def device_rates(device: Device, sizes: Sizes) -> dict[str, float]:
    """What the device can do: a large bfloat16 matrix product of random numbers, and a copy, bytes read and written counted."""
    n = sizes.matmul
    a, b = (torch.randn(n, n, dtype=DTYPE, device=device.name) for _ in range(2))
    c = torch.empty_like(a)
    (matmul,) = device.milliseconds(lambda: torch.mm(a, b, out=c))
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    (copy,) = device.milliseconds(lambda: target.copy_(source))
    return {"matmul_tflops": 2 * n**3 / matmul / 1e9, "copy_gb_per_s": 2 * sizes.copy_bytes / copy / 1e6}


# -- one measurement ------------------------------------------------------------------------------------------------------------


def random_sets(device: Device, setting: Setting) -> list[Inputs]:
    """Inputs that together are several times as large as the cache."""
    every, shared = (
        (setting.batch, setting.num_tokens, heads, setting.head_dim)
        for heads in (setting.num_heads, setting.num_heads // setting.group)
    )
    size = 2 * (math.prod(every) + math.prod(shared)) * DTYPE.itemsize
    copies, shapes = 1 + CACHE_MULTIPLE * device.cache_bytes() // size, (every, shared, shared, every)
    return [Inputs(*(torch.randn(shape, dtype=DTYPE, device=device.name) for shape in shapes)) for _ in range(copies)]


def measure(device: Device, backend: Backend, pattern: DilatedPattern, setting: Setting, record: dict[str, Any]) -> None:
    """Put times, rates and memory of one backend in `record`, once some rows of its results have been compared with the definition.

    What was found before an error stays found: a forward whose backward runs out of memory.
    """
    sets = random_sets(device, setting)
    rotation = itertools.cycle(sets)
    # On the CPU: borders on a device are waited for.
    options = {} if setting.documents == 1 else {"cu_seqlens": torch.tensor(setting.borders(), dtype=torch.int32)}
    forward = partial(backend.forward, pattern=pattern, is_causal=setting.is_causal, **options)
    compare = partial(assert_rows_match_definition, sets[0], pattern, is_causal=setting.is_causal, count=CHECKED_ROWS, **options)
    flops = useful_flops(pattern, setting)
    input_bytes, output_bytes = sum(x.nbytes for x in sets[0][:3]), sets[0].q.nbytes

    def infer() -> Tensor:
        with torch.no_grad():
            return forward(next(rotation))

    def train(x: Inputs) -> Results:
        leaves = [t.detach().requires_grad_() for t in x[:3]]
        out = forward(Inputs(*leaves, None))
        return Results(out.detach(), *torch.autograd.grad(out, leaves, x.dout))

    start = time.perf_counter()
    out = infer()
    device.synchronize()
    record["first_forward_seconds"] = time.perf_counter() - start
    compare(out)
    del out
    peak = device.peak_bytes(infer)
    record["forward_memory"] = None if peak is None else (peak + input_bytes) / (input_bytes + output_bytes)  # q, k, v, out
    (record["forward_ms"],) = device.milliseconds(infer)
    record["forward_tflops"] = flops["forward"] / record["forward_ms"] / 1e9

    reason = backend.why_no_training(device.name)
    if reason is not None:
        record["no_training"] = reason
        return
    start = time.perf_counter()
    results = train(sets[0])
    device.synchronize()
    record["first_step_seconds"] = time.perf_counter() - start
    compare(*results[:2])
    del results
    peak = device.peak_bytes(lambda: train(sets[0]))
    record["peak_bytes"] = None if peak is None else peak + input_bytes + output_bytes
    tensor_bytes = input_bytes + output_bytes  # q, k, v, out
    record["memory"] = None if peak is None else (peak + tensor_bytes) / (2 * tensor_bytes)  # and gradients

    graph: list[Any] = []

    def step_forward() -> None:
        x = next(rotation)
        leaves = [t.detach().requires_grad_() for t in x[:3]]
        graph[:] = [forward(Inputs(*leaves, None)), leaves, x.dout]

    def step_backward() -> None:
        torch.autograd.grad(*graph)
        graph.clear()

    record["training_forward_ms"], record["backward_ms"] = device.milliseconds(step_forward, step_backward)
    record["backward_tflops"] = flops["backward"] / record["backward_ms"] / 1e9


def dense(kernel: SDPBackend) -> Backend:
    """Dense attention by one of torch's kernels, in its own layout, so that it pays for no transpose; documents one by one."""

    def forward(x: Inputs, pattern: DilatedPattern, is_causal: bool, cu_seqlens: Tensor | None = None) -> Tensor:
        if cu_seqlens is not None:
            sizes = cu_seqlens.diff().tolist()
            parts = zip(*(t.split(sizes, dim=1) for t in x[:3]), strict=True)
            return torch.cat([forward(Inputs(*part, None), pattern, is_causal) for part in parts], dim=1)
        q, k, v = (t.transpose(1, 2) for t in x[:3])
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] > k.shape[1])
        return out.transpose(1, 2)

    return Backend(f"dense {kernel.name.lower()}", forward, lambda pattern, device: None)


def dense_flash_4() -> Backend:
    """Dense attention by the package flash-attn-4."""

    def forward(x: Inputs, pattern: DilatedPattern, is_causal: bool, cu_seqlens: Tensor | None = None) -> Tensor:
        cute = importlib.import_module("flash_attn.cute")
        if cu_seqlens is None:
            out = cute.flash_attn_func(*x[:3], causal=is_causal)
            return out[0] if isinstance(out, tuple) else out
        borders, longest = cu_seqlens.to(x.q.device), int(cu_seqlens.diff().max())
        ends = {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out = cute.flash_attn_varlen_func(*(t[0] for t in x[:3]), causal=is_causal, **ends)
        return (out[0] if isinstance(out, tuple) else out)[None]

    def why_not(pattern: DilatedPattern, device: str) -> str | None:
        try:
            version("flash-attn-4")
        except PackageNotFoundError:
            return "flash-attn-4 is not installed"
        return _needs_cuda(pattern, device)

    return Backend("dense flash-attn-4", forward, why_not)


def attempt(device: Device, backend: Backend, pattern: DilatedPattern, setting: Setting) -> dict[str, Any]:
    """A measurement, or why there is none."""
    reason = backend.why_not(pattern, device.name)
    if reason is None and backend.name == "flex_fused":
        heads = (setting.num_heads, setting.num_heads // setting.group)
        shape = Shape(setting.batch, setting.num_tokens, *heads, setting.head_dim, DTYPE.itemsize, setting.is_causal)
        seconds = fused_cost(pattern, shape).picoseconds(setting.head_dim) / 1e12
        reason = f"a forward is estimated to take {seconds:.1f} s" if seconds > LONGEST_CALL else None
    if reason is not None:
        return {"status": "skipped", "reason": reason}
    record: dict[str, Any] = {"status": "measured"}
    try:
        with backend.around():
            measure(device, backend, pattern, setting, record)
    except torch.OutOfMemoryError as error:
        record |= {"status": "out of memory", "reason": str(error).partition("\n")[0]}
    except AssertionError as error:
        record |= {"status": "wrong result", "reason": str(error)[:400]}
    except NotImplementedError as error:  # a backend that says so itself: cuDNN's head dims
        record |= {"status": "skipped", "reason": str(error)[:400]}
    except Exception as error:  # a kernel that does not compile or run must not end the others
        missing = "No available kernel" in str(error)  # what torch says of a kernel that takes no such call
        record |= {"status": "skipped" if missing else "failed", "reason": f"{type(error).__name__}: {error}"[:400]}
    finally:
        device.release()
    return record


# -- the run --------------------------------------------------------------------------------------------------------------------


class Run:
    """The report of a run, on disk after every measurement."""

    def __init__(self, path: Path, budget_seconds: float, details: dict[str, Any]) -> None:
        self.path, self.deadline = path, time.monotonic() + budget_seconds
        self.longest: dict[tuple[str, str], float] = {}
        self.report: dict[str, Any] = {
            **details,
            "targets": TARGETS,
            "device": {},
            "dense": [],
            "measurements": [],
            "unmeasured": [],
        }

    def has_time_for(self, backend: str, pattern: str) -> bool:
        """Whether the longest measurement of its kind so far would end in time."""
        return time.monotonic() + self.longest.get((backend, pattern), 0.0) < self.deadline

    def took(self, backend: str, pattern: str, seconds: float) -> None:
        self.longest[backend, pattern] = max(seconds, self.longest.get((backend, pattern), 0.0))

    def save(self) -> None:
        save(self.report, self.path)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 when a result was wrong or a kernel failed, else 0, whatever the targets say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the JSON; a plot of the same name lies next to it")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, on any device: whether this runs, not what it says")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="when to stop")
    parser.add_argument("--backends", nargs="+", choices=[backend.name for backend in BACKENDS], help="these alone")
    parser.add_argument("--patterns", nargs="+", choices=list(FULL.patterns), help="these alone")
    parser.add_argument("--tokens", nargs="+", type=int, help="these lengths alone")
    parser.add_argument("--heads", nargs="+", type=int, help="these numbers of heads alone")
    parser.add_argument("--head-dims", nargs="+", type=int, help="these head dims alone")
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"), help="these alone")
    parser.add_argument("--commit", help="of the working tree, where git cannot tell")
    parser.add_argument("--show", action="store_true", help="measure nothing: the tables and the plot of what --output holds")
    options = parser.parse_args(arguments)
    if options.show:
        return show(options.output)
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu must come with --quick: these sizes are a GPU's")

    torch.manual_seed(2307)
    device = Device(options.device)
    sizes = chosen(QUICK if options.quick else FULL, options)
    details = {
        **provenance("gpu", options.device, sys.argv[1:] if arguments is None else arguments, options.commit),
        "quick": options.quick,
        "dtype": str(DTYPE).removeprefix("torch."),
        "note": "gigapath: without zero_padding and detach_weights; memory is relative to q, k, v, out and their gradients",
    }
    run = Run(options.output, options.budget_seconds, details)
    run.report["device"] = device_rates(device, sizes)
    device.release()
    run.save()
    measure_all(run, device, sizes, options)
    run.save()
    return show(options.output)


def show(path: Path) -> int:
    """Print the tables of a report and draw its plot; the exit status of `main`."""
    report = json.loads(path.read_text())
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    for table in tables(report):
        console.print(table)
    plot(report, path.with_suffix(".png"))
    console.print(f"{path}, {path.with_suffix('.png')}", soft_wrap=True, markup=False)
    return int(any(m["status"] in ("wrong result", "failed") for m in report["measurements"]))


def chosen(sizes: Sizes, options: argparse.Namespace) -> Sizes:
    """The sizes that the command line leaves."""
    patterns = {name: pattern for name, pattern in sizes.patterns.items() if name in (options.patterns or sizes.patterns)}
    picks = {"tokens": options.tokens, "heads": options.heads, "head_dims": options.head_dims}
    return replace(sizes, patterns=patterns, **{name: tuple(values) for name, values in picks.items() if values})


def measure_all(run: Run, device: Device, sizes: Sizes, options: argparse.Namespace) -> None:
    """Every backend at every setting, until the time is over or the device is beyond use."""
    rates: dict[tuple[bool, int, int], dict[str, Any]] = {}
    backends = [backend for backend in BACKENDS if backend.name in (options.backends or [e.name for e in BACKENDS])]
    for setting in settings(sizes):
        if options.masks and mask_name(setting.is_causal) not in options.masks:
            continue
        pattern = sizes.patterns[setting.pattern]
        for backend in backends:
            cell = {"backend": backend.name, **asdict(setting)}
            if not run.has_time_for(backend.name, setting.pattern):
                run.report["unmeasured"].append(cell)
                continue
            key = (setting.is_causal, setting.num_heads, setting.head_dim)
            if key not in rates:
                rates[key] = dense_rates(run, device, replace(setting, pattern="dense", num_tokens=sizes.dense_tokens))
            start = time.monotonic()
            record = attempt(device, backend, pattern, setting)
            for side in ("forward", "backward"):
                if f"{side}_tflops" in record and f"{side}_tflops" in rates[key]:
                    record[f"{side}_of_dense"] = record[f"{side}_tflops"] / rates[key][f"{side}_tflops"]
            record["seconds"] = time.monotonic() - start
            if record["status"] != "skipped":
                run.took(backend.name, setting.pattern, record["seconds"])
            run.report["measurements"].append(cell | record)
            run.save()
            if "CUDA error" in record.get("reason", ""):  # nothing runs in this process any more
                run.report["stopped"] = record["reason"]
                return


def dense_rates(run: Run, device: Device, setting: Setting) -> dict[str, Any]:
    """What dense flash attention gets; cuDNN's, where there is one, is recorded beside it."""
    kernels = [SDPBackend.FLASH_ATTENTION, *([SDPBackend.CUDNN_ATTENTION] if device.on_gpu else [])]
    for kernel in kernels:
        backend = dense(kernel)
        run.report["dense"].append({"backend": backend.name, **asdict(setting)} | attempt(device, backend, WHOLE, setting))
    return run.report["dense"][-len(kernels)]


# -- what it says ---------------------------------------------------------------------------------------------------------------


def mask_name(is_causal: bool) -> str:
    return "causal" if is_causal else "full"


def tables(report: dict[str, Any]) -> list[Table]:
    """The rates of reference, and every measurement beside its targets."""
    title = f"{report['hardware']}, torch {report['torch']}, {report['dtype']}, {report['date']}, {report['commit'][:9]}"
    references = Table("reference", title=title)
    for column in ("H", "D", "N", "forward TFLOP/s", "backward TFLOP/s"):
        references.add_column(column, justify="right")
    references.add_row("matrix product", "", "", "", f"{report['device']['matmul_tflops']:.1f}", "")
    references.add_row("copy, GB/s", "", "", "", f"{report['device']['copy_gb_per_s']:.0f}", "")
    for m in report["dense"]:
        name = f"{m['backend']} {mask_name(m['is_causal'])}"
        if m["status"] != "measured":
            references.add_row(name, *map(str, (m["num_heads"], m["head_dim"], m["num_tokens"])), m["status"], "")
            continue
        rates = (f"{m[f'{side}_tflops']:.1f}" for side in ("forward", "backward"))
        references.add_row(name, *map(str, (m["num_heads"], m["head_dim"], m["num_tokens"])), *rates)

    ratios = Table("backend", "pattern", "mask", title=f"targets of dense flash: {TARGETS}")
    for column in ("H", "D", "N", "forward ms", "of dense", "backward ms", "of dense", "memory"):
        ratios.add_column(column, justify="right")
    for m in report["measurements"]:
        if m["status"] == "skipped":
            continue
        cell = (m["backend"], m["pattern"], mask_name(m["is_causal"]), *map(str, (m["num_heads"], m["head_dim"], m["num_tokens"])))
        if "forward_ms" not in m:
            ratios.add_row(*cell, m["status"], "", "", "", "")
            continue
        memory_target = TARGETS["memory_of_tensors"] if m["num_tokens"] == MEMORY_TOKENS else None
        ratios.add_row(
            *cell,
            f"{m['forward_ms']:.2f}",
            against(m.get("forward_of_dense"), TARGETS["forward_of_dense"], "higher"),
            f"{m['backward_ms']:.2f}" if "backward_ms" in m else "" if m["status"] == "measured" else m["status"],
            against(m.get("backward_of_dense"), TARGETS["backward_of_dense"], "higher"),
            against(m.get("memory"), memory_target, "lower"),
        )
    ratios.caption = f"{len(report['unmeasured'])} settings were not measured for want of time"
    return [references, ratios]


def against(value: float | None, target: float | None, better: str) -> str:
    """A ratio, green where it meets its target and red where it does not."""
    if value is None:
        return ""
    if target is None:
        return f"{value:.2f}"
    met = value >= target if better == "higher" else value <= target
    return f"[{'green' if met else 'red'}]{value:.2f}[/]"


def plot(report: dict[str, Any], path: Path) -> None:
    """Time and memory of forward and backward against N, one column per group of settings, the fullest groups first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for m in report["measurements"]:
        if "forward_ms" in m:
            groups.setdefault((m["pattern"], mask_name(m["is_causal"]), m["num_heads"], m["head_dim"]), []).append(m)
    shown = sorted(groups.items(), key=lambda item: -len(item[1]))[:4]
    if not shown:
        return
    from matplotlib.figure import Figure  # the measurements need none

    figure = Figure(figsize=(4.5 * len(shown), 7), layout="constrained")
    axes = figure.subplots(2, len(shown), squeeze=False, sharex="col")
    for column, ((pattern, mask, heads, head_dim), measurements) in enumerate(shown):
        above, below = axes[:, column]
        for name in dict.fromkeys(m["backend"] for m in measurements):
            points = sorted((m for m in measurements if m["backend"] == name), key=lambda m: m["num_tokens"])
            tokens = [m["num_tokens"] for m in points]
            (line,) = above.plot(tokens, [m["forward_ms"] for m in points], "o-", label=f"{name} forward")
            trained = [m for m in points if "backward_ms" in m]
            lengths = [m["num_tokens"] for m in trained]
            above.plot(lengths, [m["backward_ms"] for m in trained], "s--", color=line.get_color(), label=f"{name} backward")
            used = [m for m in trained if m["memory"] is not None]
            below.plot([m["num_tokens"] for m in used], [m["memory"] for m in used], "o-", color=line.get_color(), label=name)
        below.axhline(TARGETS["memory_of_tensors"], color="grey", linestyle=":", label="target at 1M tokens")
        above.set(title=f"{pattern} {mask} H={heads} D={head_dim}", yscale="log", ylabel="ms")
        below.set_xscale("log", base=2)
        below.set(xlabel="N", ylabel="peak / (q, k, v, out and gradients)", ylim=(0, None))
        above.legend(fontsize="x-small")
        below.legend(fontsize="x-small")
    figure.suptitle(f"{report['hardware']}, torch {report['torch']}, {report['dtype']}, {report['date']}")
    figure.savefig(path, dpi=120)
