"""Every CUDA kernel against the oracle: dtypes, masks, grouped queries, odd head dims, gradients of lse, long rows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.backends import DispatchKey, choose_kernel
from flexdilated.backends.dense.sdpa import KERNELS
from flexdilated.core.hardware import detect
from tests.cases import Case, assert_twice_plain, differentiate, run_backend, run_reference
from tests.tolerances import EXACT, SINGLE

pytestmark = pytest.mark.gpu

KERNEL = {kernel.name: kernel for kernel in KERNELS}
SWITCHES = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PATTERN = DilatedPattern((31, 101, 257), (1, 3, 7))
CASES = {
    "plain": Case(PATTERN, batch=2, num_tokens=263, kv_heads=7, head_dim=24),
    "gqa": Case(PATTERN, num_tokens=263, kv_heads=3, group=2, head_dim=48),
    "odd_head_dim": Case(PATTERN, num_tokens=263, kv_heads=3, head_dim=17),
    "head_dim_1": Case(PATTERN, batch=2, num_tokens=263, kv_heads=7, head_dim=1),
    "head_dim_64": Case(PATTERN, num_tokens=263, kv_heads=2, head_dim=64),
    "grouped": Case(DilatedPattern((31, 101), (2, 3), heads="grouped"), batch=2, num_tokens=263, kv_heads=5, head_dim=24),
    "mask": Case(PATTERN, batch=3, num_tokens=263, kv_heads=3, head_dim=24, ignored=0.3),
    "mask_gqa": Case(PATTERN, batch=2, num_tokens=131, kv_heads=2, group=3, head_dim=13, ignored=0.7),
    "mask_all": Case(PATTERN, batch=2, num_tokens=67, kv_heads=3, head_dim=24, ignored=1.0),
    "documents": Case(PATTERN, num_tokens=263, kv_heads=3, head_dim=24, borders=(0, 1, 1, 130, 263)),
    "strided": Case(PATTERN, batch=2, num_tokens=131, kv_heads=3, head_dim=24, strided=True),
    "zero_padding": Case(DilatedPattern.torchscale((29, 11, 17), (1, 3, 5)), num_tokens=41, kv_heads=7, head_dim=24),
}


def skip_unless_it_runs(kernel: str, case: Case, dtype: torch.dtype) -> None:
    request = DispatchKey(detect("cuda"), dtype, case.head_dim, case.group, key_padding_mask=case.ignored is not None)
    reason = KERNEL[kernel].why_not(request)
    if reason is not None:
        pytest.skip(f"{kernel}: {reason}")


def run(kernel: str, case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv by one kernel, on CPU."""
    with sdpa_kernel(SWITCHES[kernel]):
        skip_unless_it_runs(kernel, case, dtype)
        request = DispatchKey(detect("cuda"), dtype, case.head_dim, case.group, key_padding_mask=case.ignored is not None)
        assert choose_kernel("sdpa", request).name == kernel
        return tuple(x.cpu() for x in run_backend(case, "sdpa", dtype, "cuda"))


@pytest.mark.parametrize(
    ("kernel", "dtype"), [("efficient", torch.float32), ("math", torch.float32), ("math", torch.float64)], ids=str
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_kernel_in_full_precision_equals_the_reference(name: str, is_causal: bool, kernel: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], is_causal=is_causal)
    actual, expected = run(kernel, case, dtype), run_reference(case, dtype)
    torch.testing.assert_close([a.double() for a in actual], expected, **(EXACT if dtype == torch.float64 else SINGLE))


@pytest.mark.parametrize("kernel", SWITCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_kernel_in_low_precision_errs_at_most_twice_as_much_as_plain_pytorch(
    name: str, is_causal: bool, dtype: torch.dtype, kernel: str
) -> None:
    case = replace(CASES[name], is_causal=is_causal, lse_gradient=False)
    assert_twice_plain(run(kernel, case, dtype), case, dtype, replace(case, pattern=PATTERN, ignored=None, borders=None))


@pytest.mark.parametrize("kernel", SWITCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_kernel_gives_the_gradient_of_lse(kernel: str, dtype: torch.dtype, is_causal: bool) -> None:
    case = replace(CASES["gqa"], is_causal=is_causal)
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
    case = replace(CASES["mask_all"], ignored=None)
    ignored = torch.tensor([[True], [False]], device="cuda").expand(2, case.num_tokens)
    out, lse, dq, dk, dv = differentiate(
        lambda q, k, v: dilated_attention(q, k, v, PATTERN, key_padding_mask=ignored, return_lse=True), *case.tensors(dtype, "cuda")
    )
    assert all(torch.equal(x[0], torch.zeros_like(x[0])) for x in (out, dq, dk, dv))
    assert (lse[0] == -torch.inf).all()
    assert all(x[1].isfinite().all() for x in (out, lse, dq, dk, dv))
