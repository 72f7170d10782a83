"""The picture of an attention map."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from flexdilated import draw_attention_map
from flexdilated.draw.weights import UNSEEN


def test_cells_have_the_colours_of_their_weights() -> None:
    figure = draw_attention_map(torch.tensor([0.0, 0.25, 1.0, 0.5]), grid=(2, 2))
    faces = figure.axes[0].collections[0].get_facecolor()
    expected = [to_rgba(UNSEEN), *(colormaps["cividis"](weight) for weight in (0.25, 1.0, 0.5))]
    np.testing.assert_allclose(faces, expected)
    boxes = [path.get_extents() for path in figure.axes[0].collections[0].get_paths()]
    assert [box.width for box in boxes] == pytest.approx([0.6, 1, 1, 1])
    assert [(box.x0 + box.x1, box.y0 + box.y1) for box in boxes] == [(1, 1), (3, 1), (1, 3), (3, 3)]


@pytest.mark.parametrize("name", ["map.pdf", "map.svg", "map.PNG"])
def test_picture_of_several_panels_is_written_in_every_format(tmp_path: Path, name: str) -> None:
    draw_attention_map(torch.rand(3, 35), tmp_path / name, grid=(5, 7), titles=["head 0", "head 1", "head 2"])
    text = (tmp_path / name).read_bytes()
    assert text[:4] in (b"\x89PNG", b"%PDF", b"<?xm")


def centers(axes: Axes) -> tuple[float, float]:
    """The middle of the outline of the query."""
    (mark,) = axes.patches
    return tuple(mark.get_center())


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def cells(figure: Figure, panel: int = 0) -> list[tuple[float, float]]:
    """The upper left corners of the cells of a panel."""
    (collection,) = figure.axes[panel].collections
    return [tuple(path.vertices[0].tolist()) for path in collection.get_paths()]


def test_a_text_is_a_strip_of_lines_and_the_query_is_outlined() -> None:
    weights = torch.rand(2, 131, generator=torch.Generator().manual_seed(0)) + 0.1
    figure = draw_attention_map(weights, queries=[130, 5], title="layer 3", titles=["head 0", "head 1"])
    assert cells(figure) == [(float(i % 64), pytest.approx(i // 64 * 1.6)) for i in range(131)]
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "64", "128"]
    assert [centers(axes) for axes in figure.axes[:2]] == [(2.5, pytest.approx(3.9)), (5.5, pytest.approx(0.7))]
    assert labels(figure) == ["the query"]
    assert figure.get_suptitle() == "layer 3"
    assert [axes.get_title() for axes in figure.axes[:2]] == ["head 0", "head 1"]


def test_words_are_written_in_their_cells() -> None:
    figure = draw_attention_map(torch.tensor([0.1, 0.9, 0.5, 0.0]), words=["a$b", "a longer word", "c\n", "d"], queries=3)
    assert [text.get_text() for text in figure.axes[0].texts] == [r"a\$b", "a longer\N{HORIZONTAL ELLIPSIS}", "c\u21b5", "d"]
    assert labels(figure) == ["exactly 0", "the query"]
    figure.canvas.draw()


def test_patches_of_an_image_lie_row_by_row() -> None:
    figure = draw_attention_map(torch.linspace(0.1, 1.0, 15), grid=(3, 5), queries=7)
    assert cells(figure) == [(float(x), float(y)) for y in range(3) for x in range(5)]
    assert centers(figure.axes[0]) == (2.5, 1.5)


def test_long_texts_share_cells_and_say_so() -> None:
    weights = torch.zeros(10_007)
    weights[[2, 10_006]] = 1.0
    figure = draw_attention_map(weights, queries=10_006)
    assert len(cells(figure)) == 3336  # of 3 tokens
    assert "a cell is the sum of 3 tokens" in labels(figure)
    faces = figure.axes[0].collections[0].get_facecolor()
    assert faces[-1][0] > 0.9  # the first cell and the last are as bright as can be
    np.testing.assert_array_equal(faces[0], faces[-1])
    assert centers(figure.axes[0]) == (pytest.approx(3335 % 64 + 0.5), pytest.approx(3335 // 64 * 1.6 + 0.7))


def test_colours_follow_logarithms_where_one_weight_would_hide_the_others() -> None:
    even, uneven = torch.linspace(0.1, 1.0, 35), torch.linspace(0.1, 1.0, 35)
    uneven[3] = 100.0
    for weights, word in ((even, "attention weight"), (uneven, "attention weight, logarithmic")):
        assert draw_attention_map(weights, grid=(5, 7)).axes[-1].get_ylabel() == word
    assert draw_attention_map(uneven, grid=(5, 7), log_scale=False).axes[-1].get_ylabel() == "attention weight"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": (5, 7), "words": ["a"] * 35}, "words must come without grid, got both"),
        ({"grid": (5, 6)}, r"grid must be \(rows, columns\) of N=35 patches, got \(5, 6\); leave out tokens that are no patches"),
        ({"words": ["a"] * 34}, "words must hold one text per token=35, at most 480, got 34"),
        ({"queries": 35}, r"queries must be in \[0, N=35\), got 35"),
        ({"queries": [1, 2]}, "queries must be one position, or one per panel=1, got 2"),
        ({"titles": ["a", "b"]}, "titles must hold one text per panel=1, got"),
        ({"path": "map.gif"}, r"path must end in one of \('.png', '.pdf', '.svg'\), got 'map.gif'"),
        ({"weights": torch.full((35,), -0.1)}, "weights must be finite and at least 0, got others"),
        ({"weights": torch.full((35,), math.nan)}, "weights must be finite and at least 0, got others"),
        ({"weights": torch.ones(1, 4, 2, 35)}, r"weights must .*; of attention_map's take one sequence and query, as weights"),
        ({"weights": torch.zeros(35), "log_scale": True}, "weights must not all be 0 under log_scale, got only zeros"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        draw_attention_map(**{"weights": torch.ones(35), **options})


def test_one_vanishing_weight_does_not_make_all_others_alike() -> None:
    weights = torch.cat([torch.linspace(0.0001, 0.001, 200), torch.tensor([0.5, 1e-30])])
    figure = draw_attention_map(weights, queries=7)
    assert figure.axes[1].get_xlim() == (pytest.approx(0.5e-4), pytest.approx(0.5))  # the scale is below a picture that is low
    draw_attention_map(torch.zeros(35), log_scale=False)
    draw_attention_map(torch.ones(35), log_scale=True)


def test_labels_scale_and_query_lie_inside_the_picture() -> None:
    for num_tokens, title in ((100_000, None), (131, "a title"), (7, None)):
        figure = draw_attention_map(torch.rand(num_tokens, generator=torch.Generator().manual_seed(3)), queries=5, title=title)
        figure.canvas.draw()
        bar = figure.axes[1]
        mark = figure.axes[0].patches[0].get_window_extent()
        assert min(mark.width, mark.height) > 9
        for text in (*figure.axes[0].texts, bar.xaxis.label, bar.yaxis.label):
            extent = text.get_window_extent()
            assert 0 <= extent.x0 <= extent.x1 <= figure.bbox.width
            assert 0 <= extent.y0 <= extent.y1 <= figure.bbox.height
