"""What all ranks of a mesh add up, in calls that are not differentiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.distributed.agreement import agree
from flexdilated.distributed.sharding import declared_lengths, group_of
from flexdilated.distributed.waits import Wait


class Sums:
    """Sums over the ranks of a 1-D mesh; all of them must call.

    Raises:
        TypeError: If it is no `DeviceMesh`.
        ValueError: If it has other than one dim or lacks this rank.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        _, self.rank, self.num_ranks = group_of(mesh)
        self._mesh = mesh

    def lengths(self, x: Tensor, shard_lengths: Sequence[int] | None) -> tuple[int, ...]:
        """Tokens of each rank, where x `(B, n, ...)` is this one's.

        Raises:
            ValueError: If x is not on the device of the mesh, or the lengths do not fit.
            TypeError: If a length is no integer.
        """
        if x.device.type != self._mesh.device_type:
            raise ValueError(f"q must be on the device of mesh={self._mesh.device_type}, got {x.device}")
        return declared_lengths(self.rank, self.num_ranks, x.shape[1], shard_lengths)

    def agree(self, call: str, described: Mapping[str, object]) -> None:
        """Return once all ranks are known to make this call.

        Raises:
            ValueError: If they differ, or one refused.
            TimeoutError: If a rank does not come.
        """
        agree(self._mesh.get_group(), {"call": call, **described})

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks; x may be written."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def logsumexp(self, x: Tensor) -> Tensor:
        """`log(sum(exp(x)))` over ranks; -inf where all are."""
        most = self._reduced(x.clone(), dist.ReduceOp.MAX)
        finite = most.masked_fill(most == -torch.inf, 0.0)
        return finite + torch.log(self.total(torch.exp(x - finite)))

    def _reduced(self, x: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.num_ranks > 1:
            x = x.contiguous()
            group = self._mesh.get_group()
            with Wait(group, "attention_map").for_all():
                dist.all_reduce(x, how, group=group)
        return x
