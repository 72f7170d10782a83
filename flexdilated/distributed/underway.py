"""Messages of a step that are on their way: a rank that hears of an error leaves them, and they come before the next step."""

from __future__ import annotations

import atexit
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from operator import methodcaller
from threading import Thread
from types import FrameType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flexdilated.distributed.answering import OWN_THREAD

MAX_BEGUN = 1 << 16  # kinds of messages remembered per group; two ranks are never apart by more than those of one call
LONG = timedelta(days=365)  # of a wait that nobody needs to come back from: gloo closes all connections at its end
CLOSING_TAG = (1 << 31) - 1
CLOSING = 5.0  # seconds


# The modules whose threads make no calls over ranks: queues of processes, loaders, the compiler, progress bars, loggers.
CALLING_NOTHING = re.compile(
    r"(multiprocessing\.queues|concurrent\.futures\.process|torch\.utils\.data\._utils\.pin_memory"
    r"|torch\._inductor|tqdm|rich|tensorboard|tensorboardX|wandb)(\..*)?"
)
IDLE = 0.01  # seconds after which a thread that was given work has begun it


def is_alone() -> bool:
    """Whether this is the only thread of the process that may begin messages."""
    kinds = _others()
    if "idle" in kinds and "calling" not in kinds:
        time.sleep(IDLE)  # one may be about to run what this thread gave to it
        kinds = _others()
    return "calling" not in kinds


def _others() -> set[str]:
    """What the other threads of the process are."""
    me, frames = threading.current_thread(), sys._current_frames()
    others = [each for each in threading.enumerate() if each is not me and each.name != OWN_THREAD]
    found = set()
    for each in others:
        frame = None if each.ident is None else frames.get(each.ident)
        # A thread that Python did not start, and that is in no Python code: it came by once, in a callback say.
        is_foreign = isinstance(each, threading._DummyThread) and frame is None
        found.add("idle" if is_foreign else _kind(frame))
    return found


def _kind(frame: FrameType | None) -> str:
    """Of a thread in a frame: "quiet" (calls nothing), "idle" (a pool's without work, as compilers leave them) or "calling"."""
    inner, own = frame, None
    while frame is not None:
        if frame.f_globals.get("__name__") != "threading":
            own = frame
        frame = frame.f_back
    if inner is None or own is None:  # begins, or sleeps before it calls
        return "calling"
    if CALLING_NOTHING.fullmatch(own.f_globals.get("__name__", "")):
        return "quiet"
    # What a worker waits for comes from another thread: it has none to run, and there is none in its queue.
    is_worker = inner.f_code.co_name == "_worker" and inner.f_globals.get("__name__") == "concurrent.futures.thread"
    if is_worker and inner.f_locals.get("work_item") is None and inner.f_locals["work_queue"].empty():
        return "idle"
    return "calling"


class Message(NamedTuple):
    """To or from a rank, and which of those of its tag: gloo gives them out in order."""

    peer: int
    is_sent: bool
    tag: int
    nbytes: int
    ordinal: int = 0


