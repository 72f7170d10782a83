"""Many packed documents against one sequence as long as all of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

from benchmarks.attention import (
    SMALL_LONGNET,
    SMALL_TOKENS,
    Inputs,
    assert_matches_definition,
    assert_rows_match_definition,
    forward,
    forward_backward,
    random_inputs,
)
from benchmarks.conftest import Sizes
from benchmarks.memory import Direction
from benchmarks.timing import Ratio, side_by_side
from flexdilated import DilatedPattern

PATTERN = DilatedPattern.longnet()


def random_borders(num_documents: int, num_tokens: int) -> list[int]:
    """`cu_seqlens` of documents of log-normal length, each at least one token long, `num_tokens` in all."""
    shares = torch.randn(num_documents).exp()
    draws = torch.multinomial(shares, num_tokens - num_documents, replacement=True)
    lengths = torch.bincount(draws, minlength=num_documents) + 1
    return [0, *accumulate(lengths.tolist())]


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_packed_documents(benchmark: Any, sizes: Sizes, record: Callable[..., None], direction: Direction) -> None:
    num_documents, num_tokens = sizes.documents
    x = random_inputs(num_tokens, torch.float32)
    cu_seqlens = torch.tensor(random_borders(num_documents, num_tokens))
    attend = forward if direction == "forward" else forward_backward
    assert_matches_definition(SMALL_LONGNET, torch.float32, borders=random_borders(7, SMALL_TOKENS))
    result, ratio = side_by_side(
        benchmark,
        lambda: attend(x, PATTERN, cu_seqlens=cu_seqlens),
        lambda: attend(x, PATTERN),
        rounds=min(3, sizes.rounds),
    )
    assert_rows_match_definition(x, PATTERN, *((result,) if direction == "forward" else result[:2]), cu_seqlens=cu_seqlens)
    name = f"documents/{direction}/float32/{num_documents} documents/N={num_tokens}"
    record(
        Ratio(name, ratio, 1.5, "lower"),
        shape=x.q.shape,
        dtype=torch.float32,
        longest_document=int(cu_seqlens.diff().max()),
    )


@pytest.mark.parametrize("arrangement", ["equal", "scattered"])
@pytest.mark.parametrize("scored", [False, True], ids=["plain", "score_mod"])
def test_short_documents(benchmark: Any, sizes: Sizes, record: Callable[..., None], arrangement: str, scored: bool) -> None:
    """Packed documents of 32 tokens, or of 16 to 48, against a batch of as many of 32 tokens."""
    num_documents = sizes.short_documents
    x = random_inputs(32 * num_documents, torch.float32)
    batch = Inputs(*(None if t is None else t.reshape(num_documents, 32, *t.shape[2:]) for t in x))
    lengths = torch.full((num_documents,), 32)
    if arrangement == "scattered":
        spread = torch.randint(-16, 17, (num_documents // 2,))
        lengths += torch.cat([spread, -spread])
    cu_seqlens = torch.tensor([0, *accumulate(lengths.tolist())])
    options: dict[str, Any] = {"score_mod": lambda score, b, h, i, j: score - 0.1 * (i - j)} if scored else {}
    result, ratio = side_by_side(
        benchmark,
        lambda: forward_backward(x, PATTERN, cu_seqlens=cu_seqlens, **options),
        lambda: forward_backward(batch, PATTERN, **options),
        rounds=min(3, sizes.rounds),
    )
    if not scored:
        assert_rows_match_definition(x, PATTERN, *result[:2], cu_seqlens=cu_seqlens)
    name = f"documents/{arrangement}/{'score_mod' if scored else 'plain'}/float32/{num_documents} documents of 32 tokens"
    record(Ratio(name, ratio, 3.0, "lower"), shape=x.q.shape, dtype=torch.float32)
