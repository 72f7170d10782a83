"""Ranks that wait for each other, by themselves: what they tell over a store, and that nobody sees a circle that is none."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from flexdilated.distributed.answering import AnsweringStore
from flexdilated.distributed.circles import Circle
from flexdilated.distributed.underway import Message, Swap, Underway
from tests.distributed.processes import TIMEOUT
from tests.distributed.test_underway import NOBODY

Step = list[tuple[int, bool, int]]  # messages that are begun together: peer, whether sent, tag
ROUND: Step = []  # in which a rank waits for all others to come to it


@dataclass
class Rank:
    """One that goes through some steps, beginning the messages of each and waiting for them one by one, or for all ranks."""

    number: int
    program: list[Step]
    store: AnsweringStore
    size: int
    page: int = 1
    travelling: Underway = field(default_factory=Underway)
    swap: Swap | None = None
    at: int = 0
    circle: Circle | None = None
    rounds: int = 0  # to which it has come
    is_in_round: bool = False

    def begin(self) -> None:
        """Go on to the next step."""
        self.at, self.swap = 0, None
        step = self.program.pop(0) if self.program else None
        self.is_in_round = step == ROUND
        if self.is_in_round:
            self.rounds += 1
        elif step is not None:
            self.swap = self.travelling.begin(NOBODY, [Message(*each, nbytes=1) for each in step], [torch.empty(1)] * len(step))

    @property
    def awaited(self) -> Message | None:
        """For what it waits; None in a round, and at the end of its program."""
        return None if self.swap is None else self.swap.messages[self.at]

    def look(self) -> list[int]:
        """The ranks of a circle, as this one sees it."""
        if self.circle is None:
            place = self.page, self.rounds - self.is_in_round
            self.circle = Circle(self.store, "life", self.number, self.size, *place, self.travelling, f"call of {self.number}", {})
        if self.is_in_round:
            self.circle.answer()
            return []
        assert self.awaited is not None
        return [rank for rank, _ in self.circle.look(self.awaited)]

    def come(self) -> None:
        """What it waits for has come."""
        self.at += 1
        if self.swap is None or self.at == len(self.swap.messages):
            if self.circle is not None:
                self.circle.end()
                self.circle = None
            self.begin()


def ranks_of(*programs: list[Step]) -> list[Rank]:
    store = AnsweringStore(dist.HashStore(), TIMEOUT)
    found = [Rank(number, list(program), store, len(programs)) for number, program in enumerate(programs)]
    for rank in found:
        rank.begin()
    return found


def has_begun(ranks: list[Rank], number: int) -> bool:
    """Whether the other side of what a rank waits for is on its way, so that it comes; whether all have come to its round."""
    if ranks[number].is_in_round:
        return all(rank.rounds >= ranks[number].rounds for rank in ranks)
    message = ranks[number].awaited
    assert message is not None
    return not ranks[message.peer].travelling.lacks(number, message.is_sent, message.tag, message.ordinal)


def swapped(peer: int, tag: int) -> Step:
    return [(peer, True, tag), (peer, False, tag)]


def test_two_that_wait_for_each_other_see_it_once_both_have_told() -> None:
    first, second = ranks_of([swapped(1, 5), swapped(1, 6)], [swapped(0, 6), swapped(0, 5)])
    assert first.look() == []  # the other has told nothing yet
    assert second.look() == []  # the first has not answered
    assert first.look() == [0, 1]
    assert second.look() == [1, 0]
    assert first.circle is not None
    told = first.circle.look(Message(1, True, 5, 1))
    assert [waiting.call for _, waiting in told] == ["call of 0", "call of 1"]
    first.circle.end()
    assert second.look() == []


def test_three_in_a_circle_and_one_beside_it_see_it() -> None:
    ranks = ranks_of([[(1, False, 1)]], [[(2, False, 1)]], [[(0, False, 1)]], [[(0, False, 9)]])
    for _ in range(2):
        for rank in ranks:
            rank.look()
    assert [rank.look() for rank in ranks] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


def test_one_in_a_round_is_seen_by_those_that_have_not_come_to_it() -> None:
    ranks = ranks_of([ROUND, [(1, False, 1)]], [ROUND], [[(1, False, 1)], ROUND])
    for _ in range(2):
        for rank in ranks:
            rank.look()
    assert [rank.look() for rank in ranks] == [[], [], [2, 1]]
    # A word that is late: the round is over, and the first waits for the second behind it.
    first, second = ranks_of([ROUND, [(1, False, 1)]], [ROUND, [(0, True, 1)]])
    first.come()
    for _ in range(2):
        assert first.look() == []
        second.look()
    assert first.look() == []


@pytest.mark.parametrize("way", ["late", "sent", "another step", "behind"])
def test_who_only_waits_for_another_sees_nothing(way: str) -> None:
    mine, others = [[(1, False, 1)]], [[(0, False, 2)]]
    if way == "sent":  # and on its way
        others = [[(0, True, 1), (0, False, 2)]]
    first, second = ranks_of(mine, [] if way == "late" else others)
    second.page += way == "another step"
    if way == "sent":
        second.at = 1
    if way == "behind":  # it told so, and what it waited for has come
        first.look(), second.look()
        assert first.look() == [0, 1]
        second.program = [[(0, False, 3)]]
        second.come()
        assert first.look() == []
        first.travelling.begin(NOBODY, [Message(1, True, 3, 1)], [torch.empty(1)])
    for _ in range(3):
        assert first.look() == []
        if second.awaited is not None:
            assert second.look() == []


@pytest.mark.parametrize("seed", range(200))
def test_random_programs_see_a_circle_where_nobody_can_go_on_and_nowhere_else(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(2, 5)
    programs: list[list[Step]] = [[] for _ in range(size)]
    for tag in range(draw.randint(2, 7)):
        few = draw.sample(range(size), draw.randint(2, size))
        for rank in few:
            programs[rank].append([message for other in few if other != rank for message in swapped(other, tag)])
        if seed % 2 and draw.random() < 0.4:
            for program in programs:
                program.append(ROUND)
    if seed % 3:  # one makes its calls in another order
        draw.shuffle(programs[draw.randrange(size)])
    ranks = ranks_of(*programs)
    for _ in range(2000):
        waiting = [rank for rank in ranks if rank.awaited is not None or rank.is_in_round]
        if not waiting:
            return
        rank = draw.choice(waiting)
        comes = has_begun(ranks, rank.number)
        if comes and draw.random() < 0.5:
            rank.come()
        elif found := rank.look():
            # All of them wait for what nobody has begun, and would not begin before.
            assert not any(has_begun(ranks, number) for number in found)
            for one, other in zip(found, [*found[1:], found[0]], strict=True):
                if ranks[one].is_in_round:  # which the rank behind it has not reached
                    assert ranks[other].rounds < ranks[one].rounds
                    continue
                awaited = ranks[one].awaited
                assert awaited is not None
                assert awaited.peer == other
            return
    raise AssertionError("nobody went on, and nobody saw why")
