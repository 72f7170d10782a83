"""The flex backend as it runs here: compiled CPU inference, its choice of layout, its guards, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import flexdilated.backends.flex.backend
from flexdilated import DilatedPattern, MultiheadDilatedAttention, dilated_attention, reference
from flexdilated.backends import BACKENDS, DispatchKey, choose
from flexdilated.backends import measured as measurements
from flexdilated.backends.flex import kernel as flex
from flexdilated.backends.flex import rows, tiles
from flexdilated.backends.flex.cost import Shape, choose_layout, fused_cost, packed_cost
from flexdilated.backends.kernel import GRID_LIMIT
from flexdilated.core.call import Call
from flexdilated.masks.blocks import block_lists, head_branches
from tests.backends import flex_emulation
from tests.cases import Case, dense_attention, least_heads, patterns
from tests.hardware import simulate
from tests.tolerances import SINGLE, assert_twice_naive

PATTERN = DilatedPattern((100, 200, 400), (1, 2, 4))
LONGNET = DilatedPattern.longnet()
WINDOW = DilatedPattern((100,), (3,), window=130, heads="grouped")
inductor = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # its own use of it


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    flex._compiled.cache_clear()


@pytest.fixture
def eagerly(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """The tracer and its guards alone, without inductor; counts graphs."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    return counter


def relative(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - 0.1 * (h + 1) * (i - j).abs()


def thirds(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + j) % 3 > 0


def assert_equals_the_oracle(case: Case, functions: dict[str, Any]) -> None:
    q, k, v, _, _ = case.tensors(torch.float32)
    expected, _ = reference.dilated_attention(q, k, v, case.pattern, **case.options(), **functions)
    out = dilated_attention(q, k, v, case.pattern, backend="flex", **case.options(), **functions)
    assert not out.requires_grad
    torch.testing.assert_close(out.double(), expected, **SINGLE)


@pytest.mark.slow
def test_two_graphs_equal_the_oracle_for_every_length(eagerly: CompileCounter) -> None:
    for num_tokens in (300, 700, 345):
        case = Case(PATTERN, batch=2, num_tokens=num_tokens, kv_heads=2, group=3, head_dim=16, is_causal=True, ignored=0.3)
        # A function written anew for every call, as in a model's forward, is no new graph.
        assert_equals_the_oracle(case, {"score_mod": lambda *pair: relative(*pair)})
    assert eagerly.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "functions", "graphs"),
    [
        (Case(PATTERN, num_tokens=345, kv_heads=6, head_dim=24), {}, 1),
        (Case(DilatedPattern((64,), (4,), heads="grouped"), num_tokens=300, kv_heads=3, head_dim=16), {"mask_mod": thirds}, 1),
        (Case(PATTERN, num_tokens=300, kv_heads=3, head_dim=16, borders=(0, 50, 50, 210, 300)), {"score_mod": relative}, 3),
        (Case(WINDOW, num_tokens=345, kv_heads=2, group=2, head_dim=16, is_causal=True, borders=(0, 35, 200, 345)), {}, 2),
    ],
    ids=["ragged", "grouped_mask", "documents_score", "window"],
)
def test_traced_flex_equals_the_oracle(case: Case, functions: dict[str, Any], graphs: int, eagerly: CompileCounter) -> None:
    assert_equals_the_oracle(case, functions)
    assert eagerly.frame_count == graphs


def test_low_precision_by_the_twice_naive_rule(eagerly: CompileCounter) -> None:
    case = Case(PATTERN, num_tokens=345, kv_heads=3, head_dim=32)
    q, k, v, _, _ = case.tensors(torch.bfloat16)
    expected, _ = reference.dilated_attention(q, k, v, PATTERN)
    with torch.no_grad():
        out = dilated_attention(q, k, v, PATTERN, backend="flex")
    assert out.dtype == torch.bfloat16
    assert_twice_naive(out, dense_attention(q, k, v, PATTERN), expected)


@dataclass
class Scaled:
    """Not hashable, since it can be compared."""

    rate: Any

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * self.rate

    def method(self, score: Tensor, *index: Tensor) -> Tensor:
        return score * self.rate


