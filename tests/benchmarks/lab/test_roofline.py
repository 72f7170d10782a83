"""The model of bytes and launches against the backends themselves, run on tensors without memory, and against the definition."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flexdilated.backends.dense.piece_loop
from benchmarks.lab.roofline import BACKENDS, DEVICES, Work, seconds, useful_flops, work
from benchmarks.lab.traffic import Step
from flexdilated import DilatedPattern
from flexdilated.backends.dense import flash, sdpa
from flexdilated.backends.dense.piece_loop import PieceLoop, backward, forward
from flexdilated.backends.flex.cost import Shape
from flexdilated.backends.kernel import Kernel
from flexdilated.backends.triton.groups import together
from flexdilated.core.call import Call
from flexdilated.core.custom_op import Inputs
from flexdilated.core.pieces import plan_pieces
from tests.cases import least_heads, patterns

pytestmark = pytest.mark.lab

BACKEND = {backend.name: backend for backend in BACKENDS}
LIBRARIES = {"sdpa flash": "flash", "sdpa cudnn": "cudnn", "sdpa efficient": "efficient"}
LIBRARIES |= {"flash, version 2": "flash_attn", "flash, version 4": "flash_attn_4"}
KERNEL = {kernel.name: kernel for kernel in (*sdpa.KERNELS, *flash.KERNELS)}
ALLOCATE = ("empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like")
LAUNCHES_NOTHING = {f"aten::{name}" for name in (*ALLOCATE, "detach", "_unsafe_view", "scalar_tensor")}
READS_NOT_ITSELF = {f"aten::{name}" for name in ("copy_", "fill_", "new_full", "new_zeros")}


class Counter(TorchDispatchMode):
    """Launches, and the bytes of the tensors that they are given and give."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if func.is_view or name in LAUNCHES_NOTHING or is_on_host(result):
            return result
        given = tree_leaves(args[1:] if name in READS_NOT_ITSELF else args)
        # The number that `where` is given stands in no memory of a GPU.
        self.count(*(x for x in given if isinstance(x, Tensor) and (x.dim() or name != "aten::where")), *tree_leaves(result))
        return result

    def count(self, *tensors: Any, launches: int = 1) -> None:
        self.launches += launches
        self.bytes += sum(held(x) * x.element_size() for x in tensors if isinstance(x, Tensor) and x.is_meta)


def held(x: Tensor) -> int:
    """Elements, those that `expand` repeats once."""
    return math.prod(size for size, stride in zip(x.shape, x.stride()) if stride)


def is_on_host(result: Any) -> bool:
    return isinstance(result, Tensor) and not result.is_meta


@st.composite
def shapes(draw: st.DrawFn) -> tuple[DilatedPattern, Shape]:
    pattern = replace(draw(patterns()), zero_padding=False, detach_weights=False)
    kv_heads, group = draw(st.integers(least_heads(pattern), 7)), draw(st.integers(1, 3))
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 43))
    return pattern, Shape(batch, tokens, kv_heads * group, kv_heads, 8, draw(st.sampled_from((2, 4))), draw(st.booleans()))


def tensors(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    dtype = {2: torch.bfloat16, 4: torch.float32}[shape.element]
    q, k, v = (
        torch.empty(shape.batch, shape.num_tokens, heads, shape.head_dim, dtype=dtype, device="meta")
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    return q, k, v


def counted(found: Work) -> tuple[int, int]:
    return found.launches, found.bytes


def kernel_that_counts(name: str, counter: Counter) -> Kernel:
    """A kernel whose own operation gives tensors without values; what its wrapper does around that is real."""

    def run_forward(q: Tensor, k: Tensor, v: Tensor, options: Any, into: Any = None) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if into is None else into
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        counter.count(q, k, v, out, lse)
        return out, lse

    def run_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Any, into: Any = None, dlse: None = None
    ) -> tuple[Tensor, ...]:
        if name in ("flash", "efficient"):  # in aten's host code, or ours, on `(lanes, rows, heads, D)`
            dout, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dout, out))
        if name != "efficient":
            lse = lse.contiguous()
        if name in ("flash", "cudnn"):
            torch.zeros(2 if name == "flash" else (), dtype=torch.uint64, device=q.device)
        grads = into or tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        counter.count(dout, q, k, v, out, lse, *grads)
        return grads

    return replace(KERNEL[name], run_forward=run_forward, run_backward=run_backward)


