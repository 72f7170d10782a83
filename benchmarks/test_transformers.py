"""Time and memory per token of a model of the transformers library, decoding by `DilatedCache`, as the context grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.conftest import Sizes
from benchmarks.timing import Ratio, side_by_side
from flexdilated import DilatedPattern

pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from flexdilated.hub.transformers import DilatedCache
from flexdilated.hub.transformers.cache import CACHE

PATTERN = DilatedPattern.longnet()
STEPS = 16  # tokens per timed call
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
GROWTH_TARGET = 1.3  # the whole model: a small one, whose attention is a part of a token's time


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, max_position_embeddings=1 << 21, dilated_pattern=PATTERN.to_dict(), attn_implementation="flexdilated"
    )
    return LlamaForCausalLM(config).eval()


def last_logits(llama: Any, cache: Any, tokens: Tensor, chunk: int) -> Tensor:
    """Logits of the last token, of a row of tokens read in chunks."""
    with torch.no_grad():
        for part in tokens.split(chunk, dim=1):
            out = llama(part, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits
    return out


def test_dilated_cache_growth(benchmark: Any, sizes: Sizes, record: Callable[..., None]) -> None:
    small, large = 1024, 8192 if sizes.quick else 1 << 20
    llama, tokens = model(), torch.randint(97, (1, large))
    few, many, full = DilatedCache(), DilatedCache(), DynamicCache()
    last_logits(llama, few, tokens[:, :small], small)
    last_logits(llama, full, tokens[:, :small], small)
    first_token = tokens[:, :1]
    torch.testing.assert_close(
        last_logits(llama, few, first_token, 1), last_logits(llama, full, first_token, 1), atol=1e-4, rtol=1e-4
    )
    last_logits(llama, many, tokens, large)
    following = torch.randint(97, (1, STEPS))
    out, ratio = side_by_side(
        benchmark,
        lambda: last_logits(llama, many, following, 1),
        lambda: last_logits(llama, few, following, 1),
        rounds=sizes.rounds,
    )
    assert out.isfinite().all()
    assert many.get_seq_length() == large + STEPS * (sizes.rounds + 1)
    where = f"N={small} to {large}"
    all_keys = 2 * many.get_seq_length() * SIZES["hidden_size"] * 4
    record(
        Ratio(f"transformers/time per token/{where}", ratio, GROWTH_TARGET, "lower"),
        Ratio(f"transformers/memory/{where}", many.nbytes / few.nbytes, 1.0, "lower"),
        Ratio(f"transformers/memory over all keys/N={large}", many.nbytes / all_keys, None if sizes.quick else 0.05, "lower"),
        shape=(1, large, SIZES["num_attention_heads"], SIZES["hidden_size"] // SIZES["num_attention_heads"]),
        dtype=torch.float32,
        steps=STEPS,
        cache_bytes=many.nbytes,
    )
