"""Names of earlier packages: what they compute, every argument's effect or warning, their weights, and the docs' table."""

import copy
import inspect
import math
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexdilated
from flexdilated import DilatedPattern, compat, dilated_attention, reference
from flexdilated.compat import ABSENT, ARGUMENTS
from flexdilated.ordering import grid_order, reorder, restore
from tests.tolerances import EXACT

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 23, 5, 3
EMBED = HEADS * HEAD_DIM
LENGTHS, RATES = [7, 13], [2, 3]
GROUPED = DilatedPattern.grouped(LENGTHS, RATES)
GRID = (5, 7)
MIGRATION = Path(__file__).parents[1] / "docs" / "migration.md"

BARE = (
    "DilatedAttention",
    "ImprovedDilatedAttention",
    "RingDilatedAttention",
    "RingDilatedAttentionHybrid",
    "RingDilatedAttentionHybridFixed",
    "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV3",
)
LAYERS = (
    "MultiheadDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "RingMultiheadDilatedAttention",
    "RingMultiheadDilatedAttentionHybrid",
    "RingAdvancedDistributedDilatedAttention",
)
HILBERT = "RingDilatedAttentionHybridHilbert"
TRANSFORMERS = ("DilatedTransformerEncoderLayer", "DilatedTransformerDecoderLayer", "LongNet")
FACTORIES = ("create_dilated_attention", "create_multihead_dilated_attention")


def draw(num_tokens: int = TOKENS) -> tuple[Tensor, ...]:
    return tuple(torch.randn(BATCH, num_tokens, HEADS, HEAD_DIM, dtype=torch.float64, requires_grad=True) for _ in range(3))


def build(name: str, **options: object) -> nn.Module:
    """A module of any of the names, with random biases and gains."""
    if name in LAYERS:
        options = {"embed_dim": EMBED, "num_heads": HEADS, "dtype": torch.float64, **options}
    elif name == HILBERT:
        options = {"grid": GRID, **options}
    module = getattr(compat, name)(**{"segment_lengths": LENGTHS, "dilation_rates": RATES, **options})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def arguments(name: str) -> set[str]:
    return set(inspect.signature(getattr(compat, name)).parameters)


def inputs(name: str) -> tuple[Tensor, ...]:
    if name in LAYERS:
        return tuple(x.detach().flatten(2) for x in draw())
    return draw(GRID[0] * GRID[1] if name == HILBERT else TOKENS)


def only(result: object) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


# -- what they compute ------------------------------------------------------------------------------------------------------


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


def test_groups_by_hand() -> None:
    """Five heads in groups of three and two, each its own branch and offset, over plain softmax; the rest is 0, nothing divided."""
    q, k, v = draw()
    out = build("DilatedAttention")(q, k, v)
    expected = torch.zeros_like(out)
    for heads, length, rate, offset in ((slice(0, 3), 7, 2, 0), (slice(3, 5), 13, 3, 1)):
        for start in range(0, TOKENS, length):
            rows = slice(start + offset, min(start + length, TOKENS), rate)
            part = (x[:, rows, heads].transpose(1, 2) for x in (q, k, v))
            expected[:, rows, heads] = F.scaled_dot_product_attention(*part).transpose(1, 2)
    torch.testing.assert_close(out, expected, **EXACT)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_its_formula_over_the_definition(name: str, is_causal: bool) -> None:
    layer = build(name)
    query, key, value = inputs(name)

    def project(projection: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, projection.weight, projection.bias).unflatten(-1, (HEADS, HEAD_DIM))

    q, k, v = project(layer.q_proj, query), project(layer.k_proj, key), project(layer.v_proj, value)
    out = reference.dilated_attention(q, k, v, GROUPED, is_causal=is_causal)[0].flatten(2)
    if name != "RingMultiheadDilatedAttentionHybrid":
        out = F.layer_norm(out, (EMBED,), layer.inner_attn_ln.weight, layer.inner_attn_ln.bias)
    expected = F.linear(out, layer.out_proj.weight, layer.out_proj.bias)
    actual, weights = layer(query, key, value, is_causal=is_causal)
    assert weights is None
    torch.testing.assert_close(actual, expected, **EXACT)
    parameters = list(layer.parameters())
    for a, b in zip(torch.autograd.grad(actual.sum(), parameters), torch.autograd.grad(expected.sum(), parameters)):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("name", [name for name in LAYERS if not name.endswith("Hybrid")])
