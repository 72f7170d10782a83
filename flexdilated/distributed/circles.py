"""Ranks of a step that wait for each other in different calls: where waits lead around nobody will come, and all can know it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from flexdilated.distributed.answering import AnsweringStore
from flexdilated.distributed.underway import Message, Underway

Fields = Mapping[str, Sequence[str]]
ALL = -1  # of ranks


class Waiting(NamedTuple):
    """What a rank tells while it waits."""

    page: int  # the step, as all ranks count them
    peer: int  # for which it waits; `ALL` in a round
    message: list[Any]  # and for what, as `_name` says it
    round: int  # that in which it waits, or the next one to which it comes
    call: str  # in which call, in words
    fields: Fields  # of its plan
    lacking: dict[str, list[Any]]  # by rank, the message for which that one waits and of which this one has not begun its side


class Circle:
    """One rank's wait for a message of a step, or for all ranks in a round, and those of others beside it.

    A rank tells for which message of which rank it waits, and answers those that wait for one of which it has not begun its side.
    As long as it waits it begins none, and before it begins one it takes all this back. So what is read of a rank holds until the
    message comes for which it waits, and a circle of such waits, once read, has no end but by an error.

    Args:
        store: Of the group.
        life: What the keys of these processes begin with there.
        rank: This one.
        size: Ranks.
        page: The step.
        number: Of the round in which it waits, or of the next one to which it comes.
        travelling: What this rank has begun in it.
        call: In which call it waits, in words.
        fields: Of the plan of that.
    """

    def __init__(
        self,
        store: Store | AnsweringStore,
        life: str,
        rank: int,
        size: int,
        page: int,
        number: int,
        travelling: Underway,
        call: str,
        fields: Fields,
    ) -> None:
        self._store, self._life, self._rank, self._size, self._page, self._number = store, life, rank, size, page, number
        self._travelling, self._call, self._fields = travelling, call, fields
        self._told: Waiting | None = None
        self._asked = 0  # how often others had asked this rank when it last told them

    def look(self, message: Message) -> list[tuple[int, Waiting]]:
        """The ranks of a circle in which this one waits, or for which it waits, and what each tells; none where there is none."""
        told, is_new = self._tell(message.peer, _name(message))
        if is_new:
            self._store.add(self._asking(message.peer), 1)
        chain = [(self._rank, told)]
        while True:
            (rank, waiting), seen = chain[-1], [of for of, _ in chain]
            peer = self._read(waiting.peer)
            if peer is None or peer.lacking.get(str(rank)) != waiting.message:
                return []
            if waiting.peer in seen:
                return chain[seen.index(waiting.peer) :]
            chain.append((waiting.peer, peer))
            if peer.peer == ALL:  # this rank among them, unless it has been there
                return chain if self._number <= peer.round else []

    def answer(self) -> None:
        """Tell those that wait for this rank, which waits for all."""
        self._tell(ALL, [])

    def _tell(self, peer: int, name: list[Any]) -> tuple[Waiting, bool]:
        """What this rank waits for, and whether that is new."""
        told = self._told
        is_new = told is None or (told.peer, told.message) != (peer, name)
        asked = self._store.add(self._asking(self._rank), 0)  # who asks behind this is answered by the next look
        if told is None or is_new or asked != self._asked:
            told = Waiting(self._page, peer, name, self._number, self._call, self._fields, self._lacking())
            self._told, self._asked = told, asked  # first: what a slow store may yet take is taken back at the end
            self._store.set(self._key(self._rank), json.dumps(told))
        return told, is_new

    def end(self) -> None:
        """Take back what was told. It is not deleted: a store waits where a key is gone that another rank has just seen."""
        if self._told is not None:
            self._told = None
            self._store.set(self._key(self._rank), "")

    def _lacking(self) -> dict[str, list[Any]]:
        others = ((other, self._read(other)) for other in range(self._size) if other != self._rank)
        waiting = ((other, told.message) for other, told in others if told is not None and told.peer != ALL)
        return {str(other): message for other, message in waiting if self._travelling.lacks(other, *message)}

    def _read(self, rank: int) -> Waiting | None:
        """What a rank tells in this step."""
        if rank == self._rank:
            return self._told
        text = self._store.get(key) if self._store.check([key := self._key(rank)]) else b""
        told = Waiting(*json.loads(text)) if text else None
        return told if told is not None and told.page == self._page else None

    def _key(self, rank: int) -> str:
        return f"{self._life}/waits/{rank}"

    def _asking(self, rank: int) -> str:
        """A count of those that began to wait for a rank."""
        return f"{self._life}/asked/{rank}"


def _name(message: Message) -> list[Any]:
    """A message without its peer: whether the rank that waits for it sends it, its tag, and which of them."""
    return [message.is_sent, message.tag, message.ordinal]
