"""Moving rows between ranks: what one rank sends and receives, and the messages themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flexdilated.distributed.plan import ContextPlan, Integers

__all__ = ["GroupTransport", "Links", "Pending", "Transport", "links"]


class Pending(Protocol):
    """Messages on their way."""

    def wait(self) -> None:
        """Return when what was sent may be overwritten and what was received may be read."""


class Transport(Protocol):
    """How messages travel. Between two ranks, in one direction, they arrive in the order in which they were swapped."""

    rank: int

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Pending:
        """Begin to send and to fill contiguous tensors, one for each peer; empty ones do not travel."""


class _Works:
    def __init__(self, works: list[dist.Work], kept: list[Tensor]) -> None:
        self._works, self._kept = works, kept

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._kept = []


class GroupTransport:
    """Messages by the point-to-point operations of a process group, all of one swap in one batch.

    Only ranks that owe each other rows take part: a rank that is owed nothing and owes nothing calls nothing.

    Args:
        group: The ranks of the sequence, in the order of the shards.
        device: Where the tensors live.
    """

    _connected: WeakSet[dist.ProcessGroup] = WeakSet()

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = group.rank()
        self._group = group
        if device.type == "cuda" and group not in self._connected:
            # NCCL makes its communicator at the first operation, where every rank must take part, even those without messages.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            self._connected.add(group)

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Pending:
        """Begin to send and to fill contiguous tensors, one for each peer; empty ones do not travel."""
        operations = []
        for make, messages in ((dist.isend, sends), (dist.irecv, receives)):
            for peer, message in messages.items():
                if message.numel():
                    assert message.is_contiguous()
                    operations.append(dist.P2POp(make, message, dist.get_global_rank(self._group, peer), self._group))
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Works(works, [*sends.values(), *receives.values()])


@dataclass(frozen=True, eq=False)
class Links:
    """The rows of one kind that one rank exchanges, in the order in which they travel: by peer, head and token.

    Args:
        sends: The places of the rows that each peer gets, among all rows sent.
        receives: The places of the rows that each peer gives, among all rows received.
        sent_tokens: `(E,)` int64, tokens of the rows sent, counted from the first of the shard that owns them.
        sent_heads: `(E,)` int64, their key/value heads.
        received_tokens: `(E',)` of the rows received, counted from the first of this rank's own shard.
        received_heads: `(E',)`.
    """

    sends: dict[int, slice]
    receives: dict[int, slice]
    sent_tokens: Tensor
    sent_heads: Tensor
    received_tokens: Tensor
    received_heads: Tensor
    _keys: tuple[Integers, Integers]
    _num_heads: int
    _num_tokens: int

    def __bool__(self) -> bool:
        return bool(self.sends or self.receives)

    @property
    def num_sent(self) -> int:
        return self.sent_tokens.shape[0]

    @property
    def num_received(self) -> int:
        return self.received_tokens.shape[0]

    def places(self, peer: int, heads: Integers, tokens: Integers, *, sent: bool = False) -> Integers:
        """The places of rows among all rows received (or sent): heads and tokens (of the whole sequence) that broadcast."""
        keys = self._keys[0 if sent else 1]
        wanted = (peer * self._num_heads + heads) * self._num_tokens + tokens
        found = np.searchsorted(keys, wanted)
        assert (keys[np.minimum(found, len(keys) - 1)] == wanted).all(), "a row that no rank sends"
        return found

    def split(self, message: Tensor, *, sent: bool) -> dict[int, Tensor]:
        """The part of each peer in a tensor of all rows sent, or received."""
        return {peer: message[place] for peer, place in (self.sends if sent else self.receives).items()}


@lru_cache(maxsize=64)
def links(plan: ContextPlan, exchange: str, kind: str, rank: int, device: torch.device) -> Links:
    """What a rank exchanges of one kind under a plan."""
    begin = plan.borders[rank]
    sides = [plan.entries(exchange, kind, rank, sent=sent) for sent in (True, False)]
    keys = [(peer * len(plan.within) + head) * plan.num_tokens + token for peer, head, token in sides]
    # Queries and keys are sent by their owner, outputs received by it: only that side's tokens are in the shard.
    tensors = [(torch.from_numpy(token - begin).to(device), torch.from_numpy(head).to(device)) for _, head, token in sides]
    (sent_tokens, sent_heads), (received_tokens, received_heads) = tensors
    return Links(
        dict(_runs(sides[0][0])),
        dict(_runs(sides[1][0])),
        sent_tokens,
        sent_heads,
        received_tokens,
        received_heads,
        (keys[0], keys[1]),
        len(plan.within),
        plan.num_tokens,
    )


def _runs(peers: Integers) -> Iterator[tuple[int, slice]]:
    """The places of each peer in an ascending array."""
    values, first, count = np.unique(peers, return_index=True, return_counts=True)
    for peer, start, size in zip(values, first, count):
        yield int(peer), slice(int(start), int(start + size))
