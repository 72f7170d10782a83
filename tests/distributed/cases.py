"""Random attentions over shards, and what they must give."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexdilated import DilatedPattern, reference
from flexdilated.distributed.plan import ContextPlan, context_plan
from tests.cases import least_heads


@dataclass(frozen=True)
class ShardedCase:
    """One attention of a sequence in shards, as integers and options; tensors come from its seed."""

    pattern: DilatedPattern
    shard_lengths: tuple[int, ...]
    batch: int = 1
    kv_heads: int = 3
    group: int = 1
    head_dim: int = 3
    is_causal: bool = False
    ignored: float = 0.0
    borders: tuple[int, ...] | None = None
    scale_factor: float = 1.0
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.shard_lengths)

    @property
    def scale(self) -> float:
        return self.scale_factor * self.head_dim**-0.5

    def tensors(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """q, k, v, dout and dlse of the whole sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        b, n, h, d = self.batch, self.num_tokens, self.kv_heads * self.group, self.head_dim
        shapes = {"q": (b, n, h, d), "k": (b, n, self.kv_heads, d), "v": (b, n, self.kv_heads, d), "dout": (b, n, h, d)}
        drawn = {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}
        drawn["dlse"] = torch.randn(b, h, n, dtype=torch.float64, generator=generator)
        return {name: x.to(dtype) for name, x in drawn.items()}

    def mask(self) -> Tensor | None:
        """The key padding mask of the whole sequence."""
        if not self.ignored:
            return None
        return torch.rand(self.batch, self.num_tokens, generator=torch.Generator().manual_seed(self.seed + 1)) < self.ignored

    def cu_seqlens(self) -> Tensor | None:
        return None if self.borders is None else torch.tensor(self.borders)

    def documents(self) -> tuple[tuple[int, int], ...]:
        borders = (0, self.num_tokens) if self.borders is None else self.borders
        return tuple((a, b - a) for a, b in pairwise(borders))

    def plan(self) -> ContextPlan:
        heads = range(self.kv_heads)
        return context_plan(self.pattern, self.shard_lengths, self.kv_heads, heads, self.group, self.documents(), self.is_causal)

    def shard(self, rank: int) -> slice:
        begin = sum(self.shard_lengths[:rank])
        return slice(begin, begin + self.shard_lengths[rank])

    def expected(self) -> dict[str, Tensor]:
        """`out`, `lse` and gradients of the whole sequence by the oracle; `dlse` is 0 where no key reaches."""
        given = self.tensors()
        q, k, v = (given[name].requires_grad_() for name in "qkv")
        out, lse = reference.dilated_attention(
            q,
            k,
            v,
            self.pattern,
            is_causal=self.is_causal,
            scale=self.scale,
            key_padding_mask=self.mask(),
            cu_seqlens=self.cu_seqlens(),
        )
        reached = lse > -torch.inf
        dlse = given["dlse"].masked_fill(~reached, 0.0)
        ((out * given["dout"]).sum() + (lse.masked_fill(~reached, 0.0) * dlse).sum()).backward()
        grads: dict[str, Any] = {"dq": q.grad, "dk": k.grad, "dv": v.grad}
        return {"out": out.detach(), "lse": lse.detach(), "dlse": dlse, **grads}


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
    return ShardedCase(
        pattern,
        tuple(b - a for a, b in pairwise(cuts)),
        batch=1 if borders else rng.choice([1, 2]),
        kv_heads=max(rng.randint(1, 4), least_heads(pattern)),
        group=rng.choice([1, 1, 2]),
        head_dim=rng.choice([1, 3, 4]),
        is_causal=rng.random() < 0.5,
        ignored=0.3 if rng.random() < 0.35 else 0.0,
        borders=borders,
        scale_factor=rng.choice([1.0, 1.0, -0.7, 0.0]),
        seed=seed,
    )
