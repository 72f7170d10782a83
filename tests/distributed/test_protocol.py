"""Steps of ranks with faults wherever the store is asked, and at every line: all leave each step alike, and go on together."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from flexdilated.distributed import agreement, underway
from flexdilated.distributed.telling import RECOMPUTED, reason_of, telling_call
from flexdilated.distributed.underway import Message
from flexdilated.distributed.waits import Wait
from tests.distributed.protocol import World

HOURS = 3000.0  # seconds of the stand-in clock
PLANS = 3
HEALTHY = 16  # steps at the end, without faults: a rank that was late by a minute is waited for in some of them
KEPT = 60  # keys that a group may hold: waits, and what was said in the last steps, of at most four ranks
ENDS = (ArithmeticError, ValueError, TimeoutError, RuntimeError, KeyboardInterrupt)
Links = list[tuple[int, int]]
SEEDS = [*range(40), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(40, 1040))]


@dataclass(frozen=True)
class Fault:
    """What a rank does in a step, before the call of a number, or in it."""

    at: int
    how: str  # "outside" of calls; "inside" of one before it agrees, "between" that and its messages, "behind" them; or a mistake


class FaultError(ArithmeticError):
    """What fails."""


class Program:
    """Steps of calls, each of a plan, whose messages a plan tells."""

    def __init__(self, seed: int, kinds: tuple[str, ...], most: int) -> None:
        draw = random.Random(seed)
        size = draw.choice([2, 2, 3, 3, 4])
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        self.links = [[pair for pair in pairs if draw.random() < 0.4] if draw.random() < 0.7 else [] for _ in range(PLANS)]
        self.steps = [[draw.randrange(PLANS) for _ in range(draw.choice([1, 2, 3]))] for _ in range(draw.choice([3, 4, 5]))]
        self.num_faulty = len(self.steps)
        self.steps += [[0, 1]] * (HEALTHY + 2)
        self.world = world = World(size, seed, is_alone=draw.random() < 0.7)
        self.faults: dict[tuple[int, int], Fault] = {}
        for _ in range(draw.randrange(1, most + 1)):
            kind, rank, step = draw.choice(kinds), draw.randrange(size), draw.randrange(self.num_faulty)
            if kind == "raise":
                how = draw.choice(["outside", "inside", "between", "behind"])
                self.faults[rank, step] = Fault(draw.randrange(len(self.steps[step]) + 1), how)
            elif kind == "mistake":
                self.faults[rank, step] = Fault(draw.randrange(len(self.steps[step])), draw.choice(["skips", "turns"]))
            elif kind == "line":
                world.lines[rank].add(draw.randrange(1, 2000 * self.num_faulty))
            else:
                world.faults[rank][draw.randrange(1, 60 * self.num_faulty)] = kind
        self.at = [0] * size  # the step of each rank
        world.is_quiet = lambda rank: self.at[rank] >= self.num_faulty + 2
        self.outcomes: dict[tuple[int, int], tuple[str, bool]] = {}  # of a step on a rank; whether the rank met a fault there
        self.mixed: list[str] = []

    def run(self) -> None:
        self.world.run(self.of_rank, HOURS)

    def of_rank(self, rank: int) -> None:
        group: Any = self.world.groups[rank]
        for step in range(len(self.steps)):
            self.at[rank] = step
            while agreement._begins.get(group, 0) == step:  # an interrupt before it is one before the step: it begins again
                self.go_through(rank, step)

    def go_through(self, rank: int, step: int) -> None:
        group: Any = self.world.groups[rank]
        before, outcome = len(self.world.met[rank]), ""
        fault = self.faults.get((rank, step), Fault(-1, ""))
        calls = list(enumerate(self.steps[step]))
        if fault.how == "skips":
            del calls[fault.at]
        elif fault.how == "turns":
            calls.reverse()
        try:
            with agreement.step(group, reason_of, RECOMPUTED):
                for number, plan in calls:
                    here = fault.how if number == fault.at else ""
                    if here == "outside":
                        raise FaultError
                    self.call(rank, step, number, plan, here)
                if fault.how == "outside":
                    raise FaultError
        except ENDS as error:
            outcome = f"{type(error).__name__}: {error}"
        self.outcomes[step, rank] = outcome, len(self.world.met[rank]) > before

    def call(self, rank: int, step: int, number: int, plan: int, how: str) -> None:
        """As the attention's: agree, count, send and receive."""
        group: Any = self.world.groups[rank]
        with telling_call(group):
            if how == "inside":
                raise FaultError
            with agreement.in_turn(group):
                described, links = {"plan": plan}, self.links[plan]
                wait = Wait(group, f"the first call of plan {plan}")
                wait.agree(described)
                of_call = wait.number() if links else 0
                if how == "between":
                    raise FaultError
                tag = PLANS * of_call + plan
                sends = [Message(b, True, tag, 1) for a, b in links if a == rank]
                messages = sends + [Message(a, False, tag, 1) for a, b in links if b == rank]
                if messages:
                    contents: Any = [(step, number, plan) if message.is_sent else [] for message in messages]
                    travelling = underway.underway(group)
                    swap = travelling.begin(group, messages, contents)
                    Wait(group, f"call {of_call}", of_call, described).for_swap(swap, [[message.peer] for message in messages])
                    travelling.end(swap)
                    self.check(rank, contents[len(sends) :], step, number, plan)
                if how == "behind":
                    raise FaultError

    def check(self, rank: int, received: list[list[Any]], step: int, number: int, plan: int) -> None:
        # Who skips a call, or turns two around, may be paired with another call of the same plan.
        is_mistaken = any(at == step and fault.how in ("skips", "turns") for (_, at), fault in self.faults.items())
        for (found,) in received:
            if found != (step, found[1] if is_mistaken else number, plan):
                self.mixed.append(f"rank {rank} got {found} in call {number} of step {step}, of plan {plan}")


def check(program: Program) -> None:
    """All that holds of every run."""
    world = program.world
    faults = f"{world.met}, {program.faults}"
    assert not world.errors, f"{world.errors}, {faults}"
    assert not world.is_stuck, faults
    assert not program.mixed, f"{program.mixed[:3]}, {faults}"
    for step in range(len(program.steps)):
        outcomes = [program.outcomes[step, rank] for rank in range(world.size)]
        story = f"{outcomes} in step {step}, {faults}"
        if any(outcome == "" for outcome, _ in outcomes):  # whoever met a fault at the end is behind the step, and alone with it
            assert all(outcome == "" or has_met for outcome, has_met in outcomes), story
        if step >= len(program.steps) - 2 or not any(map(any, (world.met, program.faults))):
            assert all(outcome == "" for outcome, _ in outcomes), story
    assert len(world.data) <= KEPT, f"{sorted(world.data)}, {faults}"
    assert not world.left, faults


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_at_the_store(seed: int) -> None:
    program = Program(seed, ("before", "behind", "silent", "nap", "late", "raise", "mistake"), most=4)
    program.run()
    check(program)


@pytest.mark.parametrize("seed", SEEDS)
def test_interrupts_at_any_line(seed: int) -> None:
    program = Program(seed, ("line", "line", "raise", "silent"), most=3)
    program.run()
    check(program)
