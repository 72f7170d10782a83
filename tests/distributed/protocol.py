"""Ranks as threads of one process of which one runs at a time, at times and in an order that a seed draws, with faults.

The store, the clock and the messages are stand-ins; what agrees, waits, leaves steps and settles messages is the library's.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

from flexdilated.distributed import agreement, ledger, underway, waits
from flexdilated.distributed.answering import AnsweringStore
from flexdilated.distributed.underway import Message

TIMEOUT = timedelta(seconds=10)  # of the group; no second of it passes
TRACED = ("agreement", "circles", "ledger", "telling", "underway", "waits")
TICK = 1e-5  # seconds that each turn takes


class OverError(BaseException):
    """The world has ended."""


class Group:
    """A process group as the library sees it."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world.size

    def send(self, content: list[Any], peer: int, tag: int) -> Work:
        return self._world.channels[self._rank, peer, tag].send(content[0], self._world)

    def recv(self, into: list[Any], peer: int, tag: int) -> Work:
        return self._world.channels[peer, self._rank, tag].receive(into[0], self._world)


class Work:
    """A message: it has come when both sides have begun it, and a little later."""

    def __init__(self, channel: Channel, ordinal: int, into: Any, due: float) -> None:
        self._channel, self._ordinal, self._into, self._due = channel, ordinal, into, due

    def has_come(self, now: float) -> bool:
        if now < self._due or min(len(self._channel.sent), self._channel.received) <= self._ordinal:
            return False
        if isinstance(self._into, list) and not self._into:  # else nobody reads it
            self._into.append(self._channel.sent[self._ordinal])
        return True


class Channel:
    """From one rank to another, of one tag: given out in order."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.received = 0

    def send(self, content: Any, world: World) -> Work:
        self.sent.append(content)
        return Work(self, len(self.sent) - 1, None, world.now + world.latency())

    def receive(self, into: Any, world: World) -> Work:
        self.received += 1
        return Work(self, self.received - 1, into, world.now + world.latency())


class Swap:
    """As `underway.Swap`, whose thread waits in real time."""

    def __init__(self, world: World, works: Sequence[Work], messages: Sequence[Message], kept: Any) -> None:
        self._world, self.works, self.messages, self.kept = world, list(works), list(messages), kept
        self.at, self.error, self.is_awaited = 0, None, False

    def has_come(self, seconds: float) -> bool:
        end = self._world.now + seconds
        self.is_awaited = True
        while not all(work.has_come(self._world.now) for work in self.works):
            if self._world.now >= end:
                return False
            self._world.pause(min(0.05, end - self._world.now))
            while self.at < len(self.works) - 1 and self.works[self.at].has_come(self._world.now):
                self.at += 1
        self.is_awaited = False
        return True


class Store(AnsweringStore):
    """One rank's client of the store that all share. Each question is a turn, and may meet a fault."""

    def __init__(self, world: World, rank: int, timeout: timedelta) -> None:
        super().__init__(None, timeout)  # type: ignore[arg-type]
        self._world, self._rank = world, rank

    def _ask(self, name: str, *arguments: Any) -> Any:
        world = self._world
        if not world.is_running:
            return world.answer(name, *arguments)
        world.pause()
        if self.gone is not None:
            raise type(self.gone)(*self.gone.args)
        fault = world.fault_of_question(self._rank, f"{name} {arguments[0]}")
        if fault == "before":
            raise KeyboardInterrupt
        if fault == "silent":
            world.pause(self.timeout.total_seconds())
            if world.random.random() < 0.5:  # it has heard what it was told
                world.answer(name, *arguments)
            self.gone = TimeoutError("the store of the ranks must answer")
            raise TimeoutError("the store of the ranks must answer")
        if fault == "nap":
            world.pause(world.random.choice([1.0, 4.0, 9.0]))
        if fault == "late":
            world.pause(world.random.choice([15.0, 26.0, 40.0]))
        found = world.answer(name, *arguments)
        if fault == "behind":
            raise KeyboardInterrupt
        return found


