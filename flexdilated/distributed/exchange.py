"""Moving rows between ranks, and which rows of its own a rank exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flexdilated.distributed.planner.message_rows import messages
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.planner.spans import Integers


class Pending(Protocol):
    """Messages on their way."""

    def wait(self) -> None:
        """Return when what was sent may be overwritten and what was received may be read."""


class Transport(Protocol):
    """How messages travel. Between two ranks, in one direction, they arrive in the order in which they were swapped."""

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Pending:
        """Begin to send and to fill contiguous tensors, one for each peer; empty ones do not travel."""


class _Works:
    def __init__(self, works: list[dist.Work], call: str, kept: list[Tensor], headers: list[Tensor], tag: int) -> None:
        self._works, self._call, self._kept, self._headers, self._tag = works, call, kept, headers, tag

    def wait(self) -> None:
        for work in self._works:
            with explained(self._call):
                work.wait()
        self._kept = []
        if self._headers:
            same = (torch.cat(self._headers) == self._tag).all()
            torch._assert_async(
                same, "ranks must make the same calls of dilated_attention in the same order, got rows of another call"
            )
            self._headers = []


@contextmanager
def explained(call: str) -> Iterator[None]:
    """Say in errors of a transport which call of this library has met them.

    Raises:
        RuntimeError: If a message does not come within the timeout of the group, or a connection is closed.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"ranks must exchange rows in {call}, got an error of the transport: a rank has ended, is late or has made other calls "
            f'(see the guide "Ranks that fail"); {error}'
        ) from error


def has_tags(device: torch.device) -> bool:
    """Whether the messages of a device are matched by their tags: NCCL has none."""
    return device.type == "cpu"


class GroupTransport:
    """Messages by the point-to-point operations of a process group, all of one swap in one batch.

    Only ranks that owe each other rows take part: a rank that is owed nothing and owes nothing calls nothing. All ranks have made a
    collective before, as `consistency.compare` does: NCCL makes its communicator at the first operation, which needs all of them.

    Args:
        group: The ranks of the sequence, in the order of the shards.
        device: Where the tensors live.
        tag: Of the plan, the number of the call and the direction, in [0, 2 ** 31). gloo matches messages by their tags: a message
            of another call is never taken, and the wait for it ends by the timeout of the group. NCCL has no tags: there each
            message is followed by its tag, and an assertion on the device ends the process where another one came.
        call: For messages of errors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, tag: int, call: str) -> None:
        self._group, self._tag, self._device, self._call = group, tag, device, call
        self._is_tagged = has_tags(device)

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Pending:
        """Begin to send and to fill contiguous tensors, one for each peer; empty ones do not travel."""
        parts = [(peer, message, True) for peer, message in sends.items() if message.numel()]
        parts += [(peer, message, False) for peer, message in receives.items() if message.numel()]
        assert all(message.is_contiguous() for _, message, _ in parts)
        operations, headers = [], []
        for peer, message, is_sent in parts:
            make, rank = dist.isend if is_sent else dist.irecv, dist.get_global_rank(self._group, peer)
            operations.append(dist.P2POp(make, message, rank, self._group, self._tag))
            if not self._is_tagged:
                headers.append(torch.full((1,), self._tag if is_sent else -1, device=self._device))
                operations.append(dist.P2POp(make, headers[-1], rank, self._group, self._tag))
        with explained(self._call):
            works = dist.batch_isend_irecv(operations) if operations else []
        return _Works(works, self._call, [*sends.values(), *receives.values()], headers, self._tag)


class Silence:
    """The transport of a plan that moves nothing."""

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Silence:
        """Nothing, which has arrived."""
        assert not {**sends, **receives}
        return self

    def wait(self) -> None:
        """At once."""


@dataclass(frozen=True, eq=False)
class Index:
    """`(lanes, rows)` integers: the first of each lane, and how far each row lies behind it, as a step where that says it.

    A ring would list the rows of all ranks, and those of many heads are alike.
    """

    first: Tensor  # (lanes, 1) int32
    step: int
    rows: int
    listed: Tensor | None = None  # (kinds, rows) int32 behind the first, where they have no common step
    which: Tensor | None = None  # (lanes,) int32, of these, where there are several

    @classmethod
    def every(cls, step: int, first: Integers, rows: int, device: torch.device) -> Index:
        """`first, first + step, ...` of each lane, below 2 ** 31."""
        return cls(_as_int32(first, device)[:, None], step, rows)

    @classmethod
    def of(cls, kinds: Integers, which: Integers, begin: Integers | int, device: torch.device) -> Index:
        """Of each lane one of some lists, `(kinds, rows)`, from where it begins on; all below 2 ** 31."""
        first, rows = kinds[:, 0], kinds.shape[1]
        steps = kinds[:, 1:] - kinds[:, :-1]
        step = int(steps.flat[0]) if steps.size else 1
        begins = _as_int32(first[which] + begin, device)[:, None]
        if (steps == step).all():
            return cls(begins, step, rows)
        listed = _as_int32(kinds - first[:, None], device)
        return cls(begins, step, rows, listed, _as_int32(which, device) if len(kinds) > 1 else None)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in (self.first, self.listed, self.which) if table is not None)

    def read(self) -> Tensor:
        if self.listed is None:
            return self.first + self.step * torch.arange(self.rows, dtype=torch.int32, device=self.first.device)
        return self.first + (self.listed if self.which is None else self.listed[self.which])


def _as_int32(values: Integers, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)


@dataclass(frozen=True, eq=False)
class Links:
    """The rows of one kind that one rank exchanges, in the order in which they travel: by peer, head and token.

    `owned` are those of this rank, which it sends, or for outputs receives: heads `(h, 1)` and their tokens, counted from the first
    of its shard, a block of heads at a time.
    """

    sends: dict[int, slice]  # where the rows of each peer stand among all rows sent
    receives: dict[int, slice]
    owned: dict[int, tuple[tuple[Tensor, Index], ...]]

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

    def rows(self, peer: int) -> tuple[Tensor, Tensor]:
        """`(E,)` int32 tokens and heads of the rows that this rank owns and exchanges with a peer."""
        blocks = [(tokens.read(), heads) for heads, tokens in self.owned[peer]]
        tokens, heads = zip(*((table.flatten(), heads.expand_as(table).flatten()) for table, heads in blocks))
        return torch.cat(tokens), torch.cat(heads)


def link(plan: ContextPlan, exchange: str, kind: str, rank: int, device: torch.device, borrowed: Mapping[int, int]) -> Links:
    """What a rank exchanges of one kind under a plan; `borrowed`: how many rows that others own, by peer in their order."""
    owned, lent = {}, {}
    for message in messages(plan, exchange, kind, rank, sent=kind != "out"):
        lent[message.peer] = message.num_rows
        owned[message.peer] = tuple(
            (_as_int32(heads, device)[:, None], Index.of(tokens, which, -plan.borders[rank], device))
            for heads, tokens, which in message.blocks()
        )
    sends, receives = (borrowed, lent) if kind == "out" else (lent, borrowed)
    return Links(_places(sends), _places(receives), owned)


def _places(counts: Mapping[int, int]) -> dict[int, slice]:
    """Where the rows of each peer stand, one peer after another."""
    ends = list(accumulate(counts.values(), initial=0))
    return {peer: slice(first, end) for peer, first, end in zip(counts, ends, ends[1:])}
