"""The attention function in models of the library: results, padding, packed documents, compilation, and what it refuses."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexdilated import DilatedPattern, convert, dilated_attention, reference
from tests.doors.cases import KINDS
from tests.hub.transformers.models import (
    BATCH,
    DECODER,
    DECODERS,
    DENSE,
    RAGGED,
    TOKENS,
    build,
    dilated,
    draw_tokens,
    gpt_oss,
    inputs_of,
    make_dense,
    mask_of,
    run,
)
from tests.tolerances import EXACT, SINGLE

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from transformers.masking_utils import bidirectional_mask_function  # noqa: E402
from transformers.models.blip_2 import modeling_blip_2  # noqa: E402

from flexdilated.hub import transformers as hub  # noqa: E402
from flexdilated.hub.transformers.cache import CACHE  # noqa: E402


@pytest.mark.parametrize("name", [*DECODERS, "Bert", "ViT"])
def test_dense_pattern_equals_sdpa_with_its_gradients(name: str) -> None:
    model = build(name, DENSE).double()
    inputs = inputs_of(name, torch.float64)
    logits, gradients = run(model, **inputs)
    make_dense(model)
    expected, expected_gradients = run(model, **inputs)
    torch.testing.assert_close(logits, expected, **EXACT)
    assert set(gradients) == set(expected_gradients)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[parameter], **EXACT)
    model.set_attn_implementation("flexdilated")
    model.config.dilated_pattern = RAGGED
    assert (model(**inputs).logits - expected).abs().max() > 1e-4  # it was our attention that ran


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_the_definition_with_sinks_and_gradients(kind: str, is_causal: bool) -> None:
    pattern = KINDS[kind]
    module = build("Llama", pattern, num_key_value_heads=3).model.layers[0].self_attn
    leaves = [torch.randn(BATCH, heads, 29, 8, dtype=torch.float64, requires_grad=True) for heads in (6, 3, 3)]
    rows = [x.transpose(1, 2) for x in leaves]
    for sinks in (
        None,
        (2 * torch.randn(6, dtype=torch.float64)).requires_grad_(),
        torch.full((6,), -torch.inf, requires_grad=True),
    ):
        out, weights = hub.dilated_attention_forward(module, *leaves, None, scaling=0.3, is_causal=is_causal, s_aux=sinks)
        expected, _ = reference.dilated_attention(*rows, pattern, is_causal=is_causal, scale=0.3, sinks=sinks)
        assert weights is None
        inputs = leaves if sinks is None else [*leaves, sinks]
        found, wanted = (torch.autograd.grad(x.sin().sum(), inputs) for x in (out, expected))
        torch.testing.assert_close((out, *found), (expected, *wanted), **EXACT)


def test_dense_pattern_equals_the_librarys_own_sinks_with_their_gradients() -> None:
    model, tokens = gpt_oss(DENSE), draw_tokens()
    logits, gradients = run(model, input_ids=tokens, use_cache=False)
    model.config.dilated_pattern = None
    model.set_attn_implementation("eager")
    expected, expected_gradients = run(model, input_ids=tokens, use_cache=False)
    torch.testing.assert_close(logits, expected, **SINGLE)
    assert expected_gradients["model.layers.0.self_attn.sinks"].abs().min() > 1e-4
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, **SINGLE)


def test_causality_is_the_calls_then_the_modules_and_the_configs() -> None:
    q, k, v = (torch.randn(BATCH, heads, TOKENS, 8, dtype=torch.float64) for heads in (6, 2, 2))
    module = build("Llama").model.layers[0].self_attn
    attend = hub.dilated_attention_forward
    causal, full = (attend(module, q, k, v, None, is_causal=flag)[0] for flag in (True, False))
    torch.testing.assert_close(attend(module, q, k, v, None)[0], causal, **EXACT)
    module.is_causal = False
    torch.testing.assert_close(attend(module, q, k, v, None)[0], full, **EXACT)
    module.is_causal, module.config.is_causal = True, False
    torch.testing.assert_close(attend(module, q, k, v, None)[0], full, **EXACT)
    assert not torch.allclose(causal, full)


def test_dropout_is_that_of_dilated_attention_and_only_in_training() -> None:
    model = build("Llama", attention_dropout=0.5)
    module = model.model.layers[0].self_attn
    q, k, v = (torch.randn(BATCH, heads, TOKENS, 8) for heads in (6, 2, 2))
    torch.manual_seed(7)
    out, _ = hub.dilated_attention_forward(module, q, k, v, None, dropout=0.5)
    torch.manual_seed(7)
    expected = dilated_attention(*(x.transpose(1, 2) for x in (q, k, v)), RAGGED, is_causal=True, dropout_p=0.5)
    torch.testing.assert_close(out, expected, **SINGLE)
    tokens = draw_tokens()
    torch.testing.assert_close(model(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    model.train()
    assert not torch.allclose(model(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("side", ["left", "right", "among"])
@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_padded_rows_equal_the_documents_alone(name: str, side: str) -> None:
    model = build(name, position_embedding_type="none" if name == "Bert" else None).double()
    tokens, mask = draw_tokens(), mask_of([TOKENS, 17, 11], side)
    # As generate gives them: positions count from the first real token.
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, gradients = run(_Masked(model, mask), input_ids=tokens, attention_mask=mask, position_ids=position_ids)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float32).double()
    model.zero_grad()
    for b in range(BATCH):
        real = mask[b].bool()
        alone = model(input_ids=tokens[b, real][None]).logits[0]
        torch.testing.assert_close(logits[b, real], alone.detach(), **EXACT)
        (alone * weights[b, real]).sum().backward()
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(gradients["model." + parameter], value.grad, **EXACT)


class _Masked(nn.Module):
    """A model whose logits at padding are 0: they are nobody's business."""

    def __init__(self, model: nn.Module, mask: Tensor) -> None:
        super().__init__()
        self.model, self.mask = model, mask

    def forward(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        output.logits = output.logits * self.mask[..., None]
        return output


@pytest.mark.parametrize(("name", "how"), list(zip(DECODERS, ["position_ids", "cu_seq_lens", "both"])))
def test_packed_documents_equal_the_documents_alone(name: str, how: str) -> None:
    model, lengths = build(name).double(), [7, 13, 1, 6]
    tokens = draw_tokens(1, sum(lengths))
    options: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    if how != "position_ids":
        options |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders.clone(), "max_length_q": 13, "max_length_k": 13}
    if how == "cu_seq_lens":  # rotary positions are relative: they may run on
        del options["position_ids"]
    logits = model(tokens, **options, use_cache=False).logits
    expected = torch.cat([model(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
    # The library's rotary tables are float32.
    torch.testing.assert_close(logits, expected, **(SINGLE if how == "cu_seq_lens" else EXACT))


@pytest.mark.parametrize("ones", [None, torch.ones(BATCH, TOKENS, dtype=torch.int64), torch.ones(BATCH, TOKENS, dtype=torch.bool)])
@pytest.mark.parametrize("trained", [False, True])
def test_packed_documents_in_several_rows_equal_the_documents_alone(ones: Tensor | None, trained: bool) -> None:
    model, lengths = build("Llama").double(), [[9, 14], [23], [3, 4, 16]]
    tokens = draw_tokens()
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    with torch.set_grad_enabled(trained):
        logits = model(tokens, position_ids=position_ids, attention_mask=ones, use_cache=False).logits
    for b, row in enumerate(lengths):
        expected = torch.cat([model(part).logits for part in tokens[b : b + 1].split(row, dim=1)], dim=1)
        torch.testing.assert_close(logits[b : b + 1], expected, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "cache"), [("Llama", "none"), ("Qwen3", "none"), ("Llama", "bounded"), ("Qwen3", "dynamic"), ("Mistral", "static")]
)
def test_documents_that_the_library_does_not_notice_are_refused(name: str, cache: str) -> None:
    """It looks at positions only where there is neither a mask nor a cache."""
    model, tokens = build(name), draw_tokens(2)
    packed = torch.stack([torch.arange(TOKENS), torch.cat([torch.arange(9), torch.arange(14)])])
    ones = torch.ones(2, TOKENS, dtype=torch.int64)
    make: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "bounded": hub.DilatedCache,
        "dynamic": lambda: transformers.DynamicCache(config=model.config),
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=TOKENS + 5),
    }
    expected = model(tokens, use_cache=False).logits
    for mask in (None, ones, mask_of([TOKENS, 17], "left"), mask_of([TOKENS, 17], "right")):
        options = {"use_cache": cache != "none", "attention_mask": mask}
        if cache == "none" and (mask is None or bool(mask.all())):
            continue
        with pytest.raises(NotImplementedError, match=r"position_ids must rise by 1 with .* pass use_cache=False and no"):
            model(tokens, position_ids=packed, **{CACHE: make[cache]()}, **options)
        if cache == "bounded" and mask is not None and not mask[1, -1]:
            continue  # padding behind tokens
        rising = torch.arange(3, TOKENS + 3)[None] if mask is None else (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        logits = model(tokens, position_ids=rising, **{CACHE: make[cache]()}, **options).logits
        torch.testing.assert_close(logits[0], expected[0], **SINGLE)  # of relative positions


@pytest.mark.parametrize("how", ["whole", "left", "right", "packed", "dynamic", "static"])
def test_a_soft_cap_of_scores_is_the_librarys(how: str) -> None:
    """A dense pattern, and a cap that nearly all scores exceed, against the library's eager attention."""
    sizes = {**DECODER, "head_dim": 8, "sliding_window": 64, "attn_logit_softcapping": 0.5, "initializer_range": 0.3}
    config = transformers.Gemma2Config(**sizes)
    hub.set_pattern(config, DilatedPattern((64,), (1,)))
    model, tokens = transformers.Gemma2ForCausalLM(config).eval(), draw_tokens()
    mask = mask_of([TOKENS, 17, 5], how) if how in ("left", "right") else None
    options: dict[str, Any] = {"use_cache": False, "attention_mask": mask}
    if how == "packed":
        options["position_ids"] = torch.cat([torch.arange(9), torch.arange(14)])[None].expand(BATCH, -1)

    def outputs() -> Tensor:
        if how not in ("dynamic", "static"):
            logits = model(tokens, **options).logits
            return logits if mask is None else logits[mask.bool()]
        make = transformers.DynamicCache if how == "dynamic" else transformers.StaticCache
        cache = make(config=config) if how == "dynamic" else make(config=config, max_cache_len=TOKENS + 5)
        with torch.no_grad():
            logits = [model(part, **{CACHE: cache}).logits for part in tokens.split((11, 1, TOKENS - 12), dim=1)]
        return torch.cat(logits, dim=1)

    found = outputs()
    if how == "dynamic":
        with pytest.raises(NotImplementedError, match="softcap must be None with a DilatedCache, got a cap; use a dynamic"):
            model(tokens, **{CACHE: hub.DilatedCache()})
    config.dilated_pattern = None
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found, outputs(), **SINGLE)
    config.attn_logit_softcapping = None
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (found - outputs()).abs().max() > 1e-3


