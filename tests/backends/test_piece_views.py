"""Dense kernels on pieces as on a GPU: read in place, merged and added by the Triton kernels, here in the interpreter."""

import math
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.backends import KERNEL_BACKENDS
from flexdilated.backends.dense import piece_loop
from flexdilated.backends.dense.math import MATH
from flexdilated.backends.kernel import Kernel, Options
from flexdilated.backends.triton import backend
from flexdilated.core.lse import merge_
from tests.backends import interpreter
from tests.cases import Case, run_backend, run_reference
from tests.hardware import simulate
from tests.tolerances import SINGLE

if not backend.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1, which is not set where there is a GPU", allow_module_level=True)
triton = pytest.importorskip("triton")
merging = pytest.importorskip("flexdilated.backends.triton.merging")

PATTERN = DilatedPattern((19, 43), (1, 3))
NESTED = DilatedPattern((8, 16), (1, 2))
CASES = {
    "plain": Case(PATTERN, batch=2, kv_heads=3, head_dim=8),
    "whole_segments": Case(NESTED, batch=3, num_tokens=32, kv_heads=4, head_dim=8),
    "whole_segments_groups": Case(NESTED, batch=2, num_tokens=32, kv_heads=2, group=2, head_dim=8),
    "interleaved_groups": Case(DilatedPattern((17, 43), (2, 3), offsets="interleaved"), kv_heads=4, group=2, head_dim=8),
    "groups": Case(PATTERN, batch=2, kv_heads=2, group=2, head_dim=5, is_causal=True),
    "grouped_heads": Case(DilatedPattern((11, 29), (2, 3), heads="grouped"), batch=2, kv_heads=3, group=2, head_dim=8),
    "mask": Case(PATTERN, batch=2, kv_heads=2, head_dim=8, ignored=0.5),
    "documents": Case(PATTERN, kv_heads=3, head_dim=8, borders=(0, 13, 13, 43), is_causal=True),
    "zero_keys": Case(DilatedPattern.torchscale((29, 11, 17), (1, 3, 5)), num_tokens=41, kv_heads=3, head_dim=8),
}
# No branch keeps everything, or the head dim is padded.
NOT_WRITTEN = ("interleaved_groups", "grouped_heads", "groups")
RETURNED = ("whole_segments_groups", "mask", "zero_keys")


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interpreter.mend(patch)
        yield


