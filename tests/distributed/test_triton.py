"""Shards of a sequence by our own kernels, in triton's interpreter: pieces in place, and the tasks of segments that shards cut."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern
from flexdilated.backends.triton import backend
from flexdilated.core.custom_op import OpOptions
from flexdilated.distributed.planner.plan import EXCHANGES
from tests.backends import interpreter
from tests.distributed import simulation
from tests.distributed.cases import ShardedCase
from tests.tolerances import SINGLE

pytest.importorskip("triton")
if not backend.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1, which is not set where there is a GPU", allow_module_level=True)

from flexdilated.backends.triton import launch

CASE = ShardedCase(DilatedPattern((8, 17), (1, 3)), shard_lengths=(7, 11), kv_heads=1, group=2, head_dim=16, ignored=0.2)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch at a time: the interpreter has one grid for all threads, which stand for ranks here."""
    interpreter.mend(monkeypatch)
    run, attention, one = launch._launch, simulation.TaskAttention, threading.Lock()

    def locked(*arguments: Any) -> None:
        with one:
            run(*arguments)

    def by_triton(*arguments: Any, op_options: OpOptions, **options: Any) -> Any:
        return attention(*arguments, op_options=op_options._replace(engine="triton"), **options)

    monkeypatch.setattr(launch, "_launch", locked)
    monkeypatch.setattr(simulation, "TaskAttention", by_triton)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")  # of pairs that do not see each other
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_shards_give_what_the_whole_gives(exchange: str) -> None:
    case = replace(CASE, is_causal=exchange == "ring")
    got, *_ = simulation.simulate(case, exchange, torch.float32)
    expected = case.expected()
    for name, value in got.items():
        torch.testing.assert_close(value.double(), expected[name], **SINGLE, msg=lambda text, name=name: f"{name}: {text}")
