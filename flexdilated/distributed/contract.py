"""What ranks must share in a call of attention, and the messages that it stands for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import torch
import torch.distributed as dist

from flexdilated.core.bounded_cache import recent
from flexdilated.core.custom_op import Flat, Inputs
from flexdilated.distributed import cost
from flexdilated.distributed.exchange import GroupTransport, Silence, Transport
from flexdilated.distributed.ledger import APART
from flexdilated.distributed.plan import ContextPlan
from flexdilated.distributed.waits import Wait

TAGS = 1 << 30  # of plans and numbers of calls; gloo's tags are non-negative C ints


class Terms(NamedTuple):
    """What ranks must share in a call beside the plan."""

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
        speeds = cost.speeds_of_environment() if exchange == "auto" else None
        return cls(q.dtype, q.shape[0], q.shape[3], flat.scale, flat.dropout_p, masked, exchange, differentiable, speeds)


@dataclass(frozen=True, eq=False)
class Contract:
    """A plan and terms: the same on all ranks that have agreed."""

    plan: ContextPlan
    described: dict[str, object]  # in JSON types
    digest: int  # below `TAGS`

    def agree(self, group: dist.ProcessGroup) -> int:
        """The number of a call, once ranks agree on it as `agreement.agree`; 0 if it moves nothing: a rank may make it alone."""
        wait = Wait(group, f"the first call with {self.plan.pattern}")
        wait.agree(self.described)
        return 0 if self.plan.is_local else wait.number()

    def transport(self, group: dist.ProcessGroup, device: torch.device, number: int, *, backward: bool) -> Transport:
        """Of the messages of one direction of the call of a number."""
        if self.plan.is_local:
            return Silence()
        call = f"call {number % APART} with {self.plan.pattern}, {self.digest:x} of plan and options"
        wait = Wait(group, f"the backward of {call}" if backward else call, number, self.described)
        return GroupTransport(group, device, self.tag(number, backward=backward), wait)

    def tag(self, number: int, *, backward: bool) -> int:
        """Of a call's messages: calls of one plan differ by their number, calls of two by what stands for the plan."""
        return 2 * ((self.digest + number) % TAGS) + backward


@recent(size=lambda contract, plan, terms: plan.nbytes)
def contract_of(plan: ContextPlan, terms: Terms) -> Contract:
    """The contract of a plan and terms; made once."""
    described = plan.description | terms._asdict() | {"dtype": str(terms.dtype)}
    digest = sha256(json.dumps(described, sort_keys=True).encode()).digest()
    return Contract(plan, described, int.from_bytes(digest[:8], "big") % TAGS)
