"""`config.dilated_pattern`: checked, saved, and what chooses the attention."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from flexdilated.hub import transformers as hub  # noqa: E402

PATTERN = DilatedPattern((5, 13), (1, 3), offsets="interleaved")
SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 19,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
DENSE = r"LlamaConfig has a dilated_pattern, but attn_implementation='{}', which is dense attention; .* flexdilated.attention_map"


def build(**options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**SIZES, **options})).eval()


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def draw_tokens() -> torch.Tensor:
    return torch.randint(31, (2, 17))


def test_patterns_are_kept_as_json_types_however_they_are_given() -> None:
    config = transformers.LlamaConfig(**SIZES)
    assert config.dilated_pattern is None
    for given in (PATTERN, PATTERN.to_dict(), {"segment_lengths": (5, 13), "dilation_rates": (1, 3), "offsets": "interleaved"}):
        config.dilated_pattern = given
        assert config.dilated_pattern == PATTERN.to_dict()
        assert json.loads(config.to_json_string())["dilated_pattern"] == PATTERN.to_dict()
    assert transformers.LlamaConfig(**SIZES, dilated_pattern=PATTERN).dilated_pattern == PATTERN.to_dict()
    assert transformers.LlamaConfig.from_dict(config.to_dict()).dilated_pattern == PATTERN.to_dict()
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert copied.dilated_pattern == PATTERN.to_dict()
        assert copied.to_dict() == config.to_dict()


def test_a_pattern_may_be_given_when_a_config_or_a_model_is_loaded(tmp_path: Path) -> None:
    """By the library's way to change a field, in a folder with a pattern and in one without."""
    other = DilatedPattern((7,), (1,))
    for name, before in (("dense", {}), ("dilated", {"dilated_pattern": other})):
        folder = tmp_path / name
        saved = build(**before)
        saved.save_pretrained(folder)
        config = transformers.AutoConfig.from_pretrained(folder, dilated_pattern=PATTERN)
        model = load(folder, dilated_pattern=PATTERN).eval()
        for found in (config, model.config, transformers.LlamaConfig.from_pretrained(folder, dilated_pattern=PATTERN.to_dict())):
            assert found.dilated_pattern == PATTERN.to_dict()
        assert model.config._attn_implementation == "flexdilated"
        tokens = draw_tokens()
        saved.set_attn_implementation("flexdilated")
        saved.config.dilated_pattern = PATTERN
        torch.testing.assert_close(model(tokens).logits, saved(tokens).logits, rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"config.dilated_pattern must be a DilatedPattern, or what its to_dict gives, got list"):
        transformers.AutoConfig.from_pretrained(tmp_path / "dense", dilated_pattern=[4])


def test_a_config_without_a_pattern_is_saved_without_one(tmp_path: Path) -> None:
    never, taken = transformers.LlamaConfig(**SIZES), transformers.LlamaConfig(**SIZES, dilated_pattern=PATTERN)
    taken.dilated_pattern = None
    loaded = transformers.LlamaConfig.from_dict({**never.to_dict(), "dilated_pattern": None})
    for number, config in enumerate((never, taken, loaded)):
        assert config.dilated_pattern is None
        config.save_pretrained(tmp_path / str(number))
        for text in (config.to_json_string(), json.dumps(config.to_dict()), (tmp_path / str(number) / "config.json").read_text()):
            assert "dilated" not in text


def test_malformed_patterns_are_refused() -> None:
    config = transformers.LlamaConfig(**SIZES, dilated_pattern=PATTERN)
    with pytest.raises(TypeError, match=r"config.dilated_pattern must be a DilatedPattern, or what its to_dict gives, got list"):
        config.dilated_pattern = [1, 2]
    with pytest.raises(ValueError, match="pattern keys must include"):
        config.dilated_pattern = {"segment_lengths": [4]}
    assert config.dilated_pattern == PATTERN.to_dict()


