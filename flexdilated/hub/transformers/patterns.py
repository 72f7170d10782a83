"""`config.dilated_pattern`: how a config of the transformers library holds a pattern, and which model types can have one."""

from __future__ import annotations

import functools
import json
import math
import warnings
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig

from flexdilated.analysis.choice import choose_pattern
from flexdilated.core.losses import check_losses
from flexdilated.core.pattern import DilatedPattern
from flexdilated.hub.transformers.heads import count_kv_heads

NAME = "flexdilated"

OWN_TYPE = "flexdilated_longnet"  # of LongNetForCausalLM
TEXT_PARTS = ("text_config", "text_encoder", "decoder", "generator")  # where composite configs keep what has attention


def set_pattern(
    config: PreTrainedConfig | nn.Module,
    pattern: DilatedPattern | Literal["auto"],
    *,
    tokens: int | None = None,
    budget: float | None = None,
) -> PreTrainedConfig:
    """The config, with `pattern` as its `dilated_pattern` in JSON types and `"flexdilated"` as its attention.

    Both are saved with the config. `from_pretrained(folder, attn_implementation="flexdilated")` loads a saved model; without the
    argument a saved model is dilated too, unless it was loaded and saved again without a forward pass in between.

    Args:
        config: Of one model, or of one part of a composite model (`config.text_config`); or a model, for its config. Changed in
            place.
        pattern: For all layers. `"auto"`: the first of `choose_pattern` for the config's key/value heads.
        tokens: With `"auto"`: tokens of the longest sequence.
        budget: With `"auto"`: pairs to score, as a share of the pairs of dense attention. Default: 0.1.

    Raises:
        TypeError: If the pattern is neither a `DilatedPattern` nor `"auto"`, or there is no config of the library.
        ValueError: If the model consists of parts, each with a config of its own; or as `DilatedPattern.check_heads`. If `"auto"`
            comes without `tokens`, `tokens` or `budget` come without `"auto"`, or no pattern is within the budget.
        NotImplementedError: If the attention of this model type does not come from the library's `AttentionInterface`: a pattern
            would change nothing. Or if it attends to the keys of other tokens.

    Warns:
        UserWarning: If this model type was not compared with dense attention. Or as `flexdilated.MultiheadDilatedAttention`, of the
            config's key/value heads. A model is causal where its class or the config's `architectures` say so; others warn in the
            first call.
    """
    type_name = type(config).__name__
    if isinstance(config, nn.Module):
        config = getattr(config, "config", config)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config must be a config of the transformers library, or a model that has one, got {type_name}")
    if not isinstance(pattern, DilatedPattern) and pattern != "auto":
        raise TypeError(f"pattern must be a DilatedPattern or 'auto', got {type(pattern).__name__}")
    _refuse_parts(config)
    refuse_crossing(config)
    if getattr(config, "self_attn", None) is False:  # PatchTSMixer: attention is optional
        raise NotImplementedError(f"config.self_attn must be True with {NAME!r} attention, got False: there is no attention")
    check_type(config)
    names = (type_name, *(getattr(config, "architectures", None) or ()))  # a model that was not loaded has no architectures
    heads, is_causal = count_kv_heads(config), any("CausalLM" in name for name in names)
    if not isinstance(pattern, DilatedPattern):
        pattern = _chosen(config, heads, tokens, 0.1 if budget is None else budget, is_causal=is_causal)
    elif tokens is not None or budget is not None:
        raise ValueError(f"tokens and budget must come with pattern='auto', got {tokens} and {budget} with {pattern}")
    if heads is not None:
        check_losses(pattern, None, heads, is_causal)
    config.dilated_pattern = pattern.to_dict()
    config._attn_implementation = NAME
    record_implementation(config)
    return config


def _chosen(config: Any, heads: int | None, tokens: int | None, budget: float, *, is_causal: bool) -> DilatedPattern:
    """The best pattern under the budget."""
    if tokens is None:
        raise ValueError("tokens must be given with pattern='auto', got None; pass the length of the longest sequence")
    if heads is None:
        raise ValueError(
            f"pattern must be a DilatedPattern, got 'auto': {type(config).__name__} does not say how many heads there are"
        )
    best = choose_pattern(tokens, heads, budget=budget, is_causal=is_causal).shown[0]
    if not best.is_within_budget:
        digits = 10 ** (2 - math.floor(math.log10(best.share)))
        least = math.ceil(best.share * digits) / digits  # rounded up: this budget is accepted
        raise ValueError(f"budget must be at least {least:.3g} for {tokens} tokens and {heads} key/value heads, got {budget}")
    if max(best.pattern.segment_lengths) < tokens:
        warnings.warn(f"pattern='auto' chose {best.pattern}. {best.why}", stacklevel=3)
    return best.pattern


