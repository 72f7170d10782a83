"""Families of the transformers library: each is dilated exactly, or refused by name. docs/transformers.md lists them."""

from __future__ import annotations

import contextlib
import functools
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
from tests.hub.transformers import survey  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs" / "transformers.md"
DENSE, DILATED = DilatedPattern((64,), (1,)), DilatedPattern((5, 13), (1, 3))
NARROW, WIDE = {"sliding_window": 5}, {"sliding_window": 64}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library, about configs and images

CAUSAL = ["Llama", "Qwen2", "Qwen3", "Gemma", "Phi", "Mixtral", "Cohere", "Starcoder2", "Granite", "SmolLM3", "OPT"]
MASKED = {"BERT": "Bert", "RoBERTa": "Roberta", "XLM-RoBERTa": "XLMRoberta", "DistilBERT": "DistilBert", "ELECTRA": "Electra"}
OTHER_CAUSAL = {"Phi-3": "Phi3", "GPT-NeoX": "GPTNeoX", "OLMo 2": "Olmo2", "StableLM": "StableLm", "GLM": "Glm"}
VISION = {"ViT": "ViT", "DeiT": "DeiT", "DINOv2": "Dinov2", "DINOv3": "DINOv3ViT", "I-JEPA": "IJepa", "SigLIP": "SiglipVision"}
# family: its model
RUNS = {
    **{name: f"{name}ForCausalLM" for name in CAUSAL},
    **{family: f"{name}ForCausalLM" for family, name in (OTHER_CAUSAL | {"DeepSeek-V3": "DeepseekV3"}).items()},
    **{family: f"{name}ForMaskedLM" for family, name in (MASKED | {"ALBERT": "Albert", "ESM": "Esm"}).items()},
    **{family: f"{name}Model" for family, name in (VISION | {"CLIP": "CLIP", "Wav2Vec2": "Wav2Vec2"}).items()},
    "GPT-2": "GPT2LMHeadModel",
    "LLaVA": "LlavaForConditionalGeneration",
}
PARTS = ("CLIP", "LLaVA")

# family: its model, and which fields must be set for it to run
RUNS_WITH: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("MistralForCausalLM", WIDE),
    "Gemma 2": ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0.02, **WIDE}),
    "Gemma 3": ("Gemma3ForCausalLM", WIDE),
    "Cohere 2": ("Cohere2ForCausalLM", WIDE),
    "EXAONE 4": ("Exaone4ForCausalLM", WIDE),
    "GPT-OSS": ("GptOssForCausalLM", WIDE),
    "ModernBERT": ("ModernBertForMaskedLM", WIDE),
}

# Older versions of some models have a class for each implementation.
OWN = r"attn_implementation must not be 'flexdilated' in \w+, whose attention(, if it has any, does not come from| is a class for)"
CROSSES = r"config must have no cross-attention with 'flexdilated' attention, got \w+ with it"
# family: its model type, and why it is refused
REFUSED = {
    "T5": ("t5", CROSSES),
    "BART": ("bart", CROSSES),
    "Whisper": ("whisper", CROSSES),
    "Swin": ("swin", r"attention_mask must be a \(B, N\) padding mask"),
    "Splinter": ("splinter", r"SplinterSelfAttention must have is_causal"),
    "DeBERTa": ("deberta-v2", OWN),
    "XLNet": ("xlnet", OWN),
    "GPT-J": ("gptj", OWN),
    "Falcon": ("falcon", OWN),
    "BLOOM": ("bloom", OWN),
    "MPT": ("mpt", OWN),
    "Mamba": ("mamba", OWN),
}


def classes_of(family: str) -> tuple[Any, Any]:
    """Of its config and its model."""
    model = getattr(transformers, RUNS[family] if family in RUNS else RUNS_WITH[family][0])
    return transformers.Gemma3TextConfig if family == "Gemma 3" else model.config_class, model


