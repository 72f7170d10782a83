import dataclasses
import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM, dilated_attention, reference
from tests.tolerances import EXACT, SINGLE, assert_twice_naive

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from transformers.cache_utils import DynamicCache, StaticCache  # noqa: E402

from flexdilated.hub import transformers as hub  # noqa: E402

VOCAB, TOKENS, BATCH = 31, 23, 3
DENSE = DilatedPattern((64,), (1,))
RAGGED = DilatedPattern((5, 13), (1, 3))
INTERLEAVED = DilatedPattern((4, 11, 32), (1, 2, 4), offsets="interleaved")
GROUPED = DilatedPattern.grouped((5, 11), (1, 2))
PATTERNS = [RAGGED, INTERLEAVED, GROUPED]
TEXT = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6}
DECODER = {
    **TEXT,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
DECODERS = ["Llama", "Qwen3", "Mistral"]


def build(name: str, pattern: DilatedPattern | None = RAGGED, **options: Any) -> Any:
    """A tiny random model of the library, in evaluation mode, with dilated attention."""
    sizes: dict[str, Any]
    if name == "Bert":
        sizes, kind = {**TEXT, "max_position_embeddings": 64}, "ForMaskedLM"
    elif name == "ViT":
        sizes = {"hidden_size": 48, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6}
        sizes, kind = {**sizes, "image_size": 20, "patch_size": 4, "num_labels": 5}, "ForImageClassification"
    else:
        sizes, kind = {**DECODER, "sliding_window": None} if name != "Llama" else dict(DECODER), "ForCausalLM"
        sizes = {**sizes, "head_dim": 8} if name == "Qwen3" else sizes
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    config.dilated_pattern = None if pattern is None else pattern.to_dict()
    config._attn_implementation = "flexdilated"
    return getattr(transformers, name + kind)(config).eval()


def make_dense(model: Any) -> None:
    model.config.dilated_pattern = None
    model.set_attn_implementation("sdpa")


def draw_tokens(batch: int = BATCH, num_tokens: int = TOKENS) -> Tensor:
    return torch.randint(2, VOCAB, (batch, num_tokens))


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 20, 20, dtype=dtype)} if name == "ViT" else {"input_ids": draw_tokens()}


