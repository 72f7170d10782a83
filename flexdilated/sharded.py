"""Attention over ranks as one differentiable operation.

Both directions are opaque custom operators, communication included: the compiler sees one node each, with any exchange.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.torch_version import TorchVersion

from flexdilated.distributed.agreement import agree, in_turn, number_of_call, withdraw
from flexdilated.distributed.exchange import GroupTransport, Transport
from flexdilated.distributed.plan import ContextPlan, context_plan
from flexdilated.hardware import without_autocast
from flexdilated.merge import accumulated
from flexdilated.mixture import GRADIENT_MESSAGE, as_pattern, documents, draw_seed, rows_contiguous
from flexdilated.parallel import Call, context_backward, context_forward
from flexdilated.pattern import DilatedPattern

__all__ = ["sharded", "withdraw_from"]

TAGS = 1 << 30  # of plans and numbers of calls; gloo's tags are non-negative C ints

# Whether the compiler takes an operator whose output has a size that only its inputs' data tell.
TRACES_UNKNOWN_SIZES = TorchVersion(torch.__version__) >= "2.11"


def sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    engine: str,
    within: tuple[int, int] | None,
    group_name: str,
    rank: int,
    shard_lengths: tuple[int, ...],
    exchange: str,
) -> tuple[Tensor, Tensor]:
    """`out` `(B, n, H, D)` and `lse` `(B, H, n)` of this rank's shard, of checked arguments, both differentiable.

    Raises:
        ValueError: If the ranks disagree, or the borders of documents do not tile the tokens.
    """
    first_head, num_heads = within or (0, k.shape[2])
    differentiable = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    # How many rows the backward is left depends on where documents lie, which tracing does not know.
    keeps = differentiable and (TRACES_UNKNOWN_SIZES or cu_seqlens is None or not torch.compiler.is_compiling())
    out, lse, _, _ = _forward_op(
        q,
        k,
        v,
        key_padding_mask,
        cu_seqlens,
        draw_seed(dropout_p),
        pattern.segment_lengths,
        pattern.dilation_rates,
        pattern.heads,
        pattern.offsets,
        pattern.zero_padding,
        pattern.detach_weights,
        is_causal,
        scale,
        dropout_p,
        engine,
        first_head,
        num_heads,
        group_name,
        rank,
        shard_lengths,
        exchange,
        differentiable,
        keeps,
    )
    return out, lse


def withdraw_from(group_name: str, reason: str) -> None:
    """Tell the ranks of a group that this one takes no part, and why."""
    withdraw(_resolve(group_name), reason)


def _plan(
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    pattern: DilatedPattern,
    is_causal: bool,
    first_head: int,
    num_heads: int,
    shard_lengths: Sequence[int],
    exchange: str,
) -> tuple[ContextPlan, str]:
    """The plan of a call, and the exchange that runs it."""
    lengths = tuple(int(n) for n in shard_lengths)
    within, group = range(first_head, first_head + k.shape[2]), q.shape[2] // k.shape[2]
    plan = context_plan(pattern, lengths, num_heads, within, group, documents(cu_seqlens, sum(lengths)), is_causal)
    if exchange == "auto":
        exchange = _choice(plan, q.shape[3], q.dtype, q.shape[0], key_padding_mask is not None)
    return plan, exchange


@lru_cache(maxsize=64)
def _choice(plan: ContextPlan, head_dim: int, dtype: torch.dtype, batch: int, masked: bool) -> str:
    """The exchange that `"auto"` takes: the same integers, and so the same answer, on every rank."""
    if plan.is_local:
        return "gather"
    sizes = {"head_dim": head_dim, "itemsize": dtype.itemsize, "batch": batch}
    return plan.choose(budget=plan.default_budget(**sizes), **sizes, masked=masked, lse_size=accumulated(dtype).itemsize)


class _Terms(NamedTuple):
    """What ranks must share in a call beside the plan."""

    dtype: torch.dtype
    batch: int
    head_dim: int
    scale: float
    dropout_p: float
    masked: bool
    exchange: str  # as asked
    differentiable: bool

    @classmethod
    def of(
        cls, q: Tensor, key_padding_mask: Tensor | None, scale: float, dropout_p: float, exchange: str, differentiable: bool
    ) -> _Terms:
        return cls(q.dtype, q.shape[0], q.shape[3], scale, dropout_p, key_padding_mask is not None, exchange, differentiable)


@lru_cache(maxsize=64)
def _contract(plan: ContextPlan, terms: _Terms) -> tuple[dict[str, object], int]:
    """The plan and the terms in JSON types, and a number below `TAGS` that stands for them."""
    described = plan.description | terms._asdict() | {"dtype": str(terms.dtype)}
    digest = sha256(json.dumps(described, sort_keys=True).encode()).digest()
    return described, int.from_bytes(digest[:8], "big") % TAGS


def _tag(contract: int, number: int, *, backward: bool) -> int:
    """The tag of a call's messages: calls of one plan differ by their number, calls of two by what stands for the plan."""
    return 2 * ((contract + number) % TAGS) + backward


