"""`torch.compile(fullgraph=True)` of every module, call and mode: one graph, few of them over many lengths, equal to eager."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from flexdilated import DilatedPattern, LongNet, LongNetConfig, LongNetLM, MultiheadDilatedAttention, dilated_attention
from flexdilated.backends import measured
from tests.cases import Case, differentiate
from tests.tolerances import EXACT, SINGLE

PATTERN = DilatedPattern((5, 13), (1, 3))
VOCAB, WIDTH, HEADS, FFN = 29, 24, 4, 31
LENGTHS = (29, 43, 37, 17, 23, 7, 31, 11, 53, 19)
HALF = {"atol": 0.02, "rtol": 0.02}
TOLERANCE = {torch.float64: EXACT, torch.float32: SINGLE, torch.bfloat16: HALF, torch.float16: HALF}


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[1])).to(dtype)


def padding(num_tokens: int, batch: int = 2) -> Tensor:
    return torch.arange(batch * num_tokens).view(batch, num_tokens) % 3 == 0


def relative(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s * 0.5 - 0.1 * (h + 1) * (i - j).abs()


def thirds(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + 2 * j + h + b) % 3 > 0


# Per call: the options for so many tokens.
CALLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda n: {},
    "mask": lambda n: {"key_padding_mask": padding(n)},
    "documents": lambda n: {"cu_seqlens": torch.tensor([0, 5, n])},
    "lse": lambda n: {"return_lse": True, "is_causal": True},
    "dropout": lambda n: {"dropout_p": 0.4},
}
MODES: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "train": (contextlib.nullcontext, torch.float32),
    "half": (torch.no_grad, torch.bfloat16),
    "inference": (torch.inference_mode, torch.float16),
}


def finite(x: Tensor) -> Tensor:
    """lse is -inf where no key reaches."""
    return torch.where(x > -torch.inf, x, 0.0)


def outputs_and_gradients(function: Callable[..., Any], x: tuple[Tensor, ...], options: dict[str, Any]) -> list[Tensor]:
    """What a function of floating-point tensors returns and, where it may be asked for, its gradients."""
    differentiable = torch.is_grad_enabled()
    leaves = [t.detach().clone().requires_grad_(differentiable) for t in x]
    torch.manual_seed(5)  # for dropout
    result = function(*leaves, **options)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    grads = torch.autograd.grad([finite(out).square().sum() for out in outputs], leaves) if differentiable else ()
    return [*outputs, *grads]


def attend(*x: Tensor, **options: Any) -> Any:
    return dilated_attention(*x, PATTERN, **options)


# Some call in every mode: each graph takes the tracer a second; tests/doors compiles every kind of branch.
GRID = [("mask", "half"), pytest.param("lse", "inference", marks=pytest.mark.slow)]
GRID += [pytest.param(call, "train", marks=pytest.mark.slow) for call in ("plain", "documents", "dropout")]


@pytest.mark.parametrize(("call", "mode"), GRID, ids=lambda name: name)
def test_compiled_attention_equals_eager_for_every_length_in_two_graphs(call: str, mode: str) -> None:
    context, dtype = MODES[mode]
    graphs, counts = CompileCounterWithBackend("aot_eager"), []

    compiled = torch.compile(attend, fullgraph=True, backend=graphs)
    with context():
        for n in LENGTHS if call == "plain" else LENGTHS[:3]:
            batch = 1 if call == "documents" else 2
            x = (draw(batch, n, HEADS, 6, dtype=dtype), draw(batch, n, 2, 6, dtype=dtype), draw(batch, n, 2, 6, dtype=dtype) + 1)
            actual, expected = (outputs_and_gradients(f, x, CALLS[call](n)) for f in (compiled, attend))
            for a, e in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, e, **TOLERANCE[dtype])
            counts.append(graphs.frame_count)
    assert len(set(counts[1:])) == 1


@pytest.mark.slow
def test_numbers_may_change_from_call_to_call() -> None:
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    x = (draw(2, 29, HEADS, 6), draw(2, 29, 2, 6), draw(2, 29, 2, 6) + 1)
    for number in (0.3, 0.5, 0.7):
        actual, expected = (outputs_and_gradients(f, x, {"scale": number, "dropout_p": 1 - number}) for f in (compiled, attend))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, **SINGLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "autocast"),
    [(Case(DilatedPattern.torchscale((5, 13), (2, 5)), batch=2, group=2, ignored=0.4), True), (Case(PATTERN, scale=-0.4), False)],
)
def test_calls_of_dynamic_sizes_equal_eager(case: Case, autocast: bool) -> None:
    q, k, v, dout, dlse = case.tensors(torch.float32)
    options = {**case.options(), "dropout_p": 0.3 if autocast else 0.0, "return_lse": True}

    def attend(*x: Tensor) -> Any:
        return dilated_attention(*x, case.pattern, **options)

    results = []
    for call in (torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True), attend):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            torch.manual_seed(case.seed)
            results.append(differentiate(call, q, k, v, dout.bfloat16() if autocast else dout, dlse))
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e, **(HALF if autocast else SINGLE))


def multihead(**options: Any) -> MultiheadDilatedAttention:
    return MultiheadDilatedAttention(WIDTH, HEADS, PATTERN, **options)


def language_model() -> LongNetLM:
    sizes = {"vocab_size": VOCAB, "embed_dim": WIDTH, "num_layers": 1, "num_heads": HEADS, "num_kv_heads": 2, "ffn_dim": FFN}
    return LongNetLM(LongNetConfig(**sizes, pattern=PATTERN))


def read(model: Any, x: Tensor) -> Tensor:
    return model((x[..., 0] * 100).long() % VOCAB, key_padding_mask=padding(x.shape[1]))


# Per module: how it is built, and how it is called with embeddings `(2, N, WIDTH)`.
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "longnet": (lambda: LongNet(WIDTH, HEADS, 1, 1, FFN, PATTERN), lambda f, x: f(x, x * 0.5)),
    "xpos": (language_model, read),
}


def seeded(call: Callable[..., Any], *x: Any) -> Any:
    torch.manual_seed(5)
    return call(*x)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_compiled_module_equals_eager_for_every_length_in_two_graphs(name: str) -> None:
    build, call = MODULES[name]
    module, graphs, counts = build(), CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for n in LENGTHS[:3]:
        outs = [seeded(call, f, draw(2, n, WIDTH)) for f in (compiled, module)]
        torch.testing.assert_close(*outs, **SINGLE)
        grads = (torch.autograd.grad(out.square().mean(), list(module.parameters())) for out in outs)
        for a, e in zip(*grads, strict=True):
            torch.testing.assert_close(a, e, **SINGLE)
        counts.append(graphs.frame_count)
    assert len(set(counts[1:])) == 1


@pytest.mark.slow
def test_a_compiled_module_under_functions_equals_eager() -> None:
    """Over two whole segments: every piece more takes the tracer a second. With dropout, compiled calls drop other weights."""
    module = MultiheadDilatedAttention(WIDTH, HEADS, DilatedPattern((13,), (3,)), num_kv_heads=2)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=False)
    options: dict[str, Any] = {"is_causal": True, "score_mod": relative, "mask_mod": thirds}
    x, found = draw(2, 26, WIDTH), []
    for call in (compiled, module):
        out = call(x, x, x, padding(26), **options)[0]
        found.append([out, *torch.autograd.grad(out.square().mean(), list(module.parameters()))])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, **SINGLE)


MODS: dict[str, dict[str, Any]] = {"plain": {}, "score_mod": {"score_mod": relative}}
ONE = DilatedPattern((8,), (2,))  # one piece of 8 tokens: each takes the tracer seconds


def attend_with_dropout(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Queries and keys that the compiler may recompute."""
    return dilated_attention(torch.tanh(q + 0.1), torch.tanh(k), v, ONE, dropout_p=0.5, backend="sdpa", **options)


