"""A sequence in contiguous shards, one per rank of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

from flexdilated.core.checks import refuse_shards_of_torch
from flexdilated.core.collective_order import OVER_RANKS, keep_order, order_kernels, refuse_regions, unknown
from flexdilated.core.functorch import is_transformed
from flexdilated.distributed.consistency import Fields, compare, one_call
from flexdilated.distributed.exchange import explained
from flexdilated.distributed.meshes import group_of

Batch = TypeVar("Batch")


def even_shard_lengths(num_tokens: int, num_ranks: int) -> tuple[int, ...]:
    """Lengths as equal as can be, the first ones one longer: `even_shard_lengths(7, 3) == (3, 2, 2)`.

    Raises:
        ValueError: If a number of tokens is negative, or there is no rank.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    length, longer = divmod(num_tokens, num_ranks)
    return (length + 1,) * longer + (length,) * (num_ranks - longer)


def shard_lengths_of(mesh: DeviceMesh, num_tokens: int, shard_lengths: Sequence[int] | None = None) -> tuple[int, ...]:
    """How many of `num_tokens` each rank of a 1-D mesh holds: equally many, or what `shard_lengths` declares.

    Raises:
        TypeError: If `mesh` is no `DeviceMesh`, or a length no integer.
        ValueError: If the mesh cannot be used, the ranks do not divide the tokens, or the lengths do not tile them.
    """
    _, _, num_ranks = group_of(mesh)
    if shard_lengths is None:
        if num_tokens % num_ranks:
            raise ValueError(
                f"num_tokens must be a multiple of the ranks of mesh={num_ranks}, got {num_tokens}; "
                f"give shard_lengths, as {even_shard_lengths(num_tokens, num_ranks)}"
            )
        return (num_tokens // num_ranks,) * num_ranks
    lengths = _check_lengths(shard_lengths, num_ranks)
    if sum(lengths) != num_tokens:
        raise ValueError(f"shard_lengths must sum to num_tokens={num_tokens}, got {lengths} of sum {sum(lengths)}")
    return lengths


def local_shard_lengths(
    mesh: DeviceMesh, num_tokens_local: int, shard_lengths: Sequence[int] | None = None
) -> tuple[int, tuple[int, ...]]:
    """This rank in a 1-D mesh, and the shard lengths of all, given that of this rank: equal ones, or what `shard_lengths` declares.

    Raises:
        TypeError: As `shard_lengths_of`.
        ValueError: If the mesh cannot be used, or the lengths are malformed or give this rank another number of tokens.
    """
    _, rank, num_ranks = group_of(mesh)
    return rank, declared_lengths(rank, num_ranks, num_tokens_local, shard_lengths)


def declared_lengths(rank: int, num_ranks: int, num_tokens_local: int, shard_lengths: Sequence[int] | None) -> tuple[int, ...]:
    """The shard lengths of all ranks, given that of one: equal ones, or what `shard_lengths` declares.

    Raises:
        TypeError: If a length is no integer.
        ValueError: If the lengths are malformed or give this rank another number of tokens.
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
        TypeError: If the batch holds no tensor, or something of another type.
        ValueError: If the tensors differ in length, or the shards do not tile them.
    """
    num_tokens = _length(batch, dim)
    lengths = shard_lengths_of(mesh, num_tokens, shard_lengths)
    _, rank, _ = group_of(mesh)
    start = sum(lengths[:rank])
    return _map(lambda x: x.narrow(dim, start, lengths[rank]), batch)


def unshard_sequence(
    batch_local: Batch,
    mesh: DeviceMesh,
    *,
    dim: int = 1,
    shard_lengths: Sequence[int] | None = None,
    reduce_gradients: bool = False,
) -> Batch:
    """The whole sequence on every rank, from the shard that each holds: the inverse of `shard_sequence`, for any dtype.

    Differentiable, by the convention of `DTensor.full_tensor()`: every rank goes on to compute the same from the whole, so the
    gradient of its shard is that slice of its own gradient, and nothing is summed over ranks. A loss that is computed from the
    whole on every rank has its full gradient in each shard; one that differs between ranks must be reduced by the caller, or by
    `reduce_gradients`. Parameters behind the whole, a head's say, have their full gradient on every rank, and those before it a
    part: where all are added up over ranks, or averaged as DDP and FSDP2 do, only `reduce_gradients` makes one rule of both.

    Args:
        batch_local: This rank's shard: a tensor, or nested dicts, lists and tuples of tensors of one length along `dim`; the same
            structure on every rank.
        mesh: A 1-D `DeviceMesh`, such as `mesh["cp"]`.
        dim: Dim of every tensor that is the sequence.
        shard_lengths: Tokens of each rank, the same on every rank. Must be given where they differ. Default: all as this rank.
        reduce_gradients: Whether the gradients of all ranks are added up. The loss that is differentiated is then the sum of those
            of the ranks, or their mean where gradients are averaged, as over a model whose output stays in shards. The backward
            is then a call, which each rank must make.

    Returns:
        The same structure, with tensors of `sum(shard_lengths)` tokens.

    Raises:
        TypeError: If the batch holds no tensor, or something of another type.
        ValueError: If the tensors differ in length, this rank holds another number of tokens than `shard_lengths` says, or, on all
            of them, the ranks differ in lengths, dtype or other dims.
    """
    return _unsharded(batch_local, mesh, dim, shard_lengths, reduce_gradients)


def _unsharded(
    batch_local: Batch, mesh: DeviceMesh, dim: int, shard_lengths: Sequence[int] | None, reduces: bool, also: Sequence[int] = ()
) -> Batch:
    name, _, num_ranks = group_of(mesh)
    rank, lengths = local_shard_lengths(mesh, _length(batch_local, dim), shard_lengths)
    if num_ranks == 1:
        return batch_local
    refuse_regions()
    tensors = [x for x in tree_flatten(batch_local)[0] if isinstance(x, Tensor)]
    if any(hasattr(x, "device_mesh") for x in tensors):
        raise TypeError("the tensors must be plain ones, this rank's shards, got a DTensor; full_tensor() is the whole of one")
    if is_transformed(*tensors):
        raise NotImplementedError(
            "batch_local must come without torch.func and forward-mode differentiation, got a call under one; use torch.autograd"
        )

    def gather(x: Tensor) -> Tensor:
        differentiates = reduces and torch.is_grad_enabled() and x.requires_grad
        options = rank, list(lengths), dim % x.dim(), list(also), bool(reduces), differentiates
        return _gather(x, unknown(x.device), name, *options)[0]

    return _map(gather, batch_local)


def gather_tokens(
    x_local: Tensor,
    positions: Tensor,
    mesh: DeviceMesh,
    *,
    shard_lengths: Sequence[int] | None = None,
    reduce_gradients: bool = False,
) -> Tensor:
    """One token of each sequence on every rank, wherever it lies, such as the last one of a prompt: `(B, 1, E)`.

    Differentiable, as `unshard_sequence`.

    Args:
        x_local: This rank's shard `(B, n, E)`, which may be empty: hidden states, say, before the head of a language model.
        positions: `(B,)` int64 or int32, of the tokens in the whole sequence, the same on every rank.
        mesh: A 1-D `DeviceMesh`, such as `mesh["cp"]`.
        shard_lengths: Tokens of each rank, the same on every rank. Must be given where they differ. Default: all as this rank.
        reduce_gradients: Whether the gradients of all ranks are added up, as there.

    Raises:
        TypeError: If the positions are no integers.
        ValueError: If a shape is wrong, or this rank holds another number of tokens than `shard_lengths` says.
        RuntimeError: If a position lies outside of the sequence, or, on all of them, is another on some rank.
    """
    return _gathered(x_local, positions, mesh, shard_lengths, reduce_gradients)


def _gathered(x_local: Tensor, positions: Tensor, mesh: DeviceMesh, shard_lengths: Sequence[int] | None, reduces: bool) -> Tensor:
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions must be an int64 or int32 tensor, got {got}")
    if x_local.dim() != 3:
        raise ValueError(f"x_local must have shape (B, n, E), got {tuple(x_local.shape)}")
    if positions.shape != x_local.shape[:1]:
        raise ValueError(f"positions must have shape (B,)=({x_local.shape[0]},), got {tuple(positions.shape)}")
    rank, lengths = local_shard_lengths(mesh, x_local.shape[1], shard_lengths)
    inside = (positions >= 0) & (positions < sum(lengths))
    torch._assert_async(inside.all(), f"positions must be in [0, N={sum(lengths)}), got others")
    ends = torch.tensor(lengths, device=x_local.device).cumsum(0)
    here = torch.arange(len(positions), device=x_local.device)
    if lengths[rank]:
        mine = x_local[here, (positions - sum(lengths[:rank])).clamp(0, lengths[rank] - 1)][:, None]
    else:
        mine = x_local.sum(1, keepdim=True, dtype=x_local.dtype)  # zeros, of which autograd knows where they are from
    of_ranks = _unsharded(mine[None], mesh, 0, (1,) * len(lengths), reduces, lengths)
    asked = _unsharded(positions.long()[None], mesh, 0, (1,) * len(lengths), False, lengths)
    torch._assert_async((asked == positions).all(), "positions must be the same on all ranks, got others")
    owner = torch.searchsorted(ends, positions, right=True)  # an empty shard owns none
    return of_ranks[owner, here]


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


def _length(batch: Any, dim: int) -> int:
    """Of the tensors of a batch, along `dim`."""
    leaves, _ = tree_flatten(batch)
    lengths: list[int] = []
    for leaf in leaves:
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


def _map(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    leaves, structure = tree_flatten(batch)
    return tree_unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


# An opaque operator: functional collectives lose their gradient when compiled in some versions (pytorch/pytorch#183459).


@torch.library.custom_op("flexdilated::unshard", mutates_args=(), tags=OVER_RANKS)
def _gather(
    x: Tensor,
    unknown: Tensor,
    group_name: str,
    rank: int,
    lengths: Sequence[int],
    dim: int,
    also: Sequence[int],
    reduces: bool,
    differentiates: bool,
) -> tuple[Tensor, Tensor]:
    """The shards of all ranks of a group, one after another along `dim`, and the number of the call on the host.

    What else the ranks must share is compared.
    """
    assert x.shape[dim] == lengths[rank]
    group = distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined, arg-type, unused-ignore]
    with one_call(group) as number:
        refuse_shards_of_torch(group.size())
        # First what memory may be short for: a rank that fails between two collectives would leave the others in the second.
        whole, longest = _whole(x, lengths, dim), max(lengths)
        others = [*x.shape[:dim], *x.shape[dim + 1 :]]
        # Shards of one size, which every transport moves, as bytes, since gloo knows few dtypes.
        padded = x.new_zeros(longest, *others)
        padded[: lengths[rank]] = x.movedim(dim, 0)
        shards = x.new_empty(len(lengths), longest, *others)
        fields = {
            "call": "unshard_sequence",
            "shard_lengths": list(lengths),
            "dtype": str(x.dtype),
            "dim": dim,
            "the other dims of shards": others,
            "reduce_gradients": reduces,
            "requires_grad": differentiates,
            "shard_lengths of gather_tokens": list(also),
        }
        compare(group, x.device, Fields(fields), (number,), each_time=True)  # collectives have no tags
        if whole.numel() > 0:  # on every rank
            parts = list(shards.view(-1).view(torch.uint8).chunk(len(lengths)))
            with explained(f"call {number} over this mesh, unshard_sequence"):
                dist.all_gather(parts, padded.view(-1).view(torch.uint8), group=group)
        for shard, part in zip(shards, whole.split(list(lengths), dim)):
            part.copy_(shard[: part.shape[dim]].movedim(0, dim))
        return whole, torch.tensor(number)


@_gather.register_fake
def _(
    x: Tensor, unknown: Tensor, group_name: str, rank: int, lengths: Sequence[int], dim: int, *options: Any
) -> tuple[Tensor, Tensor]:
    order_kernels()
    return _whole(x, lengths, dim), torch.empty((), dtype=torch.int64, device="cpu")


_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13


@torch.library.custom_op("flexdilated::unshard_backward", mutates_args=(), tags=OVER_RANKS)
def _reduce(grad: Tensor, number: Tensor, group_name: str, rank: int, lengths: Sequence[int], dim: int) -> Tensor:
    """This rank's slice of the sum over ranks of what each has of the whole that they put together in the call of a number."""
    group = distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined, arg-type, unused-ignore]
    others = [*grad.shape[:dim], *grad.shape[dim + 1 :]]
    with one_call(group) as call:
        parts = grad.new_zeros(len(lengths), max(lengths), *others)
        for part, piece in zip(parts, grad.split(list(lengths), dim)):
            part[: piece.shape[dim]] = piece.movedim(dim, 0)
        mine = torch.empty_like(parts[0])
        fields = {
            "call": "the backward of unshard_sequence",
            "shard_lengths": list(lengths),
            "dtype": str(grad.dtype),
            "dim": dim,
            "the other dims of shards": others,
        }
        compare(group, grad.device, Fields(fields), (call, int(number.item())), each_time=True)
        if grad.numel() > 0:
            with explained(f"call {call} over this mesh, the backward of unshard_sequence"):
                _REDUCE_SCATTER(mine.view(-1), parts.view(-1), group=group)
        return mine[: lengths[rank]].movedim(0, dim).contiguous()


