"""Sequences cut in shards and put together again: refusals in one process on a fake group, the rest over real ranks."""

import re
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from flexdilated.distributed import even_shard_lengths, gather_tokens, shard_sequence, unshard_sequence
from flexdilated.distributed.mesh import group_of
from flexdilated.distributed.sharding import local_shard_lengths
from tests.distributed.processes import WORLD_SIZES, exactly
from tests.tolerances import EXACT

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
# None: equal shards, not declared.
LENGTHS: dict[int, list[tuple[int, ...] | None]] = {
    1: [None, (7,), (0,)],
    2: [None, (5, 2), (0, 7), (7, 0), (0, 0)],
    3: [None, (2, 3, 5), (3, 0, 4), (0, 0, 5), (4, 0, 0)],
}


class Pair(NamedTuple):
    tokens: Tensor
    labels: Tensor | None


def draw(shape: list[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The same on every rank; all bytes of an element matter."""
    generator = torch.Generator().manual_seed(2307 + seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 2**62, shape, generator=generator).to(dtype)


def part(x: Tensor, rank: int, lengths: tuple[int, ...], dim: int) -> Tensor:
    borders = [0, *accumulate(lengths)]
    return x.index_select(dim, torch.arange(borders[rank], borders[rank + 1]))


def check_values(rank: int, mesh: DeviceMesh, declared: tuple[int, ...] | None) -> None:
    lengths = (5,) * mesh.size() if declared is None else declared
    layouts = ((0, [0]), (1, [3, 0]), (1, [3, 0, 2, 1]), (-1, [2, 3, 0]), (2, [1, 2, 0, 3]))
    for number, dtype in enumerate((*DTYPES, torch.complex64)):
        for dim, shape in layouts if dtype == torch.bfloat16 else [layouts[number % 5]]:
            shape = list(shape)
            shape[dim] = sum(lengths)
            whole = draw(shape, torch.float64).to(dtype) if dtype.is_complex else draw(shape, dtype)
            local = shard_sequence(whole, mesh, dim=dim, shard_lengths=declared)
            assert torch.equal(local, part(whole, rank, lengths, dim % len(shape)))
            assert local.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()  # a view
            back = unshard_sequence(local, mesh, dim=dim, shard_lengths=declared)
            assert back.dtype == dtype
            assert back.is_contiguous()
            assert torch.equal(back, whole)
    moved = draw([sum(lengths), 3, 2], torch.float32).mT.transpose(0, 1)  # (2, N, 3), transposed in memory
    assert torch.equal(unshard_sequence(shard_sequence(moved, mesh, shard_lengths=declared), mesh, shard_lengths=declared), moved)


def check_batches(rank: int, mesh: DeviceMesh, declared: tuple[int, ...] | None) -> None:
    lengths = (5,) * mesh.size() if declared is None else declared
    n = sum(lengths)
    a, b, c, d = (draw([2, n, *rest], dtype, i) for i, (rest, dtype) in enumerate([([], torch.int64), ([], torch.bool)] * 2))
    batch = OrderedDict(pair=Pair(a, b), rest=[c, (d, None)], plain={"name": "x", "step": 3, "last": Pair(a, None)})
    local = shard_sequence(batch, mesh, shard_lengths=declared)
    assert isinstance(local, OrderedDict)
    assert isinstance(local["pair"], Pair)
    assert (local["plain"]["name"], local["plain"]["step"], local["plain"]["last"].labels) == ("x", 3, None)
    for whole, shard in ((a, local["pair"].tokens), (b, local["pair"].labels), (c, local["rest"][0]), (d, local["rest"][1][0])):
        assert torch.equal(shard, part(whole, rank, lengths, 1))
    back = unshard_sequence(local, mesh, shard_lengths=declared)
    assert isinstance(back["plain"]["last"], Pair)
    for whole, x in ((a, back["pair"].tokens), (b, back["pair"].labels), (c, back["rest"][0]), (d, back["rest"][1][0])):
        assert torch.equal(x, whole)
    assert back["rest"][1][1] is None


def check_gradients(
    rank: int, mesh: DeviceMesh, declared: tuple[int, ...] | None, *, is_compiled: bool, reduces: bool = False
) -> None:
    lengths = (5,) * mesh.size() if declared is None else declared

    def function(x: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        local = shard_sequence(x, mesh, shard_lengths=declared)
        return local, unshard_sequence(local.sin(), mesh, shard_lengths=declared, reduce_gradients=reduces)

    if is_compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = draw([2, sum(lengths), 3], torch.float64).requires_grad_()
    local, whole = function(x, mesh)
    assert torch.equal(local, part(x, rank, lengths, 1))
    assert torch.equal(whole, x.sin())
    weights = [draw([2, sum(lengths), 3], torch.float64, seed=100 + each) for each in range(mesh.size())]
    (whole * weights[rank]).sum().backward()  # another loss on every rank
    weight = torch.stack(weights).sum(0) if reduces else weights[rank]
    expected = torch.zeros_like(weight)
    start = sum(lengths[:rank])
    expected[:, start : start + lengths[rank]] = part(weight * x.detach().cos(), rank, lengths, 1)
    if reduces:
        torch.testing.assert_close(x.grad, expected, **EXACT)
    else:
        assert torch.equal(x.grad, expected)  # of this rank's own loss, and of no part but its own


def check_second_derivatives(rank: int, mesh: DeviceMesh, declared: tuple[int, ...] | None) -> None:
    lengths = (5,) * mesh.size() if declared is None else declared
    x = draw([2, sum(lengths), 3], torch.float64)
    weights = [draw([2, sum(lengths), 3], torch.float64, seed=100 + each) for each in range(mesh.size())]
    whole, mine = x.clone().requires_grad_(), part(x, rank, lengths, 1).clone().requires_grad_()

    def second(loss: Tensor, x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (found,) = torch.autograd.grad(first.pow(3).sum(), x)
        return found

    loss = (weights[rank] * unshard_sequence(mine.sin(), mesh, shard_lengths=declared, reduce_gradients=True).exp()).sum()
    expected = second((torch.stack(weights).sum(0) * whole.sin().exp()).sum(), whole)
    torch.testing.assert_close(second(loss, mine), part(expected, rank, lengths, 1), **EXACT)


def check_tokens(rank: int, mesh: DeviceMesh, declared: tuple[int, ...] | None) -> None:
    """One token of each of three sequences, wherever it lies, with the gradient of each rank's own loss."""
    lengths = (5,) * mesh.size() if declared is None else declared
    n = sum(lengths)
    for positions in () if n == 0 else (torch.tensor([0, n - 1, n // 2]), torch.tensor([n - 1] * 3), torch.arange(3) % n):
        whole = draw([3, n, 2], torch.float64)
        x = part(whole, rank, lengths, 1).requires_grad_()
        kept = torch.zeros_like(whole)
        for i, p in enumerate(positions.tolist()):
            kept[i, p] = 1.0
        of_ranks = [2.0 + each for each in range(mesh.size())]
        for reduces, factor in ((False, of_ranks[rank]), (True, sum(of_ranks))):
            x.grad = None
            found = gather_tokens(x, positions, mesh, shard_lengths=declared, reduce_gradients=reduces)
            assert torch.equal(found, torch.stack([whole[[i], p] for i, p in enumerate(positions.tolist())]))
            (found * of_ranks[rank]).sum().backward()
            assert torch.equal(x.grad, part(factor * kept, rank, lengths, 1))


@exactly(*(size for size in WORLD_SIZES if size in LENGTHS))
def test_sequences_are_cut_and_put_together_exactly(rank: int, mesh: DeviceMesh) -> None:
    assert group_of(mesh)[1:] == (rank, mesh.size())
    for declared in LENGTHS[mesh.size()]:
        check_values(rank, mesh, declared)
        check_batches(rank, mesh, declared)
        check_gradients(rank, mesh, declared, is_compiled=False)
        check_gradients(rank, mesh, declared, is_compiled=False, reduces=True)
        check_second_derivatives(rank, mesh, declared)
        check_tokens(rank, mesh, declared)
    for declared, reduces in (((5, 2), False), ((0, 7), True)) if mesh.size() == 2 else ():
        check_gradients(rank, mesh, declared, is_compiled=True, reduces=reduces)


@exactly(3)
def test_meshes_of_some_ranks_cut_and_change_under_compiled_functions(rank: int, mesh: DeviceMesh) -> None:
    pair = DeviceMesh("cpu", [0, 2])
    world = DeviceMesh("cpu", [0, 1, 2])
    if rank == 1:
        with pytest.raises(ValueError, match=r"^mesh must hold this rank, got rank 1 and ranks \[0, 2\]$"):
            group_of(pair)
    else:
        assert group_of(pair)[1:] == (rank // 2, 2)
        x = draw([1, 6], torch.int64)
        assert torch.equal(shard_sequence(x, pair), x[:, 3 * (rank // 2) : 3 * (rank // 2) + 3])
        assert torch.equal(unshard_sequence(shard_sequence(x, pair), pair), x)
    torch._dynamo.reset()
    function = torch.compile(lambda x, mesh: shard_sequence(x, mesh) + group_of(mesh)[2], fullgraph=True, backend="aot_eager")
    x = torch.arange(6)[None]
    for mesh in (world, pair, world) if rank != 1 else (world, world):
        assert torch.equal(function(x, mesh), shard_sequence(x, mesh) + mesh.size())


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Three ranks of a fake group, of which this process is number 1."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        yield init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()


def test_even_shard_lengths_give_the_first_ranks_one_more() -> None:
    for given, expected in (((7, 3), (3, 2, 2)), ((2, 5), (1, 1, 0, 0, 0)), ((0, 2), (0, 0)), ((10**9, 1), (10**9,))):
        assert even_shard_lengths(*given) == expected


X, FIRST = torch.zeros(2, 7, 3), torch.zeros(2, dtype=torch.int64)
OF_BATCHES: list[tuple[object, dict[str, int], type[Exception], str]] = [
    ({"a": torch.zeros(2, 6), "b": torch.zeros(2, 3)}, {}, ValueError, r"tensors of one length along dim=1, got lengths \[6, 3\]$"),
    ([torch.zeros(2, 6), torch.zeros(6)], {}, ValueError, r"tensors with dim=1, got shape \(6,\)$"),
    (torch.zeros(2, 6), {"dim": -3}, ValueError, r"tensors with dim=-3, got shape \(2, 6\)$"),
    ({"a": None}, {}, TypeError, r"a tensor, got dict$"),
    (UserDict(a=torch.zeros(2, 6)), {}, TypeError, r".* and tuples, got UserDict; give dict\(\.\.\.\) of it$"),
    ([torch.zeros(2, 6), torch.zeros(2, 6).numpy()], {}, TypeError, r"tensors in dicts, lists and tuples, got ndarray$"),
]
REFUSED: list[tuple[Callable[[DeviceMesh], object], type[Exception], str]] = [
    (lambda _: even_shard_lengths(-1, 2), ValueError, r"num_tokens must be at least 0, got -1$"),
    (lambda _: even_shard_lengths(7, 0), ValueError, r"num_ranks must be at least 1, got 0$"),
    (lambda mesh: shard_sequence(X, mesh), ValueError, r"num_tokens must be a multiple of the ranks of mesh=3, got 7; give"),
    *(
        (lambda mesh, lengths=lengths: shard_sequence(X, mesh, shard_lengths=lengths), error, f"shard_lengths must {text}")
        for lengths, error, text in (
            ((1, 2), ValueError, r"hold one length per rank of mesh=3, got \(1, 2\)$"),
            ((9, -2, 0), ValueError, r"not be negative, got \(9, -2, 0\)$"),
            ((3, 3, 2), ValueError, r"sum to num_tokens=7, got \(3, 3, 2\) of sum 8$"),
            ((3.0, 2, 2), TypeError, r"hold integers, got \("),
            ((True, 3, 3), TypeError, r"hold integers, got \("),
            (7, TypeError, r"be a sequence of integers, got 7$"),
        )
    ),
    *(
        (call, ValueError, rf"shard_lengths\[1\] must be the number of tokens of this rank={n}, got \(3, 2, 2\)$")
        for n, call in (
            (3, lambda mesh: local_shard_lengths(mesh, 3, (3, 2, 2))),
            (3, lambda mesh: unshard_sequence(torch.zeros(1, 3), mesh, shard_lengths=(3, 2, 2))),
            (7, lambda mesh: gather_tokens(X, FIRST, mesh, shard_lengths=(3, 2, 2))),
        )
    ),
    (lambda mesh: gather_tokens(X[..., 0], FIRST, mesh), ValueError, r"x_local must have shape \(B, n, E\), got \(2, 7\)$"),
    (lambda mesh: gather_tokens(X, FIRST[:, None], mesh), ValueError, r"positions must have shape \(B,\)=\(2,\), got \(2, 1\)$"),
    *(
        (lambda mesh, at=at: gather_tokens(X, at, mesh), TypeError, rf"positions must be an int64 or int32 tensor, got {got}$")
        for at, got in (([0, 0], "list"), (FIRST.double(), "torch.float64"), (FIRST.bool(), "torch.bool"))
    ),
    *(
        (lambda mesh, at=at: gather_tokens(X, FIRST + at, mesh), RuntimeError, r".*positions must be in \[0, N=21\), got others")
        for at in (21, -1)
    ),
    *(
        (lambda mesh, call=call, batch=batch, given=given: call(batch, mesh, **given), error, f"batch must hold {text}")
        for call in (shard_sequence, unshard_sequence)
        for batch, given, error, text in OF_BATCHES
    ),
    (lambda _: group_of("cp"), TypeError, r"mesh must be a DeviceMesh, got str$"),
    (lambda _: group_of(DeviceMesh("cpu", [0, 2])), ValueError, r"mesh must hold this rank, got rank 1 and ranks \[0, 2\]$"),
    (lambda _: group_of(DeviceMesh("cpu", [1, 0])), ValueError, r"mesh must list its ranks in ascending order, got \[1, 0\]$"),
    (lambda _: group_of(DeviceMesh("cpu", [[0, 1, 2]])), ValueError, r"mesh must be 1-D, got dims None of sizes \(1, 3\); give"),
    (
        lambda _: shard_sequence(torch.zeros(2, 6), init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "cp"))),
        ValueError,
        r"mesh must be 1-D, got dims \('dp', 'cp'\) of sizes \(3, 1\); give one axis, as mesh\['cp'\]$",
    ),
]


def test_what_cannot_be_cut_or_put_together_is_refused(mesh: DeviceMesh) -> None:
    for number, (call, error, match) in enumerate(REFUSED):
        with pytest.raises(error) as caught:
            call(mesh)
        assert re.match(match, str(caught.value)), (number, match)


def test_shard_lengths_are_equal_or_declared(mesh: DeviceMesh) -> None:
    assert shard_sequence(torch.arange(6)[None], mesh).tolist() == [[2, 3]]
    assert shard_sequence(torch.arange(0)[None], mesh).tolist() == [[]]
    assert shard_sequence(torch.arange(7)[None], mesh, shard_lengths=[0, 6, 1]).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert local_shard_lengths(mesh, 6) == (1, (6, 6, 6))
    assert local_shard_lengths(mesh, 6, [0, 6, 1]) == (1, (0, 6, 1))
    assert [gather_tokens(X, at, mesh).shape for at in (FIRST, FIRST + 20, FIRST.int())] == [(2, 1, 3)] * 3
    square = init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "cp"))
    assert [group_of(square[axis])[1:] for axis in ("dp", "cp")] == [(1, 3), (0, 1)]


def test_a_mesh_of_one_rank_gives_the_whole(mesh: DeviceMesh) -> None:
    x = torch.randn(2, 7)
    alone = DeviceMesh("cpu", [1])
    assert torch.equal(shard_sequence(x, alone), x)
    assert unshard_sequence(x, alone) is x
