"""Every CUDA kernel against the oracle: dtypes, masks, grouped queries, odd head dims, gradients of lse, long rows."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexdilated import dilated_attention, reference
from flexdilated.backends import DispatchKey, choose_kernel, why_not
from flexdilated.backends.dense.sdpa import KERNELS
from flexdilated.core.hardware import detect
from tests.backends.flex_cases import LAYOUTS, force
from tests.backends.gpu_cases import CASES, PATTERN, SHORT
from tests.cases import Case, assert_twice_plain, differentiate, run_backend, run_reference
from tests.tolerances import EXACT, SINGLE

# What the compiler of flex warns about differs by version and device.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

OF_SDPA = {kernel.name: kernel for kernel in KERNELS}
SWITCHES = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Forms of triton from sm_90 on: elsewhere launches take none of them.
BACKENDS = {"the flash package": "flash", "triton": "triton", "triton, HOSTS SUMS": "triton", "triton, AHEAD": "triton"}
BACKENDS |= {f"flex, {layout}": "flex" for layout in LAYOUTS}
WIDE = [(name, torch.float32) for name in ("efficient", "math", "triton")] + [("math", torch.float64)]
HALF = [(name, dtype) for name in (*SWITCHES, *BACKENDS) for dtype in (torch.bfloat16, torch.float16)]


def calls(kernels: list[tuple[str, torch.dtype]]) -> list[tuple[str, torch.dtype, str, bool]]:
    """Each kernel with its cases: those of several tiles for triton alone."""
    return [
        (kernel, dtype, name, is_causal)
        for kernel, dtype in kernels
        for name in (CASES if kernel.startswith("triton") else SHORT)
        for is_causal in (False, True)
    ]


def skip_unless_it_runs(kernel: str, case: Case, dtype: torch.dtype) -> DispatchKey:
    masked, windowed = case.ignored is not None, case.pattern.window is not None
    request = DispatchKey(
        detect("cuda"), dtype, case.head_dim, case.group, key_padding_mask=masked, window=windowed, dlse=case.lse_gradient
    )
    reason = OF_SDPA[kernel].why_not(request) if kernel in OF_SDPA else why_not(BACKENDS[kernel], request)
    if reason is not None:
        pytest.skip(f"{kernel}: {reason}")
    return request


def run(kernel: str, case: Case, dtype: torch.dtype, patch: pytest.MonkeyPatch) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv by one kernel, on CPU."""
    backend, _, forms = kernel.partition(", ")
    if backend == "flex":
        force(patch, forms)
    elif forms:
        for form in forms.split():
            patch.setattr(f"flexdilated.backends.triton.launch.{form}", True)
    with sdpa_kernel(SWITCHES[kernel]) if kernel in SWITCHES else nullcontext():
        request = skip_unless_it_runs(kernel, case, dtype)
        assert kernel not in SWITCHES or choose_kernel("sdpa", request).name == kernel
        return tuple(x.cpu() for x in run_backend(case, BACKENDS.get(kernel, "sdpa"), dtype, "cuda"))


@pytest.mark.parametrize(("kernel", "dtype", "name", "is_causal"), calls(WIDE), ids=str)
def test_full_precision_equals_the_reference(
    kernel: str, dtype: torch.dtype, name: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASES[name], is_causal=is_causal)
    actual, expected = run(kernel, case, dtype, monkeypatch), run_reference(case, dtype)
    torch.testing.assert_close([a.double() for a in actual], expected, **(EXACT if dtype == torch.float64 else SINGLE))


@pytest.mark.parametrize(("kernel", "dtype", "name", "is_causal"), calls(HALF), ids=str)
def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch(
    kernel: str, dtype: torch.dtype, name: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASES[name], is_causal=is_causal, lse_gradient=False)
    whole = replace(case, pattern=PATTERN, ignored=None, borders=None, scale=None if case.scale is None else abs(case.scale))
    assert_twice_plain(run(kernel, case, dtype, monkeypatch), case, dtype, whole)


@pytest.mark.parametrize("kernel", SWITCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_kernel_gives_the_gradient_of_lse(kernel: str, dtype: torch.dtype, is_causal: bool) -> None:
    case = replace(SHORT["gqa"], is_causal=is_causal)
    with sdpa_kernel(SWITCHES[kernel]):
        skip_unless_it_runs(kernel, case, dtype)
        q, k, v, _, dlse = (x.cuda() for x in case.tensors(dtype))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        _, lse = dilated_attention(*leaves, PATTERN, is_causal=is_causal, return_lse=True, backend="sdpa")
        grads = torch.autograd.grad(lse, leaves, dlse)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    _, expected_lse = reference.dilated_attention(*exact, PATTERN, is_causal=is_causal)
    expected = torch.autograd.grad(expected_lse, exact[:2], dlse.double())
    # The gradients are sums of rounded products: three roundings of the largest.
    for actual, e in zip(grads, expected):
        torch.testing.assert_close(actual.double(), e, atol=3 * torch.finfo(dtype).eps * e.abs().max().item(), rtol=0.0)
    assert torch.equal(grads[2], torch.zeros_like(v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_empty_rows_are_zero_with_zero_gradients(dtype: torch.dtype) -> None:
    case = replace(SHORT["mask_all"], ignored=None)
    ignored = torch.tensor([[True], [False]], device="cuda").expand(2, case.num_tokens)
    out, lse, dq, dk, dv = differentiate(
        lambda q, k, v: dilated_attention(q, k, v, PATTERN, key_padding_mask=ignored, return_lse=True), *case.tensors(dtype, "cuda")
    )
    assert all(torch.equal(x[0], torch.zeros_like(x[0])) for x in (out, dq, dk, dv))
    assert (lse[0] == -torch.inf).all()
    assert all(x[1].isfinite().all() for x in (out, lse, dq, dk, dv))
