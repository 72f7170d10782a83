"""The processes of one run, as torchrun starts them: their start, what they tell each other, their end."""

from __future__ import annotations

import atexit
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from flexdilated.training.checkpoint import ensure_writable
from flexdilated.training.options import RankLostError, UserError
from flexdilated.training.waking import sign, wake_others

if TYPE_CHECKING:  # a torch that is built without torch.distributed still trains in one process
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

    from flexdilated.training.answering import AnsweringStore

LOSS = "a lost rank"  # what ranks tell of an error that was another's
TIMEOUT_SECONDS = 300  # of a rank that waits for the others
TELLING_SECONDS = 2.0  # for a lower rank to tell an error first
BEAT_SECONDS = 0.5  # between two signs of life
SIGHT_SECONDS = 5.0  # until a file of one host is seen from another
SILENCE_SECONDS = 3.0  # without one, of a rank that is called lost
PROMPT_SECONDS = 1.5  # between the ranks that meet one loss; a later one is its cause


def place_of(context_parallel: int, timeout_seconds: int | None) -> tuple[int, int]:
    """This process among those that torchrun started, and their number; `context_parallel` of 0 takes any."""
    torchrun = os.environ.keys() >= {"WORLD_SIZE", "RANK", "LOCAL_RANK"}
    started = os.environ["WORLD_SIZE"] if torchrun else None
    takes_any = context_parallel == 0
    if takes_any:
        context_parallel = int(started or 1)
    if started is None and context_parallel > 1:
        command = f"torchrun --nproc-per-node {context_parallel} -m flexdilated train --context-parallel {context_parallel}"
        raise UserError(f"--context-parallel must be 1 without torchrun, got {context_parallel}; use {command}")
    if started is not None and started != str(context_parallel):
        hint = f"give --context-parallel {started}"
        raise UserError(f"--context-parallel must equal torchrun's WORLD_SIZE={started}, got {context_parallel}; {hint}")
    if timeout_seconds is not None and context_parallel == 1 and not takes_any:
        raise UserError(f"--timeout-seconds must come with --context-parallel above 1, got {timeout_seconds}")
    return int(os.environ["RANK"]) if context_parallel > 1 else 0, context_parallel


@contextmanager
def started(
    count: int, rank: int, device: torch.device, timeout_seconds: int
) -> Iterator[tuple[DeviceMesh, AnsweringStore] | tuple[None, None]]:
    """The mesh of the processes that torchrun started, and their store; neither for one.

    An error that several of them raise goes on at the lowest rank; the others end with exit code 2 and say nothing.
    """
    if count == 1:
        yield None, None
        return
    from torch.distributed.device_mesh import DeviceMesh  # not in every build, as above

    from flexdilated.training.answering import OWN_THREAD, AnsweringStore

    answers = timedelta(seconds=min(timeout_seconds, TIMEOUT_SECONDS))
    store = AnsweringStore(_join(count, rank, device, timedelta(seconds=timeout_seconds)), answers)
    world = dist.group.WORLD
    assert world is not None
    sign(store, rank)
    left = threading.Event()
    threading.Thread(target=_beat, args=(store, rank, left), daemon=True, name=OWN_THREAD).start()
    try:
        # From the group, since init_device_mesh makes another, of another timeout, for gloo where there is a GPU.
        yield DeviceMesh.from_group(world, device.type, mesh_dim_names=("cp",)), store
    except (UserError, ValueError, TypeError) as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it as soon as another rank has ended
        if isinstance(error, RankLostError):
            error = named(store, rank, count, error)
        is_told = tells(store, rank, error)
        wake_others(store, rank, count)
        raise (error if is_told else SystemExit(2)) from None
    finally:
        left.set()
        if device.type == "cuda":
            world.shutdown()  # NCCL's peers may still read this process's memory


