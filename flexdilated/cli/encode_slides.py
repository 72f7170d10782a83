"""`flexdilated encode-slides`: a folder of slides in, one file of their embeddings out."""

from __future__ import annotations

import hashlib
import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from flexdilated.cli.options import device_named, dtype_named
from flexdilated.cli.refusal import first_line, refuse
from flexdilated.cli.slide_run import Job, Ranks, run
from flexdilated.hub.gigapath import ARCHITECTURES, LongNetViT, create_model, load_weights
from flexdilated.hub.slides.encode import Reading
from flexdilated.hub.slides.formats import DAMAGED, list_slides
from flexdilated.training.options import UserError
from flexdilated.training.ranks import started

COMPUTED, STORED = ("float32", "bfloat16", "float16"), ("float32", "float16")
RANKS_WAIT = 7 * 24 * 3600  # seconds: one rank may be done long before the others; torchrun ends those of a run that lost one


class Layers(str, Enum):
    """Whose embeddings are written."""

    LAST = "last"
    ALL = "all"


class TileOrder(str, Enum):
    """In which order tiles follow one another."""

    FILE = "file"
    HILBERT = "hilbert"


def encode_slides(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Slides, one file each, in it and in folders below: .h5 of CLAM or TRIDENT, .pt and .npz of slide2vec, .zarr of "
            "LazySlide, or plain ones that hold features (N, C) and coords (N, 2).",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, .h5.")],
    weights: Annotated[
        Path | None, typer.Option(help="The checkpoint, such as Prov-GigaPath's slide_encoder.pth. Needed unless --random.")
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Encode with random weights, to try the command: the embeddings mean nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a run was interrupted, or add slides to its output.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew, and replace the output at the end.")] = False,
    layers: Annotated[
        Layers,
        typer.Option(help="all: the embeddings of every layer, the embedded tiles first, without the encoder's last LayerNorm."),
    ] = Layers.LAST,
    tiles: Annotated[bool, typer.Option("--tiles", help="Write the tiles in their context too, with their coordinates.")] = False,
    stored: Annotated[str, typer.Option("--store", help="What is written: float32 or float16.")] = "float32",
    coords: Annotated[
        Path | None,
        typer.Option(help="Folder of the files of coordinates, where embeddings have none: CLAM's patches, slide2vec's tiles."),
    ] = None,
    tile_size_level0: Annotated[
        float | None, typer.Option(help="Side of a tile in pixels of level 0, where the files do not say it.")
    ] = None,
    magnification: Annotated[
        float, typer.Option(help="At which tiles were embedded; files that say another are refused. Prov-GigaPath's is 20.")
    ] = 20.0,
    shared_cells: Annotated[
        bool, typer.Option("--shared-cells", help="Allow tiles that lie in one cell of the grid, as tiles that overlap do.")
    ] = False,
    table: Annotated[str | None, typer.Option(help="Which table of a .zarr holds the embeddings, where there are several.")] = None,
    token_budget: Annotated[int, typer.Option(min=1, help="Most tiles of slides that are encoded together.")] = 4096,
    split_above: Annotated[
        int | None, typer.Option(min=1, help="Under torchrun: slides of more tiles are encoded by all ranks together.")
    ] = None,
    arch: Annotated[
        str,
        typer.Option(
            help="The architecture of the weights: a name of Prov-GigaPath's or of torchscale's.", show_default="the published one"
        ),
    ] = "gigapath_slide_enc12l768d",
    in_chans: Annotated[int, typer.Option(help="Elements of a tile embedding; 1536 in the published weights.")] = 1536,
    global_pool: Annotated[
        bool, typer.Option("--global-pool/--cls", help="Average the tiles, or take the class token, the original's default.")
    ] = False,
    tile_size: Annotated[
        int, typer.Option(help="Side of a tile at its magnification; with --max-wsi-size it sets segments.")
    ] = 256,
    slide_ngrids: Annotated[int, typer.Option(help="Cells along each side of the grid of tiles.")] = 1000,
    max_wsi_size: Annotated[int, typer.Option(help="Side of the largest slide in pixels, which sets the segments.")] = 262144,
    order: Annotated[
        TileOrder, typer.Option(help="hilbert: tiles along a curve, for weights that were trained so. Published weights were not.")
    ] = TileOrder.FILE,
    device: Annotated[
        str, typer.Option(help="Where to compute, as torch spells it: cpu, cuda, mps. auto: cuda, else mps, else cpu.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the computation: float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Encode a folder of slides: tile embeddings in, one embedding of each slide out, by Prov-GigaPath's encoder.

    Each slide gives what it gives alone. A slide that cannot be encoded is named, the rest goes on, and the exit code is 1.
    What is done is kept when a run is interrupted: the same command with --resume goes on.

    Several processes: torchrun --standalone --nproc-per-node P -m flexdilated encode-slides ... spreads the slides by size.
    """
    computed, storage = dtype_named(dtype, COMPUTED), torch.float16 if stored == "float16" else torch.float32
    if stored not in STORED:
        refuse(f"--store must be one of {', '.join(STORED)}, got '{stored}'")
    if arch not in ARCHITECTURES:
        refuse(f"--arch must be one of {', '.join(ARCHITECTURES)}, got '{arch}'")
    for option, size in {"--in-chans": in_chans, "--tile-size": tile_size, "--slide-ngrids": slide_ngrids}.items():
        if size < 1:
            refuse(f"{option} must be at least 1, got {size}")
    for option, number in {"--tile-size-level0": tile_size_level0, "--magnification": magnification}.items():
        if number is not None and not 0 < number < float("inf"):
            refuse(f"{option} must be above 0 and finite, got {number:g}")
    if (weights is not None) == random:
        refuse(f"--weights must name a checkpoint, or --random be given in its place, got {'both' if random else 'neither'}")
    if weights is not None and not weights.is_file():
        refuse(f"--weights must be a file that exists, got '{weights}'")
    for option, path in (("FOLDER", folder), ("--coords", coords)):
        if path is not None and not path.is_dir():
            refuse(f"{option} must be a folder that exists, got '{path}'")
    if resume and overwrite:
        refuse("--resume must come without --overwrite, got both")
    if resume and random:
        refuse("--resume must come without --random, got both: the weights would be others than before")
    _check_output(output, folder)
    rank, count = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if split_above is not None and count == 1:
        refuse(f"--split-above must come with several ranks of torchrun, got {split_above} and one process")
    if random and count > 1:
        refuse(f"--random must come with one process, got {count} ranks of torchrun: each would draw other weights")
    place = _device(device, count)
    try:
        model = create_model(
            None,
            arch,
            in_chans,
            global_pool=global_pool,
            slide_ngrids=slide_ngrids,
            tile_size=tile_size,
            max_wsi_size=max_wsi_size,
            order=None if order is TileOrder.FILE else "hilbert",
        )
        slides = list_slides(folder)
        digest = _load(model, weights)
        reading = Reading(coords, table, tile_size_level0, magnification, shared_cells)
        model = model.eval().to(place, computed)
        options = {"reading": reading, "token_budget": token_budget, "all_layers": layers is Layers.ALL, "tiles": tiles}
        job = Job(model, slides, output, {**options, "storage": storage}, split_above)
        settings = {
            "weights": digest,
            "arch": arch,
            "in_chans": in_chans,
            "pattern": model.pattern.to_dict(),
            "order": model.order,
            "global_pool": global_pool,
            "tile_size": tile_size,
            "slide_ngrids": slide_ngrids,
            "layers": layers.value,
            "tiles": tiles,
            "store": stored,
            "dtype": dtype,
            "tile_size_level0": tile_size_level0,
            "magnification": magnification,
            "shared_cells": shared_cells,
            "table": table,
        }
        with started(count, rank, place, RANKS_WAIT) as (mesh, counters):
            code = run(job, settings, Ranks(rank, mesh, counters), resume=resume, overwrite=overwrite)
    except (UserError, ValueError, TypeError, NotImplementedError) as error:
        refuse(error)
    raise typer.Exit(code)


def _check_output(output: Path, folder: Path) -> None:
    """Refuse, before hours of work, what could not be written after them."""
    try:
        import h5py  # noqa: F401  # an extra
    except ImportError:
        refuse("--output must be written by h5py, which is not installed; pip install 'flexdilated[slides]'")
    if output.suffix.lower() != ".h5":
        refuse(f"--output must end in .h5, got '{output}'")
    if not output.parent.is_dir() or output.is_dir() or not os.access(output.parent, os.W_OK | os.X_OK):
        refuse(f"--output must be a file in a folder that can be written, got '{output}'")
    if folder.resolve() in output.resolve().parents:
        refuse(f"--output must lie outside FOLDER, whose files are slides, got '{output}'")


def _device(name: str, count: int) -> torch.device:
    """The device of this process: under torchrun the CPU, or the GPU of this rank."""
    if count == 1:
        return device_named(name, auto=["cuda", "mps"])
    if name not in ("auto", "cpu", "cuda"):
        refuse(f"--device must be auto, cpu or cuda (a rank takes cuda:LOCAL_RANK) with several ranks, got '{name}'")
    kind = device_named(name, auto=["cuda"]).type
    if kind == "cpu":
        return torch.device(kind)
    device = device_named(f"{kind}:{os.environ['LOCAL_RANK']}", auto=[])
    torch.cuda.set_device(device)
    return device


def _load(model: LongNetViT, path: Path | None) -> str | None:
    """The SHA-256 of the checkpoint, loaded."""
    if path is None:
        typer.echo("WARNING: --random: the weights are RANDOM, so the embeddings mean nothing and differ from run to run", err=True)
        return None
    try:
        load_weights(model, path)
    except DAMAGED as error:
        refuse(f"--weights must be a whole checkpoint that fits --arch, --in-chans and --order, got '{path}': {first_line(error)}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