def test_compiled_model_equals_eager() -> None:
    torch.compiler.reset()
    model, tokens = build("Llama", num_hidden_layers=1), draw_tokens()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, expected_gradients = run(model, input_ids=tokens, use_cache=False)
    logits, gradients = run(compiled, input_ids=tokens, use_cache=False)
    torch.testing.assert_close(logits, expected, **SINGLE)
    for parameter, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients["_orig_mod." + parameter], gradient, **SINGLE)
    for side in ("left", "right"):
        mask = mask_of([TOKENS, 17, 11], side)
        with torch.no_grad():
            logits = compiled(tokens, attention_mask=mask, use_cache=False).logits
            expected = model(tokens, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **SINGLE)


@torch.no_grad()
def test_compiled_model_compares_the_borders_of_documents() -> None:
    torch.compiler.reset()
    model, tokens = build("Llama", num_hidden_layers=1), draw_tokens(1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    options = {"use_cache": False, "max_length_q": 15, "max_length_k": 15}
    first, second = torch.tensor([0, 9, TOKENS], dtype=torch.int32), torch.tensor([0, 8, TOKENS], dtype=torch.int32)
    expected = model(tokens, cu_seq_lens_q=first, cu_seq_lens_k=first, **options).logits
    logits = compiled(tokens, cu_seq_lens_q=first, cu_seq_lens_k=first.clone(), **options).logits
    torch.testing.assert_close(logits, expected, **SINGLE)
    with pytest.raises(RuntimeError, match="cu_seq_lens_q must have the borders of cu_seq_lens_k"):
        compiled(tokens, cu_seq_lens_q=first, cu_seq_lens_k=second, **options)


def test_compiled_model_refuses_positions_that_pack() -> None:
    torch.compiler.reset()
    compiled = torch.compile(build("Llama", num_hidden_layers=1), backend="eager")
    position_ids = torch.cat([torch.arange(9), torch.arange(14)])[None]
    with torch.no_grad(), pytest.raises(RuntimeError, match="position_ids must be None, or not pack documents"):
        compiled(draw_tokens(1), position_ids=position_ids, use_cache=False)


def test_missing_and_malformed_patterns_are_refused() -> None:
    model = build("Llama")
    for given, error, message in (
        (None, ValueError, r"config.dilated_pattern must be set .*got None in LlamaConfig; use .*set_pattern"),
        ([1, 2], TypeError, r"pattern must be a mapping, got \[1, 2\]"),
        ({"segment_lengths": [4]}, ValueError, "pattern keys must include"),
    ):
        model.config.dilated_pattern = given
        with pytest.raises(error, match=message):
            model(draw_tokens())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sliding_window", 4),
        ("sinks", torch.zeros(6)),
        ("indices", torch.zeros(1, dtype=torch.int64)),
        ("anything_new", 3),
        ("position_bias", torch.zeros(1, 6, TOKENS, TOKENS)),
        ("cache", transformers.DynamicCache()),
        ("block_table", torch.zeros(1)),
        ("output_attentions", True),
    ],
)
def test_options_that_change_the_attention_are_refused(name: str, value: Any) -> None:
    module = build("Llama").model.layers[0].self_attn
    q, k, v = (torch.randn(BATCH, heads, TOKENS, 8) for heads in (6, 2, 2))
    shown = "DynamicCache: dilated attention has no paged cache" if name == "cache" else ""
    with pytest.raises(NotImplementedError, match=f"{name} must be None with 'flexdilated' attention, got {shown}"):
        hub.dilated_attention_forward(module, q, k, v, None, **{name: value})
    off = False if name == "output_attentions" else None
    hub.dilated_attention_forward(module, q, k, v, None, **{name: off}, use_cache=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_vmap": True}, "mask functions of a model's own must be absent"),
        ({"mask_function": lambda b, h, q, k: (q >= k) | (k < 5)}, "mask functions must be causal or bidirectional"),
        ({"kv_length": TOKENS + 2, "kv_offset": 3}, "the cache must hold every token from the first, got a first key at 3"),
        (
            {"q_length": 1, "mask_function": bidirectional_mask_function, "attention_mask": torch.arange(TOKENS)[None] != 3},
            "attention_mask must be None .* got padding among 23 keys of 1 queries",
        ),
        ({"allow_is_causal_skip": False}, r"layers must leave their mask to the attention .* indexers do"),
    ],
    ids=["own", "other", "offset", "padding", "read"],
)
def test_masks_of_other_kinds_are_refused(options: dict[str, Any], message: str) -> None:
    sizes = {"batch_size": BATCH, "q_length": TOKENS, "kv_length": TOKENS}
    assert hub.dilated_attention_positions(**sizes) is None
    bidirectional = {"q_length": 1, "mask_function": bidirectional_mask_function}
    for mask in (None, torch.ones(BATCH, TOKENS, dtype=torch.bool)):
        assert hub.dilated_attention_positions(**sizes | bidirectional, attention_mask=mask) is None
    if "allow_is_causal_skip" in options and transformers.__version__.startswith("5.12"):
        assert hub.dilated_attention_positions(**sizes, **options) is None  # there static caches say it
        return
    options = {name: x.expand(BATCH, -1) if name == "attention_mask" else x for name, x in options.items()}
    with pytest.raises(NotImplementedError, match=message):
        hub.dilated_attention_positions(**sizes | options)


