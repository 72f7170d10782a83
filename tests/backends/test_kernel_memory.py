"""What CUDA's kernels ask of strides and addresses, kept on a CPU: stand-ins for aten's operators read memory as the kernels do."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flexdilated import DilatedPattern
from flexdilated.backends import KERNEL_BACKENDS
from flexdilated.backends.dense import piece_loop, sdpa
from flexdilated.backends.dense.sdpa import KERNELS
from flexdilated.backends.kernel import Kernel, Options
from tests.cases import Case, run_backend, run_reference

KERNEL = {kernel.name: kernel for kernel in KERNELS}


def assert_loadable(*tensors: Tensor) -> None:
    """Rows begin at multiples of 16 bytes and their elements lie side by side."""
    for x in tensors:
        assert x.stride(-1) == 1
        steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1]) if size > 1]
        assert all(step * x.element_size() % 16 == 0 for step in steps)
        assert x.data_ptr() % 16 == 0


def scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    s = q.double() @ k.double().transpose(-1, -2) * scale
    s = s if bias is None else s + bias.double()
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf) if is_causal else s


class Efficient:
    """aten's memory-efficient attention in half precision, which finds row m of `out` at m * heads * D whatever its strides."""

    @staticmethod
    def _scaled_dot_product_efficient_attention(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, wants_lse: bool, p: float, is_causal: bool, *, scale: float
    ) -> tuple[Tensor, Tensor, None, None]:
        assert_loadable(q, k, v)
        s = scores(q, k, bias, is_causal, scale)
        lse = torch.logsumexp(s, dim=-1)
        out = torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v.double()
        rows_first = torch.empty(out.transpose(1, 2).shape, dtype=q.dtype).copy_(out.transpose(1, 2))
        return rows_first.transpose(1, 2), F.pad(lse.float(), (0, -lse.shape[-1] % 32), value=math.inf), None, None

    @staticmethod
    def _scaled_dot_product_efficient_attention_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        seed: Tensor,
        offset: Tensor,
        p: float,
        wanted: tuple[bool, ...],
        is_causal: bool,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        assert_loadable(dout, q, k, v, out)
        b, h, m, d = out.shape
        strides = (out.stride(0), out.stride(1), h * d, 1)
        last = out.storage_offset() + sum((size - 1) * step for size, step in zip(out.shape, strides))
        assert last < out.untyped_storage().nbytes() // out.element_size()  # else it reads past its memory
        read = out.as_strided((b, h, m, d), strides, out.storage_offset())
        delta = (dout.double() * read.double()).sum(dim=-1, keepdim=True)
        weights = torch.exp(scores(q, k, bias, is_causal, scale) - lse[..., :m, None].double())
        dscores = weights * (dout.double() @ v.double().transpose(-1, -2) - delta) * scale
        grads = (dscores @ k.double(), dscores.transpose(-1, -2) @ q.double(), weights.transpose(-1, -2) @ dout.double())
        return *(x.to(q.dtype) for x in grads), None  # type: ignore[return-value]


@pytest.fixture
def efficient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory-efficient kernel, given views instead of slabs, as on CUDA."""
    monkeypatch.setattr(piece_loop, "packs", lambda device: False)
    monkeypatch.setattr(sdpa, "aten", Efficient)
    kernel = replace(KERNEL["efficient"], why_not=lambda request: None)
    monkeypatch.setitem(KERNEL_BACKENDS, "sdpa", lambda request: (kernel,))


@pytest.mark.usefixtures("efficient")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        Case(DilatedPattern((16, 32, 64), (1, 2, 4)), num_tokens=67, kv_heads=4, head_dim=16, lse_gradient=False),
        Case(DilatedPattern((13, 64), (1, 4)), batch=2, num_tokens=67, kv_heads=2, group=2, head_dim=7, is_causal=True),
        Case(DilatedPattern.torchscale((13, 64), (1, 4)), num_tokens=67, kv_heads=4, head_dim=16, ignored=0.3, strided=True),
    ],
    ids=["plain", "gqa_causal_lse", "detached_mask"],
)
def test_the_efficient_backward_reads_the_outputs_that_it_is_meant_to(case: Case, dtype: torch.dtype) -> None:
    actual, expected = run_backend(case, "auto", dtype), run_reference(case, dtype)
    for i in (0, 2, 3, 4):
        error = (actual[i].double() - expected[i]).norm() / expected[i].norm()
        assert error < 4 * torch.finfo(dtype).eps  # of what half precision rounds; a wrong row gives 0.1 and more


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
def test_kernels_are_given_rows_that_begin_aligned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Tensor, ...]] = []

    class SeenError(Exception):
        pass

    class Watching:
        def __getattr__(self, operator: str) -> object:
            def run(*arguments: object, **options: object) -> None:
                tensors = arguments[:5] if operator.endswith("backward") else arguments[:3]
                if operator == "_scaled_dot_product_efficient_attention_backward":
                    tensors = (*arguments[:4], arguments[5])
                given.append(tensors)  # type: ignore[arg-type]
                raise SeenError

            return run

    monkeypatch.setattr(sdpa, "aten", Watching())
    kernel: Kernel = KERNEL[name]
    whole = torch.randn(2, 3, 11, 24, dtype=torch.float16)
    views = {
        "a slice of a last dim": whole[..., 3:11],
        "an odd offset": whole.flatten()[1 : 1 + 2 * 3 * 11 * 8].view(2, 3, 11, 8),
        "odd rows": torch.randn(2, 3, 11, 9, dtype=torch.float16)[..., :8],
        "expanded": torch.randn(2, 1, 11, 8, dtype=torch.float16).expand(-1, 3, -1, -1),
        "aligned": torch.randn(2, 3, 11, 8, dtype=torch.float16),
    }
    for x in views.values():
        with pytest.raises(SeenError):
            kernel.forward(x, x, x, Options(False, 0.3))
        with pytest.raises(SeenError):
            kernel.backward(x, None, x, x, x, x, torch.zeros(2, 3, 11), Options(False, 0.3))
    for tensors in given:
        assert_loadable(*tensors)
    aligned = views["aligned"]
    assert all(x.data_ptr() == aligned.data_ptr() for x in given[-2][:3])  # nothing is copied without need
