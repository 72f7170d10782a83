"""The processes that other tests run on: a rank that fails fails its test."""

import os
import time
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.processes import Ranks


def fail_on_the_last(rank: int, mesh: DeviceMesh, how: str) -> int:
    if rank == mesh.size() - 1:
        if how == "raises":
            raise ValueError("planted")
        if how == "ends":
            os._exit(3)
        time.sleep(600.0 if how == "sleeps" else 0.0)
    return rank


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "deadline", "match"),
    [
        ("raises", 900.0, r"(?s)rank 1 of 2: Traceback.*ValueError: planted"),
        ("ends", 900.0, r"rank 1 of 2: the process ended"),
        ("sleeps", 5.0, r"(?sm)^rank 1 of 2: not done within 5.0 s\nTimeout.*in fail_on_the_last"),
    ],
    ids=["raises", "ends", "sleeps"],
)
def test_a_rank_that_fails_fails_the_test(how: str, deadline: float, match: str, tmp_path: Path) -> None:
    with Ranks(2, tmp_path) as ranks:
        assert ranks.run(fail_on_the_last, "is well") == [0, 1]
        with pytest.raises(AssertionError, match=match):
            ranks.run(fail_on_the_last, how, deadline=deadline)
        with pytest.raises(AssertionError, match=r"rank 1 of 2: must end, gave 1"):
            ranks.run(fail_on_the_last, "is well", ending=(1,))
