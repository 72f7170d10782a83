"""The benchmark of what travelling is hidden: whether it runs."""

from __future__ import annotations

import re

import pytest

from benchmarks.lab import overlap
from flexdilated.distributed.planner.plan import EXCHANGES

pytestmark = pytest.mark.lab


def test_a_line_for_each_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap.main(["--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(EXCHANGES)
    assert all(re.fullmatch(r"\w+: forward \S+ of \S+ s, backward \S+ of \S+ s", line) for line in lines)
