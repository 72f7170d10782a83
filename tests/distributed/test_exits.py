"""Processes that end behind a step in which one of them failed while the other waited for its rows."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed import shared_failures, underway
from flexdilated.distributed.ledger import LAST_PAUSE
from tests.distributed.processes import GRACE, TIMEOUT

FAILING, WAITING = 0, 1
PATTERN = DilatedPattern((24,), (1,))
DEADLINE = 60.0 + GRACE
AFTER = 1.0  # seconds that one process ends behind the other


def fail_or_wait(rank: int, mesh: DeviceMesh, q: torch.Tensor) -> None:
    if rank == FAILING:
        time.sleep(6 * LAST_PAUSE)
        raise KeyError("no token is left")
    dilated_attention(q, q, q, PATTERN, mesh=mesh)


def leave(rank: int, folder: str, how: str) -> None:
    """Wait for rows, hear of an error, and end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2, timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", (2,))
    q = torch.randn(1, 16, 2, 4)
    dilated_attention(q, q, q, PATTERN, mesh=mesh)  # agreed on: the next one waits for rows
    with pytest.raises((KeyError, ValueError), match="no token is left") as caught, shared_failures(mesh):
        fail_or_wait(rank, mesh, q)
    assert (rank == WAITING) == any(swap.is_awaited for swap in underway.underway(mesh.get_group()).open)
    left = mesh.get_group().get_group_store()
    left.set(str(rank), "")
    left.wait([str(WAITING)])  # which would else hear of a closed connection where this one ends sooner than it looks
    if how == "uncaught":
        raise caught.value
    if how == "destroyed":
        dist.destroy_process_group()
    if how == "another group":
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/others", rank=rank, world_size=2, timeout=TIMEOUT)
        dist.barrier()
    if (how, rank) in (("failing last", FAILING), ("failing first", WAITING)):
        time.sleep(AFTER)
    if how == "killed" and rank == FAILING:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("how", ["together", "failing first", "failing last", "destroyed", "another group", "uncaught", "killed"])
def test_processes_with_waits_left_behind_end_as_others_do(how: str, tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")  # forked ones end without what Python does at its end
    processes = [context.Process(target=leave, args=(rank, str(tmp_path), how), daemon=True) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        end = time.monotonic() + DEADLINE
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    expected = {"uncaught": [1, 1], "killed": [-signal.SIGKILL, 0]}.get(how, [0, 0])
    assert codes == expected
