"""Score and mask functions that change between the forward and the backward: gradients are those of the forward, or an error."""

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import flexdilated.backends.autograd.functions
from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.core.tracing import TRACES_UNKNOWN_SIZES
from tests.tolerances import EXACT

PATTERN = DilatedPattern((7, 20, 41), (1, 2, 5))
N, H = 41, 5


def tensors() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, N, H, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))


class Bias(nn.Module):
    """A score function with a table, and a number that a training loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1.0, 1.0, N, dtype=torch.float64))
        self.slope = 0.3

    def forward(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s.clone()
        s += self.table[j] if self.training else self.table[i]
        return s - self.slope * (i - j).abs()


def loop_of_scores(of: Any) -> Tensor:
    q, k, v = tensors()
    for slope in (0.1, 0.7):
        q, _ = of(q, k, v, PATTERN, score_mod=lambda s, b, h, i, j: s - slope * (i - j).abs())  # noqa: B023 - the fault
    return q


def module(of: Any) -> Tensor:
    bias = Bias()
    q, k, v = tensors()
    out, lse = of(q, k, v, PATTERN, score_mod=bias, is_causal=True)
    bias.slope = 5.0
    bias.eval()
    return out + lse.transpose(1, 2)[..., None]


def branch_on_values(of: Any) -> Tensor:
    """A function that reads values in Python: FlexAttention cannot trace it, eager code may run it."""
    calls: list[bool] = []

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        calls.append(bool((i >= 0).all()))
        far = torch.from_numpy((i - j).abs().numpy())
        return s - far * (0.2 if calls[-1] else 9.0)

    return of(*tensors(), PATTERN, score_mod=score_mod)[0]


def written_literals(of: Any) -> Tensor:
    """Tensors that a function makes and modifies, and its scores."""

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        slopes = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=s.dtype)
        slopes.mul_(3)
        slopes[0] += 0.5
        s = s.clone()
        s.sub_(slopes[h] * (i - j).abs())
        return s

    return of(*tensors(), PATTERN, score_mod=score_mod)[0]


def dependent_tensors(of: Any) -> Tensor:
    """A table that was computed from another one, and from the queries."""
    q, k, v = tensors()
    table = torch.linspace(0.1, 1.0, H, dtype=torch.float64).requires_grad_()
    other = table.exp()
    return of(q, k, v, PATTERN, score_mod=lambda s, b, h, i, j: s * table[h] + other[h] * (i - j).abs() + q[b, i, h, 0])[0]


def values_of_numpy(of: Any) -> Tensor:
    """Values of scores, computed outside of torch: constants if the function says so, or if scores have no gradient."""
    q, k, v = tensors()
    table = torch.linspace(0.1, 1.0, H, dtype=torch.float64).requires_grad_()
    q, _ = of(q, k, v, PATTERN, score_mod=lambda s, b, h, i, j: s / 4 + torch.from_numpy(numpy.tanh(s.detach().numpy())))
    mods = {"score_mod": lambda s, b, h, i, j: s + table[h] * torch.from_numpy(numpy.tanh(s.numpy()))}
    return q + of(q.detach(), k.detach(), v, PATTERN, **mods)[0]


def scores_in_place(of: Any) -> Tensor:
    """Scores modified in place, and a result that keeps none of them."""

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s *= 2
        s.tanh_()
        return torch.where(i >= j, s, s.detach() ** 2)

    return of(*tensors(), PATTERN, score_mod=score_mod)[0]


def several_results(of: Any) -> Tensor:
    """Operators with several results, some unused, and a result that is an argument."""
    table = torch.linspace(0.0, 1.0, N, dtype=torch.float64)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        largest, _ = torch.stack([table[i] + table[j], table[i] * table[j]], dim=-1).max(dim=-1)
        return torch.where((i + j) % 3 == 0, s + largest, s - torch.tensor(0.25, dtype=s.dtype))

    q, k, v = tensors()
    q, _ = of(q, k, v, PATTERN, score_mod=score_mod, mask_mod=lambda b, h, i, j: j <= i + table.sum() / 4)
    return of(q, k, v, PATTERN, score_mod=lambda s, b, h, i, j: s)[0]


@pytest.mark.parametrize(
    "model",
    [
        loop_of_scores,
        module,
        branch_on_values,
        several_results,
        written_literals,
        dependent_tensors,
        values_of_numpy,
        scores_in_place,
    ],
)
def test_gradients_are_those_of_the_functions_as_the_forward_called_them(
    model: Callable[[Any], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flexdilated.backends.autograd.functions, "SCORES", 2000)
    ours = model(lambda *args, **options: dilated_attention(*args, return_lse=True, **options))
    definition = model(reference.dilated_attention)
    torch.testing.assert_close(ours, definition, **EXACT)
    assert all(torch.equal(*pair) for pair in zip(gradients(ours), gradients(ours)))  # the record serves twice
    torch.testing.assert_close(gradients(ours), gradients(definition), **EXACT)


def ignoring(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 0.1 * j.to(s.dtype)


@pytest.mark.parametrize("differentiated", ["q", "qkv"])
def test_scores_that_a_function_ignores_have_a_gradient_of_0(differentiated: str) -> None:
    qkv = [x.detach().requires_grad_(name in differentiated) for name, x in zip("qkv", tensors())]
    inputs = [x for x in qkv if x.requires_grad]
    out, lse = dilated_attention(*qkv, PATTERN, score_mod=ignoring, return_lse=True)
    found = torch.autograd.grad((out.sin().sum(), lse.sin().sum()), inputs)
    out, lse = reference.dilated_attention(*qkv, PATTERN, score_mod=ignoring)
    tied = 0.0 * sum(x.sum() for x in inputs)  # torch differentiates nothing that does not depend on the inputs
    torch.testing.assert_close(found, torch.autograd.grad(out.sin().sum() + lse.sin().sum() + tied, inputs), **EXACT)


@pytest.mark.parametrize("model", [module, dependent_tensors])
def test_second_derivatives_of_tensors_that_depend_on_each_other(model: Callable[[Any], Tensor]) -> None:
    ours = model(lambda *args, **options: dilated_attention(*args, return_lse=True, **options))
    definition = model(reference.dilated_attention)
    first, expected = (gradients(out, create_graph=True) for out in (ours, definition))
    second = (gradients(sum((g * torch.sin(g.detach())).sum() for g in grads)) for grads in (first, expected))  # type: ignore[arg-type]
    for found, wanted in ((first, expected), second):
        torch.testing.assert_close(found, wanted, **EXACT)


def gradients(out: Tensor, *, create_graph: bool = False) -> list[Tensor]:
    """Of all leaves that `out` was computed from, in the order of their shapes and values."""
    leaves, nodes, seen = [], [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves += [node.variable] if hasattr(node, "variable") else []
            nodes += [following for following, _ in node.next_functions]
    leaves.sort(key=lambda x: (x.shape, x.flatten()[0].item()))
    return list(torch.autograd.grad(out, leaves, torch.cos(out.detach()), retain_graph=True, create_graph=create_graph))


@pytest.mark.parametrize("changed", ["q", "k", "v", "table", "parameter", "key_padding_mask"])
def test_tensors_changed_in_place_before_the_backward_raise(changed: str) -> None:
    qkv = [x.detach().clone().requires_grad_() for x in tensors()]
    x = {name: tensor.clone() for name, tensor in zip("qkv", qkv)}  # no leaves: they may be written to
    table, parameter = torch.ones(N, dtype=torch.float64), nn.Parameter(torch.ones(H, dtype=torch.float64))
    ignored = torch.zeros(2, N, dtype=torch.bool)
    out = dilated_attention(
        *x.values(), PATTERN, key_padding_mask=ignored, score_mod=lambda s, b, h, i, j: s * parameter[h] + table[j]
    )
    with torch.no_grad():
        written = {**x, "table": table, "parameter": parameter, "key_padding_mask": ignored}[changed]
        written[0] = 1
    if changed in ("k", "v"):  # hidden keys are taken out of copies, which nobody can write to
        torch.autograd.grad(out.sum(), qkv)
        return
    with pytest.raises(RuntimeError, match="modified"):
        torch.autograd.grad(out.sum(), qkv)


class Straight(torch.autograd.Function):
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


def without_gradients(s: Tensor, *_: Tensor) -> Tensor:
    with torch.no_grad():
        return s * 2


class Counter(nn.Module):
    """A function that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, s: Tensor, *_: Tensor) -> Tensor:
        self.calls += 1
        return s * self.calls


