"""Ranks that are interrupted where they wait for others: at the begin of a step, at its end, in a generator that holds one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed import agreement, ledger, shard_sequence, shared_failures, underway
from flexdilated.distributed.answering import AnsweringStore
from flexdilated.distributed.telling import telling_call
from tests.distributed.processes import TIMEOUT, Ranks, several
from tests.tolerances import EXACT

TOKENS = 8
PATTERN, LOCAL = DilatedPattern((12, 1000), (1, 2)), DilatedPattern((4,), (1,))
SHORT = timedelta(seconds=1)
WAIT = ledger.Ledger._wait
SOON = 60.0  # seconds, far below the timeout of the group


class FaultError(Exception):
    """What fails."""


class Told:
    """What ranks of a test tell each other beside the library."""

    def __init__(self, mesh: DeviceMesh, name: str) -> None:
        self.store = dist.PrefixStore(f"told of {name}", mesh.get_group().get_group_store())

    def tell(self, word: str, answer: str = "") -> None:
        self.store.set(word, answer)

    def answers(self, *words: str) -> list[str]:
        self.wait(*words)
        return [self.store.get(word).decode() for word in words]

    def wait(self, *words: str) -> None:
        self.store.wait(list(words), TIMEOUT)


def attend(mesh: DeviceMesh, number: int) -> tuple[Tensor, Tensor]:
    """The attention of a step, and what one process gives: ranks in different steps would give other numbers."""
    x = torch.randn(1, TOKENS * mesh.size(), 2, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    mine = shard_sequence(x, mesh)
    out, expected = dilated_attention(mine, mine, mine, PATTERN, mesh=mesh), dilated_attention(x, x, x, PATTERN)
    assert isinstance(out, Tensor)
    assert isinstance(expected, Tensor)
    return out, shard_sequence(expected, mesh)


def healthy_step(mesh: DeviceMesh, number: int) -> None:
    with shared_failures(mesh):
        out, expected = attend(mesh, number)
    torch.testing.assert_close(out, expected, **EXACT)


def interrupting(where: Callable[[], bool]) -> mock._patch[object]:
    """Raise as a signal's handler does where a rank next pauses to look at the store, once something holds."""
    pause = time.sleep

    def sleep(seconds: float) -> None:
        if where():
            raise KeyboardInterrupt
        pause(seconds)

    return mock.patch.object(ledger.time, "sleep", sleep)


def at_the_end(rank: int, mesh: DeviceMesh) -> None:
    """One rank comes to the end first, is interrupted there, and has left when the others come."""
    told = Told(mesh, "the end")
    healthy_step(mesh, 0)
    for odd in range(mesh.size()):
        if rank == odd:
            with interrupting(lambda: True), pytest.raises(KeyboardInterrupt), shared_failures(mesh):
                attend(mesh, odd)
            told.tell(f"left {odd}")
        else:
            with pytest.raises(ValueError, match=f"^rank {odd} refused: KeyboardInterrupt$"), shared_failures(mesh):
                told.wait(f"left {odd}" if attend(mesh, odd) else "")
        healthy_step(mesh, odd + 1)


@several
def test_a_rank_interrupted_at_the_end_of_a_step_takes_the_step_from_all(ranks: Ranks) -> None:
    ranks.run(at_the_end, deadline=120.0)


def behind_the_end(rank: int, mesh: DeviceMesh) -> None:
    """One rank is interrupted when all have come to the end, and it has not read so: the others have their step."""
    of_mesh = agreement._ledger(mesh.get_group())
    healthy_step(mesh, 0)
    for odd in range(mesh.size()):
        if rank == odd:

            def is_over() -> bool:
                return of_mesh.ending is not None and of_mesh.store.check([f"{of_mesh.ending}/outcome"])

            def late(self: ledger.Ledger, here: str, *args: object, **kwargs: object) -> bytes:
                while here == self.ending and not is_over():
                    time.sleep(0.001)
                if here == self.ending:
                    raise KeyboardInterrupt
                return WAIT(self, here, *args, **kwargs)  # type: ignore[arg-type]

            with mock.patch.object(ledger.Ledger, "_wait", late), pytest.raises(KeyboardInterrupt), shared_failures(mesh):
                out, expected = attend(mesh, odd)
        else:
            with shared_failures(mesh):
                out, expected = attend(mesh, odd)
                time.sleep(0.1)  # so that another than the interrupted rank is the last to come
        torch.testing.assert_close(out, expected, **EXACT)
        assert not of_mesh.unsettled
        healthy_step(mesh, odd + 1)


@several
def test_a_rank_interrupted_behind_the_end_of_a_step_leaves_it_to_the_others(ranks: Ranks) -> None:
    ranks.run(behind_the_end, deadline=120.0)


