"""Dilated attention of DTensors: their placements say which tokens, heads and sequences a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from flexdilated.core.call import Call
from flexdilated.core.checks import check_mods, check_sinks

BATCH, TOKENS, HEADS = 0, 1, 2


class _ShardedDims(NamedTuple):
    """Which dim of `(B, N, H, D)` each axis of a mesh shards, None where it replicates."""

    mesh: DeviceMesh
    dims: tuple[int | None, ...]

    def axis(self, dim: int) -> int | None:
        """The axis of the mesh that shards a dim."""
        return self.dims.index(dim) if dim in self.dims else None

    def place(self, axis: int) -> int:
        """The coordinate of this rank on an axis."""
        places = self.mesh.get_coordinate()
        assert places is not None  # it holds a part of q
        return places[axis]


def unwrapped(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Call, Wrap]:
    """The local tensors of DTensors q, k and v, the call on them, and the `Wrap` that makes DTensors of its results.

    Raises:
        TypeError: If only some of q, k and v are DTensors.
        ValueError: If their placements differ, or `mesh` or `shard_lengths` are given where they are sharded on tokens.
        NotImplementedError: If a placement is none of replicated, sharded on batch, tokens or heads, or two axes shard one dim.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise TypeError(f"{name} must be a DTensor where q, k or v is one, got {type(x).__name__}")
    assert isinstance(q, DTensor)
    assert isinstance(k, DTensor)
    assert isinstance(v, DTensor)
    layout = _layout(q)
    for name, x in (("k", k), ("v", v)):
        if (x.device_mesh, x.placements) != (q.device_mesh, q.placements):
            raise ValueError(f"{name} must have the mesh and placements of q={q.placements}, got {x.placements}")
    axis = layout.axis(TOKENS)
    call = _narrowed(q, k, layout, call, call.mesh if axis is None else _axis_of(layout.mesh, axis))
    # What a rank computes depends on its own part alone, where nothing is replicated; a replica computes the same once more.
    local = [x.to_local(grad_placements=x.placements) for x in (q, k, v)]
    return local[0], local[1], local[2], call, Wrap(q.device_mesh, q.placements, q.shape, layout.dims)


def _narrowed(q: DTensor, k: DTensor, layout: _ShardedDims, call: Call, mesh: DeviceMesh | None) -> Call:
    """The call on this rank's local tensors; `mesh`: the ranks that share the tokens."""
    axis = layout.axis(TOKENS)
    if axis is not None:
        for name, value in (("mesh", call.mesh), ("shard_lengths", call.shard_lengths)):
            if value is not None:
                raise ValueError(f"{name} must be None for DTensors sharded on tokens, whose placements say it, got a value")
        shards = _chunks(q.shape[TOKENS], layout.mesh.size(axis))
        call = call.replaced(mesh=mesh, shard_lengths=shards)
    elif call.mesh is not None and not torch.compiler.is_compiling():
        shared = set(call.mesh.mesh.flatten().tolist()) & set(layout.mesh.mesh.flatten().tolist())
        if len(shared) > 1:
            raise ValueError(f"mesh must share no ranks but this one with that of q, got {sorted(shared)}; shard q on its tokens")
    batches = layout.axis(BATCH)
    if batches is not None and layout.mesh.size(batches) > 1:
        # Each rank would count its own sequences from 0.
        for name in ("score_mod", "mask_mod"):
            if getattr(call, name) is not None:
                raise NotImplementedError(f"{name} must be None for DTensors sharded on the batch, got a function; replicate them")
        if call.cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens must be None for DTensors sharded on the batch, got borders, which are of one sequence; redistribute "
                "q, k and v: replicated, or sharded on tokens or heads"
            )
    mask, borders = call.key_padding_mask, call.cu_seqlens
    if isinstance(mask, DTensor):
        if mask.device_mesh != q.device_mesh:
            raise ValueError(f"key_padding_mask must have the mesh of q={q.device_mesh}, got {mask.device_mesh}")
        placements = tuple(p if dim in (BATCH, TOKENS) else Replicate() for p, dim in zip(q.placements, layout.dims))
        mask = mask.redistribute(q.device_mesh, placements).to_local()
    if isinstance(borders, DTensor):
        borders = borders.full_tensor()
    first_head, num_kv_heads = _heads(q, k, layout)
    group, sinks = q.shape[HEADS] // k.shape[HEADS], call.sinks
    if sinks is not None:
        check_sinks(sinks, q)
        if isinstance(sinks, DTensor):  # a rank has the gradient of its own rows and heads
            sinks = sinks.full_tensor(grad_placements=[Replicate() if dim is None else Partial() for dim in layout.dims])
        sinks = sinks[first_head * group :][: q.to_local().shape[HEADS]]
    if first_head:
        call = _with_heads_from(first_head * group, q.to_local(), call)
    first_sequence = 0 if batches is None else sum(_chunks(q.shape[BATCH], layout.mesh.size(batches))[: layout.place(batches)])
    return call.replaced(
        key_padding_mask=mask,
        cu_seqlens=borders,
        sinks=sinks,
        first_head=first_head,
        num_kv_heads=num_kv_heads,
        first_sequence=first_sequence,
    )


