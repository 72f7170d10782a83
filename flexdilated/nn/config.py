"""What determines a language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from flexdilated.core.checks import check_scale, is_number
from flexdilated.core.integers import is_integer
from flexdilated.core.pattern import DilatedPattern
from flexdilated.nn.position import SCALE_BASE

NUMBERS = ("dropout_p", "attention_dropout_p", "scale_base")


@dataclass(frozen=True, kw_only=True)
class LongNetConfig:
    """Everything that determines a `LongNetLM`, as plain data.

    >>> config = LongNetConfig(vocab_size=256, embed_dim=32, num_layers=2, num_heads=4, pattern=DilatedPattern.causal(64, 4))
    >>> LongNetConfig.from_dict(config.to_dict()) == config
    True

    Args:
        vocab_size: Token ids lie in `[0, vocab_size)`.
        embed_dim: Elements of a token.
        num_layers: Blocks.
        num_heads: Query heads; must divide `embed_dim`.
        pattern: The dilated pattern of every layer.
        num_kv_heads: Key/value heads; must divide `num_heads`. Default: `num_heads`.
        ffn_dim: Elements inside the feed-forward network. Default: `4 * embed_dim`.
        position: `"xpos"` or `"rotary"`.
        scale_base: Of `XPos`. Segments of more than 65,391 tokens need more: the error of the first forward says how much.
        tie_embeddings: Whether the output head shares the weights of the embedding.
        dropout_p: Probability of dropping an element of a residual branch in training.
        attention_dropout_p: Probability of dropping an attention weight in training.
        backend: Backend of the attention: `"auto"` or a name.
        scale: Multiplies the scores of the attention. Default: `head_dim ** -0.5`; muP uses `1 / head_dim` times a constant.

    Raises:
        ValueError: If a number is out of range or does not divide, the position is unknown, or some branch would have no head.
        TypeError: If a field has the wrong type.
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    pattern: DilatedPattern
    num_kv_heads: int | None = None
    ffn_dim: int | None = None
    position: Literal["xpos", "rotary"] = "xpos"
    scale_base: float = SCALE_BASE
    tie_embeddings: bool = True
    dropout_p: float = 0.0
    attention_dropout_p: float = 0.0
    backend: str = "auto"
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim"):
            value = getattr(self, name)
            if value is not None and (not is_integer(value) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if not isinstance(self.pattern, DilatedPattern):
            raise TypeError(f"pattern must be a DilatedPattern, got {type(self.pattern).__name__}")
        if self.embed_dim % (2 * self.num_heads):
            raise ValueError(f"embed_dim must be a multiple of 2 * num_heads={2 * self.num_heads}, got {self.embed_dim}")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={self.num_heads}, got {self.num_kv_heads}")
        self.pattern.check_heads(self.num_heads if self.num_kv_heads is None else self.num_kv_heads)
        if self.position not in ("xpos", "rotary"):
            raise ValueError(f"position must be 'xpos' or 'rotary', got {self.position!r}")
        for name in NUMBERS:
            if not is_number(getattr(self, name)):
                raise TypeError(f"{name} must be a number, got {getattr(self, name)!r}")
        for name in ("dropout_p", "attention_dropout_p"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        object.__setattr__(self, "scale", check_scale(self.scale, torch.float32))
        if not isinstance(self.tie_embeddings, bool):
            raise TypeError(f"tie_embeddings must be a bool, got {self.tie_embeddings!r}")
        if not self.scale_base > 0.0:
            raise ValueError(f"scale_base must be above 0, got {self.scale_base}")

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON types; `from_dict` is the inverse."""
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {"pattern": self.pattern.to_dict()}
        return values | {name: float(values[name]) for name in NUMBERS}  # those of numpy are none of JSON

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LongNetConfig:
        """The configuration that `to_dict` wrote.

        Raises:
            ValueError: If a key is unknown or missing.
            TypeError: If the values are no mapping, or one has the wrong type.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"configuration must be a mapping, got {values!r}")
        names = {f.name for f in fields(cls)}
        required = {"vocab_size", "embed_dim", "num_layers", "num_heads", "pattern"}
        if set(values) - names or required - set(values):
            raise ValueError(f"configuration keys must include {sorted(required)} and lie in {sorted(names)}, got {sorted(values)}")
        return cls(**{**values, "pattern": DilatedPattern.from_dict(values["pattern"])})
