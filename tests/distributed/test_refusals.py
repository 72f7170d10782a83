"""Bad input to sharded attention is one error on every rank."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import (
    DilatedAttention,
    DilatedKVCache,
    DilatedPattern,
    LongNet,
    LongNetConfig,
    LongNetLM,
    MultiheadDilatedAttention,
    convert,
    dilated_attention,
)
from flexdilated.distributed.planner import cost_model
from flexdilated.nn.seq2seq import CrossAttention
from tests.distributed.cases import check_sound, grid, shards, simple
from tests.distributed.processes import one_size


@one_size
def test_bad_input_is_one_error_on_every_rank(rank: int, mesh: DeviceMesh) -> None:
    size = mesh.size()
    case = simple(size)
    q, k, v, _ = shards(case, rank)
    usual = {"mesh": mesh, "shard_lengths": case.shard_lengths}

    def refuses(error: type[Exception], match: str, q: Tensor = q, k: Tensor = k, v: Tensor = v, **options: Any) -> None:
        with pytest.raises(error, match=f"^{match}"):
            dilated_attention(q, k, v, case.pattern, **{**usual, **options})

    refuses(TypeError, "mesh must be a DeviceMesh, got ProcessGroup$", mesh=mesh.get_group())
    sizes = rf"\({grid(size).size(0)}, {grid(size).size(1)}\)"
    refuses(ValueError, rf"mesh must be 1-D, got dims \('rows', 'columns'\) of sizes {sizes}; give one axis, as", mesh=grid(size))
    refuses(ValueError, r"exchange must be one of \('auto', 'gather', 'ring', 'heads'\), got 'all'$", exchange="all")
    lengths = case.shard_lengths
    refuses(ValueError, rf"shard_lengths must hold one length per rank of mesh={size}, got \(.*\)$", shard_lengths=(*lengths, 0))
    nothing = tuple(x[:, :0] for x in (q, k, v))
    refuses(ValueError, r"shard_lengths must hold at least 1 token in all, got \(0", *nothing, shard_lengths=(0,) * size)
    refuses(TypeError, r"shard_lengths must hold integers, got \(11\.0", shard_lengths=(11.0, *lengths[1:]))
    refuses(
        ValueError,
        rf"shard_lengths\[{rank}\] must be the number of tokens of this rank={lengths[rank]}, got \(.*{lengths[rank] + 1}.*\)$",
        shard_lengths=tuple(n + 1 for n in lengths),
    )
    refuses(ValueError, "q must be on the device of mesh=cpu, got meta$", *(x.to("meta") for x in (q, k, v)))
    refuses(ValueError, "k must have a number of heads that divides that of q=3, got 2$", k=k[:, :, :2], v=v[:, :, :2])
    score_mod = lambda score, b, h, i, j: score + 1.0  # noqa: E731
    text = "backend 'reference' cannot run this on .*: it computes whole sequences of all heads, not shards; use backend='sdpa'$"
    refuses(NotImplementedError, text, backend="reference")
    refuses(NotImplementedError, "backend 'flex' cannot run this on", backend="flex")
    refuses(NotImplementedError, "exchange must be 'auto', 'gather' or 'heads' with", score_mod=score_mod, exchange="ring")
    alone = DeviceMesh("cpu", [0])
    if rank:
        refuses(ValueError, rf"mesh must hold this rank, got rank {rank} and ranks \[0\]$", mesh=alone)
    else:
        out = dilated_attention(q, k, v, case.pattern, mesh=alone)
        assert torch.equal(out, dilated_attention(q, k, v, case.pattern))
    speeds = cost_model.Speeds(link=1e9) if rank == 0 else cost_model.Speeds()
    with mock.patch.object(cost_model, "speeds_of_environment", return_value=speeds):
        text = r"ranks must agree on speeds, got \[1000000000\.0, 350000000000000\.0\] on rank 0 and \[50000000000\.0, "
        refuses(ValueError, text)
    check_sound(case, rank, mesh)


PATTERN = DilatedPattern((3,), (1,))
DOORS: dict[str, Callable[..., object]] = {
    "function": lambda **o: dilated_attention(*[torch.ones(1, 7, 3, 5)] * 3, PATTERN, **o),
    "attention": lambda **o: DilatedAttention(PATTERN, **o),
    "layer": lambda **o: MultiheadDilatedAttention(6, 2, PATTERN, **o),
    "cross-attention": lambda **o: CrossAttention(6, 2, **o),
    "LongNet": lambda **o: LongNet(6, 2, 1, 1, 5, PATTERN, **o),
    "LongNetLM": lambda **o: LongNetLM(LongNetConfig(vocab_size=5, embed_dim=8, num_layers=1, num_heads=2, pattern=PATTERN), **o),
    "convert": lambda **o: convert(nn.Sequential(nn.MultiheadAttention(6, 2, batch_first=True)), PATTERN, **o),
    "cache": lambda **o: DilatedKVCache(PATTERN, batch_size=1, num_kv_heads=2, head_dim=3, **o),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_names_the_exchange_that_it_refuses(door: str) -> None:
    with pytest.raises(ValueError, match=r"^exchange must be one of \('auto', 'gather', 'ring', 'heads'\), got 'all'$"):
        DOORS[door](exchange="all")
    with pytest.raises(ValueError, match=r"^exchange must come with mesh, got 'ring' and no mesh$"):
        DOORS[door](exchange="ring")
    DOORS[door](exchange="auto")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shard_lengths": (5, 2)}, r"shard_lengths must come with mesh, got \(5, 2\) and no mesh"),
        ({"shard_lengths": 7}, "shard_lengths must come with mesh, got 7 and no mesh"),
    ],
)
def test_arguments_of_a_mesh_without_one_are_refused(options: dict[str, Any], match: str) -> None:
    q = torch.ones(1, 7, 3, 5)
    with pytest.raises(ValueError, match=f"^{match}$"):
        dilated_attention(q, q, q, DilatedPattern((3,), (1,)), **options)
    assert dilated_attention(q, q, q, DilatedPattern((3,), (1,)), exchange="auto", shard_lengths=None).shape == q.shape