class Merging(NamedTuple):
    """The kernels that merge and add."""

    counter: Counter

    def merge_into(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        self.counter.count(out, lse, part, part_lse, out, lse)

    def add_to(self, total: Tensor, term: Tensor) -> None:
        self.counter.count(total, term, total)


@pytest.mark.slow
@settings(max_examples=40)
@pytest.mark.parametrize("backend", LIBRARIES)
@given(drawn=shapes())
def test_library_backends_move_and_launch_what_is_counted(backend: str, drawn: tuple[DilatedPattern, Shape]) -> None:
    pattern, shape = drawn
    q, k, v = tensors(shape)
    op_options = Call(pattern, shape.is_causal, 1.0, backend="sdpa", num_kv_heads=shape.num_kv_heads).op_options()
    pieces = plan_pieces(pattern, ((0, shape.num_tokens),), shape.num_kv_heads, shape.is_causal)
    found = []
    for counter in (Counter(), Counter()):
        kernel = kernel_that_counts(LIBRARIES[backend], counter)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flexdilated.backends.dense.piece_loop, "choose_kernel", lambda backend, request, kernel=kernel: kernel)
            loop = PieceLoop(Inputs(q, k, v, None, None, None), op_options, pieces, None)
        loop._merging = Merging(counter)  # type: ignore[misc]
        with counter:
            if not found:
                out, lse = forward(q, k, v, loop)
            else:
                backward(torch.empty_like(q), None, q, k, v, out, lse, loop)
        found.append((counter.launches, counter.bytes))
    expected = work(BACKEND[backend], pattern, shape)
    assert found == [counted(expected[0]), counted(expected[1])]


def kept(pattern: DilatedPattern, shape: Shape) -> Iterator[tuple[int, set[tuple[int, int]]]]:
    """Per branch, the `(key/value head, token)` that it keeps, and its pairs, by the definition."""
    for i, (length, rate) in enumerate(pattern.branches):
        rows, pairs = set(), 0
        for head in pattern.head_range(i, shape.num_kv_heads):
            mine = [p for p in range(shape.num_tokens) if p % length % rate == pattern.offset(i, head, shape.num_kv_heads)]
            rows |= {(head, p) for p in mine}
            pairs += sum(a // length == b // length and (not shape.is_causal or b <= a) for a in mine for b in mine)
        yield pairs, rows


@given(drawn=shapes())
def test_the_kernel_in_place_moves_each_kept_row_once_per_branch(drawn: tuple[DilatedPattern, Shape]) -> None:
    pattern, shape = drawn
    group, width = shape.num_heads // shape.num_kv_heads, shape.head_dim * shape.element
    expected = pairs = 0
    whole = pattern.dilation_rates.index(1) if pattern.heads == "all" and 1 in pattern.dilation_rates else None
    for i, (found, rows) in enumerate(kept(pattern, shape)):
        pairs += found * group * shape.batch
        q, k, lse = (shape.batch * len(rows) * size for size in (group * width, width, group * 4))
        expected += q + 2 * k + (1 if i == whole else 2) * (q + lse)  # out and lse are read and written, the first time written
    forward, backward = work(BACKEND["triton"], pattern, shape)
    starts = shape.batch * shape.num_tokens * shape.num_heads * (width + 4)
    assert forward.bytes == expected + (starts if whole is None else 0)
    assert forward.flops == 4 * shape.head_dim * pairs == useful_flops(pattern, shape)[0]
    assert useful_flops(pattern, shape)[1] == 10 * shape.head_dim * pairs
    assert backward.flops == 14 * shape.head_dim * pairs
    launches = len(together(plan_pieces(pattern, ((0, shape.num_tokens),), shape.num_kv_heads, shape.is_causal)))
    assert forward.launches in (launches, launches + 2)
    assert backward.launches in (2 * launches + 1, 2 * launches + 4)


def test_a_bound_is_the_slower_of_products_and_memory_launch_by_launch() -> None:
    device = DEVICES[0]._replace(flops_per_second=10.0, bytes_per_second=100.0)
    assert seconds(Work((Step(20, 100), Step(5, 400, 3))), device) == 2.0 + 4.0


def test_patterns_with_torchscale_s_rules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pattern must have zero_padding=False and detach_weights=False to be modelled, got True"):
        work(BACKEND["triton"], DilatedPattern.gigapath(), Shape(1, 64, 16, 16, 64, 2, False))
