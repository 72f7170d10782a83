"""torch.func and forward-mode differentiation: exact, or refused by name; never silently 0."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functionalize, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexdilated import DilatedKVCache, DilatedPattern, attention_map, dilated_attention, reference
from flexdilated.backends.flex import rows
from flexdilated.core.tracing import TRACES_FUNCTIONS
from flexdilated.distributed.planner.plan import context_plan
from flexdilated.distributed.runtime.schedule import schedule
from flexdilated.masks import block_mask
from tests.cases import Case, calls
from tests.tolerances import EXACT, SINGLE

PATTERN = DilatedPattern((11, 23, 47), (1, 3, 5))
DETACHED = DilatedPattern.torchscale((11, 23), (3, 5))
SHORT = DilatedPattern((5, 7), (1, 3))

Attend = Callable[..., Any]

KEPT = {  # what is kept of a call for later ones, made anew
    "block_mask": lambda: list(block_mask._find_lists.__wrapped__(WANTED)[0]),
    "rows": lambda: list(rows._lists.__wrapped__(200, 300, (-200, 7), True, torch.device("cpu"))[0]),
    "schedule": lambda: [
        x for task in _schedule().tasks for x in (task.heads, *(part.row_index.first for part in (*task.queries, *task.keys)))
    ],
}
MODES = {
    "inference": lambda make: torch.inference_mode()(make)(),
    "no_grad": lambda make: torch.no_grad()(make)(),
    "grad": lambda make: _inside(grad, make),
    "functionalize": lambda make: _inside(functionalize, make),
    "fake": lambda make: _faked(make),
    "vmap": lambda make: _inside(lambda f: vmap(f, in_dims=0), make),
}
WANTED = block_mask._Wanted(DilatedPattern((128, 300), (1, 2)), 2, 2, 600, True, (128, 128), torch.device("cpu"), True)


def _schedule() -> Any:
    plan = context_plan(SHORT, (9, 4, 8), 2, range(2), 1, ((0, 21),), True)
    return schedule.__wrapped__(plan, "gather", 1, torch.device("cpu"))


def _faked(make: Callable[[], list[Tensor]]) -> list[Tensor]:
    with FakeTensorMode():
        return make()


def _inside(transform: Callable[..., Any], make: Callable[[], list[Tensor]]) -> list[Tensor]:
    found: list[Tensor] = []

    def work(x: Tensor) -> Tensor:
        found.extend(make())
        return x.sum()

    transform(work)(torch.ones(2))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_no_part_of_the_mode_that_made_it(name: str, mode: str) -> None:
    found, plain = MODES[mode](KEPT[name]), KEPT[name]()
    assert found
    for x, expected in zip(found, plain, strict=True):
        assert not x.is_inference()
        assert not is_functorch_wrapped_tensor(x)
        assert type(x) is Tensor
        assert torch.equal(x, expected)


def attend(case: Case, **options: Any) -> Attend:
    given = {**case.options(), "return_lse": True, **options}
    return lambda q, k, v: dilated_attention(q, k, v, case.pattern, **given)


def definition(case: Case, **options: Any) -> Attend:
    return lambda q, k, v: reference.dilated_attention(q, k, v, case.pattern, **case.options(), **options)


def tensors_and_tangents(case: Case, dtype: torch.dtype = torch.float64) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    q, k, v, _, _ = case.tensors(dtype)
    return (q, k, v), tuple(torch.randn_like(x) for x in (q, k, v))


def assert_close(actual: Any, expected: Any, **tolerance: float) -> None:
    """lse of a row without a key is -inf, whose tangent is 0."""
    torch.testing.assert_close(actual, expected, **(tolerance or EXACT))


needs_functions = pytest.mark.skipif(not TRACES_FUNCTIONS, reason="torch 2.9 reads no integers under torch.func")


@pytest.mark.slow
@needs_functions
@settings(max_examples=12)
@given(calls(), st.sampled_from((SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)))
@example(Case(PATTERN, group=2, is_causal=True, ignored=0.4), SDPBackend.FLASH_ATTENTION)
@example(Case(DETACHED, num_tokens=61, batch=2), SDPBackend.FLASH_ATTENTION)
@example(Case(DETACHED, num_tokens=61, is_causal=True, borders=(0, 0, 29, 61), scale=-0.4), SDPBackend.MATH)
def test_tangents_equal_those_of_the_definition(case: Case, kernel: SDPBackend) -> None:
    given, tangents = tensors_and_tangents(case)
    expected = jvp(definition(case), given, tangents)
    with sdpa_kernel(kernel):
        assert_close(jvp(attend(case), given, tangents), expected)


@pytest.mark.parametrize("moved", [1, 2])
def test_duals_carry_tangents_of_any_one_input(moved: int) -> None:
    case = Case(PATTERN, group=2)
    given, tangents = tensors_and_tangents(case)
    expected = jvp(lambda x: definition(case)(*given[:moved], x, *given[moved + 1 :]), (given[moved],), (tangents[moved],))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, dx) if i == moved else x for i, (x, dx) in enumerate(zip(given, tangents))]
        results = [forward_ad.unpack_dual(x) for x in attend(case)(*duals)]
        assert_close(tuple(x.primal for x in results), expected[0])
        # None is 0: of lse, which values do not move.
        assert_close(tuple(torch.zeros_like(x.primal) if x.tangent is None else x.tangent for x in results), expected[1])
        assert all(forward_ad.unpack_dual(x).tangent is None for x in attend(case)(*given))


@pytest.mark.parametrize("pattern", [SHORT, DilatedPattern((5, 7), (1, 3), detach_weights=True)], ids=["exact", "detached"])
def test_tangents_under_dropout_drop_the_same_weights(pattern: DilatedPattern, seed: int) -> None:
    case = Case(pattern, num_tokens=17, kv_heads=2, group=2)
    given, tangents = tensors_and_tangents(case)
    tangents = (torch.zeros_like(given[0]), torch.zeros_like(given[1]), tangents[2]) if pattern.detach_weights else tangents

    def dropped(step: float) -> Tensor:
        torch.manual_seed(seed)
        moved = tuple(x + step * dx for x, dx in zip(given, tangents))
        out: Tensor = jvp(attend(case, dropout_p=0.4), moved, tangents)[0][0]
        return out

    torch.manual_seed(seed)
    (out, _), (dout, _) = jvp(attend(case, dropout_p=0.4), given, tangents)
    assert torch.equal(out, dropped(0.0))
    torch.testing.assert_close(dout, (dropped(1e-5) - dropped(-1e-5)) / 2e-5, atol=1e-7, rtol=1e-7)


def test_tangents_in_chunks_and_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(PATTERN, batch=2, group=2, ignored=0.3)
    given, tangents = tensors_and_tangents(case)
    expected = jvp(definition(case), given, tangents)
    monkeypatch.setattr("flexdilated.backends.dense.math.SCORES", 500)
    with torch.autocast("cpu", torch.bfloat16):  # float64 is left alone
        assert_close(jvp(attend(case), given, tangents), expected)
    single = jvp(attend(case), tuple(x.float() for x in given), tuple(x.float() for x in tangents))
    assert all(x.dtype == torch.float32 for part in single for x in part)
    torch.testing.assert_close(tuple(x.double() for x in single[1]), expected[1], **SINGLE)


@pytest.mark.parametrize(
    "options",
    [{"backend": "reference"}, {"score_mod": lambda s, b, h, i, j: s * 0.7 + 0.01 * (i - j)}],
    ids=["reference", "materialised"],
)
def test_other_backends_have_tangents_and_are_mapped(options: dict[str, Any]) -> None:
    case = Case(PATTERN, batch=2, group=2, ignored=0.3)
    given, tangents = tensors_and_tangents(case)
    expected_options = {name: value for name, value in options.items() if name != "backend"}
    expected = jvp(definition(case, **expected_options), given, tangents)
    assert_close(jvp(attend(case, **options), given, tangents), expected)
    batched = tuple(torch.stack([x, 2 * x, -x]) for x in given)
    each = [attend(case, **options)(*(x[i] for x in batched)) for i in range(3)]
    assert_close(vmap(attend(case, **options))(*batched), tuple(torch.stack(xs) for xs in zip(*each)))
    total = lambda q: attend(case, **options)(q, *given[1:])[0].square().sum()  # noqa: E731
    q = given[0].clone().requires_grad_()
    assert_close(grad(total)(given[0]), torch.autograd.grad(total(q), q)[0])


@pytest.mark.parametrize("pattern", [SHORT, DilatedPattern((5, 7), (2, 3), heads="grouped")], ids=["all", "grouped"])
def test_jacobians_of_both_modes_equal_those_of_the_definition(pattern: DilatedPattern) -> None:
    case = Case(pattern, num_tokens=7, kv_heads=2, head_dim=2)
    given, _ = tensors_and_tangents(case)
    expected = jacrev(definition(case), argnums=(0, 1, 2))(*given)
    for jacobian in (jacrev, jacfwd):
        actual = jacobian(attend(case), argnums=(0, 1, 2))(*given)
        # A row that no key reaches has lse = -inf: both say 0.
        assert_close(actual, expected)


@pytest.mark.parametrize(
    "case", [pytest.param(Case(SHORT, borders=(0, 13, 43), group=2), marks=needs_functions), Case(DETACHED)], ids=str
)
@pytest.mark.parametrize("in_dims", [(0, None, None), (1, 2, 3)], ids=str)
def test_vmap_equals_a_loop_with_gradients(case: Case, in_dims: tuple[int | None, ...]) -> None:
    given, _ = tensors_and_tangents(case)
    each = [tuple(x * (i + 1) if dim is not None else x for x, dim in zip(given, in_dims)) for i in range(3)]
    mapped = tuple(x if dim is None else torch.stack(xs, dim) for x, dim, xs in zip(given, in_dims, zip(*each)))
    assert_close(vmap(attend(case), in_dims)(*mapped), tuple(torch.stack(xs) for xs in zip(*(attend(case)(*x) for x in each))))
    loss = lambda q, k, v: sum((x * x).sum() for x in attend(case)(q, k, v))  # noqa: E731
    differentiate = grad(loss, argnums=(0, 1, 2))
    expected = tuple(torch.stack(xs) for xs in zip(*(differentiate(*x) for x in each)))
    assert_close(vmap(differentiate, in_dims)(*mapped), expected)


def test_vmap_maps_masks_and_borders() -> None:
    q, k, v, _, _ = Case(SHORT, num_tokens=13, kv_heads=2).tensors()
    masks = torch.rand(3, 1, 13) < 0.4
    borders = torch.tensor([[0, 5, 13], [0, 0, 13], [0, 12, 13]])
    for name, values in (("key_padding_mask", masks), ("cu_seqlens", borders)):
        call = lambda x, name=name: dilated_attention(q, k, v, SHORT, **{name: x})  # noqa: E731
        assert_close(vmap(call)(values), torch.stack([call(x) for x in values]))
    with pytest.raises(ValueError, match=r"^cu_seqlens must rise from 0 to the number of tokens=13, got \[0, 14\]$"):
        vmap(lambda x: dilated_attention(q, k, v, SHORT, cu_seqlens=x))(torch.tensor([[0, 13], [0, 14]]))


@needs_functions
@pytest.mark.parametrize("options", [{"backend": "reference"}, {"mask_mod": lambda b, h, i, j: i >= j}], ids=["read", "masked"])
def test_mapped_borders_are_refused_where_they_would_be_read(options: dict[str, Any]) -> None:
    q, k, v, _, _ = Case(SHORT, num_tokens=13, kv_heads=2).tensors()
    borders = torch.tensor([[0, 5, 13], [0, 0, 13]])
    loss = lambda q, x: dilated_attention(q, k, v, SHORT, cu_seqlens=x, **options).sum()  # noqa: E731
    message = r"^cu_seqlens must be the same for every sample of torch.func.vmap with backend='reference', score_mod or mask_mod, "
    for call in (loss, grad(loss)):
        with pytest.raises(NotImplementedError, match=message):
            vmap(call, (None, 0))(q, borders)
        expected = call(q, borders[0])
        assert_close(vmap(call, (0, None))(q[None], borders[0])[0], expected)


def test_vmap_draws_dropout_as_torch_defines() -> None:
    q = torch.randn(1, 29, 2, 3)
    qs = q.expand(3, -1, -1, -1, -1)
    call = lambda q: dilated_attention(q, q, q, SHORT, dropout_p=0.4)  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call)(qs)
    same, different = (vmap(call, randomness=randomness)(qs) for randomness in ("same", "different"))
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])
    assert not torch.equal(different[0], different[1])
    loss = lambda q: call(q).square().sum()  # noqa: E731
    torch.manual_seed(5)
    grads = vmap(grad(loss), randomness="same")(qs)
    torch.manual_seed(5)
    torch.testing.assert_close(grads[1], grad(loss)(q), **SINGLE)


@pytest.mark.parametrize(("outer", "inner"), [(jacfwd, jacrev), (jacrev, jacfwd)])
@pytest.mark.parametrize(
    "case",
    [
        Case(SHORT, num_tokens=5, kv_heads=1, head_dim=1, ignored=0.4),
        Case(DilatedPattern.torchscale((4, 8), (1, 2)), num_tokens=5, kv_heads=2, head_dim=1, ignored=0.7),
    ],
    ids=["mask", "zero keys"],
)
def test_second_derivatives_equal_those_of_the_definition(case: Case, outer: Any, inner: Any) -> None:
    (q, k, v, _, _), options = case.tensors(), case.options()
    expected = outer(inner(lambda q: reference.dilated_attention(q, k, v, case.pattern, **options)))(q)
    assert_close(outer(inner(lambda q: dilated_attention(q, k, v, case.pattern, return_lse=True, **options)))(q), expected)


def test_functionalize_inside_a_derivative_is_refused() -> None:
    q, k, v, _, _ = Case(SHORT).tensors()
    call = functionalize(lambda q: dilated_attention(q, k, v, SHORT))
    derivatives: list[Callable[[], Any]]
    derivatives = [lambda: jvp(call, (q,), (q,)), lambda: vjp(call, q), lambda: vmap(lambda q: jvp(call, (q,), (q,)))(q[None])]
    for derivative in derivatives:
        with pytest.raises(
            NotImplementedError, match=r"must not be functionalized inside a derivative, .* leave functionalize out"
        ):
            derivative()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functionalize_without_derivatives_changes_nothing() -> None:
    q, k, v, _, _ = Case(SHORT).tensors()
    call = lambda q: dilated_attention(q, k, v, SHORT)  # noqa: E731
    assert torch.equal(functionalize(call)(q), call(q))
    assert torch.equal(vmap(functionalize(call))(torch.stack([q, 2 * q])), torch.stack([call(q), call(2 * q)]))


@pytest.mark.slow
@needs_functions
def test_compiled_code_never_drops_a_tangent() -> None:
    torch._dynamo.reset()
    q, k, v, _, _ = Case(SHORT).tensors()
    call = lambda q: dilated_attention(q, k, v, SHORT)  # noqa: E731
    expected = jvp(call, (q,), (q,))
    compiled = torch.compile(call, backend="aot_eager")
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(compiled(forward_ad.make_dual(q, q)))
        assert_close(tuple(result), expected)
    assert_close(compiled(q), expected[0])
    with pytest.raises(Exception, match=r"NotImplementedError|Observed exception"):
        torch.compile(lambda q: jvp(call, (q,), (q,)), fullgraph=True, backend="aot_eager")(q)


SCORED: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s * 0.7 + 0.01 * (i - j)}
# Per name: what torch.func makes of a call, and whether the operators can be traced in it.
TRANSFORMED: dict[str, tuple[Callable[[Attend], Attend], bool]] = {
    "grad": (lambda call: grad(lambda q: call(q).square().sum()), False),
    "vmap": (lambda call: lambda q: vmap(call)(torch.stack([q, 2 * q])), True),
    "grad_vmap": (lambda call: grad(lambda q: vmap(call)(torch.stack([q, 2 * q])).square().sum()), False),
}
ONE = DilatedPattern((8,), (2,))  # one piece of 8 tokens: each takes the tracer seconds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*There is a performance drop")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the tracer
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in TRANSFORMED), ("grad", SCORED)])
def test_transforms_are_traced_or_refused_by_name(name: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    q, k, v, _, _ = Case(ONE, num_tokens=8, kv_heads=2).tensors()
    transform, is_traced = TRANSFORMED[name]
    call = transform(lambda q: dilated_attention(q, k, v, ONE, **options))
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    if is_traced or (options and TRACES_FUNCTIONS):
        assert_close(compiled(q), call(q))
        return
    with pytest.raises(Exception, match=r"must not be compiled under torch.func.grad, .*leave fullgraph=True out.*'reference'"):
        compiled(q)
    torch._dynamo.reset()
    if TRACES_FUNCTIONS:  # what it leaves uncompiled, torch 2.9 differentiates wrongly in plain functions too
        assert_close(torch.compile(call, backend="aot_eager")(q), call(q))


@pytest.mark.parametrize("options", [SCORED, {"cu_seqlens": torch.tensor([0, 3, 11])}], ids=["scored", "documents"])
def test_gradients_in_batches_are_those_of_each(options: dict[str, Any]) -> None:
    q, k, v, _, _ = Case(SHORT, num_tokens=11, kv_heads=2).tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = dilated_attention(*leaves, SHORT, dropout_p=0.4, **options)
    douts = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in douts]
    assert_close(batched, tuple(torch.stack(xs) for xs in zip(*each)))


def test_flex_refuses_transforms() -> None:
    q, k, v, _, _ = Case(SHORT).tensors(torch.float32)
    call = lambda q: dilated_attention(q, k, v, SHORT, backend="flex")  # noqa: E731
    message = "backend 'flex' cannot run this on cpu: .* no transform of torch.func or forward mode reaches it; use backend='sdpa'"
    for transformed in (lambda: jvp(call, (q,), (q,)), lambda: vmap(call)(q[None])):
        with pytest.raises(NotImplementedError, match=message):
            transformed()


def test_maps_and_caches_refuse_transforms() -> None:
    q = torch.randn(1, 7, 2, 3)
    with pytest.raises(NotImplementedError, match=r"^attention_map must be called outside torch.func and forward-mode"):
        jvp(lambda q: attention_map(q, q, SHORT, queries=0), (q,), (q,))
    cache = DilatedKVCache(SHORT, batch_size=1, num_kv_heads=2, head_dim=3)
    with pytest.raises(NotImplementedError, match=r"^q, k and v must come without torch.func and forward-mode"):
        jvp(lambda q: cache.attend(q, q, q), (q,), (q,))
