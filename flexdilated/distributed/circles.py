"""Ranks of a step that wait for each other in different calls: where waits lead around nobody will come, and all can know it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flexdilated.distributed.answering import AnsweringStore
from flexdilated.distributed.underway import Message, Underway

Fields = Mapping[str, Sequence[str]]


class Waiting(NamedTuple):
    """What a rank tells while it waits."""

    page: int  # the step, as all ranks count them
    peer: int  # for which it waits
    message: list[Any]  # and for what, as `_name` says it
    call: str  # in which call, in words
    fields: Fields  # of its plan
    lacking: dict[str, list[Any]]  # by rank, the message for which that one waits and of which this one has not begun its side


class Circle:
    """One rank's wait for a message of a step, and those of others beside it.

    A rank tells for which message of which rank it waits, and answers those that wait for one of which it has not begun its side.
    As long as it waits it begins none, and before it begins one it takes all this back. So what is read of a rank holds until the
    message comes for which it waits, and a circle of such waits, once read, has no end but by an error.

    Args:
        store: Of the group.
        life: What the keys of these processes begin with there.
        rank: This one.
        size: Ranks.
        page: The step.
        travelling: What this rank has begun in it.
    """

    def __init__(self, store: AnsweringStore, life: str, rank: int, size: int, page: int, travelling: Underway) -> None:
        self._store, self._life, self._rank, self._size, self._page = store, life, rank, size, page
        self._travelling = travelling
        self._told: Waiting | None = None
        self._asked = -1  # how often others had asked this rank when it last looked

    def look(self, message: Message, call: str, fields: Fields) -> list[tuple[int, Waiting]]:
        """The ranks of a circle in which this one waits, or for which it waits, and what each tells; none where there is none."""
        mine = Waiting(self._page, message.peer, _name(message), call, fields, {})
        if self._told is None or (self._told.peer, self._told.message) != (mine.peer, mine.message):
            self._tell(mine)
            self._store.add(self._asking(message.peer), 1)
            self._asked = -1
        asked = self._store.add(self._asking(self._rank), 0)
        if asked != self._asked:
            self._asked = asked
            self._tell(mine._replace(lacking=self._lacking()))
        assert self._told is not None
        chain = [(self._rank, self._told)]
        while True:
            (rank, waiting), seen = chain[-1], [of for of, _ in chain]
            peer = self._read(waiting.peer)
            if peer is None or peer.lacking.get(str(rank)) != waiting.message:
                return []
            if waiting.peer in seen:
                return chain[seen.index(waiting.peer) :]
            chain.append((waiting.peer, peer))

    def end(self) -> None:
        """Take back what was told. It is not deleted: a store waits where a key is gone that another rank has just seen."""
        if self._told is not None:
            self._told = None
            self._store.set(self._key(self._rank), "")

    def _tell(self, waiting: Waiting) -> None:
        self._told = waiting
        self._store.set(self._key(self._rank), json.dumps(waiting))

    def _lacking(self) -> dict[str, list[Any]]:
        others = ((other, self._read(other)) for other in range(self._size) if other != self._rank)
        waiting = ((other, told.message) for other, told in others if told is not None)
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
