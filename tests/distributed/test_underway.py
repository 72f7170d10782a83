"""Messages on their way, counted and brought to their end, by themselves."""

import _thread
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.distributed import agreement, underway
from flexdilated.distributed.answering import OWN_THREAD
from flexdilated.distributed.ledger import Ledger
from flexdilated.distributed.underway import Message, Swap, Underway
from tests.distributed.processes import TIMEOUT, Ranks, exactly

TAGS = (5, 6)
SENDER, RECEIVER = 0, 1
SOON = 60.0  # seconds, for what takes none
MOMENT = timedelta(milliseconds=200)


NOBODY: Any = SimpleNamespace(send=lambda *_: None, recv=lambda *_: None)  # a group whose messages go nowhere


def begin(travelling: Underway, group: dist.ProcessGroup, tag: int, values: Sequence[int]) -> tuple[list[Swap], list[torch.Tensor]]:
    """Messages of one tag from the one rank to the other, each begun for itself."""
    is_sent = group.rank() == SENDER
    swaps, held = [], []
    for value in values:
        held.append(torch.full((3,), value if is_sent else -1))
        peer = RECEIVER if is_sent else SENDER
        swaps.append(travelling.begin(group, [Message(peer, is_sent, tag, held[-1].nbytes)], [held[-1]]))
    return swaps, held


def told(group: dist.ProcessGroup, messages: list[Message]) -> list[list[Message]]:
    """What each rank left, as they tell each other."""
    all_left: list[list[Message]] = [[], []]
    dist.all_gather_object(all_left, messages, group=group)
    return all_left


def counted(rank: int, mesh: DeviceMesh, sent: Sequence[int], received: Sequence[int], ended: int) -> None:
    """Of each tag as many are sent and received, and the first of both ended; then the next one is read."""
    group, travelling = mesh.get_group(), Underway()
    for tag, number in zip(TAGS, sent if rank == SENDER else received, strict=True):
        swaps, held = begin(travelling, group, tag, range(number))
        for value, (swap, tensor) in enumerate(zip(swaps[:ended], held)):
            assert swap.has_come(SOON)
            assert swap.error is None
            travelling.end(swap)
            assert tensor.tolist() == [value] * 3
    left = travelling.leave(group)
    assert [message.ordinal for message in left if message.tag == TAGS[0]] == list(range(ended, (sent, received)[rank][0]))
    travelling.settle(group, rank, told(group, left), TIMEOUT)
    assert not travelling.open
    assert not travelling.messages
    for tag in TAGS:  # nothing of what was left stands before them
        (swap,), (tensor,) = begin(travelling, group, tag, [100 + tag])
        assert swap.has_come(SOON)
        travelling.end(swap)
        assert tensor.tolist() == [100 + tag] * 3
    assert not underway._left


@exactly(2)
@pytest.mark.parametrize(
    ("sent", "received", "ended"),
    [((3, 0), (0, 3), 0), ((3, 1), (1, 3), 1), ((2, 2), (2, 2), 0), ((4, 4), (3, 2), 2), ((1, 0), (0, 1), 0)],
)
def test_what_ranks_had_begun_comes_to_its_end(ranks: Ranks, sent: Sequence[int], received: Sequence[int], ended: int) -> None:
    ranks.run(counted, sent, received, ended, deadline=SOON)


def late_to_settle(rank: int, mesh: DeviceMesh) -> None:
    group, travelling = mesh.get_group(), Underway()
    left = told(group, begin(travelling, group, 5, [1])[0][0].messages if rank == SENDER else [])
    began = time.monotonic()
    if rank == SENDER:
        with pytest.raises(TimeoutError, match=r"must come within 0\.2 s, they did not: make a new process group$"):
            travelling.settle(group, rank, left, MOMENT)
        assert time.monotonic() - began >= MOMENT.total_seconds()
    dist.barrier(group=group)
    travelling.settle(group, rank, left if rank == RECEIVER else [[], []], TIMEOUT)
    assert not travelling.open


@exactly(2)
def test_what_does_not_come_is_said(ranks: Ranks) -> None:
    ranks.run(late_to_settle, deadline=SOON)


def test_kinds_of_messages_are_forgotten_from_the_oldest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(underway, "MAX_BEGUN", 2)
    travelling = Underway()
    ordinals = [
        travelling.begin(NOBODY, [Message(0, True, tag, 8)], [torch.empty(8)]).messages[0].ordinal for tag in (1, 2, 1, 3, 1, 2, 1)
    ]
    assert ordinals == [0, 0, 1, 0, 2, 0, 3]


def test_directions_peers_and_tags_are_counted_apart() -> None:
    travelling = Underway()
    kinds = [Message(peer, is_sent, tag, 8) for peer in (0, 1) for is_sent in (False, True) for tag in (1, 2)]
    for ordinal in range(2):
        assert [message.ordinal for message in travelling.begin(NOBODY, kinds, [torch.empty(8)] * len(kinds)).messages] == [
            ordinal
        ] * len(kinds)
    travelling.clear()
    assert not travelling.messages
    assert travelling.begin(NOBODY, kinds[:1], [torch.empty(8)]).messages == kinds[:1]