def test_an_offset_is_taken_from_a_dilated_cache_alone() -> None:
    mask = hub.dilated_attention_positions(BATCH, TOKENS, TOKENS, kv_offset=3)
    q, k, v = (torch.randn(BATCH, heads, TOKENS, 8) for heads in (6, 2, 2))
    with pytest.raises(NotImplementedError, match="the cache must hold every token from the first, or be a DilatedCache"):
        hub.dilated_attention_forward(build("Llama").model.layers[0].self_attn, q, k, v, mask)


def test_masks_that_are_no_padding_masks_are_refused() -> None:
    model, tokens = build("Llama"), draw_tokens()
    square = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    with pytest.raises(NotImplementedError, match=r"attention_mask must be a \(B, N\) padding mask .*got torch.bool of shape"):
        model(tokens, attention_mask=square, use_cache=False)
    module = model.model.layers[0].self_attn
    q, k, v = torch.randn(BATCH, 6, 2, 8), torch.randn(BATCH, 2, TOKENS, 8), torch.randn(BATCH, 2, TOKENS, 8)
    for given in (torch.ones(BATCH, 1, 2, TOKENS), torch.ones(BATCH, 1, 1, TOKENS)):  # as some make them, whole or for all queries
        with pytest.raises(NotImplementedError, match=r"attention_mask must be a \(B, N\) padding mask .*got torch.int64 of shape"):
            hub.dilated_attention_forward(module, q, k, v, given.long())
    for columns in (TOKENS - 5, TOKENS + 2):
        with pytest.raises(ValueError, match=f"attention_mask must have a column for each of the 23 tokens, got {columns}"):
            model(tokens, attention_mask=torch.ones(BATCH, columns), use_cache=False)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(B, N\) with 'flexdilated' .*got \(3, 23, 23\)"):
        build("Bert")(tokens, attention_mask=torch.ones(BATCH, TOKENS, TOKENS))
    with pytest.raises(NotImplementedError, match="attention_mask must say where 2 queries stand among 23 keys, got None"):
        hub.dilated_attention_forward(module, q, k, v, None)
    positions = torch.arange(TOKENS + 2).expand(BATCH, 1, 1, -1)
    with pytest.raises(NotImplementedError, match="unless is_causal=True, got 2 queries and 23 keys"):
        hub.dilated_attention_forward(module, q, k, v, positions, is_causal=False)
    borders = torch.tensor([0, 2])
    with pytest.raises(ValueError, match="cu_seq_lens_q must come without padding"):
        hub.dilated_attention_forward(module, q[:1], k[:1], v[:1], positions[:1], cu_seq_lens_q=borders, cu_seq_lens_k=borders)


