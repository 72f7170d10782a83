"""Slides over the processes of one run: large ones over all of them, the others to one each."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh

from flexdilated.hub.slide_encoder import LongNetViT
from flexdilated.nn.attention import DilatedAttention


def spread(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """The names of each rank, in their order, such that the largest sum of sizes is small: the largest first, to the emptiest."""
    of_rank: list[set[str]] = [set() for _ in range(num_ranks)]
    filled = [0] * num_ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = filled.index(min(filled))
        of_rank[rank].add(name)
        filled[rank] += max(1, sizes[name])  # what cannot be counted is work too
    return [[name for name in sizes if name in names] for names in of_rank]


def sharded(model: LongNetViT, mesh: DeviceMesh) -> LongNetViT:
    """The same model for one slide over the ranks of a mesh; its parameters are shared, not copied.

    Raises:
        NotImplementedError: If its tiles follow an order.
    """
    if model.order is not None:
        raise NotImplementedError(f"order must be None with mesh, got {model.order!r}: a rank holds a part of the slide alone")
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    other.mesh = mesh
    for module in other.modules():
        if isinstance(module, DilatedAttention):
            module.mesh = mesh
    return other
