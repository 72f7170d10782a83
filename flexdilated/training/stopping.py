"""Signals to stop: asked for by the training loop, held until then, and obeyed where it never comes to ask."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from flexdilated.training.options import RankLostError, UserError
from flexdilated.training.ranks import has_met_a_loss, named, tells
from flexdilated.training.waking import wake_others

if TYPE_CHECKING:  # a torch that is built without torch.distributed still trains in one process
    from flexdilated.training.answering import AnsweringStore

STOP_SECONDS = 22.0  # from a signal until the end begins; torchrun kills after 30
STOPPING = "\nstopping after this step (the first compiles for minutes) and a checkpoint; once more: at once, and without\n"
GIVEN_UP_SECONDS = 5.0  # the same where others have met the loss of this rank, or of another
WATCH_SECONDS = 0.2  # between two looks at whether they have


@contextmanager
def stop_requested(*, tells: bool = False) -> Iterator[Callable[[], bool]]:
    """Signals ask to stop instead of stopping: a second one stops at once. One that was held since the start of a rank counts.

    Args:
        tells: Whether the first is answered by a line of standard error, as it comes.
    """
    asked = getattr(signal.getsignal(signal.SIGTERM), "asked", False)

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        if tells:
            with suppress(OSError):  # a closed one
                os.write(2, STOPPING.encode())  # sys.stderr may be in the middle of a line of its own

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    except RankLostError:
        previous[signal.SIGTERM] = signal.SIG_IGN  # torchrun's, which would come before what there is to say
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def stop_deadline(store: AnsweringStore | None, rank: int, count: int, lost: Callable[[str], RankLostError]) -> Iterator[None]:
    """Tell what `lost` makes of it and end the process of a rank where a signal to stop has not ended the block in time.

    The main thread may be in a collective that waits for a rank which is gone, where no handler of Python's comes to run.
    """
    if store is None:
        yield
        return
    ended = threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def has_waited() -> float | None:
        """How long the block has not ended since a signal, once that is too long; None if it has ended."""
        begin = time.monotonic()
        end, others = begin + STOP_SECONDS, [other for other in range(count) if other != rank]
        while not ended.wait(WATCH_SECONDS):
            now = time.monotonic()
            if now >= end:
                return now - begin
            try:
                if any(has_met_a_loss(store, other) for other in others):
                    end, others = min(end, now + GIVEN_UP_SECONDS), []
            except (RuntimeError, TimeoutError):  # the store went with its rank, or is silent: it is not asked again
                others = []
        return None

    from flexdilated.training.answering import OWN_THREAD  # slow to import

    def watch() -> None:
        while byte := reader.recv(1):
            if byte[0] in (signal.SIGINT, signal.SIGTERM) and (seconds := has_waited()) is not None:
                error = named(store, rank, count, lost(f"no answer for {seconds:.0f} s since the signal to stop"))
                if tells(store, rank, error):
                    print(f"error: {error}", file=sys.stderr, flush=True)
                wake_others(store, rank, count)
                os._exit(2)

    thread = threading.Thread(target=watch, daemon=True, name=OWN_THREAD)
    thread.start()
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(previous)
        writer.close()
        thread.join()
        reader.close()


class HeldStop:
    """A handler that remembers a signal to stop, for the training loop to ask; any number of them is one."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


@contextmanager
def stop_held(store: AnsweringStore | None, rank: int, count: int) -> Iterator[None]:
    """Hold SIGTERM in a rank until its training loop asks for it.

    torchrun sends it as soon as one rank has ended: another would end of it without a word, and be taken for lost itself, before it
    met the loss and told of it.
    """
    if store is None:
        yield
        return
    previous = signal.signal(signal.SIGTERM, HeldStop())
    try:
        with stop_deadline(store, rank, count, lambda cause: RankLostError(f"before its first step: {cause}")):
            yield
    except UserError:
        previous = signal.SIG_IGN  # before there is told of it
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
