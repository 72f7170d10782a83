"""Decoding from caches of the library equals the full forward."""

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern
from tests.doors import cases
from tests.hub.transformers.models import (
    BATCH,
    DECODER,
    INTERLEAVED,
    RAGGED,
    TOKENS,
    build,
    draw_tokens,
    mask_of,
    run,
)
from tests.tolerances import EXACT, SINGLE, assert_twice_naive

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from transformers.cache_utils import DynamicCache, QuantizedLayer, StaticCache  # noqa: E402

from flexdilated.hub.transformers import DilatedCache, set_pattern  # noqa: E402
from flexdilated.hub.transformers.cache import CACHE  # noqa: E402
from tests.hub.transformers.models import CACHES, decode  # noqa: E402

CHUNKS = [9, 1, 1, 4, 5, 1, 1, 1]
MIXED = DilatedPattern((5, 13), (1, 3), window=11)
KINDS = {kind: ("Llama", pattern) for kind, pattern in cases.KINDS.items() if not pattern.zero_padding}
KINDS |= {
    "long window, far branch": ("Llama", DilatedPattern.causal(64, 2, window=40)),
    "window, segments, sinks": ("GptOss", MIXED),
    "window, segments, soft cap": ("Gemma2", MIXED),
    "first tokens": ("Llama", DilatedPattern(global_tokens=3)),
    "first tokens, window, segments, sinks": ("GptOss", DilatedPattern((5, 23), (1, 2), window=3, global_tokens=4)),
}
FAMILIES = {
    "Llama": {},
    "GptOss": {"hidden_size": 24, "intermediate_size": 16, "head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Gemma2": {"head_dim": 8, "sliding_window": 64, "attn_logit_softcapping": 0.5, "initializer_range": 0.3},
}


PROMPT = 14
WAYS = {  # the mask of each row, and the row whose prompt it follows
    "none": (torch.ones(BATCH, TOKENS, dtype=torch.int64), [2, 0, 0]),
    "left": (mask_of([TOKENS, 17, 5], "left"), [1, 2, 1]),
    "right": (mask_of([TOKENS, 17, 5], "right"), [0, 1, 2]),
    "right of the prompt": (torch.tensor([[1] * n + [0] * (PROMPT - n) + [1] * (TOKENS - PROMPT) for n in (14, 11, 2)]), [2, 0, 0]),
}


@functools.lru_cache(maxsize=1)
def model_of(kind: str) -> Any:
    name, pattern = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(
        **{**DECODER, **FAMILIES[name], "num_key_value_heads": 3, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    )
    model = getattr(transformers, f"{name}ForCausalLM")(set_pattern(config, pattern)).eval()
    for layer in model.model.layers if name == "GptOss" else ():
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model if name == "GptOss" else model.double()


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_equals_the_row_alone(kind: str, cache: str, way: str) -> None:
    """A prompt in chunks, then beams that follow some of its rows, in chunks."""
    model, tokens, (mask, rows) = model_of(kind), draw_tokens(), WAYS[way]
    if cache == "quantized" and "reorder_cache" not in vars(QuantizedLayer):
        rows = [0, 1, 2]  # older versions of the library do not reorder quantized keys
    given, kept = None if way == "none" else mask, CACHES[cache](model.config)

    def logits() -> Tensor:
        prompt = decode(model, tokens[:, :PROMPT], kept, [9, 1, 4], given)
        kept.reorder_cache(torch.tensor(rows))
        assert kept.get_seq_length() == PROMPT
        followed = None if given is None else given[rows]
        return torch.cat((prompt[rows], decode(model, tokens, kept, [1, 5, 1, 2], followed, PROMPT)), dim=1)

    if cache == "bounded" and ("right" in way or "soft cap" in kind):
        right = r"attention_mask must have its padding before the tokens of a sequence with a DilatedCache"
        with pytest.raises((ValueError, NotImplementedError), match="softcap must be None with" if "soft cap" in kind else right):
            logits()
        return
    found, together = logits(), torch.cat((tokens[rows, :PROMPT], tokens[:, PROMPT:]), dim=1)
    for row, real, found_row in zip(together, mask[rows].bool(), found):
        expected = model(row[real][None], use_cache=False).logits[0]
        torch.testing.assert_close(found_row[real], expected, **(SINGLE if "sinks" in kind else EXACT))


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "bounded"])
def test_decoding_in_bfloat16_errs_at_most_twice_the_full_forward(cache: str) -> None:
    model, tokens = build("Llama", RAGGED), draw_tokens()
    expected = model.double()(tokens, use_cache=False).logits
    model = model.bfloat16()
    naive = model(tokens, use_cache=False).logits
    rows = CACHES[cache](model.config)
    assert_twice_naive(decode(model, tokens, rows, CHUNKS), naive, expected)
    if cache == "bounded":
        assert {layer.kv.dtype for layer in rows.layers} == {torch.bfloat16}
        rows = DilatedCache()
        with torch.autocast("cpu", torch.bfloat16):  # weights of float32, keys of bfloat16
            assert_twice_naive(decode(model.float(), tokens, rows, CHUNKS), naive, expected)
        assert {layer.kv.dtype for layer in rows.layers} == {torch.bfloat16}


