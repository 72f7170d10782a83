"""Grid cells of the tiles of a slide, and checks of coordinates; how slides are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flexdilated.slides.formats import SlideError, Tiles, files_beside, read_tiles

FEWEST_GAPS = 8  # of tiles that are scattered at random, so many are all even in one of 256 slides
MAGNIFICATION_ERROR = 0.1  # relative: 0.47 micrometres per pixel are called 20 as 0.5 are


def grid_cells(
    tiles: Tiles,
    *,
    tile_size_level0: float | None = None,
    magnification: float | None = None,
    slide_ngrids: int = 1000,
    shared_cells: bool = False,
) -> Tensor:
    """The cells of the tiles, `(N, 2)` int64: coordinates at level 0, divided by the side of a tile there, rounded down.

    Tiles that do not overlap never share a cell, whatever their origin; coordinates in another unit, as those of another level or
    tile numbers, all but always do.

    Args:
        tiles: The slide.
        tile_size_level0: Side of a tile in pixels of level 0. Needed where the files do not say; where they do, it must agree.
        magnification: At which the tiles must have been embedded, where the files say.
        slide_ngrids: Cells along each side of the grid.
        shared_cells: Whether tiles may share cells, as those that overlap do.

    Raises:
        SlideError: If the side is not known or two are, the magnification is another, two tiles have one place, tiles share cells,
            or one lies outside the grid or the slide.
    """
    file_side, file_magnification = tiles.tile_size_level0, tiles.magnification
    if file_side is None and tile_size_level0 is None:
        raise SlideError(
            "does not say how large a tile is at level 0; give the folder of files that do, as CLAM's patches, as --coords, or the "
            "size as --tile-size-level0"
        )
    if file_side is not None and tile_size_level0 is not None and abs(file_side - tile_size_level0) > 0.5:
        raise SlideError(f"says that a tile has {file_side:g} pixels at level 0, --tile-size-level0 is {tile_size_level0:g}")
    side = file_side if file_side is not None else tile_size_level0
    assert side is not None
    if (
        file_magnification is not None
        and magnification is not None
        and abs(file_magnification / magnification - 1.0) > MAGNIFICATION_ERROR
    ):
        raise SlideError(
            f"says that its tiles were embedded at magnification {file_magnification:g}, --magnification is {magnification:g}"
        )
    coords = tiles.coords
    if (twice := len(coords) - len(coords.unique(dim=0))) > 0:
        raise SlideError(f"has {twice} tiles at coordinates that another tile has too")
    cells = coords.double().div(side).floor().to(torch.int64)
    outside = (cells < 0) | (cells >= slide_ngrids)
    if bool(outside.any()):
        row = int(outside.any(dim=1).nonzero()[0])
        raise SlideError(
            f"has tile {row} at {coords[row].tolist()}, outside the grid of {slide_ngrids} cells of {side:g} pixels from 0 on; "
            "raise --slide-ngrids, or check --tile-size-level0"
        )
    # Beyond the rounding of CLAM's levels: x and y that have changed places, another slide's coordinates, too large a unit.
    if tiles.slide_size is not None and bool((beyond := coords >= torch.tensor(tiles.slide_size).double() + side).any()):
        row, (width, height) = int(beyond.any(dim=1).nonzero()[0]), tiles.slide_size
        raise SlideError(
            f"has tile {row} at {coords[row].tolist()}, outside the slide of {width:g} x {height:g} pixels at level 0; coordinates "
            "are (x, y) in these pixels"
        )
    if not shared_cells and (occupied := len(cells.unique(dim=0))) < len(coords):
        step = grid_step(coords)
        distance = "" if step is None else f"; neighbours are {step} apart"
        raise SlideError(
            f"would put {len(coords)} tiles in {occupied} cells of {side:g} pixels, where they cannot be distinguished{distance}: "
            "multiply numbers of tiles, or pixels of another level, to get pixels of level 0; check --tile-size-level0; for tiles "
            "that overlap use --shared-cells"
        )
    return cells


def grid_step(coords: Tensor) -> int | None:
    """The largest step that divides all distances of neighbours in rows and columns, or None if there are too few of them."""
    gaps = []
    for along, across in ((0, 1), (1, 0)):
        order = coords[:, along].argsort(stable=True)
        steps = coords[order[coords[order, across].argsort(stable=True)]].diff(dim=0)
        gaps += steps[(steps[:, across] == 0) & (steps[:, along] > 0), along].tolist()
    return math.gcd(*gaps) if len(gaps) >= FEWEST_GAPS else None


@dataclass(frozen=True)
class Reading:
    """How slides are read: the arguments of `read_tiles` and `grid_cells`."""

    coords_folder: Path | None = None
    table: str | None = None
    tile_size_level0: float | None = None
    magnification: float | None = 20.0
    shared_cells: bool = False

    def coords_of(self, name: str) -> Path | None:
        """The folder of coordinates of a slide: in `coords_folder` the one called as the slide's own, where there is one."""
        folder = self.coords_folder
        nested = None if folder is None else folder / Path(name).parent
        return nested if nested is not None and nested.is_dir() else folder

    def read(self, name: str, path: Path, *, slide_ngrids: int = 1000) -> tuple[Tiles, Tensor]:
        """The tiles of the slide of this name, and their cells in the grid.

        Raises:
            SlideError: As `read_tiles` and `grid_cells`.
        """
        tiles = read_tiles(path, coords_folder=self.coords_of(name), table=self.table, tile_size_level0=self.tile_size_level0)
        cells = grid_cells(
            tiles,
            tile_size_level0=self.tile_size_level0,
            magnification=self.magnification,
            slide_ngrids=slide_ngrids,
            shared_cells=self.shared_cells,
        )
        return tiles, cells

    def files_beside(self, name: str, path: Path) -> list[Path]:
        """The files of coordinates and metadata that `read` takes beside `path`."""
        return files_beside(path, self.coords_of(name))
