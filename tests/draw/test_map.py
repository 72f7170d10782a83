"""The picture of an attention map, by its pixels."""

import math
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from torch import Tensor

from flexdilated import draw_attention_map
from flexdilated.draw.weights import UNSEEN

GRID = torch.cartesian_prod(torch.arange(7), torch.arange(5)) * 256  # x, y


def pixels(path: Path) -> Tensor:
    return torch.from_numpy(imread(path).copy())[..., :3]


def count(image: Tensor, color: tuple[float, float, float]) -> int:
    return int(((image - torch.tensor(color)).abs().amax(dim=-1) < 0.02).sum())


def test_picture_puts_each_weight_at_its_tile(tmp_path: Path) -> None:
    weights = torch.full((35,), 0.01)
    weights[(GRID[:, 0] == 256 * 6) & (GRID[:, 1] == 0)] = 1.0  # the upper right corner
    draw_attention_map(weights, GRID, tmp_path / "map.png")
    image = pixels(tmp_path / "map.png")
    dark = (image - torch.tensor([0.0, 0.1333, 0.3059])).abs().amax(dim=-1) < 0.05  # cividis at its beginning
    left = int(dark.any(dim=0).nonzero()[0])
    field = dark[:, left:].sum(dim=0)
    width = int((field > 0.5 * field.max()).sum())
    bright = (image[:, : left + width] - torch.tensor([0.9957, 0.9093, 0.2178])).abs().amax(dim=-1) < 0.05
    y, x = bright.nonzero().float().mean(dim=0).tolist()
    top, bottom = (int(i) for i in dark[:, left : left + width].any(dim=1).nonzero()[[0, -1]])
    assert y < top + (bottom - top) / 5
    assert x > left + width * 5.5 / 7
    assert bright.sum() * 20 < dark.sum()


def test_picture_shows_tiles_of_weight_zero_in_light_blue_and_holes_in_white(tmp_path: Path) -> None:
    weights = torch.linspace(0.1, 1.0, 35)
    unseen = to_rgb(UNSEEN)
    draw_attention_map(weights, GRID, tmp_path / "all.png")
    assert count(pixels(tmp_path / "all.png"), unseen) < 500  # the edges of letters
    weights[10:20] = 0.0
    draw_attention_map(weights, GRID, tmp_path / "some.png")
    assert count(pixels(tmp_path / "some.png"), unseen) > 5000
    hole = torch.arange(35) != 17
    white = count(pixels(tmp_path / "all.png"), (1.0, 1.0, 1.0))
    draw_attention_map(torch.linspace(0.1, 1.0, 35)[hole], GRID[hole], tmp_path / "hole.png")
    assert count(pixels(tmp_path / "hole.png"), (1.0, 1.0, 1.0)) > white + 1000


def test_picture_of_logarithms_spreads_small_weights(tmp_path: Path) -> None:
    weights = 10.0 ** -torch.arange(35)
    for log_scale in (False, True):
        draw_attention_map(weights, GRID, tmp_path / f"{log_scale}.png", log_scale=log_scale)
    dark = [count(pixels(tmp_path / f"{log_scale}.png"), (0.0, 0.1333, 0.3059)) for log_scale in (False, True)]
    assert dark[1] * 4 < dark[0]


@pytest.mark.parametrize("name", ["map.png", "map.pdf", "map.svg", "map.PNG"])
def test_picture_of_several_panels_is_written_in_every_format(tmp_path: Path, name: str) -> None:
    draw_attention_map(torch.rand(3, 35), GRID, tmp_path / name, titles=["head 0", "head 1", "head 2"])
    text = (tmp_path / name).read_bytes()
    assert text[:4] in (b"\x89PNG", b"%PDF", b"<?xm")


