"""A pattern as FlexAttention's `mask_mod` and `score_mod`, for models that call `flex_attention` themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.core.branch import Kept, Near
from flexdilated.core.call import MaskMod, ScoreMod
from flexdilated.core.integers import is_integer
from flexdilated.core.losses import check_losses
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.pieces import plan_pieces, shifted_branches
from flexdilated.core.tracing import uncached


def dilated_mask_mod(
    pattern: DilatedPattern, num_heads: int, *, seq_len: int, is_causal: bool = False, num_kv_heads: int | None = None
) -> MaskMod:
    """`mask_mod(b, h, q_idx, kv_idx)`: whether at least one branch joins the pair.

    >>> mask_mod = dilated_mask_mod(DilatedPattern((4,), (1,)), 8, seq_len=16)
    >>> mask_mod(0, 0, torch.tensor(3), torch.arange(5)).tolist()
    [True, True, True, True, False]

    With `dilated_score_mod` of the same arguments, `flex_attention` computes `dilated_attention`, gradients included.

    Args:
        pattern: Which positions attend to which.
        num_heads: Query heads.
        seq_len: Tokens; queries and keys have the same positions.
        is_causal: Whether a query sees only keys at its own position and before.
        num_kv_heads: Key/value heads under grouped-query attention: the rules of the pattern apply to them. Default: `num_heads`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is below 1, or `num_kv_heads` does not divide `num_heads`.
        NotImplementedError: If torchscale's zero keys take part at this length: they are no pair of tokens.
    """
    num_kv_heads = checked(pattern, num_heads, seq_len, is_causal, num_kv_heads)
    return uncached(mask_mod_of)(pattern, num_heads, num_kv_heads, is_causal)


def dilated_score_mod(
    pattern: DilatedPattern, num_heads: int, *, seq_len: int, is_causal: bool = False, num_kv_heads: int | None = None
) -> ScoreMod | None:
    """`score_mod(score, b, h, q_idx, kv_idx)`: the score plus the log of how many branches join the pair.

    >>> score_mod = dilated_score_mod(DilatedPattern((4, 8), (1, 1)), 8, seq_len=16)
    >>> score_mod(torch.zeros(3), 0, 0, torch.tensor(0), torch.tensor([3, 7, 8])).exp().round().tolist()
    [2.0, 1.0, 0.0]

    A key that m branches of segments join counts m times in the softmax, and a pair of the window or the global tokens once. A pair
    that no branch joins gets -inf, so the mask only saves work. The arguments are those of `dilated_mask_mod`.

    None for a pattern in which every pair counts once, such as a window, global tokens and one branch of segments: `flex_attention`
    with the mask alone computes it, in less time.

    Raises:
        TypeError: As `dilated_mask_mod`.
        ValueError: As `dilated_mask_mod`.
        NotImplementedError: As `dilated_mask_mod`; or if `detach_weights` would change the gradient, which is then not that of any
            score function.
    """
    score_mod = checked_score_mod(pattern, num_heads, seq_len, num_kv_heads, is_causal=is_causal)
    return score_mod if has_several(pattern) else None


def checked_score_mod(
    pattern: DilatedPattern, num_heads: int, seq_len: int, num_kv_heads: int | None, *, is_causal: bool
) -> ScoreMod:
    """`dilated_score_mod`, which also serves where every pair counts once."""
    num_kv_heads = checked(pattern, num_heads, seq_len, is_causal, num_kv_heads)
    if pattern.detach_weights and has_several(pattern):
        raise NotImplementedError(
            "pattern must have detach_weights=False, got True: constant mixing weights are the gradient of no score_mod; use "
            "dataclasses.replace(pattern, detach_weights=False), which has the same outputs, or flexdilated.dilated_attention"
        )
    return uncached(score_mod_of)(pattern, num_heads, num_kv_heads, is_causal)


def has_several(pattern: DilatedPattern) -> bool:
    """Whether a pair may count more than once: a head may run several branches of segments."""
    return len(pattern.split("masks")[0]) > 1 and pattern.heads == "all"


@lru_cache(maxsize=128)
def mask_mod_of(pattern: DilatedPattern, num_heads: int, num_kv_heads: int, is_causal: bool) -> MaskMod:
    clauses: list[_Clause | _NearClause] = [*_clauses(pattern, num_kv_heads), *_near(pattern)]
    group = num_heads // num_kv_heads

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        joined = clauses[0].joins(h // group, q_idx, kv_idx)
        for clause in clauses[1:]:
            joined = joined | clause.joins(h // group, q_idx, kv_idx)
        return joined & (q_idx >= kv_idx) if is_causal else joined

    mask_mod.__name__ = f"dilated_mask_mod_{_label(pattern, is_causal)}"
    return mask_mod


@lru_cache(maxsize=128)
def score_mod_of(pattern: DilatedPattern, num_heads: int, num_kv_heads: int, is_causal: bool) -> ScoreMod:
    clauses, near, group = _clauses(pattern, num_kv_heads), _near(pattern), num_heads // num_kv_heads

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        count = torch.zeros_like(score)
        for clause in clauses:
            count = count + clause.joins(h // group, q_idx, kv_idx).to(score.dtype)
        for near_clause in near:
            count = torch.where(near_clause.joins(h // group, q_idx, kv_idx), 1.0, count)
        score = score + torch.log(count)
        return torch.where(q_idx >= kv_idx, score, -math.inf) if is_causal else score

    score_mod.__name__ = f"dilated_score_mod_{_label(pattern, is_causal)}"
    return score_mod


class _NearClause(NamedTuple):
    """The window and the global tokens of a mask, in all heads."""

    near: Near

    def joins(self, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Whether the pair is one of the window or of the global tokens."""
        joined: Tensor = self.near.joins(*(_holding(x, max(self.near)) for x in (q_idx, kv_idx)))
        return joined


