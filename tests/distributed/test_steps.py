"""Steps in which one rank fails while others wait for its rows: all hear of it, all go on. None waits for a timeout of minutes."""

import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM, dilated_attention
from flexdilated.distributed import exchange, shard_sequence, shared_failures, underway, unshard_sequence, waits
from flexdilated.distributed.ledger import LAST_PAUSE
from tests.distributed.processes import TIMEOUT, Ranks, exactly, several
from tests.tolerances import EXACT

TOKENS, LAYERS = 16, 3
PATTERN = DilatedPattern((24, 1000), (1, 2))  # all ranks have rows of others
PLACES = ("before", "between", "late", "inside", "interrupt", "gradient", "inside the backward", "caught", "behind")
FAILING = 1  # the layer
FILE = b"caf\xe9"  # a name that is no UTF-8, as file systems allow


class FaultError(Exception):
    """What fails."""


def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + 0.01 * (q - k)


def fault(error: type[BaseException], *_: object, **__: object) -> None:
    raise error(f"no row of {os.fsdecode(FILE)} is left")


def failing_inside(error: type[BaseException]) -> AbstractContextManager[object]:
    """Where rows have left, and those of others are on their way."""
    return mock.patch.object(exchange._InStep, "wait", partial(fault, error))


def step(mesh: DeviceMesh, exchanges: tuple[str, ...], number: int, place: str) -> tuple[list[Tensor], Tensor]:
    """A step of some layers, which fails at a place: the whole inputs, and the output of this rank."""
    size = mesh.size()
    generator = torch.Generator().manual_seed(number % 3)
    given = [torch.randn(1, TOKENS * size, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    q, k, v = (x.clone().requires_grad_() for x in shard_sequence(tuple(given), mesh))
    out = q
    for layer, how in enumerate(exchanges):
        fails = place if layer == FAILING else ""
        if fails == "late":  # the others have waited for a while
            time.sleep(3 * LAST_PAUSE)
        if fails in ("between", "late") or (place == "before" and not layer):
            fault(FaultError)
        if fails == "caught":
            with pytest.raises(ValueError, match="v must have"):
                dilated_attention(out, k, v[:, :, :1], PATTERN, mesh=mesh)
        error = KeyboardInterrupt if fails == "interrupt" else FaultError
        with failing_inside(error) if fails in ("inside", "interrupt") else nullcontext():
            if how == "autograd":
                out = dilated_attention(out, k, v, PATTERN, mesh=mesh, score_mod=bias)
            else:
                out = dilated_attention(out, k, v, PATTERN, mesh=mesh, exchange=how)
    if place == "gradient":
        out.register_hook(lambda grad: fault(FaultError))
    with failing_inside(FaultError) if place == "inside the backward" else nullcontext():
        out.square().sum().backward()
    if place == "behind":
        fault(FaultError)
    return [*given, q.grad, k.grad, v.grad], out  # type: ignore[list-item]


def assert_right(mesh: DeviceMesh, exchanges: tuple[str, ...], given: list[Tensor], out: Tensor) -> None:
    whole = [x.clone().requires_grad_() for x in given[:3]]
    expected, k, v = whole
    for how in exchanges:
        expected = dilated_attention(expected, k, v, PATTERN, score_mod=bias if how == "autograd" else None)
    expected.square().sum().backward()
    for actual, each in zip((out, *given[3:]), (expected, *(x.grad for x in whole)), strict=True):
        assert each is not None
        here: Tensor = shard_sequence(each, mesh)
        torch.testing.assert_close(actual, here, **EXACT)


def failing_steps(rank: int, mesh: DeviceMesh, exchanges: tuple[str, ...]) -> None:
    """Each place on each rank in turn, under plans that all know, and a step behind it that gives what one process gives."""
    group, size, before = mesh.get_group(), mesh.size(), threading.active_count()
    for number in range(2):
        assert_right(mesh, exchanges, *step(mesh, exchanges, number, ""))
    for number, place in enumerate(PLACES):
        failing = number % size
        fails = place if failing == rank else ""
        with pytest.raises(BaseException) as caught, shared_failures(mesh):  # noqa: PT011 - looked at below
            step(mesh, exchanges, number, fails)
        if not fails:
            told = "v must have" if place == "caught" else "KeyboardInterrupt" if place == "interrupt" else "FaultError"
            assert isinstance(caught.value, ValueError), caught.value
            assert f"rank {failing} " in str(caught.value), caught.value
            assert told in str(caught.value)
        elif place != "caught":
            assert isinstance(caught.value, (FaultError, KeyboardInterrupt)), caught.value
        with shared_failures(mesh):
            given, out = step(mesh, exchanges, number, "")
        assert_right(mesh, exchanges, given, out)
        assert not underway.underway(group).open
    assert not underway._left
    assert threading.active_count() == before


@several
@pytest.mark.parametrize(
    "exchanges",
    [("gather",) * LAYERS, ("heads",) * LAYERS, ("ring",) * LAYERS, ("autograd",) * LAYERS, ("ring", "heads", "gather")],
    ids=["gather", "heads", "ring", "autograd", "mixed"],
)
def test_all_ranks_go_on_behind_a_step_in_which_one_fails(ranks: Ranks, exchanges: tuple[str, ...]) -> None:
    ranks.run(failing_steps, exchanges, deadline=240.0)


def failing_steps_of_two_axes(rank: int, world: DeviceMesh) -> None:
    """The same where two pairs of ranks share a sequence each, and all four a step: by two steps that begin and end together."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    mesh, exchanges = pairs["cp"], ("gather", "ring", "autograd")
    mesh.get_group().set_timeout(TIMEOUT)
    for number in range(2):
        assert_right(mesh, exchanges, *step(mesh, exchanges, number, ""))
    for number, place in enumerate(PLACES):
        failing = number % world.size()
        fails = place if failing == rank else ""
        with pytest.raises(BaseException) as caught, shared_failures(world), shared_failures(mesh):  # noqa: PT011 - as there
            step(mesh, exchanges, number, fails)
        if not fails:
            assert isinstance(caught.value, ValueError), caught.value
            assert re.match(f"rank {failing} refused", str(caught.value)), caught.value
        with shared_failures(world), shared_failures(mesh):
            given, out = step(mesh, exchanges, number, "")
        assert_right(mesh, exchanges, given, out)
    for axis in (world, mesh):
        assert not underway.underway(axis.get_group()).open
    assert not underway._left


@exactly(4)
def test_all_ranks_of_two_axes_go_on_behind_a_step_in_which_one_fails(ranks: Ranks) -> None:
    ranks.run(failing_steps_of_two_axes, deadline=240.0)


def leaving_out_steps_of_copies(rank: int, world: DeviceMesh, wrapper: str) -> None:
    """Copies of a model, over pairs of ranks, whose gradients of two batches a library adds up.

    A step that fails before or behind all of its forwards leaves nothing behind: one process trains the same on the other steps.
    """
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    config = LongNetConfig(vocab_size=7, embed_dim=16, num_layers=2, num_heads=2, pattern=DilatedPattern((4, 16), (1, 2)))
    whole, model = (LongNetLM(config, mesh=mesh).double() for mesh in (None, axes["cp"]))
    model.load_state_dict(whole.state_dict())
    wrapped = fully_shard(model, mesh=world) if wrapper == "fsdp" else DistributedDataParallel(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, whole)]

    def batches(number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        return [torch.randint(7, (2, 9), generator=generator) for _ in range(2)]

    def loss_of(run: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(run(x).flatten(0, 1), y.flatten()) / 2

    for number, place in enumerate(("", "read", "", "behind", "")):
        failing = number % world.size()
        try:
            with shared_failures(world):
                read = batches(number)
                if place == "read" and rank == failing:
                    fault(FaultError)
            with shared_failures(world), shared_failures(axes["cp"]):
                for i, batch in enumerate(read):
                    if wrapper == "fsdp":
                        model.set_requires_gradient_sync(i == 1)  # type: ignore[operator]
                    with wrapped.no_sync() if wrapper == "ddp" and i == 0 else nullcontext():  # type: ignore[operator]
                        mine = batch[axes.get_local_rank("dp")][None]
                        loss_of(wrapped, *shard_sequence((mine[:, :-1], mine[:, 1:]), axes["cp"])).backward()
            with shared_failures(world):
                if place == "behind" and rank == failing:
                    fault(FaultError)
        except (FaultError, ValueError) as error:
            caught = str(error)
            optimizers[0].zero_grad()
        else:
            caught = ""
        assert ("no row of" in caught) == bool(place), caught
        if place:
            continue
        for batch in batches(number):
            loss_of(whole, batch[:, :-1], batch[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for actual, expected in zip(model.parameters(), whole.parameters(), strict=True):
            found = actual.full_tensor() if isinstance(actual, DTensor) else actual
            torch.testing.assert_close(found, expected, **EXACT)


@exactly(4)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_steps_of_copies_are_left_out_before_and_behind_their_forwards(ranks: Ranks, wrapper: str) -> None:
    ranks.run(leaving_out_steps_of_copies, wrapper, deadline=240.0)


def losing_a_rank_of_two_axes(rank: int, world: DeviceMesh) -> None:
    """A rank ends while its pair waits for its rows: the other pair hears that a rank is lost, and of no error to go on from."""
    mesh, exchanges = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"], ("gather",) * LAYERS
    step(mesh, exchanges, 0, "")
    with pytest.raises((TimeoutError, RuntimeError)) as caught, shared_failures(world), shared_failures(mesh):  # noqa: PT012
        if rank == 3:
            os._exit(0)
        step(mesh, exchanges, 1, "")
    if rank < 2:
        assert isinstance(caught.value, TimeoutError), caught.value
        assert re.match("rank 2 refused: it waited in vain: rank 3 must exchange rows with this rank", str(caught.value))


@exactly(4)
def test_a_rank_that_is_lost_over_one_axis_is_lost_for_all(ranks: Ranks) -> None:
    ranks.run(losing_a_rank_of_two_axes, deadline=120.0, ending=[3])


ASTRAY = {
    "fewer": "in the end of shared_failures, behind 1 call",
    "another plan": "in a call whose plan is new to it, behind 1 call; these differ in scale, got ",
    "a collective": "in a collective, behind 1 call",
}


def astray(mesh: DeviceMesh, exchange: str, way: str) -> None:
    """A step of two calls, or of which one rank makes another."""
    size = mesh.size()
    q, k, v = (torch.zeros(1, TOKENS, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    call = partial(dilated_attention, pattern=PATTERN, mesh=mesh, exchange=exchange)
    out = call(q, k, v)
    if way == "another plan":
        call(out, k, v, scale=0.3 + size)
    elif way == "a collective":
        unshard_sequence(out.detach(), mesh)
    elif way != "fewer":
        call(out, k, v).sum().backward()


def astray_steps(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    exchanges = (exchange,) * LAYERS
    assert_right(mesh, exchanges, *step(mesh, exchanges, 0, ""))
    for number, (way, word) in enumerate(ASTRAY.items()):
        odd = number % mesh.size()
        with shared_failures(mesh):
            astray(mesh, exchange, "")
        with pytest.raises(ValueError, match="ranks must make the same calls in the same order") as caught, shared_failures(mesh):
            astray(mesh, exchange, way if rank == odd else "")
        assert f"rank {odd} {word}" in str(caught.value), caught.value
        assert " in call 2 with DilatedPattern(" in str(caught.value)
        with shared_failures(mesh):
            given, out = step(mesh, exchanges, number, "")
        assert_right(mesh, exchanges, given, out)


@several
@pytest.mark.parametrize("exchange", ["gather", "heads", "ring"])
def test_ranks_that_make_other_calls_of_a_step_hear_it_at_once(ranks: Ranks, exchange: str) -> None:
    ranks.run(astray_steps, exchange, deadline=240.0)


CIRCLES = ("calls", "backwards", "a call and a backward")


def around(rank: int, mesh: DeviceMesh, exchange: str, way: str) -> None:
    """A step whose calls one rank, the last, makes in another order; all know their plans."""
    q, k, v = (torch.zeros(1, TOKENS, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    calls = [partial(dilated_attention, q, k, v, PATTERN, mesh=mesh, exchange=exchange, scale=scale) for scale in (0.5, 0.25)]
    order = [1, 0] if way and rank == mesh.size() - 1 else [0, 1]
    if way == "calls":
        for i in order:
            calls[i]()
    elif way == "backwards":
        outs = [call() for call in calls]
        for i in order:
            outs[i].sum().backward()
    else:
        out = calls[0]()
        parts = [out.sum().backward, calls[1]]
        for i in order:
            parts[i]()


def steps_around(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    exchanges = (exchange,) * LAYERS
    assert_right(mesh, exchanges, *step(mesh, exchanges, 0, ""))
    for number, way in enumerate(CIRCLES):
        with shared_failures(mesh):
            around(rank, mesh, exchange, "")
        match = "ranks must make the same calls in the same order, got ranks that wait for each other: rank "
        with pytest.raises(ValueError, match=match) as caught, shared_failures(mesh):
            around(rank, mesh, exchange, way)
        message, other = str(caught.value), mesh.size() - 1
        assert re.search(rf"rank \d for rank {other} in (the backward of )?call \d with ", message), message
        assert re.search(rf"rank {other} for rank \d in (the backward of )?call \d with ", message), message
        assert ("the backward of call" in message) == (way != "calls"), message
        if way == "calls" and message.count(" for rank ") == 2:
            assert "these differ in scale, got 0." in message
        with shared_failures(mesh):
            given, out = step(mesh, exchanges, number, "")
        assert_right(mesh, exchanges, given, out)
        assert not underway._left


@several
@pytest.mark.parametrize("exchange", ["gather", "heads", "ring"])
def test_ranks_of_a_step_that_wait_for_each_other_hear_it_at_once(ranks: Ranks, exchange: str) -> None:
    ranks.run(steps_around, exchange, deadline=240.0)


def backwards_of_earlier_steps(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    """Forwards of two steps, and their backwards in a third, which one rank makes in another order."""
    q = torch.zeros(1, TOKENS, 2, 4, dtype=torch.float64, requires_grad=True)
    for order in ([0, 1], [1, 0]):
        outs = []
        for scale in (0.5, 0.25):
            with shared_failures(mesh):
                outs.append(dilated_attention(q, q, q, PATTERN, mesh=mesh, exchange=exchange, scale=scale).sum())
        mine = order if rank == 0 else [0, 1]
        match = "ranks must make the same calls in the same order, got ranks that wait for each other: rank "
        with nullcontext() if order == [0, 1] else pytest.raises(ValueError, match=match), shared_failures(mesh):
            for i in mine:
                outs[i].backward()
    with shared_failures(mesh):
        given, out = step(mesh, (exchange,) * LAYERS, 0, "")
    assert_right(mesh, (exchange,) * LAYERS, given, out)


@several
@pytest.mark.parametrize("exchange", ["gather", "heads", "ring"])
def test_ranks_that_wait_for_each_other_in_backwards_of_earlier_steps_hear_it(ranks: Ranks, exchange: str) -> None:
    ranks.run(backwards_of_earlier_steps, exchange, deadline=240.0)


OMITTED = {
    "the end": "in the end of shared_failures",
    "the end of another step": "in the end of shared_failures",
    "a new plan": "in a call whose plan is new to it",
    "a collective": "in a collective",
}


def left_out(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    """A backward that one rank leaves out, and goes on to what all ranks must come to."""
    exchanges = (exchange,) * LAYERS
    assert_right(mesh, exchanges, *step(mesh, exchanges, 0, ""))
    q = torch.zeros(1, TOKENS, 2, 4, dtype=torch.float64, requires_grad=True)
    call = partial(dilated_attention, q, q, q, PATTERN, mesh=mesh, exchange=exchange)
    for number, (way, word) in enumerate(OMITTED.items()):
        odd = number % mesh.size()
        began = time.monotonic()
        match = f"^(rank . gave up: )?ranks must make the same calls .* rank {odd} for all {word}"
        with pytest.raises(ValueError, match=match):
            backward_left_out(mesh, call, way, leaves_out=rank == odd)
        assert time.monotonic() - began < TIMEOUT.total_seconds() / 4
        with shared_failures(mesh):
            given, out = step(mesh, exchanges, number, "")
        assert_right(mesh, exchanges, given, out)


def backward_left_out(mesh: DeviceMesh, call: Callable[..., Tensor], way: str, *, leaves_out: bool) -> None:
    with shared_failures(mesh):
        out = call()
        if way == "the end of another step":
            pass
        elif not leaves_out:
            out.sum().backward()
        elif way == "a new plan":
            call(scale=3.0)
        elif way == "a collective":
            unshard_sequence(out.detach(), mesh)
    if way == "the end of another step":
        with shared_failures(mesh):
            if not leaves_out:
                out.sum().backward()


@several
@pytest.mark.parametrize("exchange", ["gather", "heads", "ring"])
def test_a_backward_that_one_rank_leaves_out_is_heard_at_once(ranks: Ranks, exchange: str) -> None:
    ranks.run(left_out, exchange, deadline=240.0)


def paused(rank: int, mesh: DeviceMesh) -> None:
    """One rank's process is stopped while it waits for rows, until its time is over; they have come meanwhile."""
    exchanges, has_come = ("gather",), underway.Swap.has_come
    assert_right(mesh, exchanges, *step(mesh, exchanges, 0, ""))
    for odd in range(mesh.size()):
        is_running = [rank != odd]

        def stopped(self: underway.Swap, seconds: float, is_running: list[bool] = is_running) -> bool:
            if is_running[0] or not self.works:
                return has_come(self, TIMEOUT.total_seconds())
            is_running[0] = True
            return False

        clock = SimpleNamespace(monotonic=lambda is_running=is_running: 1e6 * is_running[0])
        with mock.patch.object(underway.Swap, "has_come", stopped), mock.patch.object(waits, "time", clock), shared_failures(mesh):
            given, out = step(mesh, exchanges, 0, "")
        assert_right(mesh, exchanges, given, out)


@several
def test_a_rank_that_was_stopped_while_its_rows_came_goes_on(ranks: Ranks) -> None:
    ranks.run(paused, deadline=240.0)


def backwards_of_threads(rank: int, mesh: DeviceMesh) -> None:
    """Two backwards of a step, each in a thread of its own, which one rank begins in another order: each gets its rows."""
    q = torch.ones(1, TOKENS, 2, 4, dtype=torch.float64, requires_grad=True)
    for order in ((0, 1), (1, 0)):
        with shared_failures(mesh):
            outs = [dilated_attention(q, q, q, PATTERN, mesh=mesh, exchange="heads", scale=scale) for scale in (0.5, 0.25)]
            threads = [threading.Thread(target=out.sum().backward) for out in outs]
            for i in order if rank == 0 else (0, 1):
                threads[i].start()
                time.sleep(8 * LAST_PAUSE)  # so that each waits for a while, alone or beside the other
            for thread in threads:
                thread.join()


def backward_beside_the_step(rank: int, mesh: DeviceMesh) -> None:
    """Two backwards of a step of their own, one in another thread: which of them comes first is not the same on all ranks."""
    q = torch.ones(1, TOKENS, 2, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        with shared_failures(mesh):
            outs = [dilated_attention(q, q, q, PATTERN, mesh=mesh, exchange="heads", scale=scale) for scale in (0.5, 0.25)]
        with shared_failures(mesh):
            thread = threading.Thread(target=outs[0].sum().backward)
            if rank:
                thread.start()
                time.sleep(8 * LAST_PAUSE)
                outs[1].sum().backward()
            else:
                timer = threading.Timer(8 * LAST_PAUSE, thread.start)
                timer.start()
                outs[1].sum().backward()
                timer.join()
            thread.join()


def backwards_from_a_queue(rank: int, mesh: DeviceMesh) -> None:
    """Two backwards that a worker and the thread of the step take from a queue, not the same one on all ranks."""
    q = torch.ones(1, TOKENS, 2, 4, dtype=torch.float64, requires_grad=True)
    with shared_failures(mesh):
        outs = [dilated_attention(q, q, q, PATTERN, mesh=mesh, exchange="heads", scale=scale) for scale in (0.5, 0.25)]
    of_worker = 1 - rank

    def work() -> None:
        time.sleep(8 * LAST_PAUSE)
        outs[of_worker].sum().backward()

    with shared_failures(mesh):
        worker = threading.Thread(target=work)
        worker.start()
        outs[1 - of_worker].sum().backward()
        worker.join()
    assert not underway.underway(mesh.get_group()).open


@exactly(2)
@pytest.mark.parametrize("program", [backwards_of_threads, backward_beside_the_step, backwards_from_a_queue])
def test_threads_of_one_rank_are_not_taken_for_a_circle(ranks: Ranks, program: Callable[..., None]) -> None:
    ranks.run(program, deadline=240.0)


SHORT = timedelta(seconds=2)  # of the group in a step to which a rank comes late


def come_late(told: dist.Store, others: list[int], mesh: DeviceMesh, exchanges: tuple[str, ...]) -> None:
    """A step behind the end of that of other ranks."""
    told.wait([str(other) for other in others], TIMEOUT)
    try:
        step(mesh, exchanges, 1, "")
    finally:
        told.set(str(mesh.get_local_rank()), "")


def late_step(rank: int, mesh: DeviceMesh) -> None:
    """Ranks that wait for longer than the group's timeout give up, and the late one hears it; connections stay open."""
    group, exchanges, late = mesh.get_group(), ("gather",) * LAYERS, 1
    told = dist.PrefixStore("told of a late step", group.get_group_store())
    assert_right(mesh, exchanges, *step(mesh, exchanges, 0, ""))
    group.set_timeout(SHORT)
    began = time.monotonic()
    with pytest.raises(TimeoutError) as caught, shared_failures(mesh):  # on all: a rank was lost
        come_late(told, [] if rank != late else [other for other in range(mesh.size()) if other != late], mesh, exchanges)
    message = str(caught.value)
    if rank != late and "gave up" not in message:
        assert message.startswith("rank "), message
        assert f"timed out after {SHORT.total_seconds():g} s" in message, message
        assert "make a new process group" not in message
        assert time.monotonic() - began >= SHORT.total_seconds()
    else:  # of one whose time was over sooner
        assert "gave up: it waited in vain in call" in message, message
    group.set_timeout(TIMEOUT)
    with shared_failures(mesh):
        given, out = step(mesh, exchanges, 2, "")
    assert_right(mesh, exchanges, given, out)
    assert not underway._left


@several
@pytest.mark.slow
def test_a_rank_that_comes_too_late_to_a_step_loses_it_and_no_more(ranks: Ranks) -> None:
    ranks.run(late_step, deadline=240.0)
