"""Attention without parameters: the definition, by hand, and along a Hilbert curve."""

import pytest
import torch

from flexdilated import compat, dilated_attention, reference
from flexdilated.ordering import grid_order, reorder, restore
from tests.compat.cases import BARE, BATCH, GRID, GROUPED, HEAD_DIM, HEADS, HILBERT, LENGTHS, RATES, TOKENS, build, draw, inputs
from tests.tolerances import EXACT


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", BARE)
def test_attention_equals_the_function_and_the_definition(name: str, is_causal: bool) -> None:
    inputs, dout = draw(), torch.randn(BATCH, TOKENS, HEADS, HEAD_DIM, dtype=torch.float64)
    actual = build(name)(*inputs, is_causal)
    assert torch.equal(actual, dilated_attention(*inputs, GROUPED, is_causal=is_causal))
    expected, _ = reference.dilated_attention(*inputs, GROUPED, is_causal=is_causal)
    torch.testing.assert_close(actual, expected, **EXACT)
    for a, b in zip(torch.autograd.grad(actual, inputs, dout), torch.autograd.grad(expected, inputs, dout)):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("name", [name for name in (*BARE, HILBERT) if name != "ImprovedDilatedAttention"])
def test_softmax_scale_multiplies_the_scores(name: str) -> None:
    q, k, v = inputs(name)
    plain = build(name)(q * 0.7 * HEAD_DIM**0.5, k, v)
    torch.testing.assert_close(build(name, softmax_scale=0.7)(q, k, v), plain, **EXACT)


def test_positional_arguments_of_the_popular_port() -> None:
    module = compat.DilatedAttention(LENGTHS, RATES, 0.7, 0.25)
    assert (module.attention.scale, module.attention.dropout_p) == (0.7, 0.25)
    assert compat.ImprovedDilatedAttention(LENGTHS, RATES, 0.25).attention.dropout_p == 0.25
    assert compat.RingDilatedAttention(LENGTHS, RATES, 0.25).attention.dropout_p == 0.25


def test_hilbert_reorders_all_three_and_puts_outputs_back() -> None:
    q, k, v = draw(GRID[0] * GRID[1])
    order = grid_order(GRID)
    expected = restore(reference.dilated_attention(*(reorder(x, order) for x in (q, k, v)), GROUPED)[0], order)
    actual = build(HILBERT)(q, k, v)
    torch.testing.assert_close(actual, expected, **EXACT)
    dout = torch.randn_like(actual)
    for a, b in zip(torch.autograd.grad(actual, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout)):
        torch.testing.assert_close(a, b, **EXACT)


def test_hilbert_rejects_text_causality_and_another_number_of_tokens() -> None:
    with pytest.raises(ValueError, match=r"^grid must be \(height, width\), got None; 1-D text is already in the order"):
        build(HILBERT, grid=None)
    with pytest.raises(
        NotImplementedError, match=r"^is_causal must be False when use_hilbert=True, got True: the tokens before a token"
    ):
        build(HILBERT)(*draw(35), True)
    with pytest.raises(ValueError, match=r"^x must have shape \(B, 35, \.\.\.\), one token per place of the order, got"):
        build(HILBERT)(*draw())
