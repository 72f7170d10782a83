"""The picture of a pattern, its numbers and layout, in a figure and in a terminal; the picture of training runs."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from flexdilated import DilatedPattern, draw_pattern
from flexdilated.draw.blocks import draw_blocks
from flexdilated.draw.figure import write
from flexdilated.draw.losses import draw_losses
from flexdilated.draw.map import draw_attention_map
from flexdilated.draw.pattern import CELLS, cell_counts, draw, multiplicity, multiplicity_panels
from flexdilated.draw.terminal import print_panels
from tests.draw.layout import assert_apart, texts_of_panels

THREE = DilatedPattern((5, 11, 17), (1, 2, 3))
MANY = DilatedPattern(tuple(range(16, 256, 16)), tuple(range(1, 16)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "num_tokens", "num_kv_heads", "is_causal"),
    [
        (THREE, 61, 12, True),
        (MANY, 61, 2, False),
        (DilatedPattern((5, 11, 17), (1, 2, 3), heads="grouped"), 53, 7, True),
        (THREE, CELLS, 1, False),
    ],
)
def test_picture_has_sharp_cells_and_no_text_on_text(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, is_causal: bool
) -> None:
    figure = draw(pattern, num_tokens, num_kv_heads, is_causal=is_causal, name="a name")
    figure.canvas.draw()
    assert len(figure.axes) == num_kv_heads
    for axes in figure.axes:
        pixels = axes.bbox.width / num_tokens
        assert pixels == pytest.approx(round(pixels), abs=1e-6)
        assert axes.bbox.height == pytest.approx(axes.bbox.width)
    assert_apart(figure, texts_of_panels(figure))


def test_picture_shows_the_multiplicity_of_each_head() -> None:
    figure = draw(THREE, 23, 5, is_causal=True)
    counts = multiplicity(THREE, 23, 5, is_causal=True)
    for head, axes in enumerate(figure.axes):
        shown = np.asarray(axes.images[0].get_array())
        future = np.triu(np.ones((23, 23), dtype=bool), k=1)
        np.testing.assert_array_equal(shown[future], 0)
        np.testing.assert_array_equal(shown[~future], counts[head][~future] + 1)
        offsets = ", ".join(str(THREE.offset(branch, head, 5)) for branch in range(3))
        assert f"head {head}: offsets {offsets}" in axes.get_title()


@pytest.mark.parametrize(
    ("pattern", "size", "is_causal"),
    [
        (THREE, 2, True),
        (MANY, 7, True),
        (DilatedPattern((5, 11, 17), (2, 3, 7), heads="grouped"), 7, False),
    ],
)
def test_cells_hold_the_sum_over_their_pairs(pattern: DilatedPattern, size: int, is_causal: bool) -> None:
    pairs = multiplicity(pattern, 61, 16, is_causal=is_causal)
    starts = np.arange(0, 61, size)
    expected = np.add.reduceat(np.add.reduceat(pairs, starts, axis=1), starts, axis=2)
    np.testing.assert_array_equal(cell_counts(pattern, 61, 16, size, is_causal=is_causal), expected)


def test_long_sequences_are_drawn_in_cells() -> None:
    panels = multiplicity_panels(DilatedPattern((8, 64), (1, 4)), 64, 4, is_causal=True, most=16)
    assert panels.cell == 4
    cells = panels.panels[0].cells
    assert [cells[0, 1], cells[0, 0], cells[1, 0], cells[2, 0]] == [0, 7, 7, 4]  # future; 11 / 10; 17 / 16; 1 / 16
    figure = draw_pattern(DilatedPattern.longnet(), 2**40, 2, is_causal=True)
    assert figure.legends[0].get_title().get_text() == "joins per pair, in cells of 1,073,741,824 x 1,073,741,824 pairs"
    figure = draw_pattern(DilatedPattern.longnet(), 65_537, 2, is_causal=True)
    figure.canvas.draw()
    assert_apart(figure, texts_of_panels(figure))


def test_dollar_signs_in_names_are_dollar_signs() -> None:
    figures = [
        draw(THREE, 7, 1, name=r"$\\frac{"),
        draw_blocks(THREE, 7, 1, block_size=4, name="$x_$"),
        draw_attention_map(torch.rand(5), title="$5_$", titles=[r"$\\frac{$"]),
        draw_losses({"a$b_$": [{"step": 0, "train": 1.0, "held_out": 2.0}]}, bytes_per_step=7),
    ]
    for figure in figures:
        figure.canvas.draw()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((THREE, 3, 65), "num_kv_heads must be at most 64, got 65"),
        ((THREE, 0, 3), "num_tokens must be at least 1, got 0"),
        ((THREE, "7", 2), "num_tokens must be an integer, got '7'"),
        ((None, 7, 2), "pattern must be a DilatedPattern, got NoneType"),
    ],
)
def test_draw_refuses_numbers_and_types(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        draw(*arguments)


def test_segments_may_be_longer_than_the_sequence() -> None:
    beyond = multiplicity(DilatedPattern((2**40, 2**40), (1, 2**39)), 7, 3)
    np.testing.assert_array_equal(beyond, multiplicity(DilatedPattern((7, 7), (1, 7)), 7, 3))


def test_terminal_picture_has_two_rows_per_line_of_half_blocks() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=100, no_color=False)
    print_panels(console, multiplicity_panels(DilatedPattern((5, 11, 17), (1, 2, 3)), 17, 5, is_causal=True))
    lines = [line for line in file.getvalue().splitlines() if "▀" in line]
    assert [line.count("▀") for line in lines] == [17 * 3] * 9 + [17 * 2] * 9  # three panels, then two, 9 lines for 17 rows


@pytest.mark.slow
def test_picture_shows_every_loss_against_bytes_seen(tmp_path: Path) -> None:
    history = [{"step": 1, "train": 7.5}, {"step": 2, "train": 6.25, "held_out": 6.5}, {"step": 3, "train": 5.0, "held_out": 5.5}]
    figure = draw_losses({"dilated": history, "dense": history[:2]}, bytes_per_step=500_000)
    (axes,) = figure.axes
    drawn = [[x.tolist() for x in line.get_data()] for line in axes.lines]
    assert drawn == [[[0.5, 1.0, 1.5], [7.5, 6.25, 5.0]], [[1.0, 1.5], [6.5, 5.5]], [[0.5, 1.0], [7.5, 6.25]], [[1.0], [6.5]]]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [
        "dilated: training batches",
        "dilated: 5.50 bits per held-out byte",
        "dense: training batches",
        "dense: 6.50 bits per held-out byte",
    ]
    write(figure, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
