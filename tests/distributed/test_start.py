"""Ranks that start again on a store which remembers their last start."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from flexdilated.distributed import start as starting
from flexdilated.distributed.start import of_this_start

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