class World:
    """Some ranks.

    Args:
        size: Of them.
        seed: Of order and times.
        is_alone: Whether processes have one thread, and so look for circles of waits.

    Attributes:
        faults: Of each rank, by the number of its question to the store: "before" it or "behind" it an interrupt, "silent", "nap",
            "late" by more than the timeout.
        lines: Of each rank, those at which it is interrupted, as it goes through the library's.
        is_quiet: Whether faults are over.
        met: Of each rank, the faults that it has met.
        is_stuck: Whether time was over before the program.
    """

    def __init__(self, size: int, seed: int, *, is_alone: bool) -> None:
        self.size, self.random, self.now, self._is_alone = size, random.Random(seed), 0.0, is_alone
        self.channels: defaultdict[tuple[int, int, int], Channel] = defaultdict(Channel)
        self.data: dict[str, bytes] = {}
        self.groups = [Group(self, rank) for rank in range(size)]
        self.faults: list[dict[int, str]] = [{} for _ in range(size)]
        self.lines: list[set[int]] = [set() for _ in range(size)]
        self.is_quiet: Callable[[int], bool] = lambda rank: False
        self.met: list[list[str]] = [[] for _ in range(size)]
        self.errors: dict[int, BaseException] = {}
        self.is_stuck = False
        self._asked = [0] * size
        self._weights = [self.random.choice([1, 1, 1, 5, 20]) for _ in range(size)]
        self._here = threading.local()
        self._turns, self._back = [threading.Semaphore(0) for _ in range(size)], threading.Semaphore(0)
        self._wakes, self._running, self._is_over = [0.0] * size, set(range(size)), False

    # -- time

    @property
    def is_running(self) -> bool:
        """Whether a rank asks."""
        return hasattr(self._here, "rank")

    def pause(self, seconds: float = 0.0) -> None:
        """Let the others go on for so long at least."""
        rank = self._here.rank
        self._wakes[rank] = self.now + seconds
        self._back.release()
        self._turns[rank].acquire()
        if self._is_over:
            raise OverError

    def run(self, program: Callable[[int], None], limit: float) -> None:
        """Let each rank run a program, for so many seconds at most."""
        threads = [threading.Thread(target=self._work, args=(rank, program), daemon=True) for rank in range(self.size)]
        with self._in_place():
            for thread in threads:
                thread.start()
            while self._running:
                self.is_stuck |= self.now > limit and not self.errors
                self._is_over = bool(self.errors) or self.is_stuck
                ready = [rank for rank in sorted(self._running) if self._wakes[rank] <= self.now or self._is_over]
                if not ready:
                    self.now = min(self._wakes[rank] for rank in self._running)
                    continue
                self.now += TICK
                (rank,) = self.random.choices(ready, [self._weights[each] for each in ready])
                self._turns[rank].release()
                self._back.acquire()
            for thread in threads:
                thread.join()

    def _work(self, rank: int, program: Callable[[int], None]) -> None:
        self._here.rank = rank
        self._turns[rank].acquire()
        try:
            if not self._is_over:
                if self.lines[rank]:
                    sys.settrace(self._tracer(rank))
                program(rank)
        except OverError:
            pass
        except BaseException as error:
            self.errors[rank] = error
        finally:
            sys.settrace(None)
            self._running.discard(rank)
            self._back.release()

    def _tracer(self, rank: int) -> Callable[..., Any]:
        number = 0

        def at_line(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            nonlocal number
            if event == "line" and not self.is_quiet(rank):
                number += 1
                if number in self.lines[rank]:
                    self.met[rank].append(f"interrupt in {frame.f_code.co_name}, line {frame.f_lineno}")
                    raise KeyboardInterrupt
            return at_line

        def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
            module = frame.f_globals.get("__name__", "")
            return at_line if module.startswith("flexdilated.distributed.") and module.endswith(TRACED) else None

        return trace

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.pause)
        stand_ins: list[tuple[Any, str, Any]] = [(module, "time", clock) for module in (ledger, waits, underway)]
        stand_ins += [(module, "timeout_of", lambda group: TIMEOUT) for module in (agreement, waits)]
        stand_ins += [(module, "is_alone", lambda: self._is_alone) for module in (ledger, waits)]
        stand_ins += [
            (waits, "posts_of", lambda group, timeout: (Store(self, group.rank(), timeout), "1")),
            (waits, "groups", list),
            (waits, "global_ranks", lambda group: range(group.size())),
            (underway, "Swap", lambda *arguments: Swap(self, *arguments)),
        ]
        with ExitStack() as stack:
            for module, name, stand_in in stand_ins:
                stack.enter_context(mock.patch.object(module, name, stand_in))
            for rank, group in enumerate(self.groups):
                made = ledger.Ledger(Store(self, rank, TIMEOUT), rank, range(self.size), f"token {rank}")
                made.travelling = underway.underway(group)  # type: ignore[arg-type]
                agreement._ledgers[group] = made  # type: ignore[index]
            try:
                yield
            finally:
                for group in self.groups:
                    del agreement._ledgers[group]  # type: ignore[arg-type]
                self.left = [group.rank() for group in self.groups if underway._left.pop(group, None)]  # type: ignore[call-overload]

    # -- messages and the store

    def latency(self) -> float:
        return self.random.choice([0.0, 0.001, 0.1])

    def fault_of_question(self, rank: int, question: str) -> str | None:
        self._asked[rank] += 1
        fault = None if self.is_quiet(rank) else self.faults[rank].get(self._asked[rank])
        if fault is not None:
            self.met[rank].append(f"{fault} at {question}")
        return fault

    def answer(self, name: str, key: Any, *values: Any) -> Any:
        """What a store answers."""
        if name == "check":
            return all(each in self.data for each in key)
        if name == "multi_get":
            return [self.data[each] for each in key]
        if name == "get":
            return self.data[key]
        if name == "set":
            self.data[key] = values[0].encode()
        elif name == "add":
            self.data[key] = str(int(self.data.get(key, b"0")) + values[0]).encode()
            return int(self.data[key])
        elif name == "delete_key":
            self.data.pop(key, None)
        else:
            assert name == "compare_set"
            expected, desired = (value.encode() for value in values)
            if self.data.get(key, b"") == expected:
                self.data[key] = desired
            return self.data.get(key, expected)
        return None
