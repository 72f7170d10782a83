"""Calls over ranks in compiled graphs: none is made while a compiler traces, none is left out that gives nothing, and in order."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounter
from torch._inductor import lowering
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import flexdilated
from flexdilated import DilatedPattern, MultiheadDilatedAttention, dilated_attention
from flexdilated.core import collective_order
from flexdilated.distributed import even_shard_lengths, gather_tokens, shard_sequence, unshard_sequence
from flexdilated.distributed.mesh import canonical_mesh
from flexdilated.distributed.planner import cost_model
from tests.distributed.processes import exactly
from tests.tolerances import EXACT


@pytest.mark.slow
@exactly(2)
def test_calls_of_a_rank_without_tokens_are_compiled(rank: int, mesh: DeviceMesh) -> None:
    """A compiler may leave out what gives nothing: not calls that other ranks wait for, in a forward or a backward."""
    torch._dynamo.reset()
    whole = torch.randn(1, 7, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"mesh": mesh, "shard_lengths": (7, 0)}
    cut = partial(shard_sequence, **given)

    def attend(x: Tensor, **given: Any) -> Any:
        x = x.sin()  # not a product: of nothing it is left out, and the call before it with it
        return dilated_attention(x, x, x, DilatedPattern((4, 7), (1, 2)), **given).cos()

    def together(x: Tensor) -> Tensor:
        options = {**given, "reduce_gradients": True}
        return unshard_sequence(x.sin(), **options) @ gather_tokens(x.flatten(2), torch.tensor([3]), **options).view(2, 8).mT

    with torch.no_grad():
        out = torch.compile(attend, fullgraph=True)(cut(whole).clone(), **given)
    torch.testing.assert_close(out, cut(attend(whole)), **EXACT)
    x, y = cut(whole).clone().requires_grad_(), whole.clone().requires_grad_()
    loss = torch.compile(together, fullgraph=True)(x).square().sum()
    expected = (y.sin() @ y[0, 3].mT).square().sum()
    loss.backward(), expected.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(x.grad, mesh.size() * cut(y.grad), **EXACT)


# Between the calls stand products, for which inductor compiles no kernel: that would take most of the time.
TURN = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64).kron(torch.eye(4, dtype=torch.float64))


@pytest.mark.slow
@exactly(2)
def test_calls_of_recomputed_regions_are_compiled(rank: int, mesh: DeviceMesh) -> None:
    """By inductor: `test_calls_keep_their_order`."""
    torch._dynamo.reset()

    def region(x: Tensor, lengths: tuple[int, ...], borders: Tensor | None, is_one: bool) -> Tensor:
        given: dict[str, Any] = {} if is_one else {"mesh": mesh, "shard_lengths": lengths}
        x = x @ TURN
        out = dilated_attention(x, x, x, DilatedPattern((8, 31), (1, 2)), cu_seqlens=borders, **given)
        assert isinstance(out, Tensor)
        whole = (x if is_one else unshard_sequence(x, **given, reduce_gradients=True)).flatten(0, 2)
        return out @ (whole.mT @ whole / len(whole))

    def forward(x: Tensor, lengths: tuple[int, ...], borders: Tensor | None) -> Tensor:
        for _ in range(2):
            x = checkpoint(region, x, lengths, borders, False, use_reentrant=False)
        return x

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    cases = (((17, 14), None), ((20, 3), None), ((3, 26), None), ((17, 14), [0, 12, 31]), ((5, 20), [0, 12, 25]))
    for lengths, documents in cases:
        whole = torch.randn(1, sum(lengths), 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        borders = None if documents is None else torch.tensor(documents)
        shard = partial(shard_sequence, mesh=mesh, shard_lengths=lengths)
        x, y = shard(whole).clone().requires_grad_(), whole.clone().requires_grad_()
        out, expected = compiled(x, lengths, borders), region(region(y, (), borders, True), (), borders, True)
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(out, shard(expected), **EXACT)
        torch.testing.assert_close(x.grad, shard(y.grad), **EXACT)


@exactly(2)
def test_tracing_calls_nobody(rank: int, mesh: DeviceMesh) -> None:
    """One rank alone compiles again, behind a call that all have compiled: tracing calls nobody, though it knows the positions."""
    torch._dynamo.reset()
    gather = torch.compile(lambda x: gather_tokens(x.sin(), torch.tensor([3]), mesh).cos(), fullgraph=True, backend="eager")
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    gather(x)
    torch.testing.assert_close(gather(x.mT.contiguous().mT if rank else x), gather(x), **EXACT)


@pytest.mark.slow
@exactly(2)
def test_backwards_alone_are_compiled_in_order(rank: int, mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    whole, *grads = torch.randn(5, 1, 43, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"mesh": mesh, "shard_lengths": (40, 3)}

    def outputs(x: Tensor, **given: Any) -> list[Tensor]:
        turned = [x @ TURN, x @ TURN.mT]
        attended = [dilated_attention(y, y, y, DilatedPattern((8 + i, 43), (1, 2)), **given) for i, y in enumerate(turned)]
        return attended + [unshard_sequence(y, **given, reduce_gradients=True) if given else y for y in turned]

    x, y = shard_sequence(whole, **given).clone().requires_grad_(), whole.clone().requires_grad_()
    outs = outputs(x, **given)
    names = ("context_parallel", "context_parallel_backward", "unshard", "unshard_backward")
    operators = [getattr(torch.ops.flexdilated, name).default for name in names]
    for each in operators:
        lowering.lowerings.pop(each, None)
    collective_order._unordered.extend(operators)
    with compiled_autograd._enable(torch.compile(backend="inductor", fullgraph=True)):
        torch.autograd.backward(outs, [*shard_sequence(grads[:2], **given), *grads[2:]])
    assert not collective_order._unordered
    torch.autograd.backward(outputs(y), [*grads[:2], *(mesh.size() * grad for grad in grads[2:])])
    torch.testing.assert_close(x.grad, shard_sequence(y.grad, **given), **EXACT)


@exactly(2)
def test_calls_that_look_alike_are_all_compiled(rank: int, mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    whole = torch.randn(1, 16, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def twice(x: Tensor, mesh: DeviceMesh | None) -> Any:
        outs = [dilated_attention(x, x, x, DilatedPattern((8, 16), (1, 4)), mesh=mesh) for _ in range(2)]
        wholes = [x if mesh is None else unshard_sequence(x, mesh, reduce_gradients=True) for _ in range(2)]
        return (outs[0] + outs[1].sin()) * (wholes[0] + wholes[1].cos()).mean()

    x, y = shard_sequence(whole, mesh).clone().requires_grad_(), whole.clone().requires_grad_()
    out, expected = torch.compile(twice, fullgraph=True, backend="aot_eager", disable=rank == 1)(x, mesh), twice(y, None)
    out.sum().backward(), expected.sum().backward()
    torch.testing.assert_close(out, shard_sequence(expected, mesh), **EXACT)
    torch.testing.assert_close(x.grad, shard_sequence(y.grad, mesh), **EXACT)


WIDTHS = (16, 512, 1)  # of hidden features: what a kernel needs in memory is what inductor orders kernels by


@pytest.mark.slow
@exactly(2)
def test_calls_keep_their_order(rank: int, mesh: DeviceMesh) -> None:
    """Calls that do not depend on each other, over shards of which one is longer: each rank would order them by its own.

    Recomputation keeps the state of a generator for operators that draw, which hides them from what orders them.
    """
    torch._dynamo.reset()
    lengths = even_shard_lengths(403, mesh.size())
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    whole, weights = draw(1, 403, 8).clamp(-1, 1), [(draw(8, width) / width, draw(width, 8)) for width in WIDTHS]
    given: dict[str, Any] = {"mesh": mesh, "shard_lengths": lengths}
    shard = partial(shard_sequence, **given)

    def together(x: Tensor, **given: Any) -> Tensor:
        parts = [x @ a @ b for a, b in weights]
        parts = [unshard_sequence(y, **given, reduce_gradients=True) if given else y for y in parts]
        return sum((i * y * y.roll(1, 1)).mean() for i, y in enumerate(parts, 1))  # type: ignore[return-value]

    def attend(x: Tensor, **given: Any) -> Tensor:
        outs = []
        for i, (a, b) in enumerate(weights):
            y = (x @ a @ b).unflatten(-1, (2, 4))
            out = dilated_attention(y, y, y, DilatedPattern((8 + i, 403), (1, 2)), **given)
            assert isinstance(out, Tensor)
            outs.append(out)
        return torch.cat(outs[::-1], -1)

    def again(x: Tensor) -> Any:
        return checkpoint(lambda x: (together(x, **given), attend(x, **given)), x, use_reentrant=False)

    x, y = shard(whole).clone().requires_grad_(), whole.clone().requires_grad_()
    sums, out = torch.compile(again, fullgraph=True)(x)
    expected_sums, expected = together(y), attend(y)
    (sums + out.sum()).backward(), (mesh.size() * expected_sums + expected.sum()).backward()
    torch.testing.assert_close(sums, expected_sums, **EXACT)
    torch.testing.assert_close(out, shard(expected), **EXACT)
    torch.testing.assert_close(x.grad, shard(y.grad), **EXACT)


@exactly(2)
def test_calls_of_regions_are_refused(rank: int, mesh: DeviceMesh) -> None:
    """Inductor keeps no order of calls in regions, and leaves out regions that give nothing: refused, as every rank hears."""
    torch._dynamo.reset()
    x = torch.randn(1, 13, 2, 8, dtype=torch.float64)

    @torch.compiler.nested_compile_region
    def attend(x: Tensor) -> Tensor:
        out = dilated_attention(x, x, x, DilatedPattern((8, 26), (1, 2)), mesh=mesh)
        assert isinstance(out, Tensor)
        return out

    @torch.compiler.nested_compile_region
    def together(x: Tensor) -> Tensor:
        return unshard_sequence(x, mesh)

    for region in (attend, together):
        names_the_reason = torch.__version__ >= torch.torch_version.TorchVersion("2.13")
        said = "must hold no call over several ranks" if names_the_reason else "nested_compile_region|NotImplementedError"
        with pytest.raises(Exception, match=said):
            torch.compile(lambda x, region=region: region(x.sin()), fullgraph=True, backend="eager")(x)


@exactly(2)
def test_modules_share_the_mesh_of_an_axis(rank: int, mesh: DeviceMesh) -> None:
    """An axis is a new object each time it is asked for, and graphs are guarded by the object."""
    torch._dynamo.reset()
    axes = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "cp"))
    layers = [MultiheadDilatedAttention(16, 2, DilatedPattern((7, 24), (1, 2)), mesh=axes["cp"]) for _ in range(10)]
    assert len({id(layer.attention.mesh) for layer in layers}) == 1
    compilations = CompileCounter()
    x = torch.randn(1, 32, 16)
    for layer in layers:
        layer.compile(fullgraph=True, backend=compilations)
        x, _ = layer(x, x, x)
    assert compilations.frame_count <= 2
    others = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("other",))
    assert canonical_mesh(others) is others  # another group of the same ranks, whose calls are others
    assert canonical_mesh(axes) is axes
    assert canonical_mesh(None) is None


@exactly(2)
def test_kept_graphs_are_of_a_version_and_speeds(rank: int, mesh: DeviceMesh) -> None:
    """A graph of other speeds, or of another version, has other arguments: a compiler's cache on disk cannot take it."""
    found = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(node.args for node in graph.graph.nodes if "context_parallel" in str(node.target))
        return graph

    x = torch.randn(1, 13, 2, 8)
    for exchange in ("auto", "gather"):
        torch._dynamo.reset()
        torch.compile(dilated_attention, fullgraph=True, backend=backend)(
            x, x, x, DilatedPattern((26,), (1,)), mesh=mesh, exchange=exchange
        )
    of_auto, of_gather = (args[-1] for args in found)
    assert of_auto == f"flexdilated {flexdilated.__version__}, {cost_model.speeds_of_environment()}"
    assert of_gather == f"flexdilated {flexdilated.__version__}"
