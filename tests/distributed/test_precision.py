"""Low precision over real ranks: no worse than plain PyTorch, and autocast's dtypes."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed.planner.plan import EXCHANGES
from tests.cases import differentiate, run_plain, run_reference
from tests.distributed.cases import (
    NAMES,
    ShardedCase,
    arguments,
    assert_expected,
    cut,
    results,
    shards,
)
from tests.distributed.processes import Ranks, one_size
from tests.tolerances import HALF_LSE, SINGLE, assert_twice_naive

HALF_CASES = {  # no empty row, for plain PyTorch to compute
    "three": ShardedCase(DilatedPattern((31, 101, 257), (1, 3, 7)), shard_lengths=(263,), batch=2, kv_heads=7, head_dim=24),
    "gqa": ShardedCase(
        DilatedPattern((67, 263), (1, 5)), shard_lengths=(211,), batch=2, kv_heads=2, group=3, head_dim=48, is_causal=True
    ),
}


def divided(case: ShardedCase, size: int) -> ShardedCase:
    """The case in shards of random lengths."""
    rng = random.Random(size)
    borders = [0, *sorted(rng.randint(0, case.num_tokens) for _ in range(size - 1)), case.num_tokens]
    return replace(case, shard_lengths=tuple(b - a for a, b in pairwise(borders)))


def results_alone(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    given = arguments(case, rank, mesh, exchange=exchange)
    return differentiate(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **given), *shards(case, rank, dtype))


@lru_cache(maxsize=4)
def naive_and_expected(name: str, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Plain PyTorch in the dtype, and the oracle, from the same rounded inputs."""
    case = replace(HALF_CASES[name], lse_gradient=False)
    return run_plain(case, dtype), run_reference(case, dtype)


@one_size
@pytest.mark.parametrize(
    ("name", "dtype", "exchange"),
    [
        ("three", torch.bfloat16, "gather"),
        ("three", torch.float16, "ring"),
        ("gqa", torch.bfloat16, "ring"),
        ("gqa", torch.float16, "heads"),
    ],
)
def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch(
    ranks: Ranks, name: str, dtype: torch.dtype, exchange: str
) -> None:
    parts = ranks.run(results_alone, divided(HALF_CASES[name], ranks.world_size), exchange, dtype)
    naive, expected = naive_and_expected(name, dtype)
    for i, result in enumerate(NAMES):
        actual = torch.cat([part[i] for part in parts], dim=2 if result == "lse" else 1)
        if result == "lse":
            torch.testing.assert_close(actual.double(), expected[i], **HALF_LSE)
        else:
            assert actual.dtype == dtype
            assert_twice_naive(actual, naive[i], expected[i])


def check_single(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    actual = results(case, rank, mesh, torch.float32, exchange=exchange)
    assert all(x.dtype == torch.float32 for x in actual)
    assert_expected(case, rank, actual, **SINGLE)


@one_size
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_float32_equals_the_oracle(ranks: Ranks, exchange: str) -> None:
    case = replace(cut(ranks.world_size, ignored=0.2), pattern=DilatedPattern.torchscale((7, 16, 41), (1, 5, 3)))
    ranks.run(check_single, case, exchange)


def check_autocast(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str, dtype: torch.dtype) -> None:
    given = arguments(case, rank, mesh, exchange=exchange)
    *inputs, dout = shards(case, rank, torch.float32)
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.autocast("cpu", dtype):
        out, lse = dilated_attention(*leaves, case.pattern, **given)
    whole = case.tensors(torch.float32)[:3]
    with torch.autocast("cpu", dtype):
        out_alone, lse_alone = dilated_attention(*whole, case.pattern, is_causal=case.is_causal, return_lse=True)
    assert (out.dtype, lse.dtype) == (out_alone.dtype, lse_alone.dtype) == (dtype, torch.float32)
    grads = torch.autograd.grad(out, leaves, dout.to(dtype))
    assert all(x.dtype == torch.float32 for x in grads)
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel):
            results = []
            for autocast, cast in ((True, leaves), (False, [x.to(dtype).requires_grad_() for x in inputs])):
                with torch.autocast("cpu", dtype, enabled=autocast):
                    out, lse = dilated_attention(*cast, case.pattern, **given)
                    results.append((out, lse, *(x.to(dtype) for x in torch.autograd.grad(out, cast, dout.to(dtype)))))
        assert all(torch.equal(a, e) for a, e in zip(*results))
    with torch.autocast("cpu", dtype):
        exact = dilated_attention(*shards(case, rank)[:3], case.pattern, **given)[0]
    assert exact.dtype == torch.float64


@one_size
@pytest.mark.parametrize(("exchange", "dtype"), [("gather", torch.bfloat16), ("ring", torch.float16), ("heads", torch.bfloat16)])
def test_autocast_gives_the_dtypes_of_one_rank(ranks: Ranks, exchange: str, dtype: torch.dtype) -> None:
    ranks.run(check_autocast, cut(ranks.world_size, is_causal=True), exchange, dtype)