def multiplied(rates: list[Any], score: Tensor, *index: Tensor) -> Tensor:
    return score * rates[0]


HELD: dict[str, Callable[[Any], dict[str, Any]]] = {
    "closure": lambda rate: {"score_mod": lambda s, b, h, i, j: s * rate},
    "default": lambda rate: {"score_mod": lambda s, b, h, i, j, rate=rate: s * rate},
    "partial": lambda rate: {"score_mod": partial(multiplied, [rate])},
    "object": lambda rate: {"score_mod": Scaled(rate)},
    "method": lambda rate: {"score_mod": Scaled(rate).method},
    "mask": lambda rate: {"mask_mod": lambda b, h, i, j: (i - j).abs() < 9 * rate},
    "window": lambda rate: {"mask_mod": (lambda window: lambda b, h, i, j: i - j < window)(int(10 * rate))},
}
CHANGING = (0.5, 0.75, 0.5)


def attend_with(options: dict[str, Any]) -> None:
    x, pattern = torch.randn(3, 1, 40, 2, 16), DilatedPattern((13,), (1,))
    out = dilated_attention(*x, pattern, backend="flex", **options)
    torch.testing.assert_close(out.double(), reference.dilated_attention(*x, pattern, **options)[0], **SINGLE)


@pytest.mark.slow
def test_batches_and_lengths_are_no_kinds_of_their_own(eagerly: CompileCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device: what is traced counts, not what it computes."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr(flexdilated.backends.flex.backend, "_layout", lambda *args: "packed")
    pattern = DilatedPattern((128, 256), (1, 2))
    for batch, num_tokens in ((1, 512), (2, 4096), (3, 512)):
        q, k, v = (torch.empty(batch, num_tokens, 12, 16, device="meta") for _ in range(3))
        flexdilated.backends.flex.backend.attend_flex(q, k, v, Call(pattern, False, 1.0))
    kinds = flex._compiled.cache_info().currsize
    assert kinds == 2  # 12 or 6 heads have an offset
    assert eagerly.frame_count <= 4 * kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_functions_written_anew_are_compiled_once_per_number(name: str, eagerly: CompileCounter) -> None:
    for rate in CHANGING:
        attend_with(HELD[name](rate))
    assert eagerly.frame_count <= len(set(CHANGING))


@pytest.mark.parametrize("name", ["closure", "object", "scale"])
def test_tensors_and_scales_that_change_need_no_graphs(name: str, eagerly: CompileCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "GRAPHS_LIMIT", 1)
    for rate in CHANGING:
        attend_with({"scale": rate} if name == "scale" else HELD[name](torch.tensor(rate)))
    assert eagerly.frame_count == 1 or name == "scale"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["closure", "object"])
def test_ever_new_numbers_are_refused(name: str, eagerly: CompileCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "GRAPHS_LIMIT", 2)
    for rate in CHANGING:
        attend_with(HELD[name](rate))
    with pytest.raises(NotImplementedError, match=r"must hold what changes .* in tensors for backend='flex'.* got more than 2 of"):
        attend_with(HELD[name](0.1))
    attend_with(HELD[name](0.75))


@pytest.mark.slow
def test_kinds_do_not_wear_out_one_another_s_recompilations(eagerly: CompileCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "GRAPHS_LIMIT", 2)
    x = torch.randn(3, 1, 40, 2, 16)
    for length in (4, 5, 7):
        pattern = DilatedPattern((length,), (1,))
        out = dilated_attention(*x, pattern, backend="flex")
        torch.testing.assert_close(out.double(), reference.dilated_attention(*x, pattern)[0], **SINGLE)
    assert eagerly.frame_count == 3


