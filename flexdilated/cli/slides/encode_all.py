"""`flexdilated slides encode-all`: a folder of slides in, a file of embeddings per slide out."""

from __future__ import annotations

import os
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from flexdilated.cli.options import DeviceOption, device_named, device_of_rank
from flexdilated.cli.refusal import refuse
from flexdilated.cli.slides import shared

RANKS_WAIT = timedelta(days=7)  # one rank may be done long before the others; torchrun ends those of a run that lost one


def encode_all(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="Slides, one file each, in it and in folders below: .h5 of CLAM, TRIDENT, STAMP or Mussel, .pt and .npz of "
            "slide2vec, .pt of slideflow, .zarr of LazySlide, or plain ones that hold features (N, C) and coords (N, 2).",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", file_okay=False, writable=True, help="The folder to write to: NAME.h5 per slide.")
    ],
    weights: shared.WeightsOption = None,
    random: shared.RandomOption = False,
    collect: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="A .h5 file, in which the embeddings of all slides are joined at the end; one process."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Encode slides that have a file too, and replace it.")] = False,
    layers: Annotated[
        Literal["last", "all"],
        typer.Option(help="all: the embeddings of every layer, the embedded tiles first, without the encoder's last LayerNorm."),
    ] = "last",
    tiles: Annotated[bool, typer.Option("--tiles", help="Write the tiles in their context too, with their coordinates.")] = False,
    storage: Annotated[Literal["float32", "float16"], typer.Option("--store", help="What is written.")] = "float32",
    coords: shared.CoordsOption = None,
    tile_size_level0: shared.TileSizeLevel0Option = None,
    magnification: shared.MagnificationOption = 20.0,
    shared_cells: shared.SharedCellsOption = False,
    table: shared.TableOption = None,
    token_budget: Annotated[int, typer.Option(min=1, help="Most tiles of slides that are encoded together.")] = 4096,
    arch: shared.ArchOption = None,
    in_chans: shared.InChansOption = None,
    global_pool: shared.GlobalPoolOption = False,
    tile_size: shared.TileSizeOption = 256,
    slide_ngrids: shared.SlideNgridsOption = 1000,
    max_wsi_size: shared.MaxWsiSizeOption = 262144,
    order: shared.OrderOption = "file",
    device: DeviceOption = "auto",
    dtype: shared.DtypeOption = "float32",
) -> None:
    """Encode a folder of slides: tile embeddings in, one embedding of each slide out, by Prov-GigaPath's encoder.

    Packs do not change embeddings: each is that of the slide alone. A slide that cannot be encoded is named, the rest goes on, and
    the exit code is 1. A slide that has a file is skipped, so the same command goes on after an interruption. A file of other
    weights or options is an error.

    Several processes: torchrun --standalone --nproc-per-node P -m flexdilated slides encode-all ... gives each every P-th slide.
    """
    import torch
    import torch.distributed as dist

    from flexdilated.cli.slides.run import EncodingJob, collected, run
    from flexdilated.slides.folder import list_slides
    from flexdilated.slides.grid import Reading
    from flexdilated.slides.source import digest_of

    if find_spec("h5py") is None:
        refuse("h5py must be installed to write --output, got none; pip install 'flexdilated[slides]'")
    if folder.resolve() in (output.resolve(), *output.resolve().parents):
        refuse(f"--output must be outside FOLDER, whose files are slides, got '{output}'")
    rank, count = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if collect is not None and count > 1:
        refuse(f"--collect must come with one process, got {count} ranks of torchrun; run the same command again without torchrun")
    place = device_named(device) if count == 1 else device_of_rank(device)
    encoder_weights = shared.weights_of(weights, arch, in_chans, random=random)
    sizes = {"global_pool": global_pool, "tile_size": tile_size, "slide_ngrids": slide_ngrids}
    model = shared.encoder(encoder_weights, place, dtype, order=order, max_wsi_size=max_wsi_size, **sizes)
    patches: list[Path] = []
    slides = list_slides(folder, coords_folder=coords, without_embeddings=patches)
    if patches and rank == 0:
        typer.echo(f"skipped {len(patches):,} files of patches, which hold coordinates and no embeddings", err=True)
    reading = Reading(coords, table, tile_size_level0, magnification, shared_cells)
    options = {"reading": reading, "token_budget": token_budget, "all_layers": layers == "all", "tiles": tiles}
    settings = {
        "weights": "random" if weights is None else digest_of(weights),
        "arch": encoder_weights.arch,
        "in_chans": encoder_weights.in_chans,
        "pattern": model.pattern.to_dict(),
        "order": model.order,
        **sizes,
        "layers": layers,
        "tiles": tiles,
        "store": storage,
        "dtype": dtype,
        "tile_size_level0": tile_size_level0,
        "magnification": magnification,
        "shared_cells": shared_cells,
        "table": table,
    }
    rank_slides = {name: path for i, (name, path) in enumerate(slides.items()) if i % count == rank}
    job = EncodingJob(
        model, rank_slides, output, {**options, "storage": getattr(torch, storage)}, settings, overwrite, shows=rank == 0
    )
    if count > 1:
        dist.init_process_group("gloo", timeout=RANKS_WAIT)
    try:
        code = run(job)
    except KeyboardInterrupt:
        typer.echo("slides that have a file are kept: the same command goes on", err=True)
        raise
    if count > 1:  # torchrun ends all ranks as soon as one has ended with a code that is not 0
        dist.barrier()
        dist.destroy_process_group()
    if collect is not None:
        collected(job, collect)
    raise typer.Exit(code)
