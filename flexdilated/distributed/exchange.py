"""Moving rows between ranks: what one rank sends and receives, and the messages themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from flexdilated.distributed.plan import ContextPlan, Integers

__all__ = ["GroupTransport", "Links", "Pending", "Places", "Transport", "link"]


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

    _connected: ClassVar[WeakSet[dist.ProcessGroup]] = WeakSet()

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
        tokens: `(E,)` int32: of the rows that this rank owns, which are those it sends, or for outputs those it receives; counted
            from the first token of its shard.
        heads: `(E,)` int32, their key/value heads.
    """

    sends: dict[int, slice]
    receives: dict[int, slice]
    tokens: Tensor
    heads: Tensor

    def __bool__(self) -> bool:
        return bool(self.sends or self.receives)

    @property
    def num_sent(self) -> int:
        return max((place.stop for place in self.sends.values()), default=0)

    @property
    def num_received(self) -> int:
        return max((place.stop for place in self.receives.values()), default=0)

    def split(self, message: Tensor, *, sent: bool) -> dict[int, Tensor]:
        """The part of each peer in a tensor of all rows sent, or received."""
        return {peer: message[place] for peer, place in (self.sends if sent else self.receives).items()}


class Places:
    """Where the rows that this rank does not own stand among those that travel."""

    def __init__(self, plan: ContextPlan, peer: Integers, head: Integers, token: Integers) -> None:
        self._num_heads, self._num_tokens = len(plan.within), plan.num_tokens
        self._keys = self._key(peer, head, token)

    def _key(self, peer: Any, head: Integers, token: Integers) -> Integers:
        return (peer * self._num_heads + head) * self._num_tokens + token

    def __call__(self, peer: int, heads: Integers, tokens: Integers) -> NDArray[np.int32]:
        """Of heads and tokens of the whole sequence, which broadcast."""
        wanted = self._key(peer, heads, tokens)
        found = np.searchsorted(self._keys, wanted)
        assert (self._keys[np.minimum(found, len(self._keys) - 1)] == wanted).all(), "a row that does not travel"
        return found.astype(np.int32)


def link(plan: ContextPlan, exchange: str, kind: str, rank: int, device: torch.device) -> tuple[Links, Places]:
    """What a rank exchanges of one kind under a plan, and where to find the rows of others."""
    sent, received = (plan.entries(exchange, kind, rank, sent=sent) for sent in (True, False))
    owned, foreign = (received, sent) if kind == "out" else (sent, received)
    tokens, heads = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (owned[2] - plan.borders[rank], owned[1]))
    return Links(dict(_runs(sent[0])), dict(_runs(received[0])), tokens, heads), Places(plan, *foreign)


def _runs(peers: Integers) -> Iterator[tuple[int, slice]]:
    """The places of each peer in an ascending array."""
    values, first, count = np.unique(peers, return_index=True, return_counts=True)
    for peer, start, size in zip(values, first, count):
        yield int(peer), slice(int(start), int(start + size))
