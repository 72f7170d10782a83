"""The host's time for calls on a GPU: kernels are replaced by nothing, and CPU tensors stand for those of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.backends import KERNEL_BACKENDS
from flexdilated.backends.dense import piece_loop
from flexdilated.backends.kernel import Kernel, Options
from flexdilated.backends.triton import backend as triton_backend
from flexdilated.core import custom_op
from flexdilated.core.call import Call
from flexdilated.core.pieces import plan_pieces

PATTERN = DilatedPattern.longnet()
NUM_TOKENS, NUM_HEADS, HEAD_DIM = 8192, 12, 64
CALLS = 300


def nothing(*arguments: Any, **options: Any) -> None:
    """A launch."""


def empty_operator() -> Any:
    """The operators of a call with bodies that allocate their results: the time that torch itself takes for them."""
    return custom_op.operator(
        "empty",
        custom_op.schema_of(custom_op.OpOptions),
        custom_op.OpOptions.decoded,
        forward=lambda inputs, op_options: custom_op.shapes_of(inputs.q),
        shapes=lambda inputs, options: custom_op.shapes_of(inputs.q),
        backward=lambda dout, dlse, inputs, outputs, op_options: tuple(custom_op.contiguous_like(x) for x in inputs[:3]),
    )


EMPTY = empty_operator()


class EmptyCall(torch.autograd.Function):
    """As `fused_op` differentiates eager calls."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        outputs = EMPTY.forward(*arguments)
        custom_op.save(ctx, arguments, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return custom_op.differentiate(ctx, EMPTY.backward, dout, dlse)


def without_triton_kernels(patch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("flexdilated.backends.triton.launch")  # imports triton
    patch.setattr(launch, "_launch", nothing)
    patch.setattr(triton_backend, "INTERPRETED", True)  # CPU tensors are let through


def without_dense_kernels(patch: pytest.MonkeyPatch) -> None:
    """A kernel that reads and writes views, as flash-attn-4 does; what merges and adds."""

    def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, into: Any = None) -> tuple[Tensor, Tensor]:
        return q if into is None else into, q[..., 0]

    def differentiate(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> tuple[Tensor, ...]:
        return q, k, v

    class Merging:
        merge_into = add_to = staticmethod(nothing)

    kernel = Kernel("nothing", lambda request: None, attend, differentiate, head_dim_multiple=8, takes_dlse=True, writes=True)
    patch.setattr(piece_loop, "packs", lambda device: False)
    patch.setitem(KERNEL_BACKENDS, "sdpa", lambda request: (kernel,))
    patch.setattr(piece_loop, "merging", lambda request: Merging)
    patch.setattr(piece_loop, "for_backward", lambda *arguments: arguments)


BACKENDS = {"triton": without_triton_kernels, "sdpa": without_dense_kernels}


def microseconds(call: Callable[[], object]) -> float:
    """The least time of many calls, after some that are not counted."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times[CALLS // 10 :])


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_host_time_of_a_call(benchmark: Any, monkeypatch: pytest.MonkeyPatch, backend: str, direction: str) -> None:
    """Time of a call, the part that torch takes for its operators and derivatives, and our own. They are to look at.

    Targets: 150 us of our own for a forward, 250 with its backward.
    """
    BACKENDS[backend](monkeypatch)
    trains = direction != "forward"
    shape = (1, NUM_TOKENS, NUM_HEADS, HEAD_DIM)
    q, k, v, dout = (torch.empty(shape, dtype=torch.float16) for _ in range(4))
    leaves = [x.requires_grad_(trains) for x in (q, k, v)]
    op_options = Call(PATTERN, scale=0.125, backend=backend, num_kv_heads=NUM_HEADS).op_options()

    def run(attend: Callable[..., Tensor]) -> Callable[[], object]:
        def call() -> object:
            with torch.set_grad_enabled(trains):
                out = attend(*leaves)
            return torch.autograd.grad(out, leaves, dout) if trains else out

        return call

    ours = run(lambda q, k, v: dilated_attention(q, k, v, PATTERN, backend=backend))
    empty = EmptyCall.apply if trains else EMPTY.forward
    torchs = run(lambda q, k, v: empty(q, k, v, None, None, None, *op_options.encoded())[0])
    benchmark.pedantic(ours, rounds=10, warmup_rounds=2)
    total, torch_alone = microseconds(ours), microseconds(torchs)
    benchmark.extra_info.update(total_us=round(total), torch_us=round(torch_alone), own_us=round(total - torch_alone))
    print(f"{backend} {direction}: {total:.0f} us, torch {torch_alone:.0f}, own {total - torch_alone:.0f}")


def documents_of(number: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """`(first token, number of tokens)` of documents of some seven lengths."""
    size = num_tokens // number
    borders = [0, *accumulate(size + (i % 7 - 3) * size // 10 for i in range(number - 1)), num_tokens]
    return tuple((a, b - a) for a, b in pairwise(borders))


@pytest.mark.parametrize("number", [1, 16, 64, 256])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "alone"])
def test_launches_of_the_triton_kernels(benchmark: Any, monkeypatch: pytest.MonkeyPatch, number: int, shared: bool) -> None:
    """Time of our own Python for a forward and its backward, kernels replaced by nothing: the launches and times are to look at."""
    groups = pytest.importorskip("flexdilated.backends.triton.groups")
    launch = pytest.importorskip("flexdilated.backends.triton.launch")  # imports triton
    launched: list[str] = []
    monkeypatch.setattr(launch, "_launch", lambda kernel, *arguments: launched.append(kernel.__name__))
    if not shared:
        monkeypatch.setattr(groups, "LEAST", 1 << 30)
    monkeypatch.setattr(launch, "PLANS", {})
    groups._groups.cache_clear()
    q, lse, options = torch.empty(1, 131_072, 12, 64, dtype=torch.float16), torch.empty(1, 12, 131_072), Options(True, 0.125)
    pieces = plan_pieces(PATTERN, documents_of(number, 131_072), 12, True)

    def step() -> None:
        launched.clear()
        launch.forward(q, lse, q, q, q, pieces, options)
        launch.backward((q, q, q), q, None, q, q, q, q, lse, pieces, options)

    benchmark.pedantic(step, rounds=10, warmup_rounds=1)
    groups._groups.cache_clear()
    benchmark.extra_info.update(pieces=len(pieces), launches=launched.count("attend"))
    assert len(launched) == 1 + 3 * launched.count("attend")
    assert launched.count("attend") <= len(pieces)
    assert shared or launched.count("attend") == len(pieces)
