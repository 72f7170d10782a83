"""What `config.dilated_pattern` does in the transformers library: it is checked, saved with the config, and chooses the attention.

Two classes of the library are extended for it: docs/adr/0007-extended-transformers-classes.md says why.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from flexdilated.core.pattern import DilatedPattern

NAME = "flexdilated"

OWN_TYPE = "flexdilated_longnet"  # of LongNetForCausalLM
TEXT_PARTS = ("text_config", "text_encoder", "decoder", "generator")  # where composite configs keep what has attention


def extend_configs_and_models() -> None:
    """Let configs check `dilated_pattern`, and models choose their attention by it. Calling it again changes nothing."""
    if isinstance(vars(PreTrainedConfig).get("dilated_pattern"), _PatternOfConfig):
        return
    PreTrainedConfig.dilated_pattern = _PatternOfConfig()
    PreTrainedModel.get_correct_attn_implementation = _choosing(PreTrainedModel.get_correct_attn_implementation)


def pattern_values(pattern: object) -> dict[str, Any] | None:
    """A pattern as a config holds it, in JSON types.

    Raises:
        TypeError: If it is no pattern and no mapping.
        ValueError: As `DilatedPattern.from_dict`.
    """
    if pattern is None:
        return None
    if isinstance(pattern, DilatedPattern):
        return pattern.to_dict()
    if not isinstance(pattern, Mapping):
        raise TypeError(f"config.dilated_pattern must be a DilatedPattern, or what its to_dict gives, got {type(pattern).__name__}")
    return DilatedPattern.from_dict(pattern).to_dict()


class _PatternOfConfig:
    """`config.dilated_pattern`, kept where all of a config's fields are; None where there is none.

    Every config has it: `from_pretrained(folder, dilated_pattern=...)` of the library sets what a config has, and drops the rest.
    """

    def __get__(self, config: Any, owner: type | None = None) -> Any:
        if config is None:
            return self
        return config.__dict__.get("dilated_pattern")

    def __set__(self, config: Any, pattern: object) -> None:
        values, fields = pattern_values(pattern), config.__dict__
        if values is not None:
            _refuse_parts(config)
        if values is None:  # saved as if it had never been there
            for name in ("dilated_pattern", "attn_implementation"):
                fields.pop(name, None)
            return
        fields["dilated_pattern"] = values
        # The library reads this name from a saved config, and refuses to build the model where nothing has registered it.
        fields["attn_implementation"] = NAME
        _warn_if_dense(config, fields.get("_attn_implementation_internal"))


def _choosing(choose: Any) -> Any:
    """The library's method that settles a model's attention, with an eye on the pattern of its config."""

    @functools.wraps(choose)
    def get_correct_attn_implementation(
        self: Any, requested_attention: str | None, is_init_check: bool = False, **options: Any
    ) -> str:
        pattern = getattr(self.config, "dilated_pattern", None)
        if pattern is not None:
            _refuse_parts(self.config)
            if _is_made_of_parts(self.config):
                raise ValueError(
                    f"config.dilated_pattern must be set on the configs of the parts of {type(self).__name__}, which has no "
                    "attention of its own, got it on the whole"
                )
            requested_attention = NAME if requested_attention is None else requested_attention
        chosen: str = choose(self, requested_attention, is_init_check, **options)
        if chosen == NAME:
            if not type(self).__name__.endswith(("Encoder", "EncoderModel")):  # whose config is that of the whole
                refuse_crossing(self.config)
            if getattr(self.config, "self_attn", None) is False:  # of models that mix by other layers unless told
                raise NotImplementedError(f"config.self_attn must be True with {NAME!r} attention, got False: there is none")
            _check_type(self)
        if pattern is not None:
            _warn_if_dense(self.config, chosen)
        return chosen

    return get_correct_attn_implementation


def refuse_crossing(config: Any) -> None:
    """Refuse a config whose model has layers in which queries and keys are not the same tokens.

    Raises:
        NotImplementedError: If it has.
    """
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise NotImplementedError(
            f"config must have no cross-attention with {NAME!r} attention, got {type(config).__name__} with it"
        )


def _warn_if_dense(config: Any, attention: str | None) -> None:
    if attention not in (None, NAME):
        warnings.warn(
            f"{type(config).__name__} has a dilated_pattern, but attn_implementation={attention!r}, which is dense attention; "
            f"use model.set_attn_implementation({NAME!r}), or config.dilated_pattern = None. "
            "For attention weights see flexdilated.attention_map",
            stacklevel=4,
        )


def _refuse_parts(config: Any) -> None:
    """A composite model reads only the patterns of its parts."""
    if not any(isinstance(getattr(config, name, None), PreTrainedConfig) for name in TEXT_PARTS):
        return
    parts = [name for name in sorted(config.sub_configs) if isinstance(getattr(config, name, None), PreTrainedConfig)]
    raise ValueError(
        f"config.dilated_pattern must be set on the parts of {type(config).__name__} that are to be dilated, of {parts}, "
        "got it on the whole"
    )


def _is_made_of_parts(config: Any) -> bool:
    """Whether a model attends only in models that it makes from other configs than its own."""
    result, why = compared_types().get(getattr(config, "model_type", ""), ("", ""))
    return result == "parts" and not why.endswith("what is its own was not tried")


@functools.lru_cache(maxsize=1)
def compared_types() -> dict[str, tuple[str, str]]:
    """Of each model type: what it did beside dense attention (`runs`, `refused`, ...), and why.

    `types` are those of `AutoModel`, which `python -m tests.hub.transformers.survey --keep` of the repository compares and writes.
    `other types` are configs of parts and of tasks whose attention was found not to ask the library's AttentionInterface.
    """
    kept = json.loads(Path(__file__).with_name("model_types.json").read_text())
    types: dict[str, tuple[str, str]] = {**kept["types"], **kept["other types"]}
    return types


def unreached(name: str) -> str:
    """Why a model is refused whose class has this name and whose attention does not ask the library's AttentionInterface."""
    return (
        f"attn_implementation must not be {NAME!r} in {name}, whose attention, if it has any, does not come from the library's "
        "AttentionInterface: a pattern would change nothing"
    )


def _check_type(model: PreTrainedModel) -> None:
    """Refuse a model type that is known not to ask the AttentionInterface, and warn of a type that was not compared.

    Raises:
        NotImplementedError: If a pattern would change nothing in a model of this type.
    """
    model_type, name = getattr(model.config, "model_type", ""), type(model).__name__
    result, why = compared_types().get(model_type, ("not tried", ""))
    if why.startswith("attn_implementation must not be"):
        raise NotImplementedError(unreached(name))
    if result == "not tried" and model_type != OWN_TYPE:
        warnings.warn(
            f"model type {model_type!r} was not compared with dense attention; check that a pattern of one segment with "
            "rate 1, longer than any sequence, gives the outputs of attn_implementation='sdpa', and another pattern does not",
            stacklevel=5,
        )
