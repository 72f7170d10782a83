"""Attention maps: which keys chosen queries attend to, all branches mixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from flexdilated.core.branch import num_kept
from flexdilated.core.call import Call
from flexdilated.core.checks import check_tensors, refuse_dtypes, refuse_shards_of_torch
from flexdilated.core.functorch import is_transformed
from flexdilated.core.hardware import without_autocast
from flexdilated.core.integers import as_integer
from flexdilated.core.lse import accumulated
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.tracing import outside_graphs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from flexdilated.distributed.reductions import Sums


@torch.no_grad()
def attention_map(
    q: Tensor,
    k: Tensor,
    pattern: DilatedPattern,
    *,
    queries: SupportsIndex | Sequence[SupportsIndex] | Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    mesh: DeviceMesh | None = None,
    shard_lengths: Sequence[int] | None = None,
) -> Tensor:
    """The exact weights with which chosen queries of `dilated_attention` read every key, all branches mixed.

    >>> q, k = torch.randn(2, 1, 64, 4, 8)
    >>> weights = attention_map(q, k, DilatedPattern.causal(64, 4), queries=[0, 63])  # (B, H, Q, N)
    >>> weights.shape, bool(weights.sum(-1).allclose(torch.ones(4, 2)))
    (torch.Size([1, 4, 2, 64]), True)

    `weights[b, h, i, p]` is the factor of `v[b, p]` in `out[b, queries[i], h]`: the sum of `exp(score - lse)` over branches with
    the pair. A row sums to 1, less the part of zero keys (`DilatedPattern.zero_padding`), or to 0 for a query without keys. Sinks
    are not included: with `sinks=`, multiply a row by `exp(lse - logaddexp(lse, sinks))`, `lse` without sinks. Memory
    and time grow with N times the number of queries. No gradient.
    With `mesh`, q, k and `key_padding_mask` are this rank's contiguous shard of a longer sequence, and the weights are those of the
    keys of this rank; a row sums to 1 over all ranks.
    Source: LongNet, arXiv 2307.02486, equations 9-10.

    Args:
        q: Queries of the whole sequence, `(B, N, H, D)`, float64, float32, bfloat16 or float16, as given to `dilated_attention`.
        k: Keys, `(B, N, Hkv, D)`, `H % Hkv == 0`.
        pattern: Which positions attend to which.
        queries: Positions in `[0, N)`: an integer (0 for a leading CLS token), a sequence, or a 1-D integer tensor; any order.
        is_causal: Whether a query sees only keys at its own position and before.
        scale: Multiplies `q @ k^T`. Default: `D ** -0.5`.
        key_padding_mask: `(B, N)` bool, True where a key is ignored.
        mesh: A 1-D `DeviceMesh` whose ranks hold the sequence in their order. All ranks must call, with equal queries.
        shard_lengths: Tokens of each rank, 0 allowed, the same on all ranks. Default: as many as this rank's on every rank.

    Returns:
        `(B, H, Q, N)`, N keys of this rank, Q positions as in `queries` (1 for an integer), float32, or float64 for float64 inputs.

    Raises:
        ValueError: If a shape is wrong, a position is outside the sequence, or k has fewer heads than the pattern groups.
        TypeError: If an argument has the wrong type or dtype.
        NotImplementedError: If it is called under torch.func or forward-mode differentiation.
    """
    if is_transformed(q, k):
        raise NotImplementedError(
            "attention_map must be called outside torch.func and forward-mode differentiation, got a call under one: its weights "
            "have no derivative"
        )
    call = Call(pattern=pattern, is_causal=is_causal, scale=scale, key_padding_mask=key_padding_mask, mesh=mesh)
    if mesh is None:
        if shard_lengths is not None:
            raise ValueError(f"shard_lengths must come with mesh, got {shard_lengths} and no mesh")
        refuse_shards_of_torch(0)
        _check(q, k, call)
        return _weights(q, k, call, _positions(queries, q.shape[1]))
    from flexdilated.distributed.reductions import Sums  # one process needs no torch.distributed

    sums = Sums(mesh)
    if sums.num_ranks > 1 and torch.compiler.is_compiling():
        options = {"is_causal": is_causal, "scale": scale, "key_padding_mask": key_padding_mask, "shard_lengths": shard_lengths}
        return _map_uncompiled(q, k, pattern, queries=queries, mesh=mesh, **options)
    refuse_shards_of_torch(sums.num_ranks)
    _check(q, k, call)
    lengths = sums.lengths(q, shard_lengths)
    hint = f" of {sums.num_ranks} equal shards; give shard_lengths where they differ" if shard_lengths is None else ""
    positions = _positions(queries, sum(lengths), hint)
    fields = {
        "queries": positions,
        "pattern": pattern.to_dict(),
        "shard_lengths": lengths,
        "is_causal": is_causal,
        "scale": scale,
        "shape": [q.shape[0], *q.shape[2:]],
        "kv_heads": k.shape[2],
        "dtype": str(q.dtype),
    }
    sums.compare("attention_map", fields)
    return _weights(q, k, call, positions=positions, start=sum(lengths[: sums.rank]), num_tokens=sum(lengths), sums=sums)


@outside_graphs("fullgraph must be False with attention_map over several ranks, where it runs uncompiled")
def _map_uncompiled(*tensors: Any, **options: Any) -> Tensor:
    return attention_map(*tensors, **options)


def _check(q: Tensor, k: Tensor, call: Call) -> None:
    check_tensors(q, k, k, call)
    if k.dtype != q.dtype:
        refuse_dtypes(q, k, k)
    call.pattern.check_heads(k.shape[2])


def _weights(
    q: Tensor, k: Tensor, call: Call, positions: list[int], start: int = 0, num_tokens: int | None = None, sums: Sums | None = None
) -> Tensor:
    """The weights of the keys of this rank: tokens `start, start + 1, ...` of `num_tokens`; by default all tokens."""
    pattern, num_local, kv_heads = call.pattern, q.shape[1], k.shape[2]
    num_tokens = num_local if num_tokens is None else num_tokens
    scale = q.shape[3] ** -0.5 if call.scale is None else float(call.scale)
    dtype = accumulated(q.dtype)
    mixed = torch.full(
        (q.shape[0], kv_heads, q.shape[2] // kv_heads, len(positions), num_local), -math.inf, dtype=dtype, device=q.device
    )
    tokens = torch.arange(start, start + num_local, device=q.device)
    zero_keys = torch.zeros(kv_heads, len(positions), dtype=dtype, device="cpu")
    # Autocast would compute the scores in half precision.
    with without_autocast(q.device):
        branches, near = pattern.split("attention_map")
        sources = [_source(pattern, branch, p, num_tokens) for branch in branches for p in positions]
        query_rows = _rows(q, [*sources, *(positions if near else ())], start, sums)

        def add(branch: int, i: int, heads: slice, keys: slice) -> None:  # a branch of segments, or the near pairs
            query = query_rows[branch * len(positions) + i].unflatten(1, (kv_heads, -1))[:, heads].to(dtype) * scale
            scores = torch.einsum("bhgd,bnhd->bhgn", query, k[:, keys, heads].to(dtype))
            if call.key_padding_mask is not None:
                scores = scores.masked_fill(call.key_padding_mask[:, None, None, keys], -math.inf)
            if near and branch < len(branches):
                scores = scores.masked_fill(near.joins(positions[i], tokens[keys]), -math.inf)
            pairs = mixed[:, heads, :, i, keys]
            pairs.copy_(torch.logaddexp(pairs, scores))

        for branch, (length, rate) in enumerate(branches):
            length = min(length, num_tokens)
            padded = _padded(pattern, length, rate)
            for offset, head, step, count in pattern.head_runs(branch, kv_heads):
                heads = slice(head, head + step * (count - 1) + 1, step)
                for i, position in enumerate(positions):
                    segment, row = divmod(position, padded)
                    if row % rate != offset:
                        continue
                    first = segment * length
                    size = min(length, num_tokens - first)
                    num_seen = min(size, row + 1) if call.is_causal else size
                    if pattern.zero_padding:
                        reach = row + 1 if call.is_causal else padded
                        zero_keys[heads, i] += num_kept(reach, rate, offset) - num_kept(num_seen, rate, offset)
                    low = first + offset
                    low += max(0, -((low - start) // rate)) * rate
                    end = max(low, min(first + num_seen, start + num_local))
                    add(branch, i, heads, slice(low - start, end - start, rate))
        for i, position in enumerate(positions if near else ()):
            for keys in near.keys(position, num_tokens, is_causal=call.is_causal):
                low, end = (min(max(bound - start, 0), num_local) for bound in (keys.start, keys.stop))
                add(len(branches), i, slice(None), slice(low, end))
    lse = torch.logsumexp(mixed, dim=-1)
    if sums is not None:
        lse = sums.logsumexp(lse)
    lse = torch.logaddexp(lse, zero_keys.to(q.device).log()[None, :, None])  # (B, Hkv, group, Q)
    # Rows without any key have scores and lse of -inf: their difference would be NaN.
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    return mixed.sub_(lse[..., None]).exp_().flatten(1, 2)


def _padded(pattern: DilatedPattern, length: int, rate: int) -> int:
    """The segment length after torchscale's padding to a multiple of the rate; unchanged without `zero_padding`."""
    return length + -length % rate if pattern.zero_padding else length


