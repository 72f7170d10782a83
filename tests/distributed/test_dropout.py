"""Dropout and activation checkpointing over real ranks: independent draws, and gradients of the same ones."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed.planner.plan import EXCHANGES
from tests.cases import differentiate
from tests.distributed.cases import ShardedCase, arguments, cut, expected_of, grid, shards
from tests.distributed.processes import Ranks, exactly, one_size
from tests.tolerances import EXACT, SINGLE


def check_checkpointing(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str, dropout_p: float) -> None:
    given = arguments(case, rank, mesh, exchange=exchange, dropout_p=dropout_p)
    dlse = expected_of(case)["dlse"][:, :, case.shard(rank)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return dilated_attention(q, k, v, case.pattern, **given)

    found = []
    for call in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=False)):
        torch.manual_seed(13)
        found.append(differentiate(call, *shards(case, rank), dlse))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@one_size
@pytest.mark.parametrize(("exchange", "dropout_p"), [("gather", 0.0), ("ring", 0.3), ("heads", 0.3)])
def test_activation_checkpointing_changes_nothing(ranks: Ranks, exchange: str, dropout_p: float) -> None:
    ranks.run(check_checkpointing, cut(ranks.world_size, ignored=0.2), exchange, dropout_p)


DROPOUT_P = 0.3
BLOCK = 16  # tokens of a rank


def kept_weights(rank: int, mesh: DeviceMesh, exchange: str, is_local: bool) -> Tensor:
    """Which weights survive: `(B, H, keys, queries of this rank)` bool. Ranks have equal seeds and, where local, equal data."""
    width = BLOCK if is_local else BLOCK * mesh.size()
    q = torch.zeros(2, BLOCK, 4, width, dtype=torch.float64)
    v = torch.eye(width, dtype=torch.float64).expand(2, 4, width, width).transpose(1, 2)
    v = v if is_local else v[:, rank * BLOCK : (rank + 1) * BLOCK]
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        pattern = DilatedPattern((width,), (1,))
        out, lse = dilated_attention(q, q, v, pattern, dropout_p=DROPOUT_P, mesh=mesh, exchange=exchange, return_lse=True)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(width)), **EXACT)  # of the undropped weights
        drawn.append(out)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    kept = drawn[0] != 0
    torch.testing.assert_close(drawn[0], kept.double() / (width * (1 - DROPOUT_P)), **EXACT)
    return kept.permute(0, 2, 3, 1)


@one_size
@pytest.mark.parametrize(("exchange", "is_local"), [("gather", False), ("ring", False), ("heads", False), ("auto", True)])
def test_dropout_drops_its_share_independently_on_every_rank(ranks: Ranks, exchange: str, is_local: bool) -> None:
    kept = torch.stack(ranks.run(kept_weights, exchange, is_local))  # (ranks, B, H, keys, BLOCK)
    check_independence(kept.unflatten(3, (-1, BLOCK)).flatten(0, 3).flatten(1))  # one per pair of ranks, sequence and head


def check_independence(kept: Tensor) -> None:
    """Of which weights survive, `(blocks, weights)` bool: as many as should, and no two blocks alike."""
    blocks = kept.double()
    num_blocks, size = blocks.shape
    share = 1 - DROPOUT_P
    deviations = 6.0
    assert abs(blocks.mean().item() - share) < deviations * math.sqrt(share * (1 - share) / blocks.numel())
    alike = (blocks @ blocks.T + (1 - blocks) @ (1 - blocks).T) / size  # the share of places where two blocks agree
    chance = share**2 + (1 - share) ** 2
    others = alike[~torch.eye(num_blocks, dtype=torch.bool)]
    assert (others - chance).abs().max().item() < deviations * math.sqrt(chance * (1 - chance) / size)


def kept_weights_of_dtensors(rank: int, mesh: DeviceMesh, placements: list[Placement], compiled: bool) -> Tensor:
    """Which weights survive, `(B, H, keys, queries)` bool of the whole. Ranks have equal seeds, sequences and heads equal data."""
    mesh = grid(mesh.size()) if len(placements) == 2 else mesh
    batch, tokens, heads = 5, 13, 24
    q = torch.zeros(batch, tokens, heads, tokens, dtype=torch.float64)
    v = torch.eye(tokens, dtype=torch.float64)[:, None].expand(batch, tokens, heads, tokens)
    q, v = (distribute_tensor(x.contiguous(), mesh, placements) for x in (q, v))
    pattern = DilatedPattern((tokens,), (1,))

    def attend(q: Tensor, v: Tensor) -> Tensor:
        out = dilated_attention(q, q, v, pattern, dropout_p=DROPOUT_P)
        assert isinstance(out, Tensor)
        return out

    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.manual_seed(5)
    out = attend(q, v)
    return (out.full_tensor() != 0).permute(0, 2, 3, 1)  # type: ignore[attr-defined]


@one_size
@pytest.mark.parametrize("placements", [[Shard(2)], [Shard(0), Shard(1)], [Replicate(), Shard(0)]], ids=str)
def test_dropout_of_dtensors_is_independent_on_every_shard(ranks: Ranks, placements: list[Placement]) -> None:
    check_dtensors(ranks, placements, False)


@pytest.mark.slow
@exactly(2)
def test_compiled_dropout_of_dtensors_is_independent_on_every_shard(ranks: Ranks) -> None:
    check_dtensors(ranks, [Shard(0)], True)


def check_dtensors(ranks: Ranks, placements: list[Placement], compiled: bool) -> None:
    kept = ranks.run(kept_weights_of_dtensors, placements, compiled)
    check_independence(kept[0].flatten(0, 1).flatten(1))
    assert all(torch.equal(each, kept[0]) for each in kept)  # replicas drop the same


def directional(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> tuple[float, float]:
    """This rank's terms of the derivative along a random direction: by differences, and by its gradients."""
    given = arguments(case, rank, mesh, exchange=exchange, dropout_p=DROPOUT_P)
    *inputs, dout = shards(case, rank)
    dlse = expected_of(case)["dlse"][:, :, case.shard(rank)]
    along = shards(replace(case, seed=case.seed + 1), rank)[:3]
    step = 1e-5

    def loss(sign: float) -> float:
        torch.manual_seed(rank)
        moved = [x + sign * step * t for x, t in zip(inputs, along)]
        out, lse = dilated_attention(*moved, case.pattern, **given)
        return ((out * dout).sum() + (lse * dlse)[dlse != 0].sum()).item()

    torch.manual_seed(rank)
    grads = differentiate(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **given), *inputs, dout, dlse)[2:]
    return (loss(1.0) - loss(-1.0)) / (2 * step), sum((g * t).sum().item() for g, t in zip(grads, along))


@one_size
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_gradients_under_dropout_are_those_of_the_same_masks(ranks: Ranks, exchange: str) -> None:
    differences, products = zip(*ranks.run(directional, cut(ranks.world_size, is_causal=True, ignored=0.2), exchange))
    torch.testing.assert_close(torch.tensor(sum(products)), torch.tensor(sum(differences)), **SINGLE)
