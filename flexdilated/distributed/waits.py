"""What ranks waited in that lost each other: what a transport says of it names addresses at best."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from flexdilated.distributed.agreement import LAST_PAUSE, posts_of
from flexdilated.distributed.answering import AnsweringStore
from flexdilated.distributed.telling import all_know
from flexdilated.distributed.words import MAX_ITEMS, global_ranks, holders, named

MOMENT = 1.0  # seconds that a rank whose time is over waits for others' words, and for the store

# When this rank last told the others of a wait, and under which key.
_told: WeakKeyDictionary[dist.ProcessGroup, tuple[float, str]] = WeakKeyDictionary()


class Wait:
    """What a rank of a group waits in, which it tells the others where one of them does not come.

    Args:
        group: The ranks.
        call: What this one waits in, in words.
    """

    def __init__(self, group: dist.ProcessGroup, call: str) -> None:
        self._group, self._call = group, call
        # The word of an error that was caught is taken back, but not while others may be on their way to read it.
        told, key = _told.get(group, (float("inf"), ""))
        if time.monotonic() - told > 2 * MOMENT:
            del _told[group]
            with suppress(TimeoutError, RuntimeError):  # of a store that is gone
                self._posts()[0].delete_key(key)

    @contextmanager
    def for_rows(self, peers: Sequence[int]) -> Iterator[None]:
        """Until rows of these ranks of the group have come, and theirs have gone."""
        try:
            yield
        except RuntimeError as error:
            peers, ranks = list(dict.fromkeys(peers)), global_ranks(self._group)
            few = " or ".join(f"rank {ranks[peer]}" for peer in peers)
            raise RuntimeError(
                f"{few if len(peers) <= MAX_ITEMS else f'one of {len(peers)} ranks'} must exchange rows with this rank, but ended, "
                f"stopped or made other calls of dilated_attention: {error}; {self.tell(peers, _moment(error))}"
            ) from error

    @contextmanager
    def for_all(self) -> Iterator[None]:
        """Until all ranks of the group have taken part."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"all ranks of the mesh must take part in {self._call}, but one ended, stopped or made other calls: {error}; "
                f"{self.tell(range(self._group.size()), _moment(error))}"
            ) from error

    @all_know
    def check_same(self, numbers: Sequence[int], device: torch.device, message: str) -> None:
        """Return when all ranks have told as many numbers, and the same.

        Raises:
            ValueError: With the message, if they differ, on every rank. On other devices than a CPU an assertion fails there: to
                read them would wait for the device.
        """
        mine = torch.tensor(numbers, device=device)
        told = mine.new_empty(self._group.size(), len(mine))
        with self.for_all():
            dist.all_gather(list(told), mine, group=self._group)
        is_same = (told == told[0]).all()
        if device.type != "cpu":
            torch._assert_async(is_same, message)
        elif not bool(is_same):
            # All ranks tell of this, and of no call before it.
            topic = sha256(repr(told.tolist()).encode()).hexdigest()[:16]
            raise ValueError(f"{message}, got others: {self.tell(range(self._group.size()), MOMENT, topic)}")

    def tell(self, peers: Sequence[int], seconds: float, topic: str = "waited") -> str:
        """Tell the others of this wait; in which calls this rank and its peers were, as far as they tell within some seconds."""
        rank = self._group.rank()
        asked, calls = [peer for peer in peers if peer != rank], {rank: self._call}
        end = time.monotonic() + seconds
        with suppress(TimeoutError, RuntimeError):  # of a store that is gone
            store, life = self._posts()
            here = f"{life}/{topic}"
            _told[self._group] = time.monotonic(), f"{here}/{rank}"
            store.set(f"{here}/{rank}", self._call)
            while True:
                for peer in asked:
                    if peer not in calls and store.check([key := f"{here}/{peer}"]):
                        calls[peer] = store.get(key).decode()
                if len(calls) > len(asked) or time.monotonic() >= end:
                    break
                time.sleep(LAST_PAUSE)
        ranks = global_ranks(self._group)
        told = [f"{named(those)} waited in {call}" for call, those in holders((ranks[peer], call) for peer, call in calls.items())]
        silent = [ranks[peer] for peer in asked if peer not in calls]
        return "; ".join([*told, f"{named(silent)} did not tell of a wait"] if silent else told)

    def _posts(self) -> tuple[AnsweringStore, str]:
        """The store, and what the keys of these processes begin with there."""
        return posts_of(self._group, timedelta(seconds=MOMENT))


def _moment(error: RuntimeError) -> float:
    """How long to wait for the words of others.

    Ranks that mix up two calls wait for each other, and the time of both ends at about one moment: the first waits a little for the
    other's word, or the other finds the first's. Where a connection is closed its other end may be about to tell. Who is dead or
    stopped has no word.
    """
    return MOMENT if "timed out" in str(error).lower() or "timeout" in str(error).lower() else MOMENT / 4
