"""Costs per rank are those of the plan."""

import pytest

from flexdilated import DilatedPattern
from flexdilated.analysis import count_rank_costs


def test_rank_costs_are_those_of_the_plan_and_refuse_bad_numbers() -> None:
    ways = count_rank_costs(DilatedPattern.longnet(), 1_048_576, 12, 8)
    assert ways["gather"].both_bytes == 0
    assert ways["ring-all"].forward_bytes == 917_504 * 12 * 2 * 64 * 2
    assert "ulysses" not in ways
    assert [name for name, way in ways.items() if way.is_ours] == ["gather", "ring", "heads"]
    with pytest.raises(ValueError, match="group must be at least 1, got 0"):
        count_rank_costs(DilatedPattern((5,), (1,)), 11, 1, 1, group=0)
    with pytest.raises(ValueError, match="dtype must be one of"):
        count_rank_costs(DilatedPattern((5,), (1,)), 11, 1, 1, dtype="int8")
