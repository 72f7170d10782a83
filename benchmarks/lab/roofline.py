"""The least time that a call of each backend for GPUs takes, by what it computes and moves and a device's published rates.

    python -m benchmarks.lab.roofline

A launch takes at least its floating-point operations at the device's rate, and its bytes at the memory's; a call the sum over its
launches. The time that launching itself takes is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.lab.traffic import (
    BACKWARD_PRODUCTS,
    CUDNN,
    EFFICIENT,
    FLASH,
    FLASH_ATTN,
    FLASH_ATTN_4,
    FORWARD_PRODUCTS,
    Library,
    Step,
    fused_backward,
    fused_forward,
    group_of,
    in_place_backward,
    in_place_forward,
    packed_backward,
    packed_forward,
    walk_backward,
    walk_forward,
)
from flexdilated.backends.flex.cost import Shape
from flexdilated.core.pattern import DilatedPattern


class Work(NamedTuple):
    """The steps of one direction of a call."""

    steps: tuple[Step, ...]

    @property
    def flops(self) -> int:
        return sum(step.flops for step in self.steps)

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps)

    @property
    def launches(self) -> int:
        return sum(step.launches for step in self.steps)


class Device(NamedTuple):
    """Published rates: dense 16-bit matrix products with float32 sums, and memory.

    NVIDIA's data sheets of H100 and H200 print products with sparsity, 1,979 teraFLOPS: twice the 989.4 of the white paper. The
    memory of the T4 has 320 GB/s in some sheets and 300 in others.
    """

    name: str
    capability: tuple[int, int]
    flops_per_second: float
    bytes_per_second: float
    source: str


DEVICES = (
    Device("H100", (9, 0), 989.4e12, 3.35e12, "NVIDIA H100 Tensor Core GPU Architecture white paper and datasheet, SXM5"),
    Device("H200", (9, 0), 989.4e12, 4.8e12, "NVIDIA H200 Tensor Core GPU datasheet, SXM"),
    Device("A100", (8, 0), 312e12, 2.039e12, "NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM"),
    Device("T4", (7, 5), 65e12, 320e9, "NVIDIA T4 Tensor Core GPU datasheet"),
)


def seconds(work: Work, device: Device) -> float:
    """The least time that a device needs at its published rates."""
    return math.fsum(max(step.flops / device.flops_per_second, step.bytes / device.bytes_per_second) for step in work.steps)


def useful_flops(pattern: DilatedPattern, shape: Shape) -> tuple[int, int]:
    """Floating-point operations of the pattern's own pairs, forward and backward."""
    pairs = shape.batch * pattern.count_pairs(shape.num_tokens, shape.num_kv_heads, is_causal=shape.is_causal) * group_of(shape)
    return 2 * FORWARD_PRODUCTS * shape.head_dim * pairs, 2 * BACKWARD_PRODUCTS * shape.head_dim * pairs


Steps = Callable[[DilatedPattern, Shape], Iterator[Step]]


class Backend(NamedTuple):
    """A backend's kernel: its name, the least level of hardware, and the steps of either direction."""

    name: str
    capability: tuple[int, int]
    forward: Steps
    backward: Steps


def _library(name: str, capability: tuple[int, int], library: Library) -> Backend:
    return Backend(
        name,
        capability,
        lambda pattern, shape: walk_forward(pattern, shape, library),
        lambda pattern, shape: walk_backward(pattern, shape, library),
    )


BACKENDS = (
    Backend("triton", (8, 0), in_place_forward, in_place_backward),
    _library("sdpa flash", (8, 0), FLASH),
    _library("sdpa cudnn", (8, 0), CUDNN),
    _library("sdpa efficient", (5, 0), EFFICIENT),
    _library("flash, version 2", (8, 0), FLASH_ATTN),
    _library("flash, version 4", (9, 0), FLASH_ATTN_4),
    Backend("flex packed", (8, 0), packed_forward, packed_backward),
    Backend("flex fused", (8, 0), fused_forward, fused_backward),
)


def work(backend: Backend, pattern: DilatedPattern, shape: Shape) -> tuple[Work, Work]:
    """Forward and backward of one call.

    Raises:
        ValueError: If the pattern has torchscale's zero keys or constant weights.
    """
    return Work(tuple(backend.forward(pattern, shape))), Work(tuple(backend.backward(pattern, shape)))


def main() -> None:
    """Print, for published patterns, bytes and launches of each backend and its least time on each device."""
    longnet, gigapath = DilatedPattern.longnet(), replace(DilatedPattern.gigapath(), zero_padding=False, detach_weights=False)
    for name, pattern in (("longnet", longnet), ("gigapath", gigapath)):
        for num_tokens in (1 << 15, 1 << 17, 1 << 20):
            for head_dim in (64, 128):
                shape = Shape(1, num_tokens, 12, 12, head_dim, 2, False)
                print(
                    f"\n{name}, {num_tokens:,} tokens, 12 heads of {head_dim}, 16 bits, not causal: least ms / most useful TFLOP/s"
                )
                print(f"{'backend':15} {'pass':8} {'GB':>8} {'launches':>8}" + "".join(f"{device.name:>13}" for device in DEVICES))
                for backend in BACKENDS:
                    for direction, useful, total in zip(
                        ("forward", "backward"), useful_flops(pattern, shape), work(backend, pattern, shape)
                    ):
                        row = f"{backend.name:15} {direction:8} {total.bytes / 1e9:8.2f} {total.launches:8}"
                        for device in DEVICES:
                            least = seconds(total, device)
                            bound = f"{least * 1e3:.3g} / {useful / least / 1e12:.0f}"
                            row += f"{bound if device.capability >= backend.capability else '-':>13}"
                        print(row)
    for device in DEVICES:
        print(
            f"{device.name}: {device.flops_per_second / 1e12:g} TFLOP/s, {device.bytes_per_second / 1e12:g} TB/s ({device.source})"
        )


if __name__ == "__main__":
    main()
