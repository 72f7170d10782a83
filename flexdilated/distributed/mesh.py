"""This rank's place in a mesh of one axis."""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.core.tracing import answers_while_traced


@answers_while_traced  # it reads the tensor of ranks, which does not trace; dynamo guards on the mesh itself
def group_of(mesh: DeviceMesh) -> tuple[str, int, int]:
    """The name of the process group of a 1-D mesh, this rank in it and its size; traces under `torch.compile(fullgraph=True)`.

    Raises:
        TypeError: If it is no `DeviceMesh`.
        ValueError: If it has other than one dim, lacks this rank, or does not list its ranks in ascending order.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    rank, num_ranks = _place_of(mesh, dist.get_rank())
    return mesh.get_group().group_name, rank, num_ranks


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of a name."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type, unused-ignore]


def canonical_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The first mesh that this function received over the same process group.

    `axes["cp"]` is a new object each time, and compiled graphs are guarded by the object: modules with different objects would be
    compiled separately. A value that is no usable axis is returned as it is; calls raise for it.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        return mesh
    try:
        group = mesh.get_group()
    except (RuntimeError, ValueError):  # of other ranks
        return mesh
    first_mesh = _known.get(group, lambda: None)()
    if first_mesh is None or first_mesh != mesh:
        first_mesh = mesh
        _known[group] = ref(mesh)
    return first_mesh


_known: WeakKeyDictionary[dist.ProcessGroup, ref[DeviceMesh]] = WeakKeyDictionary()


@lru_cache(maxsize=64)  # `mesh.mesh` makes a tensor at each access, in 20 microseconds
def _place_of(mesh: DeviceMesh, rank: int) -> tuple[int, int]:
    """A rank in a 1-D mesh, and the number of its ranks."""
    if mesh.ndim != 1:
        names, sizes = mesh.mesh_dim_names, tuple(mesh.mesh.shape)
        axis = "one axis" if names is None else f"one axis, as mesh[{names[-1]!r}]"
        raise ValueError(f"mesh must be 1-D, got dims {names} of sizes {sizes}; give {axis}")
    ranks = mesh.mesh.tolist()
    if rank not in ranks:
        raise ValueError(f"mesh must hold this rank, got rank {rank} and ranks {ranks}")
    if ranks != sorted(ranks):  # a process group sorts its ranks, so shards in the order of the mesh would be mixed up
        raise ValueError(f"mesh must list its ranks in ascending order, got {ranks}")
    return ranks.index(rank), len(ranks)
