"""Random attentions over shards, what they must give, and what a rank does with them."""

import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.core.lse import accumulated
from flexdilated.distributed.planner.message_rows import messages
from flexdilated.distributed.planner.plan import ContextPlan, context_plan
from tests.cases import Case, differentiate, least_heads, poisoned_memory, run_reference, unshifted
from tests.tolerances import EXACT

NAMES = ("out", "lse", "dq", "dk", "dv")
LENGTHS = (11, 13, 0, 17, 7, 3, 19, 5)


@dataclass(frozen=True)
class ShardedCase(Case):
    """One attention of a sequence in shards; `num_tokens` is their sum, and no scale is that of the head dim."""

    kv_heads: int = 3
    shard_lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(self.shard_lengths))
        object.__setattr__(self, "scale", self.head_dim**-0.5 if self.scale is None else self.scale)

    def named(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        return dict(zip(("q", "k", "v", "dout", "dlse"), self.tensors(dtype), strict=True))  # type: ignore[arg-type]

    def mask(self) -> Tensor | None:
        return self.options().get("key_padding_mask")

    def documents(self) -> tuple[tuple[int, int], ...]:
        borders = (0, self.num_tokens) if self.borders is None else self.borders
        return tuple((a, b - a) for a, b in pairwise(borders))

    def plan(self) -> ContextPlan:
        heads = range(self.kv_heads)
        return context_plan(self.pattern, self.shard_lengths, self.kv_heads, heads, self.group, self.documents(), self.is_causal)

    def sizes(self) -> dict[str, int]:
        """The options of the planner's `bytes_received`: every number is a float64."""
        is_padded = self.ignored is not None
        return {"head_dim": self.head_dim, "itemsize": 8, "batch": self.batch, "key_padding_mask": is_padded, "lse_size": 8}

    def shard(self, rank: int) -> slice:
        begin = sum(self.shard_lengths[:rank])
        return slice(begin, begin + self.shard_lengths[rank])

    def expected(self) -> dict[str, Tensor]:
        """`out`, `lse` and gradients of the whole sequence by the oracle; `dlse` is 0 where no key reaches."""
        expected = dict(zip(NAMES, run_reference(self), strict=True))
        return expected | {"dlse": self.named()["dlse"].masked_fill(expected["lse"] == -torch.inf, 0.0)}


def random_case(seed: int, num_ranks: int, *, longest: int = 90) -> ShardedCase:
    """A case with unaligned segments, any rates, uneven and empty shards, and any of the options."""
    rng = random.Random(seed)
    tokens, branches = rng.randint(1, longest), rng.randint(1, 3)
    lengths = [rng.choice([rng.randint(1, tokens + 10), rng.randint(1, 12)]) for _ in range(branches)]
    pattern = DilatedPattern(
        tuple(lengths),
        tuple(rng.randint(1, min(length, 7)) for length in lengths),
        heads=rng.choice(["all", "all", "grouped"]),
        offsets=rng.choice(["blocked", "interleaved"]),
        zero_padding=rng.random() < 0.35,
        detach_weights=rng.random() < 0.3,
    )
    borders = None
    if rng.random() < 0.35:
        borders = (0, *sorted(rng.randint(0, tokens) for _ in range(rng.randint(1, 3))), tokens)
    cuts = [0, *sorted(rng.randint(0, tokens) for _ in range(num_ranks - 1)), tokens]
    options: dict[str, Any] = {"batch": 1 if borders else rng.choice([1, 2]), "borders": borders, "seed": seed}
    options |= {"kv_heads": max(rng.randint(1, 4), least_heads(pattern)), "group": rng.choice([1, 1, 2])}
    options |= {"head_dim": rng.choice([1, 3, 4]), "is_causal": rng.random() < 0.5, "ignored": 0.3 if rng.random() < 0.35 else None}
    options |= {"scale": rng.choice([1.0, 1.0, -0.7, 0.0]) * options["head_dim"] ** -0.5}
    return ShardedCase(unshifted(pattern), shard_lengths=tuple(b - a for a, b in pairwise(cuts)), **options)


def cut(size: int, **options: Any) -> ShardedCase:
    """Uneven shards, one of them empty, and segments that lie inside them, across one border and across all."""
    return ShardedCase(
        DilatedPattern((8, 24, 71), (1, 2, 3)), shard_lengths=LENGTHS[:size], batch=options.pop("batch", 2), group=2, **options
    )


@lru_cache(maxsize=8)
def expected_of(case: ShardedCase) -> dict[str, Tensor]:
    return case.expected()


def arguments(case: ShardedCase, rank: int, mesh: DeviceMesh, **options: Any) -> dict[str, Any]:
    mask = case.mask()
    is_even = len(set(case.shard_lengths)) == 1
    return {
        **case.options(),
        "key_padding_mask": None if mask is None else mask[:, case.shard(rank)],
        "mesh": mesh,
        "shard_lengths": None if is_even else case.shard_lengths,
        "return_lse": True,
        **options,
    }


def shards(case: ShardedCase, rank: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    given = case.named(dtype)
    return [given[name][:, case.shard(rank)] for name in ("q", "k", "v", "dout")]


def results(
    case: ShardedCase, rank: int, mesh: DeviceMesh, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Tensor, ...]:
    given = arguments(case, rank, mesh, **options)
    dlse = expected_of(case)["dlse"][:, :, case.shard(rank)].to(accumulated(dtype))
    return differentiate(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **given), *shards(case, rank, dtype), dlse)


def assert_expected(case: ShardedCase, rank: int, actual: tuple[Tensor, ...], **tolerance: float) -> None:
    for name, a in zip(NAMES, actual, strict=True):
        e = expected_of(case)[name]
        e = e[:, :, case.shard(rank)] if name == "lse" else e[:, case.shard(rank)]
        torch.testing.assert_close(a.double(), e, **(tolerance or EXACT), msg=lambda text, name=name: f"{name}: {text}")


def simple(size: int, **options: Any) -> ShardedCase:
    return ShardedCase(DilatedPattern((8, 67), (1, 2)), shard_lengths=(11, 13, 7, 5, 3, 9, 2, 4)[:size], **options)


def check_oracle(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    with poisoned_memory():
        assert_expected(case, rank, results(case, rank, mesh, exchange=exchange))


def check_sound(case: ShardedCase, rank: int, mesh: DeviceMesh) -> None:
    assert_expected(case, rank, results(case, rank, mesh))


@lru_cache(maxsize=2)
def grid(size: int) -> DeviceMesh:
    """Ranks in two axes of two or more where their number allows it."""
    rows = 2 if size % 2 == 0 else 1
    return init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("rows", "columns"))


def traffic(plan: ContextPlan, exchange: str, kind: str) -> dict[tuple[int, int], int]:
    """Rows that travel, by receiver and sender, as the receivers list them."""
    return {
        (rank, message.peer): message.num_rows
        for rank in range(plan.num_ranks)
        for message in messages(plan, exchange, kind, rank, sent=False)
    }


def executors(plan: ContextPlan, branch: int, head: int) -> list[list[tuple[int, int, int]]]:
    """Per cut segment, the parts of a head that ranks compute, `(rank, first slot, end)`; none where rows travel."""
    place = [each for each, _ in plan.branch_heads[branch].heads].index(head)
    begin, end = np.searchsorted(plan.all_segments.branch, [branch, branch + 1]).tolist()
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(begin, end)]
    for segment, first, places, rank, low, high in zip(*(x.tolist() for x in plan.parts("heads"))):
        if plan.assigned[segment] and begin <= segment < end and first <= place < first + places:
            found[segment - begin].append((rank, low, high))
    return found