def test_layer_takes_causality_in_fourth_place_and_fills_in_keys_and_values(name: str) -> None:
    layer, (x, y, _) = build(name), inputs(name)
    assert torch.equal(layer(x, y, y, True)[0], layer(x, y, y, is_causal=True)[0])
    assert torch.equal(layer(x)[0], layer(x, x, x)[0])
    assert torch.equal(layer(x, y)[0], layer(x, y, y)[0])
    with pytest.raises(
        TypeError, match=r"^is_causal must be a bool, got Tensor; masks go to flexdilated.MultiheadDilatedAttention$"
    ):
        layer(x, x, x, torch.zeros(BATCH, TOKENS, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"^from_torch must be called on flexdilated.MultiheadDilatedAttention"):
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


# -- the Hilbert curve ----------------------------------------------------------------------------------------------------------


def test_hilbert_reorders_all_three_and_puts_outputs_back() -> None:
    q, k, v = draw(GRID[0] * GRID[1])
    order = grid_order(GRID)
    expected = restore(reference.dilated_attention(*(reorder(x, order) for x in (q, k, v)), GROUPED)[0], order)
    actual = build(HILBERT)(q, k, v)
    torch.testing.assert_close(actual, expected, **EXACT)
    dout = torch.randn_like(actual)
    for a, b in zip(torch.autograd.grad(actual, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout)):
        torch.testing.assert_close(a, b, **EXACT)


def test_hilbert_switched_off_takes_any_length_and_causality() -> None:
    module, (q, k, v) = build(HILBERT, use_hilbert=False, grid=None), draw()
    assert torch.equal(module(q, k, v, True), dilated_attention(q, k, v, GROUPED, is_causal=True))
    with pytest.raises(ValueError, match=r"^grid must be None when use_hilbert=False, got \(5, 7\)$"):
        build(HILBERT, use_hilbert=False)


def test_hilbert_rejects_text_causality_and_another_number_of_tokens() -> None:
    with pytest.raises(ValueError, match=r"^grid must be \(height, width\), got None; 1-D text is already in the order"):
        build(HILBERT, grid=None)
    with pytest.raises(
        NotImplementedError, match=r"^is_causal must be False when use_hilbert=True, got True: those before a token"
    ):
        build(HILBERT)(*draw(35), True)
    with pytest.raises(ValueError, match=r"^query must have shape \(b, 35, h, d\) under grid=\(5, 7\), got \(2, 23, 5, 3\)$"):
        build(HILBERT)(*draw())


# -- transformer layers ----------------------------------------------------------------------------------------------------------


def attend(layer: nn.Module, query: Tensor, memory: Tensor, is_causal: bool) -> Tensor:
    """The layer of the port over the definition, with or without its LayerNorm."""
    q, k, v = (
        F.linear(x, p.weight, p.bias).unflatten(-1, (HEADS, HEAD_DIM))
        for x, p in ((query, layer.q_proj), (memory, layer.k_proj), (memory, layer.v_proj))
    )
    out = reference.dilated_attention(q, k, v, GROUPED, is_causal=is_causal)[0].flatten(2)
    norm = layer.inner_attn_ln
    if isinstance(norm, nn.LayerNorm):
        out = F.layer_norm(out, (EMBED,), norm.weight, norm.bias, norm.eps)
    return F.linear(out, layer.out_proj.weight, layer.out_proj.bias)


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


@pytest.mark.parametrize(("activation", "function"), [("relu", F.relu), ("gelu", F.gelu), (torch.tanh, torch.tanh)])
def test_transformer_layers_equal_their_formula(activation: object, function: object) -> None:
    options = {"dim_feedforward": 11, "activation": activation, "layer_norm_eps": 0.1, "dtype": torch.float64}
    encoder = randomised(compat.DilatedTransformerEncoderLayer(EMBED, HEADS, LENGTHS, RATES, **options)).eval()
    decoder = randomised(compat.DilatedTransformerDecoderLayer(EMBED, HEADS, LENGTHS, RATES, **options)).eval()
    src, tgt = (torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64) for _ in range(2))
    for is_causal in (False, True):
        h = encoder.norm1(src)
        x = src + attend(encoder.self_attn, h, h, is_causal)
        expected = x + encoder.linear2(encoder.norm3(function(encoder.linear1(encoder.norm2(x)))))
        torch.testing.assert_close(encoder(src, is_causal), expected, **EXACT)

        h = decoder.norm1(tgt)
        x = tgt + attend(decoder.self_attn, h, h, is_causal)
        x = x + attend(decoder.multihead_attn, decoder.norm2(x), src, not is_causal)
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


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("LongNet", {"activation": "tanh"}, ValueError, "activation must be one of ('relu', 'gelu') or a function, got 'tanh'"),
        ("LongNet", {"activation": 3}, TypeError, "activation must be one of ('relu', 'gelu') or a function, got 3"),
        ("LongNet", {"num_encoder_layers": 0}, ValueError, "num_encoder_layers must be at least 1, got 0"),
        ("LongNet", {"num_decoder_layers": 0}, ValueError, "num_decoder_layers must be at least 1, got 0"),
        ("LongNet", {"dim_feedforward": 0}, ValueError, "dim_feedforward must be at least 1, got 0"),
        (
            "create_dilated_attention",
            {"attention_type": "fast"},
            ValueError,
            "attention_type must be one of ('auto', 'standard', 'improved', 'ring'), got 'fast'",
        ),
        ("create_dilated_attention", {"ring_size": 1}, ValueError, "ring_size must be None unless attention_type='ring', got 1"),
        (
            "create_multihead_dilated_attention",
            {"use_checkpointing": True},
            ValueError,
            "use_checkpointing must be False unless attention_type='ring', got True",
        ),
    ],
)
def test_new_names_reject_wrong_arguments(name: str, options: dict[str, object], error: type[Exception], message: str) -> None:
    sizes = {"d_model": EMBED, "nhead": HEADS} if name == "LongNet" else {}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        getattr(compat, name)(**{"segment_lengths": LENGTHS, "dilation_rates": RATES, **sizes, **options})


