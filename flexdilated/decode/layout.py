"""Which positions the rows of a cache hold: what a query sees, and where a new token goes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.core.bounded_cache import recent
from flexdilated.core.branch import Kept, Segments, ceil_div, num_kept
from flexdilated.core.functorch import in_no_mode
from flexdilated.core.pattern import MAX_LENGTH, DilatedPattern
from flexdilated.core.tracing import reads_freely


class StepPlan(NamedTuple):
    """What one new token per sequence sees once it is stored, and where it is stored."""

    places: Tensor  # (B, heads, branches, D): the row of the token; where a branch does not keep it, its row in another branch
    unstored: Tensor | None  # (B, heads, 1, 1): heads in which no branch stores it; None: there is none
    bias: Tensor  # (B, heads, 1, rows): 0 for a row that it sees, -inf for another; 0 where it sees none, on one rank
    unreached: Tensor | None  # (B, heads, 1, 1): heads in which no branch keeps it; None: there is none


class Layout:
    """The rows of the heads among `heads` that run the same branches, as `Store` describes them.

    `self.heads` count from the first of `heads`. `total_kv_heads`: heads of the model. `max_length`: tokens of the longest
    sequence. `like` `(..., D)` has the head dim, dtype and device.
    """

    def __init__(
        self,
        pattern: DilatedPattern,
        branches: tuple[int, ...],
        heads: range,
        total_kv_heads: int,
        max_length: int | None,
        like: Tensor,
        rank: int,
        num_ranks: int,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.head_dim, self.dtype, device = like.shape[-1], like.dtype, like.device
        self.key = (pattern, branches, heads, total_kv_heads, max_length, self.head_dim, self.dtype, device, rank, num_ranks)
        model_heads = [head for head in pattern.head_range(branches[0], total_kv_heads) if head in heads]
        first = model_heads[0] - heads.start
        self.num_kv_heads, self.heads = len(heads), range(first, first + len(model_heads))
        self.has_all_heads = len(model_heads) == len(heads)
        segments, self.near = pattern.split("DilatedKVCache")
        window, num_global = self.near
        self.segments = [segments[i] for i in branches if i < len(segments)]
        ring, pinned = [Segments(window, 1)] * (window > 0), [Segments(MAX_LENGTH, 1)] * (num_global > 0)
        self.branches, self.ring = [*self.segments, *ring, *pinned], -1 - len(pinned)  # the branch of a window
        self.period = math.lcm(*(w for w, _ in (*self.segments, *ring)))
        # Of each branch: how far behind its query the last key is, the first key, and the end of the keys.
        apart = [window] * len(self.segments) + [0] * len(ring + pinned)
        least = [num_global] * len(self.segments + ring) + [0] * len(pinned)
        ends = [MAX_LENGTH] * len(self.segments + ring) + [num_global] * len(pinned)
        longest = MAX_LENGTH if max_length is None else max_length
        self.rows = [-(-num_kept(min(w, end, longest), r, 0) // num_ranks) for (w, r), end in zip(self.branches, ends)]
        self.starts = [sum(self.rows[:i]) for i in range(len(self.rows))]
        offsets = [[pattern.offset(i, head, total_kv_heads) for i in branches] for head in model_heads]
        self.offsets = torch.tensor(offsets, device=device)  # (heads, branches)
        columns = (*zip(*self.branches), self.starts, [rows - 1 for rows in self.rows], apart, least, ends)
        numbers = [torch.tensor(x, device=device) for x in columns]
        self.lengths_of_segments, self.rates, self.first_rows, self.last_rows, self.apart, self.least, self.ends = numbers
        self.places = self._places(rank)
        self.bias_seen, self.bias_hidden = torch.tensor([[0.0], [-math.inf]], dtype=self.dtype, device=device).unbind()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def _places(self, rank: int) -> list[Tensor]:
        """The position of each row of a rank in its segment, minus the head's offset, per branch: `(rows,)`.

        If the number of rows is no multiple of the ranks, the last row of some ranks is past the end of the segment and unused.
        """
        return [
            (torch.arange(rows, device=self.offsets.device) * self.num_ranks + rank) * r
            for (_, r), rows in zip(self.branches, self.rows)
        ]

    def positions(self, lengths: Tensor, places: list[Tensor] | None = None) -> list[Tensor]:
        """The position that each row stores after `lengths` `(B,)` tokens, per branch `(B, heads, rows)`.

        It is below 0, or past the last token, if the row stores none. `places`: those of another rank.
        """
        places = self.places if places is None else places
        last_position = lengths[:, None, None] - 1
        starts = last_position // self.lengths_of_segments * self.lengths_of_segments + self.offsets  # (B, heads, branches)
        positions = [starts[..., i, None] + x for i, x in enumerate(places)]
        if self.near.window:
            positions[self.ring] = self._in_window(last_position, places[self.ring]).expand_as(positions[self.ring])
        return positions

    def _in_window(self, last_position: Tensor, places: Tensor) -> Tensor:
        """The position that each row of a window stores after `last_position` `(B, 1, 1)`, as `positions`: `(B, 1, rows)`."""
        window = self.near.window
        return torch.where(places < window, last_position - (last_position - places) % window, -1)

    def last_positions(self, rank: int, end: Tensor) -> Tensor:
        """`(B, heads, sum of rows)`: the position that each row of a rank holds after the first `end` `(B,)` tokens, or -1."""
        positions = torch.cat(self.positions(end.clamp(min=1), self._places(rank)), dim=-1)
        return torch.where(positions < end[:, None, None], positions, -1).clamp(min=-1)

    def keeps(self, positions: Tensor) -> Tensor:
        """Whether a head's branch keeps a position: `(B, heads, T, branches)` of `(B, T)`."""
        branches = Kept(self.lengths_of_segments, self.rates, self.offsets[:, None])
        return branches.keeps(positions[:, None, :, None])

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first position that queries at `positions` `(...)` see, and the end of those: `(..., branches)`, before dilation.

        A pair belongs to one kind of branch: to the global tokens, else to the window, else to the segments.
        """
        firsts = self._starts(positions)
        if self.near.window:
            firsts[..., self.ring] = positions - self.near.window + 1
        return firsts.maximum(self.least), (positions[..., None] + 1 - self.apart).minimum(self.ends)

    def _starts(self, positions: Tensor) -> Tensor:
        """Where the segments of `positions` `(...)` begin, `(..., branches)`."""
        return positions[..., None] // self.lengths_of_segments * self.lengths_of_segments

    def stored_seen(self, positions: Tensor, lengths: Tensor, keeps: Tensor) -> list[Tensor]:
        """Which rows queries at `positions` `(B, T)` see after `lengths` `(B,)` tokens, per branch `(B, heads, T, rows)`.

        Each query is the last token or a later one: the rows of its segment are stored up to the last token.
        """
        (firsts, ends), starts = self.bounds(positions), self._starts(positions)
        limits = ((x - starts)[:, None] - self.offsets[:, None] for x in (firsts, ends.minimum(lengths[:, None, None])))
        lower, upper = limits  # (B, heads, T, branches)
        upper = torch.where(keeps, upper, 0)
        masks = [x < upper[..., i, None] for i, x in enumerate(self.places)]
        if self.near.global_tokens:
            masks = [mask & (x >= lower[..., i, None]) for i, (mask, x) in enumerate(zip(masks, self.places))]
        if self.near.window:
            stored = self._in_window(lengths[:, None, None] - 1, self.places[self.ring])[:, :, None]
            masks[self.ring] = (stored >= firsts[:, None, :, self.ring, None]).expand_as(masks[self.ring])
        return masks

    def new_seen(self, positions: Tensor, keeps: Tensor) -> list[Tensor]:
        """Which of the tokens at `positions` `(B, T)` these tokens see, per branch `(B, heads, T, tokens of this rank)`."""
        local = slice(self.rank, None, self.num_ranks)
        keys, (firsts, ends) = positions[:, None, local], self.bounds(positions)  # (B, 1, tokens of this rank), (B, T, branches)
        return [
            ((keys >= first) & (keys < end))[:, None] & keeps[..., i, None] & keeps[:, :, None, local, i]
            for i, (first, end) in enumerate(zip(firsts[..., None].unbind(-2), ends[..., None].unbind(-2)))
        ]

    def index(self, positions: Tensor) -> Tensor:
        """The places among the stored rows of tokens at `positions` `(...)`, `(..., branches)`; as if this rank stored all.

        The next row of a full sequence is after the last one. Nothing is added to it, but its place must exist.
        """
        return (self._row(positions) // self.num_ranks).clamp(max=self.last_rows) + self.first_rows

    def _row(self, positions: Tensor) -> Tensor:
        """The row of tokens in their segments, over all ranks."""
        return positions[..., None] % self.lengths_of_segments // self.rates

    def _plan(self, positions: Tensor, is_new: Tensor | None) -> StepPlan:
        keeps = self.keeps(positions[:, None])
        unreached = ~keeps.any(-1, keepdim=True)
        seen_rows = torch.cat(self.stored_seen(positions[:, None], positions + 1, keeps), dim=-1)  # the token itself is stored
        if self.num_ranks == 1:  # kernels disagree on a row without a key: let it see everything, and drop what it gives
            seen_rows = seen_rows | unreached
        stores = keeps[:, :, 0] & (positions[:, None] < self.ends)[:, None]
        stores = stores if is_new is None else stores & is_new[:, None, None]
        if self.num_ranks > 1:
            stores = stores & (self._row(positions) % self.num_ranks == self.rank)[:, None]
        places = torch.where(stores, self.index(positions)[:, None], -1)
        places = torch.where(stores, places, places.amax(-1, keepdim=True).clamp(min=0))
        return StepPlan(
            places[..., None].expand(-1, -1, -1, self.head_dim),
            ~stores.any(-1)[..., None, None],
            torch.where(seen_rows, self.bias_seen, self.bias_hidden),
            unreached,
        )

    def next_plan(self, lengths: Tensor, added: Tensor) -> StepPlan:
        """The plan of one token per sequence after `lengths` `(B,)` others, stored where `added` `(B,)` is above 0.

        On a CPU, layers of equal layout share it. Plans repeat after a whole period behind the global tokens: no window and no
        segment then holds one of them.
        """
        if not reads_freely(lengths):
            return self._plan(lengths, added > 0)
        first = (1 + ceil_div(self.near.global_tokens, self.period)) * self.period
        positions, counts = tuple(min(p, first + p % self.period) for p in lengths.tolist()), added.tolist()
        return _plan_of(self, positions, None if all(counts) else tuple(n > 0 for n in counts))

    def why_lost(self, length: int, num_seen: int, stored: int, sequence: int) -> str | None:
        """Why a sequence of `num_seen` tokens, the first `stored` of them stored, cannot be cut to `length`; None if it can."""
        window, num_global = self.near
        # Token p replaced token p - window, which the queries up to p - 1 see. Global tokens are not replaced.
        if (first := max(length - window + 1, num_global)) < length and stored > first + window:
            return (
                f"length must keep the keys of the window={window} before it stored, got {length} of {num_seen} tokens in sequence "
                f"{sequence}: later tokens replaced some of them; decode that sequence again, or set records_past before the calls"
            )
        for w, _ in self.segments:
            if length % w and (stored - 1) // w != length // w:
                return (
                    f"length must end in the segment that is stored, or where one begins, got {length} of {num_seen} tokens in "
                    f"sequence {sequence}: segment {length // w} of segment_length={w} is overwritten; decode that sequence again"
                )
        return None


def layouts_of(
    pattern: DilatedPattern, heads: range, total_kv_heads: int, max_length: int | None, like: Tensor, rank: int, num_ranks: int
) -> list[Layout]:
    """One layout for all heads, or with `heads="grouped"` one per branch that some of the heads run."""
    branches, segments = range(len(pattern.branches)), len(pattern.segment_lengths)
    # A window and the global tokens are the last branches, of all heads.
    runs = [(i, *branches[segments:]) for i in range(segments)] if pattern.heads == "grouped" and segments else [tuple(branches)]
    run_here = [run for run in runs if any(head in heads for head in pattern.head_range(run[0], total_kv_heads))]
    return [Layout(pattern, run, heads, total_kv_heads, max_length, like=like, rank=rank, num_ranks=num_ranks) for run in run_here]


def _size_of(plan: StepPlan, layout: Layout, positions: tuple[int, ...], is_new: object) -> int:
    return sum(x.untyped_storage().nbytes() for x in plan if x is not None) + 48 * len(positions)


@recent(_size_of, room=1 << 24)
@in_no_mode
def _plan_of(layout: Layout, positions: tuple[int, ...], is_new: tuple[bool, ...] | None) -> StepPlan:
    device = layout.offsets.device  # not the default device
    new_tokens = None if is_new is None else torch.tensor(is_new, device=device)
    plan = layout._plan(torch.tensor(positions, device=device), new_tokens)
    unstored, unreached = (x if x is not None and bool(x.any()) else None for x in (plan.unstored, plan.unreached))
    return plan._replace(unstored=unstored, unreached=unreached)