def test_cross_attention_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"config must have no cross-attention .*got BertConfig with it"):
        build("Bert", is_decoder=True, add_cross_attention=True)
    model = build("Bert")
    model.bert.encoder.layer[0].attention.self.is_cross_attention = True
    with pytest.raises(NotImplementedError, match=r"layers must have no cross-attention .*got BertSelfAttention"):
        model(draw_tokens())


@pytest.mark.parametrize("compiled", [False, True])
def test_keys_of_as_many_other_tokens_are_refused(compiled: bool) -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 3}
    config = transformers.Blip2QFormerConfig(**sizes, encoder_hidden_size=20, **dilated(RAGGED))
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(modeling_blip_2.Blip2QFormerMultiHeadAttention):
        pytest.skip("this version does not ask the library's interface in Blip2QFormer")
    message = "layers must have no cross-attention .*got Blip2QFormerMultiHeadAttention"

    def call() -> None:
        model = transformers.Blip2QFormerModel(config).eval()
        model = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        model(query_embeds=torch.randn(2, TOKENS, 24), encoder_hidden_states=torch.randn(2, TOKENS, 20))

    errors = (NotImplementedError, torch._dynamo.exc.Unsupported)  # the compiler wraps the error
    with torch.no_grad(), pytest.raises(errors, match=message):
        call()


