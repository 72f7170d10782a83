"""Real processes, one per rank, in as many numbers as `FLEXDILATED_WORLD_SIZES` says."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIMEOUT = timedelta(seconds=600)  # of a collective: on a busy machine one rank may compile for minutes while another waits
# Descending: pytest gathers the tests of a process set by the place of its parameter, which `at_least` must not move.
WORLD_SIZES = sorted((int(size) for size in os.environ.get("FLEXDILATED_WORLD_SIZES", "1,2,3,4").split(",")), reverse=True)
# NCCL refuses two ranks of one host on one GPU: each is a host of its own then, which sockets connect.
ALONE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
ALONE |= {"NCCL_CUMEM_ENABLE": "0"}
GRACE = 150.0  # seconds in which a busy machine starts processes, or they tell why they are late

# Ranks are forked from a process that has imported this and done nothing: to import it takes each of them more than a second.
multiprocessing.set_forkserver_preload(
    [
        *("flexdilated.cli", "flexdilated.distributed", "hypothesis", "pytest"),
        *("torch._dynamo", "torch.distributed.device_mesh", "torch.testing"),
    ]
)


def run_ranks(
    worker: Callable[..., None],
    world_size: int,
    folder: Path,
    *args: Any,
    deadline: float = 900.0,
    timeout: timedelta | None = TIMEOUT,
) -> None:
    """Call `worker(rank, *args)` in processes of their own."""
    with Ranks(world_size, folder, timeout) as ranks:
        ranks.run(_work, worker, args, deadline=deadline)


def _work(rank: int, mesh: DeviceMesh | None, worker: Callable[..., None], args: tuple[Any, ...]) -> None:
    worker(rank, *args)


class Ranks:
    """Processes of one gloo group that wait for cases: a start takes seconds, so many tests share one.

    After a case that fails, or is not done in time, the processes are killed, and the next case gets others. They end in no other
    way: a group's destructor waits for threads that may wait for the interpreter, and so may a process at its end.

    Without a timeout there is no group, and cases get None for a mesh. The device "cuda" gives each rank a GPU of its own, if there
    are as many, and a group of NCCL.
    """

    def __init__(self, world_size: int, folder: Path, timeout: timedelta | None = TIMEOUT, device: str = "cpu") -> None:
        self.world_size, self.folder, self.timeout, self.device = world_size, folder, timeout, device
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._stacks: list[Path] = []  # where a rank that is late writes its own
        self._starts = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def run(self, case: Callable[..., Any], *args: Any, deadline: float = 900.0, ending: Collection[int] = ()) -> list[Any]:
        """What `case(rank, mesh, *args)` gives on each rank, in `deadline` seconds; `case` is at the top of a module.

        The processes of the ranks in `ending` must end, and give None. An AssertionError has the traceback of each rank that
        raises, and the stacks of each that is late.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((deadline, pickle.dumps((case, args))))
        for connection in self._connections:
            connection.send_bytes(message)
        end = time.monotonic() + deadline + GRACE
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(answers) + len(failures) < self.world_size:
            waiting = [c for rank, c in enumerate(self._connections) if rank not in answers and rank not in failures]
            ready = multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                late = f"no sign within {deadline + GRACE} s" if not failures else "waits"
                failures |= {rank: late for rank, c in enumerate(self._connections) if c in waiting}
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    is_done, answer = pickle.loads(connection.recv_bytes())
                    if is_done and rank in ending:
                        is_done, answer = False, f"must end, gave {answer!r}"
                except (EOFError, ConnectionResetError):
                    stacks = self._stacks[rank].read_text()
                    is_done, answer = (rank in ending and not stacks), None
                    if not is_done:
                        answer = f"not done within {deadline} s\n{stacks}" if stacks else "the process ended"
                    if stacks:
                        end = min(end, time.monotonic() + GRACE)  # the others tell theirs too
                if is_done:
                    answers[rank] = answer
                else:
                    failures[rank] = answer
                    if not str(answer).startswith("not done"):
                        end = min(end, time.monotonic() + 2.0)  # the others may wait for this rank, or tell more
        if failures or ending:
            self.kill()
        assert not failures, "\n".join(f"rank {rank} of {self.world_size}: {text}" for rank, text in sorted(failures.items()))
        return [answers[rank] for rank in range(self.world_size)]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._stacks = [], [], []

    def _start(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # before the children load torch
        context = torch.multiprocessing.get_context("forkserver")
        file = str(self.folder / f"ranks_{self._starts}")
        self._starts += 1
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            stacks = Path(f"{file}_stacks_{rank}")
            stacks.touch()
            arguments = (rank, self.world_size, file, self.timeout, self.device, theirs, stacks)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
            self._stacks.append(stacks)


def _serve(
    rank: int, world_size: int, file: str, timeout: timedelta | None, device: str, connection: Connection, stacks: Path
) -> None:
    """Answer cases for ever. Where one is not done in time, all threads' stacks go to a file and the process ends."""
    with stacks.open("w") as late:
        faulthandler.dump_traceback_later(GRACE, exit=True, file=late)
        torch.set_num_threads(1)
        mesh = None
        if timeout is not None:
            store = dist.FileStore(file, world_size)
            store.set(f"rank {rank}", "")
            store.wait([f"rank {other}" for other in range(world_size)], TIMEOUT)  # the group's own may be short
            if device == "cuda":
                if torch.cuda.device_count() < world_size:
                    os.environ.update(ALONE, NCCL_HOSTID=f"rank {rank}")
                torch.cuda.set_device(rank % torch.cuda.device_count())
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            mesh = init_device_mesh(device, (world_size,), mesh_dim_names=("cp",))
        faulthandler.cancel_dump_traceback_later()
        while True:
            deadline, message = pickle.loads(connection.recv_bytes())
            faulthandler.dump_traceback_later(deadline, exit=True, file=late)
            try:
                case, args = pickle.loads(message)
                answer = True, case(rank, mesh, *args)
            except BaseException:
                answer = False, traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(pickle.dumps(answer))


def at_least(least: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    return exactly(*(size for size in WORLD_SIZES if size >= least))


def each_size(size: int) -> Any:
    """A world size as a parameter: its tests start processes, and by its name one worker runs them all."""
    return pytest.param(size, id=f"{size}_ranks", marks=pytest.mark.ranks)


def exactly(*sizes: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """These world sizes, whatever the environment asks for. A function of `(rank, mesh, ...)` becomes a test that all ranks run."""
    mark = pytest.mark.parametrize("ranks", [each_size(size) for size in sizes], indirect=True)
    return lambda function: mark(_on_ranks(function))


def _on_ranks(function: Callable[..., Any]) -> Callable[..., None]:
    first, *others = inspect.signature(function).parameters.values()
    if first.name == "ranks":
        return function

    @functools.wraps(function)
    def test(ranks: Ranks, **arguments: Any) -> None:
        ranks.run(_run_by_name, function.__module__, function.__name__, arguments)

    test.__signature__ = inspect.Signature([first.replace(name="ranks"), *others[1:]])  # type: ignore[attr-defined]
    return test


def _run_by_name(rank: int, mesh: DeviceMesh, module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(rank, mesh, **arguments)


_sizes = [size for size in WORLD_SIZES if size > 1]
# The middle size: for tests that need several ranks, whatever their number.
one_size = exactly(*_sizes[len(_sizes) // 2 :][:1])