def run(model: nn.Module, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of a weighted sum of them."""
    model.zero_grad()
    logits = model(**inputs).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)).to(logits.dtype)
    (logits * weights).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mask_of(lengths: list[int], side: str) -> Tensor:
    rows = [[1] * n + [0] * (TOKENS - n) for n in lengths]
    return torch.tensor([row if side == "right" else row[::-1] for row in rows])


# -- the attention interface ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", [*DECODERS, "Bert", "ViT"])
def test_dense_pattern_in_bfloat16_errs_at_most_twice_sdpa(name: str) -> None:
    model = build(name, DENSE).bfloat16()
    inputs = inputs_of(name, torch.bfloat16)
    with torch.no_grad():
        logits = model(**inputs).logits
        make_dense(model)
        naive = model(**inputs).logits
        model = model.double()
        expected = model(**{key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}).logits
    assert_twice_naive(logits, naive, expected)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_equals_the_reference(pattern: DilatedPattern, is_causal: bool) -> None:
    model = build("Llama", pattern)
    module = model.model.layers[0].self_attn
    q, k, v = (torch.randn(BATCH, heads, TOKENS, 8, dtype=torch.float64) for heads in (6, 2, 2))
    out, weights = hub.dilated_attention_forward(module, q, k, v, None, scaling=0.3, is_causal=is_causal)
    expected, _ = reference.dilated_attention(*(x.transpose(1, 2) for x in (q, k, v)), pattern, is_causal=is_causal, scale=0.3)
    assert weights is None
    torch.testing.assert_close(out, expected, **EXACT)


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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_padded_rows_equal_the_documents_alone(name: str, side: str) -> None:
    model = build(name, position_embedding_type="none" if name == "Bert" else None).double()
    lengths = [TOKENS, 17, 11]
    tokens, mask = draw_tokens(), mask_of(lengths, side)
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


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "both"])
@pytest.mark.parametrize("name", DECODERS)
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


def test_packed_documents_in_several_rows_equal_the_documents_alone() -> None:
    model, lengths = build("Llama").double(), [[9, 14], [23], [3, 4, 16]]
    tokens = draw_tokens()
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    logits = model(tokens, position_ids=position_ids, use_cache=False).logits
    for b, row in enumerate(lengths):
        expected = torch.cat([model(part).logits for part in tokens[b : b + 1].split(row, dim=1)], dim=1)
        torch.testing.assert_close(logits[b : b + 1], expected, **EXACT)


@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    model = build(name).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    tokens, mask = draw_tokens(), mask_of([TOKENS, 17, 11], "right")
    logits, gradients = run(model, input_ids=tokens, attention_mask=mask)
    later_name = "activation_checkpointing_enable"  # the other is deprecated where this exists
    getattr(model, later_name if hasattr(model, later_name) else "gradient_checkpointing_enable")()
    again, checkpointed = run(model, input_ids=tokens, attention_mask=mask)
    torch.testing.assert_close(again, logits, **SINGLE)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(checkpointed[parameter], gradient, **SINGLE)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_compiled_model_equals_eager(side: str) -> None:
    torch.compiler.reset()
    model, tokens = build("Llama", num_hidden_layers=1), draw_tokens()
    mask = None if side == "none" else mask_of([TOKENS, 17, 11], side)
    expected, expected_gradients = run(model, input_ids=tokens, attention_mask=mask, use_cache=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits, gradients = run(compiled, input_ids=tokens, attention_mask=mask, use_cache=False)
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(logits[real], expected[real], **SINGLE)
    for parameter, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients["_orig_mod." + parameter], gradient, **SINGLE)


@torch.no_grad()
def test_compiled_inference_equals_eager() -> None:
    torch.compiler.reset()
    model, tokens, mask = build("Llama", num_hidden_layers=1), draw_tokens(), mask_of([TOKENS, 17, 11], "left")
    expected = model(tokens, attention_mask=mask, use_cache=False).logits
    logits = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **SINGLE)


@torch.no_grad()
def test_compiled_model_compares_the_borders_of_documents() -> None:
    torch.compiler.reset()
    model, tokens = build("Llama", num_hidden_layers=1), draw_tokens(1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    options = {"use_cache": False, "max_length_q": 15, "max_length_k": 15}
    first, second = torch.tensor([0, 9, TOKENS], dtype=torch.int32), torch.tensor([0, 8, TOKENS], dtype=torch.int32)
    expected = model(tokens, cu_seq_lens_q=first, cu_seq_lens_k=first, **options).logits
    logits = compiled(tokens, cu_seq_lens_q=first, cu_seq_lens_k=first.clone(), **options).logits
    torch.testing.assert_close(logits, expected, **SINGLE)
    with pytest.raises(RuntimeError, match="cu_seq_lens_q must have the borders of cu_seq_lens_k"):
        compiled(tokens, cu_seq_lens_q=first, cu_seq_lens_k=second, **options)


def test_compiled_model_refuses_positions_that_pack() -> None:
    torch.compiler.reset()
    compiled = torch.compile(build("Llama", num_hidden_layers=1), backend="aot_eager")
    position_ids = torch.cat([torch.arange(9), torch.arange(14)])[None]
    with torch.no_grad(), pytest.raises(RuntimeError, match="position_ids must not pack documents"):
        compiled(draw_tokens(1), position_ids=position_ids, use_cache=False)


def test_saving_and_loading_keep_the_pattern(tmp_path: Path) -> None:
    model, tokens = build("Llama", INTERLEAVED), draw_tokens()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert DilatedPattern.from_dict(loaded.config.dilated_pattern) == INTERLEAVED
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)


# -- decoding ---------------------------------------------------------------------------------------------------------------------


def decode(model: Any, tokens: Tensor, cache: Any, chunks: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of all tokens, given to the model in chunks."""
    logits, done = [], 0
    for size in chunks:
        options = {}
        if mask is not None:
            seen = mask[:, : done + size]
            options = {"attention_mask": seen, "position_ids": (seen.cumsum(-1) - 1).clamp(min=0)[:, done:]}
        part = model(tokens[:, done : done + size], past_key_values=cache, use_cache=True, **options)
        logits.append(part.logits)
        done += size
    assert done == tokens.shape[1]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_decoding_equals_the_full_forward(pattern: DilatedPattern, side: str, cache: str) -> None:
    model, tokens = build("Llama", pattern).double(), draw_tokens()
    mask = None if side == "none" else mask_of([TOKENS, 17, 11], side)
    options = {} if mask is None else {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    rows = DynamicCache() if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=TOKENS + 6)
    with torch.no_grad():
        expected = model(tokens, **options, use_cache=False).logits
        logits = decode(model, tokens, rows, [14, 1, 1, 4, 1, 1, 1], mask)
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(logits[real], expected[real], **EXACT)


def test_decoding_in_bfloat16_errs_at_most_twice_the_full_forward() -> None:
    model, tokens = build("Llama").bfloat16(), draw_tokens()
    with torch.no_grad():
        logits = decode(model, tokens, DynamicCache(), [14, 1, 1, 4, 1, 1, 1])
        naive = model(tokens, use_cache=False).logits
        expected = model.double()(tokens, use_cache=False).logits
    assert_twice_naive(logits, naive, expected)


def test_decoding_does_not_read_rows_that_were_never_written() -> None:
    model, tokens = build("Llama").double(), draw_tokens()
    cache = StaticCache(config=model.config, max_cache_len=TOKENS + 6)
    with torch.no_grad():
        decode(model, tokens[:, :14], cache, [14])
        for layer in cache.layers:
            layer.keys[:, :, 14:] = math.nan
            layer.values[:, :, 14:] = math.nan
        logits = model(tokens[:, 14:], past_key_values=cache, use_cache=True).logits
        expected = model(tokens, use_cache=False).logits[:, 14:]
    torch.testing.assert_close(logits, expected, **EXACT)


def test_decoding_has_the_gradients_of_the_full_forward() -> None:
    model, tokens = build("Llama").double(), draw_tokens()
    _, expected = run(model, input_ids=tokens, use_cache=False)
    model.zero_grad()
    logits = decode(model, tokens, DynamicCache(), [14, 9])
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float32).double()
    (logits * weights).sum().backward()
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(value.grad, expected[parameter], **EXACT)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}])
def test_generate_equals_generate_without_a_cache(name: str, options: dict[str, Any]) -> None:
    model, tokens, mask = build(name, INTERLEAVED), draw_tokens(), mask_of([TOKENS, 17, 11], "left")
    length = {"max_new_tokens": 19, "do_sample": False}
    generated = model.generate(tokens, attention_mask=mask, **length, **options)
    beams = {key: value for key, value in options.items() if key == "num_beams"}
    expected = model.generate(tokens, attention_mask=mask, **length, **beams, use_cache=False)
    assert generated.shape == (BATCH, TOKENS + 19)
    torch.testing.assert_close(generated, expected, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"assistant_model": True}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 4}])