def assert_backward_drops_what_the_forward_dropped(call: Callable[..., Tensor], **options: Any) -> None:
    """The output is linear in v, so that `<dout, out> = <dv, v>` for the weights of the forward."""
    q, k, v = (draw(1, n, 4, 3, dtype=torch.float64)[:, :8].requires_grad_() for n in (8, 31, 37))
    out = call(q, k, v, **options)
    dout = torch.cos(out.detach())
    (dv,) = torch.autograd.grad(out, v, dout)
    torch.testing.assert_close((dv * v).sum(), (dout * out).sum(), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mods", "setting"), [("plain", {"activation_memory_budget": 0.5}), ("score_mod", {"aggressive_recomputation": True})], ids=str
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own, at a break
def test_dropout_is_refused_where_the_backward_would_draw_again(mods: str, setting: dict[str, Any]) -> None:
    with functorch_config.patch(**setting):
        compiled = torch.compile(attend_with_dropout, fullgraph=True, backend="aot_eager")
        x = draw(1, 8, 4, 3).requires_grad_()
        with pytest.raises(
            Exception, match=r"dropout_p must be 0 in training compiled with .*, got 0.5: .*use torch.utils.checkpoint"
        ):
            compiled(x, x, x, **MODS[mods])
        with torch.no_grad():
            assert compiled(x, x, x, **MODS[mods]).isfinite().all()
        assert_backward_drops_what_the_forward_dropped(attend_with_dropout, **MODS[mods])
        torch._dynamo.reset()
        assert_backward_drops_what_the_forward_dropped(torch.compile(attend_with_dropout, backend="aot_eager"), **MODS[mods])


@pytest.mark.parametrize(("mods", "checkpointed"), [("plain", False), ("plain", True), ("score_mod", True)])
def test_compiled_backwards_drop_what_the_forward_dropped(mods: str, checkpointed: bool) -> None:
    def call(*x: Tensor) -> Tensor:
        if checkpointed:
            return checkpoint(attend_with_dropout, *x, use_reentrant=False, **MODS[mods])
        return attend_with_dropout(*x, **MODS[mods])

    assert_backward_drops_what_the_forward_dropped(torch.compile(call, fullgraph=True, backend="aot_eager"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's own use of it
def test_a_module_compiled_by_inductor_equals_eager() -> None:
    """Which checks the strides that every operator says it gives."""
    module, x = multihead(num_kv_heads=2, is_causal=True), draw(2, 29, WIDTH)
    compiled = torch.compile(module, fullgraph=True)
    outs = [call(x, x, x, padding(29))[0] for call in (compiled, module)]
    torch.testing.assert_close(*outs, **SINGLE)
    actual, expected = (torch.autograd.grad(out.square().mean(), list(module.parameters())) for out in outs)
    torch.testing.assert_close(actual, expected, **SINGLE)


@pytest.mark.slow
@torch.no_grad()
def test_the_choice_among_measured_backends_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tuple(measured.Crossover("float32", False, dim, 0, "flex" if dim == 64 else "sdpa") for dim in (16, 64, 128))
    monkeypatch.setitem(measured.SHIPPED, "cpu", measured.Measurements(kept))
    chosen: list[int] = []

    def attend(x: Tensor) -> Tensor:
        return dilated_attention(x, x, x, PATTERN)

    def note(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        chosen.append(sum("mixture" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    for head_dim in (40, 11):
        torch.compile(attend, fullgraph=True, backend=note, dynamic=False)(draw(1, 13, 2, head_dim))
    assert chosen == [0, 1]


@pytest.mark.slow
@torch.no_grad()
def test_flex_refuses_a_dynamic_number_of_tokens_and_auto_takes_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexdilated.backends.prefer", lambda request: ("flex", "sdpa"))

    def attend(x: Tensor, backend: str = "auto") -> Tensor:
        return dilated_attention(x, x, x, PATTERN, backend=backend)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(draw(1, 29, 2, 6)), attend(draw(1, 29, 2, 6), "sdpa"), **SINGLE)
    with pytest.raises(Exception, match=r"flex.*one number of tokens, got a dynamic one; use .*dynamic=False.*mark_static"):
        compiled(draw(1, 29, 2, 6), "flex")


@pytest.mark.parametrize("how", ["eager", "compiled", "exported"])
def test_a_float_mask_of_other_values_is_refused_wherever_it_runs(how: str) -> None:
    module, x = multihead().eval(), draw(2, 29, WIDTH)
    mask = torch.zeros(2, 29).masked_fill(padding(29), -torch.inf)
    call: Callable[..., Any] = module
    if how == "compiled":
        call = torch.compile(module, fullgraph=True, backend="aot_eager")
    if how == "exported":
        call = torch.export.export(module, (x, x, x), {"key_padding_mask": mask}).module()
    torch.testing.assert_close(call(x, x, x, key_padding_mask=mask)[0], module(x, x, x, padding(29))[0], **SINGLE)
    with pytest.raises(ValueError, match=r"key_padding_mask must be bool, or float with only 0 and -inf, got other values; give"):
        call(x, x, x, key_padding_mask=mask.clamp(min=-1e9))
