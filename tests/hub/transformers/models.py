"""Tiny random models of the library under dilated attention, and inputs for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexdilated import DilatedPattern

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from transformers.cache_utils import Cache, DynamicCache, QuantizedLayer, StaticCache  # noqa: E402

from flexdilated.hub import transformers as hub  # noqa: E402
from flexdilated.hub.transformers.cache import CACHE  # noqa: E402

VOCAB, TOKENS, BATCH = 31, 23, 3
DENSE = DilatedPattern((64,), (1,))
RAGGED = DilatedPattern((5, 13), (1, 3))
INTERLEAVED = DilatedPattern((4, 11, 32), (1, 2, 4), offsets="interleaved")
GROUPED = DilatedPattern.grouped((5, 11), (1, 2))
PATTERNS = [RAGGED, INTERLEAVED, GROUPED]
TEXT = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6}
DECODER = {**TEXT, "num_key_value_heads": 2, "max_position_embeddings": 128}
DECODER |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
DECODERS = ["Llama", "Qwen3", "Mistral"]


def build(name: str, pattern: DilatedPattern | None = RAGGED, **options: Any) -> Any:
    sizes: dict[str, Any]
    if name == "Bert":
        sizes, kind = {**TEXT, "max_position_embeddings": 64}, "ForMaskedLM"
    elif name == "ViT":
        sizes = {"hidden_size": 48, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6}
        sizes, kind = {**sizes, "image_size": 20, "patch_size": 4, "num_labels": 5}, "ForImageClassification"
    else:
        sizes, kind = {**DECODER, "sliding_window": None} if name != "Llama" else dict(DECODER), "ForCausalLM"
        sizes = {**sizes, "head_dim": 8} if name == "Qwen3" else sizes
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    if pattern is not None:
        hub.set_pattern(config, pattern)
    return getattr(transformers, name + kind)(config).eval()


def dilated(pattern: DilatedPattern) -> dict[str, Any]:
    return {"dilated_pattern": pattern.to_dict(), "attn_implementation": "flexdilated"}


def make_dense(model: Any) -> None:
    model.config.dilated_pattern = None
    model.set_attn_implementation("sdpa")


def draw_tokens(batch: int = BATCH, num_tokens: int = TOKENS) -> Tensor:
    return torch.randint(2, VOCAB, (batch, num_tokens))


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 20, 20, dtype=dtype)} if name == "ViT" else {"input_ids": draw_tokens()}


def run(model: nn.Module, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(**inputs).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)).to(logits.dtype)
    (logits * weights).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mask_of(lengths: list[int], side: str) -> Tensor:
    rows = [[1] * n + [0] * (TOKENS - n) for n in lengths]
    mask = torch.tensor([row[::-1] if side == "left" else row for row in rows])
    return mask.roll(5, 1) if side == "among" else mask  # padding before and after some tokens


def longnet(**options: Any) -> Any:
    sizes = {"vocab_size": 256, "embed_dim": 24, "num_layers": 2, "num_heads": 4, "ffn_dim": 31}
    config = hub.LongNetHFConfig(**{**sizes, "dilated_pattern": RAGGED.to_dict(), **options})
    return hub.LongNetForCausalLM(config).eval()


def gpt_oss(pattern: DilatedPattern) -> Any:
    sizes = {**DECODER, "hidden_size": 24, "intermediate_size": 16, "head_dim": 4}
    config = transformers.GptOssConfig(**sizes, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2)
    model = transformers.GptOssForCausalLM(hub.set_pattern(config, pattern)).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


class LosslessLayer(QuantizedLayer):
    """A layer of a quantized cache that keeps every value, so that outputs can be compared."""

    def __init__(self) -> None:
        super().__init__(residual_length=4)

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor

    def _dequantize(self, q_tensor: Tensor) -> Tensor:
        return q_tensor


CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=TOKENS + 6),
    "quantized": lambda config: Cache(layer_class_to_replicate=LosslessLayer),
    "bounded": lambda config: hub.DilatedCache(),
}


def decode(model: Any, tokens: Tensor, cache: Any, chunks: list[int], mask: Tensor | None = None, done: int = 0) -> Tensor:
    logits = []
    for size in chunks:
        options = {}
        if mask is not None:
            seen = mask[:, : done + size]
            options = {"attention_mask": seen, "position_ids": (seen.cumsum(-1) - 1).clamp(min=0)[:, done:]}
        part = model(tokens[:, done : done + size], **{CACHE: cache}, use_cache=True, **options)
        logits.append(part.logits)
        done += size
    assert done == tokens.shape[1]
    return torch.cat(logits, dim=1)
