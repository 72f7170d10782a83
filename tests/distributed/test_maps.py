"""Attention maps of a sequence over ranks: each rank's columns of the whole map."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, attention_map
from tests.distributed.cases import LENGTHS, ShardedCase, cut, random_case
from tests.distributed.processes import exactly, one_size
from tests.tolerances import EXACT


def check_map(rank: int, mesh: DeviceMesh, case: ShardedCase, dtype: torch.dtype = torch.float64) -> None:
    q, k = (case.named(dtype)[name] for name in "qk")
    mask, here = case.mask(), case.shard(rank)
    queries = list(range(case.num_tokens))[::-3]
    options = {"queries": queries, "is_causal": case.is_causal, "scale": case.scale}
    expected = attention_map(q, k, case.pattern, key_padding_mask=mask, **options)
    options |= {"key_padding_mask": None if mask is None else mask[:, here], "mesh": mesh, "shard_lengths": case.shard_lengths}
    weights = attention_map(q[:, here], k[:, here], case.pattern, **options)
    assert weights.dtype == expected.dtype
    torch.testing.assert_close(weights, expected[..., here], **(EXACT if dtype == torch.float64 else {"atol": 1e-6, "rtol": 1e-5}))


@exactly(3)
def test_each_rank_gets_its_columns_of_the_map(rank: int, mesh: DeviceMesh) -> None:
    size = mesh.size()
    for seed in range(6):
        case = random_case(4000 * size + seed, size, longest=40)
        if case.borders is None:
            check_map(rank, mesh, case)
    shifted = ShardedCase(DilatedPattern.torchscale((11, 7), (3, 4)), shard_lengths=LENGTHS[:size], kv_heads=2)
    check_map(rank, mesh, shifted)
    near = DilatedPattern((11, 40), (1, 3), window=5, global_tokens=4)
    for is_causal in (False, True):
        check_map(rank, mesh, ShardedCase(near, shard_lengths=LENGTHS[:size], kv_heads=3, is_causal=is_causal))
    check_map(rank, mesh, cut(size, ignored=0.3), torch.bfloat16)


@one_size
def test_ranks_refuse_maps_together(rank: int, mesh: DeviceMesh) -> None:
    case = cut(mesh.size())
    q, k = (case.named()[name][:, case.shard(rank)] for name in "qk")
    given = {"mesh": mesh, "shard_lengths": case.shard_lengths}
    with pytest.raises(ValueError, match=r"^ranks must agree on queries, got \[1\] on rank 0 and \[0\] on rank"):
        attention_map(q, k, case.pattern, queries=1 if rank == 0 else 0, **given)
    with pytest.raises(ValueError, match=r"^queries\[0\] must be in \[0, N=\d+\), got \d+$"):
        attention_map(q, k, case.pattern, queries=case.num_tokens, **given)
    with pytest.raises(ValueError, match=r"^shard_lengths must come with mesh, got \(4,\) and no mesh$"):
        attention_map(q, k, case.pattern, queries=0, shard_lengths=(4,))
    # Shards that are not told to be unequal are taken for equal ones, of no token where one is empty.
    hint = rf" of {mesh.size()} equal shards; give shard_lengths where they differ"
    with pytest.raises(ValueError, match=rf"queries\[0\] must be in \[0, N=0\), got 0{hint}$"):
        attention_map(q[:, :0], k[:, :0], case.pattern, queries=0, mesh=mesh)
    check_map(rank, mesh, case)


@exactly(1, 2)
def test_compiled_models_may_ask_for_maps(rank: int, mesh: DeviceMesh) -> None:
    case = cut(mesh.size())
    q, k = (case.named()[name] for name in "qk")
    expected = attention_map(q, k, case.pattern, queries=[3, 1])

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return 2.0 * attention_map(q, k, case.pattern, queries=[3, 1], mesh=mesh, shard_lengths=case.shard_lengths)

    here = case.shard(rank)
    for _ in range(2):
        found = torch.compile(attend, backend="eager")(q[:, here], k[:, here])
        torch.testing.assert_close(found, 2.0 * expected[..., here], **EXACT)
    torch._dynamo.reset()  # the same code is compiled anew
    whole = torch.compile(attend, backend="eager", fullgraph=True)
    if mesh.size() == 1:
        torch.testing.assert_close(whole(q, k), 2.0 * expected, **EXACT)
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="fullgraph must be False with attention_map over several ranks"):
            whole(q[:, here], k[:, here])