class Dense:
    """A stand-in for a kernel of GPUs, as plain operations; notes which of its calls wrote memory that it was given."""

    def __init__(self, *, own: bool) -> None:
        self.own, self.wrote, self.calls = own, 0, 0
        self.kernel = Kernel(
            "dense", lambda request: None, self.forward, self.backward, head_dim_multiple=4, takes_dlse=own, writes=own
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, into: Any = None) -> tuple[Tensor, ...]:
        assert into is None or self.own
        out, lse = MATH.forward(q, k, v, options)
        return *self._put(None if into is None else (into,), (out,)), lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        options: Options,
        into: Any = None,
        dlse: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        assert (into is None and dlse is None) or self.own
        return self._put(into, MATH.backward(dout, dlse, q, k, v, out, lse, options))

    def _put(self, into: Any, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.calls += 1
        if into is None:
            return results
        self.wrote += 1
        for target, result in zip(into, results, strict=True):
            target.copy_(result)
        return into


def as_on_gpu(patch: pytest.MonkeyPatch, kernel: Kernel, kernels: Any) -> None:
    patch.setattr(piece_loop, "packs", lambda device: False)
    patch.setitem(KERNEL_BACKENDS, "sdpa", lambda request: (kernel,))
    patch.setattr(piece_loop, "merging", lambda request: kernels)


@pytest.mark.parametrize(("name", "own"), [*((name, True) for name in CASES), *((name, False) for name in RETURNED)])
def test_every_option_equals_the_definition(name: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case, dense = CASES[name], Dense(own=own)
    as_on_gpu(monkeypatch, dense.kernel, merging)
    torch.testing.assert_close(
        [actual.double() for actual in run_backend(case, "sdpa", torch.float32)], run_reference(case, torch.float32), **SINGLE
    )
    assert (dense.wrote > 0) == (own and name not in NOT_WRITTEN)


@pytest.mark.parametrize("kernels", [merging, None], ids=["triton", "torch"])
def test_pieces_are_read_and_written_in_place(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation of a forward and backward makes a copy as large as a head of the sequence, but the kernel's own results."""
    given: list[Tensor] = []

    class Watching(Dense):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, into: Any = None) -> tuple[Tensor, ...]:
            given.extend((q, k, v))
            return super().forward(q, k, v, options, into)

        def backward(
            self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *more: Any, **own: Any
        ) -> tuple[Tensor, ...]:
            given.extend((dout, q, k, v, out))
            return super().backward(dout, q, k, v, out, *more, **own)

    dense = Watching(own=True)
    as_on_gpu(monkeypatch, dense.kernel, kernels)
    case = Case(DilatedPattern((64, 128, 256), (1, 2, 4)), num_tokens=256 + 37, kv_heads=3, head_dim=4)
    q, k, v, dout, dlse = case.tensors(torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dilated_attention(*leaves, case.pattern, return_lse=True, backend="sdpa")
    torch.autograd.grad((out, lse), leaves, (dout, dlse))
    memory = {x.untyped_storage().data_ptr() for x in (q, k, v, out, dout)}
    assert {x.untyped_storage().data_ptr() for x in given} == memory
    assert dense.wrote == 4  # whole segments and the last one, forward and backward


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 1), (torch.float32, 128), (torch.float16, 24), (torch.bfloat16, 128)], ids=str
)
def test_merging_and_adding_equal_torch(dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(0)
    out, part = torch.randn(2, 90, 3, head_dim).to(dtype)[:, ::2].transpose(1, 2), torch.randn(2, 3, 50, head_dim).to(dtype)
    lse, part_lse = torch.randn(2, 90, 3)[:, ::2].transpose(1, 2), torch.randn(2, 3, 50)
    lse[:, 1, :30], part_lse[:, 1, 20:] = -math.inf, -math.inf  # rows that one side reaches, or neither
    out[:, 1, :30], part[:, 1, 20:] = 0.0, 0.0
    part[0, 0, 7] = math.nan
    total = out.clone()
    expected = (out.float(), lse.double().float())
    merge_(*expected, part[:, :, :45].float(), part_lse[:, :, :45])
    merging.merge_into(out, lse, part, part_lse)
    torch.testing.assert_close(out, expected[0].to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(lse, expected[1])
    by_sequences = (expected[0].to(dtype), expected[1].unflatten(0, (2, 1)).contiguous())  # and segments, one of each here
    merging.merge_into(by_sequences[0], by_sequences[1], part, part_lse)
    merging.merge_into(out, lse, part, part_lse)
    torch.testing.assert_close(by_sequences[1][:, 0], lse)
    added = (total.float() + part[:, :, :45].float()).to(dtype)
    merging.add_to(total, part)
    torch.testing.assert_close(total, added, equal_nan=True)


class Unlaunchable:
    """The kernels where triton cannot compile or load them."""

    def __init__(self, fault: Exception) -> None:
        self.fault, self.calls = fault, 0

    def merge_into(self, *tensors: Tensor) -> None:
        self.calls += 1
        raise self.fault

    add_to = merge_into


FAULTS = [
    AssertionError("libcuda.so cannot found!"),
    PermissionError(13, "Permission denied", "/home/user/.triton/cache"),
    subprocess.CalledProcessError(1, ["gcc"]),
    triton.errors.TritonError("ptxas fatal: Value 'sm_130a' is not defined"),
    RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
]


@pytest.mark.parametrize(("name", "fault"), [*(("groups", fault) for fault in FAULTS), ("documents", FAULTS[0])])
def test_a_triton_that_fails_is_left_out_after_one_warning(name: str, fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kernels, merging_of = CASES[name], Unlaunchable(fault), piece_loop.merging
    as_on_gpu(monkeypatch, Dense(own=True).kernel, None)
    monkeypatch.setattr(piece_loop, "merging", lambda request: None if backend.UNBUILT else kernels)
    monkeypatch.setattr(backend, "UNBUILT", None)
    expected = run_reference(case, torch.float32)
    with pytest.warns(UserWarning, match=re.escape(f"{type(fault).__name__}: {fault}); backend='sdpa' and 'flash' combine")):
        first = run_backend(case, "sdpa", torch.float32)
    second = run_backend(case, "sdpa", torch.float32)  # a warning is an error here
    for results in (first, second):
        torch.testing.assert_close([actual.double() for actual in results], expected, **SINGLE)
    assert kernels.calls == 1
    assert merging_of(piece_loop.DispatchKey(simulate("sm_90"), torch.bfloat16, 64)) is None
    assert backend.why_not_unasked(piece_loop.DispatchKey(simulate("sm_90"), torch.bfloat16, 64)) == backend.UNBUILT


def test_backward_alone_leaves_out_a_triton_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case, kernels = CASES["groups"], Unlaunchable(FAULTS[0])
    monkeypatch.setattr(backend, "UNBUILT", None)
    kernels.merge_into = merging.merge_into  # type: ignore[method-assign]
    as_on_gpu(monkeypatch, Dense(own=True).kernel, kernels)
    with pytest.warns(UserWarning, match="libcuda"):
        results = run_backend(case, "sdpa", torch.float32)
    torch.testing.assert_close([actual.double() for actual in results], run_reference(case, torch.float32), **SINGLE)


def test_too_little_memory_is_no_fault_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_gpu(monkeypatch, Dense(own=True).kernel, Unlaunchable(torch.OutOfMemoryError("CUDA out of memory")))
    monkeypatch.setattr(backend, "UNBUILT", None)
    with pytest.raises(torch.OutOfMemoryError):
        run_backend(CASES["plain"], "sdpa", torch.float32)
    assert backend.UNBUILT is None


def test_failure_to_launch_in_a_capture_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_gpu(monkeypatch, Dense(own=True).kernel, Unlaunchable(FAULTS[-1]))
    monkeypatch.setattr(backend, "UNBUILT", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="device kernel image"):
        run_backend(CASES["plain"], "sdpa", torch.float32)
    assert backend.UNBUILT is None


def test_where_triton_kernels_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "UNBUILT", None)
    monkeypatch.setattr(backend, "INSTALLED", (3, 6))
    request = piece_loop.DispatchKey(simulate("sm_90"), torch.bfloat16, 64, key_padding_mask=True, dropout=True)
    assert piece_loop.merging(request) is merging
    for change in ({"hardware": simulate("cpu")}, {"hardware": simulate("sm_75")}, {"dtype": torch.float64}, {"head_dim": 512}):
        assert piece_loop.merging(replace(request, **change)) is None  # type: ignore[arg-type]
    monkeypatch.setattr(backend, "INSTALLED", None)
    assert piece_loop.merging(request) is None
