"""`flexdilated encode-slides`: a folder of slides in, a file of embeddings per slide out."""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from flexdilated.cli import slide_options
from flexdilated.cli.options import device_named, device_of_rank, dtype_named
from flexdilated.cli.refusal import refuse
from flexdilated.cli.slide_run import Job, collected, run
from flexdilated.hub.slides.folder import list_slides
from flexdilated.hub.slides.source import digest_of

STORED = ("float32", "float16")
RANKS_WAIT = timedelta(days=7)  # one rank may be done long before the others; torchrun ends those of a run that lost one


class Layers(str, Enum):
    """Whose embeddings are written."""

    LAST = "last"
    ALL = "all"


def encode_slides(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Slides, one file each, in it and in folders below: .h5 of CLAM, TRIDENT, STAMP or Mussel, .pt and .npz of "
            "slide2vec, .pt of slideflow, .zarr of LazySlide, or plain ones that hold features (N, C) and coords (N, 2).",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write to: NAME.h5 per slide.")],
    weights: slide_options.WeightsOption = None,
    random: slide_options.RandomOption = False,
    collect: Annotated[
        Path | None, typer.Option(help="A file, .h5, in which the embeddings of all slides are joined at the end; one process.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Encode slides that have a file too, and replace it.")] = False,
    layers: Annotated[
        Layers,
        typer.Option(help="all: the embeddings of every layer, the embedded tiles first, without the encoder's last LayerNorm."),
    ] = Layers.LAST,
    tiles: Annotated[bool, typer.Option("--tiles", help="Write the tiles in their context too, with their coordinates.")] = False,
    stored: Annotated[str, typer.Option("--store", help="What is written: float32 or float16.")] = "float32",
    coords: slide_options.CoordsOption = None,
    tile_size_level0: slide_options.TileSizeLevel0Option = None,
    magnification: slide_options.MagnificationOption = 20.0,
    shared_cells: slide_options.SharedCellsOption = False,
    table: slide_options.TableOption = None,
    token_budget: Annotated[int, typer.Option(min=1, help="Most tiles of slides that are encoded together.")] = 4096,
    arch: slide_options.ArchOption = slide_options.PUBLISHED,
    in_chans: slide_options.InChansOption = 1536,
    global_pool: slide_options.GlobalPoolOption = False,
    tile_size: slide_options.TileSizeOption = 256,
    slide_ngrids: slide_options.SlideNgridsOption = 1000,
    max_wsi_size: slide_options.MaxWsiSizeOption = 262144,
    order: slide_options.OrderOption = slide_options.TileOrder.FILE,
    device: slide_options.DeviceOption = "auto",
    dtype: slide_options.DtypeOption = "float32",
) -> None:
    """Encode a folder of slides: tile embeddings in, one embedding of each slide out, by Prov-GigaPath's encoder.

    Packs do not change embeddings: each is that of the slide alone. A slide that cannot be encoded is named, the rest goes on, and
    the exit code is 1. A slide that has a file is skipped, so the same command goes on after an interruption. A file of other
    weights or options is an error.

    Several processes: torchrun --standalone --nproc-per-node P -m flexdilated encode-slides ... gives each every P-th slide.
    """
    computed, storage = dtype_named(dtype, slide_options.COMPUTED), torch.float16 if stored == "float16" else torch.float32
    if stored not in STORED:
        refuse(f"--store must be one of {', '.join(STORED)}, got '{stored}'")
    slide_options.check_encoder(arch, weights, random=random)
    reading = slide_options.read_by(coords, table, tile_size_level0, magnification, shared_cells)
    if not folder.is_dir():
        refuse(f"FOLDER must be a folder that exists, got '{folder}'")
    _check_output(output, folder)
    rank, count = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if collect is not None:
        if count > 1:
            refuse(
                f"--collect must come with one process, got {count} ranks of torchrun; run the same command again without torchrun"
            )
        if collect.suffix.lower() != ".h5" or not collect.parent.is_dir() or collect.is_dir():
            refuse(f"--collect must end in .h5 and be in a folder that exists, got '{collect}'")
    if random and count > 1:
        refuse(f"--random must come with one process, got {count} ranks of torchrun: each would draw other weights")
    place = device_named(device, auto=["cuda", "mps"]) if count == 1 else device_of_rank(device)
    try:
        sizes = {"tile_size": tile_size, "slide_ngrids": slide_ngrids, "max_wsi_size": max_wsi_size}
        model = slide_options.build(arch, in_chans, order, global_pool=global_pool, **sizes)
        patches: list[Path] = []
        slides = list_slides(folder, coords_folder=coords, without_embeddings=patches)
        if patches and rank == 0:
            typer.echo(f"skipped {len(patches):,} files of patches, which hold coordinates and no embeddings", err=True)
        slide_options.load(model, weights)
        digest = f"random {secrets.token_hex(8)}" if weights is None else digest_of(weights)
        model = model.eval().to(place, computed)
        options = {"reading": reading, "token_budget": token_budget, "all_layers": layers is Layers.ALL, "tiles": tiles}
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
        own = {name: path for i, (name, path) in enumerate(slides.items()) if i % count == rank}
        job = Job(model, own, output, {**options, "storage": storage}, settings, overwrite, shows=rank == 0)
        if count > 1:
            dist.init_process_group("gloo", timeout=RANKS_WAIT)
        code = run(job)
        if count > 1:  # torchrun ends all ranks as soon as one has ended with a code that is not 0
            dist.barrier()
            dist.destroy_process_group()
        if collect is not None:
            collected(job, collect)
    except KeyboardInterrupt:
        typer.echo("slides that have a file are kept: the same command goes on", err=True)
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        refuse(error)
    raise typer.Exit(code)


def _check_output(output: Path, folder: Path) -> None:
    """Reject, before hours of work, what could not be written after them."""
    try:
        import h5py  # noqa: F401  # an extra
    except ImportError:
        refuse("--output must be written by h5py, which is not installed; pip install 'flexdilated[slides]'")
    if output.suffix.lower() == ".h5":
        refuse(f"--output must be a folder, got '{output}'; --collect names a file in which all slides are joined")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--output must be a folder that can be written, got '{output}': {error.strerror}")
    if folder.resolve() in (output.resolve(), *output.resolve().parents):
        refuse(f"--output must be outside FOLDER, whose files are slides, got '{output}'")
