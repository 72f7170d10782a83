"""Shards of a sequence on CUDA devices: our own kernels, FlexAttention with users' functions, and real ranks over NCCL."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from threading import Lock
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.backends import DispatchKey, why_not
from flexdilated.backends.flex import kernel as flex
from flexdilated.core.custom_op import OpOptions
from flexdilated.core.hardware import detect
from flexdilated.distributed.planner.plan import EXCHANGES
from flexdilated.distributed.runtime.transport import has_tags
from tests.backends.mods import Mods
from tests.distributed import functions, simulation
from tests.distributed.cases import ShardedCase
from tests.distributed.processes import Ranks, each_size, exactly
from tests.tolerances import SINGLE

# What the compiler warns about differs by version and device (TF32 among it) and is not what is tested: shown, no failure.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda"
CASE = ShardedCase(
    DilatedPattern((64, 200, 291), (1, 3, 5)), shard_lengths=(101, 0, 120, 70), kv_heads=2, group=2, head_dim=64, ignored=0.2
)


def assert_same(name: str, value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value.double(), expected, **SINGLE, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_our_kernels_on_shards_give_what_one_rank_gives(exchange: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, is_causal=is_causal)
    request = DispatchKey(detect(DEVICE), torch.float32, case.head_dim, case.group, key_padding_mask=True)
    if (reason := why_not("triton", request)) is not None:
        pytest.skip(reason)
    attention = simulation.TaskAttention

    def by_triton(*arguments: Any, op_options: OpOptions, **options: Any) -> Any:
        return attention(*arguments, op_options=op_options._replace(engine="triton"), **options)

    monkeypatch.setattr(simulation, "TaskAttention", by_triton)
    got, *_ = simulation.simulate(case, exchange, torch.float32, device=DEVICE)
    expected = case.expected()
    for name, value in got.items():
        assert_same(name, value, expected[name])


def compile_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a simulation are threads, and torch compiles in one at a time: the backward along with its forward."""
    turn, call = Lock(), flex.call

    def call_in_turn(*arguments: Any, **options: Any) -> Any:
        with turn:
            return call(*arguments, **options)

    monkeypatch.setattr(flex, "call", call_in_turn)
    monkeypatch.setattr(simulation, "TIMEOUT", 900.0)
    if hasattr(functorch_config, "force_non_lazy_backward_lowering"):  # torch 2.9 has none
        monkeypatch.setattr(functorch_config, "force_non_lazy_backward_lowering", True)