def _source(pattern: DilatedPattern, branch: tuple[int, int], position: int, num_tokens: int) -> int | None:
    """The token whose query gives the output at a position; None for a query of zeros after the end of a segment."""
    length, rate = min(branch[0], num_tokens), branch[1]
    segment, row = divmod(position, _padded(pattern, length, rate))
    return segment * length + row if row < min(length, num_tokens - segment * length) else None


def _rows(q: Tensor, tokens: list[int | None], start: int, sums: Sums | None) -> list[Tensor]:
    """The queries `(B, H, D)` of some tokens, also of those that other ranks hold; zeros for None."""
    rows = [
        q[:, t - start] if t is not None and start <= t < start + q.shape[1] else q.new_zeros(q.shape[0], *q.shape[2:])
        for t in tokens
    ]
    if sums is None:
        return rows
    return list(sums.total(torch.stack(rows).to(accumulated(q.dtype))).unbind())


def _positions(queries: SupportsIndex | Sequence[SupportsIndex] | Tensor, num_tokens: int, hint: str = "") -> list[int]:
    if isinstance(queries, Tensor):
        if queries.dtype == torch.bool or queries.is_floating_point() or queries.is_complex():
            raise TypeError(f"queries must hold integers, got {queries.dtype}")
        if queries.dim() > 1:
            raise ValueError(f"queries must be one position or a 1-D tensor of them, got shape {tuple(queries.shape)}")
        positions = queries.reshape(-1).tolist()
    else:
        single = hasattr(queries, "__index__")
        if not single and (isinstance(queries, (str, bytes)) or not isinstance(queries, Sequence)):
            raise TypeError(f"queries must be an integer, a sequence or a tensor of integers, got {queries!r}")
        values: Sequence[SupportsIndex] = [queries] if single else queries  # type: ignore[assignment, list-item]
        positions = [as_integer("queries" if single else f"queries[{i}]", value) for i, value in enumerate(values)]
    if not positions:
        raise ValueError("queries must hold at least one position, got none")
    for i, position in enumerate(positions):
        if not 0 <= position < num_tokens:
            raise ValueError(f"queries[{i}] must be in [0, N={num_tokens}), got {position}{hint}")
    return positions
