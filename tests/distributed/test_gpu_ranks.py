"""Shards of a sequence on CUDA devices: our own kernels, FlexAttention with users' functions, and real ranks over NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.backends import Request, why_not
from flexdilated.backends.flex import kernel as flex
from flexdilated.backends.hardware import detect
from flexdilated.distributed import exchange as exchanging
from flexdilated.distributed.plan import EXCHANGES
from tests.backends.test_mods import Mods
from tests.distributed import test_functions, test_parallel
from tests.distributed.cases import ShardedCase
from tests.distributed.processes import Ranks
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
    request = Request(detect(DEVICE), torch.float32, case.head_dim, case.group, masked=True)
    if (reason := why_not("triton", request)) is not None:
        pytest.skip(reason)
    share_of = test_parallel.share_of

    def share(*arguments: Any, **options: Any) -> Any:
        found = share_of(*arguments, **options)
        return replace(found, flat=found.flat._replace(engine="triton"))

    monkeypatch.setattr(test_parallel, "share_of", share)
    got, *_ = test_parallel.simulate(case, exchange, torch.float32, device=DEVICE)
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
    if hasattr(functorch_config, "force_non_lazy_backward_lowering"):  # torch 2.9 has none
        monkeypatch.setattr(functorch_config, "force_non_lazy_backward_lowering", True)


@pytest.mark.parametrize("mods", [Mods(None, None), Mods("table", "thirds"), Mods("alibi", None)], ids=str)
@pytest.mark.parametrize("exchange", test_functions.EXCHANGES)
def test_flex_on_shards_gives_what_one_rank_gives(exchange: str, mods: Mods, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_in_turn(monkeypatch)
    case = replace(CASE, is_causal=mods.mask is not None)
    got, *_ = test_functions.simulate(case, mods, exchange, "flex", DEVICE, torch.float32)
    for name, value, expected in zip(test_functions.NAMES, got, test_functions.expected_of(case, mods), strict=True):
        assert_same(name, value, expected)


# -- processes ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Two processes with a GPU each."""
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: NCCL gives each rank one of its own")
    ranks = Ranks(2, tmp_path, device=DEVICE)
    yield ranks
    ranks.kill()


PROCESSES = ShardedCase(DilatedPattern((64, 300), (1, 3)), shard_lengths=(200, 151), kv_heads=2, group=2, head_dim=64)


def check_step(rank: int, mesh: DeviceMesh, exchange: str, is_compiled: bool) -> None:
    """Two steps, the second of a plan that is known."""
    case = PROCESSES
    attend = torch.compile(dilated_attention, fullgraph=True) if is_compiled else dilated_attention
    given, expected, here = case.named(torch.float32), case.expected(), case.shard(rank)
    for _ in range(2):
        q, k, v = (given[name][:, here].to(DEVICE, copy=True).requires_grad_() for name in "qkv")
        out, lse = attend(
            q, k, v, case.pattern, mesh=mesh, exchange=exchange, shard_lengths=case.shard_lengths, scale=case.scale, return_lse=True
        )
        total = (out * given["dout"][:, here].to(DEVICE)).sum() + (lse * given["dlse"][:, :, here].to(DEVICE)).sum()
        grads = torch.autograd.grad(total, (q, k, v))
        for name, value in zip(("out", "dq", "dk", "dv"), (out, *grads)):
            assert_same(name, value.detach().cpu(), expected[name][:, here])
        assert_same("lse", lse.detach().cpu(), expected["lse"][:, :, here])


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_over_nccl_give_what_one_gives(ranks: Ranks, exchange: str, is_compiled: bool) -> None:
    ranks.run(check_step, exchange, is_compiled)


def check_order(rank: int, mesh: DeviceMesh) -> None:
    """Two calls of known plans whose backwards ranks run in another order: NCCL has no tags, and headers tell."""
    assert DEVICE == "cpu" or not exchanging.has_tags(mesh.get_group(), torch.device(DEVICE))
    here = PROCESSES.shard(rank)
    given = PROCESSES.named(torch.float32)
    outs = []
    for scale in (0.1, 0.2):
        q, k, v = (given[name][:, here].to(DEVICE, copy=True).requires_grad_() for name in "qkv")
        outs.append(dilated_attention(q, k, v, PROCESSES.pattern, mesh=mesh, shard_lengths=PROCESSES.shard_lengths, scale=scale))

    def differentiate() -> None:
        outs[rank].sum().backward()
        torch.cuda.synchronize()

    with pytest.raises(RuntimeError, match=r"(?i)assert|another call"):
        differentiate()


def test_another_order_is_an_error_over_nccl(ranks: Ranks) -> None:
    """An assertion on a device ends what its process can do there."""
    ranks.run(check_order)