@functools.cache
def tiny(family: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The first sizes with which the dense model runs, and what it reads."""
    config, model = classes_of(family)
    for sizes in survey.attempts(config.model_type, config()):
        with contextlib.suppress(Exception):
            dense = survey.build(config, model, sizes, None)
            for inputs in survey.inputs_of(config.model_type, dense):
                with contextlib.suppress(Exception):
                    run(dense, inputs, torch.float32)
                    return sizes, inputs
    raise AssertionError(f"no tiny {family} runs")


def build(family: str, fields: dict[str, Any] | None = None, pattern: DilatedPattern | None = DENSE) -> Any:
    """A tiny random model with the same weights in each call."""
    return survey.build(*classes_of(family), tiny(family)[0], pattern, fields)


def build_parts(family: str) -> tuple[Any, dict[str, Tensor]]:
    """A model whose every part has a pattern, and what it reads."""
    text = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 19, "num_hidden_layers": 1, "num_attention_heads": 6}
    image = {**text, "image_size": 20, "patch_size": 4}
    if family == "CLIP":
        config = transformers.CLIPConfig(text_config=text, vision_config=image)
    else:
        parts = {"text_config": {**text, "model_type": "llama"}, "vision_config": {**image, "model_type": "clip_vision_model"}}
        config = transformers.LlavaConfig(**parts, image_token_index=30)
    for part in parts_of(config):
        hub.set_pattern(part, DENSE)
    images = {"pixel_values": torch.randn(2, 3, 20, 20)} if family == "CLIP" else {}
    return getattr(transformers, RUNS[family])(config).eval(), {"input_ids": torch.randint(4, 30, (2, 23)), **images}


def parts_of(config: Any) -> list[Any]:
    return [getattr(config, name) for name in ("text_config", "vision_config") if hasattr(config, name)] or [config]


def run(model: Any, inputs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        output = model(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()})
    return next(output[name] for name in ("logits", "logits_per_image", "last_hidden_state") if name in output)


def check_is_dilated_exactly(model: Any, inputs: dict[str, Tensor], dense: Any = None) -> None:
    """Against the same model with the library's own attention, or another one of the same weights."""
    # Matrix products of experts have no float64, and this eager softmax is float32.
    is_single = any(name in type(model).__name__ for name in ("Mixtral", "GptOss", "Gemma2", "DeepseekV3"))
    dtype = torch.float32 if is_single else torch.float64
    model = model.to(dtype)
    out = run(model, inputs, dtype)
    for part in parts_of(model.config):
        assert part._attn_implementation == "flexdilated"
        part.dilated_pattern = None
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
    model, inputs = build_parts(family) if family in PARTS else (build(family), tiny(family)[1])
    check_is_dilated_exactly(model, inputs)


@pytest.mark.parametrize("family", RUNS_WITH)
def test_families_that_need_a_field_run_with_it_and_are_refused_without(family: str) -> None:
    fields = RUNS_WITH[family][1]
    if family == "ModernBERT" and transformers.__version__.startswith("5.12"):
        pytest.skip("this version refuses its own rope_parameters")
    inputs = tiny(family)[1]
    with pytest.raises(NotImplementedError, match=r"sliding_window must be None with 'flexdilated' attention"):
        build(family, NARROW)(**inputs)
    # Of the dense model neither the window, which holds these tokens, nor the types of layers are changed.
    dense = build(family, {name: value for name, value in fields.items() if name != "sliding_window"}, pattern=None)
    check_is_dilated_exactly(build(family, fields), inputs, dense)


DECODERS = [family for family in RUNS | RUNS_WITH if classes_of(family)[1].__name__.endswith(("ForCausalLM", "LMHeadModel"))]


@torch.no_grad()
@pytest.mark.parametrize("family", DECODERS)
def test_decoders_decode_by_either_cache_behind_padding(family: str) -> None:
    model = build(family, RUNS_WITH[family][1] if family in RUNS_WITH else None, DILATED)
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
    model_type, message = REFUSED[family]
    found = survey.survey(model_type)
    assert found.result == "refused"
    assert re.search(message, found.why), found.why


ENCODERS = ("BERT", "RoBERTa", "XLM-RoBERTa", "ELECTRA", "ALBERT", "ESM", "ModernBERT")
UNSEEN = ("ESM", "ModernBERT")  # their attention is never given position_ids; docs/transformers.md names them


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_attend_to_no_other_packed_document(family: str) -> None:
    first = 1 if family in ("RoBERTa", "XLM-RoBERTa", "ESM") else 0
    model = build(family, WIDE if family in RUNS_WITH else None)
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
