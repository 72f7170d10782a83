"""All ranks of a sharded attention in one process: a thread each, messages through queues."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

TIMEOUT = 300.0  # seconds


class Mail:
    """The messages between ranks, in the order in which they were sent, counted in bytes by (receiver, sender)."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[int, int]] = Counter()
        self._boxes: dict[tuple[int, int], list[Tensor | None]] = {}
        self._asked: Counter[tuple[int, int]] = Counter()
        self._news = threading.Condition()

    def put(self, receiver: int, sender: int, message: Tensor) -> None:
        with self._news:
            self.bytes[receiver, sender] += message.numel() * message.element_size()
            self._boxes.setdefault((receiver, sender), []).append(message)
            self._news.notify_all()

    def ask(self, receiver: int, sender: int) -> int:
        with self._news:
            self._asked[receiver, sender] += 1
            return self._asked[receiver, sender] - 1

    def take(self, receiver: int, sender: int, number: int) -> Tensor:
        with self._news:
            box = self._boxes.setdefault((receiver, sender), [])
            if not self._news.wait_for(lambda: len(box) > number, TIMEOUT):
                raise TimeoutError(f"rank {receiver} waits for a message that rank {sender} does not send")
            message, box[number] = box[number], None
        assert message is not None
        return message


class SimulatedTransport:
    """`Transport` over a `Mail`."""

    def __init__(self, rank: int, mail: Mail) -> None:
        self.rank, self._mail = rank, mail

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[], None]:
        for peer, message in sends.items():
            if message.numel():
                self._mail.put(peer, self.rank, message.clone())
        awaited = [(peer, self._mail.ask(self.rank, peer), into) for peer, into in receives.items() if into.numel()]
        for _, _, into in awaited:
            into.fill_(torch.nan)  # what nobody sends must not look like an answer

        def wait() -> None:
            for peer, number, into in awaited:
                message = self._mail.take(self.rank, peer, number)
                assert message.shape == into.shape, (message.shape, into.shape)
                into.copy_(message)

        return wait


def run_ranks(num_ranks: int, work: Callable[[int], object]) -> list[object]:
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
        raise next((e for e in errors if not isinstance(e, TimeoutError)), errors[0])
    assert not any(thread.is_alive() for thread in threads), "a rank waits for a message that nobody sends"
    return results
