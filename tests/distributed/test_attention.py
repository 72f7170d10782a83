"""`dilated_attention` over real ranks against the oracle on the whole sequence, with all gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed.planner.plan import EXCHANGES
from tests.cases import differentiate
from tests.distributed.cases import ShardedCase, arguments, assert_expected, check_oracle, cut, expected_of, random_case, shards
from tests.distributed.processes import Ranks, exactly, one_size


@exactly(4)
@pytest.mark.parametrize(("number", "exchange"), list(enumerate(("auto", *EXCHANGES))))
def test_four_ranks_give_what_one_gives_with_all_gradients(ranks: Ranks, number: int, exchange: str) -> None:
    """Two and three ranks: test_doors.py; any number, in one process: test_parallel.py."""
    ranks.run(check_oracle, random_case(31676 + number, 4), exchange)


def check_compiled(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    torch._dynamo.reset()
    given = arguments(case, rank, mesh, exchange=exchange)
    attend = torch.compile(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **given), fullgraph=True, backend="aot_eager")
    dlse = expected_of(case)["dlse"][:, :, case.shard(rank)]
    for _ in range(2):
        assert_expected(case, rank, differentiate(attend, *shards(case, rank), dlse))


@pytest.mark.slow
@exactly(3)  # each of the others sends to one rank and receives from another
@pytest.mark.parametrize(
    ("exchange", "options"),
    [
        ("gather", {"batch": 1, "borders": True}),
        ("ring", {"batch": 1, "borders": True, "ignored": 0.3}),
        ("heads", {"ignored": 0.3}),
        ("gather", {"detach_weights": True}),
    ],
    ids=["gather_documents", "ring_documents", "heads_mask", "kept_outputs"],
)
def test_compiled_exchange_equals_the_oracle(ranks: Ranks, exchange: str, options: dict[str, Any]) -> None:
    case = cut(ranks.world_size, ignored=options.get("ignored"), batch=options.get("batch", 2))
    case = replace(case, pattern=replace(case.pattern, detach_weights=options.get("detach_weights", False)))
    if options.get("borders"):
        case = replace(case, borders=(0, 5, case.num_tokens - 2, case.num_tokens))
    ranks.run(check_compiled, case, exchange)


@pytest.mark.slow
@exactly(1)
def test_compiled_equals_the_oracle_on_a_mesh_of_one_rank(ranks: Ranks) -> None:
    ranks.run(check_compiled, cut(1, is_causal=True), "auto")


def check_ignored(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    options = arguments(case, rank, mesh, exchange=exchange)
    q, k, v, dout = (x.clone() for x in shards(case, rank))
    k[options["key_padding_mask"]] = torch.nan
    v[options["key_padding_mask"]] = torch.inf
    dlse = expected_of(case)["dlse"][:, :, case.shard(rank)]
    found = differentiate(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **options), q, k, v, dout, dlse)
    assert_expected(case, rank, found)


@one_size
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_ignored_keys_of_any_rank_hold_has_no_effect(ranks: Ranks, exchange: str) -> None:
    for is_causal, pattern in ((True, DilatedPattern((5, 22), (1, 3))), (False, DilatedPattern.torchscale((9, 20), (3, 5)))):
        ranks.run(check_ignored, replace(cut(ranks.world_size, ignored=0.3, is_causal=is_causal), pattern=pattern), exchange)


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
@pytest.mark.parametrize(("exchange", "dtype"), [("gather", torch.bfloat16), ("ring", torch.float16)])
def test_autocast_gives_the_dtypes_of_one_rank(ranks: Ranks, exchange: str, dtype: torch.dtype) -> None:
    ranks.run(check_autocast, cut(ranks.world_size, is_causal=True), exchange, dtype)
