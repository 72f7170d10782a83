"""LongNet as a language model: `head(norm(blocks(embedding(tokens))))`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flexdilated.nn.attention import MultiheadDilatedAttention
from flexdilated.nn.position import Rotary, XPos, token_positions
from flexdilated.nn.transformer import Block, FeedForward
from flexdilated.pattern import DilatedPattern

__all__ = ["LongNetConfig", "LongNetLM"]

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class LongNetConfig:
    """Everything that determines a `LongNetLM`, as plain data.

    Args:
        vocab_size: Token ids lie in `[0, vocab_size)`.
        embed_dim: Elements of a token.
        num_layers: Blocks.
        num_heads: Query heads; must divide `embed_dim`.
        pattern: The dilated pattern of every layer.
        num_kv_heads: Key/value heads; must divide `num_heads`. Default: `num_heads`.
        ffn_dim: Elements inside the feed-forward network. Default: `4 * embed_dim`.
        position: `"xpos"` or `"rotary"`.
        tie_embeddings: Whether the output head shares the weights of the embedding.
        dropout_p: Probability of dropping an element of a residual branch in training.
        attention_dropout_p: Probability of dropping an attention weight in training.
        backend: Engine of the attention: `"auto"` or a name.

    Raises:
        ValueError: If a number is below 1 or does not divide, a probability is out of range, or the position is unknown.
        TypeError: If the pattern is not a `DilatedPattern`.
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    pattern: DilatedPattern
    num_kv_heads: int | None = None
    ffn_dim: int | None = None
    position: Literal["xpos", "rotary"] = "xpos"
    tie_embeddings: bool = True
    dropout_p: float = 0.0
    attention_dropout_p: float = 0.0
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if not isinstance(self.pattern, DilatedPattern):
            raise TypeError(f"pattern must be a DilatedPattern, got {type(self.pattern).__name__}")
        if self.embed_dim % (2 * self.num_heads):
            raise ValueError(f"embed_dim must be a multiple of 2 * num_heads={2 * self.num_heads}, got {self.embed_dim}")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={self.num_heads}, got {self.num_kv_heads}")
        if self.position not in ("xpos", "rotary"):
            raise ValueError(f"position must be 'xpos' or 'rotary', got {self.position!r}")
        for name in ("dropout_p", "attention_dropout_p"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON types; `from_dict` is the inverse."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"pattern": self.pattern.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LongNetConfig:
        """The configuration that `to_dict` wrote.

        Raises:
            ValueError: If a key is unknown or missing.
        """
        known = {f.name for f in fields(cls)}
        required = {"vocab_size", "embed_dim", "num_layers", "num_heads", "pattern"}
        if set(values) - known or required - set(values):
            raise ValueError(f"configuration keys must include {sorted(required)} and lie in {sorted(known)}, got {sorted(values)}")
        return cls(**{**values, "pattern": DilatedPattern.from_dict(values["pattern"])})


class LongNetLM(nn.Module):
    """Decoder-only causal language model over dilated attention.

    `x = embedding(tokens)`; per layer `x += attention(norm(x))`, `x += ffn(norm(x))`; `logits = head(norm(x))`.
    Source: LongNet, arXiv 2307.02486; sub-LayerNorm and initial gains: MAGNETO, arXiv 2210.06423; xPos: arXiv 2212.10554.

    Args:
        config: Sizes, pattern and options.
    """

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__()
        self.config = config
        head_dim = config.embed_dim // config.num_heads
        gamma = math.sqrt(math.log(2 * config.num_layers))

        def block() -> Block:
            attention = MultiheadDilatedAttention(
                config.embed_dim,
                config.num_heads,
                config.pattern,
                num_kv_heads=config.num_kv_heads,
                dropout_p=config.attention_dropout_p,
                gamma_init=gamma,
                is_causal=True,
                backend=config.backend,
            )
            ffn = FeedForward(config.embed_dim, config.ffn_dim or 4 * config.embed_dim, gamma_init=gamma)
            return Block(attention, ffn, dropout_p=config.dropout_p)

        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.position = Rotary(head_dim) if config.position == "rotary" else XPos(head_dim, config.pattern)
        self.layers = nn.ModuleList(block() for _ in range(config.num_layers))
        self.layer_norm = nn.LayerNorm(config.embed_dim)
        self.head = None if config.tie_embeddings else nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=config.embed_dim**-0.5)

    def forward(self, tokens: Tensor, *, key_padding_mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Logits `(B, N, vocab_size)` of the token that follows each of `tokens`.

        Args:
            tokens: `(B, N)` integers in `[0, vocab_size)`, any N from 1 up.
            key_padding_mask: `(B, N)` bool, True at padding.
            cu_seqlens: `(num_documents + 1,)` borders of packed documents, for B = 1.
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens must have shape (B, N), got {tuple(tokens.shape)}")
        rotation = self.position(token_positions(tokens.shape[1], cu_seqlens, tokens.device))
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, rotation=rotation)
        x = self.layer_norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors` into a folder, made if missing; a file is replaced only when complete."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        weights, config = path / (WEIGHTS_FILE + ".part"), path / (CONFIG_FILE + ".part")
        try:
            save_file({name: value.contiguous() for name, value in self.state_dict().items()}, weights)
            config.write_text(json.dumps(self.config.to_dict(), indent=2) + "\n")
            weights.replace(path / WEIGHTS_FILE)
            config.replace(path / CONFIG_FILE)
        finally:
            weights.unlink(missing_ok=True)
            config.unlink(missing_ok=True)

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> LongNetLM:
        """The model that `save_pretrained` wrote, in evaluation mode.

        Args:
            folder: Holds `config.json` and `model.safetensors`.
            device: Where the model goes.
            dtype: Of its parameters. Default: as saved.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If the configuration is malformed.
            RuntimeError: If the weights do not fit the configuration.
        """
        path = Path(folder)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (path / name).is_file():
                raise FileNotFoundError(f"folder must hold {CONFIG_FILE} and {WEIGHTS_FILE}, no {name} in {path}")
        model = cls(LongNetConfig.from_dict(json.loads((path / CONFIG_FILE).read_text())))
        model.load_state_dict(load_file(path / WEIGHTS_FILE), assign=True)  # keeps the dtypes of the file
        return model.to(device=device, dtype=dtype).eval()
