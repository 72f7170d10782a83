"""Sliding windows and chunks: one that holds every token is none, and one that hides some is refused by name."""

from typing import Any

import pytest
import torch

from tests.hub.transformers.models import DECODER, DENSE, RAGGED, TEXT, TOKENS, dilated, draw_tokens, mask_of
from tests.tolerances import SINGLE

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from flexdilated.hub import transformers as hub  # noqa: E402
from tests.hub.transformers.models import decode  # noqa: E402

IS_OLD = transformers.__version__.startswith("5.12")
CHUNKS = [14, 1, 1, 4, 1, 1, 1]
# Gemma 3 has other rotary positions in its sliding layers, Cohere 2 none in the others.
SIZED = {**DECODER, "head_dim": 8}
EXPERTS = {"num_local_experts": 2, "intermediate_size_mlp": 37, "interleave_moe_layer_step": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("sliding_window", SIZED),
    "Gemma3Text": ("sliding_window", {**SIZED, "layer_types": ["sliding_attention", "full_attention"]}),
    "Cohere2": ("sliding_window", {**SIZED, "layer_types": ["sliding_attention", "full_attention"]}),
    "Llama4Text": ("attention_chunk_size", {**SIZED, **EXPERTS}),
    "ModernBert": ("sliding_window", {**TEXT, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}),
}
DECODERS = [name for name in FAMILIES if name != "ModernBert"]
HIDES = r"(sliding_window must be None with|config must have no sliding window or attention chunks that hide tokens).*above the"


def build(name: str, window: int | None, pattern: Any = RAGGED) -> Any:
    """A tiny random model, in evaluation mode; without a window its library's own, which is longer than the tokens here."""
    field, sizes = FAMILIES[name]
    config = getattr(transformers, f"{name}Config")(**sizes)
    if window is not None:
        setattr(config, field, window)
    if pattern is not None:
        hub.set_pattern(config, pattern)
    torch.manual_seed(5)
    return transformers.AutoModel.from_config(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_window_that_holds_every_token_leaves_the_model_as_it_was(name: str, side: str) -> None:
    if name == "ModernBert" and IS_OLD:
        pytest.skip("this version refuses its own rope_parameters")
    tokens, mask = draw_tokens(), None if side == "none" else mask_of([TOKENS, 17, 11], side)
    real = slice(None) if mask is None else mask.bool()
    expected = build(name, None, None)(tokens, attention_mask=mask).last_hidden_state
    out = build(name, TOKENS, DENSE)(tokens, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(out[real], expected[real], **SINGLE)
    assert (build(name, TOKENS)(tokens, attention_mask=mask).last_hidden_state - expected)[real].abs().max() > 1e-4
    with pytest.raises(NotImplementedError, match=HIDES):
        build(name, TOKENS - 1 if name != "ModernBert" else TOKENS - 2)(tokens, attention_mask=mask)  # which sees itself besides


@torch.no_grad()
@pytest.mark.parametrize("cache", ["bounded", "dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_window_is_refused_when_a_cache_has_seen_more_than_it_holds(name: str, cache: str) -> None:
    tokens, mask = draw_tokens(), mask_of([TOKENS, 17, 11], "left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for window in (TOKENS, 17):
        model = build(name, window)
        rows = {
            "bounded": hub.DilatedCache,
            "dynamic": lambda model=model: transformers.DynamicCache(config=model.config),
            "static": lambda model=model: transformers.StaticCache(config=model.config, max_cache_len=TOKENS + 6),
        }[cache]()
        if window == TOKENS:
            expected = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
            out = decode(_Logits(model), tokens, rows, CHUNKS, mask)
            torch.testing.assert_close(out[mask.bool()], expected[mask.bool()], **SINGLE)
            continue
        with pytest.raises(NotImplementedError, match=HIDES):
            decode(_Logits(model), tokens, rows, CHUNKS, mask)
        assert rows.get_seq_length() <= 17 + 4


class _Logits:
    """A model without a head, as `decode` calls one with it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **options: Any) -> Any:
        output = self.model(*args, **options)
        output.logits = output.last_hidden_state
        return output


def test_windows_among_other_masks_are_refused() -> None:
    sizes = {"batch_size": 3, "q_length": TOKENS, "kv_length": TOKENS}
    for window in (7, TOKENS - 1):
        assert hub.dilated_attention_positions(**sizes, local_size=window).shape == (3, 1, 0, window)
        assert hub.dilated_attention_positions(**sizes, kv_offset=6, local_size=window + 6).shape == (3, 1, 0, window + 6)
    assert hub.dilated_attention_positions(**sizes, local_size=TOKENS) is None
    with pytest.raises(NotImplementedError, match="got one that looks ahead"):
        hub.dilated_attention_positions(**sizes, local_size=TOKENS, mask_function=lambda b, h, q, k: (q >= k) | (k < 5))


@torch.no_grad()
def test_layers_that_compress_keys_are_refused_behind_padding_too() -> None:
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this version has no such model")
    sizes = {**SIZED, "num_hidden_layers": 1, "layer_types": ["heavily_compressed_attention"], "n_routed_experts": 2}
    more = {"num_experts_per_tok": 1, "moe_intermediate_size": 8, "q_lora_rank": 5, "o_groups": 2, "o_lora_rank": 5}
    config = transformers.DeepseekV4Config(**sizes, **more, sliding_window=4096, **dilated(RAGGED))
    model, tokens = transformers.DeepseekV4Model(config).eval(), torch.randint(2, 31, (2, 150))
    mask = torch.ones_like(tokens)
    mask[0, :20] = 0
    for given in (None, mask):
        with pytest.raises(NotImplementedError, match=r"layers must attend to tokens with .*got DeepseekV4Attention, which"):
            model(tokens, attention_mask=given, use_cache=False)
