"""Decoding from caches of the library equals the full forward."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern
from tests.hub.transformers.models import BATCH, INTERLEAVED, PATTERNS, RAGGED, TOKENS, build, decode, draw_tokens, mask_of, run
from tests.tolerances import EXACT, assert_twice_naive

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from transformers.cache_utils import DynamicCache, StaticCache  # noqa: E402

from flexdilated.hub.transformers import DilatedCache  # noqa: E402
from flexdilated.hub.transformers.cache import CACHE  # noqa: E402

CHUNKS = [9, 1, 1, 4, 5, 1, 1, 1]
CACHES = ["dynamic", "static", "bounded"]


def make(cache: str, model: Any) -> Any:
    if cache == "static":
        return StaticCache(config=model.config, max_cache_len=TOKENS + 6)
    return DynamicCache() if cache == "dynamic" else DilatedCache()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_decoding_equals_the_full_forward(pattern: DilatedPattern, side: str, cache: str) -> None:
    model, tokens = build("Llama", pattern).double(), draw_tokens()
    mask = None if side == "none" else mask_of([TOKENS, 17, 5], side)
    options = {} if mask is None else {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    rows = make(cache, model)
    with torch.no_grad():
        expected = model(tokens, **options, use_cache=False).logits
        logits = decode(model, tokens, rows, CHUNKS, mask)
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(logits[real], expected[real], **EXACT)
    assert rows.get_seq_length() == TOKENS
    if cache == "bounded":
        assert rows.nbytes == sum(layer.kv.nbytes for layer in rows.layers) > 0


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "bounded"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_decoding_in_bfloat16_errs_at_most_twice_the_full_forward(pattern: DilatedPattern, cache: str) -> None:
    model, tokens = build("Llama", pattern), draw_tokens()
    expected = model.double()(tokens, use_cache=False).logits
    model = model.bfloat16()
    naive = model(tokens, use_cache=False).logits
    rows = make(cache, model)
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
        ("Mistral", "bounded", {}),
        ("Gemma", "bounded", SAMPLES),
    ],
)
def test_generate_equals_generate_without_a_cache(name: str, cache: str, options: dict[str, Any]) -> None:
    model, tokens, mask = build(name, INTERLEAVED), draw_tokens(), mask_of([TOKENS, 17, 5], "left")
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
    model, tokens = build("Llama", INTERLEAVED), draw_tokens(1)
    options = {**options, "assistant_model": build("Llama", RAGGED)} if "assistant_model" in options else options
    length = {"max_new_tokens": 19, "do_sample": False, "eos_token_id": 1000}  # prompt lookup of older versions needs one
    rows = make(cache, model)
    generated = model.generate(tokens, **{CACHE: rows}, **length, **options)
    torch.testing.assert_close(generated, model.generate(tokens, **length, use_cache=False), rtol=0, atol=0)
    assert rows.get_seq_length() == TOKENS + 18  # the last token is not read


def test_decoding_with_detached_weights_has_no_gradient_but_an_output() -> None:
    detached = dataclasses.replace(RAGGED, detach_weights=True)
    model, tokens = build("Llama", detached).double(), draw_tokens()
    with torch.no_grad():
        logits = decode(model, tokens, DynamicCache(), [14, 9])
        torch.testing.assert_close(logits, model(tokens, use_cache=False).logits, **EXACT)
    with pytest.raises(NotImplementedError, match="detach_weights=False"):
        decode(model, tokens, DynamicCache(), [14, 9])