@pytest.mark.parametrize("mods", [Mods(None, None), Mods("table", "thirds"), Mods("alibi", None)], ids=str)
@pytest.mark.parametrize("exchange", functions.EXCHANGES)
def test_flex_on_shards_gives_what_one_rank_gives(exchange: str, mods: Mods, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_in_turn(monkeypatch)
    case = replace(CASE, is_causal=mods.mask is not None)
    got, *_ = functions.simulate(case, mods, exchange, "flex", DEVICE, torch.float32)
    for name, value, expected in zip(functions.NAMES, got, functions.expected_of(case, mods), strict=True):
        assert_same(name, value, expected)


# By ranks, one of three without a token.
PROCESSES = {
    size: ShardedCase(DilatedPattern((64, 250), (1, 3)), shard_lengths=lengths, kv_heads=2, group=2, head_dim=64, ignored=0.2)
    for size, lengths in ((2, (150, 131)), (3, (150, 0, 131)))
}


@pytest.fixture(scope="module", params=[each_size(size) for size in PROCESSES])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Processes of a group of NCCL, on a GPU each if there are as many, else on one."""
    with Ranks(request.param, tmp_path_factory.mktemp("ranks"), timeout=timedelta(seconds=120), device=DEVICE) as ranks:
        yield ranks


def leaves(case: ShardedCase, rank: int, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    given, here, mask = case.named(dtype), case.shard(rank), case.mask()
    options = {"shard_lengths": case.shard_lengths, "scale": case.scale, "return_lse": True}
    if mask is not None:
        options["key_padding_mask"] = mask[:, here].to(DEVICE)
    return [given[name][:, here].to(DEVICE, copy=True).requires_grad_() for name in "qkv"], options


@exactly(*PROCESSES)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_over_nccl_give_what_one_gives(rank: int, mesh: DeviceMesh, exchange: str, is_compiled: bool) -> None:
    case = PROCESSES[mesh.size()]
    attend = torch.compile(dilated_attention, fullgraph=True) if is_compiled else dilated_attention
    expected, here = case.expected(), case.shard(rank)
    for _ in range(2):
        x, options = leaves(case, rank, torch.float32)
        out, lse = attend(*x, case.pattern, mesh=mesh, exchange=exchange, **options)
        wanted = [case.named()[name].to(DEVICE) for name in ("dout", "dlse")]
        wanted[1] = wanted[1].masked_fill(expected["lse"].to(DEVICE) == -torch.inf, 0.0)
        reached = torch.where(lse > -torch.inf, lse.double(), 0.0)
        grads = torch.autograd.grad((out * wanted[0][:, here]).sum() + (reached * wanted[1][:, :, here]).sum(), x)
        for name, value in zip(("out", "dq", "dk", "dv"), (out, *grads)):
            assert_same(name, value.detach().cpu(), expected[name][:, here])
        assert_same("lse", lse.detach().cpu(), expected["lse"][:, :, here])


def check_functions(rank: int, mesh: DeviceMesh, exchange: str, backend: str, is_compiled: bool) -> None:
    case = replace(PROCESSES[mesh.size()], ignored=None, is_causal=True)
    mods, dtype = Mods("table", "thirds"), torch.float32 if backend == "flex" else torch.float64
    expected, here = functions.expected_of(case, mods), case.shard(rank)
    x, options = leaves(case, rank, dtype)
    table = mods.table(x[0].shape[2]).detach().to(DEVICE, dtype).requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        options["is_causal"] = True
        given = options | mods.functions(table)
        return dilated_attention(q, k, v, case.pattern, mesh=mesh, exchange=exchange, backend=backend, **given)

    out, lse = (torch.compile(attend, fullgraph=True) if is_compiled else attend)(*x)
    grads = torch.autograd.grad(functions.weighed(case, rank, mods, out, lse), (*x, table), allow_unused=True)
    found = [torch.zeros_like(to) if g is None else g for g, to in zip(grads, (*x, table))]
    dist.all_reduce(found[-1], group=mesh.get_group())
    parts = [expected[0][:, here], expected[1][:, :, here], *(e[:, here] for e in expected[2:5]), expected[5]]
    for name, value, part in zip(functions.NAMES, (out, lse, *found), parts, strict=True):
        assert_same(name, value.detach().cpu(), part)


@pytest.mark.parametrize("way", ["sdpa", "flex", "sdpa compiled"])
@pytest.mark.parametrize("exchange", functions.EXCHANGES)
def test_functions_over_nccl_give_what_one_rank_gives(ranks: Ranks, exchange: str, way: str) -> None:
    backend, _, compiled = way.partition(" ")
    ranks.run(check_functions, exchange, backend, bool(compiled))


def check_order(rank: int, mesh: DeviceMesh) -> None:
    """Two calls of known plans whose backwards ranks run in another order: NCCL has no tags, and headers tell."""
    assert DEVICE == "cpu" or not has_tags(torch.device(DEVICE))
    case, outs = PROCESSES[mesh.size()], []
    for scale in (0.1, 0.2):
        x, options = leaves(case, rank, torch.float32)
        outs.append(dilated_attention(*x, case.pattern, mesh=mesh, **options | {"scale": scale})[0])

    if not case.shard_lengths[rank]:
        return
    try:
        outs[min(rank, 1)].sum().backward()
        torch.cuda.synchronize()
    except RuntimeError as error:
        if not re.search(r"(?i)assert|another call", str(error)):
            raise
        os._exit(1)


def test_another_order_is_an_error_over_nccl(ranks: Ranks) -> None:
    """An assertion on a device ends what its process can do there, and torch may end the process itself."""
    with_rows = [rank for rank, length in enumerate(PROCESSES[ranks.world_size].shard_lengths) if length]
    ranks.run(check_order, deadline=60.0, ending=with_rows)


def check_lost(rank: int, mesh: DeviceMesh) -> None:
    """A rank that ends: the others end within the timeout of the group, by an error of the call or by NCCL's own watch."""
    mesh.get_group().set_timeout(timedelta(seconds=5))
    case = PROCESSES[mesh.size()]
    for number in range(2):
        if number and rank == 0:
            os._exit(0)
        x, options = leaves(case, rank, torch.float32)
        dilated_attention(*x, case.pattern, mesh=mesh, **options)[0].sum().backward()
        torch.cuda.synchronize()
    assert not case.shard_lengths[rank], "the rows of a rank that has ended came"
    os._exit(1)


def test_a_rank_that_ends_over_nccl_ends_the_others(ranks: Ranks) -> None:
    with pytest.raises(AssertionError) as caught:
        ranks.run(check_lost, deadline=60.0)
    assert "not done within" not in str(caught.value)
