"""The ring of the earlier packages: every rank holds whole sequences, computes a shard of the output, and receives all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.core.pattern import DilatedPattern, is_integer
from flexdilated.distributed.sharding import even_shard_lengths, shard_sequence, unshard_sequence
from flexdilated.nn.attention import DilatedAttention

SAMPLES = 256  # elements of each tensor that ranks compare
TOLERANCE = 0.01  # allowed difference between ranks, relative to the largest sample: devices may round differently
EAGER_FIRST = "a module over a ring must be called once before it is compiled with fullgraph=True: that call compares the ranks"


def attention_over(
    pattern: DilatedPattern, ring_size: int | None, group: dist.ProcessGroup | None, *, scale: float | None = None, dropout_p: float
) -> DilatedAttention:
    """Attention over the ring of ranks that `ring_size` and `group` name; attention of one process if the ring has one rank.

    Raises:
        TypeError: If `ring_size` is no integer, or `group` is not a group that holds this rank.
        ValueError: If `ring_size` is neither 1 nor the number of ranks of the group.
    """
    ring = _find_ring(ring_size, group)
    if ring is None or ring.size() == 1:
        return DilatedAttention(pattern, scale=scale, dropout_p=dropout_p)
    return RingAttention(pattern, ring, scale=scale, dropout_p=dropout_p)


class RingAttention(DilatedAttention):
    """Attention on whole sequences that all ranks of a group hold: each rank computes a shard, then all gather the output.

    Outputs and gradients on every rank equal those of one process, if all ranks compute the same loss. If ranks held different
    sequences, as in data parallelism, the result would mix them. So the first call compares samples of the inputs; it cannot be
    compiled with `fullgraph=True`, later calls can.
    """

    def __init__(self, pattern: DilatedPattern, group: dist.ProcessGroup, *, scale: float | None, dropout_p: float) -> None:
        super().__init__(pattern, scale=scale, dropout_p=dropout_p)
        # The module can be copied and pickled with the group's name, not with the group or with the mesh that `forward` builds.
        self.group_name, self.ring_size = group.group_name, group.size()
        self.compared = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mesh": None, "compared": False}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_padding_mask: Tensor | None = None, **options: Any) -> Tensor:
        """As `flexdilated.DilatedAttention`, on whole sequences."""
        whole = {"query": q, "key": k, "value": v}
        if key_padding_mask is not None:
            whole["key_padding_mask"] = key_padding_mask
        self._check(whole)
        if self.mesh is None or self.mesh.device_type != q.device.type:
            self.mesh = self._mesh(q.device.type)
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

    def _check(self, whole: Mapping[str, Tensor]) -> None:
        """Raise unless all tensors have the same number of tokens; the shards are checked later."""
        for name, x in whole.items():
            dims = 2 if name == "key_padding_mask" else 4
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
            if x.dim() != dims:
                raise ValueError(f"{name} must have {dims} dims, the tokens in the second, got shape {tuple(x.shape)}")
            if x.shape[1] != whole["query"].shape[1]:
                raise ValueError(f"{name} must have the tokens of query={whole['query'].shape[1]}, got {x.shape[1]}")

    @torch.compiler.disable(reason=EAGER_FIRST)
    def _mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of the ring's ranks for a type of device."""
        group = distributed_c10d._resolve_process_group(self.group_name)  # type: ignore[attr-defined, arg-type, unused-ignore]
        if group.size() != self.ring_size:  # a module that another run saved
            raise ValueError(f"ring_size must be the number of ranks of the group={group.size()}, got {self.ring_size}")
        return DeviceMesh.from_group(group, device_type)

    @torch.compiler.disable(reason=EAGER_FIRST)
    def _compare(self, whole: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
        """Raise if samples of the inputs differ between ranks."""
        local = torch.stack([_samples(x) for x in whole.values()])[None]
        all_samples = unshard_sequence(local, mesh, dim=0)  # (ranks, tensors, samples)
        allowed = TOLERANCE * all_samples.abs().amax((0, 2))
        for name, differs in zip(whole, ((all_samples - all_samples[0]).abs().amax(2) > allowed).unbind(1)):
            if bool(differs.any()):
                ranks, other = dist.get_process_group_ranks(mesh.get_group()), int(differs.int().argmax())
                raise ValueError(
                    f"{name} must be the same on all ranks of the ring, got other values on rank {ranks[other]} than on "
                    f"rank {ranks[0]}; for data parallelism give ring_size=1"
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


def _find_ring(ring_size: int | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group whose ranks share a sequence, or None."""
    if ring_size is not None and not is_integer(ring_size):
        raise TypeError(f"ring_size must be an integer or None, got {ring_size!r}")
    if group is not None:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group must be a ProcessGroup that holds this rank, or None, got {group!r}")
        if ring_size not in (None, group.size()):
            raise ValueError(f"ring_size must be the number of ranks of group={group.size()}, got {ring_size}")
        return group
    if ring_size == 1:
        return None
    if dist.is_available() and dist.is_initialized():
        ring = distributed_c10d._get_default_group()
        if ring_size not in (None, ring.size()):
            raise ValueError(
                f"ring_size must be 1 or the number of ranks of the default group={ring.size()}, got {ring_size}; "
                "for a ring of other ranks give group"
            )
        return ring
    if ring_size is not None:
        raise ValueError(
            f"ring_size must be None or 1 where torch.distributed is not initialised, got {ring_size}; "
            "call torch.distributed.init_process_group first"
        )
    return None


def _samples(x: Tensor) -> Tensor:
    """`(SAMPLES,)` elements of a tensor, evenly spaced in the order of its dims, without a copy of it."""
    if x.numel() == 0:
        return torch.zeros(SAMPLES, device=x.device)
    places = torch.arange(SAMPLES, device=x.device) * (x.numel() - 1) // (SAMPLES - 1)
    return x.detach()[torch.unravel_index(places, x.shape)].float()