def test_drafted_and_chunked_generation_equals_generation_without_a_cache(options: dict[str, Any]) -> None:
    model, tokens = build("Llama", INTERLEAVED), draw_tokens(1)
    options = {**options, "assistant_model": build("Llama", RAGGED)} if "assistant_model" in options else options
    length = {"max_new_tokens": 19, "do_sample": False}
    generated = model.generate(tokens, **length, **options)
    torch.testing.assert_close(generated, model.generate(tokens, **length, use_cache=False), rtol=0, atol=0)


def test_decoding_with_detached_weights_has_no_gradient_but_an_output() -> None:
    detached = dataclasses.replace(RAGGED, detach_weights=True)
    model, tokens = build("Llama", detached).double(), draw_tokens()
    with torch.no_grad():
        logits = decode(model, tokens, DynamicCache(), [14, 9])
        torch.testing.assert_close(logits, model(tokens, use_cache=False).logits, **EXACT)
    with pytest.raises(NotImplementedError, match="detach_weights=False"):
        decode(model, tokens, DynamicCache(), [14, 9])


# -- what is refused --------------------------------------------------------------------------------------------------------------


def test_missing_and_malformed_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"config.dilated_pattern must be set .*got None in LlamaConfig"):
        build("Llama", None)(draw_tokens())
    config = build("Llama").config
    with pytest.raises(TypeError, match=r"config.dilated_pattern must be a DilatedPattern, or what its to_dict gives, got list"):
        config.dilated_pattern = [1, 2]
    with pytest.raises(ValueError, match="pattern keys must include"):
        config.dilated_pattern = {"segment_lengths": [4]}
    assert config.dilated_pattern == RAGGED.to_dict()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softcap", 30.0),
        ("sliding_window", 4),
        ("s_aux", torch.zeros(6)),
        ("sinks", torch.zeros(6)),
        ("indices", torch.zeros(1, dtype=torch.int64)),
        ("anything_new", 3),
        ("position_bias", torch.zeros(1, 6, TOKENS, TOKENS)),
        ("cache", object()),
        ("block_table", torch.zeros(1)),
        ("output_attentions", True),
    ],
)
def test_options_that_change_the_attention_are_refused(name: str, value: Any) -> None:
    module = build("Llama").model.layers[0].self_attn
    q, k, v = (torch.randn(BATCH, heads, TOKENS, 8) for heads in (6, 2, 2))
    with pytest.raises(NotImplementedError, match=f"{name} must be None with 'flexdilated' attention, got"):
        hub.dilated_attention_forward(module, q, k, v, None, **{name: value})
    off = False if name == "output_attentions" else None
    hub.dilated_attention_forward(module, q, k, v, None, **{name: off}, use_cache=True)


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"sliding_window must be None .*got 7.*set config.sliding_window=None"):
        build("Mistral", sliding_window=7)(draw_tokens())
    mask = hub.dilated_attention_positions(BATCH, TOKENS, TOKENS, local_size=7)
    module = build("Llama").model.layers[0].self_attn
    q, k, v = (torch.randn(BATCH, heads, TOKENS, 8) for heads in (6, 2, 2))
    with pytest.raises(NotImplementedError, match="config must have no sliding window or attention chunks, got 7"):
        hub.dilated_attention_forward(module, q, k, v, mask)


