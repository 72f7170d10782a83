"""Processes that share a gloo group and run one function after another, each time all of them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

GROUP_TIMEOUT = 120.0  # seconds that a rank waits for another
START_TIMEOUT = 120.0


class Ranks:
    """`size` processes of one thread each, started once: `with Ranks(2) as ranks: ranks(function, ...)`.

    Args:
        size: How many.

    Raises:
        TimeoutError: If they have not found each other within `START_TIMEOUT` seconds.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = TemporaryDirectory()
        context = get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(child_end, self._folder.name, rank, size), daemon=True)
            process.start()
            child_end.close()  # so that the death of the process ends the pipe
            self._ends.append(parent_end)
            self._processes.append(process)
        self._collect(START_TIMEOUT)

    def __call__(self, function: Callable[..., Any], *arguments: Any, timeout: float = 600.0) -> list[Any]:
        """What `function(mesh, *arguments)` gives on each rank, all at once; `mesh` is that of all ranks.

        Args:
            function: Of a module, as are the types of its arguments and result: they travel by pickle.
            arguments: The same on every rank.
            timeout: Seconds.

        Raises:
            RuntimeError: If a rank fails or ends: with its traceback.
            TimeoutError: If a rank is not ready in time.
        """
        for end in self._ends:
            end.send((function, arguments))
        return self._collect(timeout)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for process, end in zip(self._processes, self._ends):
            process.kill()
            process.join()
            end.close()
        self._folder.cleanup()

    def _collect(self, timeout: float) -> list[Any]:
        """One answer of every rank; after a failure none of them is left."""
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        try:
            while len(answers) < self.size:
                missing = [rank for rank in range(self.size) if rank not in answers]
                ready = wait([self._ends[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"ranks {missing} of {self.size} must answer within {timeout:g} s, they did not")
                for rank in missing:
                    if self._ends[rank] not in ready:
                        continue
                    try:
                        is_right, answers[rank] = self._ends[rank].recv()
                    except EOFError:
                        self._processes[rank].join()
                        raise RuntimeError(f"rank {rank} ended with exit code {self._processes[rank].exitcode}") from None
                    if not is_right:
                        raise RuntimeError(f"rank {rank} of {self.size} failed:\n{answers[rank]}")
        except BaseException:
            self.close()
            raise
        return [answers[rank] for rank in range(self.size)]


def _serve(end: Connection, folder: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'rendezvous'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=GROUP_TIMEOUT),
        )
        mesh: DeviceMesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        end.send((True, None))
        while True:
            function, arguments = end.recv()
            end.send((True, function(mesh["cp"], *arguments)))
    except EOFError:  # the parent is gone
        pass
    except BaseException:
        end.send((False, traceback.format_exc()))
