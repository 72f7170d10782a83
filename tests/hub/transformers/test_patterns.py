"""`config.dilated_pattern`: set, saved, loaded, and refused where it would change nothing."""

import copy
import json
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern, choose_pattern
from flexdilated.core import losses

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from flexdilated.hub import transformers as hub  # noqa: E402
from flexdilated.hub.transformers.cache import CACHE  # noqa: E402

PATTERN = DilatedPattern((5, 13), (1, 3), offsets="interleaved")
SIZES = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 19, "num_hidden_layers": 1, "num_attention_heads": 3}


def build(pattern: DilatedPattern | None = PATTERN, **options: Any) -> Any:
    config = transformers.LlamaConfig(**{**SIZES, **options})
    return transformers.AutoModelForCausalLM.from_config(config if pattern is None else hub.set_pattern(config, pattern)).eval()


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def draw_tokens() -> torch.Tensor:
    return torch.randint(31, (2, 17))


@pytest.mark.parametrize(
    "given", [None, {}, "a folder", transformers.LlamaForCausalLM, torch.nn.Linear(2, 2), torch.nn.Sequential(build(None))]
)
def test_only_configs_and_their_models_take_a_pattern(given: Any) -> None:
    name = type(given).__name__
    with pytest.raises(
        TypeError, match=f"^config must be a config of the transformers library, or a model that has one, got {name}$"
    ):
        hub.set_pattern(given, PATTERN)


def test_a_pattern_that_does_not_fit_leaves_the_config_as_it_is() -> None:
    config = transformers.LlamaConfig(**SIZES)
    before = config.to_dict()
    with pytest.raises(ValueError, match="at most one branch per key/value head=3"):
        hub.set_pattern(config, DilatedPattern.grouped((4, 8, 16, 32), (1, 2, 4, 8)))
    assert config.to_dict() == before
    assert config._attn_implementation != "flexdilated"


def test_a_pattern_is_kept_in_json_types() -> None:
    config = hub.set_pattern(transformers.LlamaConfig(**SIZES), PATTERN)
    assert json.loads(config.to_json_string())["dilated_pattern"] == PATTERN.to_dict()
    assert transformers.LlamaConfig.from_dict(config.to_dict()).dilated_pattern == PATTERN.to_dict()
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert copied.dilated_pattern == PATTERN.to_dict()
        assert copied.to_dict() == config.to_dict()
    with pytest.raises(TypeError, match="pattern must be a DilatedPattern or 'auto', got dict"):
        hub.set_pattern(config, PATTERN.to_dict())


def test_a_layer_reads_its_pattern_once_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    read = DilatedPattern.from_dict
    monkeypatch.setattr(DilatedPattern, "from_dict", lambda values: reads.append(values) or read(values))
    model, tokens = build(), draw_tokens()
    first, again = (model(tokens, use_cache=False).logits for _ in range(2))
    assert len(reads) == 1
    assert torch.equal(first, again)
    model.config.dilated_pattern["dilation_rates"][1] = 2
    changed = model(tokens, use_cache=False).logits
    assert len(reads) == 2
    assert not torch.equal(changed, first)