def test_mask_functions_of_other_kinds_are_refused() -> None:
    sizes = {"batch_size": BATCH, "q_length": TOKENS, "kv_length": TOKENS}
    with pytest.raises(NotImplementedError, match="mask functions of a model's own must be absent"):
        hub.dilated_attention_positions(**sizes, use_vmap=True)
    with pytest.raises(NotImplementedError, match="mask functions must be causal or bidirectional"):
        hub.dilated_attention_positions(**sizes, mask_function=lambda b, h, q, k: (q >= k) | (k < 5))
    with pytest.raises(NotImplementedError, match="the cache must hold every token from the first, got a first key at 3"):
        hub.dilated_attention_positions(**sizes, kv_offset=3)
    assert hub.dilated_attention_positions(**sizes) is None


def test_masks_that_are_no_padding_masks_are_refused() -> None:
    model, tokens = build("Llama"), draw_tokens()
    square = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    with pytest.raises(NotImplementedError, match=r"attention_mask must be a \(B, N\) padding mask .*got torch.bool of shape"):
        model(tokens, attention_mask=square, use_cache=False)
    module = model.model.layers[0].self_attn
    q, k, v = torch.randn(BATCH, 6, 2, 8), torch.randn(BATCH, 2, TOKENS, 8), torch.randn(BATCH, 2, TOKENS, 8)
    with pytest.raises(NotImplementedError, match="attention_mask must say where 2 queries stand among 23 keys, got None"):
        hub.dilated_attention_forward(module, q, k, v, None)
    positions = torch.arange(TOKENS + 2).expand(BATCH, 1, 1, -1)
    with pytest.raises(NotImplementedError, match="unless is_causal=True, got 2 queries and 23 keys"):
        hub.dilated_attention_forward(module, q, k, v, positions, is_causal=False)
    borders = torch.tensor([0, 2])
    with pytest.raises(ValueError, match="cu_seq_lens_q must come without padding"):
        hub.dilated_attention_forward(module, q[:1], k[:1], v[:1], positions[:1], cu_seq_lens_q=borders, cu_seq_lens_k=borders)


