"""Index of rows in a tensor: by token of a shard, or by place in a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from flexdilated.distributed.planner.message_rows import messages
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.segments import Integers


@dataclass(frozen=True, eq=False)
class RowIndex:
    """A `(lanes, rows)` table of integers, stored as a first one per lane and a common step, or as a table where steps differ.

    Full tables would hold the rows of all ranks for a ring.
    """

    first: Tensor  # (lanes, 1) int32
    step: int
    rows: int
    lists: Tensor | None = None  # (lanes, rows) int32, added to `first`; None: there is a common step

    @classmethod
    def strided(cls, step: int, first: Integers, rows: int, device: torch.device) -> RowIndex:
        """`first, first + step, ...` of each lane, below 2 ** 31."""
        return cls(as_int32(first, device)[:, None], step, rows)

    @classmethod
    def from_table(cls, table: Integers, device: torch.device) -> RowIndex:
        """Integers `(lanes, rows)`, below 2 ** 31."""
        steps = np.diff(table, axis=1)
        step = int(steps.flat[0]) if steps.size else 1
        index = cls.strided(step, table[:, 0], table.shape[1], device)
        return index if (steps == step).all() else replace(index, lists=as_int32(table - table[:, :1], device))

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + (0 if self.lists is None else self.lists.nbytes)

    def read(self) -> Tensor:
        """The `(lanes, rows)` int32 table."""
        if self.lists is None:
            return self.first + self.step * torch.arange(self.rows, dtype=torch.int32, device=self.first.device)
        return self.first + self.lists


def as_int32(values: Integers, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)


@dataclass(frozen=True, eq=False)
class RowExchange:
    """The rows of one kind that one rank sends and receives, in the order in which they travel: by peer, head and token."""

    sends: dict[int, slice]  # the rows of each peer among all rows sent
    receives: dict[int, slice]
    # The rows in this rank's shard, by peer: it sends them, or receives them if they are outputs. Heads `(h, 1)` with their tokens,
    # counted from the first of the shard, in blocks of heads.
    local: dict[int, tuple[tuple[Tensor, RowIndex], ...]]

    @cached_property
    def num_sent(self) -> int:
        return max((place.stop for place in self.sends.values()), default=0)

    @cached_property
    def num_received(self) -> int:
        return max((place.stop for place in self.receives.values()), default=0)

    def split(self, message: Tensor, *, sent: bool) -> dict[int, Tensor]:
        """The part of each peer in a tensor of all rows sent, or received."""
        return {peer: message[place] for peer, place in (self.sends if sent else self.receives).items()}

    def rows(self, peer: int) -> tuple[Tensor, Tensor]:
        """`(E,)` int32 tokens and heads of the rows in this rank's shard that it exchanges with a peer."""
        blocks = [(tokens.read(), heads) for heads, tokens in self.local[peer]]
        tokens, heads = zip(*((table.flatten(), heads.expand_as(table).flatten()) for table, heads in blocks))
        return torch.cat(tokens), torch.cat(heads)


def row_exchange(
    plan: ContextPlan, exchange: str, kind: str, rank: int, device: torch.device, received_counts: Mapping[int, int]
) -> RowExchange:
    """The rows of one kind that a rank exchanges; `received_counts`: rows that it receives, by peer."""
    local, sent_counts = {}, {}
    for message in messages(plan, exchange, kind, rank, sent=True):
        sent_counts[message.peer] = message.num_rows
        local[message.peer] = tuple(
            (as_int32(heads, device)[:, None], RowIndex.from_table(tokens - plan.limits[rank], device))
            for heads, tokens in message.blocks()
        )
    return RowExchange(_places(sent_counts), _places(received_counts), local)


def _places(counts: Mapping[int, int]) -> dict[int, slice]:
    """The rows of each peer, one peer after another."""
    ends = list(accumulate(counts.values(), initial=0))
    return {peer: slice(first, end) for peer, first, end in zip(counts, ends, ends[1:])}
