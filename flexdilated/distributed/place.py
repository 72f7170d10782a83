"""Where a call over ranks runs, its plan, and the exchange that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from flexdilated._version import __version__
from flexdilated.core.bounded_cache import recent
from flexdilated.core.call import documents
from flexdilated.core.custom_op import Flat
from flexdilated.core.hardware import answers_while_traced
from flexdilated.core.lse import accumulated
from flexdilated.distributed.consistency import shown
from flexdilated.distributed.planner import cost_model
from flexdilated.distributed.planner.plan import ContextPlan, context_plan


class Place(NamedTuple):
    """Where a call runs, as its operator takes it."""

    group_name: str
    rank: int
    shard_lengths: Sequence[int]
    exchange: str
    differentiable: bool
    keeps: bool  # whether the forward leaves the rows of other ranks to the backward
    made_by: str  # as `made_by`


@answers_while_traced
def made_by(exchange: str) -> str:
    """What the sizes of a call's tensors depend on beside its arguments; runs while a compiler traces.

    It is an argument, so that a graph that was kept on disk is not taken under another version of this library or other speeds.
    """
    return f"flexdilated {__version__}" + (f", {cost_model.speeds_of_environment()}" if exchange == "auto" else "")


def resolve(group_name: str) -> dist.ProcessGroup:
    """The process group of a name."""
    return distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined, arg-type]


def plan_of(flat: Flat, place: Place, kv_heads: int, group: int, cu_seqlens: Tensor | None = None) -> ContextPlan:
    """The plan of a call on tensors of some key/value heads."""
    lengths = tuple(int(n) for n in place.shard_lengths)
    where = "" if cu_seqlens is None else f" of all ranks, shard_lengths={shown(lengths)}"
    spans = documents(cu_seqlens, sum(lengths), where)
    within = range(flat.first_head, flat.first_head + kv_heads)
    return context_plan(flat.pattern, lengths, flat.num_heads, within, group, spans, flat.is_causal)


def exchange_of(plan: ContextPlan, place: Place, head_dim: int, dtype: torch.dtype, batch: int, masked: bool) -> str:
    """The exchange that a call asks for, or that `"auto"` takes."""
    if place.exchange != "auto":
        return place.exchange
    return _choice(plan, head_dim, dtype, batch, masked, cost_model.speeds_of_environment())


@recent(size=lambda choice, plan, *sizes: plan.nbytes)
def _choice(plan: ContextPlan, head_dim: int, dtype: torch.dtype, batch: int, masked: bool, speeds: cost_model.Speeds) -> str:
    """The exchange that `"auto"` takes: the same integers, and so the same answer, on every rank."""
    if plan.is_local:
        return "gather"
    sizes = {"head_dim": head_dim, "itemsize": dtype.itemsize, "batch": batch}
    budget, lse_size = cost_model.default_budget(plan, **sizes), accumulated(dtype).itemsize
    return cost_model.choose(plan, budget=budget, speeds=speeds, **sizes, masked=masked, lse_size=lse_size)