# -- factories and absent names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "standard", "improved", "ring"])
def test_factories_build_the_classes_with_all_their_arguments(kind: str) -> None:
    ring = {"ring_size": 1, "use_checkpointing": True} if kind == "ring" else {}
    attention = compat.create_dilated_attention(kind, LENGTHS, RATES, dropout=0.25, **ring)
    assert type(attention) is (compat.RingDilatedAttention if kind == "ring" else compat.ImprovedDilatedAttention)
    assert (attention.attention.pattern, attention.attention.dropout_p) == (GROUPED, 0.25)
    options = {"bias": False, "layer_norm_eps": 0.1, "dtype": torch.float64, "device": "meta", "dropout": 0.25}
    layer = compat.create_multihead_dilated_attention(kind, EMBED, HEADS, LENGTHS, RATES, **options, **ring)
    assert type(layer) is (compat.RingMultiheadDilatedAttention if kind == "ring" else compat.ImprovedMultiheadDilatedAttention)
    assert (layer.attention.pattern, layer.attention.dropout_p) == (GROUPED, 0.25)
    assert (layer.q_proj.bias, layer.q_proj.weight.dtype, layer.inner_attn_ln.eps) == (None, torch.float64, 0.1)
    assert layer.q_proj.weight.is_meta
    assert attention.use_checkpointing == layer.use_checkpointing == (kind == "ring")
    assert compat.create_dilated_attention(kind).attention.pattern == DilatedPattern.grouped((2048, 4096, 8192), (1, 2, 4))


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_warn_of_what_has_no_effect_and_refuse_what_they_do_not_know(name: str) -> None:
    factory = getattr(compat, name)
    for kind in ("auto", "ring"):
        for argument in sorted(arguments(name) & set(GIVEN)):
            silent = ARGUMENTS[argument].warns == "without parameters" and "multihead" in name
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                factory(kind, segment_lengths=LENGTHS, dilation_rates=RATES, **{argument: GIVEN[argument]})
            assert [str(warning.message) for warning in caught] == (
                [] if silent else [f"{argument} has no effect: {ARGUMENTS[argument].meaning}"]
            )
            assert all(warning.filename == __file__ for warning in caught)
    for kind, use in (("distributed", r"DilatedAttention\(mesh="), ("block_sparse_ring", r"dilated_attention\(mask_mod=")):
        with pytest.raises(NotImplementedError, match=rf"^attention_type must be one of .*, got '{kind}'; .*{use}"):
            factory(kind)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sparsity_ratio'"):
        factory(sparsity_ratio=0.9)


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_absent_name_says_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=f"^{name} is not in flexdilated.compat; use {re.escape(ABSENT[name])}$"):
        exec(f"from flexdilated.compat import {name}")


