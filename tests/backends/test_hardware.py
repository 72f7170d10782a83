"""Which kernel and dtype each level of hardware gets; `FLEXDILATED_CAPABILITY` (`cpu`, `sm_75`) narrows the run to one level."""

import os

import pytest
import torch

from flexdilated.backends import DispatchKey, choose_kernel
from flexdilated.backends.dense import sdpa
from flexdilated.backends.kernel import Options
from flexdilated.core.hardware import SLOW_ON_CPU, detect, recommended_dtype
from tests.hardware import simulate

FLOAT64, FLOAT32, FLOAT16, BFLOAT16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# level: the kernel for float64, float32, float16, bfloat16; the same with a key padding mask; the recommended dtype.
CPU = ("cpu_flash", "cpu_flash", "cpu_flash", "cpu_flash")
BEFORE_AMPERE = ("math", "efficient", "efficient", "math")
AMPERE = ("math", "efficient", "flash", "flash")
AMPERE_MASKED = ("math", "efficient", "efficient", "efficient")
TABLE = {
    "cpu": (CPU, CPU, FLOAT32),
    "sm_60": (BEFORE_AMPERE, BEFORE_AMPERE, FLOAT32),
    "sm_70": (BEFORE_AMPERE, BEFORE_AMPERE, FLOAT16),
    "sm_75": (BEFORE_AMPERE, BEFORE_AMPERE, FLOAT16),
    "sm_80": (AMPERE, AMPERE_MASKED, BFLOAT16),
    "sm_90": (AMPERE, AMPERE_MASKED, BFLOAT16),
    "sm_100": (AMPERE, AMPERE_MASKED, BFLOAT16),
}
ASKED = os.environ.get("FLEXDILATED_CAPABILITY")
LEVELS = list(TABLE) if ASKED is None else [ASKED]
DTYPES = (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)


@pytest.fixture
def old_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cuDNN that torch does not prefer, whatever this torch was built with."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)


@pytest.mark.usefixtures("old_cudnn")
@pytest.mark.parametrize("level", LEVELS)
def test_level_gets_its_kernels(level: str) -> None:
    plain, masked, _ = TABLE[level]
    hardware = simulate(level)
    for dtype, kernel, masked_kernel in zip(DTYPES, plain, masked):
        assert choose_kernel("sdpa", DispatchKey(hardware, dtype, head_dim=64)).name == kernel
        assert (
            choose_kernel("sdpa", DispatchKey(hardware, dtype, head_dim=64, group=4, key_padding_mask=True)).name == masked_kernel
        )
        assert choose_kernel("sdpa", DispatchKey(hardware, dtype, head_dim=64, dropout=True)).name == "math"


@pytest.mark.parametrize("level", LEVELS)
def test_level_gets_its_dtype(level: str) -> None:
    assert recommended_dtype(simulate(level)) == TABLE[level][2]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_cpu_without_instructions_for_a_dtype_computes_in_float32(
    dtype: torch.dtype, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "SLOW_ON_CPU", {dtype})
    kernel = choose_kernel("sdpa", DispatchKey(simulate("cpu"), dtype, head_dim=24, group=3))
    q, dout = (torch.randn(2, 6, 67, 24, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, 2, 67, 24, dtype=dtype) for _ in range(2))
    dlse, ignored = torch.randn(2, 6, 67), torch.rand(2, 67) < 0.3
    ignored[:, 0] = False
    options = Options(is_causal, 0.3, ignored)
    out, lse = kernel.forward(q, k, v, options)
    wide_out, wide_lse = kernel.forward(q.float(), k.float(), v.float(), options)
    assert out.dtype == dtype
    assert torch.equal(out, wide_out.to(dtype))
    assert torch.equal(lse, wide_lse)
    terms = kernel.backward(dout, dlse, q, k, v, out, lse, options)
    # The gradient of lse is a column of dout, in the dtype of dout.
    wide = kernel.backward(dout.float(), dlse.to(dtype).float(), q.float(), k.float(), v.float(), out.float(), lse, options)
    assert all(map(torch.equal, terms, wide))


@pytest.mark.usefixtures("old_cudnn")
def test_wide_heads_leave_flash_for_the_memory_efficient_kernel() -> None:
    for head_dim, kernel in ((128, "flash"), (256, "flash"), (257, "efficient"), (512, "efficient")):
        assert choose_kernel("sdpa", DispatchKey(simulate("sm_90"), FLOAT16, head_dim)).name == kernel


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_detect_knows_this_cpu(device: str | torch.device) -> None:
    hardware = detect(device)
    assert (hardware.device_type, hardware.capability) == ("cpu", None)
    assert recommended_dtype(hardware) == (BFLOAT16 if hardware.has_fast_bfloat16 else FLOAT32)
    assert (BFLOAT16 in SLOW_ON_CPU) is not hardware.has_fast_bfloat16