def test_messages_that_were_interrupted_before_they_were_begun_are_none() -> None:
    interrupted = mock.Mock(side_effect=[mock.Mock(), KeyboardInterrupt])
    group: Any = SimpleNamespace(send=interrupted, recv=interrupted)
    travelling = Underway()
    travelling.begin(NOBODY, [Message(1, True, 5, 8)], [torch.empty(8)])
    with pytest.raises(KeyboardInterrupt):
        travelling.begin(group, [Message(1, True, 5, 8), Message(1, True, 6, 8)], [torch.empty(8)] * 2)
    with pytest.raises(KeyboardInterrupt):
        travelling.begin(SimpleNamespace(send=mock.Mock(side_effect=KeyboardInterrupt)), [Message(2, True, 7, 8)], [torch.empty(8)])  # type: ignore[arg-type]
    assert travelling.leave(group) == [Message(1, True, 5, 8, 0), Message(1, True, 5, 8, 1)]
    assert [travelling.lacks(peer, False, tag, ordinal) for peer, tag, ordinal in ((1, 5, 1), (1, 6, 0), (2, 7, 0))] == [
        False,
        True,
        True,
    ]


def test_a_turn_that_an_interrupt_has_left_behind_is_this_thread_s_still() -> None:
    class Group:
        """Of one process."""

    group: Any = Group()
    agreement._ledgers[group] = Ledger(dist.HashStore(), 0, range(2))
    turns = [agreement.in_turn(group) for _ in range(2)]
    for turn in turns:
        turn.__enter__()  # and not left
    with agreement.in_turn(group):
        pass
    del agreement._ledgers[group]


def test_a_wait_that_is_interrupted_as_it_begins_can_be_begun_again() -> None:
    swap = Swap([], [], [])
    with mock.patch.object(threading.Thread, "start", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        swap.has_come(SOON)
    assert swap.has_come(SOON)
    assert swap.error is None


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that other tests have left in this process are not looked at."""
    listed, before = threading.enumerate, set(threading.enumerate()) - {threading.current_thread()}
    monkeypatch.setattr(threading, "enumerate", lambda: [thread for thread in listed() if thread not in before])


@contextmanager
def beside(module: str, *, name: str | None = None) -> Iterator[None]:
    """A thread whose code lies in a module, by its name."""
    space: dict[str, Any] = {"__name__": module}
    exec("def work(begun, ended):\n    begun.set()\n    ended.wait()\n", space)
    begun, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=space["work"], args=(begun, ended), name=name)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("module", "is_quiet"),
    [
        ("multiprocessing.queues", True),
        ("torch.utils.data._utils.pin_memory", True),
        ("torch._inductor.compile_worker.subproc_pool", True),
        ("tqdm._monitor", True),
        ("rich.live", True),
        ("richer", False),
        ("__main__", False),
        ("concurrent.futures.thread", False),
    ],
)
def test_who_is_alone_has_no_thread_beside_that_may_call(module: str, is_quiet: bool) -> None:
    assert underway.is_alone()
    with beside(module):
        assert underway.is_alone() == is_quiet
    with beside("__main__", name=OWN_THREAD):
        assert underway.is_alone()
    timer = threading.Timer(60.0, print)  # which sleeps in the threading module before it calls
    timer.start()
    assert not underway.is_alone()
    timer.cancel()
    timer.join()
    assert underway.is_alone()


@pytest.mark.usefixtures("apart")
def test_a_pools_threads_call_nothing_while_they_have_nothing_to_do() -> None:
    """torch.compile leaves one behind."""
    begun, ended = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(int).result()
        assert underway.is_alone()
        task = pool.submit(lambda: (begun.set(), ended.wait()))
        assert not underway.is_alone()  # whether or not its thread has begun it
        begun.wait()
        assert not underway.is_alone()
        ended.set()
        task.result()
        assert underway.is_alone()


@pytest.mark.usefixtures("apart")
def test_a_foreign_thread_that_came_by_once_calls_nothing() -> None:
    """Where a callback of C++ asked who it is, as logging does, it stays listed."""
    begun, ended, over = threading.Event(), threading.Event(), threading.Event()

    def come_by() -> None:
        threading.current_thread()
        begun.set()
        ended.wait()
        over.set()

    _thread.start_new_thread(come_by, ())
    begun.wait()
    assert not underway.is_alone()  # while it is in code of Python's
    ended.set()
    over.wait()
    for _ in range(100):
        if underway.is_alone():
            break
        time.sleep(SOON / 100)
    assert underway.is_alone()


@pytest.mark.usefixtures("apart")
def test_a_feeding_thread_of_a_queue_calls_nothing() -> None:
    queue: multiprocessing.Queue[int] = multiprocessing.Queue()
    queue.put(1)
    assert [thread for thread in threading.enumerate() if thread.name == "QueueFeederThread"]
    assert underway.is_alone()
    assert queue.get() == 1
    queue.close()
    queue.join_thread()


def test_a_wait_that_outlives_its_step_ends_quietly() -> None:
    travelling = Underway()
    swap = travelling.begin(NOBODY, [], [])
    travelling.clear()
    travelling.end(swap)
    assert not travelling.open