def test_decoding_does_not_read_rows_that_were_never_written() -> None:
    model, tokens = build("Llama").double(), draw_tokens()
    cache = StaticCache(config=model.config, max_cache_len=TOKENS + 6)
    with torch.no_grad():
        decode(model, tokens[:, :14], cache, [14])
        for layer in cache.layers:
            layer.keys[:, :, 14:] = math.nan
            layer.values[:, :, 14:] = math.nan
        logits = model(tokens[:, 14:], **{CACHE: cache}, use_cache=True).logits
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


BEAMS, SAMPLES = {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}


@pytest.mark.parametrize(
    ("name", "cache", "options"),
    [
        ("Llama", "dynamic", {}),
        ("Qwen3", "dynamic", BEAMS),
        ("Mistral", "static", {}),
        ("Llama", "bounded", BEAMS),
        ("Qwen3", "bounded", SAMPLES),
    ],
)
def test_generate_equals_generate_without_a_cache(name: str, cache: str, options: dict[str, Any]) -> None:
    pattern = MIXED if cache == "bounded" else INTERLEAVED
    model, tokens, mask = build(name, pattern), draw_tokens(), mask_of([TOKENS, 17, 5], "left")
    options = {"max_new_tokens": 19, "do_sample": False, "attention_mask": mask, **options}
    made: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    made = {CACHE: DilatedCache()} if cache == "bounded" else made
    torch.manual_seed(3)
    generated = model.generate(tokens, **options, **made)
    torch.manual_seed(3)
    expected = model.generate(tokens, use_cache=False, **options)
    assert generated.shape == (BATCH * options.get("num_return_sequences", 1), TOKENS + 19)
    torch.testing.assert_close(generated, expected, rtol=0, atol=0)


@pytest.mark.parametrize("cache", ["dynamic", "bounded"])
@pytest.mark.parametrize("options", [{"assistant_model": True}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 4}])
def test_drafted_and_chunked_generation_equals_generation_without_a_cache(options: dict[str, Any], cache: str) -> None:
    model, tokens = build("Llama", MIXED), draw_tokens(1)
    options = {**options, "assistant_model": build("Llama", RAGGED)} if "assistant_model" in options else options
    length = {"max_new_tokens": 19, "do_sample": False, "eos_token_id": 1000}  # prompt lookup of older versions needs one
    rows = CACHES[cache](model.config)
    generated = model.generate(tokens, **{CACHE: rows}, **length, **options)
    expected = model.generate(tokens, **length, use_cache=False)
    torch.testing.assert_close(generated[:, : TOKENS + 19], expected, rtol=0, atol=0)  # older versions may draft one token more
    assert rows.get_seq_length() == generated.shape[1] - 1  # the last token is not read


def test_decoding_with_detached_weights_has_no_gradient_but_an_output() -> None:
    detached = dataclasses.replace(RAGGED, detach_weights=True)
    model, tokens = build("Llama", detached).double(), draw_tokens()
    with torch.no_grad():
        logits = decode(model, tokens, DynamicCache(), [14, 9])
        torch.testing.assert_close(logits, model(tokens, use_cache=False).logits, **EXACT)
    with pytest.raises(NotImplementedError, match="detach_weights=False"):
        decode(model, tokens, DynamicCache(), [14, 9])
