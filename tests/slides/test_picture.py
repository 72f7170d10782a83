"""The picture of weights over a slide: every tile in its place, none lost, holes left open."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flexdilated import draw_attention_map
from flexdilated.draw.weights import UNSEEN
from flexdilated.slides.picture import DECADES, FINEST, draw_slide_map
from tests.draw.layout import assert_apart

SIDE = 512.0
NAME = "TCGA-00-0000-01Z-00-DX1.00000000-0000-0000-0000-000000000000"  # as long as those are


def tissue(columns: int, rows: int) -> Tensor:
    """Corners of an ellipse of tiles with a hole, whose grid begins anywhere."""
    cells = torch.cartesian_prod(torch.arange(columns), torch.arange(rows)).double()
    x, y = (2 * cells[:, 0] + 1) / columns - 1, (2 * cells[:, 1] + 1) / rows - 1
    inside = (x.square() + y.square() < 1) & ~((x + 0.3).square() + (y + 0.2).square() < 0.08)
    return cells[inside] * SIDE + torch.tensor([37.0, 411.0])


def image(figure: Any, panel: int = 0, layer: int = 0) -> np.ndarray:
    return np.asarray(figure.axes[panel].images[layer].get_array())


def at(figure: Any, x: float, y: float, panel: int = 0, layer: int = 0) -> np.ndarray:
    """The colour at a place in pixels of level 0, from the corner of the picture."""
    shown = figure.axes[panel].images[layer]
    left, right, bottom, top = shown.get_extent()
    rows, columns = image(figure, panel, layer).shape[:2]
    return image(figure, panel, layer)[int((y - top) / (bottom - top) * rows), int((x - left) / (right - left) * columns)]


@pytest.mark.slow
def test_every_tile_has_the_colour_of_its_weight() -> None:
    from matplotlib import colormaps
    from matplotlib.colors import to_rgba

    coords = tissue(17, 13)
    weights = 10 ** (-4 * torch.rand(len(coords), dtype=torch.float64))
    weights[5] = 0.0
    figure = draw_slide_map(weights, coords, tile_size=SIDE)
    low = coords.amin(0)
    largest = weights.max()
    for weight, corner in zip(weights, coords - low):
        value = 1 + (weight / largest).log10() / np.log10(DECADES)
        expected = to_rgba(UNSEEN) if weight == 0 else colormaps["cividis"](float(value.clamp(0, 1)))
        np.testing.assert_allclose(at(figure, *(corner + SIDE / 2).tolist()), expected, atol=0.01)
    hole = (torch.tensor([17 * 0.35, 13 * 0.4]) * SIDE).tolist()
    assert at(figure, *hole)[3] == 0.0
    figure.canvas.draw()
    assert_apart(figure, [*figure.legends, *figure.texts])


@pytest.mark.parametrize(("low", "high"), [(0.99999, 1.00001), (2e-6, 5e-4)])
def test_the_scale_has_plain_numbers_in_their_places(low: float, high: float) -> None:
    weights, coords = torch.linspace(low, high, 7, dtype=torch.float64), torch.arange(14).reshape(7, 2) * SIDE
    for figure in (draw_slide_map(weights, coords, tile_size=SIDE), draw_attention_map(weights, grid=(1, 7))):
        figure.canvas.draw()
        bar = figure.axes[-1]
        axis = bar.yaxis if bar.get_ylim() != (0.0, 1.0) else bar.xaxis
        numbers = {label.get_text(): place for label, place in zip(axis.get_ticklabels(), axis.get_ticklocs())}
        assert axis.get_offset_text().get_text() == ""
        assert len(numbers) >= 2
        for text, place in numbers.items():
            assert re.fullmatch(r"\d+(\.\d+)?", text)
            assert float(text) == pytest.approx(place, rel=1e-10)


@pytest.mark.parametrize("cells", [(1, 1), (1, 300)])
def test_few_tiles_and_strips_fill_their_panel(cells: tuple[int, int]) -> None:
    coords = torch.cartesian_prod(*(torch.arange(count) for count in cells)) * SIDE
    options = {"title": f"{NAME}: what tile 5 reads", "titles": ["layer 11, mean of heads"]}
    figure = draw_slide_map(torch.rand(len(coords)) + 0.1, coords, tile_size=SIDE, query=0, **options)
    assert max(image(figure).shape) <= max(cells) * FINEST
    assert (image(figure)[..., 3] == 1.0).all()
    figure.canvas.draw()
    assert_apart(figure, [*figure.legends, *figure.texts])
    box = figure.axes[0].get_window_extent()
    assert min(box.width / cells[0], box.height / cells[1]) > 4  # pixels of a tile
    bar = figure.axes[1].yaxis.label
    for text in (figure.axes[0].title, bar, *figure.texts, *figure.legends, figure.axes[0].patches[0]):
        shown = text.get_window_extent()
        assert 0 <= shown.x0 <= shown.x1 <= figure.bbox.width
        assert 0 <= shown.y0 <= shown.y1 <= figure.bbox.height


def test_no_tile_is_lost_where_tiles_are_smaller_than_pixels() -> None:
    coords = tissue(700, 500)
    assert len(coords) > 200_000
    weights = torch.full((9, len(coords)), 1e-6)
    marked = torch.randint(len(coords), (9,))
    weights[torch.arange(9), marked] = 1.0
    figure = draw_slide_map(weights, coords, tile_size=SIDE, titles=[f"head {i}" for i in range(9)])
    for panel, tile in enumerate(marked):
        assert image(figure, panel).shape[1] < 700
        brightest = (image(figure, panel)[..., 0] > 0.9) & (image(figure, panel)[..., 3] == 1.0)
        assert brightest.sum() == 1
        np.testing.assert_allclose(at(figure, *(coords[tile] - coords.amin(0) + SIDE / 2).tolist(), panel)[0], 1.0, atol=0.1)


def test_a_thumbnail_lies_underneath_in_the_same_places(tmp_path: Path) -> None:
    from matplotlib.image import imsave

    picture = np.zeros((20, 40, 3))
    picture[5:, :] = (0.5, 0.25, 1.0)
    imsave(tmp_path / "thumbnail.png", picture)
    coords = torch.tensor([[0.0, 0.0], [4 * SIDE, 2 * SIDE]])
    slide_size = (8 * SIDE, 4 * SIDE)
    options = {"thumbnail": tmp_path / "thumbnail.png", "slide_size": slide_size, "query": 1, "title": "a slide, $5"}
    figure = draw_slide_map(torch.tensor([0.5, 1.0]), coords, tmp_path / "map.png", tile_size=SIDE, **options)
    assert figure.axes[0].images[0].get_extent() == [0, *slide_size, 0]
    np.testing.assert_allclose(at(figure, 1, 1.5 * SIDE)[:3], (0.5, 0.25, 1.0), atol=0.01)
    assert at(figure, SIDE / 2, SIDE / 2, layer=1)[3] == pytest.approx(0.65)
    assert at(figure, 2 * SIDE, SIDE / 2, layer=1)[3] == 0.0
    (mark,) = figure.axes[0].patches
    assert mark.get_xy() == (4 * SIDE, 2 * SIDE)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    figure.canvas.draw()
    assert_apart(figure, [*figure.legends, *figure.texts])


@pytest.mark.parametrize(
    ("picture", "slide_size", "message"),
    [
        # A slide of 8 x 4 tiles: sizes of another level, a thumbnail of a part, one that lies on its side.
        ((20, 40), (8 * SIDE / 4, 4 * SIDE / 4), "slide_size must be that of level 0, in which all tiles begin, got 1024 x 512"),
        ((40, 20), (8 * SIDE, 4 * SIDE), "thumbnail must have the shape of the slide=4096 x 2048, got 20 x 40 pixels"),
    ],
)
def test_a_thumbnail_beside_the_tiles_is_refused(
    tmp_path: Path, picture: tuple[int, int], slide_size: tuple[float, ...], message: str
) -> None:
    from matplotlib.image import imsave

    imsave(tmp_path / "thumbnail.png", np.zeros((*picture, 3)))
    options = {"tile_size": SIDE, "thumbnail": tmp_path / "thumbnail.png", "slide_size": slide_size}
    with pytest.raises(ValueError, match=re.escape(message)):
        draw_slide_map(torch.ones(2), torch.tensor([[0.0, 0.0], [7 * SIDE, 3 * SIDE]]), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.ones(4)}, "coords must be finite, of shape (N, 2) with N=tiles of weights=4, got (3, 2)"),
        ({"weights": torch.zeros(3)}, "weights must not all be 0, got only zeros"),
        ({"tile_size": 0.0}, "tile_size must be above 0, got 0.0"),
        ({"slide_size": (5.0, 5.0)}, "slide_size must come with thumbnail, and a thumbnail with it, got (5.0, 5.0) and None"),
        ({"thumbnail": "a.png"}, "slide_size must come with thumbnail, and a thumbnail with it, got None and a.png"),
        ({"query": 3}, "query must be in [0, N=3), got 3"),
    ],
)
def test_what_cannot_be_drawn_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"weights": torch.ones(3), "coords": torch.arange(6).reshape(3, 2) * 512, "tile_size": SIDE, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        draw_slide_map(**arguments)
