"""A window in models of the library equals the library's own sliding window, in training and in decoding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern
from tests.hub.transformers.models import DECODER, DENSE, RAGGED, TOKENS, decode, draw_tokens, mask_of, run
from tests.tolerances import SINGLE

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from flexdilated.hub import transformers as hub  # noqa: E402
from flexdilated.hub.transformers.cache import CACHE  # noqa: E402

WINDOW = 5
MIXED = {**DECODER, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": DECODER,
    "Gemma3Text": MIXED,
    "GptOss": {
        **MIXED,
        "hidden_size": 24,
        "intermediate_size": 16,
        "head_dim": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}


def build(name: str, pattern: DilatedPattern | None, window: int = WINDOW) -> Any:
    """A tiny random model: the library's own, or `pattern` in layers of full attention and a window in the others."""
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name], sliding_window=window if pattern is None else 1_000_000)
    if pattern is not None:
        hub.set_pattern(config, pattern)
    torch.manual_seed(5)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    model = model if name == "GptOss" else model.double()  # a gradient in float32 errs by more than the tolerance
    if pattern is None:
        model.set_attn_implementation("eager" if name == "GptOss" else "sdpa")
    for layer, kind in zip(model.model.layers, getattr(config, "layer_types", None) or ["sliding_attention"] * 2):
        if pattern is not None and kind == "sliding_attention":
            layer.self_attn.config = hub.set_pattern(copy.copy(config), DilatedPattern(window=window))
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_a_window_equals_the_librarys_own_with_its_gradients(name: str) -> None:
    tokens = draw_tokens()
    expected, expected_gradients = run(build(name, None), input_ids=tokens, use_cache=False)
    logits, gradients = run(build(name, DENSE), input_ids=tokens, use_cache=False)
    torch.testing.assert_close(logits, expected, **SINGLE)
    for key, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[key], gradient, **SINGLE)
    others = [build(name, DENSE, WINDOW + 1)] + [build(name, RAGGED)] * (name != "Mistral")
    for other in others:
        assert (run(other, input_ids=tokens, use_cache=False)[0] - expected).abs().max() > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_equals_the_librarys_own_window_in_bounded_memory(name: str, side: str) -> None:
    tokens, mask = draw_tokens(), None if side == "none" else mask_of([TOKENS, 17, 5], side)
    options = {} if mask is None else {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    real = slice(None) if mask is None else mask.bool()
    expected, cache = build(name, None)(tokens, **options, use_cache=False).logits, hub.DilatedCache()
    logits = decode(build(name, DENSE), tokens, cache, [14, 1, 1, 4, 1, 1, 1], mask)
    torch.testing.assert_close(logits[real], expected[real], **SINGLE)
    assert cache.layers[0].kv.rows_per_head == (WINDOW,) * 2


@torch.no_grad()
def test_beams_and_drafts_follow_a_window() -> None:
    own, model, tokens = build("Mistral", None), build("Mistral", DENSE), draw_tokens()
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        batch = tokens if "num_beams" in options else tokens[:1].repeat(1, 2)
        expected = own.generate(batch, max_new_tokens=12, do_sample=False, use_cache="num_beams" not in options, **options)
        drawn = model.generate(batch, max_new_tokens=12, do_sample=False, **{CACHE: hub.DilatedCache()}, **options)
        assert torch.equal(drawn, expected)
