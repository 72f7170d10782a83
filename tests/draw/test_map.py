"""The picture of an attention map, by its pixels."""

import math
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from torch import Tensor

from flexdilated import draw_attention_map

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


def test_picture_shows_tiles_of_weight_zero_in_grey_and_holes_in_white(tmp_path: Path) -> None:
    weights = torch.linspace(0.1, 1.0, 35)
    grey = (217 / 255, 217 / 255, 217 / 255)
    draw_attention_map(weights, GRID, tmp_path / "all.png")
    assert count(pixels(tmp_path / "all.png"), grey) < 500  # the edges of letters
    weights[10:20] = 0.0
    draw_attention_map(weights, GRID, tmp_path / "some.png")
    assert count(pixels(tmp_path / "some.png"), grey) > 5000
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


def test_picture_rejects_weights_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^weights must have shape \(N,\) or \(P, N\) with N=rows of coords=35, got \(36,\); leave"
    ):
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
    draw_attention_map(torch.zeros(35), GRID, tmp_path / "map.png")


def test_picture_rejects_coordinates_and_options_that_do_not_fit(tmp_path: Path) -> None:
    weights = torch.ones(35)
    for wrong in (GRID[:, :1], torch.zeros(0, 2), GRID[0]):
        with pytest.raises(ValueError, match=r"^coords must have shape \(N, 2\), one row per tile, got"):
            draw_attention_map(weights, wrong, tmp_path / "map.png")
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
