"""One slide over several ranks gives what it gives on one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern
from flexdilated.distributed import even_shard_lengths, shard_sequence
from flexdilated.slides.gigapath import LongNetViT, create_model
from tests.distributed.processes import Ranks, one_size
from tests.slides.encoder import draw_slides, encoder_model
from tests.tolerances import EXACT, SINGLE

# GigaPath's rates and rules, in segments that are multiples of them: ranks do not compute shifted positions.
PATTERN = DilatedPattern.torchscale((1024, 362, 128, 48, 16), (1, 2, 4, 8, 16))


def encoder_model_like(model: LongNetViT, **options: object) -> LongNetViT:
    other = encoder_model(**options)
    other.load_state_dict(model.state_dict())
    return other


def encode_over_ranks(rank: int, mesh: DeviceMesh, counts: tuple[int, ...]) -> None:
    assert create_model(None, "LongNet_8_layers_256_dim", 24, mesh=mesh).mesh is mesh
    torch.manual_seed(11)
    alone, single = encoder_model(pattern=PATTERN), encoder_model(pattern=PATTERN, global_pool=True)
    sharded = encoder_model_like(alone, mesh=mesh, pattern=PATTERN)
    x, coords = draw_slides(1, sum(counts))
    shard, places = (shard_sequence(value, mesh, shard_lengths=counts) for value in (x, coords))
    for actual, expected in zip(sharded(shard, places, True, shard_lengths=counts), alone(x, coords, True)):
        torch.testing.assert_close(actual, expected, **EXACT)
    (tokens,) = sharded(shard, places, return_tokens=True, shard_lengths=counts)
    torch.testing.assert_close(tokens, alone(x, coords, return_tokens=True)[0], **EXACT)
    pooled = encoder_model_like(single, mesh=mesh, pattern=PATTERN, global_pool=True)
    torch.testing.assert_close(pooled(shard, places, shard_lengths=counts)[0], single(x, coords)[0], **EXACT)
    with pytest.raises(NotImplementedError, match="cu_seqlens must be None with mesh, got a tensor; encode slides one by one"):
        sharded(shard, places, cu_seqlens=torch.tensor([0, shard.shape[1]]))
    with pytest.raises(NotImplementedError, match="drop_path_rate must be 0 in training with mesh"):
        sharded.train()(shard, places, shard_lengths=counts)
    sharded.eval()
    differentiate(rank, mesh, counts, alone, sharded)
    (expected,) = alone.float()(x.float(), coords)
    (actual,) = sharded.eval().float()(shard.float(), places, shard_lengths=counts)
    torch.testing.assert_close(actual, expected, **SINGLE)


def differentiate(rank: int, mesh: DeviceMesh, counts: tuple[int, ...], alone: LongNetViT, sharded: LongNetViT) -> None:
    x, coords = draw_slides(1, sum(counts))
    shard, places = (shard_sequence(value, mesh, shard_lengths=counts) for value in (x, coords))
    alone(x, coords)[0].square().sum().backward()
    # Each rank has a share of the loss of the whole slide, or one of them has it.
    for share in (1.0 / mesh.size(), float(rank == mesh.size() - 1)):
        sharded.zero_grad()
        (share * sharded(shard, places, shard_lengths=counts)[0].square().sum()).backward()
        for actual, expected in zip(sharded.parameters(), alone.parameters()):
            assert actual.grad is not None
            dist.all_reduce(actual.grad, group=mesh.get_group())
            torch.testing.assert_close(actual.grad, expected.grad, **EXACT)


@one_size
def test_a_slide_over_ranks_gives_what_it_gives_alone(ranks: Ranks) -> None:
    ranks.run(encode_over_ranks, even_shard_lengths(131, ranks.world_size))
