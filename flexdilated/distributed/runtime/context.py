"""One call over ranks: its process group, its plan, its exchange, and what the ranks compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flexdilated._version import __version__
from flexdilated.backends.measured import digest_of
from flexdilated.core.bounded_cache import recent
from flexdilated.core.call import documents
from flexdilated.core.custom_op import Inputs, OpOptions
from flexdilated.core.lse import accumulated
from flexdilated.core.tracing import answers_while_traced
from flexdilated.distributed.consistency import Fields, shown
from flexdilated.distributed.mesh import process_group
from flexdilated.distributed.planner import cost_model
from flexdilated.distributed.planner.plan import ContextPlan, context_plan
from flexdilated.distributed.runtime.transport import GroupTransport

PLANNED = ("pattern", "is_causal", "engine", "first_head", "num_kv_heads")  # in the plan's description, or free to differ


class RankContext(NamedTuple):
    """The options of a call over ranks, as plain data that an operator takes after `OpOptions`."""

    group_name: str
    rank: int
    shard_lengths: Sequence[int]
    exchange: str  # as asked
    differentiable: bool
    keeps: bool  # whether the forward keeps the rows of other ranks for the backward
    has_sinks: bool  # whose scores are not compared
    made_by: str  # as `version_and_speeds`

    def plan(self, inputs: Inputs, op_options: OpOptions) -> ContextPlan:
        """The plan of a call on some tensors."""
        lengths, num_kv_heads = tuple(int(n) for n in self.shard_lengths), inputs.k.shape[2]
        hint = "" if inputs.cu_seqlens is None else f" of all ranks, shard_lengths={shown(lengths)}"
        within = range(op_options.first_head, op_options.first_head + num_kv_heads)
        return context_plan(
            op_options.pattern,
            lengths,
            op_options.num_kv_heads,
            within=within,
            group=inputs.q.shape[2] // num_kv_heads,
            documents=documents(inputs.cu_seqlens, sum(lengths), hint),
            is_causal=op_options.is_causal,
        )

    def chosen_exchange(self, plan: ContextPlan, inputs: Inputs) -> str:
        """The exchange that is asked for, or that `"auto"` takes."""
        if self.exchange != "auto":
            return self.exchange
        q = inputs.q
        sizes = {"head_dim": q.shape[3], "itemsize": q.dtype.itemsize, "batch": q.shape[0]}
        row_sizes = {"key_padding_mask": inputs.key_padding_mask is not None, "lse_size": accumulated(q.dtype).itemsize}
        return cost_model.choose(plan, speeds=cost_model.speeds_of_environment(), **sizes, **row_sizes)

    def fields(self, plan: ContextPlan, inputs: Inputs, op_options: OpOptions, **functions: bool) -> Fields:
        """The fields that ranks compare. `functions`: whether there are functions; their code cannot be compared."""
        q = inputs.q
        no_functions = {"score_mod": False, "mask_mod": False, "score_mod_requires_grad": False, "flex": False}
        options = {
            "dtype": str(q.dtype),
            "batch": q.shape[0],
            "head_dim": q.shape[3],
            **{name: value for name, value in op_options._asdict().items() if name not in PLANNED},
            "key_padding_mask": inputs.key_padding_mask is not None,
            "sinks": self.has_sinks,
            "exchange": self.exchange,
            "differentiable": self.differentiable,
            "measurements of `flexdilated tune` (one file for all ranks, or FLEXDILATED_CACHE=off)": digest_of(q.device),
            "speeds": cost_model.speeds_of_environment() if self.exchange == "auto" else None,
            **no_functions,
            **functions,
        }
        return _fields(plan, tuple(options.items()))

    def transport(self, plan: ContextPlan, fields: Fields, device: torch.device, number: int, *, backward: bool) -> GroupTransport:
        """The transport of the forward, or of the backward, of call `number`."""
        call = f"{'the backward of ' if backward else ''}call {number} over this mesh, with {plan.pattern}"
        return GroupTransport(process_group(self.group_name), device, fields.tag(number, backward=backward), call)


@answers_while_traced
def version_and_speeds(exchange: str) -> str:
    """What the sizes of a call's outputs depend on beside its arguments; runs while a compiler traces.

    As an argument of the operator it makes compilers discard graphs on disk of another version of this library, or of other speeds.
    """
    return f"flexdilated {__version__}" + (f", {cost_model.speeds_of_environment()}" if exchange == "auto" else "")


@recent(size=lambda fields, plan, options: plan.nbytes)
def _fields(plan: ContextPlan, options: tuple[tuple[str, object], ...]) -> Fields:
    return Fields({"call": "dilated_attention", **plan.description, **dict(options)})