class Swap:
    """Messages that were begun together.

    gloo can neither be asked whether a message has come, nor told to wait no more: at the end of its patience it closes the
    connections of the group. So a thread waits, which may be left behind.
    """

    def __init__(self, works: Sequence[dist.Work], messages: Sequence[Message], kept: Sequence[Tensor]) -> None:
        self.messages, self.works, self.kept = list(messages), list(works), kept  # written and read until they have come
        self.at = 0  # of the work that is waited for
        self.error: RuntimeError | None = None
        self._thread: Thread | None = None

    def has_come(self, seconds: float) -> bool:
        """Whether all has come and gone after at most so long, or never will by an `error`."""
        if self._thread is None:
            thread = Thread(target=self._wait, daemon=True, name=OWN_THREAD)
            thread.start()
            self._thread = thread
        self._thread.join(seconds)
        return not self.is_awaited

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits for it."""
        return self._thread is not None and self._thread.is_alive()

    def _wait(self) -> None:
        try:
            for at, work in enumerate(self.works):
                self.at = at
                work.wait(LONG)
        except RuntimeError as error:
            self.error = error


class Underway:
    """What a rank has begun to send and receive in a step of a group, and not ended."""

    def __init__(self) -> None:
        self._begun: OrderedDict[tuple[int, bool, int], int] = OrderedDict()  # how many of a peer, a direction and a tag
        self.open: list[Swap] = []

    def begin(self, group: dist.ProcessGroup, messages: Sequence[Message], tensors: Sequence[Tensor]) -> Swap:
        """Begin to send tensors, and to fill others."""
        begun: dict[tuple[int, bool, int], int] = {}
        numbered = []
        for message in messages:
            ordinal = begun.get(message[:3], self._begun.get(message[:3], 0))
            begun[message[:3]] = ordinal + 1
            numbered.append(message._replace(ordinal=ordinal))
        swap = Swap([], numbered, tensors)
        calls = [methodcaller("send" if m.is_sent else "recv", [tensor], m.peer, m.tag) for m, tensor in zip(messages, tensors)]
        works = map(methodcaller("__call__", group), calls)
        self.open.append(swap)
        self._begun.update(begun)
        # At once: what handles a signal, and may raise, runs between steps of Python and never inside of this one.
        swap.works.extend(works)
        for key in begun:
            self._begun.move_to_end(key)
        while len(self._begun) > MAX_BEGUN:
            self._begun.popitem(last=False)
        return swap

    def _forget_unbegun(self) -> None:
        """Of messages that were to be begun when this rank was interrupted."""
        for swap in self.open:
            for message in swap.messages[len(swap.works) :]:
                self._begun[message[:3]] = min(message.ordinal, self._begun.get(message[:3], 0))
            swap.messages = swap.messages[: len(swap.works)]
        self.open = [swap for swap in self.open if swap.messages]

    def end(self, swap: Swap) -> None:
        """Forget what has come: whoever waited may hold it longer."""
        if swap in self.open:  # else the step has ended, in another thread
            self.open.remove(swap)
        swap.works, swap.kept = [], ()

    def clear(self) -> None:
        """Forget what all ranks have ended."""
        self._begun.clear()
        self.open = []

    @property
    def messages(self) -> list[Message]:
        """What has not come or gone, as far as this rank knows."""
        return [message for swap in self.open for message in swap.messages]

    def lacks(self, other: int, is_sent: bool, tag: int, ordinal: int) -> bool:
        """Whether this rank has not begun its side of a message of another, which says whether that one sends it."""
        return self._begun.get((other, not is_sent, tag), 0) <= ordinal

    def leave(self, group: dist.ProcessGroup) -> list[Message]:
        """Leave the step by an error: what others must know to end it."""
        self._forget_unbegun()
        if any(swap.is_awaited for swap in self.open):
            _left[group] = self
        return self.messages

    def settle(self, group: dist.ProcessGroup, rank: int, left: Sequence[Sequence[Message]], timeout: timedelta) -> None:
        """Bring to their end the messages of a step that all ranks have left, each with these; nobody reads what they hold.

        Raises:
            TimeoutError: If they do not end.
        """
        lacking = [
            Message(other, not is_sent, tag, nbytes)
            for other, messages in enumerate(left)
            for peer, is_sent, tag, nbytes, ordinal in messages
            if peer == rank and self.lacks(other, is_sent, tag, ordinal)
        ]
        if lacking:
            scratch = torch.zeros(max(message.nbytes for message in lacking), dtype=torch.uint8)
            with suppress(RuntimeError):  # of a connection that is closed: what was on its way there has ended too
                self.begin(group, lacking, [scratch[: message.nbytes] for message in lacking])
        end = time.monotonic() + timeout.total_seconds()
        waits = [swap.has_come(max(0.0, end - time.monotonic())) for swap in self.open]  # all of them begin
        if not all(waits):
            raise TimeoutError(
                f"the messages of the step of shared_failures that failed must come within {timeout.total_seconds():g} s, "
                "they did not: make a new process group"
            )
        self.clear()
        _left.pop(group, None)


# Groups live as long as their messages are waited for: a thread that comes back while Python ends would end the process.
_left: dict[dist.ProcessGroup, Underway] = {}
_underway: WeakKeyDictionary[dist.ProcessGroup, Underway] = WeakKeyDictionary()


def underway(group: dist.ProcessGroup) -> Underway:
    """Of a group whose messages have tags."""
    return _underway.setdefault(group, Underway())


@atexit.register
def _close() -> None:
    """End all waits that were left behind: gloo ends those of a group when the time of one of them is over."""
    for group, left in _left.items():
        for peer in dict.fromkeys(message.peer for message in left.messages):
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, CLOSING_TAG).wait(timedelta(milliseconds=1))
        end = time.monotonic() + CLOSING
        for swap in left.open:
            swap.has_come(max(0.0, end - time.monotonic()))
