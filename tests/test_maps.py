from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from flexdilated import DilatedPattern, attention_map, dilated_attention, reference
from tests.cases import Case, windowed_calls
from tests.tolerances import EXACT, SINGLE

PATTERN = DilatedPattern((7, 13), (1, 3))


@settings(max_examples=50)
@given(windowed_calls())
def test_attention_map_equals_the_definition(case: Case) -> None:
    case = replace(case, borders=None)
    (q, k, _, _, _), options = case.tensors(), case.options()
    # Of one-hot values, the outputs of the oracle are its weights.
    one_hot = torch.eye(case.num_tokens, dtype=torch.float64)[None, :, None].expand(case.batch, -1, case.kv_heads, -1)
    expected = reference.dilated_attention(q, k, one_hot, case.pattern, **options)[0].transpose(1, 2)
    if case.ignored is not None:
        k[options["key_padding_mask"]] = torch.nan
    queries = list(range(case.num_tokens))[::-1]
    weights = attention_map(q, k, case.pattern, queries=queries, **options)
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights, expected[:, :, queries], **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_map_of_other_dtypes_is_float32_and_computed_in_it(dtype: torch.dtype) -> None:
    q, k, _, _, _ = Case(PATTERN, seed=7).tensors(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = attention_map(q, k, PATTERN, queries=(11, 2))
    assert weights.dtype == torch.float32
    exact = attention_map(q.double(), k.double(), PATTERN, queries=(11, 2))
    torch.testing.assert_close(weights.double(), exact, **SINGLE)


def test_attention_map_takes_positions_in_every_form() -> None:
    q, k, _, _, _ = Case(PATTERN, seed=7).tensors()
    every = attention_map(q, k, PATTERN, queries=range(43))
    for queries in (5, torch.tensor(5), [5], (torch.tensor(5),), torch.tensor([5], dtype=torch.int32)):
        torch.testing.assert_close(attention_map(q, k, PATTERN, queries=queries), every[:, :, 5:6], **EXACT)
    torch.testing.assert_close(attention_map(q, k, PATTERN, queries=[9, 9, 1]), every[:, :, [9, 9, 1]], **EXACT)


@pytest.mark.slow
def test_attention_map_of_a_long_sequence_needs_no_square() -> None:
    num_tokens = 50_021  # N * N floats would take 10 GB
    q = torch.randn(1, num_tokens, 2, 4)
    weights = attention_map(q, q, DilatedPattern.gigapath(), queries=[0, 35_000])
    assert weights.shape == (1, 2, 2, num_tokens)
    out = torch.einsum("bhqn,bnhd->bqhd", weights, q)
    torch.testing.assert_close(out, dilated_attention(q, q, q, DilatedPattern.gigapath())[:, [0, 35_000]], **SINGLE)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"queries": [0, 43]}, ValueError, r"queries\[1\] must be in \[0, N=43\), got 43$"),
        ({"queries": [0, -1]}, ValueError, r"queries\[1\] must be in \[0, N=43\), got -1$"),
        ({"queries": []}, ValueError, "queries must hold at least one position, got none$"),
        (
            {"queries": torch.tensor([[1, 2]])},
            ValueError,
            r"queries must be one position or a 1-D tensor of them, got shape",
        ),
        ({"queries": torch.ones(43, dtype=torch.bool)}, TypeError, "queries must hold integers, got torch.bool$"),
        *(
            ({"queries": [0, wrong]}, TypeError, r"queries\[1\] must be an integer, got")
            for wrong in (True, 1.0, torch.tensor(1.5), torch.tensor(True))
        ),
        *(
            ({"queries": wrong}, TypeError, "queries must be an integer, a sequence or a tensor of integers, got")
            for wrong in ("12", None, 1.0)
        ),
        ({"k": torch.ones(1, 42, 5, 3).double()}, ValueError, "k must match q in B, N and D"),
        ({"k": torch.ones(1, 43, 5, 3)}, TypeError, "k must have the dtype of q"),
        ({"pattern": None}, TypeError, "pattern must be a DilatedPattern, got NoneType$"),
        ({"key_padding_mask": torch.zeros(43, 1, dtype=torch.bool)}, ValueError, "key_padding_mask must have shape"),
    ],
)
def test_attention_map_rejects(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    q, k, _, _, _ = Case(PATTERN).tensors()
    given: dict[str, Any] = {"q": q, "k": k, "pattern": PATTERN, "queries": [0, 42]}
    attention_map(**given)
    with pytest.raises(error, match=f"^{match}"):
        attention_map(**given | changes)