def test_layers_that_take_other_tokens_run_where_they_say_that_they_have_none() -> None:
    class Layer(nn.Module):
        def __init__(self, **said: Any) -> None:
            super().__init__()
            self.config = build("Bert").config
            for name, value in said.items():
                setattr(self, name, value)

        def forward(self, hidden_states: Tensor, key_value_states: Tensor | None = None) -> Tensor:
            x = hidden_states.unflatten(-1, (6, -1)).transpose(1, 2)
            return hub.dilated_attention_forward(self, x, x, x, None)[0]

    x = torch.randn(2, TOKENS, 24)
    # As BART builds the attention of its encoder, of a decoder alone (BioGPT), and across.
    for said in ({"is_decoder": False, "is_causal": False}, {"is_decoder": True, "is_causal": True}):
        assert Layer(**said)(x).isfinite().all()
    across = {"is_decoder": True, "is_causal": False}
    assert Layer(**across, is_cross_attention=False)(x).isfinite().all()
    for said in (across, {"is_cross_attention": True, "is_causal": False}):
        with pytest.raises(NotImplementedError, match=r"layers must have no cross-attention .*got Layer"):
            Layer(**said)(x)


@pytest.mark.parametrize("dims", [(8, 5), (5, 8)])
def test_values_may_be_wider_or_narrower_than_keys(dims: tuple[int, int]) -> None:
    module = build("Llama", RAGGED).model.layers[0].self_attn
    q, k = (torch.randn(BATCH, heads, TOKENS, dims[0], dtype=torch.float64, requires_grad=True) for heads in (6, 2))
    v = torch.randn(BATCH, 2, TOKENS, dims[1], dtype=torch.float64, requires_grad=True)
    out, _ = hub.dilated_attention_forward(module, q, k, v, None)
    rows = [x.transpose(1, 2) for x in (q, k)]
    columns = (column.transpose(1, 2)[..., None].expand(rows[1].shape) for column in v.unbind(-1))
    columns = (reference.dilated_attention(*rows, column, RAGGED, is_causal=True)[0][..., :1] for column in columns)
    expected = torch.cat(list(columns), dim=-1)
    weights = torch.randn_like(expected)
    torch.testing.assert_close(out, expected, **EXACT)
    actual, wanted = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(actual, wanted, **EXACT)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    mask[0, :4] = False
    last = hub.dilated_attention_positions(BATCH, 3, TOKENS, q_offset=TOKENS - 3, attention_mask=mask)
    whole = hub.dilated_attention_positions(BATCH, TOKENS, TOKENS, attention_mask=mask)
    decoded, _ = hub.dilated_attention_forward(module, q[:, :, -3:], k, v, last)
    padded, _ = hub.dilated_attention_forward(module, q, k, v, whole)
    torch.testing.assert_close(decoded, padded[:, -3:], **EXACT)