def test_a_pattern_is_chosen_for_the_heads_and_set_in_a_model() -> None:
    model = build(None, num_attention_heads=12, num_key_value_heads=6)
    assert hub.set_pattern(model, PATTERN) is model.config
    assert model.config.dilated_pattern == PATTERN.to_dict()
    for is_causal, name, given in ((True, None, model), (True, ["LlamaForCausalLM"], model.config), (False, None, model.config)):
        model.config.architectures = name
        for budget, options in ((0.1, {}), (0.3, {"budget": 0.3})):
            expected = choose_pattern(1009, 6, budget=budget, is_causal=is_causal).shown[0].pattern
            assert hub.set_pattern(given, "auto", tokens=1009, **options).dilated_pattern == expected.to_dict()
    model.config.dilated_pattern = None
    for pattern, options, message in (
        ("auto", {}, "tokens must be given with pattern='auto', got None; pass the length of the longest sequence"),
        ("auto", {"tokens": 1009, "budget": 0.001}, "budget must be at least 0.0"),
        (PATTERN, {"tokens": 1009}, "tokens and budget must come with pattern='auto', got 1009 and None with DilatedPattern("),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            hub.set_pattern(model, pattern, **options)
    assert model.config.dilated_pattern is None
    for tokens in (331, 512, 1009):
        with pytest.raises(ValueError, match="budget must be at least") as raised:
            hub.set_pattern(model, "auto", tokens=tokens, budget=0.001)
        with pytest.warns(
            UserWarning, match=r"^pattern='auto' chose .* No segment is as long as .* A branch over the whole sequence"
        ):
            hub.set_pattern(model, "auto", tokens=tokens, budget=float(str(raised.value).split()[5]))
    model.config.dilated_pattern = None
    says_none = pytest.raises(
        ValueError, match=r"must be a DilatedPattern, got 'auto': PreTrainedConfig does not say how many heads"
    )
    with says_none, pytest.warns(UserWarning, match="was not compared"):
        hub.set_pattern(transformers.PreTrainedConfig(), "auto", tokens=1009)


def test_the_library_says_without_this_module_what_the_guide_quotes(tmp_path: Path) -> None:
    """A search for the error finds the guide."""
    build().save_pretrained(tmp_path)
    load_alone = (
        f"from transformers import AutoModel; AutoModel.from_pretrained({str(tmp_path)!r}, attn_implementation='flexdilated')"
    )
    result = subprocess.run([sys.executable, "-c", load_alone], capture_output=True, text=True)
    guide = Path(__file__).parents[3] / "docs" / "transformers.md"
    (quoted,) = re.findall(r"^> +(ValueError: Specified .*)$", guide.read_text(), flags=re.MULTILINE)
    assert quoted in result.stderr


def test_a_saved_model_comes_back_dilated(tmp_path: Path) -> None:
    """By the library's own argument; the config holds the pattern, set by `set_pattern` or as a plain field."""
    model, tokens = build(), draw_tokens()
    model.save_pretrained(tmp_path / "first")
    again = load(tmp_path / "first", attn_implementation="flexdilated")
    again.save_pretrained(tmp_path / "second")
    build(None).save_pretrained(tmp_path / "dense")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "dense")
    config.dilated_pattern = PATTERN
    plain = load(tmp_path / "dense", config=config, attn_implementation="flexdilated")
    plain.load_state_dict(model.state_dict())
    for loaded in (again, load(tmp_path / "first"), load(tmp_path / "second", attn_implementation="flexdilated"), plain):
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert load(tmp_path / "second").config._attn_implementation == "sdpa"  # as docs/transformers.md warns
    again.save_pretrained(tmp_path / "third")  # after a forward
    assert load(tmp_path / "third").config._attn_implementation == "flexdilated"


def llava(**parts: Any) -> Any:
    vision = {"model_type": "clip_vision_model", "hidden_size": 24, "intermediate_size": 19, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 3, "image_size": 8, "patch_size": 4}
    text = {"model_type": "llama", **SIZES, **parts}
    return transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=30)


def test_parts_of_a_composite_model_come_back_dilated(tmp_path: Path) -> None:
    config, tokens = llava(), torch.randint(30, (2, 17))
    with pytest.raises(ValueError, match=r"must be that of one part, got LlavaConfig, .*\['text_config', 'vision_config'\]"):
        hub.set_pattern(config, PATTERN)
    hub.set_pattern(config.text_config, PATTERN)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    loaded = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path, attn_implementation={"text_config": "flexdilated"}
    ).eval()
    for one in (model, loaded):
        assert one.config.text_config._attn_implementation == "flexdilated"
        assert one.config.vision_config._attn_implementation == "sdpa"
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    loaded.config.text_config.dilated_pattern = DilatedPattern((17,), (1,))
    assert (loaded(tokens).logits - model(tokens).logits).abs().max() > 1e-4


