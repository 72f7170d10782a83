"""Ranks that start again on a store which remembers their last start."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from flexdilated.distributed.start import of_this_start

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.2)


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
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 2 or fallen == 0
        assert set(errors) <= {f"rank {fallen} has not come", "rank 0 has not come"}
        parts = start(store, 3, delays=[0.0, 0.05, 0.0])
        parts[2].set("address", "x")
        assert parts[0].get("address") == b"x"
