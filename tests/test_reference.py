"""The oracle against definitions written independently of it: python numbers, torchscale's own files, torchscale's procedure."""

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flexdilated import DilatedPattern, dilated_attention, reference
from tests.cases import Case, differentiate
from tests.tolerances import EXACT, GOLDEN


def test_mask_functions_must_return_bools() -> None:
    q = torch.ones(1, 5, 2, 3)
    with pytest.raises(TypeError, match=r"^mask_mod must return a bool, True where the query sees the key, got torch\.int32$"):
        reference.dilated_attention(q, q, q, DilatedPattern((7,), (1,)), mask_mod=lambda b, h, i, j: (i >= j).int())


def multiplicities(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, head: int, query: int, is_causal: bool
) -> Counter[int]:
    """How often each key of one document is in a query's softmax; zero keys, if any, under -1. No shifted positions."""
    counts: Counter[int] = Counter()
    for i, (w, r) in enumerate(pattern.branches):
        w = min(w, num_tokens)
        assert w % r == 0 or w == num_tokens or not pattern.zero_padding
        offset = pattern.offset(i, head, num_kv_heads)
        if head not in pattern.head_range(i, num_kv_heads) or query % w % r != offset:
            continue
        segment = query // w * w
        for j in range(offset, w + -w % r, r):
            if segment + j < num_tokens and j < w:
                if not is_causal or segment + j <= query:
                    counts[segment + j] += 1
            elif pattern.zero_padding and not is_causal:
                counts[-1] += 1
    return counts


def attend_by_loops(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax per query over the multiset union of the branches' keys, `score + log m`."""
    options = case.options()
    mask, borders = options.get("key_padding_mask"), case.borders or (0, case.num_tokens)
    out, lse = torch.zeros_like(q), q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf)
    for b in range(case.batch):
        for start, stop in pairwise(borders):
            for p in range(stop - start):
                for h in range(q.shape[2]):
                    kv_head = h // case.group
                    counts = multiplicities(case.pattern, stop - start, case.kv_heads, kv_head, p, case.is_causal)
                    logits, values = [], []
                    for key, count in counts.items():
                        token = start + key
                        if key >= 0 and mask is not None and mask[b, token]:
                            continue
                        score = 0.0 if key < 0 else float(q[b, start + p, h] @ k[b, token, kv_head]) * case.head_dim**-0.5
                        logits.append(score + math.log(count))
                        values.append(torch.zeros(case.head_dim).double() if key < 0 else v[b, token, kv_head])
                    if logits:
                        total = math.log(sum(math.exp(x) for x in logits))
                        lse[b, h, start + p] = total
                        out[b, start + p, h] = sum(math.exp(x - total) * value for x, value in zip(logits, values))
    return out, lse


THREE = (1, 2, 3)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case(DilatedPattern((5, 7, 11), THREE), num_tokens=17, kv_heads=3),
        Case(DilatedPattern((5, 7, 11), THREE, offsets="interleaved"), batch=2, num_tokens=13, kv_heads=5),
        Case(DilatedPattern((5, 7, 11), (2, 3, 5), heads="grouped"), num_tokens=13, kv_heads=5),
        Case(DilatedPattern((5, 7), (2, 3)), num_tokens=11, kv_heads=3, group=2),
        Case(DilatedPattern((5, 7), (2, 3)), batch=2, num_tokens=11, kv_heads=3, ignored=0.6),
        Case(DilatedPattern((3, 7), (1, 2)), num_tokens=17, kv_heads=2, borders=(0, 1, 1, 12, 17)),
        Case(DilatedPattern.torchscale((4, 9, 19), (2, 3, 5)), num_tokens=17, kv_heads=7),
        Case(DilatedPattern.torchscale((4, 9, 19), (2, 3, 5)), num_tokens=11, kv_heads=3, ignored=0.6),
    ],
    ids=["blocked", "interleaved", "grouped", "gqa", "mask", "documents", "zero_padding", "zero_padding_mask"],
)
def test_reference_is_one_softmax_over_the_multiset_union(case: Case, is_causal: bool) -> None:
    case = Case(**{**vars(case), "is_causal": is_causal})
    q, k, v, _, _ = case.tensors()
    expected_out, expected_lse = attend_by_loops(case, q, k, v)
    out, lse = reference.dilated_attention(q, k, v, case.pattern, **case.options())
    torch.testing.assert_close(out, expected_out, **EXACT)
    torch.testing.assert_close(lse, expected_lse, **EXACT)


@pytest.mark.parametrize("is_causal", [False, True])
def test_reference_gradients_pass_gradcheck_with_empty_rows(is_causal: bool) -> None:
    case = Case(DilatedPattern((3, 5), (2, 3)), batch=2, num_tokens=5, kv_heads=2, head_dim=2, ignored=0.6, is_causal=is_causal)
    q, k, v, _, _ = case.tensors()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = reference.dilated_attention(q, k, v, case.pattern, **case.options())
        assert lse.isinf().any()
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in (q, k, v)], fast_mode=True)