def _join(count: int, rank: int, device: torch.device, timeout: timedelta) -> Store:
    """Start the process group; returns the store of this start."""
    from torch.distributed.distributed_c10d import PrefixStore  # not in every build, as above

    from flexdilated.training.start import rendezvous

    try:
        store, _, _ = rendezvous(timeout)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=count,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, TimeoutError) as error:
        limit, text = f"{timeout.total_seconds():.0f}", str(error).splitlines()[0]
        raise UserError(f"all {count} ranks must start within --timeout-seconds={limit}, got: {text}") from None
    except RuntimeError as error:  # of gloo or NCCL: no such network interface, no address of this host
        text = str(error).splitlines()[0].rpartition("] ")[2]  # without the place in gloo's sources
        raise UserError(f"all {count} ranks must be able to reach each other, got: {text}") from None
    return store


def span(mesh: DeviceMesh | None, value: int) -> tuple[int, ...]:
    """The least and the largest `value` of the ranks, or the only one."""
    if mesh is None:
        return (value,)
    ends = torch.tensor([-value, value], device=mesh.device_type)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=mesh.get_group())
    least, largest = -int(ends[0]), int(ends[1])
    return (least,) if least == largest else (least, largest)


def ensure_alike(mesh: DeviceMesh | None, held: Mapping[str, object]) -> None:
    """Return when every rank holds the same, in JSON types, in the same version of this library.

    Raises:
        UserError: If they differ: in what, and which rank holds which, the same error on every rank.
    """
    if mesh is None:
        return
    from flexdilated.distributed.consistency import Fields, compare  # not in every build, as above

    fields = Fields(held)
    # Waits for all ranks, also where they have compared this before.
    if len(span(mesh, int.from_bytes(fields.digest[:7], "big"))) == 1:
        return
    try:
        compare(mesh.get_group(), torch.device(mesh.device_type), fields)
    except ValueError as error:
        raise UserError(str(error)) from None


