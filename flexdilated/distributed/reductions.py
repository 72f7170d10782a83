"""Sums over the ranks of a mesh, without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.distributed.consistency import Fields, compare, one_call
from flexdilated.distributed.mesh import group_of
from flexdilated.distributed.runtime.transport import explained
from flexdilated.distributed.sharding import declared_lengths


class Sums:
    """Sums over the ranks of a 1-D mesh. Every rank must make the same calls. Raises as `group_of`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        _, self.rank, self.num_ranks = group_of(mesh)
        self._group, self._device_type = mesh.get_group(), mesh.device_type

    def lengths(self, x: Tensor, shard_lengths: Sequence[int] | None) -> tuple[int, ...]:
        """Tokens of each rank; x `(B, n, ...)`, on the mesh's device, is the shard of this rank. Raises as `declared_lengths`."""
        if x.device.type != self._device_type:
            raise ValueError(f"q must be on the device of mesh={self._device_type}, got {x.device}")
        return declared_lengths(self.rank, self.num_ranks, x.shape[1], shard_lengths)

    def compare(self, call: str, fields: Mapping[str, object]) -> None:
        """Wait until all ranks make this call, and raise ValueError if its fields differ between ranks."""
        if self.num_ranks > 1:
            with one_call(self._group) as number:
                device = torch.device(self._device_type)
                compare(self._group, device, Fields({"call": call, **fields}), (number,), each_time=True)

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks; x may be written."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def logsumexp(self, x: Tensor) -> Tensor:
        """`log(sum(exp(x)))` over ranks; -inf where all are."""
        largest = self._reduced(x.clone(), dist.ReduceOp.MAX)
        finite = largest.masked_fill(largest == -torch.inf, 0.0)
        return finite + torch.log(self.total(torch.exp(x - finite)))

    def _reduced(self, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.num_ranks > 1:
            x = x.contiguous()
            with explained("attention_map over this mesh"):
                dist.all_reduce(x, operation, group=self._group)
        return x