def test_functions_that_cannot_be_compiled_are_refused_in_their_names(eagerly: CompileCounter) -> None:
    def reads(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * float(str(2.0 * s.new_ones(()).item()))

    message = r"^score_mod and mask_mod must be functions that flex_attention compiles for backend='flex', got: .*backend='sdpa'$"
    with pytest.raises(NotImplementedError, match=message):
        attend_with({"score_mod": reads})


class Model(nn.Module):
    """Attention whose q, k and v are views of products, as models have it."""

    def __init__(self, backend: str, num_heads: int = 3) -> None:
        super().__init__()
        self.attention = MultiheadDilatedAttention(48, num_heads, PATTERN, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, is_causal=True)[0]


@inductor
@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "backend"), [(1, "aot_eager"), (3, "inductor")])
@torch.no_grad()
def test_a_compiled_model_runs_flex_without_a_graph_break(num_heads: int, backend: str) -> None:
    model, peer, x = Model("flex", num_heads).eval(), Model("sdpa", num_heads).eval(), torch.randn(2, 300, 48)
    peer.load_state_dict(model.state_dict())
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=backend)(x), peer(x), **SINGLE)


@pytest.mark.slow
@given(pattern=patterns(), num_tokens=st.integers(1, 900), kv_heads=st.integers(1, 4), is_causal=st.booleans())
def test_packed_tiles_are_those_of_the_masks_that_run(
    pattern: DilatedPattern, num_tokens: int, kv_heads: int, is_causal: bool
) -> None:
    kv_heads = max(kv_heads, least_heads(pattern))
    scale = 20  # lengths of several blocks
    lengths = tuple(length * scale for length in pattern.segment_lengths)
    pattern = DilatedPattern(lengths, pattern.dilation_rates, heads=pattern.heads, offsets=pattern.offsets)
    visited = 0

    def count(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        nonlocal visited
        mask = options["block_mask"]
        tiles = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
        visited += tiles * q.shape[0] * q.shape[1]
        return flex_emulation.call(q, k, v, **options)  # type: ignore[return-value]

    q = torch.zeros(2, num_tokens, kv_heads * 2, 1, dtype=torch.float64)
    k = q[:, :, :kv_heads]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "call", count)
        patch.setattr(flexdilated.backends.flex.backend, "_on_cpu", lambda q: False)
        patch.setattr(flexdilated.backends.flex.backend, "choose_layout", lambda pattern, call: "packed")
        flexdilated.backends.flex.backend.attend_flex(q, k, k, Call(pattern, is_causal, 1.0, return_lse=True))
    assert packed_cost(pattern, Shape(2, num_tokens, kv_heads * 2, kv_heads, 1, 8, is_causal)).tiles == visited


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_tokens", [1000, 16384, 40000])
def test_fused_tiles_are_those_of_the_mask_where_segments_nest(num_tokens: int, is_causal: bool) -> None:
    tiles = 0
    for head in range(4):
        lists = block_lists(head_branches(LONGNET, head, 4, num_tokens), num_tokens, 128, 128, "before" if is_causal else "any")
        tiles += int(lists.partial_counts.sum() + lists.full_counts.sum())
    assert fused_cost(LONGNET, Shape(3, num_tokens, 8, 4, 64, 2, is_causal)).tiles == 3 * 2 * tiles


def test_short_sequences_are_fused_and_long_ones_packed() -> None:
    layouts = [choose_layout(LONGNET, Shape(1, n, 12, 12, 64, 2, True)) for n in (512, 2048, 16384, 131072, 1 << 20)]
    assert layouts == ["fused", "fused", "packed", "packed", "packed"]
    # One dense branch is one call either way, without anything to merge.
    assert choose_layout(DilatedPattern((512,), (1,)), Shape(1, 1 << 17, 12, 12, 64, 2, True)) == "fused"


