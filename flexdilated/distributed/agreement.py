"""The ranks of a group agree on a plan over their store, without a collective."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.distributed_c10d import PrefixStore, Store

from flexdilated.distributed.answering import AnsweringStore, timeout_of
from flexdilated.distributed.ledger import CLOSED, Ledger
from flexdilated.distributed.underway import Message, underway
from flexdilated.distributed.words import cut, global_ranks

GRACE = timedelta(seconds=5)  # for those that wait as long as a rank that failed, and have come there a little later


def agree(group: dist.ProcessGroup, plan: Mapping[str, object], *, each_time: bool = False) -> None:
    """Return once all ranks of the group are known to hold this plan.

    The first call with a plan is a round of the group: all of its ranks must call, and the last to come compares. Later calls with
    it return at once and touch no store, unless they are to be compared each time. Ranks in messages are global ones. A plan maps
    names to JSON types (number, string, bool, None, lists of them; a tuple counts as a list).

    Raises:
        ValueError: If the ranks differ in a field, the same error on every rank; if a rank withdrew from the round.
        TimeoutError: If a rank has not come within the group's timeout, on every rank, the late one included, or the store
            is silent.
        RuntimeError: If ranks may be at different calls since an earlier error.
        TypeError: If a value of the plan is not of JSON types.
    """
    if group.size() > 1:
        _ledger(group).agree(plan, timeout_of(group), each_time=each_time)


def withdraw(group: dist.ProcessGroup, reason: str) -> None:
    """End the round that the other ranks wait in, or will wait in, with `ValueError: rank <this> refused: <reason>`; does not wait.

    For a rank that refuses its next call, instead of `agree` and before it raises. Ranks that hold an agreed plan for this call
    look at no round: those that exchange rows wait for this rank's messages until the timeout. Before the next call that exchanges
    rows all ranks that know of this compare whether they are at one call.
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
    ledger, me = _ledger(group), threading.get_ident()
    if ledger.turn.setdefault("thread", me) != me:  # at once: where this is interrupted behind it, the turn is this thread's still
        ledger.meanwhile = True
        ledger.fail()
        raise RuntimeError(
            "dilated_attention must run in one thread at a time over one mesh, got a call during another; "
            "give each thread a mesh of its own"
        )
    try:
        yield
    finally:
        ledger.turn.clear()
        if ledger.meanwhile:
            ledger.meanwhile = False
            lose(group, "a thread called over the mesh during a call of another")


def number_of_call(group: dist.ProcessGroup) -> int:
    """The number of a call that exchanges rows, among those of this group: call it once for each, after `agree`.

    Equal on all ranks while they make the same calls, and never used twice. Messages say the remainder by `APART`.

    Raises:
        ValueError, TimeoutError, RuntimeError: As `agree`: behind a refusal ranks compare this call, also if they know its plan.
    """
    return _ledger(group).number(timeout_of(group))


def number_of_collective(group: dist.ProcessGroup) -> tuple[int, int]:
    """The same of a call in which all ranks compare such numbers, by a collective. The second is of refusals.

    Inside of a step a round comes first: from a collective nobody comes back to hear that another rank has left the step.

    Raises:
        RuntimeError: If ranks may be at different calls since an earlier error.
    """
    ledger = _ledger(group)
    if ledger.stepping is None:
        ledger.made += 1
    else:
        ledger.agree({"call": "a collective"}, timeout_of(group), each_time=True)
    return ledger.next_number(), ledger.made if ledger.is_unsure else 0


def events_of(group: dist.ProcessGroup) -> int:
    """How many calls of a group this rank has made, and how many failures all ranks know of."""
    ledger = _ledgers.get(group)
    return 0 if ledger is None else ledger.events


def failed(group: dist.ProcessGroup) -> None:
    """Say that what this rank raises next all ranks of a group raise, or will: they compared what differs."""
    if (ledger := _ledgers.get(group)) is not None:  # else there was no call of which to tell
        ledger.fail()