def test_what_absent_names_point_at_exists() -> None:
    for path in set(re.findall(r"flexdilated\.(\w+)", " ".join(ABSENT.values()))):
        assert hasattr(flexdilated, path)
    assert not set(ABSENT) & set(compat.__all__)
    with pytest.raises(AttributeError, match=r"^module 'flexdilated.compat' has no attribute 'nothing'$"):
        compat.nothing  # noqa: B018


# -- every argument -------------------------------------------------------------------------------------------------------------

GIVEN = {
    "op": object(),
    "use_flash_attention": True,
    "use_tf32": False,
    "enable_memory_pool": True,
    "lightweight_pool": False,
    "enable_profiling": False,
    "use_pattern_cache": True,
    "block_size": 1024,
    "hilbert_chunk_size": 4096,
    "device": "cpu",
    "dtype": torch.float32,
}


def test_every_argument_of_every_name_is_in_the_table_and_the_other_way_round() -> None:
    names = (*BARE, *LAYERS, HILBERT, *TRANSFORMERS, *FACTORIES)
    assert sorted(names) == sorted(set(compat.__all__) - {"ARGUMENTS", "Argument"})
    taken = set().union(*(arguments(name) for name in names)) - {"embed_dim", "num_heads"}
    assert taken == set(ARGUMENTS)
    assert set(GIVEN) == {name for name, argument in ARGUMENTS.items() if argument.warns != "never"}


@pytest.mark.parametrize("name", [*BARE, *LAYERS, HILBERT])
def test_arguments_without_effect_warn_once_by_name_and_others_never(name: str) -> None:
    build(name)  # warnings are errors here
    for argument in sorted(arguments(name) & set(GIVEN)):
        silent = ARGUMENTS[argument].warns == "without parameters" and name in LAYERS
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build(name, **{argument: GIVEN[argument]})
        expected = [] if silent else [f"{argument} has no effect: {ARGUMENTS[argument].meaning}"]
        assert [str(warning.message) for warning in caught] == expected
        assert all(warning.filename == __file__ for warning in caught)


def test_a_loop_that_builds_layers_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            compat.RingDilatedAttention(LENGTHS, RATES, use_tf32=True, block_size=7)
    assert len(caught) == 2


@pytest.mark.parametrize("name", [name for name in (*BARE, HILBERT) if name != "ImprovedDilatedAttention"])
def test_softmax_scale_multiplies_the_scores(name: str) -> None:
    q, k, v = inputs(name)
    plain = build(name)(q * 0.7 * HEAD_DIM**0.5, k, v)
    torch.testing.assert_close(build(name, softmax_scale=0.7)(q, k, v), plain, **EXACT)


@pytest.mark.parametrize("name", [*BARE, *LAYERS, HILBERT])
def test_dropout_drops_weights_in_training_only(name: str) -> None:
    argument = "attention_dropout" if "attention_dropout" in arguments(name) else "dropout"
    module, x = build(name, **{argument: 0.4}).eval(), inputs(name)
    with torch.no_grad():
        plain = only(module(*x))
        assert torch.equal(only(module(*x)), plain)
        assert not torch.allclose(only(module.train()(*x)), plain)
    with pytest.raises(ValueError, match=r"^dropout_p must be in \[0, 1\), got 1.0$"):
        build(name, **{argument: 1.0})


@pytest.mark.parametrize("name", [name for name in (*BARE, *LAYERS, HILBERT) if "ring_size" in arguments(name)])
def test_ring_of_one_process(name: str) -> None:
    """More in tests/distributed/test_compat.py."""
    x = inputs(name)
    torch.manual_seed(3)
    plain = only(build(name)(*x))
    torch.manual_seed(3)
    assert torch.equal(only(build(name, ring_size=1)(*x)), plain)
    for size in (2, 0):
        with pytest.raises(
            ValueError, match=rf"^ring_size must be None or 1 where torch.distributed is not initialised, got {size}"
        ):
            build(name, ring_size=size)
    for size in (True, 2.0):
        with pytest.raises(TypeError, match=rf"^ring_size must be an integer or None, got {size}$"):
            build(name, ring_size=size)
    with pytest.raises(TypeError, match=r"^group must be a ProcessGroup that holds this rank, or None, got 'nccl'$"):
        build(name, group="nccl")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", [name for name in (*BARE, *LAYERS, HILBERT) if "use_checkpointing" in arguments(name)])
