"""What a module refuses on one rank, the others hear of: they would wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.distributed.agreement import LAST_PAUSE, MAX_ITEMS, posts_of, withdraw

Forward = TypeVar("Forward", bound=Callable[..., Any])

MOMENT = 1.0  # seconds that a rank whose time is over waits for others' words, and for the store
MARK = "_flexdilated_ranks_know"  # of errors that all ranks of a call have, or will have


def known(error: BaseException) -> None:
    """Say that the other ranks know of an error."""
    setattr(error, MARK, True)


def all_know(call: Forward) -> Forward:
    """A call that all ranks make, and whose errors they all have."""

    @wraps(call)
    def made(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            known(error)
            raise

    return made  # type: ignore[return-value]


def tell(mesh: DeviceMesh, error: Exception) -> None:
    """Tell the other ranks of a mesh that this one takes no part in the call that they make now or next, unless they know."""
    if mesh.size() > 1 and not hasattr(error, MARK):
        withdraw(mesh.get_group(), str(error) or type(error).__name__)
        known(error)


def calls_of(group: dist.ProcessGroup, call: str) -> Callable[[Sequence[int], bool], str]:
    """What says, where rows of some ranks of a group did not come, in which calls this rank and they were.

    Ranks that mix up two calls wait for each other, and the time of both ends at about one moment: the first waits a little for the
    other's word, or the other finds the first's. Who is dead or stopped has none.
    """

    def told(ranks: Sequence[int], time_is_over: bool) -> str:
        asked = [rank for rank in ranks if rank != group.rank()][:MAX_ITEMS]
        calls, end = {group.rank(): call}, time.monotonic() + MOMENT * time_is_over
        with suppress(TimeoutError, RuntimeError):  # of a store that is gone
            store, life = posts_of(group, timedelta(seconds=MOMENT))
            store.set(f"{life}/waited/{group.rank()}", call)
            while True:
                for rank in asked:
                    if rank not in calls and store.check([key := f"{life}/waited/{rank}"]):
                        calls[rank] = store.get(key).decode()
                if len(calls) > len(asked) or time.monotonic() >= end:
                    break
                time.sleep(LAST_PAUSE)
        words = [f"rank {dist.get_global_rank(group, rank)} waited in {each}" for rank, each in calls.items()]
        silent = [f"rank {dist.get_global_rank(group, rank)}" for rank in asked if rank not in calls]
        return "; ".join([*words, f"{' and '.join(silent)} did not tell of a wait"] if silent else words)

    return told


@contextmanager
def telling(mesh: DeviceMesh | None) -> Iterator[None]:
    """What this rank refuses inside, the ranks of a mesh hear of, who would wait for it; none where there is no mesh."""
    try:
        yield
    except Exception as error:
        if mesh is not None:
            tell(mesh, error)
        raise


def tells_others(forward: Forward) -> Forward:
    """A module's forward whose errors before an attention reach the ranks of its `mesh`, or of its attention's, at once.

    Ranks that have agreed on the plan of that attention before, and wait for rows of this one, end by the timeout of their group.
    Decoding, by a cache or caches, is each rank's own, or that of the ranks of the cache.
    """

    @wraps(forward)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (mesh := _mesh_of(self, kwargs)) is None:
            return forward(self, *args, **kwargs)
        with telling(mesh):
            return forward(self, *args, **kwargs)

    return told  # type: ignore[return-value]


def _mesh_of(module: Any, options: dict[str, Any]) -> DeviceMesh | None:
    """Of the ranks that may wait for this one in a call."""
    for decoding in (options.get("cache"), options.get("caches")):
        if decoding is not None:
            cache = decoding[0] if isinstance(decoding, Sequence) and decoding else decoding
            return getattr(cache, "mesh", None)
    # an attention that a user has put in place of ours may know of no mesh
    mesh: DeviceMesh | None = module.mesh if hasattr(module, "mesh") else getattr(module.attention, "mesh", None)
    return mesh