@pytest.mark.parametrize("layout", ["packed", "fused"])
def test_the_choice_is_obeyed(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    ran = []
    monkeypatch.setattr(flexdilated.backends.flex.backend, "_on_cpu", lambda q: False)
    monkeypatch.setattr(flexdilated.backends.flex.backend, "choose_layout", lambda pattern, call: layout)
    for name in ("_packed", "_fused"):
        monkeypatch.setattr(flexdilated.backends.flex.backend, name, lambda q, *_, name=name: ran.append(name) or (q, None))
    x = torch.randn(1, 30, 2, 16)
    dilated_attention(x, x, x, DilatedPattern((6,), (2,)), backend="flex")
    # What one call cannot do goes to pieces, whatever it costs.
    dilated_attention(x, x, x, DilatedPattern((6, 12), (2, 3), detach_weights=True), backend="flex")
    assert ran == [f"_{layout}", "_packed"]


def dense_flex(q: Tensor, k: Tensor, v: Tensor, *, kind: object, want_lse: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """The operator that the kernel is the code of, in its dense form, which has gradients and lse on a CPU too."""
    out, aux = flex_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True), **options)
    return out, aux.lse


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "what"), [(None, "plain"), ("packed", "padding and functions"), ("fused", "functions")])
def test_compilers_trace_what_a_gpu_runs(layout: str | None, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of a layout, both layouts, masks and functions, down to the operator; on a CPU only the fused one runs."""
    torch._dynamo.reset()
    monkeypatch.setattr(flex, "call", dense_flex)
    monkeypatch.setattr(flexdilated.backends.flex.backend, "_on_cpu", lambda q: False)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setitem(BACKENDS, "flex", lambda request: None)
    if layout is not None:
        monkeypatch.setattr(flexdilated.backends.flex.backend, "choose_layout", lambda pattern, shape: layout)
    model = MultiheadDilatedAttention(32, 2, DilatedPattern((32, 64), (1, 2)), is_causal=True, backend="flex")
    table = torch.randn(2, 200, requires_grad=True)
    options: dict[str, Any] = {}
    if "padding" in what:
        options["key_padding_mask"] = torch.rand(2, 64) < 0.3
    if "functions" in what:
        options["score_mod"] = lambda s, b, h, i, j: s + table[h, i - j + 100]
        options["mask_mod"] = lambda b, h, i, j: (i + j) % 3 > 0
    x = torch.randn(2, 64, 32)
    found = []
    for module, backend in ((torch.compile(model, fullgraph=True, backend="aot_eager"), "flex"), (model, "sdpa")):
        model.attention.backend = backend
        y = module(x, x, x, need_weights=False, **options)[0]
        found.append([y, *torch.autograd.grad(y.square().mean(), [*model.parameters(), table], allow_unused=True)])
    for a, e in zip(*found, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, **SINGLE)


@pytest.mark.parametrize("columns", [slice(0, 150), slice(1, None, 2)], ids=["first", "every other"])
def test_padding_masks_of_any_strides(columns: slice, eagerly: CompileCounter) -> None:
    q = torch.randn(2, 150, 2, 16)
    mask = (torch.rand(2, 300) < 0.3)[:, columns]
    out = dilated_attention(q, q, q, PATTERN, key_padding_mask=mask, backend="flex")
    torch.testing.assert_close(out, dilated_attention(q, q, q, PATTERN, key_padding_mask=mask, backend="sdpa"), **SINGLE)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["flex", "reference"])
def test_documents_in_compiled_code_are_refused_by_name(backend: str) -> None:
    attend = torch.compile(partial(dilated_attention, pattern=PATTERN, backend=backend), fullgraph=True, backend="eager")
    x, borders = torch.randn(1, 300, 2, 16), torch.tensor([0, 120, 300], dtype=torch.int32)
    with pytest.raises(Exception, match=rf"cu_seqlens must come without backend='{backend}' in compiled code, got both"):
        attend(x, x, x, cu_seqlens=borders)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [2048, 1 << 20])
def test_compilers_ask_for_the_layout_once(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million tokens have thousands of blocks: to trace how they are counted would take minutes."""
    torch._dynamo.reset()
    backend = flexdilated.backends.flex.backend
    monkeypatch.setattr(backend, "_on_cpu", lambda q: False)
    for factor, name in ((2, "_packed"), (3, "_fused")):
        monkeypatch.setattr(backend, name, lambda q, *_, factor=factor: (factor * q, None))
    run = torch.compile(lambda q: backend.attend_flex(q, q, q, Call(LONGNET, True, 1.0))[0], fullgraph=True, backend="eager")
    chosen = choose_layout(LONGNET, Shape(1, num_tokens, 12, 12, 1, 4, True))
    assert run(torch.ones(1, num_tokens, 12, 1)).mean() == {"packed": 2, "fused": 3}[chosen]


class Wide:
    """A CUDA tensor of a size that no test can hold, as far as the guard looks at it."""

    device = torch.device("cuda")

    def __init__(self, rows: int, stride: int, packed_stride: int) -> None:
        self.shape, self.strides, self.packed_stride = (1, 12, rows, 64), (0, 64, stride, 1), packed_stride

    def stride(self, dim: int) -> int:
        return self.strides[dim]

    def contiguous(self) -> Wide:
        return Wide(self.shape[2], self.packed_stride, self.packed_stride)


def test_offsets_beyond_32_bits_are_packed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/pytorch#190857."""
    monkeypatch.setattr(flex, "WIDE_OFFSETS", False)
    small: Any = Wide(1 << 20, 12 * 64, 64)
    assert flex._readable(small) is small
    wide: Any = Wide(4 << 20, 12 * 64, 64)
    assert flex._readable(wide).stride(2) == 64
    hopeless: Any = Wide(64 << 20, 12 * 64, 64)
    with pytest.raises(NotImplementedError, match=r"fewer than 2147483648 elements per head"):
        flex._readable(hopeless)
    monkeypatch.setattr(flex, "WIDE_OFFSETS", True)
    assert flex._readable(hopeless) is hopeless


@pytest.mark.parametrize(
    ("level", "head_dim", "dtype", "scored", "expected"),
    [
        ("sm_80", 128, torch.bfloat16, False, {"bwd_BLOCK_M1": 64, "bwd_num_warps": 8}),
        ("sm_80", 64, torch.bfloat16, True, {"fwd_num_warps": 8, "bwd_num_warps": 4}),
        ("sm_86", 64, torch.float16, False, {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32}),
        ("sm_120", 256, torch.float16, True, {"bwd_BLOCK_M1": 32, "bwd_num_warps": 8}),
        ("sm_90", 256, torch.bfloat16, False, {"bwd_BLOCK_M1": 32, "bwd_num_warps": 8}),
        ("sm_90", 64, torch.bfloat16, True, {"fwd_BLOCK_N": 64, "fwd_num_warps": 8}),
        ("sm_90", 128, torch.bfloat16, True, {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32}),
        ("sm_90", 128, torch.bfloat16, False, {}),
        ("sm_90", 64, torch.bfloat16, False, {}),
        ("sm_100", 64, torch.bfloat16, False, {"fwd_BLOCK_N": 64, "fwd_num_warps": 8, "bwd_num_warps": 8}),
        ("sm_100", 80, torch.bfloat16, False, {"bwd_BLOCK_N1": 128, "bwd_num_warps": 8}),
        ("sm_80", 48, torch.bfloat16, True, {}),
        ("sm_80", 128, torch.float32, True, {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_warps": 8}),
        ("sm_120", 256, torch.float32, False, {"fwd_BLOCK_M": 16, "fwd_num_stages": 1}),
        ("sm_90", 48, torch.float32, False, {}),
        ("sm_80", 257, torch.bfloat16, True, {}),
        ("mps", 128, torch.bfloat16, True, {}),
    ],
)
def test_tiles_are_passed_where_torchs_own_spill(
    level: str, head_dim: int, dtype: torch.dtype, scored: bool, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "detect", lambda device: simulate(level))
    q = torch.empty(1, 2, 3, head_dim, dtype=dtype)
    passed = flex.options_of(q, scored=scored)
    assert flex.SHORT_QUERIES.items() <= passed.items()
    assert expected.items() <= passed.items()
    assert bool(expected) == (len(passed) > len(flex.SHORT_QUERIES))
    monkeypatch.setattr(tiles, "ON_ROCM", True)
    assert flex.options_of(q, scored=scored) == flex.SHORT_QUERIES


@pytest.mark.parametrize("narrows", [False, True])
@pytest.mark.parametrize(
    "band", [(-999, 999), *((-999, ahead) for ahead in (0, 1, 127, 128, 200, 400)), (0, 128), (-400, -127), (-127, 127), (-256, 0)]
)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (128, 256), (129, 640), (255, 383), (640, 128)])
def test_blocks_of_rows_of_a_segment_are_those_that_torch_finds(
    queries: int, keys: int, band: tuple[int, int], narrows: bool
) -> None:
    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j - i >= band[0]) & (j - i <= band[1])

    found = create_block_mask(mask_mod, 1, 1, queries, keys, device="cpu")

    def listed(counts: Tensor, indices: Tensor) -> list[set[int]]:
        return [set(row[:n].tolist()) for n, row in zip(counts[0, 0], indices[0, 0])]

    for side, lists in zip(("kv", "q"), rows._lists(queries, keys, band, not narrows, torch.device("cpu"))):
        names = [(f"{kind}{side}_num_blocks", f"{kind}{side}_indices") for kind in ("", "full_")]
        partial, full = (listed(*(getattr(found, name) for name in each)) for each in names)
        if narrows:  # no block is known to be full
            partial, full = [a | b for a, b in zip(partial, full)], [set() for _ in full]
        assert listed(lists.partial_counts, lists.partial_indices) == partial
        assert listed(lists.full_counts, lists.full_indices) == full


