"""Grid cells of the tiles of a slide, and checks of coordinates."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flexdilated.hub.slides.formats import SlideError, Tiles

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
    read, said = tiles.tile_size_level0, tiles.magnification
    if read is None and tile_size_level0 is None:
        raise SlideError(
            "does not say how large a tile is at level 0; give the folder of files that do, as CLAM's patches, as --coords, or the "
            "size as --tile-size-level0"
        )
    if read is not None and tile_size_level0 is not None and abs(read - tile_size_level0) > 0.5:
        raise SlideError(f"says that a tile has {read:g} pixels at level 0, --tile-size-level0 is {tile_size_level0:g}")
    side = read if read is not None else tile_size_level0
    assert side is not None
    if said is not None and magnification is not None and abs(said / magnification - 1.0) > MAGNIFICATION_ERROR:
        raise SlideError(f"says that its tiles were embedded at magnification {said:g}, --magnification is {magnification:g}")
    coords = tiles.coords
    if (twice := len(coords) - len(coords.unique(dim=0))) > 0:
        raise SlideError(f"has {twice} tiles at coordinates that another tile has too")
    cells = cells_of(coords, side)
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
    if not shared_cells and (reason := why_shared(coords, side)) is not None:
        raise SlideError(reason)
    return cells


def cells_of(coords: Tensor, side: float) -> Tensor:
    """Coordinates over the side of a tile, rounded down."""
    return coords.double().div(side).floor().to(torch.int64)


def why_shared(coords: Tensor, side: float) -> str | None:
    """What is wrong where tiles would share cells, as the end of a sentence that begins with the slide; None where none do."""
    occupied = len(cells_of(coords, side).unique(dim=0))
    if occupied == len(coords):
        return None
    told = f"would put {len(coords)} tiles in {occupied} cells of {side:g} pixels, where tiles in one cell cannot be told apart; "
    return told + _remedy(coords, side)


def neighbour_distance(coords: Tensor) -> float | None:
    """The most frequent distance between neighbours in a row or a column, or None where no two tiles share one."""
    steps, counts = _gaps(coords).unique(return_counts=True)
    return float(steps[counts.argmax()]) if len(steps) else None


def grid_step(coords: Tensor) -> int | None:
    """The largest step that divides all distances of rows and columns, or None if there are too few tiles."""
    gaps = _gaps(coords)
    return int(np.gcd.reduce(gaps.numpy())) if len(gaps) >= FEWEST_GAPS else None


def _gaps(coords: Tensor) -> Tensor:
    """Distances between a tile and the next one in its row or column."""
    gaps = []
    for along, across in ((0, 1), (1, 0)):
        order = coords[:, along].argsort(stable=True)
        order = order[coords[order, across].argsort(stable=True)]
        ordered = coords[order]
        steps = ordered.diff(dim=0)
        gaps.append(steps[(steps[:, across] == 0) & (steps[:, along] > 0), along])
    return torch.cat(gaps)


def _remedy(coords: Tensor, side: float) -> str:
    step = neighbour_distance(coords)
    if step is None or step >= side:
        return "tiles of several pieces of tissue overlap (--shared-cells allows that), or these are pixels of another level"
    if step == 1:
        return "neighbours are 1 apart, so these are numbers of tiles, not pixels of level 0: multiply them by the side of a tile"
    return (
        f"neighbours are {step:g} apart: if these are pixels of level 0, a tile is {step:g} wide (--tile-size-level0) or tiles "
        "overlap (--shared-cells); if they are pixels of another level, multiply them by its downsample"
    )
