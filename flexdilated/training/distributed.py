"""The processes of one run: torchrun starts and ends them, and the process group has a timeout."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from flexdilated._version import __version__
from flexdilated.training.options import UserError

if TYPE_CHECKING:  # a torch that is built without torch.distributed still trains in one process
    from torch.distributed.device_mesh import DeviceMesh

STOPPING = "\nstopping after this step (the first compiles for minutes) and a checkpoint; once more: immediately, and without\n"


def ranks_started() -> tuple[int, int]:
    """The rank of this process and the number of ranks that torchrun started; 0 and 1 without torchrun."""
    if not os.environ.keys() >= {"WORLD_SIZE", "RANK", "LOCAL_RANK"}:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextmanager
def process_group(count: int, rank: int, device: torch.device, timeout_seconds: int) -> Iterator[DeviceMesh | None]:
    """The mesh of the processes that torchrun started; None for one process.

    Raises:
        UserError: If the ranks cannot meet within the timeout.
    """
    if count == 1:
        yield None
        return
    from torch.distributed.device_mesh import DeviceMesh  # not in every build, as above

    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group(backend, rank=rank, world_size=count, timeout=timeout, device_id=device_id)
    except (dist.DistError, TimeoutError) as error:
        text = str(error).splitlines()[0]
        raise UserError(f"all {count} ranks must start within --timeout-seconds={timeout_seconds}, got: {text}") from None
    world = dist.group.WORLD
    assert world is not None
    try:
        # From the group, since init_device_mesh makes another, of another timeout, for gloo where there is a GPU.
        yield DeviceMesh.from_group(world, device.type, mesh_dim_names=("cp",))
    finally:
        if device.type == "cuda":
            world.shutdown()  # NCCL's peers may still read this process's memory


def mean(mesh: DeviceMesh | None, value: float) -> float:
    """The mean of the ranks' values: the same number on each."""
    if mesh is None:
        return value
    total = torch.tensor([value], dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(total, group=mesh.get_group())
    return total.item() / mesh.size()


def ensure_equal(mesh: DeviceMesh | None, fields: Mapping[str, object]) -> None:
    """Wait until every rank has called this with equal values and the same version of this library.

    Raises:
        UserError: If they differ: names the field and which rank holds which value, the same error on every rank.
    """
    if mesh is None:
        return
    ranks: list[dict[str, object]] = [{}] * mesh.size()
    dist.all_gather_object(ranks, {"flexdilated's version": __version__, **fields}, group=mesh.get_group())
    for name, expected in ranks[0].items():
        differing_rank = next((rank for rank, values in enumerate(ranks) if values.get(name) != expected), None)
        if differing_rank is not None:
            value = ranks[differing_rank].get(name)
            raise UserError(f"ranks must agree on {name}, got {expected!r} on rank 0 and {value!r} on rank {differing_rank}")


@contextmanager
def stop_requested(mesh: DeviceMesh | None) -> Iterator[Callable[[], bool]]:
    """A function that returns whether SIGINT or SIGTERM has arrived. In one process a second signal stops immediately.

    Over ranks torchrun kills a process that does not end within 30 seconds, and a terminal's signal comes twice.
    """
    is_requested = False

    def request_stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        if is_requested and mesh is None:
            raise KeyboardInterrupt
        if not is_requested and (mesh is None or mesh.get_local_rank() == 0):
            with suppress(OSError):  # a closed one
                os.write(2, STOPPING.encode())  # sys.stderr may be in the middle of a line of its own
        is_requested = True

    previous = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: is_requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def is_rank() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized()


def leave(code: int) -> NoReturn:
    """End the process of a rank without destroying its process group.

    The group's destructor joins a thread of gloo that may wait for the GIL. Where DDP's reducer is the group's last owner the
    destructor holds the GIL: a deadlock.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
