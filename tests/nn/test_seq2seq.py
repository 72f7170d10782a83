"""LongNet as encoder and decoder: by its formula, what sees what, its initial gains, and refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdilated import DilatedPattern, MultiheadDilatedAttention, reference
from flexdilated.nn import LongNet
from flexdilated.nn.seq2seq import CrossAttention
from tests.cases import randomised
from tests.tolerances import EXACT

BATCH, TOKENS, EMBED, HEADS, FFN = 2, 23, 15, 5, 31
PATTERN = DilatedPattern((7, 13), (1, 3))


def model(encoder_layers: int = 2, decoder_layers: int = 3, **options: object) -> LongNet:
    """In evaluation mode, with biases and gains that differ from zeros and ones."""
    options = {"pattern": PATTERN, "dtype": torch.float64, **options}
    result = LongNet(EMBED, HEADS, encoder_layers, decoder_layers, FFN, **options)
    return randomised(result, 0.1).eval()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape or (BATCH, TOKENS, EMBED), dtype=torch.float64)


def norm(x: Tensor, layer: nn.LayerNorm, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), layer.weight, layer.bias, eps)


def attend(
    layer: nn.Module, x: Tensor, y: Tensor, pattern: DilatedPattern, is_causal: bool, mask: Tensor | None, eps: float
) -> Tensor:
    def project(projection: nn.Linear, z: Tensor) -> Tensor:
        return F.linear(z, projection.weight, projection.bias).unflatten(-1, (HEADS, -1))

    q, k, v = project(layer.q_proj, x), project(layer.k_proj, y), project(layer.v_proj, y)
    out, _ = reference.dilated_attention(q, k, v, pattern, is_causal=is_causal, key_padding_mask=mask)
    out = out.flatten(2)
    if isinstance(layer.inner_attn_ln, nn.LayerNorm):
        out = norm(out, layer.inner_attn_ln, eps)
    return F.linear(out, layer.out_proj.weight, layer.out_proj.bias)


def formula(
    m: LongNet, src: Tensor, tgt: Tensor, causal: tuple[bool, bool, bool], masks: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """The whole model over the reference; `causal` for encoder, decoder and cross-attention, `masks` for source and target."""

    def ffn(layer: nn.Module, x: Tensor) -> Tensor:
        h = norm(F.gelu(F.linear(x, layer.fc1.weight, layer.fc1.bias)), layer.ffn_layernorm, eps)
        return F.linear(h, layer.fc2.weight, layer.fc2.bias)

    for layer in m.encoder:
        h = norm(src, layer.self_attn_layer_norm, eps)
        src = src + attend(layer.self_attn, h, h, m.pattern, causal[0], masks[0], eps)
        src = src + ffn(layer.ffn, norm(src, layer.final_layer_norm, eps))
    memory = norm(src, m.encoder_layer_norm, eps)
    for layer in m.decoder:
        h = norm(tgt, layer.self_attn_layer_norm, eps)
        tgt = tgt + attend(layer.self_attn, h, h, m.pattern, causal[1], masks[1], eps)
        h = norm(tgt, layer.encoder_attn_layer_norm, eps)
        tgt = tgt + attend(layer.encoder_attn, h, memory, m.pattern, causal[2], masks[0], eps)
        tgt = tgt + ffn(layer.ffn, norm(tgt, layer.final_layer_norm, eps))
    return norm(tgt, m.decoder_layer_norm, eps)


@pytest.mark.parametrize(
    ("causal", "pattern"),
    [
        ((False, True, False), DilatedPattern.grouped((7, 13), (1, 3))),
        ((True, False, True), PATTERN),
        ((False, True, True), DilatedPattern((19,), (3,), window=4, offsets="interleaved")),
    ],
    ids=str,
)
def test_longnet_equals_its_formula_over_the_reference(causal: tuple[bool, bool, bool], pattern: DilatedPattern) -> None:
    encoder, decoder, cross = causal
    eps = 0.2
    module = model(layer_norm_eps=eps, pattern=pattern, encoder_is_causal=encoder, decoder_is_causal=decoder, cross_is_causal=cross)
    src, tgt = draw().requires_grad_(), draw().requires_grad_()
    masks = tuple(torch.arange(TOKENS) >= torch.tensor(ends)[:, None] for ends in ([19, TOKENS], [TOKENS, 17]))
    actual = module(src, tgt, src_key_padding_mask=masks[0], tgt_key_padding_mask=masks[1])
    expected = formula(module, src, tgt, causal, masks, eps)
    torch.testing.assert_close(actual, expected, **EXACT)
    dout = draw()
    for a, b in zip(torch.autograd.grad(actual, (src, tgt), dout), torch.autograd.grad(expected, (src, tgt), dout)):
        torch.testing.assert_close(a, b, **EXACT)


def dense(layer: nn.Module, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
    """Attention of every token to the whole memory, head by head; a sequence of nothing but padding gives 0."""
    rows = []
    for sequence in range(BATCH):
        heads = []
        for head in range(HEADS):
            here = slice(head * EMBED // HEADS, (head + 1) * EMBED // HEADS)
            q, k, v = (
                (F.linear(y[sequence], p.weight, p.bias))[:, here]
                for y, p in ((x, layer.q_proj), (memory, layer.k_proj), (memory, layer.v_proj))
            )
            seen = ~mask[sequence]
            scores = q @ k[seen].T / math.sqrt(EMBED // HEADS)
            heads.append(scores.softmax(-1) @ v[seen])
        rows.append(F.linear(torch.cat(heads, dim=-1), layer.out_proj.weight, layer.out_proj.bias))
    return torch.stack(rows)


def test_dense_cross_attention_joins_any_lengths_by_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    module, length = model(1, 2, cross_attention="dense"), 29
    src, tgt = draw().requires_grad_(), draw(BATCH, length, EMBED).requires_grad_()
    masks = (torch.arange(TOKENS) >= torch.tensor([[19], [0]]), torch.arange(length) >= torch.tensor([[length], [13]]))
    actual = module(src, tgt, src_key_padding_mask=masks[0], tgt_key_padding_mask=masks[1])
    plain = attend

    def attend_or_cross(layer: nn.Module, x: Tensor, y: Tensor, *rest: object) -> Tensor:
        return plain(layer, x, y, *rest) if isinstance(layer, MultiheadDilatedAttention) else dense(layer, x, y, masks[0])

    monkeypatch.setitem(formula.__globals__, "attend", attend_or_cross)
    expected = formula(module, src, tgt, (False, True, False), masks, 1e-5)
    torch.testing.assert_close(actual, expected, **EXACT)
    dout = torch.randn_like(actual)
    for a, b in zip(torch.autograd.grad(actual, (src, tgt), dout), torch.autograd.grad(expected, (src, tgt), dout)):
        torch.testing.assert_close(a, b, **EXACT)


def test_dense_cross_attention_sees_the_whole_source_and_drops_in_training_only() -> None:
    module = model(1, 1, cross_attention="dense", attention_dropout=0.3)
    assert touched(module, "src", 22).all()
    src, tgt = draw(), draw(BATCH, 5, EMBED)
    assert torch.equal(module(src, tgt), module(src, tgt))
    module.decoder[0].encoder_attn.train()
    assert not torch.equal(module(src, tgt), module(src, tgt))


def touched(module: LongNet, which: str, place: int) -> Tensor:
    """Which target tokens change when the source or target token at a place changes."""
    inputs = {"src": draw(1, TOKENS, EMBED), "tgt": draw(1, TOKENS, EMBED)}
    before = module(**inputs)
    inputs[which][:, place] += draw(EMBED)  # a constant would vanish in the LayerNorms
    return (module(**inputs) != before).any(dim=-1)[0]


@pytest.mark.parametrize("cross", ["dilated", "dense"])
def test_ignored_source_tokens_may_hold_anything_and_masks_floats(cross: str) -> None:
    net, src, tgt = model(cross_attention=cross), draw(), draw()
    ignored = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    ignored[0, 9:], ignored[1, 20:] = True, True
    expected = net(src, tgt, src_key_padding_mask=ignored)
    assert expected.isfinite().all()
    for wild in (math.nan, math.inf, 1e300):
        out = net(src.masked_fill(ignored[..., None], wild), tgt, src_key_padding_mask=ignored)
        torch.testing.assert_close(out, expected, **EXACT)
    as_floats = torch.zeros(BATCH, TOKENS, dtype=torch.float64).masked_fill(ignored, -math.inf)
    torch.testing.assert_close(net(src, tgt, src_key_padding_mask=as_floats), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="key_padding_mask must be bool, or float with only 0 and -inf, got other values"):
        net(src, tgt, src_key_padding_mask=as_floats.clamp(min=-1.0))


def test_gradients_of_dense_cross_attention_leave_ignored_keys_out() -> None:
    layer, query, memory = CrossAttention(EMBED, HEADS).double(), draw().requires_grad_(), draw(BATCH, 11, EMBED)
    ignored = torch.arange(11).expand(BATCH, -1) >= torch.tensor([[4], [11]])
    found = []
    for wild in (0.5, math.nan):
        keys = memory.masked_fill(ignored[..., None], wild).requires_grad_()
        out = layer(query, keys, keys, ignored)[0]
        found.append((out, *torch.autograd.grad(out.square().sum(), (query, keys))))
    torch.testing.assert_close(found[1], found[0], **EXACT)
    assert not found[0][2][ignored].any()


def test_longnet_by_default_reads_all_of_its_segment_and_writes_left_to_right() -> None:
    module = model(1, 1, pattern=DilatedPattern((11,), (1,)))
    p = torch.arange(TOKENS)
    assert torch.equal(touched(module, "src", 13), (p >= 11) & (p < 22))
    assert torch.equal(touched(module, "tgt", 13), (p >= 13) & (p < 22))


def test_longnet_drops_in_training_only() -> None:
    src, tgt = draw(), draw()
    for options in ({"dropout": 0.3}, {"attention_dropout": 0.3}):
        module = model(**options)
        plain = module(src, tgt)
        torch.testing.assert_close(module(src, tgt), plain, **EXACT)
        assert not torch.allclose(module.train()(src, tgt), plain)


@pytest.mark.parametrize("cross", ["dilated", "dense"])
def test_longnet_initial_gains_are_those_of_magneto(cross: str) -> None:
    """16,384 samples or more: the standard error is below 0.6 %."""
    module = LongNet(128, 4, 3, 5, 128, PATTERN, cross_attention=cross)
    decoder = math.sqrt(math.log(15))
    encoder = math.sqrt(math.log(15) * math.log(6) / 3)
    one = math.sqrt(2 / 256)
    for layers, gain in ((module.encoder, encoder), (module.decoder, decoder)):
        for name, weight in layers[-1].named_parameters():
            if weight.dim() == 2:
                expected = one * (1.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else gain)
                assert weight.std().item() == pytest.approx(expected, rel=0.03), name


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (((2, 23, 14), (2, 23, 15)), r"^src must have shape \(B, N, 15\), got \(2, 23, 14\)$"),
        (((2, 23, 15), (23, 15)), r"^tgt must have shape \(B, N, 15\), got \(23, 15\)$"),
        (((2, 23, 15), (3, 23, 15)), r"^tgt must have the batch size of src=2, got 3$"),
        (((2, 23, 15), (2, 17, 15)), r"^tgt must be as long as src=23, got 17: .* the segments of both sides must line up; pad"),
    ],
)
def test_longnet_rejects_wrong_shapes(shapes: tuple[tuple[int, ...], ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        model()(*(draw(*shape) for shape in shapes))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"nhead": 7}, r"^num_heads must divide embed_dim=16, got 7$"),
        ({"attention_dropout": -0.5}, r"^dropout_p must be in \[0, 1\), got -0.5$"),
        ({"cross_attention": "sparse"}, r"^cross_attention must be 'dilated' or 'dense', got 'sparse'$"),
        (
            {"cross_attention": "dense", "cross_is_causal": True},
            r"^cross_is_causal must be False with cross_attention='dense', which has no positions, got True$",
        ),
    ],
)
def test_longnet_rejects_wrong_options_and_accepts_their_twins(options: dict[str, object], match: str) -> None:
    sizes = {"d_model": 16, "nhead": 4, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 1, "dropout": 0.9}
    sizes |= {"pattern": PATTERN}
    LongNet(**sizes)
    with pytest.raises(ValueError, match=match):
        LongNet(**{**sizes, **options})
