"""What this device can run, and in which dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

# Whether torch was built for AMD's GPUs, which call themselves CUDA too.
ON_ROCM = torch.version.hip is not None

AUTOCAST = frozenset(name for name in ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(name))


@dataclass(frozen=True)
class Hardware:
    """The properties of a device that decide about attention kernels.

    Args:
        device_type: `"cpu"`, `"cuda"`, `"mps"` or another torch device type.
        capability: CUDA compute capability `(major, minor)`; None elsewhere.
        has_fast_bfloat16: Whether bfloat16 matrix products run faster than float32 ones.
    """

    device_type: str
    capability: tuple[int, int] | None = None
    has_fast_bfloat16: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """For messages: in compiled code a format calls no `__str__` of a dataclass."""
        return self.device_type if self.capability is None else f"{self.device_type} {self.device_class}"

    @property
    def device_class(self) -> str:
        """`"cpu"`, `"mps"`, or a CUDA level such as `"sm_90"`: the key of measurements."""
        if self.capability is None:
            return self.device_type
        major, minor = self.capability
        return f"sm_{major}{minor}"


def dtype_name(dtype: torch.dtype) -> str:
    """For example `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def detect(device: torch.device | str) -> Hardware:
    """The hardware of a torch device."""
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():  # the device of fake tensors may not exist
        return cuda_level(torch.cuda.get_device_capability(device))
    if device.type == "cpu":
        return _CPU
    return Hardware(device.type)


def cuda_level(capability: tuple[int, int]) -> Hardware:
    """A GPU of a compute capability, whether there is one here or not."""
    return Hardware("cuda", capability, has_fast_bfloat16=capability >= (8, 0))


def family_of(capability: tuple[int, int]) -> int:
    """The level in the tables of tiles: 80, 90, 100, or 86 for every GPU with 99 KiB of shared memory per program."""
    if capability >= (12, 0):
        return 86
    if capability >= (10, 0):
        return 100
    if capability >= (9, 0):
        return 90
    return 80 if capability == (8, 0) else 86


def recommended_dtype(hardware: Hardware) -> torch.dtype:
    """The fastest dtype that trains well: bfloat16 where it runs natively, else float16 on tensor cores (sm_70 up), else float32.

    float16 needs a gradient scaler; P100 (sm_60) computes it fast but has no tensor cores that accumulate in float32, so it and
    everything older use float32.
    """
    if hardware.has_fast_bfloat16:
        return torch.bfloat16
    if hardware.capability is not None and hardware.capability >= (7, 0):
        return torch.float16
    return torch.float32


def autocast_dtype(device: torch.device | str) -> torch.dtype | None:
    """The dtype that `torch.autocast` gives matrix products on a device; None where it is off, or unknown as on the meta device."""
    device_type = torch.device(device).type
    return torch.get_autocast_dtype(device_type) if _has_autocast(device_type) and torch.is_autocast_enabled(device_type) else None


def without_autocast(device: torch.device, *, traced_before: bool = False) -> AbstractContextManager[object]:
    """Tensor operations on a device in the dtypes of their inputs, whatever `torch.autocast` the caller is in.

    A backward runs under the autocast of its caller, so it needs this as much as its forward. A compiler may trace it where
    there is none (`traced_before`).
    """
    if not traced_before and autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False) if _has_autocast(device.type) else nullcontext()


def _has_autocast(device_type: str) -> bool:
    # The compiler of torch 2.9 cannot trace the question.
    return device_type in AUTOCAST or (not torch.compiler.is_compiling() and torch.amp.is_autocast_available(device_type))


def _cpu_has(*names: str) -> bool:
    # The probes are private in torch: a version that lacks one of them has no kernels for it.
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


# Asked once: the probes cannot be traced by torch.compile.
_CPU = Hardware("cpu", has_fast_bfloat16=_cpu_has("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
# The dtypes in which this CPU multiplies matrices slower than in float32.
SLOW_ON_CPU = frozenset(
    dtype
    for dtype, is_fast in ((torch.bfloat16, _CPU.has_fast_bfloat16), (torch.float16, _cpu_has("_is_amx_fp16_supported")))
    if not is_fast
)
