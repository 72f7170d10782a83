"""All ranks of a sharded attention in one process: a thread each, messages through queues."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from queue import Empty, Queue

import torch
from torch import Tensor

TIMEOUT = 60.0


class Mail:
    """The messages between ranks, counted in bytes by (receiver, sender)."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], Queue[Tensor]] = {}
        self.bytes: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()

    def box(self, receiver: int, sender: int) -> Queue[Tensor]:
        with self._lock:
            return self.boxes.setdefault((receiver, sender), Queue())


class SimulatedTransport:
    """`Transport` over a `Mail`; `tamper` may change what is sent."""

    def __init__(self, rank: int, mail: Mail, tamper: Callable[[int, int, Tensor], Tensor] = lambda s, r, x: x) -> None:
        self.rank, self._mail, self._tamper = rank, mail, tamper

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> _Arrival:
        for peer, message in sends.items():
            if message.numel():
                copy = self._tamper(self.rank, peer, message.clone())
                self._mail.bytes[peer, self.rank] += copy.numel() * copy.element_size()
                self._mail.box(peer, self.rank).put(copy)
        return _Arrival(self, receives)

    def take(self, peer: int, into: Tensor) -> None:
        message = self._mail.box(self.rank, peer).get(timeout=TIMEOUT)
        assert message.shape == into.shape, (message.shape, into.shape)
        into.copy_(message)


class _Arrival:
    def __init__(self, transport: SimulatedTransport, receives: Mapping[int, Tensor]) -> None:
        self._transport, self._receives = transport, receives
        for into in receives.values():
            if into.is_floating_point():
                into.fill_(torch.nan)  # what nobody sends must not look like an answer

    def wait(self) -> None:
        for peer, into in self._receives.items():
            if into.numel():
                self._transport.take(peer, into)


def run_ranks(num_ranks: int, work: Callable[[int], object]) -> list[object]:
    """What `work(rank)` gives, for all ranks at once; the first error of any is raised."""
    results: list[object] = [None] * num_ranks
    errors: list[BaseException] = []

    def target(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=target, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    if errors:
        raise next((e for e in errors if not isinstance(e, Empty)), errors[0])
    assert not any(thread.is_alive() for thread in threads), "a rank waits for a message that nobody sends"
    return results
