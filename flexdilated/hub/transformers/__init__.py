"""The `transformers` library: its models under a dilated pattern, and LongNet as one of its models.

Importing this module registers `"flexdilated"` as an attention implementation, and `LongNetForCausalLM` with the auto classes:

    import flexdilated.hub.transformers
    config = set_pattern(AutoConfig.from_pretrained(folder), DilatedPattern.longnet())
    model = AutoModelForCausalLM.from_pretrained(folder, config=config)
    model.save_pretrained(other)                            # saves the pattern too
    model = AutoModelForCausalLM.from_pretrained(other, attn_implementation="flexdilated")

Source: the library's documentation of `AttentionInterface` and `AttentionMaskInterface`.
"""

from __future__ import annotations

from flexdilated.hub.requires import require

require("transformers", at_least="5.12", extra="transformers")  # as pyproject.toml says, before anything of it is imported

# ruff: noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flexdilated.hub.transformers.cache import DilatedCache as DilatedCache
from flexdilated.hub.transformers.context import context_mesh as context_mesh
from flexdilated.hub.transformers.context import shard_context as shard_context
from flexdilated.hub.transformers.interface import dilated_attention_forward as dilated_attention_forward
from flexdilated.hub.transformers.longnet import LongNetForCausalLM as LongNetForCausalLM
from flexdilated.hub.transformers.longnet import LongNetHFConfig as LongNetHFConfig
from flexdilated.hub.transformers.patterns import NAME as NAME
from flexdilated.hub.transformers.patterns import set_pattern as set_pattern
from flexdilated.hub.transformers.positions import dilated_attention_positions as dilated_attention_positions

__all__ = [
    "NAME",
    "DilatedCache",
    "LongNetForCausalLM",
    "LongNetHFConfig",
    "context_mesh",
    "dilated_attention_forward",
    "dilated_attention_positions",
    "register",
    "set_pattern",
    "shard_context",
]


def register() -> None:
    """Make `"flexdilated"` an attention implementation and LongNet one of the auto classes' models; importing the module does it.

    Any model that takes its attention from the library's interface then runs with `attn_implementation="flexdilated"` and the
    pattern in `config.dilated_pattern`. Calling it again changes nothing.
    """
    AttentionInterface.register(NAME, dilated_attention_forward)
    AttentionMaskInterface.register(NAME, dilated_attention_positions)
    AutoConfig.register(LongNetHFConfig.model_type, LongNetHFConfig, exist_ok=True)
    AutoModelForCausalLM.register(LongNetHFConfig, LongNetForCausalLM, exist_ok=True)
    # `Trainer` asks this table by name whether a smoothed loss is that of the next token.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LongNetHFConfig.model_type] = LongNetForCausalLM.__name__


register()
