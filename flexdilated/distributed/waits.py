"""What ranks waited in that lost each other, which no transport says."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from typing import NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from flexdilated.distributed.agreement import (
    agree,
    failed,
    groups,
    heard,
    is_inside,
    is_lost,
    lose,
    met,
    number_of_call,
    place_of,
    posts_of,
)
from flexdilated.distributed.answering import AnsweringStore, timeout_of
from flexdilated.distributed.circles import ALL, Circle, Waiting
from flexdilated.distributed.ledger import IN_VAIN, LAST_PAUSE, REST, LostError, longest_pause
from flexdilated.distributed.underway import Swap, is_alone, underway
from flexdilated.distributed.words import MAX_ITEMS, called, differing, fields_of, global_ranks, holders, named, short

MOMENT = 1.0  # seconds that a rank whose time is over waits for others' words, and for the store
SURELY = 10.0  # the same where all ranks have read that they differ, and tell: none has ended or waits

# The keys under which this rank has told the others of waits, and when.
_told: WeakKeyDictionary[dist.ProcessGroup, dict[str, float]] = WeakKeyDictionary()
_failed: WeakSet[dist.ProcessGroup] = WeakSet()


class Wait:
    """What a rank of a group waits in, which it tells the others where one of them does not come.

    Args:
        group: The ranks.
        call: What this one waits in, in words.
        number: Of the call, among those that exchange rows. A rank that has refused it, or a later one, does not come.
        plan: Of the call, in JSON types: where ranks wait in calls that differ, they say in what.
    """

    def __init__(
        self, group: dist.ProcessGroup, call: str, number: float = math.inf, plan: Mapping[str, object] | None = None
    ) -> None:
        self._group, self._call, self._number, self._plan = group, call, number, plan
        # The word of an error that was caught is taken back, but not while others may be on their way to read it.
        told, now = _told.get(group, {}), time.monotonic()
        for key in [key for key, then in told.items() if now - then > 2 * _patience(key.split("/")[1])]:
            del told[key]
            with suppress(TimeoutError, RuntimeError):  # of a store that is gone
                _posts(group)[0].delete_key(key)

    @contextmanager
    def for_rows(self, peers: Sequence[int], *, is_closed: bool = True) -> Iterator[None]:
        """Until rows of these ranks of the group have come, and theirs have gone; whether an error closes the connections."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            lose(self._group, f"{IN_VAIN} in {self._call}", is_closed=is_closed)
            peers = list(dict.fromkeys(peers))
            names = self._names(peers)
            kind = TimeoutError if isinstance(error, TimeoutError) else LostError
            raise kind(
                f"{names} must exchange rows with this rank, but ended, stopped or made other calls of dilated_attention: "
                f"{self.tell(peers, _moment(error), of=f'for {names} ')}{self._after() if is_closed else ''}; {error}"
            ) from error

    def for_swap(self, swap: Swap, peers: Sequence[Sequence[int]]) -> None:
        """The same of messages of a step, from and to these ranks each, which another rank may have left.

        Raises:
            ValueError: If it has.
            TimeoutError: If they do not come within the timeout of the group, or it has for that reason; its connections stay open.
        """
        limit, look, beside = timeout_of(self._group), longest_pause(self._group.size()), None
        end, rested = time.monotonic() + limit.total_seconds(), 0.0
        left: ValueError | TimeoutError | None = None
        try:
            while not swap.has_come(look):
                with suppress(TimeoutError, RuntimeError):  # of a store that is gone
                    if (left := heard(self._group)) is not None:
                        break
                    self._hear(peers[swap.at])
                    began = time.monotonic()
                    if not is_inside(self._group) or not is_alone():  # another thread may begin what this one has not
                        if beside is not None:
                            beside.end()
                    elif began >= rested:
                        beside = beside or self._circle()
                        if found := beside.look(swap.messages[swap.at]):
                            self._refuse_order(self._around(found))
                        rested = began + REST * (time.monotonic() - began)
                if time.monotonic() >= end:
                    if swap.has_come(look):  # meanwhile: this process may itself have been stopped
                        break
                    with self.for_rows(peers[swap.at], is_closed=False):
                        raise TimeoutError(f"timed out after {limit.total_seconds():g} s")
        finally:
            if beside is not None:
                with suppress(TimeoutError, RuntimeError):
                    beside.end()
        if left is not None:
            raise left
        if swap.error is not None:
            with self.for_rows(peers[swap.at]):
                raise swap.error

    def _hear(self, peers: Sequence[int]) -> None:
        """Look whether one of these ranks has left this call, or waits for this one before it.

        Raises:
            ValueError: If so.
        """
        store, life = _posts(self._group)
        for peer in peers:
            if word := _told_of_call(store, life, "refused", peer, self._number, exactly=True).get(peer):
                reason = f"{named([global_ranks(self._group)[peer]])} {word}"
                lose(self._group, reason)
                raise ValueError(reason)
            if (found := met(self._group, peer, self._number)) is not None:
                self._refuse_order(self._beside(peer, *found))

    def _refuse_order(self, got: str) -> NoReturn:
        """Leave the step, whose calls some rank has made in another order."""
        reason = f"ranks must make the same calls in the same order, got {got}"
        lose(self._group, reason)
        raise ValueError(reason)

    def _circle(self) -> Circle:
        store, life = _posts(self._group)
        size, travelling = self._group.size(), underway(self._group)
        return Circle(store, life, self._group.rank(), size, *place_of(self._group), travelling, self._call, self._fields())

    def _fields(self) -> dict[str, list[str]]:
        """Of the plan of this call, as ranks tell each other."""
        return {} if self._plan is None else fields_of(self._plan)

    def _around(self, found: Sequence[tuple[int, Waiting]]) -> str:
        """Where the ranks of a circle wait."""
        ranks = global_ranks(self._group)
        peers = {rank: "all" if waiting.peer == ALL else f"rank {ranks[waiting.peer]}" for rank, waiting in found}
        told = [f"rank {ranks[rank]} for {peers[rank]} in {waiting.call}" for rank, waiting in found]
        apart = _apart([ranks[rank] for rank, _ in found], [waiting.fields for _, waiting in found])
        return f"ranks that wait for each other: {'; '.join([*told, *apart])}"

    def _beside(self, peer: int, compared: Mapping[str, Sequence[str]], num_calls: int) -> str:
        """Where this rank waits, and one that compares something with all ranks."""
        ranks = [global_ranks(self._group)[rank] for rank in (self._group.rank(), peer)]
        where = f"rank {ranks[0]} in {self._call} and rank {ranks[1]} in {called(compared)}, behind {num_calls}"
        words = f"{where} call{'s' * (num_calls != 1)}"
        return "; ".join([words, *_apart(ranks, [self._fields(), compared])])

    @contextmanager
    def for_all(self) -> Iterator[None]:
        """Until all ranks of the group have taken part."""
        try:
            yield
        except RuntimeError as error:
            lose(self._group, f"{IN_VAIN} in {self._call}", is_closed=True)
            raise LostError(
                f"all ranks of the mesh must take part in {self._call}, but one ended, stopped or made other calls: "
                f"{self.tell(range(self._group.size()), _moment(error))}{self._after()}; {error}"
            ) from error

    def agree(self, plan: Mapping[str, object], *, each_time: bool = False) -> None:
        """As `agreement.agree`, with the calls of the others where they do not come."""
        self._plan = plan
        with self._for_a_round():
            agree(self._group, plan, each_time=each_time)

    def number(self) -> int:
        """As `agreement.number_of_call`, with the calls of the others where they do not come."""
        with self._for_a_round():
            return number_of_call(self._group)

    @contextmanager
    def _for_a_round(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {self.tell(range(self._group.size()), MOMENT)}") from error
        except ValueError:
            if is_lost(self._group):  # by a rank that has waited, and asks the others what they did
                self.tell([], 0.0)
            raise

    def check_same(self, calls: Sequence[int], numbers: Sequence[int], device: torch.device, message: str = "") -> None:
        """Return when all ranks have told as many numbers, and the same, behind the same calls.

        Raises:
            ValueError: With the message, if they differ, on every rank. On other devices than a CPU an assertion fails there: to
                read them would wait for the device.
        """
        # Of one length, whatever is compared: gloo ends a process that is given a longer message.
        kind, of_all = (sha256(repr(each).encode()).digest()[:8] for each in (message, list(numbers)))
        mine = torch.tensor([*calls, *(int.from_bytes(each, "big", signed=True) for each in (kind, of_all))], device=device)
        told = mine.new_empty(self._group.size(), len(mine))
        with self.for_all():
            dist.all_gather(list(told), mine, group=self._group)
        is_same = told == told[0]
        before = "ranks must make the same calls before this one"
        if device.type != "cpu":
            torch._assert_async(is_same.all(), f"{message}, and {before}" if message else before)
        elif not bool(is_same.all()):
            failed(self._group)
            if not bool(is_same[:, :-1].all()):
                is_behind = not bool(is_same[:, : len(calls)].all())
                message = before if is_behind else "ranks must make the same calls in the same order"
                lose(self._group, message)
            # All ranks tell of this, and of no call before it.
            topic = sha256(repr(told.tolist()).encode()).hexdigest()[:16]
            seconds = min(SURELY, timeout_of(self._group).total_seconds())
            raise ValueError(f"{message}, got others: {self.tell(range(self._group.size()), seconds, topic)}")

    def tell(self, peers: Sequence[int], seconds: float, topic: str = "waited", of: str = "") -> str:
        """Tell the others of this wait; what this rank and its peers did, as far as they tell within some seconds.

        A peer may itself have waited for another, which is asked too: where ranks wait through others the last one is lost.
        """
        rank, end = self._group.rank(), time.monotonic() + seconds
        asked = [peer for peer in peers if peer != rank]
        waited = dict.fromkeys(asked, self._number)  # for each, by this rank or one that waits for it: in the call of this number
        words = {rank: f"waited {of}in {self._call}"}
        plans = {rank: self._fields()}
        has_waited = topic == "waited"  # else all have come, and what one refuses is a call behind this
        with suppress(TimeoutError, RuntimeError):  # of a store that is gone
            store, life = _post(self._group, topic, words[rank], asked, plans[rank], self._number)
            for other in groups():
                if other is not self._group and has_waited:
                    with suppress(TimeoutError, RuntimeError, ValueError):  # of a group that is gone
                        _post(other, topic, f"{words[rank]} over another mesh", [], {}, math.inf)
            while True:
                for peer in asked:
                    if peer not in words and has_waited:
                        words |= _told_of_call(store, life, "refused", peer, waited[peer])
                    if peer not in words and store.check([key := f"{life}/{topic}/{peer}"]):
                        words[peer], more, plans[peer], number = json.loads(store.get(key))
                        asked += [other for other in more if other not in (rank, *asked)][: max(0, MAX_ITEMS - len(asked))]
                        waited |= {other: min(number, waited.get(other, number)) for other in more}
                if len(words) > len(asked) or time.monotonic() >= end:
                    break
                time.sleep(LAST_PAUSE)
            for peer in asked:  # it may have gone on to another call, of which it tells more
                if peer not in words and has_waited:
                    words |= _told_of_call(store, life, "failed", peer, waited[peer])
        ranks = global_ranks(self._group)
        told = [f"{named(those)} {word}" for word, those in holders((ranks[peer], word) for peer, word in words.items())]
        alike = [peer for peer, plan in sorted(plans.items()) if plan.keys() == plans[rank].keys()]  # else words say enough
        if differences := differing([ranks[peer] for peer in alike], [plans[peer] for peer in alike]):
            told.append(f"these calls differ in {short(differences, '; in ', 'fields')}")
        silent = [ranks[peer] for peer in asked if peer not in words]
        return "; ".join([*told, f"{named(silent)} did not tell of a wait"] if silent else told)

    def _names(self, peers: Sequence[int]) -> str:
        ranks = global_ranks(self._group)
        return " or ".join(f"rank {ranks[peer]}" for peer in peers) if len(peers) <= MAX_ITEMS else f"one of {len(peers)} ranks"

    def _after(self) -> str:
        """What to say of the second failure of a group, and those that follow."""
        if self._group in _failed:
            return "; an earlier call over this mesh failed, and closed connections stay closed: make a new process group"
        _failed.add(self._group)
        return ""


def _apart(ranks: Sequence[int], plans: Sequence[Mapping[str, Sequence[str]]]) -> list[str]:
    """In what the plans of two calls of some ranks differ; nothing where they are of two kinds, of which words say enough."""
    differences = differing(ranks, plans) if all(plan.keys() == plans[0].keys() for plan in plans) else []
    return [f"these differ in {short(differences, '; in ', 'fields')}"] if differences else []


def _posts(group: dist.ProcessGroup) -> tuple[AnsweringStore, str]:
    """The store, and what the keys of these processes begin with there."""
    return posts_of(group, timedelta(seconds=MOMENT))


def _patience(topic: str) -> float:
    """Seconds for which another rank may look for words of a topic."""
    return MOMENT if topic == "waited" else SURELY


def _told_of_call(
    store: AnsweringStore, life: str, topic: str, peer: int, number: float, *, exactly: bool = False
) -> dict[int, str]:
    """What a peer told of the call of a number, or the next one of which it told."""
    if store.check([key := f"{life}/{topic}/{peer}"]):
        for of, word in json.loads(store.get(key)):
            if of == number or (of > number and not exactly):
                return {peer: word}
    return {}


def _post(
    group: dist.ProcessGroup, topic: str, word: str, peers: Sequence[int], plan: Mapping[str, Sequence[str]], number: float
) -> tuple[AnsweringStore, str]:
    """Tell a group's ranks what this one did, for which of them it waited, and the plan and number of that."""
    store, life = _posts(group)
    key = f"{life}/{topic}/{group.rank()}"
    _told.setdefault(group, {})[key] = time.monotonic()
    store.set(key, json.dumps([word, list(peers), plan, number]))
    return store, life


def _moment(error: Exception) -> float:
    """How long to wait for the words of others.

    Ranks that mix up two calls wait for each other, and the time of both ends at about one moment: the first waits a little for the
    other's word, or the other finds the first's. Where a connection is closed its other end may be about to tell. Who is dead or
    stopped has no word.
    """
    return MOMENT if "timed out" in str(error).lower() or "timeout" in str(error).lower() else MOMENT / 4
