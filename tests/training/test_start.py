"""Ranks that start again on a store which remembers their last start."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import flexdilated
from flexdilated import DilatedPattern, dilated_attention
from flexdilated.training import start as starting
from flexdilated.training.start import of_this_start, rendezvous

LONG, SHORT = timedelta(seconds=600), timedelta(seconds=0.2)


def start(store: dist.Store, size: int, *, delays: list[float]) -> list[dist.Store]:
    """One start of all ranks, each after a delay in seconds."""
    parts: dict[int, dist.Store] = {}

    def run(rank: int) -> None:
        time.sleep(delays[rank])
        parts[rank] = of_this_start(store, rank, size, LONG)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [parts[rank] for rank in range(size)]


@contextmanager
def over_once_answered(store: dist.Store, ranks: list[int]) -> Iterator[None]:
    """The time of each thread is over once these ranks have answered to a new offer and it has looked again, and not before."""
    part, looked = dist.PrefixStore("start", store), threading.local()
    before = part.get("offer")

    def monotonic() -> float:
        offer = part.get("offer")
        done = not ranks or (offer != before and all(part.get(f"answer of {rank}").startswith(offer) for rank in ranks))
        again, looked.again = getattr(looked, "again", False), done
        return math.inf if done and again else 0.0

    with mock.patch.object(starting, "time", SimpleNamespace(sleep=time.sleep, monotonic=monotonic)):
        yield


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_start_has_a_part_of_its_own(size: int) -> None:
    store = dist.HashStore()
    generator = random.Random(size)
    for number in range(8):
        parts = start(store, size, delays=[generator.choice((0.0, 0.02, 0.05)) for _ in range(size)])
        assert not any(part.check([f"address of {rank}"]) for part in parts for rank in range(size))
        for rank, part in enumerate(parts):
            part.set(f"address of {rank}", f"{number}.{rank}")
        for part in parts:
            assert [part.get(f"address of {rank}").decode() for rank in range(size)] == [f"{number}.{rank}" for rank in range(size)]


def test_rank_that_fell_while_it_started_does_not_spoil_the_next_start() -> None:
    for fallen in range(3):
        store = dist.HashStore()
        start(store, 3, delays=[0.0] * 3)
        errors = []

        def run(rank: int, store: dist.Store = store, errors: list[str] = errors) -> None:
            try:
                of_this_start(store, rank, 3, SHORT)
            except dist.DistStoreError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3) if rank != fallen]
        with over_once_answered(store, [rank for rank in (1, 2) if 0 != fallen != rank]):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(errors) == 2
        assert set(errors) <= {f"rank {fallen} has not come", "rank 0 has not come"}
        parts = start(store, 3, delays=[0.0, 0.05, 0.0])
        parts[2].set("address", "x")
        assert parts[0].get("address") == b"x"


# Learns one number by attention over all ranks. Rank 1 dies in the first two starts, in a step of its own each time.
PROGRAM = """
import os, signal
from datetime import timedelta
import torch
import torch.distributed as dist
from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed import shard_sequence
from flexdilated.training.start import rendezvous

store, rank, world_size = rendezvous(timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
mesh = dist.init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "cp"))["cp"]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
x = shard_sequence(torch.linspace(-1, 1, 96, dtype=torch.float64).view(1, 24, 2, 2), mesh)
step, weight = torch.load("state.pt") if os.path.exists("state.pt") else (0, torch.ones((), dtype=torch.float64))
while step < 6:
    if rank == 1 and attempt < 2 and step == 2 * (attempt + 1):
        os.kill(os.getpid(), signal.SIGKILL)
    leaf = weight.clone().requires_grad_()
    dilated_attention(leaf * x, x, x, DilatedPattern((8, 24), (1, 2)), mesh=mesh).square().sum().backward()
    dist.all_reduce(leaf.grad, group=mesh.get_group())
    step, weight = step + 1, weight - 0.01 * leaf.grad
    dist.barrier()
    if rank == 0:
        torch.save((step, weight), "new.pt")
        os.replace("new.pt", "state.pt")
print(f"attempt {attempt} rank {rank} weight {weight.item():.12f}\\n", end="", flush=True)
os._exit(0)
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_a_program_of_ones_own_goes_on_where_torchrun_starts_it_again(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--max-restarts", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(flexdilated.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, "--monitor-interval", "0.1", "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    x, weight = torch.linspace(-1, 1, 96, dtype=torch.float64).view(1, 24, 2, 2), torch.ones((), dtype=torch.float64)
    for _ in range(6):
        leaf = weight.clone().requires_grad_()
        dilated_attention(leaf * x, x, x, DilatedPattern((8, 24), (1, 2))).square().sum().backward()
        assert leaf.grad is not None
        weight = weight - 0.01 * leaf.grad
    found = re.findall(r"attempt 2 rank (\d) weight (\S+)", done.stdout)
    assert sorted(rank for rank, _ in found) == ["0", "1", "2", "3"]
    assert all(abs(float(value) - weight.item()) < 1e-9 for _, value in found), (found, weight)
    assert weight.item() != 1.0


def test_a_process_that_torchrun_has_not_started_has_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"environment variable RANK expected, but not set"):
        rendezvous(SHORT)
