"""What ranks must share in a call of attention, beside the plan."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flexdilated.core.bounded_cache import recent
from flexdilated.core.custom_op import Flat, Inputs
from flexdilated.distributed.consistency import Fields
from flexdilated.distributed.planner import cost_model
from flexdilated.distributed.planner.plan import ContextPlan


class Terms(NamedTuple):
    """Options and sizes that ranks compare."""

    dtype: torch.dtype
    batch: int
    head_dim: int
    scale: float
    dropout_p: float
    masked: bool
    exchange: str  # as asked
    differentiable: bool
    speeds: tuple[float, float] | None  # by which an exchange is chosen
    score_mod: bool = False  # whether there is one: functions cannot be compared
    mask_mod: bool = False
    score_mod_learns: bool = False  # whether a gradient may be asked of what it holds: then there are backwards without that of q
    flex: bool = False  # whether it runs by flex_attention, whose backward sends other messages than a kernel's

    @classmethod
    def of(cls, inputs: Inputs, flat: Flat, exchange: str, *, differentiable: bool) -> Terms:
        q, masked = inputs.q, inputs.key_padding_mask is not None
        speeds = cost_model.speeds_of_environment() if exchange == "auto" else None
        return cls(q.dtype, q.shape[0], q.shape[3], flat.scale, flat.dropout_p, masked, exchange, differentiable, speeds)


@recent(size=lambda fields, plan, terms: plan.nbytes)
def fields_of(plan: ContextPlan, terms: Terms) -> Fields:
    """What ranks compare in a call; made once."""
    return Fields({"call": "dilated_attention", **plan.description, **terms._asdict(), "dtype": str(terms.dtype)})
