"""Families of the transformers library: each is dilated exactly, or refused by name. docs/transformers.md lists them."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern
from tests.tolerances import SINGLE

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from flexdilated.hub import transformers as hub  # noqa: E402
from flexdilated.hub.transformers.cache import CACHE  # noqa: E402
from tests.hub.transformers import survey  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs" / "transformers.md"
IS_OLD = transformers.__version__.startswith("5.12")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library, about configs and images

# Families that run as they are, and those that run with a longer window, by their model type.
SAME_NAMES = ["Llama", "Qwen2", "Qwen3", "Gemma", "Phi", "Mixtral", "Cohere", "Starcoder2", "Granite", "SmolLM3", "OPT", "GLM"]
DECODERS = {name: name.lower() for name in SAME_NAMES} | {"Phi-3": "phi3", "GPT-NeoX": "gpt_neox", "OLMo 2": "olmo2"}
DECODERS |= {"StableLM": "stablelm", "DeepSeek-V3": "deepseek_v3", "GPT-2": "gpt2"}
ENCODERS = {"BERT": "bert", "RoBERTa": "roberta", "XLM-RoBERTa": "xlm-roberta", "ELECTRA": "electra", "ALBERT": "albert"}
ENCODERS |= {"ESM": "esm"}
OTHERS = {"DistilBERT": "distilbert", "Wav2Vec2": "wav2vec2", "ViT": "vit", "DeiT": "deit", "DINOv2": "dinov2"}
OTHERS |= {"DINOv3": "dinov3_vit"}
OTHERS |= {"I-JEPA": "ijepa", "SigLIP": "siglip_vision_model"}
PARTS = {"CLIP": "clip", "LLaVA": "llava"}
WIDE_DECODERS = {"Mistral": "mistral", "Gemma 2": "gemma2", "Gemma 3": "gemma3_text", "Cohere 2": "cohere2", "EXAONE 4": "exaone4"}
WIDE_DECODERS |= {"GPT-OSS": "gpt_oss"}
WIDE = WIDE_DECODERS | {"ModernBERT": "modernbert"}
RUNS = DECODERS | ENCODERS | OTHERS | PARTS
# Older versions of some models have a class for each implementation.
OWN = r"attn_implementation must not be 'flexdilated' in \w+, whose attention(, if it has any, does not come from| is a class for)"
CROSSES = r"config must have no cross-attention with 'flexdilated' attention, got \w+ with it"
REFUSED = {"T5": ("t5", CROSSES), "BART": ("bart", CROSSES), "Whisper": ("whisper", CROSSES)}
REFUSED |= {"Swin": ("swin", r"attention_mask must be a \(B, N\) padding mask"), "DeBERTa": ("deberta-v2", OWN)}
REFUSED |= {"Splinter": ("splinter", "SplinterSelfAttention must have is_causal"), "GPT-J": ("gptj", OWN)}
REFUSED |= {name: (name.lower(), OWN) for name in ("XLNet", "Falcon", "BLOOM", "MPT", "Mamba")}


@pytest.mark.parametrize(
    ("model_type", "result", "why"),
    [
        *((name, "parts" if family in PARTS else "runs", "") for family, name in RUNS.items()),
        *((name, "runs with", "^sliding_window=LONGEST: .*sliding_window must be None with 'flex") for name in WIDE.values()),
        *((name, "refused", why) for name, why in REFUSED.values()),
    ],
)
def test_families_do_what_the_page_says(model_type: str, result: str, why: str) -> None:
    if model_type == "modernbert" and IS_OLD:
        pytest.skip("this version refuses its own rope_parameters")
    found = survey.survey(model_type)
    assert found.result == result, found.why
    assert re.search(why, found.why), found.why


def build(model_type: str, auto: Any, pattern: DilatedPattern) -> Any:
    """A tiny random model."""
    config = CONFIG_MAPPING[model_type]
    for sizes in survey.attempts(model_type, config()):
        with contextlib.suppress(Exception):
            survey.build(config, auto.from_config, sizes, None)(torch.ones(1, 5, dtype=torch.int64))
            break
    fields = {"sliding_window": 64} if model_type in WIDE.values() else None
    return survey.build(config, auto.from_config, sizes, pattern, fields)


@torch.no_grad()
@pytest.mark.parametrize("family", DECODERS | WIDE_DECODERS)
def test_decoders_decode_by_either_cache_behind_padding(family: str) -> None:
    model = build((RUNS | WIDE)[family], transformers.AutoModelForCausalLM, DilatedPattern((5, 13), (1, 3)))
    tokens, mask = torch.randint(4, 30, (2, 23)), torch.ones(2, 23, dtype=torch.int64)
    mask[1, :7] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def logits(cache: Any) -> Tensor:
        parts = []
        for first, last in ((0, 9), (9, 10), (10, 14), (14, 23)) if cache is not None else ((0, 23),):
            given = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:last]}
            parts.append(model(tokens[:, first:last], **given, **{CACHE: cache}, use_cache=cache is not None).logits)
        return torch.cat(parts, dim=1)[mask.bool()]

    expected = logits(None)
    torch.testing.assert_close(logits(transformers.DynamicCache(config=model.config)), expected, **SINGLE)
    bounded = hub.DilatedCache()
    if family == "DeepSeek-V3" and not IS_OLD:  # which changes the keys that a cache gives back
        with pytest.raises(NotImplementedError, match="in a model that hands on the keys of its cache as they are"):
            logits(bounded)
    elif family == "Gemma 2":
        with pytest.raises(NotImplementedError, match="softcap must be None with a DilatedCache"):
            logits(bounded)
    else:
        torch.testing.assert_close(logits(bounded), expected, **SINGLE)


UNSEEN = ("ESM", "ModernBERT")  # their attention is never given position_ids; docs/transformers.md names them


@pytest.mark.parametrize("family", [*ENCODERS, "ModernBERT"])
def test_encoders_attend_to_no_other_packed_document(family: str) -> None:
    first = 1 if family in ("RoBERTa", "XLM-RoBERTa", "ESM") else 0
    model = build((RUNS | WIDE)[family], transformers.AutoModelForMaskedLM, DilatedPattern((64,), (1,)))
    tokens = torch.randint(4, 31, (1, 20))
    positions, borders = torch.cat([torch.arange(8), torch.arange(12)])[None] + first, torch.tensor([0, 8, 20])
    other = tokens.clone()
    other[:, :8] = (tokens[:, :8] - 3) % 27 + 4
    packed = {"position_ids": positions, "cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    assert torch.equal(model(tokens, **packed).logits[:, 8:], model(other, **packed).logits[:, 8:])
    if family in UNSEEN:
        assert "ESM and ModernBERT ignore restarts silently" in " ".join(PAGE.read_text().split())
        return
    with pytest.raises(NotImplementedError, match=r"position_ids must rise by 1 .* not causal, .* pass cu_seq_lens_q and"):
        model(tokens, position_ids=positions)
    torch.testing.assert_close(model(tokens, position_ids=torch.arange(20)[None] + first).logits, model(tokens).logits)


def test_the_page_lists_these_families() -> None:
    text = PAGE.read_text()
    for heading, families in (("Runs as it is", RUNS), ("Runs with a field set", WIDE), ("Raises an error", REFUSED)):
        (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
        rows = re.findall(r"^\|([^|]*)\|", section, flags=re.MULTILINE)[2:]  # below the head and its rule
        listed = [name.strip() for row in rows for name in row.split(",")]
        assert sorted(listed) == sorted(families), heading