class _Clause(NamedTuple):
    """One branch of segments of a mask: its segments, the heads that run it, and how their offsets follow from them."""

    length: int
    rate: int
    heads: range
    has_every_head: bool
    offset: Callable[[Tensor], Tensor | int]

    def joins(self, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Whether both positions are kept by a head, in one segment."""
        h, q_idx, kv_idx = (_holding(x, self.length) for x in (h, q_idx, kv_idx))
        joined: Tensor = Kept(self.length, self.rate, self.offset(h)).joins(q_idx, kv_idx)
        return joined if self.has_every_head else joined & (h >= self.heads.start) & (h < self.heads.stop)


def _holding(x: Tensor, length: int) -> Tensor:
    """`x` in a signed dtype that can hold a segment length or window size: in smaller dtypes torch would wrap around."""
    return x if not isinstance(x, Tensor) or (x.dtype.is_signed and length <= torch.iinfo(x.dtype).max) else x.long()


def _near(pattern: DilatedPattern) -> tuple[_NearClause, ...]:
    """The clause of the pairs that count once, if there are any."""
    near = pattern.split("masks")[1]
    return (_NearClause(near),) if near else ()


def _clauses(pattern: DilatedPattern, num_kv_heads: int) -> tuple[_Clause, ...]:
    """The clause of each branch of segments, in terms of key/value heads."""

    def offset_rule(branch: int, rate: int) -> Callable[[Tensor], Tensor | int]:
        if pattern.heads == "grouped":
            return lambda h: branch % rate
        if pattern.offsets == "blocked":
            sharing = -(-num_kv_heads // rate)
            return lambda h: h // sharing
        return lambda h: h % rate

    clauses = []
    for i, (length, rate) in enumerate(pattern.split("masks")[0]):
        heads = pattern.head_range(i, num_kv_heads)
        clauses.append(_Clause(length, rate, heads, len(heads) == num_kv_heads, offset_rule(i, rate)))
    return tuple(clauses)


def _label(pattern: DilatedPattern, is_causal: bool) -> str:
    segments, near = pattern.split("masks")
    names = [f"w{length}r{rate}" for length, rate in segments]
    names += [f"{name}{number}" for name, number in zip(("window", "global"), near) if number]
    branches = "_".join(names)
    rule = "grouped" if pattern.heads == "grouped" else pattern.offsets
    return f"{branches}_{rule}{'_causal' if is_causal else ''}"


def checked(pattern: DilatedPattern, num_heads: int, seq_len: int, is_causal: bool, num_kv_heads: int | None) -> int:
    """Check all arguments of a mask and return the number of key/value heads."""
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}")
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, value in (("num_heads", num_heads), ("seq_len", seq_len), ("num_kv_heads", kv_heads)):
        if not is_integer(value):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if num_heads % kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got {kv_heads}")
    check_losses(pattern, seq_len, kv_heads, is_causal)
    if pattern.zero_padding and (
        shifted_branches(pattern, seq_len)
        or any(piece.zero_keys for piece in plan_pieces(pattern, ((0, seq_len),), kv_heads, is_causal))
    ):
        raise NotImplementedError(
            f"pattern must add no zero keys at seq_len={seq_len}, got zero_padding=True with segments {pattern.segment_lengths} at "
            f"rates {pattern.dilation_rates}: a mask cannot hold keys that are no tokens; use flexdilated.dilated_attention, or "
            "dataclasses.replace(pattern, zero_padding=False)"
        )
    return kv_heads
