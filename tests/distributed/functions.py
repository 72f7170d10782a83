"""Calls with score and mask functions over ranks in one process, each a thread."""

import threading
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import reference
from flexdilated.backends import BACKENDS
from flexdilated.backends.flex import kernel as flex
from flexdilated.core.call import Call
from flexdilated.distributed.planner import cost_model
from flexdilated.distributed.planner.row_counts import listed
from flexdilated.distributed.runtime import score_mod
from tests.backends import flex_emulation
from tests.backends.mods import Mods, run
from tests.distributed import simulation
from tests.distributed.cases import ShardedCase, random_case
from tests.distributed.simulation import Mail, SimulatedTransport, run_ranks
from tests.tolerances import EXACT

NAMES = ("out", "lse", "dq", "dk", "dv", "dtable")
EXCHANGES = ("gather", "heads")
SCORES = ("table", "alibi", "softcap", "window", None)
MASKS = ("prefix", "thirds", "one_token", None)


def drawn(seed: int, num_ranks: int, longest: int = 90) -> tuple[ShardedCase, Mods]:
    case = random_case(seed, num_ranks, longest=longest)
    case = replace(case, pattern=replace(case.pattern, zero_padding=False))
    return case, Mods(SCORES[seed % 5], MASKS[seed // 5 % 4], seed)


@lru_cache(maxsize=8)
def expected_of(case: ShardedCase, mods: Mods) -> list[Tensor]:
    return run(reference.dilated_attention, case, mods)


def weighed(case: ShardedCase, rank: int, mods: Mods, out: Tensor, lse: Tensor) -> Tensor:
    given, here = case.named(), case.shard(rank)
    reached = expected_of(case, mods)[1][:, :, here] > -torch.inf
    out, lse = out.double().cpu(), lse.double().cpu()
    return (out * given["dout"][:, here]).sum() + torch.where(reached, lse * given["dlse"][:, :, here], 0.0).sum()


def joined(parts: list[Any]) -> list[Tensor]:
    out, lse, dq, dk, dv, table = zip(*parts)
    return [torch.cat(out, 1), torch.cat(lse, 2), *(torch.cat(x, 1) for x in (dq, dk, dv)), torch.stack(table).sum(0)]


def simulate(
    case: ShardedCase, mods: Mods, exchange: str, backend: str = "sdpa", device: str = "cpu", dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Counter[Any], Counter[Any]]:
    """As `run`, and the bytes of forward and backward by (receiver, sender)."""
    plan, given, mask = case.plan(), case.named(), case.mask()
    expected_of(case, mods)  # threads would all compute it
    mail, ahead = Mail(), threading.Barrier(len(case.shard_lengths))
    moved: list[Counter[Any]] = []

    def part(rank: int) -> object:
        here = case.shard(rank)
        q, k, v = (given[name][:, here].to(device, dtype, copy=True).requires_grad_() for name in "qkv")
        table = mods.table(q.shape[2])
        options = {"key_padding_mask": None if mask is None else mask[:, here].to(device), "num_kv_heads": case.kv_heads}
        options |= {"backend": backend, **mods.functions(table.to(device, dtype))}
        call = Call(case.pattern, case.is_causal, case.scale, **options)
        context = {"plan": plan, "exchange": exchange, "rank": rank, "seed": None}
        out, lse = score_mod.attend_modified(q, k, v, call, **context, transport=lambda backward: SimulatedTransport(rank, mail))
        if ahead.wait(simulation.TIMEOUT) == 0:
            moved.append(mail.bytes)
            mail.bytes = Counter()
        ahead.wait(simulation.TIMEOUT)
        inputs = (q, k, v, table)
        grads = torch.autograd.grad(weighed(case, rank, mods, out, lse), inputs, allow_unused=True)
        grads = tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs))
        return tuple(x.detach().cpu() for x in (out, lse, *grads))

    parts = run_ranks(len(case.shard_lengths), part)
    return joined(parts), moved[0], mail.bytes


def check(case: ShardedCase, mods: Mods, exchange: str, backend: str = "sdpa") -> None:
    """The oracle's values, and the plan's bytes: a backward of whole heads sends no outputs, since autograd kept them."""
    got, *counted = simulate(case, mods, exchange, backend)
    for name, value, expected in zip(NAMES, got, expected_of(case, mods), strict=True):
        torch.testing.assert_close(value, expected, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
    plan = case.plan()
    planned = list(cost_model.bytes_received(plan, exchange, **case.sizes()))
    returned = listed(plan, exchange)["out"].sent
    planned[1] = planned[1] - returned * case.batch * plan.group * 8 * (case.head_dim + 1)
    for found, wanted in zip(counted, planned):
        assert [sum(n for (to, _), n in found.items() if to == rank) for rank in range(plan.num_ranks)] == wanted.tolist()


def emulate(patch: pytest.MonkeyPatch) -> None:
    """The kernel is the emulation, and the backend runs wherever it is asked for: only the kernel itself needs a GPU."""
    patch.setattr(flex, "call", flex_emulation.call)
    patch.setattr("flexdilated.backends.flex.backend._on_cpu", lambda q: False)
    patch.setitem(BACKENDS, "flex", lambda request: None)
