"""The flex backend on CUDA: both layouts against the oracle and the sdpa backend, and what surrounds the kernel.

Much of the time goes to compiling one kernel per kind of call: `pytest -m gpu -n 8` (pytest-xdist) shares it among cores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import flexdilated.backends.flex.backend
from benchmarks.attention import Inputs, assert_rows_match_definition
from flexdilated import (
    DilatedPattern,
    MultiheadDilatedAttention,
    create_dilated_block_mask,
    dilated_attention,
    dilated_mask_mod,
    dilated_score_mod,
    reference,
)
from flexdilated.backends.flex import kernel as flex
from flexdilated.backends.flex.rows import Lanes, attend_rows
from flexdilated.core.call import Call
from tests.backends import flex_emulation
from tests.cases import Case, differentiate, run_plain
from tests.tolerances import SINGLE, assert_twice_naive

# What the compiler warns about differs by version and device (TF32 among it) and is not what is tested: shown, no failure.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda"
LAYOUTS = ("packed", "fused")
LONGEST = 1043  # tokens of a case, for its table
RESIDENT = 80 << 30  # bytes: q, k, v and out of 2**31 elements each, the packed pieces, and their float32 mixture

# Rates that divide segments (one long sequence of kept rows), rates that do not (one sequence per segment), more than one block.
EVEN = DilatedPattern((31, 201, 235), (1, 3, 5))
FULL = DilatedPattern((256, 1024), (1, 4))
UNEVEN = DilatedPattern((31, 101, 257), (1, 3, 7))


@dataclass(frozen=True)
class Modified:
    """A case with the functions of a model: a learnable relative bias and a mask."""

    case: Case
    has_score: bool = False
    has_mask: bool = False

    def table(self, device: str) -> Tensor:
        generator = torch.Generator().manual_seed(self.case.seed + 2)
        heads = self.case.kv_heads * self.case.group
        return torch.randn(heads, 2 * LONGEST, generator=generator).to(device).requires_grad_()

    def functions(self, table: Tensor) -> dict[str, Any]:
        def relative(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + table[h, i - j + LONGEST].to(score.dtype)

        def two_of_three(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i + 2 * j + h + b) % 3 > 0

        return {"score_mod": relative if self.has_score else None, "mask_mod": two_of_three if self.has_mask else None}


def grouped_heads(case: Case) -> Case:
    return replace(case, pattern=replace(case.pattern, heads="grouped"))


PLAIN = Case(EVEN, num_tokens=331, kv_heads=2, head_dim=64)
CASES = {
    "plain": Modified(PLAIN),
    "causal": Modified(replace(PLAIN, pattern=UNEVEN, is_causal=True)),
    "batch": Modified(replace(PLAIN, batch=3, num_tokens=263, kv_heads=5, head_dim=16)),
    "gqa": Modified(replace(PLAIN, group=3, head_dim=48, is_causal=True)),
    "head_dim_24": Modified(replace(PLAIN, pattern=UNEVEN, head_dim=24)),
    "head_dim_128": Modified(replace(PLAIN, head_dim=128, is_causal=True)),
    "strided": Modified(replace(PLAIN, batch=2, strided=True)),
    "padding": Modified(replace(PLAIN, batch=3, pattern=UNEVEN, ignored=0.3)),
    "padding_causal": Modified(replace(PLAIN, batch=2, ignored=0.7, is_causal=True)),
    "padding_everywhere": Modified(replace(PLAIN, batch=2, num_tokens=131, ignored=1.0)),
    "documents": Modified(replace(PLAIN, borders=(0, 1, 1, 130, 331), is_causal=True)),
    "grouped": Modified(grouped_heads(replace(PLAIN, kv_heads=5))),
    "interleaved": Modified(replace(PLAIN, pattern=replace(EVEN, offsets="interleaved"), kv_heads=5, is_causal=True)),
    "zero_padding": Modified(replace(PLAIN, pattern=DilatedPattern((60, 66, 340), (1, 3, 5), zero_padding=True))),
    "detach_weights": Modified(replace(PLAIN, pattern=replace(EVEN, detach_weights=True), lse_gradient=False)),
    "short": Modified(replace(PLAIN, num_tokens=67, is_causal=True)),
    "one_token": Modified(replace(PLAIN, num_tokens=1)),
    "score_mod": Modified(replace(PLAIN, batch=2), has_score=True),
    "mask_mod": Modified(replace(PLAIN, group=2, pattern=UNEVEN, is_causal=True), has_mask=True),
    # Blocks that are seen whole, more or fewer of them in a row than of the others: lists of both kinds.
    "full_blocks": Modified(replace(PLAIN, pattern=FULL, num_tokens=LONGEST)),
    "full_blocks_causal": Modified(replace(PLAIN, pattern=FULL, num_tokens=LONGEST, kv_heads=4, is_causal=True)),
    "both_mods": Modified(replace(PLAIN, borders=(0, 130, 331), pattern=UNEVEN), has_score=True, has_mask=True),
}
ALWAYS_PACKED = ("zero_padding", "detach_weights")  # what a single softmax does not express
CALLS = [(name, layout) for name in CASES for layout in LAYOUTS if layout == "packed" or name not in ALWAYS_PACKED]
LOW_PRECISION = [
    (name, layout)
    for name, layout in CALLS
    if name in ("plain", "gqa", "head_dim_128", "padding", "documents", "grouped", "score_mod", "full_blocks")
]


@pytest.fixture
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The layout that every call in the test takes, where it may choose."""
    force(monkeypatch, request.param)
    return request.param


