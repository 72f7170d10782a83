"""Options for reading a folder of slides: coordinates, and the width of a tile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flexdilated.hub.slides.formats import Tiles, files_beside, read_tiles
from flexdilated.hub.slides.grid import grid_cells


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