def test_a_saved_model_comes_back_dilated(tmp_path: Path) -> None:
    model, tokens = build(dilated_pattern=PATTERN), draw_tokens()
    assert model.config._attn_implementation == "flexdilated"
    model.save_pretrained(tmp_path / "first")
    assert json.loads((tmp_path / "first" / "config.json").read_text())["attn_implementation"] == "flexdilated"
    again = load(tmp_path / "first")
    again.save_pretrained(tmp_path / "second")
    for loaded in (again, load(tmp_path / "second")):
        assert loaded.config._attn_implementation == "flexdilated"
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    # As an earlier version of the library, or of this package, may have saved it.
    values = json.loads((tmp_path / "first" / "config.json").read_text())
    del values["attn_implementation"]
    (tmp_path / "first" / "config.json").write_text(json.dumps(values))
    torch.testing.assert_close(load(tmp_path / "first")(tokens).logits, model(tokens).logits, rtol=0, atol=0)


def test_without_this_package_a_saved_model_is_refused(tmp_path: Path) -> None:
    build(dilated_pattern=PATTERN).save_pretrained(tmp_path)
    code = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert 'Specified `attn_implementation="flexdilated"` is not supported' in done.stderr


def test_dense_attention_under_a_pattern_warns(tmp_path: Path) -> None:
    model, tokens = build(dilated_pattern=PATTERN), draw_tokens()
    dilated = model(tokens).logits
    model.save_pretrained(tmp_path)
    for name in ("sdpa", "eager"):
        with pytest.warns(UserWarning, match=DENSE.format(name)):
            loaded = load(tmp_path, attn_implementation=name)
        assert (loaded(tokens).logits - dilated).abs().max() > 1e-4
    with pytest.warns(UserWarning, match=DENSE.format("sdpa")):
        model.set_attn_implementation("sdpa")
    model.set_attn_implementation("flexdilated")
    torch.testing.assert_close(model(tokens).logits, dilated, rtol=0, atol=0)
    plain = build()
    with pytest.warns(UserWarning, match=DENSE.format("sdpa")):
        plain.config.dilated_pattern = PATTERN
    plain.set_attn_implementation("flexdilated")


def test_a_pattern_taken_away_leaves_nothing_behind(tmp_path: Path) -> None:
    model, tokens = build(dilated_pattern=PATTERN), draw_tokens()
    model.config.dilated_pattern = None
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)


def llava(**parts: Any) -> Any:
    vision = {"model_type": "clip_vision_model", "hidden_size": 24, "intermediate_size": 19, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 3, "image_size": 8, "patch_size": 4}
    text = {"model_type": "llama", **SIZES, **parts}
    return transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=30)


def test_parts_of_a_composite_model_come_back_dilated(tmp_path: Path) -> None:
    config, tokens = llava(dilated_pattern=PATTERN), torch.randint(30, (2, 17))
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    loaded = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    for one in (model, loaded):
        assert one.config.text_config._attn_implementation == "flexdilated"
        assert one.config.vision_config._attn_implementation == "sdpa"
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    loaded.config.text_config.dilated_pattern = DilatedPattern((17,), (1,))
    assert (loaded(tokens).logits - model(tokens).logits).abs().max() > 1e-4


def test_a_pattern_on_the_whole_of_a_composite_model_is_refused() -> None:
    message = r"config.dilated_pattern must be set on the parts of LlavaConfig .*\['text_config', 'vision_config'\]"
    config = llava()
    with pytest.raises(ValueError, match=message):
        config.dilated_pattern = PATTERN
    assert config.dilated_pattern is None
    config.__dict__["dilated_pattern"] = PATTERN.to_dict()  # as where a config makes its parts last
    with pytest.raises(ValueError, match=message):
        transformers.LlavaForConditionalGeneration(config)


def test_attention_weights_are_refused_and_say_where_they_are(tmp_path: Path) -> None:
    model, tokens = build(dilated_pattern=PATTERN), draw_tokens()
    with pytest.raises(NotImplementedError, match=r"output_attentions must be None .*flexdilated.attention_map gives those"):
        model(tokens, output_attentions=True)
    with pytest.raises(ValueError, match=r"`output_attentions` attribute is not supported .*flexdilated"):
        model.config.output_attentions = True  # the library's own words, which name "eager"
    with pytest.warns(UserWarning, match=DENSE.format("eager")):
        model.set_attn_implementation("eager")
    # This model does not hand the argument on to its attention.
    config = transformers.OPTConfig(
        vocab_size=31, hidden_size=24, ffn_dim=19, num_hidden_layers=1, num_attention_heads=3, word_embed_proj_dim=24
    )
    config.dilated_pattern = PATTERN
    with pytest.raises(NotImplementedError, match=r"output_attentions must be None .*flexdilated.attention_map gives those"):
        transformers.OPTForCausalLM(config)(tokens, output_attentions=True)