def record_implementation(config: Any) -> None:
    """Have the library save the attention implementation, which it reads from a saved config but does not write itself."""
    config.__dict__["attn_implementation"] = NAME


def pattern_of(config: Any) -> DilatedPattern:
    """The pattern that a config holds. Raises as `DilatedPattern.from_dict`, and ValueError if there is none."""
    values = getattr(config, "dilated_pattern", None)
    if values is None:
        raise ValueError(
            f"config.dilated_pattern must be set with {NAME!r} attention, got None in {type(config).__name__}; "
            "use flexdilated.hub.transformers.set_pattern(config, DilatedPattern(...))"
        )
    if isinstance(values, DilatedPattern):
        return values
    # The compiler cannot trace the checks of from_dict.
    return DilatedPattern(**values) if torch.compiler.is_compiling() else DilatedPattern.from_dict(values)


def pattern_of_layer(layer: nn.Module) -> DilatedPattern:
    """`pattern_of` the config of a layer, read again only where the config has changed."""
    config: Any = layer.config
    if torch.compiler.is_compiling():
        return pattern_of(config)
    text, last_read = repr(getattr(config, "dilated_pattern", None)), _patterns.get(layer)
    if last_read is None or last_read[0] != text:
        last_read = _patterns[layer] = text, pattern_of(config)
    return last_read[1]


_patterns: WeakKeyDictionary[nn.Module, tuple[str, DilatedPattern]] = WeakKeyDictionary()


def refuse_crossing(config: Any) -> None:
    """Raise NotImplementedError if a config's model has layers in which queries and keys are not the same tokens."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise NotImplementedError(
            f"config must have no cross-attention with {NAME!r} attention, got {type(config).__name__} with it"
        )


def _refuse_parts(config: Any) -> None:
    """Raise for a composite model: each part reads the pattern of its own config."""
    parts = [name for name in sorted(config.sub_configs) if isinstance(getattr(config, name, None), PreTrainedConfig)]
    result, why = compared_types().get(config.model_type, ("", ""))
    is_made_of_parts = result == "parts" and not why.endswith("what is its own was not tried")
    if is_made_of_parts or any(isinstance(getattr(config, name, None), PreTrainedConfig) for name in TEXT_PARTS):
        raise ValueError(
            f"config must be that of one part, got {type(config).__name__}, whose parts {parts} have their own attention and "
            "configs; use set_pattern on the parts that are to be dilated"
        )


@functools.lru_cache(maxsize=1)
def compared_types() -> dict[str, tuple[str, str]]:
    """For each model type: what it did beside dense attention (`runs`, `refused`, ...), and why.

    `types` are those of `AutoModel`, which `python -m tests.hub.transformers.survey --keep` of the repository compares and writes.
    `other types` are configs of parts and of tasks whose attention was found not to ask the library's AttentionInterface.
    """
    record = json.loads(Path(__file__).with_name("model_types.json").read_text())
    types: dict[str, tuple[str, str]] = {**record["types"], **record["other types"]}
    return types


def unreached(name: str) -> str:
    """The error message for a model class of this name whose attention does not come from the AttentionInterface."""
    return (
        f"attn_implementation must not be {NAME!r} in {name}, whose attention, if it has any, does not come from the library's "
        "AttentionInterface: a pattern would change nothing"
    )


def check_type(config: Any) -> None:
    """Raise NotImplementedError for a model type in which a pattern would change nothing, and warn of one that was not compared."""
    model_type = getattr(config, "model_type", OWN_TYPE)
    result, why = compared_types().get(model_type, ("not tried", ""))
    if why.startswith("attn_implementation must not be"):
        raise NotImplementedError(why if why.endswith("nothing") else unreached(type(config).__name__))
    if result == "not tried" and model_type != OWN_TYPE:
        warnings.warn(
            f"model type {model_type!r} was not compared with dense attention; check that a pattern of one segment with "
            "rate 1, longer than any sequence, gives the outputs of attn_implementation='sdpa', and another pattern does not",
            stacklevel=3,
        )
