import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from flexdilated import merge_attentions
from flexdilated.core.lse import add_zero_keys_, for_backward, merge_, sink_scale
from tests.tolerances import EXACT

ROWS, KEYS, HEAD_DIM = 7, 23, 5


def partial_attention(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a softmax; empty where there is no key."""
    if scores.shape[-1] == 0:
        return values.new_zeros(scores.shape[0], values.shape[-1]), scores.new_full((scores.shape[0],), -math.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def draw() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, KEYS, dtype=torch.float64) * 3, torch.randn(KEYS, HEAD_DIM, dtype=torch.float64)


@pytest.mark.parametrize("cuts", [(0, 23), (0, 1, 23), (0, 11, 11, 13, 23), (0, 0, 23)], ids=str)
@pytest.mark.parametrize("backwards", [False, True])
def test_merge_of_split_keys_is_the_whole_in_any_order(cuts: tuple[int, ...], backwards: bool) -> None:
    scores, values = draw()
    parts = [partial_attention(scores[:, a:b], values[a:b]) for a, b in pairwise(cuts)]
    out, lse = torch.zeros(ROWS, HEAD_DIM, dtype=torch.float64), torch.full((ROWS,), -math.inf, dtype=torch.float64)
    for out_i, lse_i in reversed(parts) if backwards else parts:
        merge_(out, lse, out_i, lse_i)
    expected_out, expected_lse = partial_attention(scores, values)
    torch.testing.assert_close(out, expected_out, **EXACT)
    torch.testing.assert_close(lse, expected_lse, **EXACT)


def test_merge_counts_a_key_of_both_sides_twice() -> None:
    scores, values = draw()
    out, lse = partial_attention(scores, values)
    merge_(out, lse, *partial_attention(scores[:, :3], values[:3]))
    expected = partial_attention(torch.cat([scores, scores[:, :3]], 1), torch.cat([values, values[:3]]))
    torch.testing.assert_close((out, lse), expected, **EXACT)


def test_merge_of_empty_rows_is_zero_and_of_one_empty_side_is_the_other() -> None:
    inf = math.inf
    out, lse = torch.tensor([[0.0], [0.0], [5.0]]), torch.tensor([-inf, -inf, 2.0])
    out_i, lse_i = torch.tensor([[0.0], [3.0], [0.0]]), torch.tensor([-inf, 1.0, -inf])
    merge_(out, lse, out_i, lse_i)
    assert torch.equal(out, torch.tensor([[0.0], [3.0], [5.0]]))
    assert torch.equal(lse, torch.tensor([-inf, 1.0, 2.0]))


@pytest.mark.parametrize("gap", [-1e4, -200.0, 200.0, 1e4])
def test_merge_stays_finite_for_far_apart_sums(gap: float) -> None:
    out, lse = torch.tensor([[2.0]]), torch.tensor([0.0])
    merge_(out, lse, torch.tensor([[3.0]]), torch.tensor([gap]))
    assert out.item() == (3.0 if gap > 0 else 2.0)
    assert lse.item() == max(gap, 0.0)


def test_merge_keeps_a_nan_in_its_own_row() -> None:
    out, lse = torch.ones(3, 2), torch.zeros(3)
    out_i, lse_i = torch.ones(3, 2), torch.zeros(3)
    out_i[1, 0] = lse_i[1] = math.nan
    merge_(out, lse, out_i, lse_i)
    assert torch.equal(out.isnan().any(1), torch.tensor([False, True, False]))
    assert torch.equal(lse.isnan(), torch.tensor([False, True, False]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merge_in_low_precision_rounds_once(dtype: torch.dtype) -> None:
    out, out_i = torch.randn(ROWS, HEAD_DIM).to(dtype), torch.randn(ROWS, HEAD_DIM).to(dtype)
    lse, lse_i = torch.randn(ROWS), torch.randn(ROWS)
    weight = torch.sigmoid(lse_i.double() - lse.double())[:, None]
    expected = ((1 - weight) * out.double() + weight * out_i.double()).to(dtype)
    expected_lse = torch.logaddexp(lse.double(), lse_i.double()).float()
    merge_(out, lse, out_i, lse_i)
    torch.testing.assert_close(out, expected, atol=0.0, rtol=torch.finfo(dtype).eps)
    torch.testing.assert_close(lse, expected_lse)


def test_merge_writes_strided_views_in_place() -> None:
    memory, sums = torch.zeros(ROWS, 2 * HEAD_DIM), torch.zeros(ROWS)
    merge_(memory[:, ::2], sums, torch.ones(ROWS, HEAD_DIM), torch.zeros(ROWS))
    assert torch.equal(memory[:, ::2], torch.full((ROWS, HEAD_DIM), 0.5))
    assert torch.equal(memory[:, 1::2], torch.zeros(ROWS, HEAD_DIM))


@pytest.mark.parametrize("count", [1, 2, 13])
def test_add_zero_keys_equals_a_softmax_with_them_in_it(count: int) -> None:
    scores, values = draw()
    out, lse = partial_attention(scores, values)
    add_zero_keys_(out, lse, count)
    expected = partial_attention(
        torch.cat([scores, scores.new_zeros(ROWS, count)], 1), torch.cat([values, values.new_zeros(count, HEAD_DIM)])
    )
    torch.testing.assert_close((out, lse), expected, **EXACT)


def test_add_zero_keys_to_an_empty_row_leaves_only_them() -> None:
    out, lse = torch.zeros(1, HEAD_DIM), torch.tensor([-math.inf])
    add_zero_keys_(out, lse, 3)
    assert torch.equal(out, torch.zeros(1, HEAD_DIM))
    torch.testing.assert_close(lse, torch.tensor([math.log(3)]))


def test_a_backward_sees_no_empty_row() -> None:
    lse, dlse = torch.tensor([-math.inf, -3.0, 0.0, math.inf]), torch.tensor([math.nan, 1.0, math.nan, 2.0])
    safe, gradient = for_backward(lse, dlse)
    assert torch.equal(safe, torch.tensor([math.inf, -3.0, 0.0, math.inf]))
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.0, math.nan, 2.0]), equal_nan=True)
    assert lse[0] == -math.inf
    assert for_backward(lse, None)[1] is None


def test_share_beside_a_sink_is_what_a_softmax_over_one_more_key_leaves() -> None:
    lse = torch.tensor([-math.inf, -2.0, 0.0, 3.0, 800.0], dtype=torch.float64)
    sinks = torch.tensor([-math.inf, -1.0, 2.5, 900.0, math.inf], dtype=torch.float64)[:, None]
    expected = torch.stack([lse.expand(5, 5), sinks.expand(5, 5)]).softmax(dim=0)[0]
    assert torch.equal(sink_scale(sinks, lse).isnan(), torch.zeros(5, 5, dtype=torch.bool))
    # A row without keys beside no sink has nothing, where the quotient of nothing by nothing is NaN; beside +inf all is the sink's.
    torch.testing.assert_close(sink_scale(sinks, lse), expected.nan_to_num(0.0), rtol=1e-14, atol=0.0)


def test_merged_attentions_are_the_whole_with_its_gradients() -> None:
    scores = (torch.randn(2, 3, ROWS, KEYS, dtype=torch.float64) * 3).requires_grad_()  # (B, H, N, keys)
    values = torch.randn(2, 3, KEYS, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    hidden = torch.arange(KEYS) < torch.tensor([[0], [KEYS], [5], [1], [9], [9], [KEYS]])  # two queries without a key

    def attend(seen: Tensor) -> tuple[Tensor, Tensor]:
        weighted = torch.where(seen, scores, -1e9).exp() * seen
        total = weighted.sum(-1)
        out = weighted / total.clamp(min=1e-300)[..., None] @ values
        return out.transpose(1, 2), torch.where(total > 0, total.clamp(min=1e-300).log(), -math.inf)

    parts = [attend(~hidden & (torch.arange(KEYS) % 3 == i)) for i in range(3)]
    out, lse = merge_attentions(*map(list, zip(*parts)))
    whole, whole_lse = attend(~hidden)
    torch.testing.assert_close((out, lse), (whole, whole_lse), **EXACT)
    dout = torch.randn_like(out)
    for found, expected in zip(*(torch.autograd.grad((x * dout).sum(), (scores, values), retain_graph=True) for x in (out, whole))):
        torch.testing.assert_close(found, expected, **EXACT)
    stacked = merge_attentions(*map(torch.stack, zip(*parts)))  # as xformers takes parts too
    torch.testing.assert_close(stacked, (out, lse), **EXACT)
    half, _ = merge_attentions([part.bfloat16() for part, _ in parts], [x.float() for _, x in parts])
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("outs", "lses", "match"),
    [
        (torch.ones(1, 2, 3, 4), torch.ones(1, 3, 2), r"outs must hold tensors of shape \(B, N, H, D\), got \(2, 3, 4\)"),
        ([], [], "outs must be as many as lses and at least one, got 0 and 0"),
        (
            [torch.ones(1, 2, 3, 4)],
            [torch.ones(1, 2, 3)],
            r"outs\[0\] and lses\[0\] must have shapes .*, got .* and \(1, 2, 3\)",
        ),
    ],
)
def test_merge_attentions_rejects(outs: list[Tensor] | Tensor, lses: list[Tensor] | Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        merge_attentions(outs, lses)
