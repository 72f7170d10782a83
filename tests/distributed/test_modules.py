"""Modules over ranks equal one process: LongNetLM over context ranks, beside data and tensor parallelism."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from flexdilated import DilatedPattern, MultiheadDilatedAttention, convert
from flexdilated.distributed import shard_sequence, unshard_sequence
from flexdilated.nn import LongNet, Rotary, XPos
from tests.distributed.models import NESTED, RAGGED, TOKENS, build, draw_tokens
from tests.distributed.processes import exactly, one_size
from tests.tolerances import EXACT


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters()}


def assert_summed_gradients(model: nn.Module, whole: nn.Module, mesh: DeviceMesh) -> None:
    for name, grad in gradients(model).items():
        dist.all_reduce(grad, group=mesh.get_group())
        torch.testing.assert_close(grad, gradients(whole)[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def check_model(
    mesh: DeviceMesh,
    *,
    shard_lengths: tuple[int, ...] | None = None,
    documents: list[int] | None = None,
    padded: bool = False,
    compiler: str | None = None,
    exchange: str = "auto",
    **changes: Any,
) -> None:
    tokens = draw_tokens(1 if documents else 2)
    cu_seqlens = None if documents is None else torch.tensor(documents)
    mask = (torch.arange(TOKENS) % 8 == 3).expand_as(tokens) if padded else None
    weight = torch.randn(*tokens.shape, 29, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = build(**changes)
    expected = whole(tokens, key_padding_mask=mask, cu_seqlens=cu_seqlens)
    (expected * weight).sum().backward()

    model = build(mesh, exchange, **changes)
    batch = {"tokens": tokens, "weight": weight, "key_padding_mask": mask}
    own = shard_sequence(batch, mesh, shard_lengths=shard_lengths)
    forward = model
    if compiler:
        torch._dynamo.reset()
        forward = torch.compile(model, fullgraph=True, backend=compiler)
    actual = forward(own["tokens"], key_padding_mask=own["key_padding_mask"], cu_seqlens=cu_seqlens, shard_lengths=shard_lengths)
    (actual * own["weight"]).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(unshard_sequence(actual, mesh, shard_lengths=shard_lengths), expected, **EXACT)
    assert_summed_gradients(model, whole, mesh)


def check_layers(rank: int, mesh: DeviceMesh) -> None:
    model = build(mesh)
    tokens = shard_sequence(draw_tokens(), mesh)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens), model(tokens))
    assert model.state_dict().keys() == build().state_dict().keys()
    assert "mesh" not in repr(model)
    with pytest.raises(ValueError, match=rf"^shard_lengths\[{rank}\] must be the number of tokens of this rank=17, got \(18,"):
        model(tokens, shard_lengths=(18, 16))
    with pytest.raises(ValueError, match=r"^shard_lengths must hold one length per rank"):
        model(tokens, shard_lengths=(1,) * 9)
    x, layer = torch.zeros(1, 3, 24, dtype=torch.float64), build(mesh, exchange="gather").layers[0].self_attn
    layer.attention.scale = 0.5 if rank == mesh.size() - 1 else None
    with pytest.raises(ValueError, match=r"^ranks must agree on scale, got 0\.40"):
        layer(x, x, x)
    assert torch.equal(twin(tokens), model(tokens))
    torch.manual_seed(2307)
    layer = nn.MultiheadAttention(24, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, TOKENS, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    part = shard_sequence(x, mesh, shard_lengths=(13, 21))
    expected = MultiheadDilatedAttention.from_torch(layer, NESTED)(x, x, x)[0]
    converted = MultiheadDilatedAttention.from_torch(layer, NESTED, mesh=mesh, exchange="gather")
    actual = converted(part, part, part, shard_lengths=(13, 21))[0]
    torch.testing.assert_close(actual, shard_sequence(expected, mesh, shard_lengths=(13, 21)), **EXACT)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(12, 3, 17, batch_first=True, dropout=0.0), 2, enable_nested_tensor=False
    )
    assert {
        (module.attention.mesh, module.attention.exchange)
        for module in convert(encoder, NESTED, mesh=mesh, exchange="ring").modules()
        if isinstance(module, MultiheadDilatedAttention)
    } == {(mesh, "ring")}
    unbatched = converted(part[0], part[0], part[0], shard_lengths=(13, 21))[0]
    torch.testing.assert_close(unbatched, actual[0], **EXACT)


@pytest.mark.slow
@exactly(2)
def test_longnet_over_two_ranks_equals_one_process(rank: int, mesh: DeviceMesh) -> None:
    uneven, crossing = (13, 21), [0, 3, 12, 29, 34]
    check_model(mesh, position="xpos", shard_lengths=uneven, padded=True)
    check_model(mesh, position="rotary", exchange="ring", padded=True)
    check_model(mesh, position="xpos", shard_lengths=uneven, documents=crossing, pattern=RAGGED, exchange="gather")
    check_model(mesh, position="rotary", shard_lengths=(34, 0), pattern=RAGGED, exchange="heads")
    check_model(mesh, documents=crossing, tie_embeddings=False)
    check_model(mesh, position="xpos", shard_lengths=uneven, exchange="gather", compiler="aot_eager", num_layers=1)
    check_layers(rank, mesh)


def build_pair(mesh: DeviceMesh | None = None, **options: Any) -> LongNet:
    torch.manual_seed(2307)
    return LongNet(12, 3, 1, 2, 19, DilatedPattern((5, 15), (1, 3)), dtype=torch.float64, mesh=mesh, **options)


def check_sides(
    mesh: DeviceMesh,
    src_lengths: tuple[int, ...],
    tgt_lengths: tuple[int, ...],
    masked: bool,
    options: dict[str, Any],
    exchange: str,
    declared: bool = True,
) -> None:
    generator = torch.Generator().manual_seed(5)
    sides = [("src", src_lengths), ("tgt", tgt_lengths)]
    src, tgt = ({name: torch.randn(2, sum(n), 12, generator=generator, dtype=torch.float64)} for name, n in sides)
    weight = torch.randn(2, sum(tgt_lengths), 12, generator=generator, dtype=torch.float64)
    for side, (name, n) in zip((src, tgt), sides):
        if masked:
            side[f"{name}_key_padding_mask"] = torch.rand(2, sum(n), generator=generator) < 0.2
    whole, model = build_pair(**options), build_pair(mesh, exchange=exchange, **options)
    expected = whole(**src, **tgt)
    (expected * weight).sum().backward()
    local_src = shard_sequence(src, mesh, shard_lengths=src_lengths)
    local_tgt, dout = shard_sequence((tgt, weight), mesh, shard_lengths=tgt_lengths)
    lengths = {"shard_lengths": src_lengths} if src_lengths == tgt_lengths else {}
    if declared and not lengths:
        lengths = {"shard_lengths": src_lengths, "tgt_shard_lengths": tgt_lengths}
    actual = model(**local_src, **local_tgt, **lengths)
    (actual * dout).sum().backward()
    torch.testing.assert_close(unshard_sequence(actual.detach(), mesh, shard_lengths=tgt_lengths), expected.detach(), **EXACT)
    assert_summed_gradients(model, whole, mesh)


@one_size
@pytest.mark.parametrize(
    ("options", "exchange"),
    [({}, "auto"), ({"cross_is_causal": True}, "ring"), ({"cross_attention": "dense"}, "heads")],
    ids=["dilated", "causal", "dense"],
)
def test_encoder_and_decoder_equal_one_process(rank: int, mesh: DeviceMesh, options: dict[str, Any], exchange: str) -> None:
    lengths = tuple(7 + 3 * i for i in range(mesh.size()))
    check_sides(mesh, lengths, lengths, True, options, exchange)


@one_size
def test_sides_of_other_lengths_over_ranks_equal_one_process(rank: int, mesh: DeviceMesh) -> None:
    """Dense cross-attention: a side may be the longer on one rank and the shorter on another, or have no tokens there."""
    size, dense = mesh.size(), {"cross_attention": "dense"}
    growing, falling = tuple(3 + 4 * i for i in range(size)), tuple(max(0, 11 - 3 * i) for i in range(size))
    none = (*(0,) * (size - 1), 13)
    sides = ((growing, falling), (falling, growing), (none, growing), (growing, none), ((17,) * size, (2,) * size))
    for number, (src, tgt) in enumerate(sides):
        check_sides(mesh, src, tgt, number % 2 == 0, dense, ("auto", "gather")[number // 2 % 2])
    for src, tgt in ((5, 11), (11, 5)):
        check_sides(mesh, (src,) * size, (tgt,) * size, False, dense, "auto", declared=False)
    x = torch.zeros(2, 3, 12, dtype=torch.float64)
    threes = (3,) * size
    build_pair(mesh)(x, x, tgt_shard_lengths=threes)
    fours = (4,) * size
    with pytest.raises(ValueError, match=r"^tgt_shard_lengths must be those of src=\(3, .* dilated cross-attention, got \(4, "):
        build_pair(mesh)(x, x, tgt_shard_lengths=fours)
    with pytest.raises(ValueError, match=r"^tgt_shard_lengths must come with mesh, got \(3, "):
        build_pair()(x, x, tgt_shard_lengths=threes)
    with pytest.raises(ValueError, match=r"^key_shard_lengths must come with mesh, got \(3, "):
        build_pair(**dense).decoder[0].encoder_attn(x, x, x, key_shard_lengths=threes)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.slow
@exactly(4)
def test_data_by_context_training_step_equals_one_process(rank: int, world: DeviceMesh) -> None:
    """Data x context: both axes hold copies of the parameters, so gradients are averaged over all four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    every = init_device_mesh("cpu", (4,))
    tokens, labels = draw_tokens(4), draw_tokens(4).roll(-1, dims=1)
    whole = build()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    before = {name: x.detach().clone() for name, x in whole.named_parameters()}
    losses = []
    for _ in range(2):
        loss = loss_of(whole(tokens), labels) / tokens.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert all((x - before[name]).abs().max() > 1e-6 for name, x in whole.named_parameters())

    part = shard_sequence({"tokens": tokens, "labels": labels}, mesh["dp"], dim=0)
    part = shard_sequence(part, mesh["cp"], shard_lengths=(13, 21))
    for parallel in ("ddp", "fsdp"):
        model: nn.Module = build(mesh["cp"])
        if parallel == "ddp":
            model = DistributedDataParallel(model)
        else:
            for layer in model.layers:
                fully_shard(layer, mesh=every)
            fully_shard(model, mesh=every)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for expected in losses:
            loss = loss_of(model(part["tokens"], shard_lengths=(13, 21)), part["labels"]) / tokens.numel()
            (4 * loss).backward()  # of which the average over four ranks is the sum
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            dist.all_reduce(loss)
            torch.testing.assert_close(loss, expected, **EXACT)
        for (name, x), y in zip(model.named_parameters(), whole.parameters()):
            x = x.full_tensor() if isinstance(x, DTensor) else x
            torch.testing.assert_close(x, y, **EXACT, msg=lambda text, where=(parallel, name): f"{where}: {text}")


