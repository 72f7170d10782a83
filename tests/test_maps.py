import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern, attention_map, dilated_attention, reference
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


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        DilatedPattern((7, 13, 43), (1, 3, 5)),
        DilatedPattern((7, 13, 43), (2, 3, 5), offsets="interleaved"),
        DilatedPattern.grouped((7, 13), (2, 3)),
        DilatedPattern.torchscale((7, 43), (1, 4)),
        DilatedPattern.torchscale((11, 7), (3, 4)),  # no rate divides: torchscale's shifted positions
    ],
)
def test_attention_map_times_values_is_the_output(pattern: DilatedPattern, is_causal: bool) -> None:
    case = Case(pattern, batch=2, num_tokens=43, kv_heads=5, group=2, is_causal=is_causal, ignored=0.2, strided=True, seed=3)
    q, k, v, _, _ = case.tensors()
    queries = torch.tensor([41, 0, 17, 6, 7, 42])
    weights = attention_map(q, k, pattern, queries=queries, **case.options())
    out = torch.einsum("bhqn,bnhd->bqhd", weights, v.repeat_interleave(2, dim=2))
    expected = dilated_attention(q, k, v, pattern, **case.options())
    torch.testing.assert_close(out, expected[:, queries], **EXACT)
    torch.testing.assert_close(out, reference.dilated_attention(q, k, v, pattern, **case.options())[0][:, queries], **EXACT)


def test_attention_map_counts_a_key_once_per_branch() -> None:
    q, k = torch.zeros(1, 5, 1, 2), torch.zeros(1, 5, 1, 2)
    weights = attention_map(q, k, DilatedPattern((5, 2), (1, 1)), queries=0)
    torch.testing.assert_close(weights[0, 0, 0], torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0]) / 7, **SINGLE)


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


@pytest.mark.parametrize("queries", [[0, 43], [0, -1]])
def test_attention_map_rejects_positions_outside(queries: list[int]) -> None:
    q, k, _, _, _ = Case(PATTERN).tensors()
    with pytest.raises(ValueError, match=rf"^queries\[1\] must be in \[0, N=43\), got {queries[1]}$"):
        attention_map(q, k, PATTERN, queries=queries)
    attention_map(q, k, PATTERN, queries=[0, 42])


def test_attention_map_rejects_what_are_no_positions() -> None:
    q, k, _, _, _ = Case(PATTERN).tensors()
    with pytest.raises(ValueError, match=r"^queries must hold at least one position, got none$"):
        attention_map(q, k, PATTERN, queries=[])
    with pytest.raises(ValueError, match=r"^queries must be one position or a 1-D tensor of them, got shape \(1, 2\)$"):
        attention_map(q, k, PATTERN, queries=torch.tensor([[1, 2]]))
    with pytest.raises(TypeError, match=r"^queries must hold integers, got torch.bool$"):
        attention_map(q, k, PATTERN, queries=torch.ones(43, dtype=torch.bool))
    for wrong in (True, 1.0, torch.tensor(1.5), torch.tensor(True)):
        with pytest.raises(TypeError, match=r"^queries\[1\] must be an integer, got"):
            attention_map(q, k, PATTERN, queries=[0, wrong])
    for wrong in ("12", None, 1.0):
        with pytest.raises(TypeError, match=r"^queries must be an integer, a sequence or a tensor of integers, got"):
            attention_map(q, k, PATTERN, queries=wrong)


def test_attention_map_rejects_tensors_as_dilated_attention_does() -> None:
    q, k, _, _, _ = Case(PATTERN).tensors()
    with pytest.raises(ValueError, match=r"^k must match q in B, N and D"):
        attention_map(q, k[:, 1:], PATTERN, queries=0)
    with pytest.raises(TypeError, match=r"^k must have the dtype of q"):
        attention_map(q, k.float(), PATTERN, queries=0)
    with pytest.raises(TypeError, match=r"^pattern must be a DilatedPattern, got NoneType$"):
        attention_map(q, k, None, queries=0)
    with pytest.raises(ValueError, match=r"^key_padding_mask must have shape"):
        attention_map(q, k, PATTERN, queries=0, key_padding_mask=torch.zeros(43, 1, dtype=torch.bool))
