"""Put the shards of a sequence together, on every rank of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from flexdilated.core.checks import refuse_shards_of_torch
from flexdilated.core.collective_order import OVER_RANKS, keep_order, order_kernels, unknown
from flexdilated.core.functorch import is_transformed
from flexdilated.core.tracing import refuse_regions
from flexdilated.distributed.consistency import Fields, compare, one_call
from flexdilated.distributed.mesh import group_of, process_group
from flexdilated.distributed.runtime.transport import explained
from flexdilated.distributed.sharding import Batch, length_of, local_shard_lengths


def unshard_sequence(
    batch_local: Batch,
    mesh: DeviceMesh,
    *,
    dim: int = 1,
    shard_lengths: Sequence[int] | None = None,
    reduce_gradients: bool = False,
) -> Batch:
    """The whole sequence on every rank, from the shard that each holds: the inverse of `shard_sequence`, for any dtype.

    Differentiable, as `DTensor.full_tensor()`: the gradient of a shard is the slice of this rank's own gradient, without a sum over
    ranks. That is right if every rank computes the same loss from the whole. If losses differ, or if gradients of all parameters
    are summed or averaged over ranks, as DDP and FSDP2 do, use `reduce_gradients`.

    Args:
        batch_local: This rank's shard: a tensor, or nested dicts, lists and tuples of tensors of one length along `dim`; the same
            structure on every rank.
        mesh: A 1-D `DeviceMesh`, such as `mesh["cp"]`.
        dim: Dim of every tensor that is the sequence.
        shard_lengths: Tokens of each rank, the same on every rank. Must be given where they differ. Default: all as this rank.
        reduce_gradients: Whether the gradients of all ranks are summed: the gradient is that of the sum of the ranks' losses. Every
            rank must then call backward.

    Returns:
        The same structure, with tensors of `sum(shard_lengths)` tokens.

    Raises:
        TypeError: If the batch holds no tensor, or something of another type.
        ValueError: If tensors differ in length, shards are not as `shard_lengths` says, or ranks differ in dtype or other dims.
    """
    return _unsharded(batch_local, mesh, dim, shard_lengths, reduce_gradients)


def _unsharded(
    batch_local: Batch, mesh: DeviceMesh, dim: int, shard_lengths: Sequence[int] | None, reduces: bool, also: Sequence[int] = ()
) -> Batch:
    name, _, num_ranks = group_of(mesh)
    rank, lengths = local_shard_lengths(mesh, length_of(batch_local, dim), shard_lengths)
    if num_ranks == 1:
        return batch_local
    refuse_regions()
    tensors = [x for x in tree_leaves(batch_local) if isinstance(x, Tensor)]
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

    return tree_map_only(Tensor, gather, batch_local)


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
        x_local: This rank's shard `(B, n, E)`, which may be empty.
        positions: `(B,)` int64 or int32, of the tokens in the whole sequence, the same on every rank.
        mesh: A 1-D `DeviceMesh`, such as `mesh["cp"]`.
        shard_lengths: Tokens of each rank, the same on every rank. Must be given where they differ. Default: all as this rank.
        reduce_gradients: Whether the gradients of all ranks are added up, as there.

    Raises:
        TypeError: If the positions are no integers.
        ValueError: If a shape is wrong, or this rank holds another number of tokens than `shard_lengths` says.
        RuntimeError: If a position lies outside of the sequence, or, on all of them, is another on some rank.
    """
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
        kind = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions must be an int64 or int32 tensor, got {kind}")
    if x_local.dim() != 3:
        raise ValueError(f"x_local must have shape (B, n, E), got {tuple(x_local.shape)}")
    if positions.shape != x_local.shape[:1]:
        raise ValueError(f"positions must have shape (B,)=({x_local.shape[0]},), got {tuple(positions.shape)}")
    rank, lengths = local_shard_lengths(mesh, x_local.shape[1], shard_lengths)
    in_range = (positions >= 0) & (positions < sum(lengths))
    torch._assert_async(in_range.all(), f"positions must be in [0, N={sum(lengths)}), got others")
    ends = torch.tensor(lengths, device=x_local.device).cumsum(0)
    sequence = torch.arange(len(positions), device=x_local.device)
    if lengths[rank]:
        token_local = x_local[sequence, (positions - sum(lengths[:rank])).clamp(0, lengths[rank] - 1)][:, None]
    else:
        token_local = x_local.sum(
            1, keepdim=True, dtype=x_local.dtype
        )  # zeros that depend on x_local, so that its gradient is defined
    tokens_of_ranks = _unsharded(token_local[None], mesh, 0, (1,) * len(lengths), reduce_gradients, lengths)
    positions_of_ranks = _unsharded(positions.long()[None], mesh, 0, (1,) * len(lengths), False, lengths)
    torch._assert_async((positions_of_ranks == positions).all(), "positions must be the same on all ranks, got others")
    owner = torch.searchsorted(ends, positions, right=True)  # an empty shard owns none
    return tokens_of_ranks[owner, sequence]


