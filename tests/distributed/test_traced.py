"""Score and mask functions over ranks in one graph: layers, regions that are recomputed, what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.core.hardware import TRACES_UNKNOWN_SIZES
from flexdilated.distributed import shard_sequence
from tests.distributed.processes import Ranks, exactly
from tests.distributed.test_dtensors import scattered
from tests.tolerances import EXACT

pytestmark = pytest.mark.skipif(not TRACES_UNKNOWN_SIZES, reason="needs torch 2.11, whose compiler traces what a rank computes")

PATTERN = DilatedPattern((8, 31), (1, 3))
LENGTHS = (17, 14)


def biased(table: Tensor, tokens: int = sum(LENGTHS)) -> dict[str, Any]:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[h, i - j + tokens]

    return {"score_mod": score_mod, "mask_mod": lambda b, h, i, j: (i + j) % 5 != 0}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def model(x: Tensor, table: Tensor, attend: Any, layers: int, recomputes: bool) -> Tensor:
    """Layers that share a table."""

    def layer(x: Tensor) -> Tensor:
        out: Tensor = attend(x.sin(), x.cos(), x, PATTERN, **biased(table))
        return out + x

    for _ in range(layers):
        x = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
    return x


def exact(*arguments: Any, **options: Any) -> Tensor:
    return reference.dilated_attention(*arguments, **options)[0]


def check_layers(rank: int, mesh: DeviceMesh, backend: str, layers: int, recomputes: bool) -> None:
    """Against the definition on the whole sequence."""
    torch._dynamo.reset()
    whole, table, weights = drawn(0, 2, 31, 4, 8), drawn(1, 4, 62), drawn(2, 2, 31, 4, 8)
    shard = partial(shard_sequence, mesh=mesh, shard_lengths=LENGTHS)
    x, learned = (t.clone().requires_grad_() for t in (whole, table))
    expected = model(x, learned, exact, layers, False)
    wanted = torch.autograd.grad((expected * weights).sum(), (x, learned))

    attend = partial(dilated_attention, mesh=mesh, shard_lengths=LENGTHS)
    run = torch.compile(model, fullgraph=True, backend=backend)
    mine, learned = shard(whole).clone().requires_grad_(), table.clone().requires_grad_()
    for _ in range(2):  # the second call compiles nothing
        out = run(mine, learned, attend, layers, recomputes)
        grads = torch.autograd.grad((out * shard(weights)).sum(), (mine, learned))
        dist.all_reduce(grads[1], group=mesh.get_group())
        for value, other in zip((out, *grads), (shard(expected), shard(wanted[0]), wanted[1]), strict=True):
            torch.testing.assert_close(value, other, **EXACT)


def check_mixed(rank: int, mesh: DeviceMesh) -> None:
    """A compiled backward runs whole and counts its own calls: ranks that are not compiled would wait."""
    torch._dynamo.reset()
    x, table = torch.randn(1, 13, 4, 8, dtype=torch.float64), torch.zeros(4, 62, dtype=torch.float64)

    def attend(x: Tensor) -> Any:
        return dilated_attention(x, x, x, PATTERN, mesh=mesh, **biased(table))

    with pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError), match="ranks must agree on one_graph, got"):
        torch.compile(attend, fullgraph=True, backend="eager", disable=rank == 1)(x)


@exactly(2)
def test_ranks_are_all_compiled_or_none(ranks: Ranks) -> None:
    ranks.run(check_mixed, deadline=120.0)


def check_wrong(rank: int, mesh: DeviceMesh) -> None:
    """What would be an error inside the compiler is one of this library."""
    torch._dynamo.reset()
    x = torch.randn(1, 17 if rank == 0 else 14, 4, 8, dtype=torch.float64)

    def attend(x: Tensor, lengths: tuple[int, ...], mask_mod: Any) -> Any:
        return dilated_attention(x, x, x, PATTERN, mesh=mesh, shard_lengths=lengths, mask_mod=mask_mod)

    whole = torch.compile(attend, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"mask_mod must return a bool, True where the query sees the key, got torch\.int64"):
        whole(x, LENGTHS, lambda b, h, i, j: i)
    mask_mod = biased(x)["mask_mod"]
    torch._dynamo.reset()
    whole(x, LENGTHS, mask_mod)
    other = (17, 20)
    y = torch.randn(1, other[rank], 4, 8, dtype=torch.float64)
    match = "shard_lengths must be static|number of tokens|rank [01] refused"
    with pytest.raises(Exception, match=match):
        whole(y, other, mask_mod)

    class Attends(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return attend(x, LENGTHS, mask_mod)

    torch._dynamo.reset()
    program = torch.export.export(Attends(), (x,), strict=False)
    torch.testing.assert_close(program.module()(x), attend(x, LENGTHS, mask_mod), **EXACT)


@exactly(2)
def test_what_cannot_be_traced_is_refused_in_words(ranks: Ranks) -> None:
    ranks.run(check_wrong, deadline=120.0)


@pytest.mark.slow
@exactly(2)
@pytest.mark.parametrize(
    ("backend", "layers", "recomputes"),
    [
        ("aot_eager", 2, True),
        ("eager", 1, False),
        pytest.param("inductor", 2, False, marks=pytest.mark.sweep),
    ],
)
def test_layers_train_as_on_one_device(ranks: Ranks, backend: str, layers: int, recomputes: bool) -> None:
    ranks.run(check_layers, backend, layers, recomputes, deadline=600.0)


def check_table_alone(rank: int, mesh: DeviceMesh) -> None:
    """Outputs travel, and on a rank that computes none for others no gradient but the table's is asked for; or none at all."""
    torch._dynamo.reset()
    lengths, pattern, weights = (5, 26), DilatedPattern((31,), (1,)), drawn(2, 1, 31, 1, 8)
    whole, table = [drawn(seed, 1, 31, 1, 8) for seed in range(3)], drawn(3, 1, 62).requires_grad_()
    expected = exact(*whole, pattern, **biased(table))
    wanted = torch.autograd.grad((expected * weights).sum(), table)[0]
    shard = partial(shard_sequence, mesh=mesh, shard_lengths=lengths)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        out = dilated_attention(q, k, v, pattern, mesh=mesh, shard_lengths=lengths, exchange="heads", **biased(table))
        assert isinstance(out, Tensor)
        return out

    out = attend(*shard(whole), table)
    torch.testing.assert_close(out, shard(expected), **EXACT)
    (mine,) = torch.autograd.grad((out * shard(weights)).sum(), table)
    dist.all_reduce(mine, group=mesh.get_group())
    torch.testing.assert_close(mine, wanted, **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(attend(*shard(whole), table), shard(expected), **EXACT)


@pytest.mark.slow
@exactly(2)
def test_a_table_learns_alone_in_one_graph(ranks: Ranks) -> None:
    ranks.run(check_table_alone, deadline=300.0)


def check_heads(rank: int, mesh: DeviceMesh) -> None:
    """DTensors on heads: functions are told the heads of the model."""
    torch._dynamo.reset()
    q, k, v, dout = (drawn(seed, 1, 31, 4, 8) for seed in range(4))
    table = drawn(5, 4, 62).requires_grad_()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = reference.dilated_attention(*leaves, PATTERN, **biased(table))[0]
    wanted = torch.autograd.grad(expected, [*leaves, table], dout)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        out = dilated_attention(q, k, v, PATTERN, **biased(table))
        assert isinstance(out, Tensor)
        return out

    parts = [scattered(x, mesh, [Shard(2)]).requires_grad_() for x in (q, k, v)]
    out = attend(*parts, table)
    torch.testing.assert_close(out.full_tensor(), expected, **EXACT)
    *grads, mine = torch.autograd.grad(out, [*parts, table], scattered(dout, mesh, [Shard(2)]))
    dist.all_reduce(mine, group=mesh.get_group())
    for value, other in zip((*(x.full_tensor() for x in grads), mine), wanted, strict=True):
        torch.testing.assert_close(value, other, **EXACT)


@pytest.mark.slow
@exactly(2)
def test_heads_of_dtensors_are_one_graph(ranks: Ranks) -> None:
    ranks.run(check_heads, deadline=300.0)