def parallelize(layer: MultiheadDilatedAttention, mesh: DeviceMesh) -> None:
    plan = {name: ColwiseParallel(use_local_output=False) for name in ("q_proj", "k_proj", "v_proj")}
    parallelize_module(layer, mesh, {**plan, "out_proj": RowwiseParallel()})


@exactly(2)
def test_sharded_heads_equal_one_process(rank: int, world: DeviceMesh) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.randn(2, TOKENS, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    weight = torch.randn(2, TOKENS, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    for layer_norm, position in ((True, Rotary(6)), (False, XPos(6, NESTED)), (True, None)):
        rotation = position and position(torch.arange(TOKENS), dtype=torch.float64)
        torch.manual_seed(2307)
        whole = MultiheadDilatedAttention(24, 4, NESTED, num_kv_heads=2, layer_norm=layer_norm, is_causal=True).double()
        layer = copy.deepcopy(whole)
        parallelize(layer, mesh)
        grads = []
        for module in (whole, layer):
            y = x.clone().requires_grad_()
            out = module(y, y, y, rotation=rotation)[0]
            (out * weight).sum().backward()
            grads.append({"out": out.detach(), "y": y.grad, **gradients(module)})
        for key, expected in grads[0].items():
            actual = grads[1][key]
            actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
            torch.testing.assert_close(actual, expected, **EXACT, msg=lambda text, key=key: f"{key}: {text}")
    expected_logits = build()(draw_tokens())
    model = build()
    for block in model.layers:
        parallelize(block.self_attn, mesh)
    torch.testing.assert_close(model(draw_tokens()), expected_logits, **EXACT)
