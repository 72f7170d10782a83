"""One rank's side of what the ranks of a group agree on, over their store."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from flexdilated.distributed.answering import AnsweringStore
from flexdilated.distributed.circles import Circle
from flexdilated.distributed.underway import Underway, is_alone
from flexdilated.distributed.words import called, cut, differing, digest, fields_of, listed, named, short

MAX_AGREED = 1024  # plans remembered per group, 32 bytes each
MAX_WORDS = 8  # told of calls, the last ones
# Between the numbers of calls of two steps. In tags too, which are remainders of a power of 2.
APART = (1 << 32) + 982_451_653
LEFT = ("refused", "overdue")  # rounds that not all ranks came to: of one call of the rank that ended it, and of no other
END = {"call": "the end of shared_failures"}
CLOSED = ", which closed its connections: make a new process group"  # by gloo, of a wait whose time is over
IN_VAIN = "it waited in vain"  # behind the name of a rank whose time was over, or that has lost another
HEARD = re.compile(r"rank \d+ (refused|gave up)\b")  # what an error of another rank begins with: whoever passes it on is not named
FIRST_PAUSE, LAST_PAUSE = 0.001, 0.05  # seconds between two looks at the store
REST = 10.0  # looks at the waits of others take a tenth of a wait, however many they are
EACH = 0.001  # the same for each rank, where they are many: one store answers all, 100,000 questions in a second on two cores


class LostError(RuntimeError):
    """A rank has ended, or closed its connections."""


class Ledger:
    """One rank's side of the rounds of one group, and the plans that they settled.

    Keys of round k of a page p: `<life>/<p>/<k>/<rank>`, what each rank holds; `.../arrived`, how many came; `.../outcome`, written
    once, by the first of: the last rank to come, a rank that withdraws, a rank whose time is over. All ranks read the same outcome,
    so all of them agree or all of them raise, and all go on to round k + 1.

    A round that not all came to is that of one call of the rank that ended it, which says how many calls it had made since the
    round before, and how many with messages. A rank that meets this outcome in a call of the same numbers raises in it, as that
    rank does, and both may go on. One that meets it in another call has made what the other has not: it is lost.

    A lost rank makes no more calls and says so under `<life>/<p>/lost`, where all ranks look that come to a round: they are lost
    with it. Ranks whose rows do not come are lost, too. None of them knows which call the others will make next. What all ranks
    begin together is a new page, with numbers and rounds of its own: a step, or what follows it.

    A round compares how many calls have exchanged rows: a rank that left one out, or made one more, is told so. Behind a refusal
    all calls are compared, those that a rank may else make alone too, before any rows are exchanged.

    The store is shared by the ranks of this group and by no other group. `token` is this rank's own in this life: one that was
    interrupted while it took its place asks again with the same.
    """

    def __init__(self, store: Store | AnsweringStore, rank: int, ranks: Sequence[int], token: str = "") -> None:
        token = token or uuid.uuid4().hex
        self.store, self.rank, self.size = store, rank, len(ranks)
        self.ranks = ranks  # by the numbers of messages
        self.page, self.round = 0, 0
        self.kept: list[tuple[int, int]] = []  # earlier rounds, with their pages, whose keys this rank has not deleted yet
        self.agreed: dict[bytes, None] = {}  # in the order of their rounds
        self.made, self.exchanged = 0, 0  # calls since the last round; calls with messages on this page
        self.is_unsure = False  # whether a call was refused since all ranks compared
        self.lost: str | None = None  # why nobody knows which call is next
        self.plan: Mapping[str, object] = {}  # of the last call, unless it was refused
        # All that happened, and when this rank's last call and the last failure that all know were.
        self.events, self.called_at, self.failed_at = 0, 0, 0
        self.words: dict[str, list[tuple[int, str]]] = {}  # the last that were told of calls, by topic
        self.turn: dict[str, int] = {}  # the thread that is in a call
        self.meanwhile = False  # whether another called out of its turn
        self.stepping: int | None = None  # the thread that is inside a step
        self.travelling: Underway | None = None  # what this rank has begun to send and receive in this step
        self.ending: str | None = None  # the round in which this step ends, once this rank has come to it
        self.strewn: list[int] = []  # pages on which this rank has said that it is lost, where others may still look
        self.unsettled: list[int] = []  # pages of steps that this rank has left by an error, and not yet seen that all have
        self.said: list[int] = []  # pages of those of which all have, and where others may still look what this rank said
        # A group of the same name may have lived on this store before and left its last keys. Each rank counts its lives there, so
        # keys of another life are other keys. If an earlier life was not used by all ranks they count differently, and time out.
        lives = (f"lives/{life}/{rank}" for life in itertools.count(1))
        self.life = next(life for life, key in enumerate(lives, 1) if bytes(store.compare_set(key, "", token)) == token.encode())

    def agree(self, plan: Mapping[str, object], timeout: timedelta, *, each_time: bool = False) -> None:
        """As the function `agree`, waiting for the others for `timeout` at most."""
        try:
            key = digest(plan)
        except TypeError as error:
            raise TypeError(f"plan must map names to JSON types, got another: {error}") from error
        self._refuse_lost()
        self.made += 1
        self.plan = plan
        if key in self.agreed and not each_time:
            self._call()
            return
        self._meet(plan, timeout)
        self._call()
        if each_time:
            return
        # First in, first out: order of use would differ between ranks after a refused call, and rounds with it.
        if len(self.agreed) == MAX_AGREED:
            del self.agreed[next(iter(self.agreed))]
        self.agreed[key] = None

    def number(self, timeout: timedelta) -> int:
        """As the function `number_of_call`."""
        self._refuse_lost()
        if self.is_unsure:
            self._meet(self.plan, timeout)
        return self.next_number()

    def next_number(self) -> int:
        """Of a call with messages, which is made now."""
        self._refuse_lost()
        self.exchanged += 1
        self._call()
        return self.last_number

    @property
    def last_number(self) -> int:
        """Of the last call with messages."""
        return self.page * APART + self.exchanged

    def withdraw(self, reason: str, how: str = "refused") -> None:
        """As the function `withdraw`; in words that fit before a call."""
        self.fail()
        if self.lost is not None:  # of which others hear
            return
        reason = cut(reason)
        self.made += 1
        # For ranks that hold an agreed plan: they look at no round, but at this once they have waited in vain.
        self.inform(self.last_number + 1, f"{how} call {self.exchanged + 1}: {reason}", "refused")
        here = self._enter()
        outcome = self._settle(here, ("refused", self._refusal(reason), self.made, self.exchanged))
        self.store.add(f"{here}/arrived", 1)
        self._pass(*json.loads(outcome))

    def leave(self, reason: str, how: str | None = None) -> None:
        """Be lost, by an error of which others hear that wait for this rank in any call of this page."""
        if self.lost is None:
            reason = cut(reason)
            word = f"{how or f'did not come to call {self.exchanged + 1}'}: {reason}"
            self.lose(self._refusal(reason))
            self.inform(self.page * APART + APART - 1, word, "refused")

    def lose(self, message: str) -> None:
        """Make no more calls until all ranks turn the page, and tell those that come to a round."""
        if self.lost is None:
            self.lost = message
            self.strewn.append(self.page)
            self.store.compare_set(self._lost_key(self.page), "", message)

    def turn_page(self) -> None:
        """Begin or end a step: whatever happened, all ranks are at one place."""
        self.page, self.round = self.page + 1, 0
        self.made, self.exchanged, self.is_unsure, self.lost, self.plan, self.ending = 0, 0, False, None, {}, None

    def past(self, timeout: timedelta) -> list[Any]:
        """What each rank said as it left the first of the unsettled steps, once all have left it.

        One that failed there would run ahead of those that still wait.
        """
        limit = timeout.total_seconds()
        end, keys = time.monotonic() + limit, [self._left_key(self.unsettled[0], rank) for rank in range(self.size)]
        while not self.store.check(keys):
            if time.monotonic() >= end:
                late = named([self.ranks[rank] for rank, key in enumerate(keys) if not self.store.check([key])])
                raise TimeoutError(f"{late} must leave the step of shared_failures in which another rank failed within {limit:g} s")
            time.sleep(longest_pause(self.size) / 10)
        return [json.loads(each) for each in self.store.multi_get(keys)]

    def forget(self, *, is_seen: bool) -> None:
        """Delete the keys of the first of the unsettled steps; where ranks say that they have left it, others may still look.

        Args:
            is_seen: Whether all ranks have seen where they said so of the steps before.
        """
        page = self.unsettled.pop(0)
        # Rounds of what follows the step are other ranks' still, who may not have read the outcome.
        over = [of for of in self.kept if of[0] <= page]
        past = [f"{self._key_of(*of)}/{name}" for of in over for name in (self.rank, "arrived", "outcome")]
        for key in (*past, *(self._left_key(of, self.rank) for of in (self.said if is_seen else ()))):
            self.store.delete_key(key)
        self._clear_up(page)
        self.kept, self.said = self.kept[len(over) :], [*([] if is_seen else self.said), page]

    def end(self, timeout: timedelta) -> None:
        """Return when all ranks have come to the end of this step."""
        if self.lost is not None:
            raise _error_of(self.lost)
        self._meet(END, timeout)
        self._clear_up(self.page - 1)

    def _clear_up(self, page: int) -> None:
        """Delete what this rank has said of itself up to a page that all are past."""
        for over in [of for of in self.strewn if of <= page]:
            self.store.delete_key(self._lost_key(over))
            self.strewn.remove(over)

    def abandon(self, reason: str, said: Sequence[Any] = ()) -> bool:
        """Leave this step by an error, with words in JSON types for those that begin the next.

        Not if all have come to its end and agreed there: whoever is interrupted while it waits for that is behind the step.
        """
        if self.ending is not None:
            kind, *_ = json.loads(self._settle(self.ending, ("lost", self._refusal(cut(reason)), 0, 0)))
            if not kind:
                return False
        self.agreed.clear()  # a rank may leave before it has read that all agreed
        self.leave(reason)
        if self.page not in self.unsettled:  # else it was interrupted behind this
            self.unsettled.append(self.page)
        self.store.set(self._left_key(self.page, self.rank), json.dumps(said))
        return True

    def hear(self) -> ValueError | TimeoutError | None:
        """Look whether a rank is lost: what to raise if so."""
        if self.lost is None and self.store.check([key := self._lost_key(self.page)]):
            self.lost = self.store.get(key).decode()
        if self.lost is None:
            return None
        self.fail()
        return _error_of(self.lost)

    def met(self, rank: int, number: float) -> tuple[dict[str, list[str]], int] | None:
        """What a rank compares in a round that waits for this one, and how many calls it made, if not that of a number."""
        if not self.store.check([key := f"{self._key_of(self.page, self.round)}/{rank}"]):
            return None
        fields, exchanged, *_ = json.loads(self.store.get(key))
        return (fields, exchanged) if self.page * APART + exchanged < number else None

    def inform(self, number: int, word: str, topic: str = "failed") -> None:
        """Tell those that will wait in vain for this rank, in a call or one before."""
        words = self.words.setdefault(topic, [])
        words.append((number, word))
        del words[:-MAX_WORDS]
        self.store.set(f"{self.life}/{topic}/{self.rank}", json.dumps(words))

    def fail(self) -> None:
        """Remember a failure that all ranks know."""
        self.events += 1
        self.failed_at = self.events

    def _call(self) -> None:
        self.events += 1
        self.called_at = self.events

    def _key_of(self, page: int, number: int) -> str:
        """The prefix of the keys of a round."""
        return f"{self.life}/{page}/{number}"

    def _lost_key(self, page: int) -> str:
        """Where a rank says on this page that it is lost."""
        return f"{self.life}/{page}/lost"

    def _left_key(self, page: int, rank: int) -> str:
        """Where a rank says that it has left this step by an error."""
        return f"{self.life}/{page}/left/{rank}"

    @property
    def name(self) -> str:
        return f"rank {self.ranks[self.rank]}"

    def _refusal(self, reason: str) -> str:
        """What others hear of an error."""
        return reason if HEARD.match(reason) else f"{self.name} refused: {reason}"

    def _refuse_lost(self) -> None:
        if self.lost is not None:
            self.fail()
            remedy = "; put each step in flexdilated.distributed.shared_failures of this mesh, from which all go on together"
            if self.lost.endswith(CLOSED):
                remedy = ""
            elif self.stepping is not None:
                remedy = "; leave this step of shared_failures by an error, as the others do, and go on with the next"
            raise RuntimeError(f"ranks may be at different calls over this mesh since an error: {self.lost}{remedy}")

    def _meet(self, plan: Mapping[str, object], timeout: timedelta) -> None:
        """Take part in the next round: return when all ranks have come to it in one call."""
        kind, message, *place = self._round(fields_of(plan), timeout, is_end=plan is END)
        is_here = self._pass(kind, message, *place)
        if kind:
            self.fail()
            message = message if is_here else f"{message}; that was another call than the one that this rank is in"
            raise TimeoutError(message) if kind == "overdue" else _error_of(message)

    def _pass(self, kind: str, message: str, made: int, exchanged: int) -> bool:
        """Go on from the outcome of a round: whether all ranks met it in one call."""
        is_here = kind not in LEFT or (made, exchanged) == (self.made, self.exchanged)
        if kind in ("lost", "astray"):
            self.lost = self.lost or message
        elif not is_here:
            self.lose(f"{self.name} met an error of another call than the one that it was in: {message}")
        self.made, self.is_unsure = 0, bool(kind)
        if kind:
            self.plan = {}
        self.exchanged += kind in LEFT  # others may have made it with messages
        return is_here

    def _round(self, fields: Mapping[str, Sequence[str]], timeout: timedelta, *, is_end: bool) -> list[Any]:
        """Take part in the next round: its outcome."""
        end, here = time.monotonic() + timeout.total_seconds(), self._enter()
        self.ending = here if is_end else None
        is_over = self.store.check([f"{here}/outcome"])
        self.store.set(f"{here}/{self.rank}", json.dumps([fields, self.exchanged, self.made, self.is_unsure]))
        last = self.store.add(f"{here}/arrived", 1) == self.size
        if last and not self.store.check([f"{here}/outcome"]):  # a rank that withdrew has no post to read, but wrote the outcome
            outcome = self._settle(here, _compare(self._posts(here), self.ranks))
        else:
            with self._answering(fields) as answer:
                outcome = self._wait(here, end, timeout, answer, is_end=is_end)
        found: list[Any] = json.loads(outcome)
        if found[0] == "overdue" and is_over:
            found[1] += "; that was before this rank came"
        return found

    def _enter(self) -> str:
        """Go on to the next round; the prefix of its keys."""
        # If all came to the last round, all have left the rounds before it.
        if self.kept and self.store.add(f"{self._key_of(*self.kept[-1])}/arrived", 0) == self.size:
            for past in (self._key_of(*of) for of in self.kept[:-1]):
                self.store.delete_key(f"{past}/{self.rank}")
                if self.rank == 0:
                    self.store.delete_key(f"{past}/arrived")
                    self.store.delete_key(f"{past}/outcome")
            del self.kept[:-1]
        here = self._key_of(self.page, self.round)
        self.kept.append((self.page, self.round))
        self.round += 1
        return here

    @contextmanager
    def _answering(self, fields: Mapping[str, Sequence[str]]) -> Iterator[Callable[[], None]]:
        """How a round tells those that wait for rows of this rank that it does not come, while it waits for them."""
        circle, rested = None, time.monotonic() + LAST_PAUSE

        def answer() -> None:
            nonlocal circle, rested
            began = time.monotonic()
            if began >= rested and self.travelling is not None and self.stepping == threading.get_ident() and is_alone():
                if circle is None:
                    call, place = called(fields), (self.page, self.round - 1)
                    circle = Circle(self.store, str(self.life), self.rank, self.size, *place, self.travelling, call, fields)
                circle.answer()
                rested = began + REST * (time.monotonic() - began)

        try:
            yield answer
        finally:
            if circle is not None:
                circle.end()

    def _wait(self, here: str, end: float, timeout: timedelta, answer: Callable[[], None], *, is_end: bool) -> bytes:
        """The outcome of the round, written by this rank if the time is over, or if another is lost."""
        # Not `store.wait`: a FileStore counts its timeout in whole seconds and takes 0 as for ever, and a TCPStore lets no other
        # thread in while it waits.
        start, lost = time.monotonic(), self._lost_key(self.page)
        while not self.store.check([f"{here}/outcome"]):
            if self.store.check([lost]):
                return self._settle(here, ("lost", self.store.get(lost).decode(), 0, 0))
            now = time.monotonic()
            if now >= end:
                return self._settle(here, self._overdue(here, timeout, is_end=is_end))
            answer()
            # A rank that is late by little is not left later by much.
            time.sleep(min(max(FIRST_PAUSE, 0.1 * (now - start)), longest_pause(self.size), end - now))
        return self.store.get(f"{here}/outcome")

    def _settle(self, here: str, outcome: tuple[str, str, int, int]) -> bytes:
        """The outcome of the round: this one, unless another rank was first."""
        return self.store.compare_set(f"{here}/outcome", "", json.dumps(outcome))

    def _overdue(self, here: str, timeout: timedelta, *, is_end: bool) -> tuple[str, str, int, int]:
        """The outcome of a round whose time is over."""
        missing = [rank for rank in range(self.size) if not self.store.check([f"{here}/{rank}"])]
        if not missing:  # the last to come ended before it compared
            return _compare(self._posts(here), self.ranks)
        lost = named([self.ranks[rank] for rank in missing])
        they, they_are, call = ("it", "is", "calls") if len(missing) == 1 else ("they", "are", "call")
        what = "come to the end of shared_failures" if is_end else "take part in dilated_attention"
        why = f"{they} ended, {they_are} slower, or {call} it with an already agreed plan"
        if self.page % 2:
            why = f"{they} ended, {they_are} slower or outside of this step of shared_failures, or {call} with a known plan"
        message = f"{lost} must {what} over this mesh within {timeout.total_seconds():g} s, {they} did not: {why}"
        return "overdue", message, self.made, self.exchanged

    def _posts(self, here: str) -> list[bytes]:
        return self.store.multi_get([f"{here}/{rank}" for rank in range(self.size)])


def _compare(posts: Sequence[bytes], ranks: Sequence[int]) -> tuple[str, str, int, int]:
    """The outcome of a round to which all ranks came: kind, message, and two numbers of which none needs any."""
    plans, exchanged, made, unsure = zip(*(json.loads(post) for post in posts))
    differences = differing(ranks, plans)
    is_astray = len(set(exchanged)) > 1 or (any(unsure) and len(set(made)) > 1)
    if len(set(exchanged)) > 1:
        differences.append(f"how many calls they made before this one, got {listed(ranks, _shown(exchanged))}")
    elif is_astray:
        differences.append(f"how many calls they made since one was refused, got {listed(ranks, _shown(made))}")
    if not differences:
        return "", "", 0, 0
    return "astray" if is_astray else "differ", f"ranks must agree on {short(differences, '; on ', 'fields')}", 0, 0


def _error_of(message: str) -> ValueError | TimeoutError:
    """What a rank raises that hears of another: the time was over for both, or something is wrong with what the other did."""
    return (TimeoutError if message.endswith(CLOSED) or IN_VAIN in message else ValueError)(message)


def longest_pause(size: int) -> float:
    """Seconds between two looks at the store of so many ranks, where one waits for long."""
    return max(LAST_PAUSE, EACH * size)


def _shown(numbers: Sequence[int]) -> list[list[str]]:
    return [[str(n), str(n)] for n in numbers]
