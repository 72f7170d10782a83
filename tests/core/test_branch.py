"""The kinds of branches: the rule of segments against loops over integers, and consumers that meet a kind they do not know."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from flexdilated import (
    DilatedKVCache,
    DilatedPattern,
    MultiheadDilatedAttention,
    analysis,
    attention_map,
    choose_pattern,
    create_dilated_block_mask,
    dilated_attention,
    dilated_mask_mod,
    dilated_score_mod,
    draw_pattern,
    reference,
)
from flexdilated.backends.autograd import portable
from flexdilated.backends.autograd.grids import draw_grids
from flexdilated.core.branch import Kept
from flexdilated.core.call import Call
from flexdilated.core.pattern import decode, encode
from flexdilated.core.pieces import plan_pieces
from flexdilated.core.shifted import is_shifted
from flexdilated.distributed.planner.plan import context_plan
from flexdilated.draw.blocks import draw_blocks
from flexdilated.masks.blocks import head_branches
from flexdilated.nn.position import XPos


class Comet(NamedTuple):
    """A kind of branch that nobody knows."""

    tail: int


@dataclass(frozen=True)
class PatternWithComet(DilatedPattern):
    @property
    def branches(self) -> Any:
        return (*super().branches, Comet(3))


PATTERN = PatternWithComet((5, 13), (1, 2))
Q = torch.randn(1, 13, 4, 8)


def attend(**options: Any) -> Any:
    return dilated_attention(Q, Q, Q, PATTERN, **options)


CONSUMERS: dict[str, Callable[[], Any]] = {
    "definition": lambda: reference.dilated_attention(Q, Q, Q, PATTERN),
    "sdpa": lambda: attend(backend="sdpa"),
    "triton": lambda: attend(backend="triton"),
    "flex": lambda: attend(backend="flex"),
    "functions": lambda: attend(score_mod=lambda score, b, h, q_idx, kv_idx: score),
    "pieces": lambda: plan_pieces(PATTERN, ((0, 13),), 4, False),
    "operators": lambda: encode(PATTERN),
    "shift": lambda: is_shifted(13, Call(dataclasses.replace(PATTERN, zero_padding=True))),
    "mask_mod": lambda: dilated_mask_mod(PATTERN, 4, seq_len=13),
    "score_mod": lambda: dilated_score_mod(PATTERN, 4, seq_len=13),
    "block mask": lambda: create_dilated_block_mask(PATTERN, 4, seq_len=13, device="cpu"),
    "block lists": lambda: head_branches(PATTERN, 0, 4, 13),
    "grids": lambda: draw_grids(PATTERN, 13, 4, 1, False, [1, 1], Q.device),
    "portable": lambda: portable.attend(Q, Q, Q, Call(PATTERN, scale=1.0, num_heads=4)),
    "maps": lambda: attention_map(Q, Q, PATTERN, queries=0),
    "module": lambda: MultiheadDilatedAttention(32, 4, PATTERN)(Q.flatten(2), Q.flatten(2), Q.flatten(2)),
    "decode": lambda: DilatedKVCache(PATTERN, batch_size=1, num_kv_heads=4, head_dim=8),
    "positions": lambda: XPos(8, PATTERN),
    "planner": lambda: context_plan(PATTERN, (6, 7), 4, range(4), 1, ((0, 13),), False),
    "connected": lambda: PATTERN.crosses_boundaries(13, 4),
    "pairs": lambda: PATTERN.count_pairs(13, 4),
    "pairs by head": lambda: analysis.count_pairs(PATTERN, 13, 4),
    "multiplicities": lambda: analysis.count_multiplicities(PATTERN, 13, 4),
    "residues": lambda: analysis.missing_residues(PATTERN, 4),
    "coverage": lambda: analysis.count_uncovered(PATTERN, 13, 4),
    "layers": lambda: analysis.layers_to_cover(PATTERN, 13, 4),
    "reach": lambda: analysis.longest_reach(PATTERN, 13, 4),
    "reachable": lambda: analysis.reachable(PATTERN, 13, 4),
    "keys seen": lambda: analysis.keys_seen(PATTERN, 13, 4, query=3),
    "choice": lambda: choose_pattern(13, 4, patterns=[PATTERN]),
    "notebook": PATTERN._repr_svg_,
}


@pytest.mark.parametrize("name", CONSUMERS)
def test_consumers_refuse_a_kind_of_branch_that_they_do_not_know(name: str) -> None:
    with pytest.raises(
        NotImplementedError, match=r"^[\w' ]+ must get branches of kind Segments, got a branch of kind Comet: Comet"
    ):
        CONSUMERS[name]()


@pytest.mark.parametrize("draw", [draw_pattern, draw_blocks])
def test_pictures_refuse_a_kind_of_branch_that_they_do_not_know(draw: Callable[..., Any]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(NotImplementedError, match=r"must get branches of kind Segments, got a branch of kind Comet"):
        draw(PATTERN, 13, 4)


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


@pytest.mark.parametrize("field", dataclasses.fields(DilatedPattern), ids=lambda field: field.name)
def test_every_field_of_a_pattern_survives_an_operator(field: dataclasses.Field[Any]) -> None:
    pattern = DilatedPattern((7, 31), (2, 3))
    others: dict[str, Any] = {"segment_lengths": (11, 31), "dilation_rates": (2, 5), "heads": "grouped", "offsets": "interleaved"}
    changed = dataclasses.replace(pattern, **{field.name: others.get(field.name, not getattr(pattern, field.name))})

    assert changed != pattern
    assert decode(encode(changed)) == changed
