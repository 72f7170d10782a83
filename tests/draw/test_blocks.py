"""The picture of a pattern's tiles."""

import numpy as np
import pytest

from flexdilated import DilatedPattern
from flexdilated.draw.blocks import PICTURE_CELLS, draw_blocks
from flexdilated.draw.panels import describe_heads
from flexdilated.draw.tiles import head_tiles
from tests.draw.layout import assert_apart, texts_of_panels


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        ((3,), "3"),
        ((0, 4), "0, 4"),
        ((2, 3, 4), "2-4"),
        ((0, 1, 2, 5), "0, 1, 2, 5"),
        ((1, 5, 9, 13, 17), "1, 5, ..., 17 (5 heads)"),
    ],
)
def test_heads_are_named_briefly(heads: tuple[int, ...], text: str) -> None:
    assert describe_heads(heads) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "num_tokens", "num_kv_heads", "block_size", "is_causal"),
    [
        (DilatedPattern((100, 1500, 2000), (1, 300, 2), heads="grouped"), 3100, 7, 128, True),
        (DilatedPattern.longnet(), 1048576, 12, 128, True),
    ],
)
def test_picture_has_sharp_cells_and_no_text_on_text(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, block_size: int, is_causal: bool
) -> None:
    figure = draw_blocks(pattern, num_tokens, num_kv_heads, block_size=block_size, is_causal=is_causal, name="a name")
    figure.canvas.draw()
    texts = texts_of_panels(figure)
    for axes in figure.axes:
        pixels = axes.bbox.width / axes.images[0].get_array().shape[1]
        assert pixels == pytest.approx(round(pixels), abs=1e-6)
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            assert ticks
            texts += [tick.label1 for tick in ticks if tick.label1.get_visible()]
    assert_apart(figure, texts)


def test_picture_shows_the_tiles_of_each_head_in_tokens() -> None:
    pattern = DilatedPattern((15, 31), (1, 7))
    found = head_tiles(pattern, 93, 5, 8, 1, is_causal=True)
    figure = draw_blocks(pattern, 93, 5, block_size=8, is_causal=True)
    assert len(figure.axes) == len(found) > 1
    for of, axes in zip(found, figure.axes):
        np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), of.cells)
        assert axes.images[0].get_extent() == [-0.5, 95.5, 95.5, -0.5]  # 12 tiles of 8 tokens
        assert f"waste: raw {of.tally.waste_raw}, packed {of.tally.waste_packed}" in axes.get_title().replace("\xa0", " ")
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "tiles of 8 x 8 pairs"
    assert [text.get_text() for text in legend.get_texts()] == ["not visited", "partial", "full", "future"]


def test_picture_of_many_tiles_says_how_many_a_cell_stands_for() -> None:
    pattern = DilatedPattern((64,), (1,))
    figure = draw_blocks(pattern, 2 * PICTURE_CELLS + 1, 1, block_size=1)
    assert figure.axes[0].images[0].get_array().shape == (342, 342)  # of 3 x 3 tiles
    assert figure.axes[0].images[0].get_extent() == [-0.5, 1025.5, 1025.5, -0.5]
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "tiles of 1 x 1 pairs, 3 x 3 of them per cell"
    labels = ["none visited", "less than half", "half or more", "all visited", "all full"]
    assert [text.get_text() for text in legend.get_texts()] == labels
    figure = draw_blocks(pattern, PICTURE_CELLS, 1, block_size=1)
    assert figure.axes[0].images[0].get_array().shape == (PICTURE_CELLS, PICTURE_CELLS)
