"""Options of the commands for slides: how files are read, and which encoder is used."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from flexdilated.cli.refusal import first_line, refuse
from flexdilated.hub.gigapath import ARCHITECTURES, LongNetViT, create_model, load_weights
from flexdilated.hub.slides.formats import DAMAGED
from flexdilated.hub.slides.grid import Reading

PUBLISHED = "gigapath_slide_enc12l768d"


class TileOrder(str, Enum):
    """In which order tiles follow one another."""

    FILE = "file"
    HILBERT = "hilbert"


WeightsOption = Annotated[Path | None, typer.Option(help="The checkpoint, such as Prov-GigaPath's slide_encoder.pth.")]
RandomOption = Annotated[
    bool, typer.Option("--random", help="Encode with random weights, to try the command: embeddings mean nothing.")
]
InChansOption = Annotated[int, typer.Option(min=1, help="Elements of a tile embedding; 1536 in the published weights.")]
GlobalPoolOption = Annotated[
    bool, typer.Option("--global-pool/--cls", help="Average the tiles, or take the class token, the original's default.")
]
DeviceOption = Annotated[
    str, typer.Option(help="Where to compute, as torch spells it: cpu, cuda, mps. auto: cuda, else mps, else cpu.")
]
DtypeOption = Annotated[str, typer.Option(help="Of the computation: float32, bfloat16 or float16.")]
COMPUTED = ("float32", "bfloat16", "float16")
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
TileSizeOption = Annotated[
    int, typer.Option(min=1, help="Side of a tile at its magnification; with --max-wsi-size it sets segments.")
]
SlideNgridsOption = Annotated[int, typer.Option(min=1, help="Cells along each side of the grid of tiles.")]
MaxWsiSizeOption = Annotated[int, typer.Option(min=1, help="Side of the largest slide in pixels, which sets the segments.")]
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


def check_encoder(arch: str, weights: Path | None, *, random: bool | None = None) -> None:
    """Reject an unknown architecture, and anything but one source of weights; `random` is None for a command without it."""
    if arch not in ARCHITECTURES:
        refuse(f"--arch must be one of {', '.join(ARCHITECTURES)}, got '{arch}'")
    if weights is None and random is None:
        refuse("--weights must name a checkpoint, got none")
    if (weights is not None) == random:
        refuse(f"--weights must name a checkpoint, or --random be given in its place, got {'both' if random else 'neither'}")
    if weights is not None and not weights.is_file():
        refuse(f"--weights must be a file that exists, got '{weights}'")


def load(model: LongNetViT, weights: Path | None) -> None:
    """Load a checkpoint, or warn of random weights."""
    if weights is None:
        typer.echo("WARNING: --random: the weights are RANDOM, so embeddings mean nothing and differ from run to run", err=True)
        return
    try:
        load_weights(model, weights)
    except DAMAGED as error:
        why = first_line(error)
        refuse(f"--weights must be a whole checkpoint that fits --arch and the tile embeddings, got '{weights}': {why}")


def build(arch: str, in_chans: int, order: TileOrder, **options: Any) -> LongNetViT:
    """The encoder that the options name, with random weights."""
    return create_model(None, arch, in_chans, order=None if order is TileOrder.FILE else "hilbert", **options)