def test_borders_that_differ_or_lack_their_pair_are_refused() -> None:
    model, tokens = build("Llama"), draw_tokens(1)
    first, second = torch.tensor([0, 9, 23]), torch.tensor([0, 8, 23])
    position_ids = torch.cat([torch.arange(9), torch.arange(14)])[None]
    options = {"use_cache": False, "max_length_q": 14, "max_length_k": 14}
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k must come together"):
        model(tokens, cu_seq_lens_q=first, **options)
    with pytest.raises(ValueError, match=r"borders of cu_seq_lens_k=\[0, 8, 23\], got \[0, 9, 23\]"):
        model(tokens, cu_seq_lens_q=first, cu_seq_lens_k=second, **options)
    with pytest.raises(ValueError, match=r"borders of position_ids=\[0, 9, 23\], got \[0, 8, 23\]"):
        model(tokens, cu_seq_lens_q=second, cu_seq_lens_k=second, position_ids=position_ids, **options)
    with pytest.raises(ValueError, match="cu_seq_lens_q must come with one row of tokens, got batch size 3"):
        model(draw_tokens(), cu_seq_lens_q=first, cu_seq_lens_k=first, **options)


def test_convert_says_how_models_of_the_library_take_a_pattern() -> None:
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 24}
    model = transformers.BertModel(transformers.BertConfig(**sizes))
    with pytest.raises(ValueError, match=r"got none but .*BertAttention; models of the transformers library take a pattern by "):
        convert(model, RAGGED)
