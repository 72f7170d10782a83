"""How compact the segments of a 2-D order are: distances in the grid, no times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.conftest import Sizes
from benchmarks.timing import Ratio
from flexdilated.ordering import Order, grid_order

# A square power of two, which the classic curve covers too, and a slide's worth of tiles, which it does not.
GRIDS = {False: ((256, 256), (211, 307)), True: ((64, 64), (53, 79))}
SEGMENT_LENGTHS = {False: 1024, True: 128}


def spread(order: Order, width: int, segment_length: int) -> float:
    """The root mean square distance between two tokens of a segment, averaged over the whole segments.

    Two draws from a segment differ by `2 * variance` in the mean square, in either direction.
    """
    path = torch.stack((order.permutation // width, order.permutation % width), dim=1).double()
    segments = path[: len(path) // segment_length * segment_length].view(-1, segment_length, 2)
    return (2 * segments.var(dim=1, correction=0).sum(dim=1)).sqrt().mean().item()


@pytest.mark.parametrize("index", [0, 1], ids=["power of two", "ragged"])
def test_segments_are_compact(benchmark: Any, sizes: Sizes, record: Callable[..., None], index: int) -> None:
    """A disc is the most compact patch: n tokens of it are `sqrt(n / pi)` apart in the root mean square."""
    height, width = GRIDS[sizes.quick][index]
    length = SEGMENT_LENGTHS[sizes.quick]

    def orders() -> dict[str, Order]:
        return {name: grid_order((height, width), order=name) for name in ("hilbert", "serpentine", "row_major")}

    spreads = {name: spread(order, width, length) for name, order in benchmark.pedantic(orders, rounds=1).items()}
    disc = (length / torch.pi) ** 0.5
    assert disc < spreads["hilbert"] < 1.5 * disc
    record(
        Ratio(
            f"ordering/spread of a segment, hilbert over row-major/{height}x{width}",
            spreads["hilbert"] / spreads["row_major"],
            0.5,
            "lower",
        ),
        shape=(1, height * width, 1, 0),
        dtype=torch.int64,
        segment_length=length,
        spread=spreads | {"disc": disc},
    )
