"""Families of the transformers library: each is dilated exactly, or refused by name. docs/transformers.md lists them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern
from tests.tolerances import EXACT, SINGLE

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from flexdilated.hub import transformers as hub  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs" / "transformers.md"
DENSE, DILATED = DilatedPattern((64,), (1,)), DilatedPattern((5, 13), (1, 3))

TEXT = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 19,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
SIZED = {**GROUPED, "head_dim": 4}
SHIFTED = {**TEXT, "max_position_embeddings": 66}
IMAGE = {
    "hidden_size": 24,
    "intermediate_size": 19,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "image_size": 20,
    "patch_size": 4,
}
EXPERTS = {**GROUPED, "intermediate_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
NARROW, WIDE = {"sliding_window": 5}, {"sliding_window": 64}
GPT = {"vocab_size": 31, "n_embd": 24, "n_layer": 1, "n_head": 6, "n_positions": 64}
LATENT = {
    "q_lora_rank": 5,
    "kv_lora_rank": 5,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 5,
    "first_k_dense_replace": 1,
}
TRANSLATOR = {
    "vocab_size": 31,
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 19,
    "decoder_ffn_dim": 19,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SOUND = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "intermediate_size": 19,
    "conv_dim": (8, 8),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
PARTS = {"text_config": {**GROUPED, "model_type": "llama"}, "vision_config": {**IMAGE, "model_type": "clip_vision_model"}}

# family: its config, its model, the sizes of a tiny one, what it reads
RUNS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED, "text"),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED, "text"),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", SIZED, "text"),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", SIZED, "text"),
    "Phi": ("PhiConfig", "PhiForCausalLM", GROUPED, "text"),
    "Phi-3": ("Phi3Config", "Phi3ForCausalLM", GROUPED, "text"),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", GPT, "text"),
    "GPT-NeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", TEXT, "text"),
    "OPT": ("OPTConfig", "OPTForCausalLM", {**TEXT, "ffn_dim": 19, "word_embed_proj_dim": 24}, "text"),
    "OLMo 2": ("Olmo2Config", "Olmo2ForCausalLM", GROUPED, "text"),
    "Cohere": ("CohereConfig", "CohereForCausalLM", GROUPED, "text"),
    "StableLM": ("StableLmConfig", "StableLmForCausalLM", {**GROUPED, "hidden_size": 48}, "text"),
    "Starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", GROUPED, "text"),
    "Granite": ("GraniteConfig", "GraniteForCausalLM", GROUPED, "text"),
    "SmolLM3": ("SmolLM3Config", "SmolLM3ForCausalLM", GROUPED, "text"),
    "GLM": ("GlmConfig", "GlmForCausalLM", SIZED, "text"),
    "DeepSeek-V3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**TEXT, "num_key_value_heads": 6, **LATENT}, "text"),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", EXPERTS, "text"),
    "BERT": ("BertConfig", "BertForMaskedLM", TEXT, "text"),
    "RoBERTa": ("RobertaConfig", "RobertaForMaskedLM", SHIFTED, "text"),
    "XLM-RoBERTa": ("XLMRobertaConfig", "XLMRobertaForMaskedLM", SHIFTED, "text"),
    "DistilBERT": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": 31, "dim": 24, "n_layers": 1, "n_heads": 6, "hidden_dim": 19, "max_position_embeddings": 64},
        "text",
    ),
    "ELECTRA": ("ElectraConfig", "ElectraForMaskedLM", {**TEXT, "embedding_size": 24}, "text"),
    "ALBERT": ("AlbertConfig", "AlbertForMaskedLM", {**TEXT, "embedding_size": 24}, "text"),
    "ESM": ("EsmConfig", "EsmForMaskedLM", {**SHIFTED, "mask_token_id": 3}, "text"),
    "ViT": ("ViTConfig", "ViTModel", IMAGE, "image"),
    "DeiT": ("DeiTConfig", "DeiTModel", IMAGE, "image"),
    "DINOv2": ("Dinov2Config", "Dinov2Model", IMAGE, "image"),
    "DINOv3": ("DINOv3ViTConfig", "DINOv3ViTModel", IMAGE, "image"),
    "I-JEPA": ("IJepaConfig", "IJepaModel", IMAGE, "image"),
    "SigLIP": ("SiglipVisionConfig", "SiglipVisionModel", IMAGE, "image"),
    "CLIP": ("CLIPConfig", "CLIPModel", {"text_config": TEXT, "vision_config": IMAGE}, "both"),
    "LLaVA": ("LlavaConfig", "LlavaForConditionalGeneration", {**PARTS, "image_token_index": 30}, "text"),
    "Wav2Vec2": ("Wav2Vec2Config", "Wav2Vec2Model", SOUND, "sound"),
}

# family: which fields must be set for it to run
RUNS_WITH: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "Mistral": ("MistralConfig", "MistralForCausalLM", GROUPED, WIDE),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", SIZED, {"attn_logit_softcapping": 0.02, **WIDE}),
    "Gemma 3": ("Gemma3TextConfig", "Gemma3ForCausalLM", SIZED, WIDE),
    "Cohere 2": ("Cohere2Config", "Cohere2ForCausalLM", SIZED, WIDE),
    "EXAONE 4": ("Exaone4Config", "Exaone4ForCausalLM", SIZED, WIDE),
    "GPT-OSS": ("GptOssConfig", "GptOssForCausalLM", {**EXPERTS, "head_dim": 4}, WIDE),
    "ModernBERT": ("ModernBertConfig", "ModernBertForMaskedLM", {**TEXT, "num_hidden_layers": 2}, WIDE),
}

# Older versions of some models have a class for each implementation.
OWN = r"attn_implementation must not be 'flexdilated' in \w+, whose attention(, if it has any, does not come from| is a class for)"
CROSSES = r"config must have no cross-attention with 'flexdilated' attention, got \w+ with it"
REFUSED: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "T5": (
        "T5Config",
        "T5EncoderModel",
        {"vocab_size": 31, "d_model": 24, "d_ff": 19, "num_layers": 1, "num_heads": 6, "d_kv": 4},
        "text",
        CROSSES,
    ),
    "BART": ("BartConfig", "BartModel", {**TRANSLATOR, "max_position_embeddings": 64}, "text", CROSSES),
    "Whisper": ("WhisperConfig", "WhisperModel", {**TRANSLATOR, "num_mel_bins": 8, "max_source_positions": 20}, "mel", CROSSES),
    "Swin": (
        "SwinConfig",
        "SwinModel",
        {"image_size": 20, "patch_size": 4, "embed_dim": 24, "depths": [1], "num_heads": [2], "window_size": 5},
        "image",
        r"attention_mask must be a \(B, N\) padding mask",
    ),
    "Splinter": ("SplinterConfig", "SplinterModel", TEXT, "text", r"SplinterSelfAttention must have is_causal"),
    "DeBERTa": ("DebertaV2Config", "DebertaV2Model", TEXT, "text", OWN),
    "XLNet": (
        "XLNetConfig",
        "XLNetModel",
        {"vocab_size": 31, "d_model": 24, "n_layer": 1, "n_head": 6, "d_inner": 19},
        "text",
        OWN,
    ),
    "GPT-J": ("GPTJConfig", "GPTJModel", {**GPT, "rotary_dim": 2}, "text", OWN),
    "Falcon": ("FalconConfig", "FalconModel", TEXT, "text", OWN),
    "BLOOM": ("BloomConfig", "BloomModel", {"vocab_size": 31, "hidden_size": 24, "n_layer": 1, "n_head": 6}, "text", OWN),
    "MPT": (
        "MptConfig",
        "MptModel",
        {"vocab_size": 31, "d_model": 24, "n_layers": 1, "n_heads": 6, "max_seq_len": 64},
        "text",
        OWN,
    ),
    "Mamba": ("MambaConfig", "MambaModel", {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 1}, "text", OWN),
}


def build(
    config_name: str, model_name: str, sizes: dict[str, Any], fields: dict[str, Any] | None = None, pattern: Any = DENSE
) -> Any:
    """A tiny random model whose every part is to be dilated, by default by the pattern that changes nothing."""
    config = getattr(transformers, config_name)(**sizes)
    for name, value in (fields or {}).items():
        setattr(config, name, value)
    for part in parts_of(config):
        if pattern is not None:
            hub.set_pattern(part, pattern)
    return getattr(transformers, model_name)(config).eval()


def parts_of(config: Any) -> list[Any]:
    return [getattr(config, name) for name in ("text_config", "vision_config") if hasattr(config, name)] or [config]


def draw(kind: str) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    if kind in ("text", "both"):
        inputs["input_ids"] = torch.randint(4, 30, (2, 23))
    if kind in ("image", "both"):
        inputs["pixel_values"] = torch.randn(2, 3, 20, 20)
    if kind == "sound":
        inputs["input_values"] = torch.randn(2, 101)
    if kind == "mel":
        inputs |= {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": torch.randint(4, 30, (2, 7))}
    return inputs


def run(model: Any, inputs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        output = model(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()})
    return next(output[name] for name in ("logits", "logits_per_image", "last_hidden_state") if name in output)


def check_is_dilated_exactly(model: Any, inputs: dict[str, Tensor], dense: Any = None) -> None:
    """Against the same model with the library's own attention, or another one of the same weights."""
    # Matrix products of experts have no float64, and this eager softmax is float32.
    is_single = any(name in type(model).__name__ for name in ("Mixtral", "GptOss", "Gemma2"))
    dtype = torch.float32 if is_single else torch.float64
    model = model.to(dtype)
    out = run(model, inputs, dtype)
    for part in parts_of(model.config):
        assert part._attn_implementation == "flexdilated"
        part.dilated_pattern = None
    if dense is not None:
        dense.load_state_dict(model.state_dict())
    dense = model if dense is None else dense.to(dtype)
    dense.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    expected = run(dense, inputs, dtype)
    torch.testing.assert_close(out, expected, **(SINGLE if is_single else EXACT))
    model.set_attn_implementation("flexdilated")
    for part in parts_of(model.config):
        part.dilated_pattern = DILATED
    assert (run(model, inputs, dtype) - expected).abs().max() > 1e-5  # it was our attention that ran