@torch.library.custom_op("flexdilated::context_parallel", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    heads: str,
    offsets: str,
    zero_padding: bool,
    detach_weights: bool,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    engine: str,
    first_head: int,
    num_heads: int,
    group_name: str,
    rank: int,
    shard_lengths: Sequence[int],
    exchange: str,
    differentiable: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`out`, `lse`, the rows that the backward needs, and the number of the call, which is known when it runs and not before."""
    pattern = as_pattern(segment_lengths, dilation_rates, heads, offsets, zero_padding, detach_weights)
    group = _resolve(group_name)
    try:
        plan, chosen = _plan(q, k, key_padding_mask, cu_seqlens, pattern, is_causal, first_head, num_heads, shard_lengths, exchange)
    except ValueError as error:
        withdraw(group, str(error))
        raise
    terms = _Terms.of(q, key_padding_mask, scale, dropout_p, exchange, differentiable)
    described, contract = _contract(plan, terms)
    call = Call(plan, chosen, rank, scale, dropout_p, None if seed is None else int(seed.item()), engine)
    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    with in_turn(group), without_autocast(q.device):
        agree(group, described)
        # A call that moves nothing has no number: a rank may make it alone.
        number = 0 if plan.is_local else number_of_call(group)
        transport = _transport(group, plan, q.device, _tag(contract, number, backward=False))
        out, lse, received = context_forward(q, k, v, key_padding_mask, call, transport)
    return out, lse, received if keeps else received.new_empty(0), torch.tensor(number)


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulated(q.dtype))
    received, number = q.new_empty(_received_size(q, k, *options)), torch.empty((), dtype=torch.int64, device="cpu")
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse, received, number


def _received_size(
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    *options: Any,
) -> Any:
    """Elements that the forward leaves to the backward, as far as they are known before it runs."""
    (*pattern, is_causal, _, _, _, first_head, num_heads, _, rank, shard_lengths, exchange, _, keeps) = options
    if not keeps or exchange == "ring":
        return 0
    # Where documents lie, and sizes that change from call to call, are known at run time only. Where that cannot be traced, each
    # length gets a graph of its own.
    if cu_seqlens is not None or (TRACES_UNKNOWN_SIZES and any(isinstance(n, torch.SymInt) for n in (*q.shape, *shard_lengths))):
        return torch.library.get_ctx().new_dynamic_size()
    plan, chosen = _plan(
        q, k, key_padding_mask, None, as_pattern(*pattern), is_causal, first_head, num_heads, shard_lengths, exchange
    )
    if chosen == "ring":
        return 0
    rows = [int(plan.traffic(chosen, kind).received(plan.num_ranks)[rank]) for kind in ("kv", "q")]
    kv_width = 2 * q.shape[3] + (key_padding_mask is not None)
    return q.shape[0] * (rows[0] * kv_width + rows[1] * plan.group * q.shape[3])


@torch.library.custom_op("flexdilated::context_parallel_backward", mutates_args=())
def _backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    received: Tensor,
    number: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    heads: str,
    offsets: str,
    zero_padding: bool,
    detach_weights: bool,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    engine: str,
    first_head: int,
    num_heads: int,
    group_name: str,
    rank: int,
    shard_lengths: Sequence[int],
    exchange: str,
    differentiable: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    pattern = as_pattern(segment_lengths, dilation_rates, heads, offsets, zero_padding, detach_weights)
    plan, chosen = _plan(q, k, key_padding_mask, cu_seqlens, pattern, is_causal, first_head, num_heads, shard_lengths, exchange)
    call = Call(plan, chosen, rank, scale, dropout_p, None if seed is None else int(seed.item()), engine)
    dout, q, k, v, out = (rows_contiguous(x) for x in (dout, q, k, v, out))
    terms = _Terms.of(q, key_padding_mask, scale, dropout_p, exchange, differentiable)
    tag = _tag(_contract(plan, terms)[1], int(number.item()), backward=True)
    transport = _transport(_resolve(group_name), plan, q.device, tag)
    with without_autocast(q.device):
        return context_backward(dout, dlse, q, k, v, out, lse, received, key_padding_mask, call, transport, kept=keeps)


@_backward_op.register_fake
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, v, key_padding_mask, cu_seqlens, seed, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, key_padding_mask, cu_seqlens, seed)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, received, number, key_padding_mask, cu_seqlens, seed = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    grads = _backward_op(dout, dlse, q, k, v, out, lse, received, number, key_padding_mask, cu_seqlens, seed, *ctx.options)
    return *grads, *(None for _ in range(21))


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(GRADIENT_MESSAGE)


_forward_op.register_autograd(_differentiate, setup_context=_save)
_backward_op.register_autograd(_refuse)


def _resolve(group_name: str) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined, arg-type]


class _Silence:
    """The transport of a plan that moves nothing."""

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> _Silence:
        assert not {**sends, **receives}
        return self

    def wait(self) -> None:
        """At once."""


def _transport(group: dist.ProcessGroup, plan: ContextPlan, device: torch.device, tag: int) -> Transport:
    return _Silence() if plan.is_local else GroupTransport(group, device, tag)