def test_attention_weights_are_refused_and_say_where_they_are() -> None:
    model, tokens = build(), draw_tokens()
    with pytest.raises(NotImplementedError, match=r"output_attentions must be None .*flexdilated.attention_map gives those"):
        model(tokens, output_attentions=True)
    with pytest.raises(ValueError, match=r"`output_attentions` attribute is not supported .*flexdilated"):
        model.config.output_attentions = True  # the library's own words, which name "eager"
    # This model does not hand the argument on to its attention.
    config = transformers.OPTConfig(**SIZES, ffn_dim=19, word_embed_proj_dim=24)
    hub.set_pattern(config, PATTERN)
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
    with pytest.raises(ValueError, match=r"config.dilated_pattern must stay DilatedPattern\(\(5, 13\), "):
        model(tokens)


REFUSED = {
    "Gemma3nAudioConfig": "attn_implementation must not be 'flexdilated' in Gemma3nAudio",
    "ResNetConfig": "whose attention, if it has any, does not come from",
    "EncodecConfig": "whose attention, if it has any, does not come from",
    "SamVisionConfig": "whose attention, if it has any, does not come from",
    "BartConfig": "config must have no cross-attention with 'flexdilated' attention, got BartConfig",
    "PatchTSMixerConfig": r"config\.self_attn must be True with 'flexdilated' attention, got False",
}


@pytest.mark.parametrize("name", REFUSED)
def test_configs_whose_attention_a_pattern_does_not_reach_are_refused(name: str) -> None:
    config = getattr(transformers, name)()
    with pytest.raises(NotImplementedError, match=REFUSED[name]):
        hub.set_pattern(config, PATTERN)
    assert not hasattr(config, "dilated_pattern")


def test_a_model_type_that_was_not_compared_warns() -> None:
    class OtherConfig(transformers.LlamaConfig):  # type: ignore[misc]
        model_type = "other"

    given = {"dilated_pattern": PATTERN.to_dict(), "attn_implementation": "flexdilated"}
    model = transformers.LlamaForCausalLM(OtherConfig(**SIZES, **given))
    for call in (lambda: hub.set_pattern(OtherConfig(), PATTERN), lambda: model(draw_tokens())):
        with pytest.warns(UserWarning, match="model type 'other' was not compared with dense attention; check"):
            call()


@pytest.mark.parametrize(
    ("pattern", "architectures", "text"),
    [
        (
            DilatedPattern((24,), (8,)),
            None,
            r"^pattern with segments \(24,\) at rates \(8,\) has no key/value head for .* token 4: .* 4 key/",
        ),
        (DilatedPattern((4, 24), (1, 4)), ["LlamaForCausalLM"], r"^pattern with segments \(4, 24\) .* not connected: .* 0 to 3 "),
        (DilatedPattern((4, 24), (1, 4)), ["LlamaModel"], None),  # causal or not: the first call knows
        (
            DilatedPattern.causal(64, num_kv_heads=16, window=16),
            None,
            r"^pattern .* window of 16 and 4 global tokens has no key/value head for 4 of the 8 residues ",
        ),
    ],
)
def test_set_pattern_warns_of_what_heads_lose(pattern: DilatedPattern, architectures: list[str] | None, text: str | None) -> None:
    losses.warn_of_losses.cache_clear()
    losses._warn.cache_clear()
    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=4, architectures=architectures)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        hub.set_pattern(config, pattern)
    assert len(warned) == (text is not None)
    assert text is None or re.match(text, str(warned[0].message))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static", "dilated"])
def test_generation_beyond_the_longest_segment_warns_once(cache: str) -> None:
    model = build(DilatedPattern.causal(24, 4, window=5), hidden_size=32, num_attention_heads=8, num_key_value_heads=4)
    losses.warn_of_losses.cache_clear()
    losses._warn.cache_clear()
    counts = []
    for new in (7, 9, 9):  # after 17 tokens; the last one is not read
        options = {CACHE: hub.DilatedCache()} if cache == "dilated" else {"cache_implementation": cache}
        with warnings.catch_warnings(record=True) as warned:
            warnings.filterwarnings("always", "pattern with segments .* has no segment longer than 24 tokens")
            model.generate(draw_tokens(), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=31, **options)
        counts.append(len(warned))
    assert counts == [0, 1, 0]
