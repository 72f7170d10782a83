"""Coordinates become cells of the grid, or the reason why they cannot."""

import re

import pytest
import torch
from torch import Tensor

from flexdilated.slides import SlideError, Tiles, grid_cells
from flexdilated.slides.grid import grid_step
from tests.slides.tools import SIDE, draw_tiles


def slide(coords: Tensor, side: float | None = SIDE, magnification: float | None = None) -> Tiles:
    return Tiles(torch.ones(len(coords), 3), coords, side, magnification)


@pytest.mark.parametrize("origin", [(0, 0), (37, 411), (511, 1)])
def test_cells_are_coordinates_over_the_side_of_a_tile(origin: tuple[int, int]) -> None:
    _, coords = draw_tiles(53, origin=origin)
    expected = [[x // SIDE, y // SIDE] for x, y in coords.tolist()]
    assert grid_cells(slide(coords)).tolist() == expected
    assert grid_cells(slide(coords, None), tile_size_level0=SIDE).tolist() == expected
    assert len({tuple(cell) for cell in expected}) == 53


BORDER = {"slide_ngrids": 29, "shared_cells": True, "magnification": 21.9}
ACCEPTED = {
    "a side that is no whole number": ([[0, 1017], [509, 508]], 508.5, {}, [[0, 2], [1, 0]]),
    "the file's side, by which the option is rounded": ([[300 * SIDE, 0]], SIDE, {"tile_size_level0": SIDE + 0.4}, [[300, 0]]),
    "no float32": ([[2**24 + 1, 0], [2**24, 0]], 1.0, {"slide_ngrids": 2**25}, [[2**24 + 1, 0], [2**24, 0]]),
    "the border": ([[0, 0], [29 * SIDE - 1, 0], [100, 100]], SIDE, BORDER, [[0, 0], [28, 0], [0, 0]]),
    "over the slide's border": ([[6 * SIDE - 1, 0], [6 * SIDE + SIDE - 1, 18 * SIDE]], SIDE, {}, [[5, 0], [6, 18]]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_places_that_are_accepted(name: str) -> None:
    coords, side, options, cells = ACCEPTED[name]
    tiles = slide(torch.tensor(coords), side, 20.0)
    if name == "over the slide's border":  # CLAM's size is known to some pixels
        tiles = tiles._replace(slide_size=(6 * SIDE, 18 * SIDE))
    assert grid_cells(tiles, **options).tolist() == cells


def test_tiles_that_do_not_overlap_never_share_a_cell() -> None:
    # Two pieces of tissue, each with a grid of its own, as CLAM cuts them.
    first, second = torch.cartesian_prod(torch.arange(5), torch.arange(5)) * SIDE, torch.tensor([5 * SIDE + 201, 77])
    coords = torch.cat([first, first + second])
    assert len(grid_cells(slide(coords)).unique(dim=0)) == 50


@pytest.mark.parametrize(
    ("coords", "options", "message"),
    [
        ("tile numbers", {}, "cannot be distinguished; neighbours are 1 apart: multiply numbers of tiles"),
        ("another level", {}, "cannot be distinguished; neighbours are 128 apart: multiply numbers of tiles, or pixels"),
        ("overlapping pieces", {}, "cannot be distinguished: multiply"),
        ("level 0", {"tile_size_level0": 256}, "says that a tile has 512 pixels at level 0, --tile-size-level0 is 256"),
        ("level 0", {"magnification": 40.0}, "says that its tiles were embedded at magnification 20, --magnification is 40"),
        ("twice", {}, "has 2 tiles at coordinates that another tile has too"),
        ("outside", {}, "has tile 1 at [14848, 0], outside the grid of 29 cells of 512 pixels from 0 on; raise --slide-ngrids"),
        ("negative", {}, "has tile 0 at [-1, 0], outside the grid"),
        ("swapped", {}, "has tile 4 at [4096, 0], outside the slide of 3072 x 9216 pixels at level 0; coordinates are (x, y)"),
        ("beyond", {}, "has tile 1 at [0, 9728], outside the slide of 3072 x 9216 pixels at level 0"),
        ("no size", {}, "give the folder of files that do, as CLAM's patches, as --coords, or the size as --tile-size-level0"),
    ],
)
def test_places_that_cannot_be_are_refused(coords: str, options: dict[str, float], message: str) -> None:
    _, regular = draw_tiles(200)
    places = {
        "tile numbers": regular // SIDE,
        "another level": regular // 4,
        "overlapping pieces": torch.tensor([[0, 0], [SIDE, 0], [100, 100]]),
        "twice": torch.cat([regular, regular[3:5]]),
        "outside": torch.tensor([[0, 0], [29 * SIDE, 0]]),
        "negative": torch.tensor([[-1, 0]]),
        "swapped": torch.tensor([[0, x] for x in range(4)] + [[8, 0]]) * SIDE,
        "beyond": torch.tensor([[0, 0], [0, 19 * SIDE]]),
    }.get(coords, regular)
    tiles = slide(places, None if coords == "no size" else SIDE, 20.0)
    if coords in ("swapped", "beyond"):
        tiles = tiles._replace(slide_size=(6 * SIDE, 18 * SIDE))
    with pytest.raises(SlideError, match=re.escape(message)):
        grid_cells(tiles, **{"slide_ngrids": 29, **options})


def test_the_step_of_the_grid_divides_all_distances() -> None:
    _, regular = draw_tiles(200)
    assert grid_step(regular) == SIDE
    assert grid_step(regular[:3]) is None
