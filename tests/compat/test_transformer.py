"""Transformer layers and `LongNet` of the port: their formula, and that every option reaches the layers."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flexdilated import compat
from tests.compat.cases import BATCH, EMBED, HEADS, LENGTHS, RATES, TOKENS, TRANSFORMERS, definition_of, randomised
from tests.tolerances import EXACT


@pytest.mark.parametrize(("activation", "function"), [("relu", F.relu), ("gelu", F.gelu), (torch.tanh, torch.tanh)])
def test_transformer_layers_equal_their_formula(activation: object, function: object) -> None:
    options = {"dim_feedforward": 11, "activation": activation, "layer_norm_eps": 0.1, "dtype": torch.float64}
    encoder = randomised(compat.DilatedTransformerEncoderLayer(EMBED, HEADS, LENGTHS, RATES, **options)).eval()
    decoder = randomised(compat.DilatedTransformerDecoderLayer(EMBED, HEADS, LENGTHS, RATES, **options)).eval()
    src, tgt = (torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64) for _ in range(2))
    for is_causal in (False, True):
        h = encoder.norm1(src)
        x = src + definition_of(encoder.self_attn, h, h, h, is_causal)
        expected = x + encoder.linear2(encoder.norm3(function(encoder.linear1(encoder.norm2(x)))))
        torch.testing.assert_close(encoder(src, is_causal), expected, **EXACT)

        h = decoder.norm1(tgt)
        x = tgt + definition_of(decoder.self_attn, h, h, h, is_causal)
        x = x + definition_of(decoder.multihead_attn, decoder.norm2(x), src, src, not is_causal)
        expected = x + decoder.linear2(decoder.norm4(function(decoder.linear1(decoder.norm3(x)))))
        torch.testing.assert_close(decoder(tgt, src, is_causal, not is_causal), expected, **EXACT)
    assert not isinstance(decoder.self_attn.inner_attn_ln, nn.LayerNorm)
    assert [m.eps for m in (*encoder.modules(), *decoder.modules()) if isinstance(m, nn.LayerNorm)] == [0.1] * 9


def test_longnet_reads_one_sequence_in_both_stacks() -> None:
    model = randomised(compat.LongNet(EMBED, HEADS, 3, 2, 11, LENGTHS, RATES, dtype=torch.float64))
    x = torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64)
    for is_causal in (False, True):
        memory = tgt = x
        for layer in model.encoder.layers:
            memory = layer(memory, is_causal)
        for layer in model.decoder.layers:
            tgt = layer(tgt, memory, is_causal, is_causal)
        assert torch.equal(model(x, is_causal), tgt)
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (3, 2)
    assert torch.equal(model(x), model(x, True))
    torch.testing.assert_close(model(torch.cat([x[:, :17], x[:, 17:] + 1], dim=1))[:, :17], model(x)[:, :17], **EXACT)
    (out,) = torch.autograd.grad(model(x).sum(), [model.encoder.layers[0].linear1.weight])
    assert out.abs().max() > 0


def test_transformer_options_reach_the_layers() -> None:
    for name in TRANSFORMERS[:2]:
        layer = getattr(compat, name)(EMBED, HEADS, LENGTHS, RATES, 11, 0.25, gamma_init=3.0, device="meta", dtype=torch.float64)
        assert {p.dtype for p in layer.parameters()} == {torch.float64}
        assert all(p.is_meta for p in layer.parameters())
        assert layer.dropout.p == layer.self_attn.attention.dropout_p == 0.25
        gains = []
        for gamma in (1.0, 3.0):
            torch.manual_seed(7)
            gains.append(getattr(compat, name)(EMBED, HEADS, LENGTHS, RATES, 11, gamma_init=gamma))
        for part in ("self_attn.v_proj", "self_attn.out_proj", "linear1", "linear2"):
            one, three = (layer.get_submodule(part).weight for layer in gains)
            torch.testing.assert_close(three, 3.0 * one)
    torch.manual_seed(7)
    model = compat.LongNet(EMBED, HEADS, 3, 2, 11, LENGTHS, RATES, 0.25, "gelu", 0.1, dtype=torch.float64)
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.25}
    assert {layer.activation for stack in (model.encoder, model.decoder) for layer in stack.layers} == {F.gelu}
    for stack, gain in ((model.encoder, math.log(6) / math.sqrt(3)), (model.decoder, math.sqrt(math.log(6)))):
        xavier = math.sqrt(2 / (EMBED + 11))
        assert abs(stack.layers[0].linear1.weight.std().item() / (gain * xavier) - 1) < 0.15


@pytest.mark.parametrize("activation", ["tanh", 3])
def test_transformers_reject_unknown_activations(activation: object) -> None:
    message = f"activation must be one of ('relu', 'gelu') or a function, got {activation!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        compat.LongNet(EMBED, HEADS, segment_lengths=LENGTHS, dilation_rates=RATES, activation=activation)