@_reduce.register_fake
def _(grad: Tensor, number: Tensor, group_name: str, rank: int, lengths: Sequence[int], dim: int) -> Tensor:
    order_kernels()
    return grad.new_empty(*grad.shape[:dim], lengths[rank], *grad.shape[dim + 1 :])


def _whole(x: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
    return x.new_empty(*x.shape[:dim], sum(lengths), *x.shape[dim + 1 :])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, ctx.group_name, ctx.rank, ctx.lengths, ctx.dim, _, ctx.reduces, _ = inputs
    ctx.save_for_backward(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    if ctx.reduces:
        (number,) = ctx.saved_tensors
        mine = _reduce(grad, number, ctx.group_name, ctx.rank, ctx.lengths, ctx.dim)
    else:
        mine = grad.narrow(ctx.dim, sum(ctx.lengths[: ctx.rank]), ctx.lengths[ctx.rank])
    return mine, *[None] * 8


def _save_of_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.group_name, ctx.rank, ctx.lengths, ctx.dim = inputs


def _differentiate_reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Each rank's whole is added to all shards: its derivative is the whole of their derivatives."""
    differentiates = torch.is_grad_enabled() and grad.requires_grad
    whole, _ = _gather(
        grad.contiguous(), unknown(grad.device), ctx.group_name, ctx.rank, ctx.lengths, ctx.dim, [], True, differentiates
    )
    return whole, *[None] * 5


_gather.register_autograd(_differentiate, setup_context=_save)
_reduce.register_autograd(_differentiate_reduce, setup_context=_save_of_reduce)
keep_order(_gather)
keep_order(_reduce)
