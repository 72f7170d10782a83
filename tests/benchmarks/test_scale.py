"""The kept table of scale is what the planner says."""

import json

import pytest

from benchmarks import scale

pytestmark = pytest.mark.lab


def kept() -> dict[str, dict[str, object]]:
    return json.loads(scale.RESULTS.read_text())["cells"]


def test_every_cell_is_kept() -> None:
    assert list(kept()) == [f"{p}/{n}/{r}" for p in scale.PATTERNS for n in scale.TOKENS for r in scale.RANKS]


@pytest.mark.parametrize(
    "name", ["longnet/1000000/8", "longnet/1000000/64", "gigapath/1000000/8", "gigapath/1000000/64", "gigapath/100000000/8"]
)
def test_kept_cells_are_what_the_planner_says(name: str) -> None:
    pattern, tokens, ranks = name.split("/")
    found = kept()[name]
    del found["commit"]
    assert scale.cell(pattern, int(tokens), int(ranks)) == pytest.approx(found)