def lose(group: dist.ProcessGroup, reason: str, *, is_closed: bool = False) -> None:
    """Say that this rank has given up a call that others may make, or be behind: until the next step no rank makes any."""
    with suppress(TimeoutError, RuntimeError):  # of a store that is gone
        ledger = _ledger(group)
        ledger.fail()
        ledger.lose(f"{ledger.name} gave up: {reason}{CLOSED if is_closed and dist.get_backend(group) == 'gloo' else ''}")


def is_lost(group: dist.ProcessGroup) -> bool:
    """Whether ranks may be at different calls."""
    ledger = _ledgers.get(group)
    return ledger is not None and ledger.lost is not None


def is_stepping(group: dist.ProcessGroup) -> bool:
    """Whether a thread is inside of a step."""
    ledger = _ledgers.get(group)
    return ledger is not None and ledger.stepping is not None


def place_of(group: dist.ProcessGroup) -> tuple[int, int]:
    """The number of the step that a rank is in, and of the next round to which it comes, which all ranks count alike."""
    ledger = _ledger(group)
    return ledger.page, ledger.round


def heard(group: dist.ProcessGroup) -> ValueError | TimeoutError | None:
    """Look whether another rank has left this step, or a call of it, while this one waits in vain: what to raise if so."""
    return _ledger(group).hear()


def met(group: dist.ProcessGroup, rank: int, number: float) -> tuple[dict[str, list[str]], int] | None:
    """Where a rank waits in vain for this one, which waits for it in the call of a number, as `Ledger.met`."""
    return _ledger(group).met(rank, number)


def tell(group: dist.ProcessGroup, before: int, reason: str, *, is_backward: bool) -> None:
    """Tell the other ranks of an error of this one, unless they have it too.

    Where no call was made yet it refuses the next one, and ranks that meet the refusal in that call may go on. In a call, or behind
    one, nobody knows which call the others will make next: they may have had their last one of a model, or wait in the next layer.

    They have it if it comes behind one that all know, and no call was made since: it is the same, or what became of it. Which of
    the two cannot be told from the error: programs collect what was caught, and raise another for it.

    Args:
        group: The ranks that make the calls in which they might wait for this one.
        before: `events_of` the group where what has failed began.
        reason: The error.
        is_backward: Whether it is in a backward.
    """
    with suppress(TimeoutError, RuntimeError):  # of a store that is gone
        ledger = _ledger(group)
        if ledger.failed_at > max(before, ledger.called_at):
            return
        if is_backward:
            ledger.leave(reason, f"failed in a backward behind call {ledger.exchanged}")
        elif ledger.called_at > before:
            ledger.leave(reason)
        else:
            ledger.withdraw(reason, "did not come to")


def inform(group: dist.ProcessGroup, reason: str) -> None:
    """Tell those that will wait in vain for this rank in its next call, which it has not made and does not refuse."""
    with suppress(TimeoutError, RuntimeError):  # of a store that is gone
        ledger = _ledger(group)
        ledger.inform(ledger.last_number + 1, f"did not come to call {ledger.exchanged + 1}: {cut(reason)}")


@contextmanager
def step(
    group: dist.ProcessGroup, reason_of: Callable[[BaseException], str], ends: type[BaseException] | tuple[()]
) -> Iterator[None]:
    """Calls that all ranks end together, by an error or none.

    Args:
        group: The ranks.
        reason_of: What to tell of an error.
        ends: What ends a step too where nothing has failed.

    Raises:
        ValueError: At the end, if another rank has raised inside.
        TimeoutError: If a rank has not come to the end within the group's timeout.
        RuntimeError: If another thread is inside a step.
    """
    ledger = _begin(group, reason_of)
    is_done: bool | None = None
    end = None
    try:
        ledger.stepping = threading.get_ident()
        try:
            yield
        except ends as error:
            end = error
        _end(ledger, group)
        is_done = True
        underway(group).clear()
    except BaseException as error:
        with suppress(TimeoutError, RuntimeError):  # of a store that is gone
            is_done = not _abandon(ledger, group, reason_of(error))
        raise
    finally:
        ledger.stepping = None
        if is_done is not None:  # else it could not say that it has left, or was interrupted on its way out: the next step does
            ledger.turn_page()
    if end is not None:
        raise end


