"""What is kept of the last results."""

import threading
import time

import pytest

from flexdilated.core.bounded_cache import Recent
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.pieces import _plan, plan_pieces


def squares(room: int = 10**6, most: int = 4, fewest: int = 2) -> tuple[Recent[[int], list[int]], list[int]]:
    """A function that keeps its results, of so many bytes as its argument says, and the calls that were made."""
    made: list[int] = []

    def square(number: int) -> list[int]:
        made.append(number)
        return [number * number]

    return Recent(square, lambda result, number: number, room, most, fewest), made


def test_the_last_ones_are_kept() -> None:
    square, made = squares()
    first = [square(number) for number in (1, 2, 3, 4)]
    assert first == [[1], [4], [9], [16]]
    assert square(1) is first[0]
    square(5)  # in place of 2, which was used longest ago
    assert [square(number) is first[number - 1] for number in (1, 3, 4)] == [True] * 3
    assert made == [1, 2, 3, 4, 5]
    assert square(2) == [4]
    assert made == [1, 2, 3, 4, 5, 2]
    assert (len(square), square.nbytes) == (4, 1 + 3 + 4 + 2)
    square.cache_clear()
    assert (len(square), square.nbytes) == (0, 0)


def test_large_ones_are_few() -> None:
    square, made = squares(room=100)
    for number in (30, 40, 20, 50):  # 140 bytes do not fit
        square(number)
    assert (len(square), square.nbytes) == (2, 70)
    square(1000), square(2000)
    assert (len(square), square.nbytes) == (2, 3000)  # the fewest, however large
    square(1), square(2)
    assert (len(square), square.nbytes) == (2, 3)
    assert made == [30, 40, 20, 50, 1000, 2000, 1, 2]


def test_what_fails_is_not_kept() -> None:
    calls = []

    def half(number: int) -> int:
        calls.append(number)
        if len(calls) == 1:
            raise ValueError("first")
        return number // 2

    kept = Recent(half, lambda *_: 1, 10)
    with pytest.raises(ValueError, match="first"):
        kept(8)
    assert kept(8) == kept(8) == 4
    assert calls == [8, 8]
    assert kept.__wrapped__ is half  # as the compiler takes it


def test_threads_share_what_came_first() -> None:
    together = threading.Barrier(2, timeout=60)

    def make(number: int) -> list[int]:
        together.wait()
        time.sleep(0.02 * (threading.current_thread().name == "slow"))
        return [number]

    kept, found = Recent(make, lambda *_: 1, 10), []
    threads = [threading.Thread(target=lambda: found.append(kept(7)), name=name) for name in ("quick", "slow")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is kept(7)


def test_plans_of_many_documents_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has documents of its own: what is kept of them must not grow with the steps."""
    pattern = DilatedPattern((8, 16), (1, 2))

    def documents(step: int) -> tuple[tuple[int, int], ...]:
        return tuple((20 * i, 3 + (i + step) % 18) for i in range(500))

    _plan.cache_clear()
    monkeypatch.setattr(_plan, "room", 1 << 23)
    for step in range(40):
        plan_pieces(pattern, documents(step), 2, False)
        assert len(_plan) <= 8 or _plan.nbytes <= _plan.room
    assert 8 <= len(_plan) < 40
    _plan.cache_clear()
