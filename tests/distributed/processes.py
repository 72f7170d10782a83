"""Real processes, one per rank."""

from __future__ import annotations

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

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

TIMEOUT = timedelta(seconds=60)  # of a collective


def run_ranks(worker: Callable[..., None], world_size: int, folder: Path, *args: Any, deadline: float = 300.0) -> None:
    """Call `worker(rank, *args)` in one process per rank of a gloo group, and raise what any of them raises.

    Args:
        worker: A function at the top of a module.
        world_size: Processes.
        folder: Empty, for the ranks to find each other.
        args: Picklable.
        deadline: Seconds after which the processes are killed and the call fails.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # before the children load torch
    context = torch.multiprocessing.spawn(_enter, (world_size, str(folder / "ranks"), worker, args), world_size, join=False)
    end = time.monotonic() + deadline
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > end:
                raise TimeoutError(f"ranks must end within {deadline} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
                process.join()


def _enter(rank: int, world_size: int, file: str, worker: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        worker(rank, *args)
    finally:
        time.sleep(0.2)  # gloo's threads need the GIL once more, which the group's destructor holds
        dist.destroy_process_group()


class Ranks:
    """Processes of one gloo group that wait for cases: a start takes seconds, so many tests share one.

    After a case that fails, or is not done in time, the processes are killed, and the next case gets others.

    Args:
        world_size: Processes.
        folder: For the ranks to find each other.
        timeout: Of the group.
    """

    def __init__(self, world_size: int, folder: Path, timeout: timedelta = TIMEOUT) -> None:
        self.world_size, self.folder, self.timeout = world_size, folder, timeout
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._starts = 0

    def run(self, case: Callable[..., Any], *args: Any, deadline: float = 120.0, ending: Collection[int] = ()) -> list[Any]:
        """What `case(rank, mesh, *args)` gives on each rank; `mesh` is 1-D and holds all ranks.

        Args:
            case: A function at the top of a module.
            args: Picklable.
            deadline: Seconds.
            ending: Ranks whose process must end in the case; they give None.

        Raises:
            AssertionError: If a rank raises, ends or is late: the rank and its traceback, of each.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((case, args))
        for connection in self._connections:
            connection.send_bytes(message)
        end = time.monotonic() + deadline
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(answers) + len(failures) < self.world_size:
            waiting = [c for rank, c in enumerate(self._connections) if rank not in answers and rank not in failures]
            ready = multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                late = f"not done within {deadline} s" if not failures else "waits"
                failures |= {rank: late for rank, c in enumerate(self._connections) if c in waiting}
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    is_done, answer = pickle.loads(connection.recv_bytes())
                    if is_done and rank in ending:
                        is_done, answer = False, f"must end, gave {answer!r}"
                except (EOFError, ConnectionResetError):
                    is_done, answer = (True, None) if rank in ending else (False, "the process ended")
                if is_done:
                    answers[rank] = answer
                else:
                    failures[rank] = answer
                    end = min(end, time.monotonic() + 2.0)  # the others may wait for this rank, or tell more
        if failures or ending:
            self.kill()
        assert not failures, "\n".join(f"rank {rank} of {self.world_size}: {text}" for rank, text in sorted(failures.items()))
        return [answers[rank] for rank in range(self.world_size)]

    def kill(self) -> None:
        """End the processes; the next case starts others."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # before the children load torch
        context = torch.multiprocessing.get_context("spawn")
        file = str(self.folder / f"ranks_{self._starts}")
        self._starts += 1
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, file, self.timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)


def _serve(rank: int, world_size: int, file: str, timeout: timedelta, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size, timeout=timeout)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    while True:
        message = connection.recv_bytes()
        try:
            case, args = pickle.loads(message)
            answer = True, case(rank, mesh, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