@pytest.mark.parametrize("log_scale", [False, True])
def test_picture_of_one_tile_or_equal_weights_is_drawn(tmp_path: Path, log_scale: bool) -> None:
    draw_attention_map(torch.ones(1), torch.tensor([[3.0, 4.0]]), str(tmp_path / "one.png"), log_scale=log_scale)
    draw_attention_map(torch.ones(35), GRID, tmp_path / "equal.png", log_scale=log_scale, tile_size=100)
    draw_attention_map(torch.ones(17), torch.rand(17, 2), tmp_path / "scattered.png", log_scale=log_scale)
    draw_attention_map(torch.ones(17), torch.arange(17)[:, None] * torch.tensor([1, 0]), tmp_path / "line.png")


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
    assert [axes.patches[0].get_xy() for axes in figure.axes[:2]] == [(2.0, pytest.approx(3.2)), (5.0, 0.0)]
    assert labels(figure) == ["the query"]
    assert figure.get_suptitle() == "layer 3"
    assert [axes.get_title() for axes in figure.axes[:2]] == ["head 0", "head 1"]


def test_words_are_written_in_their_cells() -> None:
    figure = draw_attention_map(torch.tensor([0.1, 0.9, 0.5, 0.0]), words=["a$b", "a longer word", "c\n", "d"], queries=3)
    assert [text.get_text() for text in figure.axes[0].texts] == [r"a\$b", "a longer\N{HORIZONTAL ELLIPSIS}", "c\u21b5", "d"]
    assert labels(figure) == ["weight 0", "the query"]
    figure.canvas.draw()


def test_patches_of_an_image_lie_row_by_row() -> None:
    figure = draw_attention_map(torch.linspace(0.1, 1.0, 15), grid=(3, 5), queries=7)
    assert cells(figure) == [(float(x), float(y)) for y in range(3) for x in range(5)]
    assert figure.axes[0].patches[0].get_xy() == (2.0, 1.0)


