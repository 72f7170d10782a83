"""The flex backend on CUDA: both layouts against the oracle and the sdpa backend, and what surrounds the kernel.

Much of the time goes to compiling one kernel per kind of call: `pytest -m gpu -n 8` (pytest-xdist) shares it among cores.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.attention import Inputs, assert_rows_match_definition
from flexdilated import DilatedPattern, create_dilated_block_mask, dilated_attention, dilated_mask_mod, dilated_score_mod
from flexdilated.backends.flex import kernel as flex
from flexdilated.backends.flex.rows import Lanes, attend_rows
from flexdilated.core.call import Call
from flexdilated.core.pieces import UNBOUNDED
from tests.backends import flex_emulation
from tests.backends.flex_cases import CALLS, CASES, DEVICE, LAYOUTS, NONE, PLAIN, force, run, run_definition
from tests.cases import differentiate
from tests.tolerances import SINGLE

# What the compiler warns about differs by version and device (TF32 among it) and is not what is tested: shown, no failure.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

RESIDENT = 80 << 30  # bytes: q, k, v and out of 2**31 elements each, the packed pieces, and their float32 mixture


@pytest.fixture
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The layout that every call in the test takes, where it may choose."""
    force(monkeypatch, request.param)
    return request.param


each_layout = pytest.mark.parametrize("layout", LAYOUTS, indirect=True)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test's graphs count among another's."""
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    yield
    flex._compiled.cache_clear()


@pytest.mark.parametrize(("name", "layout"), CALLS, indirect=["layout"])
def test_flex_in_float32_equals_the_reference(name: str, layout: str) -> None:
    actual, expected = (f(*CASES[name], torch.float32) for f in (run, run_definition))
    torch.testing.assert_close([a.double() for a in actual], expected, **SINGLE)


@each_layout
def test_rows_past_the_last_32_bit_offset(layout: str) -> None:
    """2**31 elements end five sixths of the way through q, k and v."""
    num_tokens, heads, head_dim = 5 * 2**16 + 7, 60, 128
    assert (num_tokens - 1) * heads * head_dim >= 2**31
    if torch.cuda.mem_get_info()[0] < RESIDENT:
        pytest.skip(f"needs {RESIDENT >> 30} GiB of free GPU memory, got {torch.cuda.mem_get_info()[0] >> 30}")
    x = Inputs(*(torch.randn(1, num_tokens, heads, head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)), None)
    pattern = DilatedPattern((1024, 4096), (1, 4))
    with torch.no_grad():
        out = dilated_attention(*x[:3], pattern, backend="flex")
    assert_rows_match_definition(x, pattern, out, count=96)


# pytorch/pytorch#146377: keys that are read through strides once had garbage gradients.


@each_layout
@pytest.mark.parametrize("trust", [False, True])
def test_gradients_of_strided_keys(layout: str, trust: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "TRUST_STRIDED_GRADIENTS", trust)
    for is_causal in (False, True):
        actual, expected = (f(replace(PLAIN, is_causal=is_causal), NONE, torch.float32) for f in (run, run_definition))
        torch.testing.assert_close([a.double() for a in actual], expected, **SINGLE)


@pytest.mark.parametrize("is_causal", [False, True])
def test_narrow_block_mask_equals_torchs_own(is_causal: bool) -> None:
    pattern, num_tokens, heads = DilatedPattern.longnet(), 16384, 4
    joined = dilated_mask_mod(pattern, heads, seq_len=num_tokens, is_causal=is_causal)
    score_mod = dilated_score_mod(pattern, heads, seq_len=num_tokens, is_causal=is_causal)
    narrow = create_dilated_block_mask(pattern, heads, seq_len=num_tokens, is_causal=is_causal, device=DEVICE)
    wide = create_block_mask(joined, None, heads, num_tokens, num_tokens, device=DEVICE)
    assert narrow.kv_indices.shape[-1] < wide.kv_indices.shape[-1]

    def attend_under(block_mask: BlockMask) -> tuple[Tensor, ...]:
        attend = torch.compile(flex_attention, fullgraph=True)
        return differentiate(lambda *x: (attend(*x, score_mod=score_mod, block_mask=block_mask), x[0]), q, k, v, dout)

    q, k, v, dout = (torch.randn(1, heads, num_tokens, 64, device=DEVICE) for _ in range(4))
    torch.testing.assert_close(attend_under(narrow), attend_under(wide), **SINGLE)


def run_rows(attend: Any, is_causal: bool, modified: bool, device: str, dtype: torch.dtype) -> list[Tensor]:
    """out, lse, dq, dk, dv and the gradient of a score function's table, on CPU."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    q, k, v, table = draw(3, 2, 300, 64), draw(3, 1, 421, 64), draw(3, 1, 421, 64), draw(4, 4096)
    dout, ignored = draw(3, 2, 300, 64).detach(), (torch.rand(3, 421, generator=generator) < 0.2).to(device)
    heads = torch.tensor([[0, 1], [2, 3], [0, 1]], dtype=torch.int32, device=device)
    first = torch.tensor([337, 339, 1530], dtype=torch.int32, device=device)
    band = -UNBOUNDED, 110 if is_causal else UNBOUNDED
    lanes = Lanes(torch.tensor([0, 0, 1], dtype=torch.int32, device=device), heads, first, 3, -330, band)
    functions = {
        "score_mod": lambda s, b, h, i, j: s + table[h, i - j + 2048].to(s.dtype) * (b + 1),
        "mask_mod": lambda b, h, i, j: (i - j) % 5 != h,
    }
    call = Call(DilatedPattern((421,), (1,)), is_causal, 0.125, **(functions if modified else {}))
    out, lse = attend(q, k, v, ignored if modified else None, lanes, call)
    leaves = [q, k, v, *([table] if modified else [])]
    total = (out * dout).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()
    return [x.detach().cpu() for x in (out, lse, *torch.autograd.grad(total, leaves))]


@pytest.mark.parametrize("modified", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_cut_segments_equal_dense_operations(is_causal: bool, modified: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = run_rows(attend_rows, is_causal, modified, DEVICE, torch.float32)
    monkeypatch.setattr(flex, "call", flex_emulation.call)
    expected = run_rows(attend_rows, is_causal, modified, "cpu", torch.float64)
    torch.testing.assert_close([a.double() for a in actual], expected, **SINGLE)
