"""Decoding from caches of the library equals the full forward."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern
from tests.hub.transformers.models import BATCH, DECODERS, INTERLEAVED, PATTERNS, RAGGED, TOKENS, build, draw_tokens, mask_of, run
from tests.tolerances import EXACT, assert_twice_naive

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from transformers.cache_utils import DynamicCache, StaticCache  # noqa: E402


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
    length = {"max_new_tokens": 19, "do_sample": False, "eos_token_id": 1000}  # prompt lookup of older versions needs one
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
