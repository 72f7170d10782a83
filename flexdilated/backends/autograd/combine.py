"""Pieces read from and mixed into whole sequences, by operations that autograd differentiates and the compiler traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexdilated.core.functorch import is_transformed
from flexdilated.core.lse import accumulated, normalised
from flexdilated.core.pieces import Piece
from flexdilated.core.slabs import box


class Scattered(NamedTuple):
    """Rows by index: token numbers and key/value head numbers, two tensors of integers that broadcast to one shape `S`.

    Values at them are `(B, *S, group, ...)`. No row occurs twice.
    """

    tokens: Tensor
    heads: Tensor


PartialOutput = tuple[Piece | Scattered, Tensor, Tensor]  # where, out, lse: -inf where no key reaches


def tokens_of(piece: Piece, device: torch.device) -> Tensor:
    """`(S, C, R)`: the token of every row."""
    segment = torch.arange(piece.segments, device=device)[:, None, None] * piece.segment_stride
    row = torch.arange(piece.rows, device=device) * piece.row_stride
    return piece.token + segment + torch.arange(piece.offsets, device=device)[:, None] + row


def heads_of(piece: Piece, group: int, device: torch.device) -> Tensor:
    """`(C, G, group)`: the query head of every lane, or with `group=1` its key/value head."""
    offset = torch.arange(piece.offsets, device=device)[:, None, None] * piece.offset_head_step
    kv_head = piece.head + offset + torch.arange(piece.heads, device=device)[:, None] * piece.head_step
    return kv_head * group + torch.arange(group, device=device)


def read(x: Tensor, piece: Piece | Scattered, *, group: int = 1) -> Tensor:
    """The rows of a piece in `x` `(B, N, H, D)` as `(B, S, C, G, group, R, D)`: a view, but a copy in traced code.

    Of scattered rows, a copy.

    The compiler can neither trace the offset of a tensor in its storage nor lower a strided view of a view, and torch.func maps
    neither strides nor writing through views.
    """
    if isinstance(piece, Scattered):
        return x.unflatten(2, (-1, group))[:, piece.tokens, piece.heads]
    if torch.compiler.is_compiling() or is_transformed(x):
        tokens, heads = _index(piece, group, x.device)
        return x[:, tokens, heads]
    return box(x, piece, group=group)


def mix(layers: Sequence[Sequence[PartialOutput]], q: Tensor, group: int, *, detach_weights: bool) -> tuple[Tensor, Tensor]:
    """`lse = logsumexp_i lse_i` `(B, H, N)` and `out = sum_i exp(lse_i - lse) out_i` `(B, N, H, D)`, out in the dtype of q.

    Args:
        layers: Layers of parts that share no row, each at its own tokens: at a piece, out `(B, S, C, G, group, R, D)` and lse
            `(B, S, C, G, group, R)`. A map of the sequence is made for each layer. At least one.
        q: The queries `(B, N, H, D)`.
        group: Query heads per key/value head.
        detach_weights: Whether the weights `exp(lse_i - lse)` count as constants, as in torchscale.
    """
    by_index = torch.compiler.is_compiling() or is_transformed(*(x for layer in layers for part in layer for x in part[1:]))
    maps = []
    for layer in layers:
        template = layer[0][2] if layer else q.new_empty(0, dtype=accumulated(q.dtype))
        lses = template.new_full((*q.shape[:3], 1), -math.inf)
        for place, _, lse_i in layer:
            lses = _add(lses, place, group, lse_i[..., None], by_index, replace=True)
        maps.append(lses)
    weights, lse = normalised(torch.stack(maps)[..., 0], dim=0)  # (layers, B, N, H), (1, B, N, H)
    out = lse.new_zeros(q.shape)
    for layer, weight in zip(layers, weights.detach() if detach_weights else weights):
        for place, out_i, _ in layer:
            read_rows: Any = read if by_index or isinstance(place, Scattered) else box
            out = _add(out, place, group, out_i.to(out.dtype) * read_rows(weight[..., None], place, group=group), by_index)
    return out.to(q.dtype), lse[0].transpose(1, 2)


def _add(x: Tensor, piece: Piece | Scattered, group: int, values: Tensor, by_index: bool, *, replace: bool = False) -> Tensor:
    """`x` `(B, N, H, D)` with `values` added to, or stored in, the rows of a piece. May write into x."""
    if isinstance(piece, Scattered):
        grouped, place = x.unflatten(2, (-1, group)), (slice(None), piece.tokens, piece.heads)
        grouped[place] = values if replace else grouped[place] + values
        return x
    if by_index:
        index = _index(piece, group, x.device)
        batch = torch.arange(x.shape[0], device=x.device)[:, None, None, None, None, None]
        return x.index_put((batch, *index), values, accumulate=not replace)
    view = box(x, piece, group=group)
    _ = view.copy_(values) if replace else view.add_(values)
    return x


def unshared(x: Tensor) -> Tensor:
    """`x`, or a copy where it has a gradient and two of its elements may have the same memory address (`expand`).

    The gradient of a strided view is divided among such elements, whatever each of them was used for.
    """
    if torch.compiler.is_compiling() or not x.requires_grad or x.is_contiguous():
        return x
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size > 1):
        if stride <= reach:
            return x.contiguous()
        reach += stride * (size - 1)
    return x


def _index(piece: Piece, group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and heads that broadcast to `(S, C, G, group, R)`."""
    return tokens_of(piece, device)[:, :, None, None, :], heads_of(piece, group, device)[..., None]
