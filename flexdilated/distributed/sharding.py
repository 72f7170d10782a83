"""Cut a sequence in contiguous shards, one per rank of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from flexdilated.distributed.mesh import group_of

Batch = TypeVar("Batch")


def even_shard_lengths(num_tokens: int, num_ranks: int) -> tuple[int, ...]:
    """Shard lengths that differ by at most 1, the longer ones first.

    >>> even_shard_lengths(7, 3)
    (3, 2, 2)

    Raises:
        ValueError: If a number of tokens is negative, or there is no rank.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    length, longer = divmod(num_tokens, num_ranks)
    return (length + 1,) * longer + (length,) * (num_ranks - longer)


def local_shard_lengths(
    mesh: DeviceMesh, num_tokens_local: int, shard_lengths: Sequence[int] | None = None
) -> tuple[int, tuple[int, ...]]:
    """This rank in a 1-D mesh, and the `declared_lengths` of all ranks; raises as `group_of` and `declared_lengths`."""
    _, rank, num_ranks = group_of(mesh)
    return rank, declared_lengths(rank, num_ranks, num_tokens_local, shard_lengths)


def declared_lengths(rank: int, num_ranks: int, num_tokens_local: int, shard_lengths: Sequence[int] | None) -> tuple[int, ...]:
    """The shard lengths of all ranks: `shard_lengths`, by default equal to that of rank `rank`.

    Raises TypeError or ValueError if they are malformed, or give this rank another number of tokens.
    """
    if shard_lengths is None:
        return (num_tokens_local,) * num_ranks
    lengths = _check_lengths(shard_lengths, num_ranks)
    if lengths[rank] != num_tokens_local:
        raise ValueError(f"shard_lengths[{rank}] must be the number of tokens of this rank={num_tokens_local}, got {lengths}")
    return lengths


def _check_lengths(shard_lengths: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    if not isinstance(shard_lengths, Sequence):
        raise TypeError(f"shard_lengths must be a sequence of integers, got {shard_lengths!r}")
    lengths = tuple(shard_lengths)
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
            raise TypeError(f"shard_lengths must hold integers, got {lengths}")
    if len(lengths) != num_ranks:
        raise ValueError(f"shard_lengths must hold one length per rank of mesh={num_ranks}, got {lengths}")
    if any(length < 0 for length in lengths):
        raise ValueError(f"shard_lengths must not be negative, got {lengths}")
    return lengths


def shard_sequence(batch: Batch, mesh: DeviceMesh, *, dim: int = 1, shard_lengths: Sequence[int] | None = None) -> Batch:
    """This rank's contiguous shard of a sequence that every rank holds; a view, without communication, differentiable.

    Args:
        batch: A tensor, or nested dicts, lists and tuples of tensors of one length along `dim`; other numbers, strings and None in
            them stay as they are. Borders of documents (`cu_seqlens`) are global: keep them out.
        mesh: A 1-D `DeviceMesh`, such as `mesh["cp"]`; a single rank gets the whole.
        dim: Dim of every tensor that is the sequence.
        shard_lengths: Tokens of each rank. Default: equally many.

    Returns:
        The same structure, with tensors of `shard_lengths[rank]` tokens.

    Raises:
        TypeError: If the batch holds no tensor, or something of another type, `mesh` is no `DeviceMesh`, or a length no integer.
        ValueError: If the tensors differ in length, the mesh cannot be used, or the shards do not tile the tokens.
    """
    num_tokens = length_of(batch, dim)
    _, rank, num_ranks = group_of(mesh)
    if shard_lengths is None and num_tokens % num_ranks:
        raise ValueError(
            f"num_tokens must be a multiple of the ranks of mesh={num_ranks}, got {num_tokens}; "
            f"give shard_lengths, as {even_shard_lengths(num_tokens, num_ranks)}"
        )
    lengths = _check_lengths(even_shard_lengths(num_tokens, num_ranks) if shard_lengths is None else shard_lengths, num_ranks)
    if sum(lengths) != num_tokens:
        raise ValueError(f"shard_lengths must sum to num_tokens={num_tokens}, got {lengths} of sum {sum(lengths)}")
    start = sum(lengths[:rank])
    return tree_map_only(Tensor, lambda x: x.narrow(dim, start, lengths[rank]), batch)


def replicated_like(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, which are the same on every rank, as replicated DTensors of the mesh of x if x is a DTensor; else themselves.

    Their gradients are summed over the ranks that see parts of x.
    """
    mesh = getattr(x, "device_mesh", None)  # torch.distributed.tensor is slow to import, and rarely needed
    if mesh is None:
        return tensors
    from torch.distributed.tensor import DTensor, Replicate

    replicas = [Replicate()] * mesh.ndim
    return tuple(y if isinstance(y, DTensor) else DTensor.from_local(y, mesh, replicas, run_check=False) for y in tensors)


def length_of(batch: Any, dim: int) -> int:
    """The length of the tensors of a batch along `dim`."""
    lengths: list[int] = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            if not -leaf.dim() <= dim < leaf.dim():
                raise ValueError(f"batch must hold tensors with dim={dim}, got shape {tuple(leaf.shape)}")
            lengths.append(leaf.shape[dim])
        elif leaf is not None and not isinstance(leaf, (bool, int, float, complex, str, bytes)):
            remedy = "; give dict(...) of it" if isinstance(leaf, Mapping) else ""  # as tokenizers give
            raise TypeError(f"batch must hold tensors in dicts, lists and tuples, got {type(leaf).__name__}{remedy}")
    if not lengths:
        raise TypeError(f"batch must hold a tensor, got {type(batch).__name__}")
    if any(length != lengths[0] for length in lengths):
        raise ValueError(f"batch must hold tensors of one length along dim={dim}, got lengths {lengths}")
    return lengths[0]
