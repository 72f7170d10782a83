"""Sinks over two ranks against the definition: shards of tokens, and DTensors sharded on tokens and on heads."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.core.call import EXCHANGES
from tests.distributed.processes import exactly


@exactly(2)
@pytest.mark.parametrize("way", [*EXCHANGES, "shards of tokens", "shards of heads"])
def test_a_sink_counts_once(rank: int, mesh: DeviceMesh, way: str) -> None:
    torch.manual_seed(0)
    pattern = DilatedPattern((6, 24), (1, 2))
    leaves = [torch.randn(1, 16, 4, 8, dtype=torch.float64) for _ in range(3)] + [torch.randn(4, dtype=torch.float64)]
    whole = [x.clone().requires_grad_() for x in leaves]
    out, lse = reference.dilated_attention(*whole[:3], pattern, is_causal=True, sinks=whole[3])
    expected = [out, lse, *torch.autograd.grad((out.sin().sum() + lse.cos().sum()), whole)]

    if way in EXCHANGES:
        part = slice(8 * rank, 8 * rank + 8)
        own = [*(x[:, part].clone().requires_grad_() for x in leaves[:3]), leaves[3].clone().requires_grad_()]
        out, lse = dilated_attention(*own[:3], pattern, is_causal=True, sinks=own[3], mesh=mesh, exchange=way, return_lse=True)
        (out.sin().sum() + lse.cos().sum()).backward()
        grads = [x.grad for x in own]
        dist.all_reduce(grads[3])
        actual = [out, lse, *grads]
        expected = [expected[0][:, part], expected[1][:, :, part], *(x[:, part] for x in expected[2:5]), expected[5]]
    else:
        dim = 1 if way == "shards of tokens" else 2
        own = [distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for x in leaves[:3]]
        own.append(distribute_tensor(leaves[3], mesh, [Replicate()]).requires_grad_())
        out, lse = dilated_attention(*own[:3], pattern, is_causal=True, sinks=own[3], return_lse=True)
        (out.sin().sum() + lse.cos().sum()).backward()
        actual = [x.full_tensor() for x in (out, lse, *(x.grad for x in own))]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@exactly(2)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_sinks_on_one_rank_alone_raise_on_both(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    q, pattern = torch.ones(1, 8, 4, 8), DilatedPattern((6, 24), (1, 2))
    sinks = None if rank else torch.zeros(4)
    for score_mod in (None,) if exchange == "ring" else (None, lambda score, *_: score):
        with pytest.raises(ValueError, match=r"^ranks must agree on sinks, got True on rank 0 and False on rank 1$"):
            dilated_attention(q, q, q, pattern, sinks=sinks, mesh=mesh, exchange=exchange, score_mod=score_mod)
    assert dilated_attention(q, q, q, pattern, sinks=torch.zeros(4), mesh=mesh, exchange=exchange).isfinite().all()