@pytest.mark.parametrize("trusted", [False, True])
def test_strided_keys_are_packed_for_a_backward(monkeypatch: pytest.MonkeyPatch, trusted: bool) -> None:
    """pytorch/pytorch#146377. On the meta device: what matters is what the kernel is given."""
    given_strides = []
    monkeypatch.setattr(flex, "TRUST_STRIDED_GRADIENTS", trusted)
    monkeypatch.setattr(flex, "_compiled", lambda kind: lambda q, k, v, **_: (given_strides.append(k.is_contiguous()), q)[1])
    x = torch.empty(1, 64, 2, 16, device="meta").transpose(1, 2)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            flex.call(x, x, x, score_mod=None, block_mask=None, scale=1.0, want_lse=False, kind=None)
    assert given_strides == [not trusted, False]


def test_launches_beyond_the_grid_are_refused() -> None:
    x = torch.empty(GRID_LIMIT + 1, 1, 2, 16, device="meta")
    with pytest.raises(NotImplementedError, match=r"at most 65535 sequences and heads .* got 65536 and 1; split the batch"):
        flex.call(x, x, x, score_mod=None, block_mask=None, scale=1.0, want_lse=False, kind=None)


@pytest.mark.parametrize(
    ("hardware", "changes", "reason"),
    [
        ("cpu", {"differentiable": True}, r"no backward on CPU; use backend='sdpa', or torch.no_grad\(\)"),
        ("cpu", {"wants_lse": True}, r"gives no lse on CPU; use backend='sdpa'"),
        ("cpu", {"dropout": True}, r"has no dropout; use backend='sdpa'"),
        ("cpu", {"dtype": torch.float64}, r"has no float64 kernel; use backend='sdpa'"),
        ("sm_75", {}, r"needs sm_80 or newer; use backend='sdpa'"),
        ("mps", {}, r"runs on CPU and CUDA only; use backend='sdpa'"),
        ("sm_90", {"head_dim": 8}, r"head_dim must be at least 16 for flex_attention on CUDA, got 8"),
        (
            "sm_80",
            {"dtype": torch.bfloat16, "head_dim": 16, "key_padding_mask": True, "modified": True, "differentiable": True},
            None,
        ),
        ("sm_100", {"dtype": torch.bfloat16, "head_dim": 48, "group": 3}, None),
    ],
)
def test_says_why_not_and_what_instead(hardware: str, changes: dict[str, Any], reason: str | None) -> None:
    request = DispatchKey(**{"hardware": simulate(hardware), "dtype": torch.float32, "head_dim": 64} | changes)
    if reason is None:
        assert choose("flex", request) == "flex"
    else:
        with pytest.raises(NotImplementedError, match=reason):
            choose("flex", request)


