"""The mixture in operators that every runtime has, against the float64 oracle."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, reject, settings
from torch import Tensor

from flexdilated import DilatedPattern, reference
from flexdilated.backends.autograd.portable import attend_portable
from flexdilated.core.call import Call
from flexdilated.core.checks import check
from tests.cases import Case, windowed_calls
from tests.tolerances import EXACT


def portable(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, **options: Any) -> tuple[Tensor, Tensor]:
    return attend_portable(*check(q, k, v, Call(pattern, **options)))


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(windowed_calls())
@example(Case(DilatedPattern(window=71), num_tokens=211, kv_heads=2, group=2, is_causal=True))
@example(Case(DilatedPattern((64,), (2,), window=9, global_tokens=5), batch=2, num_tokens=293, kv_heads=2, ignored=0.3))
@example(Case(DilatedPattern((7,), (7,), window=1), num_tokens=67, kv_heads=2))
@example(Case(DilatedPattern((7,), (2,), global_tokens=1 << 40), num_tokens=19, kv_heads=2, is_causal=True))
def test_portable_mixture_is_the_definition(case: Case) -> None:
    case = replace(case, borders=None)
    q, k, v, _, _ = case.tensors()
    try:
        found = portable(q, k, v, case.pattern, **case.options())
    except NotImplementedError:
        assert case.pattern.zero_padding
        reject()
    torch.testing.assert_close(found, reference.dilated_attention(q, k, v, case.pattern, **case.options()), **EXACT)


@pytest.mark.parametrize("heads", ["all", "grouped"])
def test_heads_of_a_part_of_a_model_keep_their_place_in_it(heads: Any) -> None:
    pattern = DilatedPattern((8, 16, 24), (2, 3, 4), heads=heads)
    case = Case(pattern, batch=2, num_tokens=29, kv_heads=7, group=2)
    q, k, v, _, _ = case.tensors()
    options = {"is_causal": True, "scale": 0.4}
    expected = reference.dilated_attention(q, k, v, pattern, **options)
    out, lse = portable(q[:, :, 4:12], k[:, :, 2:6], v[:, :, 2:6], pattern, **options, first_head=2, num_kv_heads=7)
    torch.testing.assert_close(out, expected[0][:, :, 4:12], **EXACT)
    torch.testing.assert_close(lse, expected[1][:, 4:12], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    case = Case(DilatedPattern((8, 16), (1, 3)), batch=2, num_tokens=29, head_dim=24)
    q, k, v, _, _ = case.tensors(dtype)
    out, lse = portable(q, k, v, case.pattern)
    expected, expected_lse = reference.dilated_attention(q, k, v, case.pattern)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out, expected.to(dtype))
    torch.testing.assert_close(lse, expected_lse.float())


def test_what_ignored_keys_and_values_hold_has_no_effect() -> None:
    pattern = DilatedPattern((8, 16), (1, 3))
    q, k, v, _, _ = Case(pattern, batch=2, num_tokens=29).tensors()
    ignored = torch.rand(2, 29, generator=torch.Generator().manual_seed(0)) < 0.4
    expected = portable(q, k, v, pattern, key_padding_mask=ignored)
    k, v = (x.masked_fill(ignored[:, :, None, None], torch.nan) for x in (k, v))
    assert all(map(torch.equal, portable(q, k, v, pattern, key_padding_mask=ignored), expected))


def test_documents_and_dropout_are_refused() -> None:
    pattern = DilatedPattern((8,), (2,))
    q, k, v, _, _ = Case(pattern, num_tokens=29).tensors()
    with pytest.raises(
        NotImplementedError, match=r"cu_seqlens must be None in a portable program, got borders.*each document as a"
    ):
        portable(q, k, v, pattern, cu_seqlens=torch.tensor([0, 29]))
    with pytest.raises(NotImplementedError, match=r"dropout_p must be 0 in a portable program, got 0\.5; call eval\(\) first"):
        portable(q, k, v, pattern, dropout_p=0.5)


def test_shifted_positions_are_refused_and_those_that_shift_nothing_are_not() -> None:
    pattern = DilatedPattern.torchscale((8, 11), (2, 4))
    q, k, v, _, _ = Case(pattern, num_tokens=12).tensors()
    portable(*(x[:, :11] for x in (q, k, v)), pattern)
    portable(q, k, v, replace(pattern, zero_padding=False))
    with pytest.raises(NotImplementedError, match=r"pattern must have rates that divide.*segments of 11 at rate 4.*Dim\(max=11\)"):
        portable(q, k, v, pattern)
