"""Ranks that read other measurements of `flexdilated tune` than each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.backends import measured
from tests.distributed.processes import Ranks, exactly
from tests.measured import HOPPER, NAME, forget, write


def attend_with_files_of_ranks(
    rank: int, mesh: DeviceMesh, folder: str, scale: float, changes: list[dict[str, Any] | None]
) -> str | None:
    """The error of a call over ranks that have read measurements of their own; None where there is none."""
    patches = {
        "device_name": lambda capability: NAME,
        "driver": lambda: "580.95",
        "detect": lambda device: HOPPER,
    }
    place = Path(folder) / str(rank)
    pattern, q = DilatedPattern((8, 16), (1, 2)), torch.randn(1, 8, 2, 4)
    with mock.patch.dict(os.environ, {"FLEXDILATED_CACHE": str(place)}), mock.patch.multiple(measured, **patches):
        forget()
        if (own := changes[rank]) is not None:
            write(place, **own)
        try:
            dilated_attention(q, q, q, pattern, mesh=mesh, scale=scale)
        except ValueError as error:
            return str(error)
        finally:
            forget()
    return None


@exactly(2)
def test_ranks_that_read_other_measurements_are_named(ranks: Ranks, tmp_path: Path) -> None:
    """Times and dates may differ: choices may not."""
    size = ranks.world_size
    slower = [{"dtype": "bfloat16", "head_dim": 64, "tokens": 1024, "training": False, "triton_over_sdpa": 2.0}]
    cases = {"equal": {"date": "2025-01-01"}, "slower": {"measured": slower}, "none": None}
    for number, (name, last) in enumerate(cases.items()):
        changes = [{} for _ in range(size - 1)] + [last]
        messages = ranks.run(
            attend_with_files_of_ranks, str(tmp_path / name), 0.4 + number / 64, changes
        )  # ranks compare a call once
        if name == "equal":
            assert messages == [None] * size
            continue
        assert len(set(messages)) == 1
        assert messages[0].startswith("ranks must agree on measurements of `flexdilated tune` (one file for all ranks, or ")
        assert messages[0].endswith(f"on rank {size - 1}")
