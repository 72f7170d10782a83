"""Which positions the rows of a cache hold: what a query sees, and where a new token goes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.core.bounded_cache import recent
from flexdilated.core.branch import Kept, Segments, num_kept
from flexdilated.core.functorch import in_no_mode
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.tracing import reads_freely

FAR = 1 << 62  # past every position


class Plan(NamedTuple):
    """What one new token per sequence sees once it is stored, and where it is stored."""

    places: Tensor  # (B, heads, branches, D): the row of the token; where a branch does not keep it, its row in another branch
    unstored: Tensor | None  # (B, heads, 1, 1): heads in which no branch stores it; None: there is none
    bias: Tensor  # (B, heads, 1, rows): 0 for a row that it sees, -inf for another; 0 where it sees none, on one rank
    unreached: Tensor | None  # (B, heads, 1, 1): heads in which no branch keeps it; None: there is none


class Layout:
    """The rows of the heads among `heads` that run the same branches, as `Store` describes them.

    `self.heads` count from the first of `heads`. `num_heads`: heads of the model. `max_length`: tokens of the longest sequence.
    `like` `(..., D)` has the head dim, dtype and device.
    """

    def __init__(
        self,
        pattern: DilatedPattern,
        branches: tuple[int, ...],
        heads: range,
        num_heads: int,
        max_length: int | None,
        like: Tensor,
        rank: int,
        num_ranks: int,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.head_dim, self.dtype, device = like.shape[-1], like.dtype, like.device
        self.key = (pattern, branches, heads, num_heads, max_length, self.head_dim, self.dtype, device, rank, num_ranks)
        model_heads = [head for head in pattern.head_range(branches[0], num_heads) if head in heads]
        first = model_heads[0] - heads.start
        self.num_kv_heads, self.heads = len(heads), range(first, first + len(model_heads))
        self.has_all_heads = len(model_heads) == len(heads)
        segments, window = pattern.split("DilatedKVCache")
        self.window = None if window is None else window.size  # of the last branch
        self.branches = [segments[i] if i < len(segments) else Segments(pattern.branches[i][0], 1) for i in branches]
        self.period = math.lcm(*(w for w, _ in self.branches))
        longest = math.inf if max_length is None else max_length
        self.rows = [-(-num_kept(int(min(w, longest)), r, 0) // num_ranks) for w, r in self.branches]
        self.starts = [sum(self.rows[:i]) for i in range(len(self.rows))]
        offsets = [[pattern.offset(i, head, num_heads) for i in branches] for head in model_heads]
        self.offsets = torch.tensor(offsets, device=device)  # (heads, branches)
        columns = (*zip(*self.branches), self.starts, [rows - 1 for rows in self.rows])
        self.lengths_of_segments, self.rates, self.first_rows, self.last_rows = (torch.tensor(x, device=device) for x in columns)
        self.tokens_per_held = self.lengths_of_segments.clone()  # `held` is a position over this
        if self.window is not None:
            self.tokens_per_held[-1] = 1
        # What positions are counted by modulo: a window keeps all rows once it is full.
        self.cycles = torch.where(self.tokens_per_held == 1, FAR, self.lengths_of_segments)
        self.places = self._places(rank)
        self.bias_seen, self.bias_hidden = torch.tensor([[0.0], [-math.inf]], dtype=self.dtype, device=device).unbind()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def _places(self, rank: int) -> list[Tensor]:
        """The position of each row of a rank in its segment, per branch: `(heads, rows)`.

        If the number of rows is no multiple of the ranks, the last row of some ranks is past the end of the segment and unused.
        """
        return [
            (torch.arange(rows, device=self.offsets.device) * self.num_ranks + rank) * r + self.offsets[:, i, None]
            for i, ((_, r), rows) in enumerate(zip(self.branches, self.rows))
        ]

    def held(self, lengths: Tensor) -> Tensor:
        """`(B, branches)`: the segment that each branch holds after `lengths` `(B,)` tokens, -1 before the first token.

        For a window: the position of the last token, which determines the positions of all rows.
        """
        return (lengths[:, None] - 1) // self.tokens_per_held

    def positions(self, lengths: Tensor, places: list[Tensor] | None = None) -> list[Tensor]:
        """The position that each row stores after `lengths` `(B,)` tokens, per branch `(B, heads, rows)`.

        It is below 0, or past the last token, if the row stores none. `places`: those of another rank.
        """
        held, places = self.held(lengths), self.places if places is None else places
        positions = [held[:, i, None, None] * w + x for i, ((w, _), x) in enumerate(zip(self.branches, places))]
        if self.window is not None:
            last = held[:, -1, None, None]
            positions[-1] = torch.where(places[-1] < self.window, last - (last - places[-1]) % self.window, -1)
        return positions

    def last_positions(self, rank: int, end: Tensor) -> Tensor:
        """`(B, heads, sum of rows)`: the position that each row of a rank holds after the first `end` `(B,)` tokens, or -1."""
        positions = torch.cat(self.positions(end.clamp(min=1), self._places(rank)), dim=-1)
        return torch.where(positions < end[:, None, None], positions, -1).clamp(min=-1)

    def keeps(self, positions: Tensor) -> Tensor:
        """Whether a head's branch keeps a position: `(B, heads, T, branches)` of `(B, T)`."""
        branches = Kept(self.lengths_of_segments, self.rates, self.offsets[:, None])
        return branches.keeps(positions[:, None, :, None])

    def stored_seen(self, positions: Tensor, lengths: Tensor, keeps: Tensor) -> list[Tensor]:
        """Which rows queries at `positions` `(B, T)` see after `lengths` `(B,)` tokens, per branch `(B, heads, T, rows)`."""
        held = self.held(lengths)
        # The end of the stored keys inside the segment of the query, 0 where the query is in another one.
        ends = (lengths[:, None] - held * self.lengths_of_segments).clamp(min=0)  # (B, branches)
        sees = keeps & (positions[..., None] // self.lengths_of_segments == held[:, None])[:, None]
        limits = torch.where(sees, ends[:, None, None], 0)  # (B, heads, T, branches)
        of_segments = self.places if self.window is None else self.places[:-1]
        masks = [places[:, None] < limits[..., i, None] for i, places in enumerate(of_segments)]
        if self.window is not None:
            stored = self.positions(lengths)[-1]
            first = (positions - self.window + 1).clamp(min=0)[:, None, :, None]  # a window's first position, (B, 1, T, 1)
            masks.append((stored[:, :, None] >= first) & (stored < lengths[:, None, None])[:, :, None])
        return masks

    def new_seen(self, positions: Tensor, keeps: Tensor) -> list[Tensor]:
        """Which of the tokens at `positions` `(B, T)` these tokens see, per branch `(B, heads, T, tokens of this rank)`."""
        local = slice(self.rank, None, self.num_ranks)
        at_or_before, masks = positions[:, None, local] <= positions[:, :, None], []
        segments = positions[..., None] // self.lengths_of_segments  # (B, T, branches)
        for i in range(len(self.branches)):
            if self.window is not None and i == len(self.branches) - 1:
                together = at_or_before & (positions[:, :, None] - positions[:, None, local] < self.window)
            else:
                together = at_or_before & (segments[:, None, local, i] == segments[:, :, None, i])
            masks.append(together[:, None] & keeps[..., i, None] & keeps[:, :, None, local, i])
        return masks

    def index(self, positions: Tensor) -> Tensor:
        """The places among the stored rows of tokens at `positions` `(...)`, `(..., branches)`; as if this rank stored all.

        The next row of a full sequence is after the last one. Nothing is added to it, but its place must exist.
        """
        rows = positions[..., None] % self.lengths_of_segments // self.rates
        return (rows // self.num_ranks).clamp(max=self.last_rows) + self.first_rows

    def _plan(self, positions: Tensor, is_new: Tensor | None) -> Plan:
        positions = positions[:, None]
        phases = positions % self.lengths_of_segments  # (B, branches)
        rows, keeps = phases // self.rates, (phases % self.rates)[:, None] == self.offsets  # (B, heads, branches)
        unreached = ~keeps.any(-1, keepdim=True)
        # The token itself is stored: a query sees the rows of its segment up to itself, and all rows of a full window.
        ends = phases if self.window is None else torch.minimum(positions % self.cycles, self.lengths_of_segments - 1)
        limits = torch.where(keeps, ends[:, None], -1)
        if self.num_ranks == 1:  # kernels disagree on a row without a key: let it see everything, and drop what it gives
            limits = limits.masked_fill(unreached, FAR)
        seen = torch.cat([places <= limits[..., i, None] for i, places in enumerate(self.places)], dim=-1)  # (B, heads, rows)
        stores = keeps if is_new is None else keeps & is_new[:, None, None]
        if self.num_ranks > 1:
            rows, stores = rows // self.num_ranks, stores & (rows % self.num_ranks == self.rank)[:, None]
        places = torch.where(stores, (rows + self.first_rows)[:, None], -1)
        places = torch.where(stores, places, places.amax(-1, keepdim=True).clamp(min=0))
        return Plan(
            places[..., None].expand(-1, -1, -1, self.head_dim),
            ~stores.any(-1)[..., None, None],
            torch.where(seen, self.bias_seen, self.bias_hidden)[:, :, None],
            unreached[..., None],
        )

    def next_plan(self, lengths: Tensor, added: Tensor) -> Plan:
        """The plan of one token per sequence after `lengths` `(B,)` others, stored where `added` `(B,)` is above 0.

        On a CPU, layers of equal layout share it. After the first period, in which a window fills, plans repeat.
        """
        if not reads_freely(lengths):
            return self._plan(lengths, added > 0)
        positions, counts = tuple(min(p, self.period + p % self.period) for p in lengths.tolist()), added.tolist()
        return _plan_of(self, positions, None if all(counts) else tuple(n > 0 for n in counts))

    def why_lost(self, new: int, old: int, stored: int, sequence: int) -> str | None:
        """Why a sequence of `old` tokens, after `stored` of which nothing was stored, cannot be cut to `new`; None if it can."""
        # Token p replaced token p - window. The queries up to p - 1 see the replaced token.
        if self.window is not None and min(new, self.window - 1) > 0 and stored > max(self.window, new + 1):
            return (
                f"length must keep the keys of the window={self.window} before it stored, got {new} of {old} tokens in sequence "
                f"{sequence}: later tokens replaced some of them; decode that sequence again, or set records_past before the calls"
            )
        for w, _ in self.branches if self.window is None else self.branches[:-1]:
            if new % w and (stored - 1) // w != new // w:
                return (
                    f"length must end in the segment that is stored, or where one begins, got {new} of {old} tokens in "
                    f"sequence {sequence}: segment {new // w} of segment_length={w} is overwritten; decode that sequence again"
                )
        return None


def layouts_of(
    pattern: DilatedPattern, heads: range, num_heads: int, max_length: int | None, like: Tensor, rank: int, num_ranks: int
) -> list[Layout]:
    """One layout for all heads, or with `heads="grouped"` one per branch that some of the heads run."""
    branches, segments = range(len(pattern.branches)), len(pattern.segment_lengths)
    # A window is the last branch, of all heads.
    runs = [(i, *branches[segments:]) for i in range(segments)] if pattern.heads == "grouped" and segments else [tuple(branches)]
    run_here = [run for run in runs if any(head in heads for head in pattern.head_range(run[0], num_heads))]
    return [Layout(pattern, run, heads, num_heads, max_length, like=like, rank=rank, num_ranks=num_ranks) for run in run_here]


@recent(lambda plan, *_: plan.bias.nbytes, room=1 << 24)
@in_no_mode
def _plan_of(layout: Layout, positions: tuple[int, ...], is_new: tuple[bool, ...] | None) -> Plan:
    plan = layout._plan(torch.tensor(positions), None if is_new is None else torch.tensor(is_new))
    unstored, unreached = (x if x is not None and bool(x.any()) else None for x in (plan.unstored, plan.unreached))
    return plan._replace(unstored=unstored, unreached=unreached)