def longnet(**options: Any) -> Any:
    sizes = {"vocab_size": 31, "embed_dim": 24, "num_layers": 1, "num_heads": 3, "ffn_dim": 19}
    return hub.LongNetForCausalLM(hub.LongNetHFConfig(**sizes, dilated_pattern=PATTERN, **options))


def test_longnet_ignores_nothing_that_it_is_asked_for(tmp_path: Path) -> None:
    model, tokens = longnet(), draw_tokens()
    assert model.config._attn_implementation == "flexdilated"
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"attn_implementation must be None or 'flexdilated' in LongNetForCausalLM, got 'sdpa'"):
        load(tmp_path, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=r"attn_implementation must be None or 'flexdilated' in LongNetForCausalLM, got 'eager'"):
        model.set_attn_implementation("eager")
    with pytest.raises(NotImplementedError, match=r"output_attentions must not be True .*flexdilated.attention_map"):
        model(tokens, output_attentions=True)
    with pytest.raises(NotImplementedError, match=r"output_hidden_states must not be True .*use forward hooks on model.layers"):
        model(tokens, output_hidden_states=True)
    with pytest.raises(NotImplementedError, match="output_hidden_states must not be True"):
        longnet(output_hidden_states=True)(tokens)
    model.config.dilated_pattern = DilatedPattern((17,), (1,))
    with pytest.raises(ValueError, match=r"config.dilated_pattern must stay DilatedPattern\(segment_lengths=\(5, 13\)"):
        model(tokens)


def test_a_model_that_computes_its_own_attention_beside_others_of_its_file_is_refused() -> None:
    """Those take theirs from the interface."""
    config = transformers.Gemma3nAudioConfig(hidden_size=24, conf_num_hidden_layers=1, conf_num_attention_heads=3)
    config.dilated_pattern = PATTERN
    message = "attn_implementation must not be 'flexdilated' in Gemma3nAudioEncoder, whose attention, if it has any, does not come"
    with pytest.raises(NotImplementedError, match=message):
        transformers.AutoModel.from_config(config)
    if hasattr(transformers, "VibeVoiceAcousticTokenizerEncoderConfig"):  # convolutions alone, beside models of parts
        config = transformers.VibeVoiceAcousticTokenizerEncoderConfig(dilated_pattern=PATTERN)
        with pytest.raises(NotImplementedError, match=r"must not .* in VibeVoiceAcousticTokenizerEncoderModel, whose"):
            transformers.AutoModel.from_config(config)


def test_a_model_type_that_was_not_compared_warns() -> None:
    class OtherConfig(transformers.LlamaConfig):  # type: ignore[misc]
        model_type = "other"

    with pytest.warns(UserWarning, match="model type 'other' was not compared with dense attention; check"):
        model = transformers.LlamaForCausalLM(OtherConfig(**SIZES, dilated_pattern=PATTERN))
    assert torch.equal(model(torch.ones(1, 5, dtype=torch.int64)).logits.isfinite(), torch.ones(1, 5, 31, dtype=torch.bool))


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_heads_for_any_model_of_the_library_run(head: str) -> None:
    """Their classes name no model: the config says which."""
    config = transformers.LlamaConfig(**SIZES, pad_token_id=0, dilated_pattern=PATTERN)
    model = getattr(transformers, f"LlamaFor{head}")(config).eval()
    assert model.config._attn_implementation == "flexdilated"
    tokens = draw_tokens()
    found = model(tokens)[0].detach()
    model.config.dilated_pattern = DilatedPattern((64,), (1,))
    assert (model(tokens)[0] - found).abs().max() > 1e-5
