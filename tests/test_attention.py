"""`dilated_attention` against the oracle, and the laws it keeps."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.backends.dense import sdpa
from flexdilated.draw.pattern import multiplicity
from tests.cases import Case, assert_twice_plain, calls, differentiate, poisoned_memory, run_backend, run_reference, windowed_calls
from tests.tolerances import EXACT, HALF_LSE, SINGLE

THREE = DilatedPattern((11, 23, 47), (1, 3, 5))
# What `sdpa_kernel` may leave of the kernels that a CPU has.
SWITCHES = ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION], [SDPBackend.MATH])


@settings(max_examples=50)
@given(windowed_calls(), st.sampled_from(SWITCHES))
@example(Case(THREE, num_tokens=1, kv_heads=1, head_dim=1), SWITCHES[0])
@example(Case(DilatedPattern.torchscale((5, 13), (2, 5)), num_tokens=29, kv_heads=3, ignored=1.0), SWITCHES[0])
@example(Case(DilatedPattern.torchscale((7,), (5,)), num_tokens=15, kv_heads=5, borders=(0, 0, 15, 15)), SWITCHES[0])
@example(Case(THREE, is_causal=True, scale=0.0), SWITCHES[0])
def test_attention_equals_the_reference_with_all_gradients(case: Case, kernels: list[SDPBackend]) -> None:
    expected = run_reference(case)
    with poisoned_memory(), sdpa_kernel(kernels):
        actual = run_backend(case, "sdpa")
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, **EXACT)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case(THREE, batch=2, group=2, scale=-1e-42, ignored=0.3),
        Case(DilatedPattern((31, 101, 257), (1, 3, 7)), num_tokens=263, kv_heads=7, head_dim=24),
        Case(DilatedPattern((67, 131), (3, 5)), batch=2, num_tokens=211, kv_heads=2, group=3, head_dim=48, ignored=0.3),
        Case(DilatedPattern((61, 127), (2, 3), heads="grouped"), batch=2, num_tokens=137, kv_heads=5, head_dim=17),
    ],
    ids=["tiny_scale", "blocked", "gqa_mask", "grouped"],
)
def test_attention_in_float32_equals_the_reference_across_kernel_blocks(case: Case, is_causal: bool) -> None:
    case = replace(case, is_causal=is_causal)
    actual, expected = run_backend(case, "sdpa", torch.float32), run_reference(case)
    for a, e in zip(actual, expected):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), e, **SINGLE)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"score_mod": lambda s, b, h, i, j: s}], ids=["plain", "causal", "function"]
)
@pytest.mark.parametrize(("scale", "dtype"), [(1e6, torch.float64), (-1e12, torch.float32), (1e30, torch.float32)])
def test_large_scale_leaves_each_query_its_largest_score(dtype: torch.dtype, scale: float, options: dict[str, Any]) -> None:
    q, k, v, _, _ = Case(THREE, num_tokens=29, kv_heads=3, group=2).tensors(dtype)
    expected, _ = reference.dilated_attention(q, k, v, THREE, scale=scale, **options)
    for kernels in ([], [SDPBackend.MATH]):
        with sdpa_kernel(kernels) if kernels else nullcontext():
            out = dilated_attention(q, k, v, THREE, scale=scale, **options)
        torch.testing.assert_close(out.double(), expected, **SINGLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_negative_scale_is_the_positive_one_of_negated_queries(dtype: torch.dtype) -> None:
    case = Case(THREE, is_causal=True, scale=-0.3)
    q, k, v, dout, dlse = case.tensors(dtype)
    attend = lambda scale: lambda q, k, v: dilated_attention(q, k, v, THREE, is_causal=True, scale=scale, return_lse=True)  # noqa: E731
    out, lse, dq, dk, dv = differentiate(attend(0.3), -q, k, v, dout, dlse)
    for a, e in zip(differentiate(attend(-0.3), q, k, v, dout, dlse), (out, lse, -dq, dk, dv)):
        assert torch.equal(a, e)


def test_attention_changes_no_argument() -> None:
    case = Case(THREE, batch=2, ignored=0.3)
    q, k, v, _, _ = case.tensors()
    options = case.options()
    before = [x.clone() for x in (q, k, v, options["key_padding_mask"])]
    dilated_attention(q, k, v, THREE, **options)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v, options["key_padding_mask"]), before))


def test_attention_of_an_empty_batch_is_empty() -> None:
    q = torch.zeros(0, 43, 5, 3)
    out, lse = dilated_attention(q, q, q, THREE, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 43, 5, 3), (0, 5, 43))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_out_has_the_dtype_of_q_and_lse_is_float32_or_float64(dtype: torch.dtype, backend: str) -> None:
    q, k, v, _, _ = Case(THREE).tensors(dtype)
    out, lse = dilated_attention(q, k, v, THREE, return_lse=True, backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(out, dilated_attention(q, k, v, THREE, backend=backend))


@pytest.mark.parametrize(
    ("backend", "detach_weights"),
    [("sdpa", True), ("sdpa", False), ("reference", True), pytest.param("triton", True, marks=pytest.mark.slow)],
)
def test_a_nan_gradient_of_an_empty_rows_lse_goes_nowhere(backend: str, detach_weights: bool) -> None:
    """As `logaddexp` of -inf and -inf has it."""
    pattern = replace(THREE, detach_weights=detach_weights)
    q, k, v, dout, _ = Case(pattern, num_tokens=13, kv_heads=2, head_dim=16, is_causal=True).tensors(torch.float32)
    if backend == "triton":
        pytest.importorskip("triton")
    ignored = torch.arange(13)[None] < 7
    options = {"is_causal": True, "key_padding_mask": ignored, "return_lse": True}
    clean, nan = torch.zeros(1, 2, 13), torch.zeros(1, 2, 13)
    nan[:, :, :7] = math.nan
    run = lambda q, k, v: dilated_attention(q, k, v, pattern, backend=backend, **options)  # noqa: E731
    for a, e in zip(differentiate(run, q, k, v, dout, nan), differentiate(run, q, k, v, dout, clean)):
        assert torch.equal(a, e)


@pytest.mark.parametrize(
    ("value", "case"),
    [
        (math.nan, Case(DilatedPattern((11, 23), (1, 3)), batch=3)),
        (math.inf, Case(DilatedPattern((11, 23), (1, 3), zero_padding=True), batch=3)),
        (math.nan, Case(THREE, num_tokens=53, borders=(0, 17, 31, 53))),
        (-math.inf, Case(THREE, num_tokens=53, borders=(0, 17, 31, 53))),
    ],
)
def test_a_broken_sequence_or_document_stays_alone(value: float, case: Case) -> None:
    tensors, clean = case.tensors(), run_backend(case, "sdpa")
    is_broken = torch.zeros(case.batch, case.num_tokens, dtype=torch.bool)
    is_broken[(1,) if case.borders is None else (0, slice(17, 31))] = True
    for x in tensors[:3]:
        x[is_broken] = value
    attend = lambda q, k, v: dilated_attention(q, k, v, case.pattern, return_lse=True, **case.options())  # noqa: E731
    broken = differentiate(attend, *tensors)
    for i, (c, b) in enumerate(zip(clean, broken)):
        c, b = (x.transpose(1, 2) if i == 1 else x for x in (c, b))
        torch.testing.assert_close(b[~is_broken], c[~is_broken], **EXACT)
    assert broken[0][is_broken].isnan().any()


@pytest.mark.parametrize(
    ("value", "is_causal", "detach_weights", "borders"),
    [(math.nan, False, True, None), (math.inf, True, False, None), (-math.inf, True, True, (0, 17, 43))],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"backend": "reference"}, {"mask_mod": lambda b, h, i, j: i >= 0}, {"dropout_p": 1e-300}],
    ids=["plain", "reference", "mask_mod", "dropout"],
)
def test_what_ignored_keys_hold_has_no_effect(
    value: float, is_causal: bool, detach_weights: bool, borders: tuple[int, ...] | None, options: dict[str, Any]
) -> None:
    pattern = DilatedPattern((11, 23), (2, 3), detach_weights=detach_weights)
    case = Case(pattern, batch=1 if borders else 2, ignored=0.4, is_causal=is_causal, group=2, borders=borders)
    q, k, v, dout, dlse = case.tensors()
    clean = run_backend(case, "sdpa")
    ignored = case.options()["key_padding_mask"]
    k[ignored], v[ignored] = value, value
    broken = differentiate(
        lambda q, k, v: dilated_attention(q, k, v, pattern, return_lse=True, **case.options(), **options), q, k, v, dout, dlse
    )
    for c, b in zip(clean, broken):
        torch.testing.assert_close(b, c, **EXACT)
    assert torch.equal(broken[3][ignored], torch.zeros_like(k[ignored]))
    assert torch.equal(broken[4][ignored], torch.zeros_like(v[ignored]))


@pytest.mark.parametrize(
    ("dtype", "is_causal", "is_slow"),
    [(torch.bfloat16, False, False), (torch.bfloat16, True, True), (torch.float16, True, False), (torch.float16, False, True)],
)
def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch(
    dtype: torch.dtype, is_causal: bool, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "SLOW_ON_CPU", {dtype} if is_slow else ())
    case = Case(DilatedPattern((31, 101, 257), (1, 3, 7)), num_tokens=263, kv_heads=7, group=2, head_dim=24)
    case = replace(case, is_causal=is_causal, lse_gradient=False)
    actual = run_backend(case, "sdpa", dtype)
    expected = assert_twice_plain(actual, case, dtype)
    torch.testing.assert_close(actual[1].double(), expected[1], **HALF_LSE)


@settings(max_examples=25)
@given(calls(), st.sampled_from(SWITCHES), st.sampled_from((0.0, 0.3)), st.sampled_from((torch.bfloat16, torch.float16)))
@example(Case(THREE, group=2), [SDPBackend.MATH], 0.0, torch.bfloat16)
@example(Case(DilatedPattern.torchscale((5, 13), (2, 5)), batch=2), SWITCHES[0], 0.3, torch.bfloat16)
def test_autocast_changes_the_dtype_of_the_inputs_and_nothing_else(
    case: Case, kernels: list[SDPBackend], dropout_p: float, dtype: torch.dtype
) -> None:
    """The backward too, which runs under the autocast of whoever calls it."""
    dropout_p = 0.0 if SDPBackend.MATH not in kernels else dropout_p
    q, k, v, dout, dlse = case.tensors(torch.float32)
    options = {**case.options(), "dropout_p": dropout_p, "return_lse": True}

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(case.seed)
        return dilated_attention(*tensors, case.pattern, **options)

    with sdpa_kernel(kernels):
        expected = differentiate(attend, *(x.to(dtype) for x in (q, k, v, dout)), dlse)
        with torch.autocast("cpu", dtype):
            actual = differentiate(attend, q, k, v, dout.to(dtype), dlse)
    for a, e in zip(actual[:2], expected[:2]):
        assert torch.equal(a, e)
        assert a.dtype == e.dtype
    for a, e in zip(actual[2:], expected[2:]):
        assert torch.equal(a, e.float())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("pattern", "num_tokens"),
    [
        (THREE, 131),
        (DilatedPattern((101,), (3,)), 131),
        (DilatedPattern((101,), (3,), window=7), 307),
        (DilatedPattern(window=150), 997),
        (DilatedPattern(window=2203), 6607),
    ],
    ids=["three", "one", "far", "window", "long window"],
)
def test_nan_in_a_value_reaches_the_queries_that_the_numerics_page_names(
    pattern: DilatedPattern, num_tokens: int, is_causal: bool
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, num_tokens, 4, 8)
    token, distance, window = 61, torch.arange(num_tokens) - 61, pattern.window or 0
    v[0, token] = torch.nan
    in_segment = torch.zeros(4, num_tokens, dtype=torch.bool)
    if pattern.segment_lengths:
        in_segment = torch.from_numpy(multiplicity(replace(pattern, window=None), num_tokens, 4))[:, :, token] > 0
    sees = (in_segment | (distance.abs() < window)) & (distance >= (0 if is_causal else -num_tokens))
    is_near = distance.abs() < (window + max(window, 64) if window else 0)
    all_options: tuple[dict[str, Any], ...] = ({}, {"score_mod": lambda s, b, h, i, j: s}, {"backend": "reference"})
    for options in all_options if num_tokens < 1000 else all_options[:1]:  # the others keep all scores
        broken = dilated_attention(q, k, v, pattern, is_causal=is_causal, **options).isnan().any(-1)[0].T  # (H, N)
        assert not (sees & ~broken).any()
        if options.get("backend") == "reference":
            assert broken[sees.any(1)].all()
        else:
            assert torch.equal(broken & ~is_near, in_segment & ~is_near)
