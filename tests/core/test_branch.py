"""The kinds of branches: the rule of segments against loops over integers, and consumers that meet a kind they do not know."""

import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from flexdilated import (
    DilatedKVCache,
    DilatedPattern,
    LongNet,
    LongNetConfig,
    MultiheadDilatedAttention,
    analysis,
    attention_map,
    choose_pattern,
    compat,
    convert,
    create_dilated_block_mask,
    dilated_attention,
    dilated_mask_mod,
    dilated_score_mod,
    draw_pattern,
    reference,
)
from flexdilated.backends.autograd.grids import draw_grids
from flexdilated.backends.dispatch import is_shifted
from flexdilated.core.branch import Kept, Segments, Window
from flexdilated.core.call import Call
from flexdilated.core.pieces import plan_pieces
from flexdilated.distributed.planner.plan import context_plan
from flexdilated.draw.blocks import draw_blocks
from flexdilated.draw.pattern import multiplicity
from flexdilated.hub.encoder import LongNetEncoder
from flexdilated.masks.blocks import head_branches
from flexdilated.nn.position import XPos
from tests.doors.cases import COMET, Comet

LENGTHS, RATES = (5, 7, 11), (1, 2, 3)
GROUPED = DilatedPattern.grouped(LENGTHS, RATES)
TOKENS, WIDTH = 13, 24
DOCUMENT = ((0, TOKENS),)

Entry = Callable[[DilatedPattern, int], object]


def tensors(kv_heads: int, group: int = 2, head_dim: int = 8) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, TOKENS, heads, head_dim) for heads in (kv_heads * group, kv_heads, kv_heads))


def attend(**options: Any) -> Entry:
    return lambda pattern, heads: dilated_attention(*tensors(heads, head_dim=16), pattern, **options)


def torch_s(heads: int) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, heads, batch_first=True)


def config(pattern: DilatedPattern, num_heads: int, num_kv_heads: int | None) -> LongNetConfig:
    return LongNetConfig(
        vocab_size=5, embed_dim=WIDTH, num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, pattern=pattern
    )


# Where a pattern meets a number of key/value heads.
ENTRIES: dict[str, Entry] = {
    "definition": lambda p, heads: reference.dilated_attention(*tensors(heads), p),
    "auto": attend(),
    "sdpa": attend(backend="sdpa"),
    "flex": attend(backend="flex"),
    "functions": attend(score_mod=lambda score, b, h, q_idx, kv_idx: score),
    "mask_mod": lambda p, heads: dilated_mask_mod(p, 2 * heads, seq_len=TOKENS, num_kv_heads=heads),
    "score_mod": lambda p, heads: dilated_score_mod(p, 2 * heads, seq_len=TOKENS, num_kv_heads=heads),
    "block mask": lambda p, heads: create_dilated_block_mask(p, heads, seq_len=TOKENS, device="cpu"),
    "maps": lambda p, heads: attention_map(*tensors(heads)[:2], p, queries=0),
    "decode": lambda p, heads: DilatedKVCache(p, batch_size=1, num_kv_heads=heads, head_dim=8),
    "planner": lambda p, heads: context_plan(p, (7, 6), heads, range(heads), 1, DOCUMENT, False),
    "pairs": lambda p, heads: p.count_pairs(TOKENS, heads),
    "module": lambda p, heads: MultiheadDilatedAttention(WIDTH, heads, p)(*[torch.randn(2, TOKENS, WIDTH)] * 3),
    "picture": lambda p, heads: draw_pattern(p, TOKENS, heads),
    "picture of blocks": lambda p, heads: draw_blocks(p, TOKENS, heads, block_size=4),
}
ENTRIES_OF_HEADS: dict[str, Entry] = {
    "pattern": lambda p, heads: p.head_range(0, heads),
    "reference backend": attend(backend="reference"),
    "multiplicity": lambda p, heads: multiplicity(p, TOKENS, heads),
    "layer": lambda p, heads: MultiheadDilatedAttention(WIDTH, 2 * heads, p, num_kv_heads=heads),
    "from_torch": lambda p, heads: MultiheadDilatedAttention.from_torch(torch_s(heads), p),
    "convert": lambda p, heads: convert(nn.Sequential(torch_s(heads)), p),
    "config": lambda p, heads: config(p, 2 * heads, heads),
    "config of as many": lambda p, heads: config(p, heads, None),
    "encoder": lambda p, heads: LongNetEncoder(WIDTH, 1, heads, p),
    "encoder-decoder": lambda p, heads: LongNet(WIDTH, heads, 1, 1, 11, p, device="meta"),
    "earlier attention": lambda p, heads: compat.DilatedAttention(LENGTHS, RATES)(*tensors(heads, 1)),
    "earlier layer": lambda p, heads: compat.MultiheadDilatedAttention(WIDTH, heads, RATES, LENGTHS),
    "earlier LongNet": lambda p, heads: compat.LongNet(WIDTH, heads, 1, 1, 11, LENGTHS, RATES),
}
ENTRIES_OF_BRANCHES: dict[str, Entry] = {
    "pieces": lambda p, heads: plan_pieces(p, DOCUMENT, heads, False),
    "shift": lambda p, heads: is_shifted(TOKENS, Call(dataclasses.replace(p, zero_padding=True))),
    "block lists": lambda p, heads: head_branches(p, 0, heads, TOKENS),
    "grids": lambda p, heads: draw_grids(p, TOKENS, heads, range(heads), 1, False, [1, 1], torch.device("cpu")),
    "positions": lambda p, heads: XPos(8, p),
    "connected": lambda p, heads: p.crosses_boundaries(TOKENS, heads),
    "residues": lambda p, heads: analysis.missing_residues(p, heads),
    "reachable": lambda p, heads: analysis.reachable(p, TOKENS, heads),
    "choice": lambda p, heads: choose_pattern(TOKENS, heads, patterns=[p]),
}