def mean(mesh: DeviceMesh | None, value: float) -> float:
    """Of the ranks' values: the same number on each."""
    if mesh is None:
        return value
    total = torch.tensor([value], dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(total, group=mesh.get_group())
    return total.item() / mesh.size()


def wait_for_all(mesh: DeviceMesh | None, held: Mapping[str, object] | None = None) -> None:
    """Return when every rank has come here, holding the same.

    Raises:
        UserError: If they differ, as `ensure_alike`.
        RankLostError: If another rank ends.
    """
    with losses_of_ranks(mesh, lambda cause: RankLostError(f"before the others began: {cause}")):
        ensure_alike(mesh, held or {})


def ensure_one_folder(mesh: DeviceMesh | None, folder: Path) -> None:
    """Return when every rank sees what rank 0 writes in a folder, which it makes if it is missing.

    Hosts that have a folder of their own each would agree that it is empty, and after a restart without rank 0's host, too.

    Raises:
        UserError: If a rank sees another folder, or rank 0 cannot write.
        RankLostError: If another rank ends.
    """
    if mesh is None:
        return
    is_first = mesh.get_local_rank() == 0
    with losses_of_ranks(mesh, lambda cause: RankLostError(f"before the others began: {cause}")):
        # No rank can have seen this name before, nor taken from its host's memory that there is no such file.
        mark = folder / f".seen-by-all-{span(mesh, secrets.randbits(48) if is_first else 0)[-1]:012x}"
    if is_first:
        ensure_writable(folder)
        mark.touch()
    try:
        wait_for_all(mesh)
        end = time.monotonic() + SIGHT_SECONDS
        while not (sees := mark.exists()) and time.monotonic() < end:
            time.sleep(BEAT_SECONDS / 5)
        wait_for_all(mesh, {"--output, which must be one folder": "that of rank 0" if sees else "another folder of this name"})
    finally:
        if is_first:
            mark.unlink(missing_ok=True)


@contextmanager
def losses_of_ranks(mesh: DeviceMesh | None, lost: Callable[[str], RankLostError]) -> Iterator[None]:
    """Raise what `lost` makes of the cause where a collective fails: by the end or the silence of another rank."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        # gloo raises plain RuntimeErrors, which name a file of its sources.
        told = "gloo" in str(error) or isinstance(error, TimeoutError)
        if mesh is None or not (told or isinstance(error, dist.DistError)):
            raise
        raise lost(_cause_of(error)) from None


def _cause_of(error: BaseException) -> str:
    """What a collective says of its failure, without the place in its sources and without advice."""
    return re.sub(r"\[/[^]]*:\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]


def _beat(store: AnsweringStore, rank: int, left: threading.Event) -> None:
    """Give signs of life until the run is left, or the store is gone, which may go with its rank."""
    with suppress(RuntimeError, TimeoutError):
        store.add(f"beats of rank {rank}", 1)
        while not left.wait(BEAT_SECONDS):
            store.add(f"beats of rank {rank}", 1)


def named(store: AnsweringStore, rank: int, count: int, error: RankLostError) -> RankLostError:
    """The error with the ranks that have not met it soon: those that show no sign of life or have failed, else the late ones."""
    absent = [other for other in range(count) if other != rank]
    begin = time.monotonic()
    try:
        store.set(f"rank {rank} has met a loss", "")
        before = {other: store.add(f"beats of rank {other}", 0) for other in absent}
        while absent and (now := time.monotonic()) < begin + SILENCE_SECONDS:
            if now < begin + PROMPT_SECONDS:
                absent = [other for other in absent if not has_met_a_loss(store, other)]
            time.sleep(BEAT_SECONDS / 5)
        alive = [other for other in absent if store.add(f"beats of rank {other}", 0) > before[other]]
        errors = {other: store.get(key).decode() for other in absent if store.check([key := f"error of rank {other}"])}
        lost = [other for other in absent if other not in alive or other in errors]
        for other in lost or absent:
            store.set(f"rank {other} is given up", "")
    except (RuntimeError, TimeoutError):  # the store went with its rank
        return error
    if not absent:
        return error
    who = f"rank{'s' if len(lost or absent) > 1 else ''} {', '.join(map(str, lost or absent))}"
    reason = next((f" by its error ({each})" for each in errors.values() if each != LOSS), "")
    return RankLostError(error.told, who, f"lost{reason}" if lost else "late")


def has_met_a_loss(store: AnsweringStore, rank: int) -> bool:
    """Whether a rank has given another up, and ends."""
    return store.check([f"rank {rank} has met a loss"])


def tells(store: AnsweringStore, rank: int, error: Exception) -> bool:
    """Whether this rank prints an error: one of those that have it and live does, the lowest unless it comes late.

    A rank that others have given up, and that wakes to meet a loss itself, is no witness of it.
    """
    topic = LOSS if isinstance(error, RankLostError) else str(error)
    end = time.monotonic() + TELLING_SECONDS
    try:
        if isinstance(error, RankLostError) and store.check([f"rank {rank} is given up"]):
            return False
        store.set(f"error of rank {rank}", topic)
        while rank and time.monotonic() < end:
            for lower in range(rank):
                key = f"error of rank {lower}"
                if store.check([key]) and store.get(key).decode() == topic:
                    return False
            time.sleep(0.05)
        return store.add(f"told: {topic}", 1) == 1
    except (RuntimeError, TimeoutError):  # the store went with its rank
        return True


def is_rank() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized()


def leave(code: int) -> NoReturn:
    """End the process of a rank with its group alive, which nothing may destroy.

    A thread of gloo needs the GIL to drop the tensors of its last message, some time after that message is complete. The group's
    destructor joins that thread, and holds the GIL where the last to let go of the group is DDP's reducer or another object of C++:
    a deadlock. A thread that asks for the GIL while the interpreter ends is ended inside a destructor, which aborts the process.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
