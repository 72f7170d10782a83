"""The picture of a plan: its layout, its numbers."""

import numpy as np
import pytest

from flexdilated import DilatedPattern
from flexdilated.analysis.strategies import Layer, traffic_by_ranks
from flexdilated.draw.plan import draw_traffic
from tests.distributed.layers import layer
from tests.draw.layout import assert_apart

MILLION = 1 << 20


@pytest.mark.parametrize(
    "of",
    [
        layer(ranks=1),
        layer(ranks=17, tokens=10_007),
        layer(ranks=96, tokens=10**7, pattern=DilatedPattern((2**20,), (1,)), dtype="float64", batch=4096, heads=1024, kv_heads=32),
        layer(ranks=4, pattern=DilatedPattern(tuple(range(10**9, 10**9 + 10)), (10**8,) * 10)),
    ],
    ids=lambda of: f"{of.tokens} on {of.ranks}",
)
def test_picture_has_no_text_on_text(of: Layer) -> None:
    figure = draw_traffic(of)
    figure.canvas.draw()
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    ticks = [label for label, at in zip(axes.get_yticklabels(), axes.get_yticks()) if low <= at <= high]
    texts = [*figure.texts, *figure.legends, axes.xaxis.label, axes.yaxis.label, *ticks, *axes.get_xticklabels()]
    assert_apart(figure, texts)


def test_picture_shows_all_numbers_zeros_included() -> None:
    of = layer(ranks=64, tokens=MILLION, pattern=DilatedPattern.longnet())
    figure = draw_traffic(of)
    figure.canvas.draw()
    (axes,) = figure.axes
    assert axes.get_yticklabels()[0].get_text() == "0 B"
    values = traffic_by_ranks(of)[0]["gather"]
    assert 0 in dict(values).values()
    drawn = {str(line.get_label()).split(":")[0]: line for line in axes.lines}
    assert list(zip(*(np.asarray(x).tolist() for x in drawn["ours, gather"].get_data()))) == values