@pytest.mark.parametrize(("grad", "what"), [(True, "has no backward"), (False, "gives no lse")])
def test_a_call_on_a_cpu_says_what_is_missing(grad: bool, what: str) -> None:
    x = torch.randn(1, 12, 2, 16, requires_grad=grad)
    with pytest.raises(NotImplementedError, match=rf"backend 'flex' cannot run this on cpu: .*{what.removeprefix('has ')} on CPU"):
        dilated_attention(x, x, x, PATTERN, backend="flex", return_lse=not grad)


def test_refuses_zero_keys() -> None:
    x = torch.randn(1, 13, 2, 16)
    with pytest.raises(NotImplementedError, match=r"must add no zero keys at 13 tokens for backend='flex' on CPU"):
        dilated_attention(x, x, x, DilatedPattern.torchscale((6,), (2,)), backend="flex")
    with pytest.raises(NotImplementedError, match=r"backend 'flex' cannot run this on cpu: flex_attention gives no lse on CPU"):
        dilated_attention(x, x, x, DilatedPattern.torchscale((5,), (2,)), is_causal=True, backend="flex")


ENTRY = {"dtype": "bfloat16", "training": True, "head_dim": 64}


def measured(*points: tuple[int, float | None], **changes: Any) -> list[dict[str, Any]]:
    return [{**ENTRY, **changes, "tokens": tokens, "flex_over_sdpa": ratio} for tokens, ratio in points]


