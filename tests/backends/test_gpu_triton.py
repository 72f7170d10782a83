"""Our own kernels on a CUDA device: descriptors, shared launches, captures, equal runs, far strides; values are in test_gpu.py."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.backends import DispatchKey, why_not
from flexdilated.backends.triton.tiles import DESCRIBED, LEAST_DESCRIBED_ROWS, tiles_of
from flexdilated.core.hardware import detect
from tests.backends import interpreter
from tests.backends.gpu_cases import CASES
from tests.cases import Case, differentiate, run_backend

pytest.importorskip("triton")

from flexdilated.backends.triton import groups, launch

pytestmark = pytest.mark.gpu


def skip_unless_it_runs(case: Case, dtype: torch.dtype) -> None:
    request = DispatchKey(detect("cuda"), dtype, case.head_dim, case.group, key_padding_mask=case.ignored is not None)
    reason = why_not("triton", request)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("described")])
def test_long_segments_load_by_descriptors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the table of this GPU's level says so: else the cases of that name show nothing of them."""
    case = CASES[name]
    skip_unless_it_runs(case, torch.bfloat16)
    level = torch.cuda.get_device_capability()
    chosen = {
        kernel
        for kernel in DESCRIBED
        if tiles_of(kernel, level, case.head_dim, 2, described_rows=LEAST_DESCRIBED_ROWS, group=case.group).described
    }
    launched = interpreter.watch(monkeypatch)
    run_backend(case, "triton", torch.bfloat16, "cuda")
    assert {kernel for kernel, constants in launched if constants.get("DESCRIBED")} == chosen


@pytest.mark.parametrize("name", ["many_documents", "described_documents"])
def test_pieces_that_share_a_launch_are_equal_in_every_bit_to_each_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    skip_unless_it_runs(case, torch.bfloat16)
    found, launched = [], interpreter.watch(monkeypatch)
    for least in (2, 1 << 20):
        monkeypatch.setattr(groups, "LEAST", least)
        monkeypatch.setattr(launch, "PLANS", {})
        groups._groups.cache_clear()
        launched.clear()
        found.append(run_backend(case, "triton", torch.bfloat16, "cuda"))
        assert any(constants.get("TABLED") for _, constants in launched) == (least == 2)
    groups._groups.cache_clear()
    assert all(map(torch.equal, *found))


def test_the_host_does_not_wait_for_launches_that_many_pieces_share() -> None:
    case = CASES["many_documents"]
    skip_unless_it_runs(case, torch.bfloat16)
    q, k, v, dout, _ = case.tensors(torch.bfloat16, "cuda")
    borders = torch.tensor(range(0, 2301, 100))  # on the CPU: those on a device are waited for
    run = lambda q, k, v: dilated_attention(q, k, v, case.pattern, return_lse=True, cu_seqlens=borders, backend="triton")  # noqa: E731
    differentiate(run, q, k, v, dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        differentiate(run, q, k, v, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_capture_of_documents_compiles_nothing_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    case = Case(DilatedPattern((64, 250), (1, 3)), num_tokens=1100, kv_heads=3, head_dim=40)  # no other test has this head dim
    skip_unless_it_runs(case, torch.bfloat16)
    q, k, v, dout, _ = case.tensors(torch.bfloat16, "cuda")
    borders = torch.tensor(range(0, 1101, 100))
    run = lambda q, k, v: dilated_attention(q, k, v, case.pattern, cu_seqlens=borders, return_lse=True, backend="triton")  # noqa: E731
    compiled: list[object] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **options: compiled.append(options["repr"]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        differentiate(run, q, k, v, dout)
    torch.cuda.current_stream().wait_stream(stream)
    assert compiled
    compiled.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = differentiate(run, q, k, v, dout)
    assert compiled == []
    q.copy_(q.flip(1))
    graph.replay()
    assert all(map(torch.equal, found, differentiate(run, q, k, v, dout)))


BUSY = """
import torch
x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
print("begun", flush=True)
while True:
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize("name", ["gqa", "described", "described_128"])
def test_runs_are_equal_in_every_bit(name: str) -> None:
    """Also beside another process, whose turns on the device delay what is on its way to shared memory."""
    case = CASES[name]
    skip_unless_it_runs(case, torch.float16)
    q, k, v, dout, _ = case.tensors(torch.float16, "cuda")
    run = lambda q, k, v: dilated_attention(  # noqa: E731
        q, k, v, case.pattern, return_lse=True, backend="triton", **case.options()
    )
    expected = differentiate(run, q, k, v, dout)
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None
            assert busy.stdout.readline() == b"begun\n"
            for _ in range(300):
                assert all(map(torch.equal, differentiate(run, q, k, v, dout), expected))
        finally:
            busy.kill()


def test_rows_that_share_memory_are_read_as_any_others() -> None:
    """Expanded keys have a stride of 0, which no descriptor takes."""
    case = replace(CASES["described"], group=1)
    skip_unless_it_runs(case, torch.bfloat16)
    q, k, v, dout, _ = case.tensors(torch.bfloat16, "cuda")
    run = lambda q, k, v: dilated_attention(q, k, v, case.pattern, return_lse=True, backend="triton")  # noqa: E731
    for one in (k[:, :1].expand_as(k), k[:, :, :1].expand_as(k)):
        for a, e in zip(differentiate(run, q, one, v, dout), differentiate(run, q, one.contiguous(), v, dout)):
            torch.testing.assert_close(a, e, atol=2**-7 * e.abs().max().item(), rtol=0.0)  # other tiles add up in another order


def test_strides_of_two_gigabytes_are_addressed() -> None:
    """Each head of a tensor whose heads come first lies 2^31 elements behind the one before, those of a group too."""
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free memory")
    case = Case(DilatedPattern((64,), (1,)), num_tokens=64, kv_heads=2, group=2, head_dim=64)
    skip_unless_it_runs(case, torch.float16)
    q, k, v, dout, dlse = case.tensors(torch.float16, "cuda")
    storage = torch.empty((3 << 31) + (1 << 20), dtype=torch.float16, device="cuda")

    def far(x: torch.Tensor) -> torch.Tensor:
        return storage.as_strided(x.shape, (0, 64, 1 << 31, 1)).copy_(x)

    run = lambda q, k, v: dilated_attention(q, k, v, case.pattern, return_lse=True, backend="triton")  # noqa: E731
    expected = differentiate(run, q, k, v, dout, dlse)
    assert all(map(torch.equal, differentiate(run, far(q), k, v, dout, dlse), expected))
