"""float32 over real ranks, and autocast's dtypes; lower precision: tests/distributed/test_parallel.py."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexdilated import dilated_attention
from tests.distributed.cases import ShardedCase, arguments, cut, shards
from tests.distributed.processes import Ranks, one_size


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