def nothing() -> None:
    """What a rank does before it leaves."""


def failing_step(mesh: DeviceMesh, number: int, *, fails: bool, leave: Callable[[], None]) -> None:
    """A step in which one rank fails, and the others are in a call: their messages are on their way."""
    with shared_failures(mesh):
        try:
            if fails:
                time.sleep(0.2)
                raise FaultError
            attend(mesh, number)
        finally:
            leave()


def interrupted_begin(rank: int, mesh: DeviceMesh) -> None:
    """Behind a step that fails, one rank is interrupted as it begins the next: all lose that one, and no rank is a step behind."""
    told, size = Told(mesh, "the begin"), mesh.size()
    healthy_step(mesh, 0)
    for number, place in enumerate(("waiting", "settling") * 2):
        odd, word = number % size, f"interrupted {number}"
        is_waiting = place == "waiting"  # for the others, who hear of its error and do not leave
        failing, leaves = odd if is_waiting else (odd + 1) % size, not is_waiting or rank == odd
        with pytest.raises((FaultError, ValueError)):
            failing_step(mesh, number, fails=rank == failing, leave=partial(told.wait, *([] if leaves else [word])))
        x = torch.randn(1, TOKENS, 2, 4)
        known = partial(dilated_attention, x, x, x, LOCAL, mesh=mesh, scale=1.5 + number)
        if not is_waiting:
            known()  # its plan is new to all, and a step that cannot begin forgets it on all
        if rank == odd:
            settling = mock.patch.object(underway.Underway, "settle", side_effect=KeyboardInterrupt)
            with (
                interrupting(lambda: True) if is_waiting else settling,
                pytest.raises(KeyboardInterrupt),
                shared_failures(mesh),
            ):
                attend(mesh, number)
            told.tell(word)
        else:
            with pytest.raises(ValueError, match=f"rank {odd} refused: KeyboardInterrupt"), shared_failures(mesh):
                attend(mesh, number)
        with shared_failures(mesh):
            known()
        healthy_step(mesh, number + 1)
        assert not underway._left


@several
def test_a_rank_interrupted_as_it_begins_a_step_is_not_a_step_behind(ranks: Ranks) -> None:
    ranks.run(interrupted_begin, deadline=120.0)


def interrupted_leave(rank: int, mesh: DeviceMesh) -> None:
    """One rank is interrupted again while it says that it leaves a step: the others have its word when it begins the next."""
    healthy_step(mesh, 0)
    for odd in range(mesh.size()):
        abandon = ledger.Ledger.abandon

        def late(self: ledger.Ledger, *args: object, abandon: Callable[..., object] = abandon) -> bool:
            abandon(self, *args)
            raise KeyboardInterrupt

        for place, patch in (
            ("before", mock.patch.object(agreement, "_abandon", side_effect=KeyboardInterrupt)),
            ("behind", mock.patch.object(ledger.Ledger, "abandon", late)),
            ("at the begin", mock.patch.object(agreement, "_ledger", side_effect=KeyboardInterrupt)),
        ):
            if rank == odd:
                with patch, pytest.raises(KeyboardInterrupt):
                    failing_step(mesh, odd, fails=True, leave=nothing)
            else:
                match = (
                    "FaultError" if place == "behind" else "it was interrupted as it began or left a step, or the store was silent"
                )
                with pytest.raises(ValueError, match=f"^rank {odd} refused: {match}$"):
                    failing_step(mesh, odd, fails=False, leave=nothing)
            healthy_step(mesh, odd + 1)
            assert not underway._left


@several
def test_a_rank_interrupted_twice_tells_of_it_in_the_next_step(ranks: Ranks) -> None:
    ranks.run(interrupted_leave, deadline=120.0)


def late_by_steps(rank: int, mesh: DeviceMesh) -> None:
    """One rank is late by more than a step: the others give up that step, and the next as they begin it. The late rank too."""
    group, told, late, given_up = mesh.get_group(), Told(mesh, "late"), mesh.size() - 1, 3
    others = [f"{number} {rank}" for number in range(given_up) for rank in range(late)]
    healthy_step(mesh, 0)
    group.set_timeout(SHORT)
    with mock.patch.object(agreement, "GRACE", timedelta()):
        if rank == late:
            told.wait(*others)
        for number in range(given_up):
            match = "" if rank == late or number == 0 else f"rank {late} must leave the step of shared_failures in which another"
            with pytest.raises((TimeoutError, ValueError), match=match), shared_failures(mesh):
                attend(mesh, number)
            told.tell(f"{number} {rank}")
    group.set_timeout(TIMEOUT)
    for number in range(3):
        healthy_step(mesh, number)
    assert not underway._left


