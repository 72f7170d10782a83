"""A window in models of the library equals the library's own sliding window, in training and in decoding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern
from tests.hub.transformers.models import CACHES, DECODER, DENSE, RAGGED, TEXT, TOKENS, decode, draw_tokens, mask_of, run
from tests.tolerances import SINGLE

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from flexdilated.hub import transformers as hub  # noqa: E402

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
@pytest.mark.parametrize(("name", "cache"), [*(("Mistral", cache) for cache in CACHES), ("GptOss", "bounded")])
def test_decoding_equals_the_librarys_own_window(name: str, cache: str) -> None:
    tokens, mask = draw_tokens(), mask_of([TOKENS, 17, 5], "left")
    options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    real = mask.bool()
    expected, model = build(name, None)(tokens, **options, use_cache=False).logits, build(name, DENSE)
    rows = CACHES[cache](model.config)
    torch.testing.assert_close(decode(model, tokens, rows, [14, 1, 1, 4, 1, 1, 1], mask)[real], expected[real], **SINGLE)
    if cache == "bounded":
        assert rows.layers[0].kv.rows_per_head == (WINDOW,) * 2


@torch.no_grad()
def test_modernberts_own_window_has_one_key_more() -> None:
    if transformers.__version__.startswith("5.12"):
        pytest.skip("this version refuses its own rope_parameters")
    sizes = {**TEXT, "layer_types": ["sliding_attention"] * 2, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1}
    own, wide = (transformers.ModernBertConfig(**sizes, pad_token_id=0, local_attention=n) for n in (2 * WINDOW, 1000))
    own, tokens = transformers.ModernBertModel(own).eval(), draw_tokens()
    model = transformers.ModernBertModel(hub.set_pattern(wide, DilatedPattern(window=own.config.sliding_window + 1))).eval()
    model.load_state_dict(own.state_dict())
    for mask in (None, mask_of([TOKENS, 17, 11], "left"), mask_of([TOKENS, 17, 11], "right")):
        real = slice(None) if mask is None else mask.bool()
        expected = own(tokens, attention_mask=mask).last_hidden_state[real]
        torch.testing.assert_close(model(tokens, attention_mask=mask).last_hidden_state[real], expected, **SINGLE)