def test_long_texts_share_cells_and_say_so() -> None:
    weights = torch.zeros(10_007)
    weights[10_006] = 1.0
    figure = draw_attention_map(weights, queries=10_006)
    assert len(cells(figure)) == 3336  # of 3 tokens
    assert "a cell is the sum of 3 tokens" in labels(figure)
    faces = figure.axes[0].collections[0].get_facecolor()
    assert faces[-1][0] > 0.9  # the last cell is as bright as can be
    assert figure.axes[0].patches[0].get_xy() == (3335 % 64, pytest.approx(3335 // 64 * 1.6))


def test_colours_follow_logarithms_where_one_weight_would_hide_the_others() -> None:
    even, uneven = torch.linspace(0.1, 1.0, 35), torch.linspace(0.1, 1.0, 35)
    uneven[3] = 100.0
    for weights, word in ((even, "attention weight"), (uneven, "attention weight, logarithmic")):
        assert draw_attention_map(weights, GRID).axes[-1].get_ylabel() == word
    assert draw_attention_map(uneven, GRID, log_scale=False).axes[-1].get_ylabel() == "attention weight"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coords": GRID, "grid": (5, 7)}, "grid must come without coords, got both"),
        ({"grid": (5, 7), "words": ["a"] * 35}, "words must come without grid, got both"),
        ({"grid": (5, 6)}, r"grid must be \(rows, columns\) of N=35 patches, got \(5, 6\); leave out tokens that are none"),
        ({"words": ["a"] * 34}, "words must hold one text per token=35, at most 480, got 34"),
        ({"words": "a" * 35}, "words must hold one text per token=35, at most 480, got 'a"),
        ({"tile_size": 3.0}, r"tile_size must come with coords, got 3\.0"),
        ({"queries": 35}, r"queries must be in \[0, N=35\), got 35"),
        ({"queries": [1, 2]}, "queries must be one position, or one per panel=1, got 2"),
    ],
)
def test_picture_rejects_options_of_different_kinds(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        draw_attention_map(torch.ones(35), **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^queries\[0\] must be an integer, got 1\.5$"):
        draw_attention_map(torch.ones(35), queries=[1.5])  # type: ignore[list-item]


def test_picture_rejects_weights_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^weights must have shape \(N,\) or \(P, N\) with N=rows of coords=35, got N=36; leave"):
        draw_attention_map(torch.ones(36), GRID, tmp_path / "map.png")
    with pytest.raises(ValueError, match=r"^weights must have from 1 to 64 panels, got 65$"):
        draw_attention_map(torch.ones(65, 35), GRID, tmp_path / "map.png")
    for wrong in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"^weights must be finite and at least 0, got others$"):
            draw_attention_map(torch.full((35,), wrong), GRID, tmp_path / "map.png")
    with pytest.raises(ValueError, match=r"^weights must not all be 0 under log_scale, got only zeros$"):
        draw_attention_map(torch.zeros(35), GRID, tmp_path / "map.png", log_scale=True)
    with pytest.raises(TypeError, match=r"^weights must be a tensor, got list$"):
        draw_attention_map([1.0], GRID, tmp_path / "map.png")
    with pytest.raises(TypeError, match=r"^weights must hold numbers, got torch.bool$"):
        draw_attention_map(torch.ones(35, dtype=torch.bool), GRID, tmp_path / "map.png")
    with pytest.raises(
        ValueError, match=r"got \(1, 4, 2, 35\); of attention_map's take one sequence and query, as weights\[0, :, 0\]$"
    ):
        draw_attention_map(torch.ones(1, 4, 2, 35), GRID)
    draw_attention_map(torch.zeros(35), GRID, tmp_path / "map.png")


def test_picture_rejects_coordinates_and_options_that_do_not_fit(tmp_path: Path) -> None:
    weights = torch.ones(35)
    for wrong in (GRID[:, :1], torch.zeros(0, 2), GRID[0]):
        with pytest.raises(ValueError, match=r"^coords must have shape \(N, 2\), one row per tile, got"):
            draw_attention_map(weights, wrong, tmp_path / "map.png")
    for kind, wrong in (("list", ["a"] * 35), ("tuple", (5, 7)), ("str", "map.png")):
        with pytest.raises(
            TypeError, match=rf"^coords must be a tensor, got {kind}; give texts as words=, .* grid=, a file as path=$"
        ):
            draw_attention_map(weights, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^coords must be finite, got others$"):
        draw_attention_map(weights, GRID * math.nan, tmp_path / "map.png")
    with pytest.raises(ValueError, match=r"^path must end in one of \('.png', '.pdf', '.svg'\), got '.*map.gif'$"):
        draw_attention_map(weights, GRID, tmp_path / "map.gif")
    for titles in (["a", "b"], "a"):
        with pytest.raises(ValueError, match=r"^titles must hold one text per panel=1, got"):
            draw_attention_map(weights, GRID, tmp_path / "map.png", titles=titles)
    for size in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"^tile_size must be above 0 and finite, got {size}$"):
            draw_attention_map(weights, GRID, tmp_path / "map.png", tile_size=size)


def test_one_vanishing_weight_does_not_make_all_others_alike() -> None:
    weights = torch.cat([torch.linspace(0.0001, 0.001, 200), torch.tensor([0.5, 1e-30])])
    figure = draw_attention_map(weights, queries=7)
    low, high = figure.axes[1].get_xlim()  # the scale lies below a picture that is low
    assert (low, high) == (pytest.approx(0.5e-4), pytest.approx(0.5))
    given = draw_attention_map(weights, queries=7, log_scale=True)
    assert given.axes[1].get_xlim()[0] == pytest.approx(1e-30, rel=1e-6, abs=0.0)


def test_labels_and_scale_lie_inside_the_picture_and_a_small_query_has_a_ring() -> None:
    for num_tokens, title in ((100_000, None), (131, "a title"), (7, None)):
        figure = draw_attention_map(torch.rand(num_tokens, generator=torch.Generator().manual_seed(3)), queries=5, title=title)
        figure.canvas.draw()
        bar = figure.axes[1]
        for text in (*figure.axes[0].texts, bar.xaxis.label, bar.yaxis.label):
            extent = text.get_window_extent()
            assert 0 <= extent.x0 <= extent.x1 <= figure.bbox.width
            assert 0 <= extent.y0 <= extent.y1 <= figure.bbox.height
        rings = figure.axes[0].lines
        assert len(rings) == (num_tokens > 7)
        assert all(line.get_markersize() > 9 for line in rings)
