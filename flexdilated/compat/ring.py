"""The ring of the earlier packages: every rank holds whole sequences, computes a shard of the output, and receives all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.core.pattern import DilatedPattern
from flexdilated.distributed.sharding import even_shard_lengths, shard_sequence
from flexdilated.distributed.unsharding import unshard_sequence
from flexdilated.nn.attention import DilatedAttention

SAMPLES = 256  # elements of each tensor that ranks compare
TOLERANCE = 0.01  # allowed difference between ranks, relative to the largest sample: devices may round differently
EAGER_FIRST = "a module over a ring must be called once before it is compiled with fullgraph=True: that call compares the ranks"


def attention_over_ranks(
    pattern: DilatedPattern, ring_size: int | None, *, scale: float | None = None, dropout_p: float
) -> DilatedAttention:
    """Attention over all ranks of the default process group; of this process alone if there is one rank or `ring_size` is 1.

    Raises:
        ValueError: If `ring_size` is neither None, 1 nor the number of ranks.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ring_size not in (None, 1, ranks):
        raise ValueError(
            f"ring_size must be None, 1 or the number of ranks={ranks}, got {ring_size}; "
            "for a ring of other ranks use flexdilated.DilatedAttention(mesh=...)"
        )
    if ranks == 1 or ring_size == 1:
        return DilatedAttention(pattern, scale=scale, dropout_p=dropout_p)
    return RingAttention(pattern, ranks, scale=scale, dropout_p=dropout_p)


class RingAttention(DilatedAttention):
    """Attention on whole sequences that all ranks hold: each rank computes a shard, then all gather the output.

    Outputs and gradients on every rank equal those of one process, if all ranks compute the same loss. If ranks held different
    sequences, as in data parallelism, the result would mix them. So the first call compares samples of the inputs; it cannot be
    compiled with `fullgraph=True`, later calls can.
    """

    def __init__(self, pattern: DilatedPattern, ring_size: int, *, scale: float | None, dropout_p: float) -> None:
        super().__init__(pattern, scale=scale, dropout_p=dropout_p)
        self.ring_size = ring_size
        self.compared = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mesh": None, "compared": False}  # a run with another process group may load the module

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_padding_mask: Tensor | None = None, **options: Any) -> Tensor:
        """As `flexdilated.DilatedAttention`, on whole sequences."""
        whole = {"query": q, "key": k, "value": v}
        if key_padding_mask is not None:
            whole["key_padding_mask"] = key_padding_mask
        if self.mesh is None or self.mesh.device_type != q.device.type:
            self.mesh = self._mesh_of(q.device.type)
        mesh = self.mesh
        lengths = even_shard_lengths(q.shape[1], self.ring_size)
        q, k, v, *masks = (_Shard.apply(x, mesh, lengths) for x in whole.values())
        mask = masks[0] if masks else None
        out = super().forward(q, k, v, key_padding_mask=mask, shard_lengths=lengths, **options)
        if not self.compared:
            self._compare(whole, mesh)  # after the ranks have agreed on shapes and dtypes, so that no rank waits here alone
            self.compared = True
        return unshard_sequence(out, mesh, shard_lengths=lengths)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ring_size={self.ring_size}"

    @torch.compiler.disable(reason=EAGER_FIRST)
    def _mesh_of(self, device_type: str) -> DeviceMesh:
        if dist.get_world_size() != self.ring_size:  # a module that another run saved
            raise ValueError(f"ring_size must be the number of ranks={dist.get_world_size()}, got {self.ring_size}")
        return DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), device_type)

    @torch.compiler.disable(reason=EAGER_FIRST)
    def _compare(self, whole: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
        """Raise if samples of the inputs differ between ranks."""
        local = torch.stack([_samples(x) for x in whole.values()])[None]
        all_samples = unshard_sequence(local, mesh, dim=0)  # (ranks, tensors, samples)
        allowed = TOLERANCE * all_samples.abs().amax((0, 2))
        for name, differs in zip(whole, ((all_samples - all_samples[0]).abs().amax(2) > allowed).unbind(1)):
            if bool(differs.any()):
                raise ValueError(
                    f"{name} must be the same on all ranks of the ring, got other values on rank {int(differs.int().argmax())} "
                    "than on rank 0; for data parallelism give ring_size=1"
                )


class _Shard(torch.autograd.Function):
    """This rank's shard of a tensor that all ranks hold. The backward pass gathers the whole gradient on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, lengths: tuple[int, ...]) -> Tensor:
        ctx.mesh, ctx.lengths = mesh, lengths
        return shard_sequence(x, mesh, shard_lengths=lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return unshard_sequence(grad, ctx.mesh, shard_lengths=ctx.lengths), None, None


def _samples(x: Tensor) -> Tensor:
    """`(SAMPLES,)` elements of a tensor, evenly spaced in the order of its dims, without a copy of it."""
    if x.numel() == 0:
        return torch.zeros(SAMPLES, device=x.device)
    places = torch.arange(SAMPLES, device=x.device) * (x.numel() - 1) // (SAMPLES - 1)
    return x.detach()[torch.unravel_index(places, x.shape)].float()