@pytest.mark.parametrize("entry", ["planner", "picture", "picture of blocks", *ENTRIES_OF_BRANCHES])  # others: tests/doors
def test_consumers_refuse_a_kind_of_branch_that_they_do_not_know(entry: str) -> None:
    with pytest.raises(
        NotImplementedError, match=r"^[\w' ]+ must get branches of kind Segments, .* got a branch of kind Comet: Comet"
    ):
        (ENTRIES | ENTRIES_OF_BRANCHES)[entry](COMET, 4)


@pytest.mark.parametrize("branches", [(Segments(5, 2), Comet(3), Window(4)), (Segments(5, 2), Window(4), Comet(3))])
def test_the_unknown_kind_is_named_wherever_it_stands(branches: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, branch = DilatedPattern((5,), (2,), window=4), branches.index(Comet(3))
    monkeypatch.setattr(DilatedPattern, "branches", property(lambda self: branches))
    for call in (
        lambda: pattern.split("a test"),
        lambda: pattern.head_runs(branch, 4),
        lambda: pattern.offset(branch, 0, 4),
        lambda: pattern.head_range(branch, 4),
    ):
        with pytest.raises(NotImplementedError, match=r"^[\w ]+ must get branches of kind .* got a branch of kind Comet"):
            call()


@pytest.mark.parametrize("entry", [*ENTRIES, *ENTRIES_OF_HEADS])
def test_grouped_heads_are_at_least_as_many_as_branches(entry: str) -> None:
    call = (ENTRIES | ENTRIES_OF_HEADS)[entry]
    for heads in (1, 2):
        message = f"pattern must have at most one branch per key/value head={heads} under heads='grouped', got 3 branches; use more"
        with pytest.raises(ValueError, match=message):
            call(GROUPED, heads)
    if entry != "flex":  # which would compile
        call(GROUPED, 3)


@pytest.mark.parametrize(("length", "rate", "offset"), [(7, 3, 0), (7, 3, 2), (5, 1, 0), (11, 4, 3), (2, 2, 1), (29, 5, 4)])
def test_kept_agrees_with_loops(length: int, rate: int, offset: int) -> None:
    num_tokens, branch = 23, Kept(length, rate, offset)
    kept = [p for p in range(num_tokens) if any(p % length == offset + j * rate for j in range(length))]
    joined = {(q, k) for q, k in product(kept, kept) if q // length == k // length}
    position = torch.arange(num_tokens)

    assert [p for p in range(num_tokens) if branch.keeps(p)] == kept == position[branch.keeps(position)].tolist()
    assert {tuple(pair) for pair in branch.joins(position[:, None], position).nonzero().tolist()} == joined
    assert branch.count_pairs(num_tokens, is_causal=False) == len(joined)
    assert branch.count_pairs(num_tokens, is_causal=True) == sum(k <= q for q, k in joined)
    rows = {p: sum(p // length == other // length and other < p for other in kept) for p in kept}
    assert {p: branch.row(p) for p in kept} == rows
    if length <= num_tokens:
        assert branch.longest_reach() == max((q - k for q, k in joined), default=-1)
