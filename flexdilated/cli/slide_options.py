"""What the commands for many slides and for one of them ask for alike: how files are read, and which encoder it is."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from flexdilated.cli.refusal import refuse
from flexdilated.hub.gigapath import ARCHITECTURES, LongNetViT, create_model
from flexdilated.hub.slides.reading import Reading

PUBLISHED = "gigapath_slide_enc12l768d"


class TileOrder(str, Enum):
    """In which order tiles follow one another."""

    FILE = "file"
    HILBERT = "hilbert"


CoordsOption = Annotated[
    Path | None,
    typer.Option(
        "--coords", help="Folder of the files of coordinates, where embeddings have none: CLAM's patches, slide2vec's tiles."
    ),
]
TileSizeLevel0Option = Annotated[
    float | None, typer.Option(help="Side of a tile in pixels of level 0, where the files do not say it; always for slideflow.")
]
MagnificationOption = Annotated[
    float, typer.Option(help="At which tiles were embedded; files that say another are refused. Prov-GigaPath's is 20.")
]
SharedCellsOption = Annotated[
    bool, typer.Option("--shared-cells", help="Allow tiles that lie in one cell of the grid, as tiles that overlap do.")
]
TableOption = Annotated[str | None, typer.Option(help="Which table of a .zarr holds the embeddings, where there are several.")]
ArchOption = Annotated[
    str,
    typer.Option(
        help="The architecture of the weights: a name of Prov-GigaPath's or of torchscale's.", show_default="the published one"
    ),
]
TileSizeOption = Annotated[int, typer.Option(help="Side of a tile at its magnification; with --max-wsi-size it sets segments.")]
SlideNgridsOption = Annotated[int, typer.Option(help="Cells along each side of the grid of tiles.")]
MaxWsiSizeOption = Annotated[int, typer.Option(help="Side of the largest slide in pixels, which sets the segments.")]
OrderOption = Annotated[
    TileOrder, typer.Option(help="hilbert: tiles along a curve, for weights that were trained so. Published weights were not.")
]


def read_by(
    coords: Path | None, table: str | None, tile_size_level0: float | None, magnification: float, shared_cells: bool
) -> Reading:
    """How slides are read, or a refusal."""
    for option, number in {"--tile-size-level0": tile_size_level0, "--magnification": magnification}.items():
        if number is not None and not 0 < number < float("inf"):
            refuse(f"{option} must be above 0 and finite, got {number:g}")
    if coords is not None and not coords.is_dir():
        refuse(f"--coords must be a folder that exists, got '{coords}'")
    return Reading(coords, table, tile_size_level0, magnification, shared_cells)


def check_sizes(arch: str, sizes: dict[str, int]) -> None:
    """Refuse sizes of an encoder that are none."""
    if arch not in ARCHITECTURES:
        refuse(f"--arch must be one of {', '.join(ARCHITECTURES)}, got '{arch}'")
    for option, size in sizes.items():
        if size < 1:
            refuse(f"{option} must be at least 1, got {size}")


def build(arch: str, in_chans: int, order: TileOrder, **options: Any) -> LongNetViT:
    """The encoder that the options name, with random weights."""
    return create_model(None, arch, in_chans, order=None if order is TileOrder.FILE else "hilbert", **options)
