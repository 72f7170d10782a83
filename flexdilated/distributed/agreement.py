"""The ranks of a group agree on a plan over their store, without a collective. Long: every way to miss each other is told."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

import flexdilated
from flexdilated.distributed.answering import AnsweringStore, timeout_of
from flexdilated.distributed.words import MAX_ITEMS, digest, global_ranks, holders, named, short, shown

VERSION = "the version of flexdilated"  # what every round compares too: of another version plans, messages and results may differ
MAX_AGREED = 1024  # plans remembered per group, 32 bytes each
MAX_REASON = 2000  # characters
MAX_WORDS = 8  # told of calls, the last ones
# Between the numbers of a rank and of one that has refused a call more. In tags too, which are remainders of a power of 2.
APART = (1 << 40) + 982_451_653
LEFT = ("refused", "overdue")  # rounds that not all ranks came to: of one call of the rank that ended it, and of no other
FIRST_PAUSE, LAST_PAUSE = 0.001, 0.05  # seconds between two looks at the store


def agree(group: dist.ProcessGroup, plan: Mapping[str, object], *, each_time: bool = False) -> None:
    """Return once all ranks of the group are known to hold this plan.

    The first call with a plan is a round of the group: all of its ranks must call, and the last to come compares. Later calls with
    it return at once and touch no store, unless they are to be compared each time. Ranks in messages are global ones. A plan maps
    names to JSON types (number, string, bool, None, lists of them; a tuple counts as a list).

    Raises:
        ValueError: If the ranks differ in a field, the same error on every rank; if a rank withdrew from the round.
        TimeoutError: If a rank has not come within the group's timeout, on every rank, the late one included, or the store
            is silent.
        TypeError: If a value of the plan is not of JSON types.
    """
    if group.size() > 1:
        _ledger(group).agree(plan, timeout_of(group), each_time=each_time)


def withdraw(group: dist.ProcessGroup, reason: str) -> None:
    """End the round that the other ranks wait in, or will wait in, with `ValueError: rank <this> refused: <reason>`; does not wait.

    For a rank whose own arguments are wrong, instead of `agree` and before it raises. Ranks that hold an agreed plan for this call
    look at no round: those that exchange rows wait for this rank's messages until the timeout; the others go on, and so do later
    rounds, if this rank caught its error.
    """
    if group.size() > 1:
        with suppress(TimeoutError, RuntimeError):  # of a store that is gone, or full: this rank has its own error to tell
            _ledger(group).withdraw(reason)


@contextmanager
def in_turn(group: dist.ProcessGroup) -> Iterator[None]:
    """One call of this group at a time.

    Raises:
        RuntimeError: If another thread of this process is inside one: calls of threads have no order that ranks could share.
    """
    ledger = _ledger(group)
    if not ledger.turn.acquire(blocking=False):
        ledger.meanwhile += 1
        ledger.fail()
        raise RuntimeError(
            "dilated_attention must run in one thread at a time over one mesh, got a call during another; "
            "give each thread a mesh of its own"
        )
    try:
        yield
    finally:
        # Refused calls of threads, whose next ones must not be taken for these; the call that is made now has its number.
        ledger.refused, ledger.meanwhile = ledger.refused + ledger.meanwhile, 0
        ledger.turn.release()


def number_of_call(group: dist.ProcessGroup) -> int:
    """The number of a call that exchanges rows, among those of this group: call it once for each, after `agree`.

    Equal on all ranks while they make the same calls. Refused calls count too, and set a rank apart from those that have not
    refused as many: its next call must not be taken for one in which they wait, of which it may have skipped any number. Messages
    say the remainder by `APART`.
    """
    return _ledger(group).number()


def events_of(group: dist.ProcessGroup) -> int:
    """How many calls of a group ranks have agreed on, and how many failures they all know of."""
    ledger = _ledgers.get(group)
    return 0 if ledger is None else ledger.events


def failed(group: dist.ProcessGroup) -> None:
    """Say that what this rank raises next all ranks of a group raise, or will: it lost them, or they compared what differs."""
    if (ledger := _ledgers.get(group)) is not None:  # else there was no call of which to tell
        ledger.fail()


def tell(group: dist.ProcessGroup, before: int, reason: str, *, is_backward: bool) -> None:
    """Tell the other ranks of an error of this one, unless they have it too.

    It refuses the next call, also where it comes in a call that is made, or behind one: others may have all that they need of that,
    and wait for this rank in the next call of their model, to which it does not come.

    They have it if it comes behind one that all know, and no call was made since: it is the same, or what became of it. Which of
    the two cannot be told from the error: programs collect what was caught, and raise another for it.

    Args:
        group: The ranks that make the calls in which they might wait for this one.
        before: `events_of` the group where what has failed began.
        reason: The error.
        is_backward: Whether it is in a backward, which ranks notice by their own: it refuses no call.
    """
    with suppress(TimeoutError, RuntimeError):  # of a store that is gone
        ledger = _ledger(group)
        if ledger.failed_at > max(before, ledger.called_at):
            return
        reason = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."
        if is_backward:
            number = ledger.exchanged + ledger.refused
            ledger.inform(number, f"failed in a backward behind call {number}: {reason}")
        else:
            ledger.withdraw(reason, "did not come to")


def inform(group: dist.ProcessGroup, reason: str) -> None:
    """Tell those that will wait in vain for this rank in its next call, which it has not made and does not refuse."""
    with suppress(TimeoutError, RuntimeError):  # of a store that is gone
        number = next_number(group)
        _ledger(group).inform(number, f"did not come to call {number}: {reason}")


def next_number(group: dist.ProcessGroup) -> int:
    """That of the next call that exchanges rows, or is refused."""
    ledger = _ledgers.get(group)
    return 1 if ledger is None else ledger.exchanged + ledger.refused + 1


def posts_of(group: dist.ProcessGroup, timeout: timedelta) -> tuple[AnsweringStore, str]:
    """The store of a group, which is asked for so long, and what the keys of these processes begin with there."""
    ledger = _ledger(group)
    store = ledger.store.store if isinstance(ledger.store, AnsweringStore) else ledger.store
    return AnsweringStore(store, timeout), str(ledger.life)


def groups() -> list[dist.ProcessGroup]:
    """Those in which this process has agreed on something, or refused."""
    return list(_ledgers)


class Ledger:
    """One rank's side of the rounds of one group, and the plans that they settled.

    Keys of round k: `<life>/<k>/<rank>`, what each rank holds; `<life>/<k>/arrived`, how many came; `<life>/<k>/outcome`, written
    once, by the first of: the last rank to come, a rank that withdraws, a rank whose time is over. All ranks read the same outcome,
    so all of them agree or all of them raise, and all go on to round k + 1.

    A rank that withdraws while the others hold an agreed plan is alone in its round, and they meet that refusal in their next one.
    It says how many calls that rank had made since the round before: a rank that has made more has passed the refused call, and
    goes on to the round after it, where the other waits.

    A round compares how many calls have exchanged rows, too: a rank that left one out, or made one more, is told so. A refused call
    may have been such a call on other ranks, or not: it counts as either, and then all calls are compared, those that a rank may
    else make alone too.

    The store is shared by the ranks of this group and by no other group.
    """

    def __init__(self, store: Store | AnsweringStore, rank: int, ranks: Sequence[int]) -> None:
        self.store, self.rank, self.size = store, rank, len(ranks)
        self.ranks = ranks  # by the numbers of messages
        self.round = 0
        self.kept: list[int] = []  # earlier rounds whose keys this rank has not deleted yet
        self.agreed: dict[bytes, None] = {}  # in the order of their rounds
        self.made = 0  # calls since the last round; below 0 if that ended a call which this rank has still to make,
        self.ahead: tuple[str, str] | None = None  # of this kind, with these words
        self.meanwhile = 0  # refused calls of other threads while one is made
        self.exchanged, self.refused = 0, 0  # calls with messages; refused ones, of which the others may have exchanged some
        # All that happened, and when the last call that ranks agreed on and the last failure that all know was.
        self.events, self.called_at, self.failed_at = 0, 0, 0
        self.words: dict[str, list[tuple[int, str]]] = {}  # the last that were told of calls, by topic
        self.turn = threading.Lock()
        # A group of the same name may have lived on this store before and left its last keys. Each rank counts its lives there, so
        # keys of another life are other keys. If an earlier life was not used by all ranks they count differently, and time out.
        self.life = store.add(f"lives/{rank}", 1)

    def agree(self, plan: Mapping[str, object], timeout: timedelta, *, each_time: bool = False) -> None:
        """As the function `agree`, waiting for the others for `timeout` at most."""
        try:
            key = digest(plan)
        except TypeError as error:
            raise TypeError(f"plan must map names to JSON types, got another: {error}") from error
        self.made += 1
        if key in self.agreed and not each_time:
            self._call()
            return
        fields = fields_of(plan)
        end = time.monotonic() + timeout.total_seconds()
        if self.ahead is not None and self.made == 0:
            (kind, message), count = self.ahead, 0
            self.ahead = None
        else:
            kind, message, count = self._round(fields, end, timeout)
        while kind in LEFT and count < self.made:  # of a call before this one
            self.made -= count
            kind, message, count = self._round(fields, end, timeout)
        self.made = self.made - count if kind in LEFT else 0
        if kind in LEFT:  # the others may have gone on to exchange rows of it
            self.refused += 1
        else:
            self.exchanged, self.refused = count, 0
        if kind:
            self.fail()
            raise (TimeoutError if kind == "overdue" else ValueError)(message)
        self._call()
        if each_time:
            return
        # First in, first out: order of use would differ between ranks after a refused call, and rounds with it.
        if len(self.agreed) == MAX_AGREED:
            del self.agreed[next(iter(self.agreed))]
        self.agreed[key] = None

    def _call(self) -> None:
        self.events += 1
        self.called_at = self.events

    def fail(self) -> None:
        """Remember a failure that all ranks know."""
        self.events += 1
        self.failed_at = self.events

    def inform(self, number: int, word: str, topic: str = "failed") -> None:
        """Tell those that will wait in vain for this rank, in a call or one before."""
        words = self.words.setdefault(topic, [])
        words.append((number, word))
        del words[:-MAX_WORDS]
        self.store.set(f"{self.life}/{topic}/{self.rank}", json.dumps(words))

    def _round(self, fields: Mapping[str, Sequence[str]], end: float, timeout: timedelta) -> tuple[str, str, int]:
        """Take part in the next round: its outcome."""
        here = self._enter()
        is_over = self.store.check([f"{here}/outcome"])
        self.store.set(f"{here}/{self.rank}", json.dumps([fields, self.exchanged, self.exchanged + self.refused, self.made]))
        last = self.store.add(f"{here}/arrived", 1) == self.size
        if last and not self.store.check([f"{here}/outcome"]):  # a rank that withdrew has no post to read, but wrote the outcome
            outcome = self._settle(here, _compare(self._posts(here), self.ranks))
        else:
            outcome = self._wait(here, end, timeout)
        kind, message, count = json.loads(outcome)
        return kind, f"{message}; that was before this rank came" if kind == "overdue" and is_over else message, count

    def withdraw(self, reason: str, how: str = "refused") -> None:
        """As the function `withdraw`; in words that fit before a call."""
        self.made += 1
        self.refused += 1
        self.fail()
        # For ranks that hold an agreed plan: they look at no round, but at this once they have waited in vain.
        number = self.exchanged + self.refused
        self.inform(number, f"{how} call {number}: {reason}", "refused")
        if self.ahead is not None and self.made == 0:
            self.ahead = None
            return
        kind, message, count = self._refuse(reason)
        while kind in LEFT and count < self.made:  # of a call before this one
            self.made -= count
            kind, message, count = self._refuse(reason)
        self.made = self.made - count if kind in LEFT else 0
        self.ahead = (kind, message) if self.made < 0 else None

    def _refuse(self, reason: str) -> tuple[str, str, int]:
        """Pass the next round without waiting: its outcome, which is this refusal unless another rank was first."""
        here = self._enter()
        outcome = self._settle(here, ("refused", f"rank {self.ranks[self.rank]} refused: {reason}", self.made))
        self.store.add(f"{here}/arrived", 1)
        kind, message, count = json.loads(outcome)
        return kind, message, count

    def number(self) -> int:
        """As the function `number_of_call`."""
        self.exchanged += 1
        return self.exchanged + self.refused + APART * self.refused

    def _enter(self) -> str:
        """Go on to the next round; the prefix of its keys."""
        # If all came to the last round, all have left the rounds before it.
        if self.kept and self.store.add(f"{self.life}/{self.kept[-1]}/arrived", 0) == self.size:
            for past in self.kept[:-1]:
                self.store.delete_key(f"{self.life}/{past}/{self.rank}")
                if self.rank == 0:
                    self.store.delete_key(f"{self.life}/{past}/arrived")
                    self.store.delete_key(f"{self.life}/{past}/outcome")
            del self.kept[:-1]
        here = f"{self.life}/{self.round}"
        self.kept.append(self.round)
        self.round += 1
        return here

    def _wait(self, here: str, end: float, timeout: timedelta) -> bytes:
        """The outcome of the round, written by this rank if the time is over."""
        # Not `store.wait`: a FileStore counts its timeout in whole seconds and takes 0 as for ever, and a TCPStore lets no other
        # thread in while it waits.
        pause = FIRST_PAUSE
        while not self.store.check([f"{here}/outcome"]):
            left = end - time.monotonic()
            if left <= 0:
                return self._settle(here, self._overdue(here, timeout))
            time.sleep(min(pause, left))
            pause = min(2 * pause, LAST_PAUSE)
        return self.store.get(f"{here}/outcome")

    def _settle(self, here: str, outcome: tuple[str, str, int]) -> bytes:
        """The outcome of the round: this one, unless another rank was first."""
        return self.store.compare_set(f"{here}/outcome", "", json.dumps(outcome))

    def _overdue(self, here: str, timeout: timedelta) -> tuple[str, str, int]:
        """The outcome of a round whose time is over."""
        missing = [rank for rank in range(self.size) if not self.store.check([f"{here}/{rank}"])]
        if not missing:  # the last to come ended before it compared
            return _compare(self._posts(here), self.ranks)
        lost = named([self.ranks[rank] for rank in missing])
        they, they_are, call = ("it", "is", "calls") if len(missing) == 1 else ("they", "are", "call")
        return (
            "overdue",
            f"{lost} must take part in dilated_attention over this mesh within {timeout.total_seconds():g} s, "
            f"{they} did not: {they} ended, {they_are} slower, or {call} it with an already agreed plan",
            self.made,
        )

    def _posts(self, here: str) -> list[bytes]:
        return self.store.multi_get([f"{here}/{rank}" for rank in range(self.size)])


# Ledgers live as long as their groups: the number of the round and the agreed plans are facts about a group, which torch gives no
# place to keep, and dilated_attention is a function, which has none either. The only alternative is a round at every call.
_ledgers: WeakKeyDictionary[dist.ProcessGroup, Ledger] = WeakKeyDictionary()


def _ledger(group: dist.ProcessGroup) -> Ledger:
    if (ledger := _ledgers.get(group)) is None:
        # Group names are unique in a process, not across processes: two groups of one name may share the store.
        members = hashlib.sha256(repr(dist.get_process_group_ranks(group)).encode()).hexdigest()[:16]
        store = PrefixStore(f"flexdilated/agreement/{members}", group.get_group_store())
        ledger = _ledgers[group] = Ledger(AnsweringStore(store, timeout_of(group)), group.rank(), global_ranks(group))
    return ledger


def _compare(posts: Sequence[bytes], ranks: Sequence[int]) -> tuple[str, str, int]:
    """The outcome of a round to which all ranks came: kind, message, and the last number that a call of any rank has."""
    plans, least, most, made = zip(*(json.loads(post) for post in posts))
    differences = differing(ranks, plans)
    if max(least) > min(most):
        differences.append(f"how many calls they made before this one, got {_numbers(ranks, most)}")
    elif least != most and len(set(made)) > 1:  # was a refused call one that others made alone, or one that they are to make?
        more = [n - min(made) for n in made]
        differences.append(
            f"how many calls they made, one of which a rank refused, got {_numbers(ranks, more)} more than the least of them"
        )
    if not differences:
        return "", "", max(most)
    return "differ", f"ranks must agree on {short(differences, '; on ', 'fields')}", max(most)


def fields_of(plan: Mapping[str, object]) -> dict[str, list[str]]:
    """Each field of a plan as messages show it, and a digest by which it is compared; the version too.

    Fields of a field, and the items of a long list among them, stand alone: messages cut long values, and say which differ.
    """
    found: dict[str, object] = {VERSION: flexdilated.__version__}
    for name, value in plan.items():
        for key, each in value.items() if isinstance(value, dict) and value else [("", value)]:
            of = f"{name}.{key}" if key else name
            if key and isinstance(each, (list, tuple)) and len(each) > MAX_ITEMS:
                found |= {f"{of}[{i}]": item for i, item in enumerate(each)}
            else:
                found[of] = each
    return {name: [shown(x), digest(x).hex()] for name, x in found.items()}


def differing(ranks: Sequence[int], plans: Sequence[Mapping[str, Sequence[str]]]) -> list[str]:
    """For each field that is not the same in the plans of some ranks its name, and what each of them has."""
    differences = []
    for name in dict.fromkeys(name for plan in plans for name in plan):
        values = [plan.get(name, ["nothing", ""]) for plan in plans]
        if any(value[1] != values[0][1] for value in values):
            differences.append(f"{name}, got {_listed(ranks, values)}")
    return differences


def _numbers(ranks: Sequence[int], numbers: Sequence[int]) -> str:
    return _listed(ranks, [[str(n), str(n)] for n in numbers])


def _listed(ranks: Sequence[int], values: Sequence[Sequence[str]]) -> str:
    """Each value with the ranks that hold it, for example `17 on ranks 0, 2 and 19 on rank 1`, from what is shown and a digest."""
    found = holders((rank, tuple(value)) for rank, value in zip(ranks, values))
    return short([f"{text} on {named(those)}" for (text, _), those in found], " and ", "values")
