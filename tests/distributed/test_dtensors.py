"""DTensors of any placements give what their whole gives, or are refused."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.distributed.planner.plan import EXCHANGES
from tests.distributed.cases import NAMES, ShardedCase, arguments, assert_expected, expected_of, grid, shards
from tests.distributed.processes import Ranks, exactly, one_size
from tests.tolerances import EXACT

TOKENS, HEADS = [Shard(1)], [Shard(2)]


def placed(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return "_".join(("batch", "tokens", "heads")[p.dim % 4] if isinstance(p, Shard) else "replicated" for p in value)


def scattered(x: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(x, mesh, placements)


def check_dtensors(
    rank: int, mesh: DeviceMesh, case: ShardedCase, placements: list[Placement], masking: str | None, exchange: str, compiled: bool
) -> None:
    mesh = grid(mesh.size()) if len(placements) == 2 else mesh
    given, expected, mask = case.named(), expected_of(case), case.mask()
    options: dict[str, Any] = {**case.options(), "exchange": exchange}
    leaves = [scattered(given[name], mesh, placements).requires_grad_() for name in "qkv"]
    held = leaves[0].placements  # dims counted from the front
    if mask is not None:
        own = [p if p.is_shard(0) or p.is_shard(1) else Replicate() for p in held]
        local = scattered(mask.byte(), mesh, own).to_local().bool()
        options["key_padding_mask"] = {
            "plain": local,
            "dtensor": DTensor.from_local(local, mesh, own, run_check=False, shape=mask.shape, stride=mask.stride()),
            "replicated": DTensor.from_local(mask, mesh, [Replicate()] * mesh.ndim, run_check=False),
        }[masking]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return dilated_attention(q, k, v, case.pattern, return_lse=True, **options)

    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out, lse = attend(*leaves)
    assert out.placements == held
    assert out.shape == given["q"].shape
    assert out.stride() == given["q"].stride()
    moved = {0: 0, 1: 2, 2: 1}
    assert lse.placements == tuple(Shard(moved[p.dim]) if isinstance(p, Shard) else p for p in held)
    weights = scattered(given["dout"], mesh, placements), scattered(expected["dlse"], mesh, lse.placements)
    grads = torch.autograd.grad((out, lse), leaves, weights)
    for name, x in zip(NAMES, (out, lse, *grads), strict=True):
        torch.testing.assert_close(x.full_tensor().detach(), expected[name], **EXACT, msg=lambda t, name=name: f"{name}: {t}")
    alone = dilated_attention(*leaves, case.pattern, **options)
    assert torch.equal(alone.full_tensor(), out.full_tensor())


def dtensor_case(**options: Any) -> ShardedCase:
    """Offsets differ from head to head; heads divide among 2, 3, 4 and 8 ranks, tokens among none, batch among 2."""
    return ShardedCase(DilatedPattern((8, 13, 41), (1, 3, 5)), shard_lengths=(41,), kv_heads=24, group=2, **{"batch": 2, **options})


@pytest.mark.parametrize(
    ("placements", "exchange", "masking"),
    [
        (TOKENS, "gather", "plain"),
        (TOKENS, "ring", "dtensor"),
        (TOKENS, "heads", None),
        ([Shard(-3)], "auto", "replicated"),
        (HEADS, "auto", "plain"),
        (HEADS, "auto", "dtensor"),
        ([Replicate()], "auto", "dtensor"),
        ([Shard(2), Shard(1)], "gather", "dtensor"),
        ([Shard(1), Shard(2)], "heads", "plain"),
        ([Shard(0), Shard(1)], "ring", "plain"),
        ([Replicate(), Shard(1)], "heads", "replicated"),
        ([Shard(0), Shard(2)], "auto", "dtensor"),
    ],
    ids=placed,
)
@exactly(4)
def test_dtensors_equal_their_whole(ranks: Ranks, placements: list[Placement], exchange: str, masking: str | None) -> None:
    case = dtensor_case(is_causal=masking == "plain", ignored=0.2 if masking else None)
    ranks.run(check_dtensors, case, placements, masking, exchange, False)


@exactly(4)
@pytest.mark.parametrize(
    ("placements", "changes"),
    [
        # As `torch.chunk` cuts 5 tokens among 4 ranks: 2, 2, 1 and none.
        *((placements, {"shard_lengths": (5,)}) for placements in (TOKENS, [Shard(2), Shard(1)], [Shard(0), Shard(1)])),
        ([Shard(2), Shard(1)], {"batch": 1, "borders": (0, 3, 30, 41)}),
    ],
    ids=placed,
)
def test_dtensors_of_empty_parts_and_documents(ranks: Ranks, placements: list[Placement], changes: dict[str, Any]) -> None:
    ranks.run(check_dtensors, replace(dtensor_case(), **changes), placements, None, "auto", False)


# Every rank traces the same graph, whatever their number: two are enough, and two axes of two.
COMPILED = [pytest.param(2, TOKENS, id="tokens-2_ranks"), pytest.param(4, [Shard(2), Shard(1)], id="heads_tokens-4_ranks")]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "placements"), COMPILED, indirect=["ranks"])
def test_compiled_dtensors_give_what_their_whole_gives(ranks: Ranks, placements: list[Placement]) -> None:
    ranks.run(check_dtensors, dtensor_case(ignored=0.2), placements, "plain", "auto", True)


def check_heads_beside_tokens(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    two = grid(mesh.size())
    rows, columns = two["rows"], two["columns"]
    place = rows.get_local_rank()
    here = case.shard(place)
    options = arguments(case, place, rows, exchange=exchange)
    *inputs, dout = shards(case, place)
    leaves = [scattered(x.contiguous(), columns, HEADS).requires_grad_() for x in inputs]
    out, lse = dilated_attention(*leaves, case.pattern, **options)
    expected = expected_of(case)
    weights = (
        scattered(dout.contiguous(), columns, HEADS),
        scattered(expected["dlse"][:, :, here].contiguous(), columns, [Shard(1)]),
    )
    grads = torch.autograd.grad((out, lse), leaves, weights)
    assert_expected(case, place, tuple(x.full_tensor().detach() for x in (out, lse, *grads)))


@exactly(4)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_dtensors_of_heads_beside_a_mesh_of_tokens(ranks: Ranks, exchange: str) -> None:
    ranks.run(check_heads_beside_tokens, replace(dtensor_case(ignored=0.2), shard_lengths=(17, 24)), exchange)


@exactly(2)
@pytest.mark.parametrize("placements", [TOKENS, HEADS], ids=placed)
def test_a_sink_of_dtensors_counts_once(rank: int, mesh: DeviceMesh, placements: list[Placement]) -> None:
    torch.manual_seed(0)
    pattern = DilatedPattern((6, 24), (1, 2))
    leaves = [torch.randn(1, 16, 4, 8, dtype=torch.float64) for _ in range(3)] + [torch.randn(4, dtype=torch.float64)]
    whole = [x.clone().requires_grad_() for x in leaves]
    parts = [scattered(x, mesh, placements if x.dim() > 1 else [Replicate()]).requires_grad_() for x in leaves]
    found = []
    for (q, k, v, sinks), attend in ((whole, reference.dilated_attention), (parts, partial(dilated_attention, return_lse=True))):
        out, lse = attend(q, k, v, pattern, is_causal=True, sinks=sinks)
        (out.sin().sum() + lse.cos().sum()).backward()
        found.append([out, lse, *(x.grad for x in (q, k, v, sinks))])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual.full_tensor(), expected, **EXACT)


@one_size
def test_dtensors_that_are_refused(rank: int, mesh: DeviceMesh) -> None:
    size = mesh.size()
    two = grid(size)
    given = replace(dtensor_case(), kv_heads=size).named()
    plain = [given[name] for name in "qkv"]
    pattern = DilatedPattern((8,), (3,))

    def refuses(error: type[Exception], match: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
        with pytest.raises(error, match=match):
            dilated_attention(q, k, v, pattern, **options)

    def all_of(placements: list[Placement], mesh: DeviceMesh = mesh) -> list[DTensor]:
        return [scattered(x, mesh, placements) for x in plain]

    q, k, v = all_of(TOKENS)
    refuses(TypeError, r"^k must be a DTensor where q, k or v is one, got Tensor$", q, plain[1], v)
    refuses(TypeError, r"^q must be a DTensor where q, k or v is one, got Tensor$", plain[0], k, v)
    refuses(ValueError, r"^mesh must be None for DTensors sharded on tokens, .* got a value$", q, k, v, mesh=mesh)
    refuses(ValueError, r"^shard_lengths must be None for DTensors sharded on tokens, .* got a value$", q, k, v, shard_lengths=[41])
    refuses(ValueError, r"^v must have the mesh and placements of q=.*Shard\(dim=1\).*Shard\(dim=2\)", q, k, all_of(HEADS)[2])
    refuses(ValueError, r"^exchange must be one of .*, got 'all'$", q, k, v, exchange="all")
    refuses(NotImplementedError, r"backend 'reference' cannot run this .*shards", q, k, v, backend="reference")
    partial = [DTensor.from_local(x, mesh, [Partial()], run_check=False) for x in plain]
    refuses(NotImplementedError, r"^q must be replicated or sharded on dim 0 .*, got P.*redistribute it first$", *partial)
    refuses(NotImplementedError, r"^q must be replicated or sharded on dim 0 .*, got S(hard)?\(.*3.*", *all_of([Shard(3)]))
    whole_mesh = all_of([Replicate(), Replicate()], two)
    refuses(ValueError, r"^mesh must (be 1-D|share no ranks)", *whole_mesh, mesh=two)
    refuses(NotImplementedError, r"^q must be sharded on the tokens by at most one axis", *all_of([Shard(1), Shard(1)], two))
    odd = [scattered(x[:, :, : size - 1], mesh, HEADS) for x in (plain[1], plain[1], plain[2])]
    refuses(NotImplementedError, rf"^heads must be a multiple of the ranks that share them={size}, got {size - 1} and", *odd)
    assert dilated_attention(*all_of(HEADS), pattern).full_tensor().shape == plain[0].shape


@one_size
def test_dtensors_that_ranks_would_count_apart_are_refused(rank: int, mesh: DeviceMesh) -> None:
    """What each rank would count from 0, or mix up, and what one rank alone has wrong."""
    torch.manual_seed(5)
    pattern, size = DilatedPattern((4, 16), (1, 2)), mesh.size()
    q = torch.randn(size, 12 * size, 2, 4)
    batch, replicated = (scattered(q, mesh, [place]) for place in (Shard(0), Replicate()))
    slopes, borders = torch.randn(size), torch.tensor([0, 12 * size])
    for options in ({"score_mod": lambda s, b, h, i, j: s + slopes[b]}, {"mask_mod": lambda b, h, i, j: slopes[b] > 0}):
        with pytest.raises(NotImplementedError, match="must be None for DTensors sharded on the batch, got a function"):
            dilated_attention(batch, batch, batch, pattern, **options)
    single = scattered(q[:1], mesh, [Shard(0)])  # all ranks but one hold no sequence
    for x in (batch, single):
        with pytest.raises(ValueError, match=r"cu_seqlens must be None for DTensors sharded on the batch, .*; redistribute q, k"):
            dilated_attention(x, x, x, pattern, cu_seqlens=borders)
    alone = dilated_attention(single, single, single, pattern)
    assert isinstance(alone, DTensor)
    torch.testing.assert_close(alone.full_tensor(), dilated_attention(q[:1], q[:1], q[:1], pattern))
    with pytest.raises(ValueError, match=r"mesh must share no ranks but this one with that of q, got \[0, 1"):
        dilated_attention(replicated, replicated, replicated, pattern, mesh=mesh)
    one = scattered(q[:1], mesh, [Shard(1)])
    whole = dilated_attention(one, one, one, pattern, cu_seqlens=scattered(borders, mesh, [Replicate()]))
    assert isinstance(whole, DTensor)
    torch.testing.assert_close(whole.full_tensor(), dilated_attention(q[:1], q[:1], q[:1], pattern, cu_seqlens=borders))