@several
@pytest.mark.slow
def test_ranks_that_give_up_several_steps_of_a_late_one_go_on_with_it_in_one_step(ranks: Ranks) -> None:
    ranks.run(late_by_steps, deadline=120.0)


class Silent:
    """A store that answers all questions but one, which it is asked at a place, and does what that says when it is woken."""

    def __init__(self, store: Any, at: int) -> None:
        self.store, self.at, self.woken = store, at, threading.Event()

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            self.at -= 1
            if self.at == 0:
                self.woken.wait(SOON)
            return getattr(self.store, name)(*args)

        return ask


def silent(rank: int, mesh: DeviceMesh, stride: int, fails: bool) -> None:
    """The store is silent for one rank, at one question of a step after another: that step is lost, and no other.

    Or lost for that rank alone, which all others know to have come to its end.

    Args:
        stride: From one question to the next that is tried.
        fails: Whether a step comes first in which this rank fails, which may be silent too.
    """
    group, told, size = mesh.get_group(), Told(mesh, f"silence {stride}"), mesh.size()
    store = agreement._ledger(group).store
    assert isinstance(store, AnsweringStore)
    at, is_reached = 0, True
    while is_reached:
        at, odd, outcome = at + stride, at // stride % size, ""
        is_own, said = False, ""
        healthy_step(mesh, at)
        group.set_timeout(SHORT)
        if rank == odd:
            was = store.store, store.timeout
            store.store, store.timeout = Silent(was[0], at), SHORT / 4  # type: ignore[assignment]
        for is_first in (True, False) if fails else (False,):
            try:
                with shared_failures(mesh):
                    attend(mesh, at)
                    if is_first and rank == odd:
                        raise FaultError
            except (FaultError, TimeoutError, ValueError) as error:
                outcome, said = f"{outcome}{is_first} ", str(error)
                is_own = rank == odd and not is_first
        assert not is_own or "the store of the ranks must answer within 0.25 s" in said
        if rank == odd:
            told.tell(f"{fails} {at} is reached", "yes" if store.store.at <= 0 else "")
            store.store.woken.set()
            store.store, store.timeout = was
        group.set_timeout(TIMEOUT)
        told.tell(f"{fails} {at} {rank}", outcome)
        answers = told.answers(*(f"{fails} {at} {each}" for each in range(size) if each != odd))
        assert len(set(answers)) == 1
        is_reached = any(told.answers(f"{fails} {at} is reached"))
    assert at > stride
    healthy_step(mesh, at)
    assert not underway._left


@several
@pytest.mark.slow
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.sweep)])
def test_a_store_that_is_silent_for_one_rank_takes_one_step(ranks: Ranks, stride: int) -> None:
    for fails in (False, True):
        ranks.run(silent, stride, fails, deadline=240.0)


def call_behind(rank: int, mesh: DeviceMesh) -> None:
    """A new plan between a step that fails and the next, which other ranks begin before one has read that all agreed."""
    told = Told(mesh, "a call behind")
    x = torch.randn(1, TOKENS, 2, 4)
    for slow in range(mesh.size()):
        with pytest.raises((FaultError, ValueError)), shared_failures(mesh):
            raise FaultError
        if rank == slow:

            def late(self: ledger.Ledger, here: str, *args: object, slow: int = slow, **kwargs: object) -> bytes:
                told.tell(f"arrived {slow}")
                told.wait(*(f"begun {slow} {other}" for other in range(mesh.size()) if other != slow))
                return WAIT(self, here, *args, **kwargs)  # type: ignore[arg-type]

            with mock.patch.object(ledger.Ledger, "_wait", late):
                dilated_attention(x, x, x, LOCAL, mesh=mesh, scale=0.1 + slow)
        else:
            told.wait(f"arrived {slow}")
            dilated_attention(x, x, x, LOCAL, mesh=mesh, scale=0.1 + slow)
        with shared_failures(mesh):
            told.tell(f"begun {slow} {rank}")
            out, expected = attend(mesh, slow)
        torch.testing.assert_close(out, expected, **EXACT)


@several
def test_what_follows_a_step_is_kept_until_all_have_read_it(ranks: Ranks) -> None:
    ranks.run(call_behind, deadline=120.0)


def generators(rank: int, mesh: DeviceMesh) -> None:
    """A generator that holds a step, closed by an error of who reads it, or by all ranks without one."""

    def steps() -> Iterator[int]:
        for number in range(3):
            with shared_failures(mesh):
                yield number

    def read(fails: bool) -> None:
        for number in steps():
            if fails and number == 1:
                raise FaultError
            attend(mesh, number)

    for odd in range(mesh.size()):
        began = time.monotonic()
        error: type[Exception] = FaultError if rank == odd else ValueError
        match = "" if rank == odd else f"^rank {odd} refused: a generator was closed inside of a step of shared_failures$"
        with pytest.raises(error, match=match):
            read(fails=rank == odd)
        assert time.monotonic() - began < SOON
        healthy_step(mesh, odd)
        for number in steps():
            attend(mesh, number)
            if number == 1:
                break
        healthy_step(mesh, odd + 1)


