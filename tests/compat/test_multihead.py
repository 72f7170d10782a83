"""Layers with projections: their formula, the order of their arguments, their weights under earlier names."""

import pytest
import torch
from torch import nn

from flexdilated import DilatedPattern, compat, dilated_attention
from tests.compat.cases import BATCH, EMBED, GROUPED, HEADS, LAYERS, LENGTHS, RATES, TOKENS, arguments, build, definition_of, inputs
from tests.tolerances import EXACT


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_its_formula_over_the_definition(name: str, is_causal: bool) -> None:
    layer = build(name)
    query, key, value = inputs(name)
    expected = definition_of(layer, query, key, value, is_causal)
    actual, weights = layer(query, key, value, is_causal=is_causal)
    assert weights is None
    assert isinstance(layer.inner_attn_ln, nn.LayerNorm) == (name != "RingMultiheadDilatedAttentionHybrid")
    torch.testing.assert_close(actual, expected, **EXACT)
    parameters = list(layer.parameters())
    for a, b in zip(torch.autograd.grad(actual.sum(), parameters), torch.autograd.grad(expected.sum(), parameters)):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("name", [*LAYERS, "DilatedAttention", "ImprovedDilatedAttention", "RingDilatedAttention"])
def test_a_whole_pattern_with_a_window_in_place_of_the_lengths(name: str) -> None:
    pattern = DilatedPattern((TOKENS,), (2,), window=5, offsets="interleaved")
    layer, given = build(name, segment_lengths=pattern, dilation_rates=()), inputs(name)
    actual = layer(*given, is_causal=True)
    if name in LAYERS:
        actual, expected = actual[0], definition_of(layer, *given, True, pattern)
    else:
        expected = dilated_attention(*given, pattern, is_causal=True)
    torch.testing.assert_close(actual, expected, **EXACT)
    leaves = list(layer.parameters()) or given
    for a, b in zip(torch.autograd.grad(actual.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)):
        torch.testing.assert_close(a, b, **EXACT)
    with pytest.raises(ValueError, match=r"^dilation_rates must be \(\) with a pattern as segment_lengths, got \(2,\)$"):
        build(name, segment_lengths=pattern, dilation_rates=(2,))


@pytest.mark.parametrize("name", [name for name in LAYERS if not name.endswith("Hybrid")])
def test_layer_takes_causality_in_fourth_place_and_fills_in_keys_and_values(name: str) -> None:
    layer, (x, y, _) = build(name), inputs(name)
    assert torch.equal(layer(x, y, y, True)[0], layer(x, y, y, is_causal=True)[0])
    assert torch.equal(layer(x)[0], layer(x, x, x)[0])
    assert torch.equal(layer(x, y)[0], layer(x, y, y)[0])
    with pytest.raises((TypeError, RuntimeError)):  # a mask in fourth place is no bool
        layer(x, x, x, torch.zeros(BATCH, TOKENS, dtype=torch.bool))
    with pytest.raises(TypeError):  # takes any pattern and builds a layer of the library
        layer.from_torch(nn.MultiheadAttention(EMBED, HEADS, batch_first=True), GROUPED)


def test_hybrid_layer_is_called_like_multihead_attention_of_torch() -> None:
    layer, (x, _, _) = build("RingMultiheadDilatedAttentionHybrid"), inputs("RingMultiheadDilatedAttentionHybrid")
    mask = torch.arange(TOKENS) >= torch.tensor([[17], [TOKENS]])
    masked = layer(x, x, x, mask)[0]
    poisoned = x.masked_fill(mask[..., None], 1e3)
    torch.testing.assert_close(layer(x, poisoned, poisoned, key_padding_mask=mask)[0], masked, **EXACT)
    assert not torch.allclose(masked, layer(x, x, x)[0])
    with pytest.raises(NotImplementedError, match=r"^need_weights must be False, got True"):
        layer(x, x, x, need_weights=True)
    with pytest.raises(NotImplementedError, match=r"^layer_norm must be False, got True: there it normalised queries and keys"):
        build("RingMultiheadDilatedAttentionHybrid", layer_norm=True)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_options_reach_the_layer(name: str) -> None:
    layer = build(name, bias=False, dtype=torch.float32, device="meta")
    assert layer.q_proj.bias is None
    assert layer.out_proj.weight.is_meta
    assert layer.out_proj.weight.dtype == torch.float32
    if "layer_norm_eps" in arguments(name):
        assert build(name, layer_norm_eps=0.25).inner_attn_ln.eps == 0.25
        assert "inner_attn_ln.weight" not in build(name, layer_norm=False).state_dict()
    gains = []
    for gamma in (1.0, 3.0):
        torch.manual_seed(7)
        fresh = getattr(compat, name)(
            embed_dim=EMBED, num_heads=HEADS, segment_lengths=LENGTHS, dilation_rates=RATES, gamma_init=gamma
        )
        gains.append([fresh.q_proj.weight, fresh.k_proj.weight, fresh.v_proj.weight, fresh.out_proj.weight])
    for one, three, gain in zip(*gains, (1.0, 1.0, 3.0, 3.0)):
        torch.testing.assert_close(three, gain * one)


@pytest.mark.parametrize("name", LAYERS)
def test_rates_come_before_lengths_except_in_rings(name: str) -> None:
    pattern = (LENGTHS, RATES) if name.startswith("Ring") else (RATES, LENGTHS)
    layer = getattr(compat, name)(EMBED, HEADS, *pattern, 0.25, False)
    assert (layer.attention.pattern, layer.attention.dropout_p, layer.q_proj.bias) == (GROUPED, 0.25, None)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_saves_its_own_names_and_loads_earlier_ones(name: str) -> None:
    layer, x = build(name), inputs(name)
    state = layer.state_dict()
    modules = ["q_proj", "k_proj", "v_proj", "out_proj", *([] if name.endswith("Hybrid") else ["inner_attn_ln"])]
    assert list(state) == [f"{module}.{part}" for module in modules for part in ("weight", "bias")]

    earlier = {key.replace("inner_attn_ln", "norm"): value for key, value in state.items()}
    fused = {key: value for key, value in earlier.items() if key[:2] not in ("q_", "k_", "v_")}
    fused |= {f"qkv_proj.{part}": torch.cat([state[f"{y}_proj.{part}"] for y in "qkv"]) for part in ("weight", "bias")}
    for saved in (state, earlier, fused):
        fresh, held = build(name), dict(saved)
        parent = nn.ModuleDict({"layer": fresh})
        parent.load_state_dict({f"layer.{key}": value for key, value in saved.items()})
        assert torch.equal(fresh(*x)[0], layer(*x)[0])
        fresh.load_state_dict(saved)
        assert list(saved) == list(held)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"q_ln.weight\""):
        layer.load_state_dict({**state, "q_ln.weight": torch.ones(EMBED)})
