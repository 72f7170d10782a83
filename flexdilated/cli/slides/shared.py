"""Options of the commands for slides: how files are read, and which encoder is used."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from flexdilated.cli.refusal import first_line, refuse

if TYPE_CHECKING:
    import torch

    from flexdilated.slides.gigapath import Checkpoint, LongNetViT

PUBLISHED = "gigapath_slide_enc12l768d"
RANDOM = "WARNING: --random: the weights are RANDOM, so embeddings mean nothing"

SlideArgument = Annotated[
    Path, typer.Argument(metavar="TILES", exists=True, help="A slide, in a format that `slides encode-all` reads.")
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="The checkpoint: Prov-GigaPath's slide_encoder.pth, or a trained encoder or classifier."
    ),
]
RandomOption = Annotated[
    bool, typer.Option("--random", help="Encode with random weights, to try the command: embeddings mean nothing.")
]
InChansOption = Annotated[
    int | None, typer.Option(min=1, help="Elements of a tile embedding.", show_default="as --weights say; 1536 with --random")
]
GlobalPoolOption = Annotated[
    bool, typer.Option("--global-pool/--cls", help="Average the tiles, or take the class token, the original's default.")
]
DtypeOption = Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the computation.")]
CoordsOption = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        file_okay=False,
        help="Folder of the files of coordinates, where embeddings have none: CLAM's patches, slide2vec's tiles.",
    ),
]
TileSizeLevel0Option = Annotated[
    float | None,
    typer.Option(min=1e-9, help="Side of a tile in pixels of level 0, where the files do not say it; always for slideflow."),
]
MagnificationOption = Annotated[
    float, typer.Option(min=1e-9, help="At which tiles were embedded; files that say another are refused. Prov-GigaPath's is 20.")
]
SharedCellsOption = Annotated[
    bool, typer.Option("--shared-cells", help="Allow tiles that lie in one cell of the grid, as tiles that overlap do.")
]
TableOption = Annotated[str | None, typer.Option(help="Which table of a .zarr holds the embeddings, where there are several.")]
ArchOption = Annotated[
    str | None,
    typer.Option(
        help="The architecture of the weights: a name of Prov-GigaPath's or of torchscale's.",
        show_default="as --weights say, else the published one",
    ),
]
TileSizeOption = Annotated[
    int, typer.Option(min=1, help="Side of a tile at its magnification; with --max-wsi-size it sets segments.")
]
SlideNgridsOption = Annotated[int, typer.Option(min=1, help="Cells along each side of the grid of tiles.")]
MaxWsiSizeOption = Annotated[int, typer.Option(min=1, help="Side of the largest slide in pixels, which sets the segments.")]
OrderOption = Annotated[
    Literal["file", "hilbert"],
    typer.Option(help="hilbert: tiles along a curve, for weights that were trained so. Published weights were not."),
]


class Weights(NamedTuple):
    """The encoder that the options name: its file, None for random weights, and its sizes."""

    checkpoint: Checkpoint | None
    arch: str
    in_chans: int


def weights_of(path: Path | None, arch: str | None, in_chans: int | None, *, random: bool = False) -> Weights:
    """Read `--weights`. The file also gives the architecture and the width of a tile embedding, unless options do."""
    from flexdilated.slides.gigapath import ARCHITECTURES, read_checkpoint

    if arch is not None and arch not in ARCHITECTURES:
        refuse(f"--arch must be one of {', '.join(ARCHITECTURES)}, got '{arch}'")
    if path is None:
        if not random:
            refuse("--weights must name a checkpoint, got none")
        return Weights(None, arch or PUBLISHED, in_chans or 1536)
    if random:
        refuse("--weights must name a checkpoint, or --random be given in its place, got both")
    with _fitting(path):
        checkpoint = read_checkpoint(path)
    return Weights(checkpoint, arch or checkpoint.arch or PUBLISHED, in_chans or checkpoint.in_chans or 1536)


@contextmanager
def _fitting(path: Path | str) -> Iterator[None]:
    """End with one line where a file of weights cannot be used."""
    from flexdilated.slides.formats import DAMAGED

    try:
        yield
    except DAMAGED as error:
        # torch's own text advises weights_only=False
        why = "no file of tensors alone" if isinstance(error, pickle.UnpicklingError) else first_line(error)
        refuse(f"--weights must be a whole checkpoint that fits --arch and the tile embeddings, got '{path}': {why}")


def encoder(weights: Weights, place: torch.device, dtype: str = "float32", *, order: str = "file", **sizes: Any) -> LongNetViT:
    """The encoder, in evaluation mode; random weights are the same ones every time."""
    import torch

    from flexdilated.slides.gigapath import create_model

    if weights.checkpoint is None:
        typer.echo(RANDOM, err=True)
        torch.manual_seed(0)
    model = create_model(None, weights.arch, weights.in_chans, order=None if order == "file" else "hilbert", **sizes)
    if weights.checkpoint is not None:
        with _fitting(weights.checkpoint.path):
            weights.checkpoint.load_into(model)
    return model.eval().to(place, getattr(torch, dtype))