@several
def test_a_generator_that_is_closed_inside_of_a_step_ends_it_on_all_ranks(ranks: Ranks) -> None:
    ranks.run(generators, deadline=120.0)


def recomputed(rank: int, mesh: DeviceMesh) -> None:
    """A step inside of what is checkpointed, which ends in the backward when that has what it needs, or by an error of one rank."""
    failing = [False]

    def layer(x: Tensor) -> Tensor:
        with shared_failures(mesh):
            out = dilated_attention(x.sin(), x, x, PATTERN, mesh=mesh)
            assert isinstance(out, Tensor)
            if failing[0]:
                raise FaultError
            return out.exp()

    for odd in range(mesh.size()):
        x = torch.ones(1, TOKENS, 2, 4, dtype=torch.float64, requires_grad=True)
        failing[0] = False
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        out = checkpoint(layer, x, use_reentrant=False)
        failing[0] = rank == odd
        with pytest.raises(FaultError if rank == odd else ValueError, match="" if rank == odd else f"rank {odd} refused: "):
            out.sum().backward()
        healthy_step(mesh, odd)


@several
def test_a_recomputation_ends_a_step_as_its_forward_does(ranks: Ranks) -> None:
    ranks.run(recomputed, deadline=120.0)


def failing_ends(rank: int, mesh: DeviceMesh) -> None:
    """Steps that fail at the begin, inside and at the end leave no more keys on the store the more there are."""
    store, counts = mesh.get_group().get_group_store(), []
    for number in range(24):
        with pytest.raises((FaultError, ValueError)), shared_failures(mesh):
            raise FaultError
        if number % 3 == 0:
            interrupted = mock.patch.object(underway.Underway, "settle", side_effect=KeyboardInterrupt)
            with interrupted, pytest.raises(KeyboardInterrupt), shared_failures(mesh):
                pass
        with pytest.raises(FaultError), telling_call(mesh.get_group(), is_backward=True):
            raise FaultError  # outside of steps
        for _ in range(2):
            healthy_step(mesh, number)
        dist.barrier(mesh.get_group())
        counts.append(store.num_keys())
        dist.barrier(mesh.get_group())
    of_waits = 2 * mesh.size()  # a rank that has waited for a while has two keys of its own
    assert counts[-1] <= counts[2] + of_waits, counts


@several
def test_steps_that_fail_anywhere_leave_no_keys(ranks: Ranks) -> None:
    ranks.run(failing_ends, deadline=120.0)


def inner_steps(rank: int, mesh: DeviceMesh) -> None:
    """A step inside of another is a part of it: what is raised there and caught ends the outer one; a closed generator does not."""

    def inner() -> Iterator[None]:
        with shared_failures(mesh):
            attend(mesh, 0)
            yield

    def caught(fails: bool) -> None:
        with shared_failures(mesh):
            attend(mesh, 1)
            with suppress(FaultError), shared_failures(mesh):
                attend(mesh, 2)
                if fails:
                    raise FaultError
            attend(mesh, 3)

    for odd in range(mesh.size()):
        with shared_failures(mesh):
            if rank == odd:
                next(inner())
            else:
                attend(mesh, 0)
            out, expected = attend(mesh, odd)
        torch.testing.assert_close(out, expected, **EXACT)
        match = (
            "ranks may be at different calls over this mesh since an error" if rank == odd else f"^rank {odd} refused: FaultError$"
        )
        with pytest.raises(RuntimeError if rank == odd else ValueError, match=match):
            caught(fails=rank == odd)
        healthy_step(mesh, odd)


@several
def test_a_step_inside_of_another_is_a_part_of_it(ranks: Ranks) -> None:
    ranks.run(inner_steps, deadline=120.0)


def first_call(rank: int, mesh: DeviceMesh) -> None:
    """A group that is new, whose store one rank has asked for its place when it is interrupted."""
    for odd in range(mesh.size()):
        of_step = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("cp",))
        take = AnsweringStore.compare_set

        def interrupted(self: AnsweringStore, *args: str, take: Callable[..., bytes] = take) -> bytes:
            take(self, *args)
            raise KeyboardInterrupt

        if rank == odd:
            with mock.patch.object(AnsweringStore, "compare_set", interrupted), pytest.raises(KeyboardInterrupt):
                attend(of_step, odd)
        healthy_step(of_step, odd)


@several
def test_a_rank_interrupted_in_the_first_call_of_a_group_meets_the_others(ranks: Ranks) -> None:
    ranks.run(first_call, deadline=120.0)