# Opaque operators: functional collectives lose their gradient when compiled in some versions (pytorch/pytorch#183459).


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
    """The shards of all ranks of a group, one after another along `dim`, and the number of the call on the host."""
    assert x.shape[dim] == lengths[rank]
    group = process_group(group_name)
    with one_call(group) as number:
        refuse_shards_of_torch(group.size())
        # Memory before the first collective: a rank that fails between two collectives would leave the others in the second.
        sequence, padded = _whole(x, lengths, dim), _padded(x, lengths[rank : rank + 1], max(lengths), dim)
        shards = padded.new_empty(len(lengths), *padded.shape[1:])
        own_fields = {
            "reduce_gradients": reduces,
            "requires_grad": differentiates,
            "shard_lengths of gather_tokens": list(also),
        }
        fields = Fields({"call": "unshard_sequence", **_described(x, lengths, dim), **own_fields})
        compare(group, x.device, fields, (number,), each_time=True)  # collectives have no tags
        if sequence.numel() > 0:  # on every rank
            parts = list(shards.view(-1).view(torch.uint8).chunk(len(lengths)))  # as bytes: gloo knows few dtypes
            with explained(f"call {number} over this mesh, unshard_sequence"):
                dist.all_gather(parts, padded.view(-1).view(torch.uint8), group=group)
        for shard, part in zip(shards, sequence.split(list(lengths), dim)):
            part.copy_(shard[: part.shape[dim]].movedim(0, dim))
        return sequence, torch.tensor(number)


@_gather.register_fake
def _(
    x: Tensor, unknown: Tensor, group_name: str, rank: int, lengths: Sequence[int], dim: int, *options: Any
) -> tuple[Tensor, Tensor]:
    order_kernels()
    return _whole(x, lengths, dim), torch.empty((), dtype=torch.int64, device="cpu")


_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13


@torch.library.custom_op("flexdilated::unshard_backward", mutates_args=(), tags=OVER_RANKS)
def _reduce(grad: Tensor, number: Tensor, group_name: str, rank: int, lengths: Sequence[int], dim: int) -> Tensor:
    """This rank's slice of the sum over ranks of the gradients of the whole sequence; `number`: that of the forward call."""
    group = process_group(group_name)
    with one_call(group) as call:
        parts = _padded(grad, lengths, max(lengths), dim)
        grad_local = torch.empty_like(parts[0])
        fields = Fields({"call": "the backward of unshard_sequence", **_described(grad, lengths, dim)})
        compare(group, grad.device, fields, (call, int(number.item())), each_time=True)
        if grad.numel() > 0:
            with explained(f"call {call} over this mesh, the backward of unshard_sequence"):
                _REDUCE_SCATTER(grad_local.view(-1), parts.view(-1), group=group)
        return grad_local[: lengths[rank]].movedim(0, dim).contiguous()


@_reduce.register_fake
def _(grad: Tensor, number: Tensor, group_name: str, rank: int, lengths: Sequence[int], dim: int) -> Tensor:
    order_kernels()
    return grad.new_empty(*grad.shape[:dim], lengths[rank], *grad.shape[dim + 1 :])


def _described(x: Tensor, lengths: Sequence[int], dim: int) -> dict[str, object]:
    other_dims = [*x.shape[:dim], *x.shape[dim + 1 :]]
    return {"shard_lengths": list(lengths), "dtype": str(x.dtype), "dim": dim, "the other dims of shards": other_dims}


def _padded(x: Tensor, lengths: Sequence[int], longest: int, dim: int) -> Tensor:
    """`(parts, longest, other dims)`: the parts of x along `dim`, and zeros, since collectives need parts of equal sizes."""
    padded = x.new_zeros(len(lengths), longest, *x.shape[:dim], *x.shape[dim + 1 :])
    for shard, part in zip(padded, x.split(list(lengths), dim)):
        shard[: part.shape[dim]] = part.movedim(dim, 0)
    return padded


def _whole(x: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
    return x.new_empty(*x.shape[:dim], sum(lengths), *x.shape[dim + 1 :])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, ctx.group_name, ctx.rank, ctx.lengths, ctx.dim, _, ctx.reduces, _ = inputs
    ctx.save_for_backward(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    if ctx.reduces:
        (number,) = ctx.saved_tensors
        grad_local = _reduce(grad, number, ctx.group_name, ctx.rank, ctx.lengths, ctx.dim)
    else:
        grad_local = grad.narrow(ctx.dim, sum(ctx.lengths[: ctx.rank]), ctx.lengths[ctx.rank])
    return grad_local, *[None] * 8


def _save_of_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.options = inputs[2:]


def _differentiate_reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Each rank's whole is added to all shards: its derivative is the whole of their derivatives."""
    differentiates = torch.is_grad_enabled() and grad.requires_grad
    sequence, _ = _gather(grad.contiguous(), unknown(grad.device), *ctx.options, [], True, differentiates)
    return sequence, *[None] * 5


_gather.register_autograd(_differentiate, setup_context=_save)
_reduce.register_autograd(_differentiate_reduce, setup_context=_save_of_reduce)
keep_order(_gather)
keep_order(_reduce)
