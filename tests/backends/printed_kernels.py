"""The kernels that inductor prints for a GPU, run by Triton's interpreter on CPU tensors.

Dynamo and AOTAutograd trace a call on CPU tensors. The graphs are moved to a CUDA device that is not there, inductor lowers them
for it, and what it prints is run where TRITON_INTERPRET=1 was in the environment before triton was imported.
"""

import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from tests.backends.absent_gpu import absent_gpu

CUDA = torch.device("cuda", 0)
BLOCKS = {"XBLOCK": 256, "YBLOCK": 16, "R0_BLOCK": 64}  # of pointwise kernels and reductions, which the autotuner would choose


class Launches:
    """What ran: the name of every kernel."""

    def __init__(self) -> None:
        self.names: list[str] = []


class Kernel:
    """A printed kernel that launches itself in the interpreter."""

    def __init__(self, function: Any, kind: str, options: dict[str, Any], launches: Launches) -> None:
        self.function, self.kind, self.launches = function, kind, launches
        names = function.arg_names
        constants = options["triton_meta"].get("constants", {})
        self.constants = {names[key[0]] if isinstance(key, tuple) else key: value for key, value in constants.items()}

    def run(self, *arguments: Any, stream: Any = None) -> None:
        names = [name for name in self.function.arg_names if name not in self.constants]
        given = dict(self.constants)
        if self.kind == "template":
            given |= zip(names, arguments)
            grid = tuple(arguments[len(names) :])
        else:
            given |= zip([name for name in names if not name.endswith("BLOCK")], arguments)
            reduces = "r0_numel" in self.function.arg_names
            for name, size in BLOCKS.items():
                if name in self.function.arg_names:
                    given.setdefault(name, 16 if reduces and name == "XBLOCK" else size)
            numbers = [(given.get(f"{dim}numel", 1), given.get(f"{dim.upper()}BLOCK", 1)) for dim in ("x", "y")]
            grid = (*(math.ceil(number / block) for number, block in numbers), 1)
        self.function[grid](**given)
        self.launches.names.append(self.function.__name__)


class Printer:
    """Inductor's last step: the code of a graph becomes a function of CPU tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.launches, self.sources, self.calls = folder, Launches(), list[str](), list[Callable[..., Any]]()
        # By these names printed code finds what it is given here.
        self.module = types.ModuleType("printed_for_an_absent_gpu")
        self.module.triton_heuristics = self  # type: ignore[attr-defined]
        self.module.AsyncCompile = lambda: self  # type: ignore[attr-defined]

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        if kind.startswith("_"):
            raise AttributeError(kind)
        return lambda *_, **options: lambda function: Kernel(function, kind, options, self.launches)

    def triton(self, name: str, source: str, *_: Any, **__: Any) -> Kernel:
        source = source.replace("triton_helpers, triton_heuristics", "triton_helpers").replace(
            "triton_helpers.set_driver_to_gpu()", ""
        )
        return self.execute(f"from {self.module.__name__} import triton_heuristics\n{source}")[name]

    def wait(self, scope: Any) -> None:
        """Nothing is compiled elsewhere."""

    def compile(self, graph: Any, code: Any) -> Any:
        """In place of `GraphLowering._compile_to_module_lines`."""
        source = code.value.replace("_empty_strided_cuda", "_empty_strided_cpu")
        source = source.replace(
            "async_compile = AsyncCompile()", f"from {self.module.__name__} import AsyncCompile\nasync_compile = AsyncCompile()"
        )
        source = re.sub(r"with torch\.cuda\._DeviceGuard\(0\):", "if True:", source)
        source = source.replace("get_raw_stream(0)", "0")
        self.sources.append(source)
        found = self.execute(source)
        call = found["call"] if "call" in found else found["runner"].call
        graph.cache_key, graph.cache_path, graph.cache_linemap = "", found["__file__"], []
        self.calls.append(call)
        return types.SimpleNamespace(call=call, __file__=found["__file__"], runner=None)

    def execute(self, source: str) -> dict[str, Any]:
        """A module of its own, in a file that triton can read again."""
        path = self.folder / f"printed_{len(list(self.folder.iterdir()))}.py"
        path.write_text(source)
        found: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
        exec(compile(source, str(path), "exec"), found)
        return found

    def lower(self, graph: torch.fx.GraphModule, inputs: Any, is_backward: bool = False) -> Callable[..., Any]:
        """A compiler for AOTAutograd."""
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.utils import BoxedBool
        from torch._inductor.virtualized import V

        placeholders = graph.graph.find_nodes(op="placeholder")
        mode = next(node.meta["val"].fake_mode for node in placeholders if isinstance(node.meta["val"], FakeTensor))
        fakes = _move(graph, mode)
        context = torch._guards.TracingContext.try_get() or torch._guards.TracingContext(mode)
        with V.set_fake_mode(mode), torch._guards.tracing(context):
            compile_fx_inner(graph, fakes, is_backward=is_backward, static_input_idxs=(), cudagraphs=BoxedBool(False), graph_id=0)
        call = self.calls[-1]
        return make_boxed_func(lambda *arguments: call(list(arguments)))


def _move(graph: torch.fx.GraphModule, mode: Any) -> list[Any]:
    """The graph on the device that is not there, and its inputs."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        with mode:
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=CUDA)

    for module in graph.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if isinstance(node.kwargs.get("device"), torch.device):
                node.kwargs = {**node.kwargs, "device": CUDA}
            node.args = torch.fx.node.map_aggregate(node.args, lambda a: CUDA if isinstance(a, torch.device) else a)
            if "val" in node.meta and (module is not graph or node.op == "placeholder"):
                node.meta["val"] = tree_map(moved, node.meta["val"])
        module.recompile()
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*fakes)
    return fakes


def _accept(*tensors: Tensor) -> None:
    """Tensors on any device; the tracer takes no mock."""


@contextmanager
def printing(level: int, folder: Path) -> Iterator[Printer]:
    """A printer for devices of a level; `backend(printer)` compiles by it."""
    import torch._functorch.config
    import torch._inductor.config
    import torch._inductor.graph
    import torch.nn.attention.flex_attention

    printer = Printer(folder)
    lowering, attention = torch._inductor.graph.GraphLowering, torch.nn.attention.flex_attention

    def compile_(graph: Any, code: Any) -> Any:
        return printer.compile(graph, code)

    sys.modules[printer.module.__name__] = printer.module
    try:
        with (
            absent_gpu(level),
            torch._inductor.config.patch(fx_graph_cache=False),  # every graph is to be printed
            torch._functorch.config.patch(enable_autograd_cache=False),
            mock.patch.object(lowering, "_compile_to_module_lines", compile_),
            mock.patch.object(attention, "_validate_device", _accept),
        ):
            yield printer
    finally:
        del sys.modules[printer.module.__name__]


def backend(printer: Printer) -> Any:
    """A backend of `torch.compile`."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=printer.lower,
        bw_compiler=partial(printer.lower, is_backward=True),
        inference_compiler=printer.lower,
        decompositions=select_decomp_table(),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
