"""What `config.dilated_pattern` does in the transformers library: it is checked, saved with the config, and chooses the attention.

Two classes of the library are extended for it: docs/adr/0007-extended-transformers-classes.md says why.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from flexdilated.core.pattern import DilatedPattern

NAME = "flexdilated"

BY_NAME = re.compile(r"_CLASSES\[(self\.)?config\._attn_implementation\]")  # a model's own table of classes
LIBRARY = "transformers.models."
GENERIC = "transformers.modeling_layers"  # of heads on a model that the config says
OTHER_MODELS = re.compile(r"\bload_backbone\(|\bAuto(Model|Backbone)\w*\.")  # made from configs that say which
TEXT_PARTS = ("text_config", "text_encoder", "decoder", "generator")  # where composite configs keep what has attention


def extend_configs_and_models() -> None:
    """Let configs check `dilated_pattern`, and models choose their attention by it. Calling it again changes nothing."""
    if isinstance(vars(PreTrainedConfig).get("dilated_pattern"), _PatternOfConfig):
        return
    PreTrainedConfig.dilated_pattern = _PatternOfConfig()
    PreTrainedModel.get_correct_attn_implementation = _choosing(PreTrainedModel.get_correct_attn_implementation)
    if hasattr(PreTrainedModel, "supports_context_parallel"):  # since 5.23
        PreTrainedModel.supports_context_parallel = property(_supporting(PreTrainedModel.supports_context_parallel.fget))


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
            if _is_made_of_parts(self.__class__):
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
            refusal = _attention_refusal(self.__class__)
            if refusal is not None:
                raise NotImplementedError(f"attn_implementation must not be {NAME!r} in {type(self).__name__}, {refusal}")
        if pattern is not None:
            _warn_if_dense(self.config, chosen)
        return chosen

    return get_correct_attn_implementation


def _supporting(supports: Any) -> Any:
    """The library's answer whether its context parallelism may run a model: it knows dense attention only."""

    @functools.wraps(supports)
    def supports_context_parallel(self: Any) -> bool:
        return self.config.get_text_config()._attn_implementation != NAME and supports(self)

    return supports_context_parallel


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


@functools.lru_cache(maxsize=512)
def _attention_refusal(model_class: type) -> str | None:
    """Why an attention implementation cannot reach the model's attention, by its source; the library's own test comes too late."""
    code = ""
    for base in model_class.__mro__:
        if issubclass(base, PreTrainedModel) and base.__module__ != PreTrainedModel.__module__:
            try:
                code += inspect.getsource(sys.modules[base.__module__])
            except (OSError, TypeError, KeyError):
                return None  # typed into a notebook: nobody can tell
    if BY_NAME.search(code) and BY_NAME.search(_reached_code(model_class)):
        return "whose attention is a class for each implementation, of which none is this one"
    refusal = "whose attention, if it has any, does not come from the library's AttentionInterface: a pattern would change nothing"
    if _is_without(model_class):
        return refusal
    if "ALL_ATTENTION_FUNCTIONS" in code:
        return None
    # Without attention of its own it may be made of other models, which its imports then name; examples in docstrings do too.
    made_of_others = re.search(r"^\s*from \.\.(\.models\.)?\w+(\.modeling_\w+)? import|\bload_backbone\(", code, re.MULTILINE)
    is_the_library_s = model_class.__module__.startswith(LIBRARY)
    has_its_own = re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE)
    if not has_its_own and (made_of_others or not is_the_library_s):
        return None
    return refusal


@functools.lru_cache(maxsize=512)
def _is_made_of_parts(model_class: type) -> bool:
    """Whether a model of the library attends only in models that it makes from other configs than its own."""
    if not model_class.__module__.startswith(LIBRARY) or _is_without(model_class):
        return False
    code = inspect.getsource(sys.modules[model_class.__module__])
    if "ALL_ATTENTION_FUNCTIONS" in code or re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE):
        return False
    by_class = re.search(r"^\s*from \.\.(\.models\.)?(?!auto\b)\w+(\.modeling_\w+)? import", code, re.MULTILINE)
    return by_class is None and re.search(r"\bload_backbone\(|^\s*from \.\.auto\b", code, re.MULTILINE) is not None


@functools.lru_cache(maxsize=512)
def _is_without(model_class: type) -> bool:
    """Whether nothing that a model of the library names asks its AttentionInterface, though others of its file may."""
    if not model_class.__module__.startswith(LIBRARY) or any(base.__module__ == GENERIC for base in model_class.__mro__):
        return False
    code = _reached_code(model_class)
    return "ALL_ATTENTION_FUNCTIONS" not in code and OTHER_MODELS.search(code) is None


def _reached_code(model_class: type) -> str:
    """The source of a class and of what of its file, or of the library's models, it names, and they name.

    Classes of which all models of a file are name all of its attention, to record and to initialize it: they tell nothing.
    """
    found: dict[Any, str] = {}
    waiting: list[Any] = [model_class]
    while waiting:
        named = waiting.pop()
        if named in found or (named is not model_class and named.__name__.endswith("PreTrainedModel")):
            continue
        file = sys.modules[named.__module__]
        found[named] = _definitions(named.__module__).get(named.__name__, "")
        for name in set(re.findall(r"\b[A-Za-z_]\w+", found[named])):
            other = getattr(file, name, None)
            for one in other.values() if isinstance(other, dict) else (other,):
                is_here = getattr(one, "__module__", None) == file.__name__
                is_module = inspect.isclass(one) and issubclass(one, nn.Module)
                if (is_here and inspect.isfunction(one)) or (is_module and (is_here or one.__module__.startswith(LIBRARY))):
                    waiting.append(one)
    return "\n".join(found.values())


@functools.lru_cache(maxsize=64)
def _definitions(file: str) -> dict[str, str]:
    """The source of the classes and functions of a file; `inspect.getsource` reads the whole file again for each."""
    code = inspect.getsource(sys.modules[file])
    lines = code.splitlines()
    nodes = [node for node in ast.parse(code).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes}