def test_auto_follows_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        *measured((1024, 0.5), (4096, 0.96), (16384, 1.2), (65536, None)),
        *measured((1024, 1.5), (4096, 1.1), (16384, 0.9), (65536, 0.4), head_dim=128),
        *measured((4096, 0.2), training=False),
    ]
    kept = {"measured": entries, "forms": [], "checks": [], "date": ""}
    monkeypatch.setitem(measurements.SHIPPED, "sm_90", measurements.read(kept))

    def first(**changes: Any) -> str:
        values = {
            "hardware": simulate("sm_90"),
            "dtype": torch.bfloat16,
            "head_dim": 64,
            "differentiable": True,
            "num_tokens": 2000,
        }
        return measurements.prefer(DispatchKey(**values | changes))[0]

    assert [first(num_tokens=n) for n in (1, 1024, 2047, 2048, 1 << 20)] == ["flex", "flex", "flex", "sdpa", "sdpa"]
    assert [first(num_tokens=n, head_dim=100) for n in (1, 8191, 8192, 1 << 20)] == ["sdpa", "sdpa", "flex", "flex"]
    assert first(differentiable=False) == "flex"
    assert measurements.faster({"flex_over_sdpa": 0.8, "triton_over_sdpa": 0.7}) == "triton"
    assert measurements.faster({"flex_over_sdpa": 0.6, "triton_over_sdpa": 0.7}) == "flex"
    assert measurements.faster({"flex_over_sdpa": None, "triton_over_sdpa": 0.96}) == "sdpa"
    assert first(hardware=simulate("sm_80")) == first(dtype=torch.float16) == measurements.DEFAULT[0]
    for name in ("cpu", "sm_75", "sm_90", "mps"):
        assert sorted(measurements.prefer(DispatchKey(simulate(name), torch.bfloat16, 64))) == sorted(measurements.DEFAULT)


def test_what_is_measured_anew_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    from benchmarks import crossover

    kept = json.loads(measurements.FILE.read_text())
    file = tmp_path / "measured.json"
    monkeypatch.setattr(crossover, "over_sdpa", lambda backend, tokens, *_, **__: 7.0)
    crossover.main(["--device", "cpu", "--tokens", "4096", "512", "--file", str(file)])
    found = json.loads(file.read_text())
    assert found["sm_90"] == kept["sm_90"]
    found, kept = found["cpu"], kept["cpu"]
    new = [entry for entry in found["measured"] if entry.get("flex_over_sdpa") == 7.0]
    assert sorted((entry["dtype"], entry["tokens"]) for entry in new) == [
        (dtype, tokens) for dtype in ("bfloat16", "float32") for tokens in (512, 4096)
    ]
    rest = [entry for entry in kept["measured"] if entry["tokens"] != 4096]
    assert [entry for entry in found["measured"] if entry not in new] == rest
    assert found["provenance"][:-1] == kept["provenance"]  # of what stays