class Wrap(NamedTuple):
    """Makes DTensors of local `out` and `lse`: mesh, placements and shape of q, and the dim that each axis shards."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: Size
    dims: tuple[int | None, ...]

    def around(self, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """DTensors of which `out` and `lse` are this rank's part."""
        whole_out = self._whole(out, self.placements, self.shape)
        if lse is None:
            return whole_out, None
        lse_dims = {BATCH: 0, TOKENS: 2, HEADS: 1}
        placements = tuple(Replicate() if dim is None else Shard(lse_dims[dim]) for dim in self.dims)
        return whole_out, self._whole(lse, placements, Size((self.shape[0], self.shape[2], self.shape[1])))

    def _whole(self, x: Tensor, placements: tuple[Placement, ...], shape: Size) -> DTensor:
        return DTensor.from_local(x, self.mesh, placements, run_check=False, shape=shape, stride=_strides(shape))


def _layout(q: DTensor) -> _ShardedDims:
    dims = tuple(_dim(placement) for placement in q.placements)
    for dim, name in ((BATCH, "batch"), (TOKENS, "tokens"), (HEADS, "heads")):
        if dims.count(dim) > 1:
            raise NotImplementedError(f"q must be sharded on the {name} by at most one axis of its mesh, got {q.placements}")
    return _ShardedDims(q.device_mesh, dims)


def _dim(placement: Placement) -> int | None:
    if isinstance(placement, Replicate):
        return None
    # Subclasses, such as strided shards, hold other tokens. A compiler of torch 2.9 knows no type of a placement.
    is_plain = type(placement) is Shard or (torch.compiler.is_compiling() and not isinstance(placement, _StridedShard))
    if is_plain and isinstance(placement, Shard) and placement.dim % 4 in (BATCH, TOKENS, HEADS):
        return placement.dim % 4
    raise NotImplementedError(
        f"q must be replicated or sharded on dim 0 (batch), 1 (tokens) or 2 (heads), got {placement}; redistribute it first"
    )


def _axis_of(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    """One axis as a mesh of its own."""
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is None:
        raise ValueError("the mesh of q must have named dims where it has several, got none; give mesh_dim_names")
    return mesh[mesh.mesh_dim_names[axis]]


def _heads(q: DTensor, k: DTensor, layout: _ShardedDims) -> tuple[int, int | None]:
    """The first key/value head held here, and how many there are in all where that is a part."""
    axis = layout.axis(HEADS)
    if axis is None:
        return 0, None
    size, rank = layout.mesh.size(axis), layout.place(axis)
    heads, kv_heads = q.shape[HEADS], k.shape[HEADS]
    if kv_heads % size or heads % size:
        raise NotImplementedError(f"heads must be a multiple of the ranks that share them={size}, got {heads} and {kv_heads} of k")
    return rank * (kv_heads // size), kv_heads


def _with_heads_from(first: int, q: Tensor, call: Call) -> Call:
    """The call with functions that receive head numbers of the model; q holds the heads from `first` on."""
    check_mods(call.score_mod, call.mask_mod, q)  # what is wrong with them they would say later, from inside
    score, mask = call.score_mod, call.mask_mod
    return call.replaced(
        score_mod=None if score is None else lambda s, b, h, q_idx, kv_idx: score(s, b, h + first, q_idx, kv_idx),
        mask_mod=None if mask is None else lambda b, h, q_idx, kv_idx: mask(b, h + first, q_idx, kv_idx),
    )


def _chunks(length: int, parts: int) -> Sequence[int]:
    """How DTensor cuts a dim: as `torch.chunk`, and nothing for the last ranks where it gives fewer chunks."""
    step = -(-length // parts)
    return tuple(max(0, min(step, length - i * step)) for i in range(parts))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(accumulate(reversed((*shape[1:], 1)), lambda a, b: a * b))[::-1]