def test_checkpointing_keeps_the_inputs_alone_and_computes_twice(name: str, dropout: float) -> None:
    x = [y.detach().requires_grad_() for y in inputs(name)]
    module = build(name, dropout=dropout)
    results, saved, calls = [], [], []
    module.attention.register_forward_pre_hook(lambda *_: calls.append(None))
    for use_checkpointing in (False, True):
        module.use_checkpointing = use_checkpointing
        assert build(name, use_checkpointing=use_checkpointing).use_checkpointing is use_checkpointing
        torch.manual_seed(5)
        kept: list[Tensor] = []
        calls.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda y, kept=kept: kept.append(y) or y, lambda y: y):
            out = only(module(*x))
        gradients = torch.autograd.grad(out.square().sum(), (*x, *module.parameters()))
        assert len(calls) == 1 + use_checkpointing
        results.append((out, *gradients))
        saved.append([y for y in kept if y.is_floating_point()])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, **EXACT)
    assert len(saved[1]) == 3 < len(saved[0])


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


@pytest.mark.parametrize("name", ["MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention"])
def test_rates_come_before_lengths_where_they_did(name: str) -> None:
    layer = getattr(compat, name)(EMBED, HEADS, RATES, LENGTHS, 0.25, False)
    assert layer.attention.pattern == GROUPED
    assert layer.attention.dropout_p == 0.25
    assert layer.q_proj.bias is None


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("Ring")])
def test_lengths_come_before_rates_where_they_did(name: str) -> None:
    layer = getattr(compat, name)(EMBED, HEADS, LENGTHS, RATES, 0.25, False)
    assert layer.attention.pattern == GROUPED
    assert layer.attention.dropout_p == 0.25
    assert layer.q_proj.bias is None


def test_positional_arguments_of_the_popular_port() -> None:
    module = compat.DilatedAttention(LENGTHS, RATES, 0.7, 0.25)
    assert (module.attention.scale, module.attention.dropout_p) == (0.7, 0.25)
    assert compat.ImprovedDilatedAttention(LENGTHS, RATES, 0.25).attention.dropout_p == 0.25
    assert compat.RingDilatedAttention(LENGTHS, RATES, 0.25).attention.dropout_p == 0.25


@pytest.mark.parametrize("name", [*BARE, *LAYERS, HILBERT])
def test_wrong_patterns_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=r"^dilation_rates must hold one rate per segment length=2, got \(1, 2, 3\)$"):
        build(name, segment_lengths=[4, 8], dilation_rates=[1, 2, 3])


# -- weights and copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*BARE, HILBERT])
def test_attention_has_no_state(name: str) -> None:
    assert not build(name).state_dict()


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


@pytest.mark.parametrize("name", [*BARE, *LAYERS, HILBERT])
def test_modules_are_pickled_and_copied(name: str) -> None:
    module, x = build(name).eval(), inputs(name)
    for twin in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(only(twin(*x)), only(module(*x)))
        if name in LAYERS:
            twin.load_state_dict({key.replace("inner_attn_ln", "norm"): y for key, y in module.state_dict().items()})


# -- the docs ---------------------------------------------------------------------------------------------------------------------


def test_table_in_the_docs_is_the_table_in_the_module() -> None:
    section = MIGRATION.read_text().split("| argument |")[1].split("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in section.splitlines()[2:]]
    assert rows == [(f"`{name}`", argument.meaning, argument.warns) for name, argument in ARGUMENTS.items()]


def test_docs_name_every_class() -> None:
    assert set(re.findall(r"`(\w+)`", MIGRATION.read_text())) >= set(compat.__all__) - {"ARGUMENTS", "Argument"}


def test_absent_names_in_the_docs_are_those_of_the_module() -> None:
    section = MIGRATION.read_text().split("| use instead |")[1].split("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in section.splitlines()[2:]]
    assert rows == [(f"`{name}`", use) for name, use in ABSENT.items()]


def test_examples_in_the_docs_run() -> None:
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", MIGRATION.read_text(), flags=re.DOTALL)
    assert examples
    for block in examples:
        exec(compile(block, str(MIGRATION), "exec"), names)


def test_import_of_the_package_does_not_import_these_names() -> None:
    code = "import sys, flexdilated; print([m for m in ('compat', 'ordering') if f'flexdilated.{m}' in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
