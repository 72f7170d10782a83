"""Users' score and mask functions: refusals, and every backend that runs them against the oracle."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, example, given, settings
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_mask, flex_attention

import flexdilated.backends.autograd.functions
import flexdilated.backends.flex.backend
from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.backends.flex import kernel as flex
from flexdilated.core.call import Call
from tests.backends.flex_emulation import emulate, flex_backend
from tests.backends.mods import Mods, at_most, needs_unknown_sizes, padded, run, with_lse
from tests.cases import Case, run_reference, windowed_calls
from tests.tolerances import EXACT, SINGLE

PATTERN = DilatedPattern((7, 20, 41), (1, 2, 5))
SEVERAL = DilatedPattern((150, 600, 620), (1, 2, 3))
WIDE = Case(DilatedPattern(window=71), batch=2, num_tokens=293, kv_heads=2, scale=0.7, ignored=0.3)

MODS = st.builds(
    Mods,
    st.sampled_from((None, "table", "alibi", "softcap", "window")),
    st.sampled_from((None, "prefix", "thirds", "one_token")),
    st.integers(0, 1000),
)


def assert_as_the_oracle(case: Case, mods: Mods, attend: Callable[..., tuple[Tensor, Tensor]] = with_lse) -> None:
    try:
        expected = run(reference.dilated_attention, case, mods)
    except NotImplementedError:  # zero keys
        return
    torch.testing.assert_close(run(attend, case, mods), expected, **EXACT)


@pytest.mark.slow
@settings(max_examples=60)
@given(case=windowed_calls(), mods=MODS, scores=st.sampled_from((1, 40, 3000, 1 << 24)))
@example(WIDE, Mods("table", "thirds"), 30_000)
def test_materialised_attention_equals_the_oracle(case: Case, mods: Mods, scores: int) -> None:
    with at_most(scores):
        assert_as_the_oracle(case, mods)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_oracle_calls_functions_as_torch_does(is_causal: bool) -> None:
    """One dense branch is plain flex_attention."""
    q, k, v = (torch.randn(2, 19, 3, 4, dtype=torch.float64) for _ in range(3))
    mods = Mods("table", "thirds").functions(Mods("table", "thirds").table(3).detach())

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = mods["mask_mod"](b, h, i, j)
        return seen & (i >= j) if is_causal else seen

    mask = create_mask(mask_mod, 2, 3, 19, 19, device="cpu")

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(mask[b, h, i, j], mods["score_mod"](s, b, h, i, j), -math.inf)

    flex_module = __import__("sys").modules[flex_attention.__module__]
    before = flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # the same arithmetic without the tracer
    try:
        expected = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=score_mod).transpose(1, 2)
    finally:
        flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before
    out, _ = reference.dilated_attention(q, k, v, DilatedPattern((19,), (1,)), is_causal=is_causal, **mods)
    torch.testing.assert_close(out, expected, **EXACT)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, i, j: s.float() - 0.25 * (i - j).abs(),
        lambda s, b, h, i, j: (s - 0.25 * (i - j).abs()).bfloat16(),
        lambda s, b, h, i, j: (0.25 * j).half(),  # ignores the scores: fewer dims, too
    ],
)
def test_scores_of_another_dtype_are_cast_to_that_of_the_scores(score_mod: Any, backend: str) -> None:
    qkv = [x.requires_grad_() for x in Case(PATTERN).tensors()[:3]]

    def dense(s: Tensor, *pair: Tensor) -> Tensor:
        return score_mod(s, *pair).double() + 0 * s

    results = []
    for out, lse in (
        with_lse(*qkv, PATTERN, score_mod=score_mod, backend=backend),
        reference.dilated_attention(*qkv, PATTERN, score_mod=dense),
    ):
        grads = torch.autograd.grad(out.sin().sum() + lse.sin().sum(), qkv, allow_unused=True, materialize_grads=True)
        results.append((out, lse, *grads))
    torch.testing.assert_close(*results, **EXACT)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("batch", [0, 1])
def test_functions_are_called_for_the_sequences_that_there_are(batch: int, backend: str) -> None:
    table, bias = (torch.ones(size, dtype=torch.float64, requires_grad=True) for size in (batch, 13))
    x = torch.randn(batch, 13, 2, 3, dtype=torch.float64)
    functions: list[dict[str, Any]] = [
        {"score_mod": lambda s, b, h, i, j: s * table[b] + bias[i - j]},
        {"score_mod": lambda s, b, h, i, j: bias[j], "mask_mod": lambda b, h, i, j: table[b] > 0},
    ]
    for mods in functions:
        out, lse = with_lse(x, x, x, DilatedPattern((7, 13), (1, 2)), backend=backend, **mods)
        expected, _ = reference.dilated_attention(x, x, x, DilatedPattern((7, 13), (1, 2)), **mods)
        torch.testing.assert_close(out, expected, **EXACT)
        assert lse.shape == (batch, 2, 13)
        assert (torch.autograd.grad(out.sum(), bias)[0].abs().sum() > 0) == (batch > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    case, mods = Case(PATTERN, batch=2, group=2, kv_heads=2, head_dim=16, is_causal=True), Mods("alibi", None)
    q, k, v, _, _ = case.tensors(dtype)
    out, lse = with_lse(q, k, v, PATTERN, **case.options(), **mods.functions(mods.table(4)))
    expected, expected_lse = reference.dilated_attention(q, k, v, PATTERN, **case.options(), **mods.functions(mods.table(4)))
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected_lse, **SINGLE)
    torch.testing.assert_close(out.double(), expected, atol=4 * torch.finfo(dtype).eps, rtol=1e-5)


@pytest.mark.parametrize("dim", ["windows", *range(4)])
def test_gradients_of_inputs_that_share_memory_are_those_of_every_element(dim: int | str) -> None:
    """A strided view of elements that share memory would give each an equal share of their sum."""
    q, k, v, dout, _ = Case(PATTERN, batch=2, group=2).tensors()
    mods: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s + 0.1 * (i - j)}

    def shared(x: Tensor) -> Tensor:
        if isinstance(dim, int):
            return x.narrow(dim, 1, 1).expand_as(x)
        return x[0, :40].repeat(2, 1, 1).unfold(0, 43, 11)[:2].movedim(-1, 1)  # of one sequence, which overlap

    views = [shared(x).requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(dilated_attention(*views, PATTERN, **mods), views, dout)
    copies = [x.detach().clone().requires_grad_() for x in views]
    expected = torch.autograd.grad(reference.dilated_attention(*copies, PATTERN, **mods)[0], copies, dout)
    torch.testing.assert_close(grads, expected, **EXACT)


def test_dropout_under_functions_follows_the_seed() -> None:
    case, mods = Case(PATTERN, lse_gradient=False), Mods("table", None)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(with_lse, case, mods, dropout_p=0.4))
    assert all(map(torch.equal, results[0], results[1]))
    assert not torch.equal(results[0][0], results[2][0])
    q, k, v = (x.repeat(400, 1, 1, 1) for x in case.tensors()[:3])
    functions = mods.functions(mods.table(5).detach())
    mean = dilated_attention(q, k, v, PATTERN, dropout_p=0.4, **functions).mean(dim=0, keepdim=True)
    torch.testing.assert_close(mean, run(with_lse, case, mods)[0], atol=0.35, rtol=0.0)


def test_a_long_sequence_never_holds_all_scores() -> None:
    """5 segments of 600: at most 600 x 600 scores per head exist, of 3,000 x 3,000."""
    largest = 0

    def watched(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, s.numel())
        return s * 0.5

    with at_most(100_000):
        x = torch.randn(1, 3000, 2, 4, requires_grad=True)
        dilated_attention(x, x, x, DilatedPattern((600, 3000), (1, 5)), score_mod=watched).sum().backward()
    assert 0 < largest <= 100_000


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.slow), "func"])
def test_autocast_leaves_the_backward_in_float32(how: str) -> None:
    """Which runs under the autocast of whoever calls it."""
    torch._dynamo.reset()
    case, mods = Case(DilatedPattern((23,), (2,)), kv_heads=2, num_tokens=23), Mods("table", "thirds")
    q, k, v, dout, dlse = case.tensors(torch.bfloat16)
    assert dlse is not None

    def loss(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        out, lse = with_lse(q, k, v, case.pattern, **case.options(), **mods.functions(table))
        return (out * dout).double().sum() + torch.where(lse > -math.inf, lse * dlse, 0.0).sum()

    def gradients(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        inputs = [x.detach().clone().requires_grad_(how != "func") for x in (q, k, v, mods.table(2).float())]
        if how == "func":
            found: tuple[Tensor, ...] = torch.func.grad(call, (0, 1, 2, 3))(*inputs)
            return found
        return torch.autograd.grad(call(*inputs), inputs)

    expected = gradients(loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = gradients(torch.compile(loss, backend="aot_eager", fullgraph=True) if how == "compiled" else loss)
    for a, e in zip(actual, expected):
        assert torch.equal(a, e) if how != "compiled" else torch.testing.assert_close(a.float(), e.float(), **SINGLE) is None


def test_functions_are_differentiated_twice() -> None:
    case, mods = Case(PATTERN, num_tokens=17, kv_heads=2, head_dim=2, group=2), Mods("softcap", "thirds")
    q, k, v, dout, _ = case.tensors()
    results = []
    for attend in (with_lse, reference.dilated_attention):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*inputs, PATTERN, **mods.functions(mods.table(4)))[0]
        grads = torch.autograd.grad((out * dout).sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), inputs))
    torch.testing.assert_close(*results, **EXACT)


LENGTHS = (29, 43, 17, 7, 53)
SHORT = DilatedPattern((7, 20), (1, 3))


@pytest.fixture
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@needs_unknown_sizes
@given(case=windowed_calls(), mods=MODS, scores=st.sampled_from((1, 40, 3000, 1 << 24)))
@example(WIDE, Mods("table", "thirds"), 30_000)
def test_padded_grids_equal_the_oracle(case: Case, mods: Mods, scores: int) -> None:
    """What is traced for a symbolic number of tokens, run as it is."""
    assume(mods.score is not None or mods.mask is not None)  # without functions, zero keys are not refused

    def attend(
        q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, scale: Any = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        return padded(q, k, v, pattern, scale=q.shape[3] ** -0.5 if scale is None else float(scale), **options)

    with at_most(scores):
        assert_as_the_oracle(replace(case, borders=None), mods, attend)


@needs_unknown_sizes
@pytest.mark.slow
@pytest.mark.usefixtures("_forget_graphs")
def test_compiled_functions_equal_the_oracle_for_every_length() -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(with_lse, fullgraph=True, backend=graphs)

    def attend(q: Tensor, k: Tensor, v: Tensor, *pattern: Any, key_padding_mask: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        for x in (q, k, v, key_padding_mask):
            torch._dynamo.mark_dynamic(x, 1)
        return compiled(q, k, v, *pattern, key_padding_mask=key_padding_mask, **options)

    options: dict[str, Any] = {"group": 2, "ignored": 0.3, "is_causal": True}
    for n in LENGTHS:
        case = Case(DilatedPattern((20,), (3,), window=5), batch=2, num_tokens=n, kv_heads=3, seed=n, **options)
        assert_as_the_oracle(case, Mods("table", "thirds"), attend)
    assert graphs.frame_count == 1


@needs_unknown_sizes
@pytest.mark.slow
@pytest.mark.usefixtures("_forget_graphs")
@torch.no_grad()
def test_compiled_functions_see_a_bounded_number_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 64 tokens in one part, and up to 512 in 4."""
    limit = 30000
    monkeypatch.setattr(flexdilated.backends.autograd.functions, "SCORES", limit)
    pattern, held, counts = DilatedPattern((100,), (2,)), [], []

    def inspect(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        counts.append(sum("tanh" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        held.append(s.shape.numel())
        return torch.tanh(s)

    def attend(x: Tensor) -> Tensor:
        return dilated_attention(x, x, x, pattern, score_mod=lambda s, b, h, i, j: torch.tanh(s))

    compiled = torch.compile(attend, fullgraph=True, backend=inspect)
    for n in (43, 61, 91):
        x = torch.randn(2, n, 4, 3, dtype=torch.float64)
        torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(compiled(x), attend(x), **EXACT)
    assert counts == [3, 6]  # two more than the parts: the checks of the function
    for n in (43, 91, 300):
        x = torch.randn(2, n, 4, 3)
        flexdilated.backends.autograd.functions._padded(x, x, x, Call(pattern, scale=1.0, score_mod=score_mod))
    assert limit // 2 < max(held) <= limit


@pytest.mark.usefixtures("_forget_graphs")
@torch.no_grad()
def test_a_graph_of_one_length_applies_a_function_once_per_branch() -> None:
    """Whatever the cut of a window into pieces: the compiler sees every operation."""
    pattern, counts = DilatedPattern((200,), (2,), window=20, global_tokens=2), []

    def inspect(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        counts.append(sum("tanh" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    def attend(x: Tensor) -> Tensor:
        return dilated_attention(x, x, x, pattern, is_causal=True, score_mod=lambda s, b, h, i, j: torch.tanh(s))

    x = torch.randn(2, 200, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend=inspect)(x), attend(x), **EXACT)
    assert counts == [5]  # three branches, and two checks of the function


@needs_unknown_sizes
@pytest.mark.slow
@pytest.mark.usefixtures("_forget_graphs")
@torch.no_grad()
def test_functions_are_exported_for_every_batch_and_length() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return dilated_attention(x, x, x, DilatedPattern((20,), (3,)), **Mods("alibi", "thirds").functions(x))

    module, shapes = Attention(), {"x": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("n", min=2, max=64)}}
    with torch.enable_grad():  # as a caller who thinks of nothing
        exported = torch.export.export(module, (torch.randn(2, 29, 4, 3),), dynamic_shapes=shapes, strict=True)
    for batch, n in ((1, 43), (2, 7), (7, 53)):
        x = torch.randn(batch, n, 4, 3)
        torch.testing.assert_close(exported.module()(x), module(x), **SINGLE)


@needs_unknown_sizes
@pytest.mark.slow
@pytest.mark.usefixtures("_forget_graphs")
@torch.no_grad()
def test_compiled_functions_beside_zero_keys_are_refused_for_the_lengths_that_have_them() -> None:
    def attend(x: Tensor) -> Tensor:
        return dilated_attention(x, x, x, DilatedPattern.torchscale((6,), (2,)), score_mod=lambda s, b, h, i, j: s * 0.5)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for n in (12, 18):
        x = torch.randn(2, n, 4, 3)
        torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(compiled(x), attend(x), **SINGLE)
    with pytest.raises(NotImplementedError, match=r"adds no zero keys at N=13, got zero_padding=True"):
        compiled(torch.randn(2, 13, 4, 3))


@needs_unknown_sizes
@pytest.mark.slow
@pytest.mark.usefixtures("_forget_graphs")
@torch.no_grad()
def test_compiled_functions_of_documents_run_outside_of_the_graph() -> None:
    def attend(x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return dilated_attention(x, x, x, SHORT, cu_seqlens=cu_seqlens, mask_mod=lambda b, h, i, j: (i + 2 * j) % 3 > 0)

    compiled = torch.compile(attend, backend="eager")
    for n in (29, 43):
        x, cu_seqlens = torch.randn(1, n, 4, 3), torch.tensor([0, 5, n])
        torch.testing.assert_close(compiled(x, cu_seqlens), attend(x, cu_seqlens), **SINGLE)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"cu_seqlens must come without score_mod and mask_mod in compiled code, got both"):
        torch.compile(attend, fullgraph=True, backend="eager")(x, cu_seqlens)


@pytest.mark.slow
@pytest.mark.usefixtures("_forget_graphs")
def test_code_compiled_in_part_asks_for_no_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a caller is left out of the graph, functions that it calls are compiled all the same."""

    def attend(x: Tensor) -> Tensor:
        return dilated_attention(x, x, x, SHORT, backend="flex")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # of the backend's own calls too
    monkeypatch.setattr(flex, "_compiled", lru_cache(flex._compiled.__wrapped__))
    compiled = torch.compile(attend)
    with torch.no_grad():
        for n in (29, 43):
            x = torch.randn(2, n, 4, 16)
            torch.testing.assert_close(compiled(x), attend(x), **SINGLE)


@pytest.mark.parametrize("far", [-1e9, torch.finfo(torch.float32).min, 1e9])
@pytest.mark.parametrize("attend", [dilated_attention, pytest.param(padded, marks=needs_unknown_sizes)])
def test_scores_that_are_far_away_alike_weigh_alike(attend: Callable[..., tuple[Tensor, Tensor]], far: float) -> None:
    """As where a model hides all that a query sees by -1e9: float32 has lost the scores, and the log of how many there are."""
    pattern = DilatedPattern((20,), (2,))
    case = Case(pattern, batch=2, num_tokens=43, kv_heads=2, group=2, is_causal=True)
    *inputs, dout, _ = case.tensors(torch.float32)
    inputs[0] = inputs[0] * 0  # so that float64 has lost nothing else
    mods = {"score_mod": lambda s, b, h, i, j: torch.where(h == 1, s, s + far), "is_causal": True, "scale": 0.3}

    def differentiated(attend: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype, **options: Any) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out, lse = attend(*leaves, pattern, **mods, **options)
        assert torch.equal(lse.isfinite(), expected_finite)
        return [out.detach(), *torch.autograd.grad((out * dout).sum(), leaves)]

    expected_finite = run_reference(case)[1].isfinite()
    options = {"return_lse": True} if attend is dilated_attention else {}
    expected = differentiated(reference.dilated_attention, torch.float64)
    torch.testing.assert_close([a.double() for a in differentiated(attend, torch.float32, **options)], expected, **SINGLE)
    # Between branches that many keys count as one lse: but the weights are weights.
    out, _ = attend(*inputs[:2], torch.ones_like(inputs[2]), PATTERN, **mods, **options)
    torch.testing.assert_close(out, torch.ones_like(out), **SINGLE)


@needs_unknown_sizes
@pytest.mark.slow
def test_grouped_branches_compile_for_any_number_of_heads() -> None:
    torch._dynamo.reset()
    pattern = DilatedPattern((8, 32), (1, 2), heads="grouped")

    def attend(q: Tensor) -> Tensor:
        return dilated_attention(q, q, q, pattern, score_mod=lambda s, b, h, i, j: s + 0.1 * h, backend="sdpa")

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for heads in (4, 7):
        q = torch.randn(1, 40, heads, 16, dtype=torch.float64)
        torch._dynamo.mark_dynamic(q, 2)
        torch.testing.assert_close(compiled(q), attend(q), **EXACT)


def assert_flex_backend_as_the_oracle(case: Case, mods: Mods) -> None:
    try:
        expected = run(reference.dilated_attention, case, mods)
        actual = run(flex_backend, case, mods)
    except NotImplementedError:  # zero keys under functions, shifted positions
        return
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("layout", [pytest.param("packed", marks=pytest.mark.slow), "fused"])
def test_either_layout_equals_the_oracle(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, layout)

    @settings(max_examples=50)
    @given(case=windowed_calls(), mods=MODS)
    def check(case: Case, mods: Mods) -> None:
        assert_flex_backend_as_the_oracle(case, mods)

    check()


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        (SEVERAL, {"batch": 2}),
        (SEVERAL, {"batch": 2, "is_causal": True}),
        (SEVERAL, {"batch": 2, "is_causal": True, "ignored": 0.3}),
        (DilatedPattern(window=131), {"num_tokens": 299, "ignored": 0.3}),
        (DilatedPattern(window=261), {"num_tokens": 643, "is_causal": True}),
        (DilatedPattern((150, 300), (1, 2), window=40), {"num_tokens": 299, "is_causal": True, "borders": (0, 30, 160, 299)}),
    ],
)
def test_pieces_of_several_blocks(pattern: DilatedPattern, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(pattern, **{"num_tokens": 701, "kv_heads": 3, **options})
    for layout in ("packed", "fused") if pattern.window else ("packed",):
        emulate(monkeypatch, layout)
        assert_flex_backend_as_the_oracle(case, Mods(None, None))


def test_packed_lanes_beyond_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, "packed")
    monkeypatch.setattr(flexdilated.backends.flex.rows, "GRID_LIMIT", 4)
    case = Case(DilatedPattern((5, 10), (2, 3)), batch=3, num_tokens=43, kv_heads=3)  # rates that do not divide: a lane per segment
    assert_flex_backend_as_the_oracle(case, Mods("table", "thirds"))
    assert_flex_backend_as_the_oracle(Case(PATTERN, batch=3, ignored=0.3), Mods("table", "prefix"))


@pytest.mark.parametrize("layout", ["kernel", "functions", "packed", "fused"])
@pytest.mark.parametrize("options", [{"group": 2}, {"is_causal": True, "ignored": 0.3}], ids=["whole", "causal_ignored"])
@pytest.mark.parametrize("sizes", [[4] * 13, [3, 5, 7] * 5, [25, 0, 25, 25, 7, 7]], ids=["equal", "scattered", "several_segments"])
def test_many_documents_equal_the_oracle(
    sizes: list[int], options: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, layout)
    case = Case(DilatedPattern((11, 17), (1, 3)), num_tokens=sum(sizes), borders=(0, *accumulate(sizes)), **options)
    every: dict[str, tuple[Mods, ...]] = {"kernel": (Mods(None, None),), "functions": (Mods("table", "one_token"),)}
    for mods in every.get(layout, (Mods(None, None), Mods("table", "one_token"))):
        (assert_as_the_oracle if layout in every else assert_flex_backend_as_the_oracle)(case, mods)


def attend(batch: int = 1, **options: Any) -> Tensor:
    x = torch.randn(batch, 12, 2, 4)
    return dilated_attention(x, x, x, DilatedPattern((6,), (2,)), **options)


@pytest.mark.parametrize(
    ("name", "function", "error", "message"),
    [
        ("score_mod", 3, TypeError, r"be a function of \(score, b, h, q_idx, kv_idx\), got int"),
        ("mask_mod", "causal", TypeError, r"be a function of \(b, h, q_idx, kv_idx\), got str"),
        ("score_mod", lambda s, q: s, TypeError, r"take \(score, b, h, q_idx, kv_idx\), got \(s, q\)"),
        ("mask_mod", lambda b: b > 0, TypeError, r"take \(b, h, q_idx, kv_idx\), got \(b\)"),
        ("score_mod", lambda s, b, h, i, j: i > j, TypeError, r"return a floating-point score, got torch.bool"),
        ("score_mod", lambda s, b, h, i, j: 1.0, TypeError, r"return a tensor, got float"),
        ("mask_mod", lambda b, h, i, j: i - j, TypeError, r"return a bool.*got torch.int64"),
        ("mask_mod", lambda b, h, i, j: True, TypeError, r"return a tensor, got bool"),
        ("score_mod", lambda s, b, h, i, j: torch.ones(3), ValueError, r"return one value per pair, got shape \(3,\) for one pair"),
        ("mask_mod", lambda *_: torch.ones(3, 1, 1, 1, 1, dtype=torch.bool), ValueError, r"return one value"),
        ("score_mod", lambda s, *_: s + s.new_zeros(1, device="meta"), ValueError, r"use tensors on the device of q=cpu, got"),
    ],
)
@pytest.mark.parametrize("batch", [0, 1])
def test_refuses_what_is_no_score_or_mask_function(
    name: str, function: Any, error: type[Exception], message: str, batch: int
) -> None:
    with pytest.raises(error, match=f"{name} must {message}"):
        attend(batch, **{name: function})


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize(
    ("length", "rate", "is_causal"),
    [(6, 2, False), (12, 7, True)],  # of 12 and 1 tokens all that shifts is the last output: behind the end
    ids=["zero_keys", "shifted"],
)
def test_refuses_functions_beside_zero_keys_and_shifts(length: int, rate: int, is_causal: bool, backend: str) -> None:
    x, pattern = torch.randn(1, 13, 2, 4), DilatedPattern.torchscale((length,), (rate,))
    with pytest.raises(NotImplementedError, match=r"zero_padding=True"):
        dilated_attention(x, x, x, pattern, is_causal=is_causal, score_mod=lambda s, *_: s, backend=backend)