@pytest.mark.parametrize("family", RUNS)
def test_a_dense_pattern_equals_dense_attention(family: str) -> None:
    config, model, sizes, kind = RUNS[family]
    check_is_dilated_exactly(build(config, model, sizes), draw(kind))


@pytest.mark.parametrize("family", RUNS_WITH)
def test_families_that_need_a_field_run_with_it_and_are_refused_without(family: str) -> None:
    config, model, sizes, fields = RUNS_WITH[family]
    if family == "ModernBERT" and transformers.__version__.startswith("5.12"):
        pytest.skip("this version refuses its own rope_parameters")
    inputs = draw("text")
    with pytest.raises(NotImplementedError, match=r"sliding_window must be None with 'flexdilated' attention"):
        build(config, model, sizes, NARROW)(**inputs)
    # Of the dense model neither the window, which holds these tokens, nor the types of layers are changed.
    dense = build(config, model, sizes, {name: value for name, value in fields.items() if name != "sliding_window"}, pattern=None)
    check_is_dilated_exactly(build(config, model, sizes, fields), inputs, dense)


DECODERS = [name for name, (_, model, *_) in (RUNS | RUNS_WITH).items() if model.endswith(("ForCausalLM", "LMHeadModel"))]


@torch.no_grad()
@pytest.mark.parametrize("family", DECODERS)
def test_decoders_decode_by_either_cache_behind_padding(family: str) -> None:
    config, name, sizes, fields = (RUNS | RUNS_WITH)[family]
    model = build(config, name, sizes, None if isinstance(fields, str) else fields)
    model.config.dilated_pattern = DILATED
    tokens, mask = torch.randint(4, 30, (2, 23)), torch.ones(2, 23, dtype=torch.int64)
    mask[1, :7] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def logits(cache: Any) -> Tensor:
        parts = []
        for first, last in ((0, 9), (9, 10), (10, 14), (14, 23)) if cache is not None else ((0, 23),):
            given = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:last]}
            parts.append(model(tokens[:, first:last], **given, past_key_values=cache, use_cache=cache is not None).logits)
        return torch.cat(parts, dim=1)[mask.bool()]

    expected = logits(None)
    torch.testing.assert_close(logits(transformers.DynamicCache(config=model.config)), expected, **SINGLE)
    bounded = hub.DilatedCache()
    if family == "DeepSeek-V3" and not transformers.__version__.startswith(
        "5.12"
    ):  # which changes the keys that a cache gives back
        with pytest.raises(NotImplementedError, match="in a model that hands on the keys of its cache as they are"):
            logits(bounded)
    elif family == "Gemma 2":
        with pytest.raises(NotImplementedError, match="softcap must be None with a DilatedCache"):
            logits(bounded)
    else:
        torch.testing.assert_close(logits(bounded), expected, **SINGLE)


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_dilated_is_refused_by_name(family: str) -> None:
    config, model, sizes, kind, message = REFUSED[family]
    with pytest.raises(NotImplementedError, match=message):
        build(config, model, sizes)(**draw(kind))


