"""Shards that torch's own context parallelism cuts: contiguous ones are taken, head-tail ones never."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import _attention, context_parallel

from flexdilated import DilatedPattern, attention_map, dilated_attention
from flexdilated.distributed import shard_sequence, unshard_sequence
from tests.distributed.processes import exactly, one_size
from tests.tolerances import EXACT

PATTERN = DilatedPattern((8, 31), (1, 3))
HEAD_TAIL = r"^mesh must come with contiguous shards, got shards that torch's context_parallel cut head-tail by its load balancer"


def alone(x: torch.Tensor) -> torch.Tensor:
    return dilated_attention(x, x, x, PATTERN)


@exactly(1, 2)
def test_shards_inside_torchs_context(rank: int, mesh: DeviceMesh) -> None:
    generator = torch.Generator().manual_seed(4)
    tokens = 12 * mesh.size()
    whole = torch.randn(2, tokens, 3, 4, generator=generator, dtype=torch.float64)
    expected = dilated_attention(whole, whole, whole, PATTERN)
    x = whole.clone()
    if mesh.size() == 1:
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            torch.testing.assert_close(dilated_attention(x, x, x, PATTERN), expected, **EXACT)
        return
    compiled = torch.compile(lambda q: dilated_attention(q, q, q, PATTERN, mesh=mesh), backend="eager")
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        assert x.shape[1] == 12
        others = (lambda q: attention_map(q, q, PATTERN, queries=3, mesh=mesh), lambda q: unshard_sequence(q, mesh))
        for call in (compiled, lambda q: dilated_attention(q, q, q, PATTERN, mesh=mesh), *others):
            with pytest.raises(ValueError, match=HEAD_TAIL):
                call(x)
        for call in (torch.compile(alone, backend="eager"), alone, lambda q: attention_map(q, q, PATTERN, queries=3)):
            with pytest.raises(ValueError, match=r"^mesh must be given inside torch's context_parallel, .*, got None$"):
                call(x)
    balances = _attention._cp_options.enable_load_balance
    _attention._cp_options.enable_load_balance = False
    try:
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            out = dilated_attention(x, x, x, PATTERN, mesh=mesh)
    finally:
        _attention._cp_options.enable_load_balance = balances
    torch.testing.assert_close(out, shard_sequence(expected, mesh), **EXACT)
    assert torch.equal(dilated_attention(whole, whole, whole, PATTERN), expected)  # outside of it nothing is refused


@one_size
def test_shards_of_torchs_function(rank: int, mesh: DeviceMesh) -> None:
    """The newer function of torch, which leaves a word behind."""
    shard = getattr(_attention, "_context_parallel_shard", None)
    if shard is None or not hasattr(_attention, "_HeadTailLoadBalancer"):
        return
    module = __import__("sys").modules[shard.__module__]
    before = module._dispatch_mode, module._cp_options.enable_load_balance
    whole = torch.randn(2, 12 * mesh.size(), 3, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    try:
        (x,) = shard(mesh, [whole], [1], _attention._HeadTailLoadBalancer(whole.shape[1], mesh.size(), "cpu"))
        with pytest.raises(ValueError, match=HEAD_TAIL):
            dilated_attention(x, x, x, PATTERN, mesh=mesh)
        assert dilated_attention(x, x, x, PATTERN).shape == x.shape
        (x,) = shard(mesh, [whole], [1])
        expected = shard_sequence(dilated_attention(whole, whole, whole, PATTERN), mesh)
        torch.testing.assert_close(dilated_attention(x, x, x, PATTERN, mesh=mesh), expected, **EXACT)
    finally:
        module._dispatch_mode, module._cp_options.enable_load_balance = before