def counting_positions(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    j += 1
    return s - 0.1 * (i - j).abs()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Counter(), "must not modify tensors in place that it reads, got aten.add_.Tensor"),
        (counting_positions, "must not modify tensors in place that it reads"),
        (lambda s, b, h, i, j: s + 0.1 * torch.randn_like(s), "must not draw random numbers, got aten.randn_like"),
        (lambda s, b, h, i, j: nn.functional.dropout(s, 0.5), "must not draw random numbers"),
        (without_gradients, "must not switch gradients off"),
        (lambda s, b, h, i, j: Straight.apply(s), "must not switch gradients off, got torch.no_grad, a torch.autograd.Function"),
    ],
)
def test_functions_that_no_record_can_repeat_are_refused(function: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        dilated_attention(*tensors(), PATTERN, score_mod=function)
    if function is counting_positions:
        return
    with torch.no_grad():  # nothing is computed again
        assert dilated_attention(*tensors(), PATTERN, score_mod=function).isfinite().all()


@pytest.mark.parametrize(
    ("outside", "message"),
    [
        (lambda s: torch.from_numpy(numpy.tanh(s.numpy())), "Can't call numpy"),
        (lambda s: torch.from_numpy(numpy.tanh(numpy.asarray(s * 2))), "Can't call numpy"),
        (lambda s: torch.from_dlpack(numpy.from_dlpack(s)), "Can't export tensors that require gradient|readonly"),  # numpy 1
    ],
)
def test_scores_with_a_gradient_do_not_leave_torch(outside: Any, message: str) -> None:
    qkv = [x.detach().requires_grad_(i == 1) for i, x in enumerate(tensors())]
    for of in (dilated_attention, reference.dilated_attention):
        with pytest.raises((RuntimeError, BufferError), match=message):
            of(*qkv, PATTERN, score_mod=lambda s, *_: s / 4 + outside(s))


def test_a_recorded_function_keeps_no_tensors_for_the_backward() -> None:
    """The record is differentiated when it runs again, so the graph of the first run keeps nothing."""
    alive: list[bool] = []

    def score_mod(s: Tensor, *_: Tensor) -> Tensor:
        larger = s.exp()
        ref, s = weakref.ref(larger), larger.log()
        del larger
        alive.append(ref() is not None)
        return s

    dilated_attention(*tensors(), PATTERN, score_mod=score_mod)
    assert not any(alive)


def test_a_backward_keeps_no_more_tensors_than_the_function_did() -> None:
    """Integer tensors of all pairs are dropped from the record's run as soon as no step needs them."""
    alive: list[int] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.sub.Tensor and result.dtype == torch.int64 and result.numel() > N:
                seen.append(weakref.ref(result))
                alive.append(sum(ref() is not None for ref in seen))
            return result

    seen: list[Any] = []
    pattern = DilatedPattern((64,), (1,))

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for _ in range(6):
            s = torch.where((i - j) % 2 == 0, s, -math.inf)
        return s

    out = dilated_attention(*tensors(), pattern, score_mod=score_mod)
    with Count():
        out.sum().backward()
    assert max(alive) <= 2


class Sloped(nn.Module):
    """Attention with a number in its score function."""

    def __init__(self, slope: float, pattern: DilatedPattern) -> None:
        super().__init__()
        self.slope, self.pattern = slope, pattern

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dilated_attention(q, k, v, self.pattern, score_mod=lambda s, b, h, i, j: s - self.slope * (i - j).abs())


def assert_compiled_equals_eager(compiled: Any, module: nn.Module) -> None:
    x = tensors()
    found, expected = (torch.autograd.grad(f(*x).square().sum(), x) for f in (compiled, module))
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.fixture
def _forget_graphs() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_forget_graphs")
def test_functions_in_two_threads_leave_the_compiler_on() -> None:
    first_is_called = threading.Event()

    def slow(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        first_is_called.set()
        time.sleep(0.1)  # the thread that comes first also leaves first
        return s

    def train() -> None:
        dilated_attention(*tensors(), DilatedPattern((N,), (2,)), score_mod=slow)

    first, second = threading.Thread(target=train), threading.Thread(target=train)
    first.start()
    assert first_is_called.wait(10.0)
    second.start()
    first.join()
    second.join()
    graphs = CompileCounter()
    torch.compile(lambda x: x + 1, backend=graphs)(torch.ones(2))
    assert graphs.frame_count == 1


@pytest.mark.slow
@pytest.mark.usefixtures("_forget_graphs")
def test_compiled_layers_have_numbers_of_their_own_which_may_change() -> None:
    first, second = (Sloped(slope, DilatedPattern((N,), (2,))) for slope in (0.1, 0.4))
    for module in (first, second):
        compiled = torch.compile(module, backend="aot_eager")
        assert_compiled_equals_eager(compiled, module)
    second.slope = 0.7
    assert_compiled_equals_eager(compiled, second)


@pytest.mark.slow
@pytest.mark.skipif(not TRACES_UNKNOWN_SIZES, reason="needs torch 2.11: a dynamic number of tokens is refused before")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own, at a break
@pytest.mark.usefixtures("_forget_graphs")
def test_dynamic_shapes_compile_where_the_graph_may_break() -> None:
    module = Sloped(0.3, DilatedPattern((N,), (2,)))
    compiled = torch.compile(module, backend="eager", dynamic=True)
    assert_compiled_equals_eager(compiled, module)


def gate(w: Tensor, h: Tensor, s: Tensor) -> Tensor:
    return torch.tanh(w[h]) * torch.sigmoid(s)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_that_differentiates_by_itself_is_refused() -> None:
    scripted = torch.jit.script(gate)
    q, k, v = tensors()
    w = torch.linspace(0.1, 1.0, H, dtype=torch.float64).requires_grad_()
    for _ in range(3):  # the executor differentiates by itself once it has seen some calls
        scripted(w, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match=r"score_mod must not call TorchScript where it learns"):
        dilated_attention(q, k, v, PATTERN, score_mod=lambda s, b, h, i, j: s + scripted(w, h, s))