ENCODERS = ("BERT", "RoBERTa", "XLM-RoBERTa", "ELECTRA", "ALBERT", "ESM", "ModernBERT")
UNSEEN = ("ESM", "ModernBERT")  # their attention is never given position_ids; docs/transformers.md names them


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_attend_to_no_other_packed_document(family: str) -> None:
    config, name, sizes, _ = RUNS.get(family) or RUNS_WITH[family][:4]
    first = 1 if sizes.get("max_position_embeddings") == 66 else 0
    model = build(config, name, sizes, WIDE if family in RUNS_WITH else None)
    tokens = torch.randint(4, 31, (1, 20))
    positions, borders = torch.cat([torch.arange(8), torch.arange(12)])[None] + first, torch.tensor([0, 8, 20])
    other = tokens.clone()
    other[:, :8] = (tokens[:, :8] - 3) % 27 + 4
    packed = {"position_ids": positions, "cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    assert torch.equal(model(tokens, **packed).logits[:, 8:], model(other, **packed).logits[:, 8:])
    if family in UNSEEN:
        assert "ESM and ModernBERT, whose attention never receives `position_ids`" in " ".join(PAGE.read_text().split())
        return
    with pytest.raises(
        NotImplementedError, match=r"position_ids must rise by 1 .* not causal, .* pass cu_seq_lens_q and cu_seq_lens_k"
    ):
        model(tokens, position_ids=positions)
    torch.testing.assert_close(model(tokens, position_ids=torch.arange(20)[None] + first).logits, model(tokens).logits)


def test_the_page_lists_these_families() -> None:
    """One row per family in the table of what it may expect."""
    text = PAGE.read_text()
    for heading, families in (("Runs as it is", RUNS), ("Runs with a field set", RUNS_WITH), ("Raises an error", REFUSED)):
        (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
        rows = re.findall(r"^\|([^|]*)\|", section, flags=re.MULTILINE)[2:]  # below the head and its rule
        listed = [name.strip() for row in rows for name in row.split(",")]
        assert sorted(listed) == sorted(families), heading
