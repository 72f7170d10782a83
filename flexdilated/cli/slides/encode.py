"""`flexdilated slides encode`: a file of tile embeddings and coordinates in, a file with the slide embedding out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexdilated.cli.options import DeviceOption, device_named
from flexdilated.cli.refusal import refuse
from flexdilated.cli.slides import shared
from flexdilated.core.files import replaced

OUTPUTS = (".pt", ".npz")


def encode(
    tiles: shared.SlideArgument,
    weights: shared.WeightsOption = None,
    random: shared.RandomOption = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write the embedding, .pt or .npz. Default: beside TILES, ending in .slide.npz for .npz, else .slide.pt.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    all_layers: Annotated[
        bool,
        typer.Option(
            "--all-layers",
            help="Write the embedding after every layer, layer_0_embed (the embedded tiles) on, and the last one again as "
            "last_layer_embed, instead of slide_embed; they have not passed the encoder's last LayerNorm.",
        ),
    ] = False,
    coords: shared.CoordsOption = None,
    tile_size_level0: shared.TileSizeLevel0Option = None,
    magnification: shared.MagnificationOption = 20.0,
    shared_cells: shared.SharedCellsOption = False,
    table: shared.TableOption = None,
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
    """Encode a slide: embeddings and coordinates of its tiles in, one embedding of the slide out, by Prov-GigaPath's encoder.

    The output holds slide_embed, (1, embed_dim), in float32.
    """
    import numpy as np
    import torch

    from flexdilated.slides.encode import FailedSlide, encode_slides
    from flexdilated.slides.grid import Reading

    if output is None:
        output = tiles.with_suffix(".slide.npz" if tiles.suffix.lower() == ".npz" else ".slide.pt")
    if output.suffix.lower() not in OUTPUTS:
        refuse(f"--output must end in {' or '.join(OUTPUTS)}, got '{output}'")
    if output.exists() and output.samefile(tiles):
        refuse(f"--output must be another file than TILES, got '{output}'")
    if output.exists() and not overwrite:
        refuse(f"--output must not exist, got '{output}'; use --overwrite or another name")
    place = device_named(device)
    encoder_weights = shared.weights_of(weights, arch, in_chans, random=random)
    sizes = {"tile_size": tile_size, "slide_ngrids": slide_ngrids, "max_wsi_size": max_wsi_size}
    model = shared.encoder(encoder_weights, place, dtype, order=order, global_pool=global_pool, **sizes)
    reading = Reading(coords, table, tile_size_level0, magnification, shared_cells)
    (result,) = encode_slides(model, {tiles.name: tiles}, reading=reading, all_layers=all_layers)
    if isinstance(result, FailedSlide):
        refuse(f"'{tiles}' {result.reason}")
    embeddings = {"slide_embed": result.embedding[None]}
    if all_layers:  # the names of Prov-GigaPath's pipeline
        layers = result.embedding[:, None]
        embeddings = {f"layer_{i}_embed": layer.clone() for i, layer in enumerate(layers)} | {
            "last_layer_embed": layers[-1].clone()
        }
    with replaced(output) as file:
        if output.suffix.lower() == ".npz":
            np.savez(file, **{name: embedding.numpy() for name, embedding in embeddings.items()})  # type: ignore[arg-type]
        else:
            torch.save(embeddings, file)
    source = "RANDOM weights" if weights is None else f"'{weights}'"
    typer.echo(f"encoded {len(result.coords):,} tiles of '{tiles}' by {encoder_weights.arch}, {source}; {place} in {dtype}")
    typer.echo(f"wrote {', '.join(embeddings) if len(embeddings) == 1 else f'{len(embeddings)} embeddings'} to '{output}'")