# A compiler that is not to take all traces what runs behind a break of its graph, and none of these has parts that it knows.


@_disable_dynamo
def is_inside(group: dist.ProcessGroup) -> bool:
    """Whether this thread is inside of a step."""
    ledger = _ledgers.get(group)
    return ledger is not None and ledger.stepping == threading.get_ident()


@_disable_dynamo
def _begin(group: dist.ProcessGroup, reason_of: Callable[[BaseException], str]) -> Ledger:
    """Begin a step.

    One that cannot begin is left as one that fails inside, and has a page of its own too: its ranks would else be a step behind the
    others, and take the next one of theirs for this. So begins are counted before anything else.
    """
    known = _ledgers.get(group)
    if known is not None and known.stepping is not None:
        raise RuntimeError("shared_failures must run in one thread at a time over one mesh, got it while another thread is inside")
    _begins[group] = number = _begins.get(group, 0) + 1
    ledger = _ledger(group)
    if isinstance(ledger.store, AnsweringStore):
        ledger.store.try_again()
    while ledger.page < 2 * number - 1:
        if ledger.page % 2:  # of a step that could not say so, or was interrupted before
            _abandon(ledger, group, "it was interrupted as it began or left a step, or the store was silent")
        ledger.turn_page()
    try:
        while ledger.unsettled:
            left = ledger.past(timeout_of(group) + GRACE)
            messages = [[Message(*message) for message in each] for each, _ in left]
            underway(group).settle(group, ledger.rank, messages, timeout_of(group))
            ledger.forget(is_seen=all(has_begun for _, has_begun in left))
    except BaseException as error:
        with suppress(TimeoutError, RuntimeError):  # of a store that is gone: the next step says it
            _abandon(ledger, group, reason_of(error))
            ledger.turn_page()
        raise
    return ledger


@_disable_dynamo
def _end(ledger: Ledger, group: dist.ProcessGroup) -> None:
    ledger.end(timeout_of(group))


@_disable_dynamo
def _abandon(ledger: Ledger, group: dist.ProcessGroup, reason: str) -> bool:
    """Leave a step that had begun by an error: whether so, or all ranks have ended it without."""
    has_begun = not any(page < ledger.page for page in ledger.unsettled)  # else messages on their way are of steps before
    if ledger.abandon(reason, (underway(group).leave(group) if has_begun else (), has_begun)):
        return True
    underway(group).clear()
    return False


def posts_of(group: dist.ProcessGroup, timeout: timedelta) -> tuple[AnsweringStore, str]:
    """The store of a group, which is asked for so long, and what the keys of these processes begin with there."""
    ledger = _ledger(group)
    store = ledger.store.store if isinstance(ledger.store, AnsweringStore) else ledger.store
    return AnsweringStore(store, timeout), str(ledger.life)


def groups() -> list[dist.ProcessGroup]:
    """Those in which this process has agreed on something, or refused."""
    return list(_ledgers)


# Ledgers live as long as their groups: the number of the round and the agreed plans are facts about a group, which torch gives no
# place to keep, and dilated_attention is a function, which has none either. The only alternative is a round at every call.
_ledgers: WeakKeyDictionary[dist.ProcessGroup, Ledger] = WeakKeyDictionary()
_tokens: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
_begins: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # of steps


def _ledger(group: dist.ProcessGroup) -> Ledger:
    if (ledger := _ledgers.get(group)) is None:
        # Group names are unique in a process, not across processes: two groups of one name may share the store.
        members = hashlib.sha256(repr(dist.get_process_group_ranks(group)).encode()).hexdigest()[:16]
        is_fake = dist.get_backend(group) == "fake"  # whose store of torch's holds nothing
        of_group: Store = dist.HashStore() if is_fake else group.get_group_store()  # type: ignore[attr-defined]
        store = PrefixStore(f"flexdilated/agreement/{members}", of_group)
        answering, token = AnsweringStore(store, timeout_of(group)), _tokens.setdefault(group, uuid.uuid4().hex)
        ledger = _ledgers[group] = Ledger(answering, group.rank(), global_ranks(group), token)
        ledger.travelling = underway(group)
    return ledger
