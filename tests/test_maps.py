import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern, attention_map, dilated_attention
from tests.cases import Case, least_heads, patterns
from tests.tolerances import EXACT, SINGLE

PATTERN = DilatedPattern((7, 13), (1, 3))


def dense_map(
    q: Tensor, k: Tensor, pattern: DilatedPattern, *, is_causal: bool, scale: float, ignored: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Every query's weights `(B, H, N, N)` by the definition, and the share that zero keys take `(B, H, N)`.

    Written with integers, one pair at a time; torchscale's padded sequence is really built.
    """
    (batch, num_tokens, num_heads, _), kv_heads = q.shape, k.shape[2]
    exponentials = torch.zeros(batch, num_heads, num_tokens, num_tokens, dtype=torch.float64)
    zeros = torch.zeros(batch, num_heads, num_tokens, dtype=torch.float64)
    for branch, (w, r) in enumerate(pattern.branches):
        tokens: list[int | None] = list(range(num_tokens))
        if pattern.zero_padding:
            w = min(w, num_tokens)
            tokens += [None] * (-num_tokens % w)
            cut = [tokens[i : i + w] + [None] * (-w % r) for i in range(0, len(tokens), w)]
            tokens, w = [token for segment in cut for token in segment], len(cut[0])
        for kv_head in pattern.head_range(branch, kv_heads):
            kept = [p for p in range(len(tokens)) if p % w % r == pattern.offset(branch, kv_head, kv_heads)]
            for p in (p for p in kept if p < num_tokens):
                for other in kept:
                    if p // w != other // w or (is_causal and other > p):
                        continue
                    source, key = tokens[p], tokens[other]
                    for head in range(kv_head * num_heads // kv_heads, (kv_head + 1) * num_heads // kv_heads):
                        for b in range(batch):
                            if key is None:
                                zeros[b, head, p] += 1.0
                            elif ignored is None or not ignored[b, key]:
                                score = 0.0 if source is None else scale * (q[b, source, head] @ k[b, key, kv_head]).item()
                                exponentials[b, head, p, key] += math.exp(score)
    total = (exponentials.sum(dim=-1) + zeros).clamp(min=1e-300)
    return exponentials / total[..., None], zeros / total


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    pattern=patterns(),
    num_tokens=st.integers(1, 17),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 2),
    is_causal=st.booleans(),
    ignored=st.sampled_from((None, 0.4, 1.0)),
    scale=st.sampled_from((0.7, 0.0, -0.7)),
    seed=st.integers(0, 2**31),
)
def test_attention_map_equals_the_definition(
    pattern: DilatedPattern,
    num_tokens: int,
    kv_heads: int,
    group: int,
    is_causal: bool,
    ignored: float | None,
    scale: float,
    seed: int,
) -> None:
    kv_heads = max(kv_heads, least_heads(pattern))
    case = Case(pattern, 2, num_tokens, kv_heads, group, is_causal=is_causal, ignored=ignored, seed=seed)
    q, k, _, _, _ = case.tensors()
    mask = case.options().get("key_padding_mask")
    expected, zeros = dense_map(q, k, pattern, is_causal=is_causal, scale=scale, ignored=mask)
    if mask is not None:
        k[mask] = torch.nan
    queries = list(range(num_tokens))[::-1]
    weights = attention_map(q, k, pattern, queries=queries, is_causal=is_causal, scale=scale, key_padding_mask=mask)
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights, expected[:, :, queries], **EXACT)
    torch.testing.assert_close(weights.sum(dim=-1) + zeros[:, :, queries], (expected.sum(-1) + zeros)[:, :, queries], **EXACT)


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
            r"queries must be one position or a 1-D tensor of them, got shape \(1, 2\)$",
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
