"""Sinks over two ranks against the definition: shards of tokens, and DTensors sharded on tokens and on heads."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from flexdilated import DilatedPattern, dilated_attention, reference
from tests.distributed.processes import exactly


@exactly(2)
@pytest.mark.parametrize("way", ["mesh", "tokens", "heads"])
def test_a_sink_counts_once(rank: int, mesh: DeviceMesh, way: str) -> None:
    torch.manual_seed(0)
    pattern = DilatedPattern((6, 24), (1, 2))
    leaves = [torch.randn(1, 16, 4, 8, dtype=torch.float64) for _ in range(3)] + [torch.randn(4, dtype=torch.float64)]
    whole = [x.clone().requires_grad_() for x in leaves]
    out, lse = reference.dilated_attention(*whole[:3], pattern, is_causal=True, sinks=whole[3])
    expected = [out, lse, *torch.autograd.grad((out.sin().sum() + lse.cos().sum()), whole)]

    if way == "mesh":
        part = slice(8 * rank, 8 * rank + 8)
        own = [*(x[:, part].clone().requires_grad_() for x in leaves[:3]), leaves[3].clone().requires_grad_()]
        out, lse = dilated_attention(*own[:3], pattern, is_causal=True, sinks=own[3], mesh=mesh, return_lse=True)
        (out.sin().sum() + lse.cos().sum()).backward()
        grads = [x.grad for x in own]
        dist.all_reduce(grads[3])
        actual = [out, lse, *grads]
        expected = [expected[0][:, part], expected[1][:, :, part], *(x[:, part] for x in expected[2:5]), expected[5]]
    else:
        dim = 1 if way == "tokens" else 2
        own = [distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for x in leaves[:3]]
        own.append(distribute_tensor(leaves[3], mesh, [Replicate()]).requires_grad_())
        out, lse = dilated_attention(*own[:3], pattern, is_causal=True, sinks=own[3], return_lse=True)
        (out.sin().sum() + lse.cos().sum()).backward()
        actual = [x.full_tensor() for x in (out, lse, *(x.grad for x in own))]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