def test_cross_attention_is_refused() -> None:
    model = build("Bert", is_decoder=True, add_cross_attention=True)
    with pytest.raises(NotImplementedError, match=r"config must have no cross-attention .*got BertConfig with it"):
        model(draw_tokens())


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


# -- LongNet as a model of the library --------------------------------------------------------------------------------------------


def longnet(**options: Any) -> Any:
    sizes = {"vocab_size": 256, "embed_dim": 24, "num_layers": 2, "num_heads": 4, "ffn_dim": 31}
    config = hub.LongNetHFConfig(**{**sizes, "dilated_pattern": RAGGED.to_dict(), **options})
    return hub.LongNetForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_longnet_round_trip_by_the_auto_classes(tmp_path: Path, tied: bool) -> None:
    model, tokens = longnet(tie_embeddings=tied, num_kv_heads=2, position="rotary"), torch.randint(256, (BATCH, TOKENS))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, hub.LongNetForCausalLM)
    assert isinstance(transformers.AutoConfig.from_pretrained(tmp_path), hub.LongNetHFConfig)
    assert loaded.config.to_longnet() == model.config.to_longnet()
    assert loaded.config.to_longnet().pattern == RAGGED
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        assert half(tokens).logits.dtype == torch.bfloat16


def test_longnet_equals_longnet_lm_and_its_loss() -> None:
    model, tokens = longnet(), torch.randint(256, (BATCH, TOKENS))
    plain = LongNetLM(LongNetConfig(vocab_size=256, embed_dim=24, num_layers=2, num_heads=4, ffn_dim=31, pattern=RAGGED)).eval()
    plain.load_state_dict(model.model.state_dict())
    labels = tokens.clone()
    labels[:, :5] = -100
    output = model(tokens, labels=labels)
    torch.testing.assert_close(output.logits, plain(tokens), rtol=0, atol=0)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected, **SINGLE)
    loss, logits = model(tokens, labels=labels, return_dict=False)
    torch.testing.assert_close((loss, logits), (output.loss, output.logits), rtol=0, atol=0)
    (logits_alone,) = model(tokens, return_dict=False)
    torch.testing.assert_close(logits_alone, output.logits, rtol=0, atol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_longnet_padded_rows_equal_the_documents_alone(side: str) -> None:
    model, tokens, mask = longnet().double(), torch.randint(256, (BATCH, TOKENS)), mask_of([TOKENS, 17, 11], side)
    logits = model(tokens, attention_mask=mask).logits
    for b in range(BATCH):
        real = mask[b].bool()
        # Rotary positions are float32 tables: another length centres xPos elsewhere.
        torch.testing.assert_close(logits[b, real], model(tokens[b, real][None]).logits[0], **SINGLE)


def test_longnet_packed_documents_equal_the_documents_alone() -> None:
    model, lengths = longnet().double(), [7, 10, 6]
    tokens, borders = torch.randint(256, (1, TOKENS)), torch.tensor([0, 7, 17, 23])
    logits = model(tokens, cu_seq_lens_q=borders, cu_seq_lens_k=borders, max_length_q=10, max_length_k=10).logits
    expected = torch.cat([model(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(logits, expected, **SINGLE)


def test_longnet_generates_what_its_forward_says() -> None:
    model, tokens = longnet(), torch.randint(1, 256, (BATCH, TOKENS))
    mask = mask_of([TOKENS, 17, 11], "left")
    generated = model.generate(tokens, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0)
    for b in range(BATCH):
        row = tokens[b, mask[b].bool()][None]
        for _ in range(9):
            row = torch.cat((row, model(row).logits[:, -1:].argmax(-1)), dim=1)
        torch.testing.assert_close(generated[b, TOKENS:], row[0, -9:], rtol=0, atol=0)


def test_longnet_refuses_a_cache_and_wrong_shapes() -> None:
    model, tokens = longnet(), torch.randint(256, (BATCH, TOKENS))
    with pytest.raises(NotImplementedError, match="use_cache must be False, got True"):
        model(tokens, use_cache=True)
    with pytest.raises(NotImplementedError, match="use_cache must be False, got True"):
        model.generate(tokens, max_new_tokens=2, use_cache=True, pad_token_id=0)
    with pytest.raises(ValueError, match=r"input_ids must have shape \(B, N\), got \(23,\)"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"attention_mask must have the shape of input_ids=\(3, 23\), got \(3, 22\)"):
        model(tokens, attention_mask=torch.ones(BATCH, TOKENS - 1))
    with pytest.raises(ValueError, match="embed_dim must be a multiple"):
        hub.LongNetHFConfig(embed_dim=25)
    with pytest.raises(ValueError, match="pattern keys must be among"):
        hub.LongNetHFConfig(dilated_pattern={"window": 3})


def test_longnet_starts_from_longnets_weights() -> None:
    """The library's own initial weights would have standard deviation 0.02 everywhere."""
    torch.manual_seed(11)
    model = longnet(embed_dim=96, ffn_dim=256, tie_embeddings=False)
    plain = LongNetLM(model.config.to_longnet())
    for (name, ours), theirs in zip(model.model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(ours.std(), theirs.std(), rtol=0.1, atol=1e-6, msg=name)


def test_longnet_initialises_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = longnet(embed_dim=96, ffn_dim=256)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.ffn.fc1.weight"
    kept = {key: value for key, value in weights.items() if key != name}
    assert len(kept) == len(weights) - 1
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    torch.testing.assert_close(loaded[name].std(), weights[name].std(), rtol=0.1, atol=0)
    for key, value in kept.items():
        torch.testing.assert_close(loaded[key], value, rtol=0, atol=0)


def test_longnet_token_embeddings_can_be_resized() -> None:
    model = longnet()
    model.resize_token_embeddings(259)
    assert model(torch.tensor([[258, 3]])).logits.shape == (1, 2, 259)


def test_trainer_lowers_the_loss_of_both_kinds_of_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    text = b"the quick brown fox jumps over the lazy dog. " * 12
    rows = [{"input_ids": list(text[i : i + 32]), "labels": list(text[i : i + 32])} for i in range(0, 512, 32)]
    for name, model in (("longnet", longnet()), ("llama", build("Llama", vocab_size=256))):
        batch = {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels")}
        before = model(**batch).loss.item()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / name),
            max_steps=2,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        assert trainer.state.global_step == 2
        assert model.eval()(**batch).loss.item() < before
        trainer.save_model()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's, under this library's new name
def test_adapters_change_the_outputs_and_train() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model, tokens = build("Llama"), draw_tokens()
    before, frozen = model(tokens).logits.detach(), model.model.layers[0].self_attn.q_proj.weight.clone()
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "k_proj", "v_proj"])
    adapted = peft.get_peft_model(model, adapters)
    torch.testing.assert_close(adapted(input_ids=tokens).logits, before, **SINGLE)  # they begin as nothing
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = adapted(input_ids=tokens).logits
    assert (trained - before).abs().max() > 1e-3
    torch.testing.assert_close(adapted.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight, frozen)
    torch.testing.assert_close(adapted.merge_and_unload()(tokens).logits, trained, **SINGLE)


def test_accelerate_prepares_and_trains() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    model = longnet().train()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.randint(256, (BATCH, TOKENS))
    losses = []
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# -- the optional extra -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["flexdilated", "flexdilated.hub"])
def test_importing_the_package_does_not_import_transformers(module: str) -> None:
    code = f"import sys, {module}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


def test_registering_again_changes_nothing() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["flexdilated"]
    hub.register()
    assert ALL_ATTENTION_FUNCTIONS["flexdilated"] is before
