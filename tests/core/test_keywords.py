"""Keywords of other functions: query heads where key/value heads are counted, and those of `nn.MultiheadAttention`."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from flexdilated import DilatedPattern, MultiheadDilatedAttention, analysis
from flexdilated.draw import blocks, pattern

ONE = DilatedPattern((8,), (2,))
TAKE_KV_HEADS: list[Callable[..., Any]] = [
    DilatedPattern.causal,
    ONE.count_pairs,
    ONE.crosses_boundaries,
    ONE.first_token_without_head,
    ONE.first_uncrossed_boundary,
    ONE.head_range,
    ONE.head_runs,
    ONE.offset,
    analysis.analyse,
    analysis.choose_pattern,
    analysis.count_multiplicities,
    analysis.count_pairs,
    analysis.count_uncovered,
    analysis.keys_seen,
    analysis.layers_to_cover,
    analysis.longest_reach,
    analysis.missing_residues,
    analysis.reachable,
    blocks.draw_blocks,
    pattern.draw,
    pattern.multiplicity,
]


@pytest.mark.parametrize("function", TAKE_KV_HEADS, ids=lambda function: function.__qualname__)
def test_the_keyword_of_query_heads_is_rejected(function: Callable[..., Any]) -> None:
    assert "num_kv_heads" in inspect.signature(function).parameters
    message = f"{function.__qualname__}() takes num_kv_heads, the number of key/value heads, got num_heads"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        function(num_heads=8)


@pytest.mark.parametrize(
    ("keyword", "takes"), [("dropout", "dropout_p"), ("batch_first", "tensors (B, N, E) and no option for it")]
)
def test_the_layer_names_what_it_takes_for_keywords_of_torch(keyword: str, takes: str) -> None:
    layer: Any = MultiheadDilatedAttention
    with pytest.raises(TypeError, match=f"{re.escape(takes)}, got {keyword}$"):
        layer(32, 4, ONE, **{keyword: 0})