GOLDEN_FILE = Path(__file__).parent / "golden" / "torchscale.npz"
GOLDEN_CASES = ["pow2_noncausal", "ragged_noncausal", "ragged_causal", "heads_not_multiple", "rate_not_dividing"]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_torchscale_s_outputs_and_gradients_are_reproduced(name: str, backend: str) -> None:
    with np.load(GOLDEN_FILE) as golden:
        stored = {
            key: torch.from_numpy(golden[f"{name}/{key}"]).double() for key in ("q", "k", "v", "out", "grad_out", "dq", "dk", "dv")
        }
        meta = json.loads(str(golden[f"{name}/meta"]))
    pattern = DilatedPattern.torchscale(meta["segment_lengths"], meta["dilation_rates"])
    attend = reference.dilated_attention if backend == "reference" else dilated_attention
    returns = {} if backend == "reference" else {"return_lse": True, "backend": "sdpa"}
    out, _, *grads = differentiate(
        lambda q, k, v: attend(q, k, v, pattern, is_causal=meta["is_causal"], **returns),
        stored["q"],
        stored["k"],
        stored["v"],
        stored["grad_out"],
    )
    for actual, key in zip((out, *grads), ("out", "dq", "dk", "dv")):
        torch.testing.assert_close(actual, stored[key], **GOLDEN)


def test_every_stored_torchscale_case_is_tested() -> None:
    with np.load(GOLDEN_FILE) as golden:
        assert sorted({key.split("/")[0] for key in golden}) == sorted(GOLDEN_CASES)


def attend_as_torchscale(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, is_causal: bool) -> tuple[Tensor, Tensor]:
    """torchscale's procedure: pad to whole segments, pad each to the rate, attend on the diagonals, scatter, crop, mix."""
    _, num_tokens, heads, head_dim = q.shape
    outs, lses = [], []
    for w, r in pattern.branches:
        w = min(w, num_tokens)
        q_i, k_i, v_i = (F.pad(x, (0, 0, 0, 0, 0, -num_tokens % w)).unflatten(1, (-1, w)) for x in (q, k, v))
        q_i, k_i, v_i = (F.pad(x, (0, 0, 0, 0, 0, -w % r)) for x in (q_i, k_i, v_i))  # (B, S, w + padding, H, D)
        out_i = torch.zeros_like(q_i)
        lse_i = torch.full_like(q_i[..., 0], -math.inf)
        for h in range(heads):
            kept = slice(h // math.ceil(heads / r), None, r)
            scores = q_i[:, :, kept, h] @ k_i[:, :, kept, h].mT * head_dim**-0.5
            if is_causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
            out_i[:, :, kept, h] = scores.softmax(-1) @ v_i[:, :, kept, h]
            lse_i[:, :, kept, h] = scores.logsumexp(-1)
        outs.append(out_i.flatten(1, 2)[:, :num_tokens])
        lses.append(lse_i.flatten(1, 2)[:, :num_tokens])
    lse = torch.stack(lses).logsumexp(0)
    weights = [torch.exp(lse_i - lse).detach()[..., None] for lse_i in lses]
    return sum(weight * out_i for weight, out_i in zip(weights, outs)), lse.transpose(1, 2)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "rates", "num_tokens"),
    [
        ((29, 11, 17), (1, 3, 5), 41),  # shifted: several segments, rates that do not divide them
        ((29, 11, 17), (1, 3, 5), 34),  # a whole last segment whose outputs fall behind the end
        ((12, 20), (1, 4), 53),  # rates divide: a ragged end only
        ((61, 67), (1, 5), 53),  # longer than the sequence
        ((5, 7), (2, 7), 3),  # shorter than a rate
    ],
    ids=["shifted", "shifted_whole", "ragged", "one_segment", "short"],
)
def test_torchscale_s_procedure_is_reproduced(
    lengths: tuple[int, ...], rates: tuple[int, ...], num_tokens: int, is_causal: bool, backend: str
) -> None:
    pattern = DilatedPattern.torchscale(lengths, rates)
    q, k, v, dout, _ = Case(pattern, batch=2, num_tokens=num_tokens, kv_heads=7).tensors()
    attend = reference.dilated_attention if backend == "reference" else dilated_attention
    returns = {} if backend == "reference" else {"return_lse": True, "backend": "sdpa"}

    # A row that no branch keeps is NaN in the plain procedure's mixture: 0 / 0.
    def procedure(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend_as_torchscale(q, k, v, pattern, is_causal)
        return torch.where(lse.transpose(1, 2)[..., None].isinf(), 0.0, out), lse

    expected = differentiate(procedure, q, k, v, dout)
    actual = differentiate(lambda q, k, v: attend(q, k, v, pattern, is_causal=is_causal, **returns), q, k, v, dout)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, **EXACT)


@pytest.mark.parametrize("scale", [1.0, 1e10, 1e20])
def test_a_branch_that_counts_twice_changes_no_weight(scale: float) -> None:
    q, k, v = (torch.randn(2, 23, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    once, _ = reference.dilated_attention(q, k, v, DilatedPattern((7,), (2,)), scale=scale)
    twice, _ = reference.dilated_attention(q, k, v, DilatedPattern((7, 7), (2, 2)), scale=scale)
    torch.testing.assert_close(twice, once, **EXACT)
