"""Caches dealt over ranks in one process, each a thread."""

import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flexdilated import DilatedKVCache, DilatedPattern
from flexdilated.attention import attend
from flexdilated.core.call import Call
from flexdilated.decode.ranks import Ranks as CacheRanks
from flexdilated.decode.ranks import check_same, merge_parts
from tests.decoding import BATCH, DIM, GROUP, HEADS, TOKENS, feed_all
from tests.distributed.simulation import Mail, SimulatedTransport, run_ranks


class Simulated(CacheRanks):
    """A rank whose messages go through a `Mail`; the attention of a prompt in shards, which other tests hold, is the oracle's."""

    @property
    def numbers(self) -> list[int]:
        return list(range(self.size))

    def __init__(self, rank: int, size: int, mail: Mail) -> None:
        self.rank, self.size = rank, size
        self.mesh: Any = SimpleNamespace(device_type="cpu", size=lambda: 1, get_group=lambda: SimpleNamespace(size=lambda: 1))
        self._transport = SimulatedTransport(rank, mail)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        lengths = call.shard_lengths
        assert lengths is not None
        q, k, v = (self.whole(x, lengths) for x in (q, k, v))
        out, _ = attend(q, k, v, call.replaced(shard_lengths=None, first_head=0, num_kv_heads=None, backend="auto"))
        return out.split(list(lengths), dim=1)[self.rank]

    def whole(self, x: Tensor, lengths: Any, dim: int = 1) -> Tensor:
        if x.dtype == torch.int64:  # a mail begins as NaN
            return self.whole(x.double(), lengths, dim).long()
        shapes = [[*x.shape[:dim], length, *x.shape[dim + 1 :]] for length in lengths]
        parts = {peer: x if peer == self.rank else x.new_empty(shape) for peer, shape in enumerate(shapes)}
        others = {peer: part for peer, part in parts.items() if peer != self.rank}
        self.swap(dict.fromkeys(others, x.contiguous()), others)
        return torch.cat(list(parts.values()), dim)

    def swap(self, sends: Any, receives: Any) -> None:
        self._transport.swap(sends, receives)()

    def agree(self, q: Tensor, call: Call, shard_lengths: Any) -> None: ...

    def merged(self, parts: Tensor, lengths: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        told = self.whole(lengths[None], (1,) * self.size, 0)
        check_same(told[:, : 2 * len(parts)], self.numbers)
        check_same(told[:, 2 * len(parts) :], self.numbers, "the order of the sequences of a cache")
        return merge_parts(self.whole(parts[None], (1,) * self.size, 0)), lengths


class SimulatedCache(DilatedKVCache):
    def _ranks_of(self, mesh: Any, exchange: str) -> Any:
        return mesh


def simulate(size: int, work: Callable[[Callable[..., DilatedKVCache]], Any]) -> list[Any]:
    """What `work(make)` gives on each of `size` ranks; `make` makes a cache of its rank."""
    mail = Mail()

    def of_rank(rank: int) -> Any:
        ranks = Simulated(rank, size, mail)

        def make(pattern: DilatedPattern, **options: Any) -> DilatedKVCache:
            defaults = {"batch_size": BATCH, "num_kv_heads": HEADS, "head_dim": DIM, "dtype": torch.float64}
            return SimulatedCache(pattern, mesh=ranks, **(defaults | options))

        with torch.no_grad():
            return work(make)

    return run_ranks(size, of_rank)


def draw(tokens: int = TOKENS, heads: int = HEADS, group: int = GROUP, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Queries, keys and values that all ranks draw alike, from nobody's generator."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = (heads * group, heads, heads)
    return tuple(torch.randn(BATCH, tokens, h, DIM, dtype=torch.float64, generator=generator).to(dtype) for h in sizes)


def rank_of(cache: DilatedKVCache) -> int:
    assert cache._ranks is not None
    return cache._ranks.rank


def prefill(cache: DilatedKVCache, inputs: tuple[Tensor, ...], shards: tuple[int, ...], at: int = 0, **options: Any) -> Tensor:
    start = at + sum(shards[: rank_of(cache)])
    out = cache.attend(*(x[:, start : start + shards[rank_of(cache)]] for x in inputs), shard_lengths=shards, **options)
    assert cache._ranks is not None
    return cache._ranks.whole(out, shards)


def decode(
    size: int, pattern: DilatedPattern, inputs: tuple[Tensor, ...], shards: tuple[int, ...], *borders: int, **options: Any
) -> list[Any]:
    """The outputs of a prompt in shards and of the chunks after it, on each rank."""

    def work(make: Callable[..., DilatedKVCache]) -> Tensor:
        cache = make(pattern, dtype=inputs[0].dtype)
        return torch.cat([prefill(cache, inputs, shards, **options), feed_all(cache, inputs, *borders, **options)], dim=1)

    return simulate(size, work)


def random_shards(chance: random.Random, tokens: int, size: int) -> tuple[int, ...]:
    cuts = [0, *sorted(chance.randint(0, tokens) for _ in range(size - 1)), tokens]
    return tuple(b - a for a, b in pairwise(cuts))