def force(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(flexdilated.backends.flex.backend, "choose_layout", lambda pattern, call: layout)


each_layout = pytest.mark.parametrize("layout", LAYOUTS, indirect=True)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test's graphs count among another's."""
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    yield
    flex._compiled.cache_clear()


def run(modified: Modified, dtype: torch.dtype, backend: str) -> list[Tensor]:
    """out, lse, dq, dk, dv and, with a score function, the gradient of its table, on CPU."""
    case = modified.case
    table = modified.table(DEVICE)
    options = {**case.options(DEVICE), **modified.functions(table), "return_lse": True, "backend": backend}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, case.pattern, **options)

    return results(attend, case.tensors(dtype, DEVICE), table if modified.has_score else None)


def run_modified_reference(modified: Modified, dtype: torch.dtype) -> list[Tensor]:
    """The same by the definition, in float64 from inputs rounded to a dtype."""
    case = modified.case
    table = modified.table("cpu").detach().double().requires_grad_()
    options = {**case.options(), **modified.functions(table)}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return reference.dilated_attention(q, k, v, case.pattern, **options)

    tensors = [x if x is None else x.double() for x in case.tensors(dtype)]
    return results(attend, tensors, table if modified.has_score else None)


def results(attend: Callable[..., tuple[Tensor, Tensor]], tensors: Any, table: Tensor | None) -> list[Tensor]:
    q, k, v, dout, dlse = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves)
    total = (out * dout).sum()
    if dlse is not None:
        total = total + torch.where(lse > -torch.inf, lse * dlse, 0.0).sum()
    grads = torch.autograd.grad(total, [*leaves, *([] if table is None else [table])])
    return [x.detach().cpu() for x in (out, lse, *grads)]


# -- numbers --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), CALLS, indirect=["layout"])
def test_flex_in_float32_equals_the_reference(name: str, layout: str) -> None:
    actual, expected = run(CASES[name], torch.float32, "flex"), run_modified_reference(CASES[name], torch.float32)
    torch.testing.assert_close([a.double() for a in actual], expected, **SINGLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "layout"), LOW_PRECISION, indirect=["layout"])
def test_flex_in_low_precision_errs_at_most_twice_as_much_as_plain_pytorch(name: str, layout: str, dtype: torch.dtype) -> None:
    modified = replace(CASES[name], case=replace(CASES[name].case, lse_gradient=False))
    actual, expected = run(modified, dtype, "flex"), run_modified_reference(modified, dtype)

    # As in test_gpu.py: the plain error is that of the unmasked whole.
    whole = replace(modified.case, pattern=UNEVEN, ignored=None, borders=None)
    naive, exact = run_plain(whole, dtype), run_modified_reference(Modified(whole), dtype)
    for i in (0, 2, 3, 4):
        assert actual[i].dtype == dtype
        assert_twice_naive(actual[i].double() - expected[i], naive[i].double() - exact[i], torch.zeros_like(expected[i]))


@each_layout
@pytest.mark.parametrize("is_causal", [False, True])
def test_flex_equals_sdpa_on_many_blocks(layout: str, is_causal: bool) -> None:
    case = Case(
        DilatedPattern((512, 1026, 2048), (1, 3, 4)), num_tokens=4099, kv_heads=2, group=2, head_dim=64, is_causal=is_causal
    )
    torch.testing.assert_close(run(Modified(case), torch.float32, "flex"), run(Modified(case), torch.float32, "sdpa"), **SINGLE)


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


# -- strides --------------------------------------------------------------------------------------------------------------------

# pytorch/pytorch#146377: keys that are read through strides once had garbage gradients.


@each_layout
@pytest.mark.parametrize("trust", [False, True])
def test_gradients_of_strided_keys(layout: str, trust: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "TRUST_STRIDED_GRADIENTS", trust)
    for is_causal in (False, True):
        modified = Modified(replace(PLAIN, is_causal=is_causal))
        torch.testing.assert_close(
            [a.double() for a in run(modified, torch.float32, "flex")], run_modified_reference(modified, torch.float32), **SINGLE
        )


# -- block masks ----------------------------------------------------------------------------------------------------------------


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


# -- graphs ---------------------------------------------------------------------------------------------------------------------


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@each_layout
def test_six_lengths_need_few_graphs_per_kind_of_call(layout: str) -> None:
    before = graphs()
    for num_tokens in (307, 601, 911, 1213, 1511, 1823):
        case = replace(PLAIN, num_tokens=num_tokens, is_causal=True)
        differentiate(
            lambda *x: dilated_attention(*x, EVEN, is_causal=True, return_lse=True, backend="flex"),
            *case.tensors(torch.float32, DEVICE),
        )
    kinds = flex._compiled.cache_info().currsize
    assert kinds == (1 if layout == "fused" else 2)
    assert 0 < graphs() - before <= (2 if layout == "fused" else 4) * kinds


@each_layout
def test_a_captured_forward_takes_other_inputs(layout: str) -> None:
    pattern = DilatedPattern((256, 1024), (1, 2))
    inputs, others = ([torch.randn(1, 2053, 4, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)] for _ in range(2))
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                dilated_attention(*inputs, pattern, backend="flex")
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = dilated_attention(*inputs, pattern, backend="flex")
        for x, other in zip(inputs, others):
            x.copy_(other)
        graph.replay()
        assert torch.equal(out, dilated_attention(*others, pattern, backend="flex"))


# -- training -------------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A residual attention layer."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.attention = MultiheadDilatedAttention(64, 4, DilatedPattern((64, 256), (1, 4)), is_causal=True, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y)[0]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """One GPU as a mesh."""
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield dist.init_device_mesh(DEVICE, (1,))
    finally:
        dist.destroy_process_group()


@each_layout
def test_a_sharded_checkpointed_compiled_model_trains(layout: str, mesh: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    plain = nn.Sequential(Layer("sdpa"), Layer("sdpa")).to(DEVICE)
    model = copy.deepcopy(plain)
    for i, layer in enumerate(model):
        layer.attention.attention.backend = "flex"
        model[i] = fully_shard(torch.compile(checkpoint_wrapper(layer), fullgraph=True), mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    x, target = (torch.randn(2, 521, 64, device=DEVICE) for _ in range(2))
    losses = []
    for step in range(3):
        loss = (model(x) - target).square().mean()
        loss.backward()
        if step == 0:
            (plain(x) - target).square().mean().backward()
            for a, e in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a.grad.full_tensor(), e.grad, **SINGLE)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


# -- rows of segments that shards cut ------------------------------------------------------------------------------------------


def run_rows(attend: Any, is_causal: bool, modified: bool, device: str, dtype: torch.dtype) -> list[Tensor]:
    """out, lse, dq, dk, dv and the gradient of a score function's table, on CPU."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    q, k, v, table = draw(3, 2, 300, 64), draw(3, 1, 421, 64), draw(3, 1, 421, 64), draw(4, 4096)
    dout, ignored = draw(3, 2, 300, 64).detach(), (torch.rand(3, 421, generator=generator) < 0.2).to(device)
    heads = torch.tensor([[0, 1], [2, 3], [0, 1]], dtype=torch.int32, device=device)
    first = torch.tensor([7, 9, 1200], dtype=torch.int32, device=device)
    lanes = Lanes(torch.tensor([0, 0, 1], dtype=torch.int32, device=device), heads, first, 3, 110, 0)
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
