"""A CUDA device that is not there: as much of it as inductor asks for before it lowers a graph and prints kernels.

It needs a torch that was built for CUDA, and triton. Nothing here reaches a driver.
"""

import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

# Bytes that one block may have, by level.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


def properties(level: int) -> Any:
    """What `torch.cuda.get_device_properties` says of a device of some level."""
    return types.SimpleNamespace(
        major=level // 10,
        minor=level % 10,
        name=f"sm_{level}",
        multi_processor_count=132,
        total_memory=80 << 30,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048 if SHARED_MEMORY[level] > 101376 else 1536,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=SHARED_MEMORY[level],
        shared_memory_per_multiprocessor=SHARED_MEMORY[level] + 1024,
        L2_cache_size=50 << 20,
        is_integrated=0,
        gcnArchName="",
    )


@contextmanager
def absent_gpu(level: int) -> Iterator[None]:
    """Inductor believes in the device; `torch.cuda.is_available` goes on to say that there is none."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._subclasses import fake_tensor

    found = properties(level)
    pair = (found.major, found.minor)
    patches: list[tuple[Any, dict[str, Any]]] = [
        (
            torch.cuda,
            {
                "_lazy_init": lambda: None,
                "is_initialized": lambda: True,
                "device_count": lambda: 1,
                "current_device": lambda: 0,
                "set_device": lambda device: None,
                "synchronize": lambda device=None: None,
                "get_device_properties": lambda device=None: found,
                "get_device_capability": lambda device=None: pair,
                "get_device_name": lambda device=None: found.name,
                "is_bf16_supported": lambda including_emulation=True: True,
                "_exchange_device": lambda device: 0,
                "_maybe_exchange_device": lambda device: 0,
                "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
                "set_rng_state": lambda state, device=None: None,
            },
        ),
        (
            torch._C,
            {
                "_cuda_getDevice": lambda: 0,
                "_cuda_setDevice": lambda device: None,
                "_cuda_getDeviceCount": lambda: 1,
                "_cuda_getCurrentRawStream": lambda device: 0,
                "_cuda_exchangeDevice": lambda device: 0,
                "_cuda_maybeExchangeDevice": lambda device: 0,
            },
        ),
        (torch.accelerator, {"is_available": lambda: False, "current_device_index": lambda: 0}),  # streams need a driver
        (fake_tensor, {"init_gpu_context": lambda *arguments, **options: None}),
        (
            CudaInterface,
            {
                "is_available": staticmethod(lambda: True),
                "current_device": staticmethod(lambda: 0),
                "get_device_properties": staticmethod(lambda device=None: found),
                "get_compute_capability": staticmethod(lambda device=None: level),
                "get_raw_stream": staticmethod(lambda device: 0),
                "triton_supported": staticmethod(lambda device=None: True),
                "is_triton_capable": staticmethod(lambda device=None: True),
                "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
            },
        ),
        (
            CudaInterface.Worker,
            {"get_device_properties": staticmethod(lambda device=None: found), "current_device": staticmethod(lambda: 0)},
        ),
        # Patterns are traced with tensors on the device, constants computed there.
        (joint_graph, {"lazy_init": lambda *arguments, **options: None}),
        (post_grad, {"lazy_init": lambda *arguments, **options: None}),
        (config, {"joint_graph_constant_folding": False}),
    ]
    with ExitStack() as stack:
        for owner, values in patches:
            stack.enter_context(mock.patch.multiple(owner, create=True, **values))
        stack.enter_context(_copies_of_nothing())
        _set_driver(level, found)
        yield


@contextmanager
def _copies_of_nothing() -> Iterator[None]:
    """`copy_` of two fake tensors reaches for the device in C++, and there is nothing to copy."""
    import torch._higher_order_ops.flex_attention  # noqa: F401

    module = sys.modules["torch._higher_order_ops.flex_attention"]
    source = textwrap.dedent(inspect.getsource(module._permute_strides)).replace("new_out.copy_(out)", "pass")
    found: dict[str, Any] = {}
    exec(source, module.__dict__, found)
    with mock.patch.object(module, "_permute_strides", found["_permute_strides"]):
        yield


def _set_driver(level: int, found: Any) -> None:
    """A driver of triton that knows its target and nothing else."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    limits = {
        "max_shared_mem": found.shared_memory_per_block_optin,
        "max_num_regs": 65536,
        "multiprocessor_count": found.multi_processor_count,
        "warpSize": 32,
    }
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", level, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_device_interface=lambda: torch.cuda,
            map_python_to_cpp_type=lambda kind: kind,
            utils=types.SimpleNamespace(get_device_properties=lambda device: limits),
            is_active=lambda: True,
        )
    )
