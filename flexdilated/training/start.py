"""A part of a store that only the ranks of one start share.

torchrun keeps one store for all its restarts, and its count of restarts is each host's own, so a rank that starts again could read
an address or an error that a rank of the last start has left.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as rendezvous_of_torch

from flexdilated.training.answering import AnsweringStore

PAUSE_SECONDS = 0.01  # between two looks


def rendezvous(timeout: timedelta) -> tuple[Store, int, int]:
    """What `torch.distributed.init_process_group` takes as `store`, `rank` and `world_size` in processes of torchrun.

    Its own `env://` may give the processes of a restart addresses of those before them, at which nobody answers: over gloo most
    restarts of `torchrun --max-restarts` then fail, of four ranks and more. This store is that of the processes of one start alone.

    Args:
        timeout: For all ranks to come.

    Raises:
        ValueError: If torchrun, or what sets the same variables, has not started this process.
        torch.distributed.DistStoreError: If a rank does not come in time.
        TimeoutError: If the store does not answer.
    """
    store, rank, world_size = next(rendezvous_of_torch("env://", timeout=timeout))
    return of_this_start(store, rank, world_size, timeout), rank, world_size


def of_this_start(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store under a prefix that rank 0 has just drawn and every rank has just confirmed.

    Raises:
        torch.distributed.DistStoreError: If a rank does not come in time.
        TimeoutError: If the store does not answer.
    """
    store = PrefixStore("start", store)
    asked = AnsweringStore(store, timeout)
    end = time.monotonic() + timeout.total_seconds()
    mine = uuid.uuid4().hex
    prefix = _call(asked, mine, world_size, end) if rank == 0 else _answer(asked, mine, rank, end)
    return PrefixStore(prefix, store)


def _call(store: AnsweringStore, prefix: str, world_size: int, end: float) -> str:
    """Rank 0: offer a prefix, wait until every other rank has answered to it, and read their names out."""
    store.set("offer", prefix)
    names = []
    for rank in range(1, world_size):
        while not (answer := _read(store, f"answer of {rank}")).startswith(prefix):
            _pause(end, f"rank {rank}")
        names.append(answer.removeprefix(prefix))
    store.set("present", " ".join([prefix, *names]))
    return prefix


def _answer(store: AnsweringStore, name: str, rank: int, end: float) -> str:
    """Another rank: answer to every offer, until one comes back with this rank's name; an earlier start's cannot."""
    answered = ""
    while True:
        offer = _read(store, "offer")
        if offer != answered:
            store.set(f"answer of {rank}", offer + name)
            answered = offer
        prefix, *present = _read(store, "present").split() or [""]
        if name in present:
            return prefix
        _pause(end, "rank 0")


def _read(store: AnsweringStore, key: str) -> str:
    return str(store.get(key).decode()) if store.check([key]) else ""


def _pause(end: float, absent: str) -> None:
    if time.monotonic() > end:
        raise dist.DistStoreError(f"{absent} has not come")
    time.sleep(PAUSE_SECONDS)
