"""The one differentiable operation: what it keeps, cuts, draws, refuses, and how it traces."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.backends.dense import piece_loop
from flexdilated.backends.kernel import Kernel
from flexdilated.core.custom_op import encode
from flexdilated.core.pieces import kept_rows
from tests.cases import Case, differentiate, poisoned_memory, run_reference
from tests.tolerances import EXACT

PATTERN = DilatedPattern((11, 23, 47), (1, 3, 5))
PADDED = DilatedPattern.torchscale((12, 25), (3, 5))


def attend(case: Case, **options: object) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    options = {**case.options(), "return_lse": True, **options}
    return lambda q, k, v: dilated_attention(q, k, v, case.pattern, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("slab_bytes", [1, 5000])
@pytest.mark.parametrize(
    "case",
    [
        Case(PATTERN, batch=3, group=2, ignored=0.3),
        Case(PATTERN, is_causal=True, borders=(0, 13, 13, 43)),
        Case(PADDED, batch=2, is_causal=True),
        Case(DilatedPattern((5, 11), (2, 3), heads="grouped"), batch=3),
    ],
    ids=["gqa_mask", "documents", "shifted", "grouped"],
)
def test_slabs_of_any_size_give_the_same_result(case: Case, slab_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = differentiate(attend(case), *case.tensors())
    monkeypatch.setattr(piece_loop, "CPU_SLAB_BYTES", slab_bytes)
    torch.testing.assert_close(differentiate(attend(case), *case.tensors()), expected, **EXACT)


# Outputs of branches, relative to `out`, that the backward reads under `detach_weights`: 3 are kept, 4 are computed again.
THRICE = DilatedPattern((5, 11, 23), (1, 1, 1), detach_weights=True)
FOURFOLD = DilatedPattern((5, 11, 23, 31), (1, 1, 1, 1), detach_weights=True)
DETACHED = {"padded": PADDED, "three": THRICE, "four": FOURFOLD, "grouped": replace(THRICE, heads="grouped")}


@pytest.mark.parametrize("pattern", [PATTERN, *DETACHED.values()], ids=["exact", *DETACHED])
def test_backward_keeps_only_q_k_v_out_lse_and_few_outputs_of_branches(pattern: DilatedPattern) -> None:
    q, k, v, _, _ = Case(pattern, group=2).tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    saved: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, lse = dilated_attention(*leaves, pattern, return_lse=True)
    kept = [x for pointer, x in saved.items() if pointer not in {x.data_ptr() for x in (q, k, v, out, lse)}]
    assert len(saved) == 5 + len(kept)
    assert len(kept) == (pattern in (PADDED, THRICE))
    assert sum(x.nbytes for x in kept) <= 3 * out.nbytes


@pytest.mark.parametrize("pattern", DETACHED.values(), ids=DETACHED)
@pytest.mark.parametrize("more", [{"batch": 2, "ignored": 0.4}, {"is_causal": True}, {"borders": (0, 5, 17, 43)}], ids=str)
def test_constant_weights_give_the_gradient_of_the_definition(
    pattern: DilatedPattern, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(pattern, group=2, **more)
    forwards: list[Tensor] = []
    run = Kernel.forward

    def count(kernel: Kernel, q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        forwards.append(q)
        return run(kernel, q, *arguments)

    monkeypatch.setattr(Kernel, "forward", count)
    with poisoned_memory():
        found = differentiate(attend(case), *case.tensors())
    torch.testing.assert_close(found, run_reference(case), **EXACT)
    count_forward = len(forwards)
    with torch.no_grad():
        attend(case)(*case.tensors()[:3])
    again = pattern == FOURFOLD or (case.borders is not None and pattern.heads == "all")
    assert count_forward == (2 if again else 1) * (len(forwards) - count_forward)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [PADDED, FOURFOLD], ids=["kept", "again"])
def test_compiled_calls_of_all_lengths_keep_outputs_of_branches_in_one_graph(pattern: DilatedPattern) -> None:
    counts, graphs = [], CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: dilated_attention(*x, pattern), fullgraph=True, dynamic=True, backend=graphs)
    for num_tokens in (43, 29, 7, 12, 25):
        case = Case(pattern, num_tokens=num_tokens, group=2, batch=2, lse_gradient=False)
        q, k, v, dout, _ = case.tensors()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with poisoned_memory():
            out = compiled(*leaves)
            found = (out, *torch.autograd.grad(out, leaves, dout))
        expected, _, *grads = run_reference(case)
        torch.testing.assert_close(found, (expected, *grads), **EXACT)
        counts.append(graphs.frame_count)
    assert len(set(counts[1:])) == 1


def test_lse_alone_has_a_gradient() -> None:
    case = Case(PATTERN, group=2)
    q, k, v, _, dlse = case.tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _, expected = reference.dilated_attention(*leaves, PATTERN)
    expected_grads = torch.autograd.grad(expected, leaves[:2], dlse)
    _, lse = dilated_attention(*leaves, PATTERN, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse, leaves, dlse)
    torch.testing.assert_close((dq, dk), expected_grads, **EXACT)
    assert torch.equal(dv, torch.zeros_like(v))


def test_parameters_may_meet_inference_tensors() -> None:
    q, k, v, _, _ = Case(PATTERN).tensors()
    expected = dilated_attention(q, k, v, PATTERN)
    with torch.inference_mode(), torch.enable_grad():
        out = dilated_attention(q.requires_grad_(), k.clone(), v.clone(), PATTERN)
    assert not out.requires_grad
    assert torch.equal(out, expected)


def test_double_backward_is_refused() -> None:
    q, k, v, _, _ = Case(PATTERN).tensors()
    q.requires_grad_()
    (dq,) = torch.autograd.grad(dilated_attention(q, k, v, PATTERN).square().sum(), q, create_graph=True)
    message = r"must not be differentiated twice, .* no second derivative; use backend='reference' where one is needed"
    with pytest.raises(NotImplementedError, match=message):
        dq.sum().backward()


@pytest.mark.parametrize(("moved", "error"), [(False, 3e-2), (True, 1e-5)], ids=["as_they_are", "without_their_mean"])
def test_dq_at_scores_of_3000_errs_as_documented(moved: bool, error: float) -> None:
    """The numerics guide and the docstring of `scale`: keys without their mean give the same outputs, and an exact gradient."""
    pattern = DilatedPattern((7, 15, 31), (1, 2, 4))
    q, k, v, dout, _ = Case(pattern, num_tokens=31, kv_heads=4, head_dim=16).tensors(torch.float32)
    common = (3000 / 16**0.5) ** 0.5
    q, k = common + 0.3 / common * q, common + 0.3 * k

    def dq(k: Tensor, dtype: torch.dtype, run: Callable[..., Tensor]) -> Tensor:
        leaf = q.to(dtype).requires_grad_()
        return torch.autograd.grad(run(leaf, k.to(dtype), v.to(dtype), pattern), leaf, dout.to(dtype))[0].double()

    exact = dq(k, torch.float64, lambda *inputs: reference.dilated_attention(*inputs)[0])
    found = dq(k - k.mean(dim=1, keepdim=True) if moved else k, torch.float32, dilated_attention)
    assert (found - exact).norm() < error * exact.norm()


def test_dropout_is_off_by_default_and_draws_nothing() -> None:
    q, k, v, _, _ = Case(PATTERN).tensors()
    state = torch.get_rng_state()
    assert torch.equal(dilated_attention(q, k, v, PATTERN), dilated_attention(q, k, v, PATTERN, dropout_p=0.0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("slab_bytes", [1, 1 << 22])
def test_dropout_drops_a_share_of_p_and_no_two_rows_alike(slab_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_loop, "CPU_SLAB_BYTES", slab_bytes)
    # Uniform weights over unit values: the output shows which keys of its segment a row keeps.
    pattern = DilatedPattern((101,), (1,))
    q = torch.zeros(2, 202, 3, 101)
    v = torch.eye(101).repeat(2, 1)[None, :, None].expand(2, -1, 3, -1)
    kept = dilated_attention(q, q, v, pattern, dropout_p=0.3) > 0  # (B, N, H, keys of the segment)
    assert abs(kept.float().mean() - 0.7) < 0.01
    assert len(kept.flatten(0, 2).unique(dim=0)) == 2 * 202 * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", [DilatedPattern((5, 7), (1, 3)), DilatedPattern.torchscale((5, 7), (1, 3))], ids=["exact", "detached"]
)
def test_dropout_drops_the_same_weights_in_backward(pattern: DilatedPattern, seed: int) -> None:
    case = Case(pattern, num_tokens=9, kv_heads=2, head_dim=2, borders=(0, 1, 3, 4, 9))
    tensors = case.tensors()[:3]

    def dropped(*inputs: Tensor) -> Tensor:
        torch.manual_seed(seed)
        return dilated_attention(*inputs, pattern, dropout_p=0.4, **case.options())

    if pattern.detach_weights:  # not the derivative of a function; but v meets only constants
        assert torch.autograd.gradcheck(lambda v: dropped(*tensors[:2], v), tensors[2].requires_grad_())
    else:
        assert torch.autograd.gradcheck(dropped, [x.requires_grad_() for x in tensors])


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_dropout_does_not_depend_on_the_default_dtype(default: torch.dtype) -> None:
    """The backward may run under another one than the forward."""
    q, k, v, dout, _ = Case(PATTERN, batch=2).tensors(torch.float32)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    results: list[tuple[Tensor, ...]] = []
    for during, after in ((torch.float32, torch.float32), (default, torch.float32), (torch.float32, default)):
        torch.manual_seed(0)
        try:
            torch.set_default_dtype(during)
            out = dilated_attention(*inputs, PATTERN, dropout_p=0.002)
            torch.set_default_dtype(after)
            results.append((out, *torch.autograd.grad(out, inputs, dout)))
        finally:
            torch.set_default_dtype(torch.float32)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0]))


def test_checkpointing_draws_the_same_dropout_again(seed: int) -> None:
    case = Case(PATTERN, group=2)
    q, k, v, dout, dlse = case.tensors()
    results = []
    for wrap in (lambda f: f, lambda f: lambda *x: checkpoint(f, *x, use_reentrant=False)):
        torch.manual_seed(seed)
        results.append(differentiate(wrap(attend(case, dropout_p=0.3)), q, k, v, dout, dlse))
    assert all(map(torch.equal, results[1], results[0]))


CASES = [Case(PATTERN, batch=2, group=2, is_causal=True, ignored=0.3), Case(PATTERN, borders=(0, 13, 43)), Case(THRICE, batch=2)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # opcheck's own, torch 2.15
@pytest.mark.parametrize("case", CASES, ids=["gqa_causal_mask", "documents", "kept_outputs"])
def test_operators_keep_pytorch_s_contract(case: Case) -> None:
    q, k, v, _, _ = case.tensors(torch.float32)
    options = case.options()
    mask, cu_seqlens = options.get("key_padding_mask"), options.get("cu_seqlens")
    inputs = (*(x.requires_grad_() for x in (q, k, v)), mask, cu_seqlens, None)
    numbers = (encode(case.pattern), case.is_causal, 0.5, 0.0, "sdpa", 0, k.shape[2])
    if case.pattern.detach_weights:
        rows = q.shape[0] * q.shape[2] * kept_rows(case.pattern, q.shape[1])
        torch.library.opcheck(torch.ops.flexdilated.mixture_keeping.default, (*inputs, *numbers, rows))
    else:
        torch.library.opcheck(torch.ops.flexdilated.mixture.default, (*inputs, *numbers))
