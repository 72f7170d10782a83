"""`flexdilated encode-slide`: a file of tile embeddings and coordinates in, a file with the slide embedding out."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from flexdilated.cli import slide_options
from flexdilated.cli.options import device_named, dtype_named, spelled, writing
from flexdilated.cli.refusal import first_line, refuse
from flexdilated.draw.figure import replaced
from flexdilated.hub.gigapath import LongNetViT, create_model
from flexdilated.hub.slides.formats import COORDINATES, DAMAGED, EMBEDDINGS, FLOATS, PIXELS, SUFFIXES, read_arrays
from flexdilated.hub.slides.grid import why_shared

OUTPUTS = (".pt", ".npz")


def encode_slide(
    tiles: Annotated[
        Path,
        typer.Argument(
            metavar="TILES",
            help="A .pt (a dict of tensors), .h5 or .npz file of one slide. Under tile_embeds, features or embeddings: (N, C) or "
            "(1, N, C). Under coords: (N, 2) or (1, N, 2), upper left corners of the tiles in pixels.",
        ),
    ],
    weights: slide_options.WeightsOption = None,
    random: slide_options.RandomOption = False,
    arch: slide_options.ArchOption = slide_options.PUBLISHED,
    in_chans: slide_options.InChansOption = 1536,
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
    global_pool: slide_options.GlobalPoolOption = False,
    tile_size_level0: Annotated[
        float | None,
        typer.Option(help="Side of a tile in the pixels of the coordinates.", show_default="what the file says, else --tile-size"),
    ] = None,
    shared_cells: slide_options.SharedCellsOption = False,
    tile_size: slide_options.TileSizeOption = 256,
    slide_ngrids: slide_options.SlideNgridsOption = 1000,
    max_wsi_size: slide_options.MaxWsiSizeOption = 262144,
    device: slide_options.DeviceOption = "auto",
    dtype: slide_options.DtypeOption = "float32",
) -> None:
    """Encode a slide: embeddings and coordinates of its tiles in, one embedding of the slide out, by Prov-GigaPath's encoder.

    The output holds slide_embed, (1, embed_dim), in float32.
    """
    computed = dtype_named(dtype, slide_options.COMPUTED)
    slide_options.check_encoder(arch, weights, random=random)
    if tiles.suffix.lower() not in SUFFIXES:
        refuse(f"TILES must end in {', '.join(SUFFIXES)}, got '{tiles}'")
    if not tiles.is_file():
        refuse(f"TILES must be a file that exists, got '{tiles}'")
    if output is None:
        output = tiles.with_suffix(".slide.npz" if tiles.suffix.lower() == ".npz" else ".slide.pt")
    _check_output(output, [path for path in (tiles, weights) if path is not None], overwrite=overwrite)
    place = device_named(device, auto=["cuda", "mps"])

    key, x, coords, said = _read(tiles, in_chans)
    if said is not None and tile_size_level0 is not None and abs(said - tile_size_level0) > 0.5:
        refuse(f"--tile-size-level0 must be what '{tiles}' says={said:g}, got {tile_size_level0:g}")
    side = tile_size if said is None else said
    coords = _placed(coords, side if tile_size_level0 is None else tile_size_level0, tile_size, slide_ngrids, shared_cells)
    try:
        model = create_model(
            None,
            arch,
            in_chans,
            global_pool=global_pool,
            slide_ngrids=slide_ngrids,
            tile_size=tile_size,
            max_wsi_size=max_wsi_size,
        )
    except (ValueError, TypeError) as error:  # what the sizes do not allow together
        refuse(error)
    slide_options.load(model, weights)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    source = "RANDOM weights" if weights is None else f"'{weights}'"
    typer.echo(f"{x.shape[1]:,} tiles of {x.shape[2]:,} elements, '{key}' of '{tiles}'")
    typer.echo(f"{num_parameters:,} parameters of {arch}, {source}; {place} in {dtype}")
    embeddings, seconds, memory = _encode(model, x, coords, place, computed, all_layers=all_layers)
    _check_finite(embeddings, dtype)
    typer.echo(f"encoded in {seconds:.2f} s, {memory}")
    _save(embeddings, output)
    typer.echo(f"wrote {', '.join(embeddings) if len(embeddings) == 1 else f'{len(embeddings)} embeddings'} to '{output}'")


def _placed(coords: Tensor, side: float, tile_size: int, slide_ngrids: int, shared_cells: bool) -> Tensor:
    """The coordinates `(1, N, 2)` in pixels of tiles of `tile_size`."""
    if not side > 0:
        refuse(f"--tile-size-level0 must be above 0, got {side:g}")
    placed = coords if side == tile_size else coords.double().div(side).floor().mul(tile_size)
    is_inside = bool(((placed >= 0) & (placed < slide_ngrids * tile_size)).all())  # the encoder refuses the others
    if is_inside and not shared_cells and (reason := why_shared(coords[0], side)) is not None:
        refuse(f"TILES {reason}")
    return placed


def _read(path: Path, in_chans: int) -> tuple[str, Tensor, Tensor, float | None]:
    """The key of the embeddings, they `(1, N, C)`, coordinates `(1, N, 2)`, int64 or floating; a tile's side, where it is said."""
    try:
        found, said = read_arrays(path)
    except ImportError:
        refuse(f"TILES must be .pt or .npz where h5py is not installed, got '{path}'; pip install h5py")
    except DAMAGED as error:
        refuse(f"TILES must be a whole {path.suffix.lower()} file without pickled objects, got '{path}': {first_line(error)}")
    keys = [key for key in EMBEDDINGS if key in found]
    if len(keys) != 1 or COORDINATES not in found:
        refuse(
            f"TILES must hold {COORDINATES} and one of {', '.join(EMBEDDINGS)}, got {', '.join(map(str, found)) or 'no keys'} "
            f"in '{path}'"
        )
    key = keys[0]
    x, coords = _tensor(key, found[key], FLOATS), _tensor(COORDINATES, found[COORDINATES], PIXELS)
    for name, value, width in ((key, x, "C"), (COORDINATES, coords, "2")):
        slides = value.shape[0] if value.dim() == 3 else 1
        if value.dim() not in (2, 3) or slides != 1 or value.shape[-2] < 1 or (name == COORDINATES and value.shape[-1] != 2):
            refuse(f"{name} must have shape (N, {width}) or (1, N, {width}) with N at least 1, got {tuple(value.shape)}")
    x, coords = x.reshape(1, *x.shape[-2:]), coords.reshape(1, *coords.shape[-2:])
    if x.shape[1] != coords.shape[1]:
        refuse(f"{COORDINATES} must hold one row for each of the {x.shape[1]} rows of {key}, got {coords.shape[1]}")
    if x.shape[2] != in_chans:
        refuse(f"{key} must have --in-chans={in_chans} elements per tile, as the weights expect, got {x.shape[2]}")
    finite = x.isfinite()
    if not bool(finite.all()):
        _, n, c = (~finite).nonzero()[0].tolist()
        refuse(f"{key} must be finite, got {x[0, n, c].item()} at {key}[{n}, {c}]")
    if not coords.is_floating_point():
        coords = coords.to(torch.int64)  # torch computes little in uint16 to uint64
    return key, x, coords, said


def _tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """A dense tensor of one of the dtypes, of an array or tensor."""
    if isinstance(value, np.ndarray):
        try:
            value = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=False))
        except TypeError:
            refuse(f"{name} must be of {spelled(*dtypes)}, got {value.dtype}")
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        refuse(f"{name} must be a dense array, got {'no array' if value is None else type(value).__name__}")
    if value.dtype not in dtypes:
        refuse(f"{name} must be of {spelled(*dtypes)}, got {spelled(value.dtype)}")
    return value.detach()


def _encode(
    model: LongNetViT, x: Tensor, coords: Tensor, place: torch.device, dtype: torch.dtype, *, all_layers: bool
) -> tuple[dict[str, Tensor], float, str]:
    """The embeddings `(1, embed_dim)` by name, float32, on the CPU; the seconds that the encoder ran; the memory in words."""
    is_cuda = place.type == "cuda"
    try:
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(place)
        model = model.eval().to(place, dtype)
        x, coords = x.to(place, dtype), coords.to(place)
        start = time.perf_counter()
        with torch.inference_mode():
            layers = [layer.float().cpu() for layer in model(x, coords, all_layer_embed=all_layers)]  # waits for the device
        seconds = time.perf_counter() - start
    except torch.OutOfMemoryError as error:
        refuse(f"--device={place} must have the memory for {x.shape[1]:,} tiles in {spelled(dtype)}: {first_line(error)}")
    except (ValueError, TypeError, NotImplementedError) as error:  # coordinates outside the grid, a dtype without a kernel
        refuse(error)
    memory = f"peak memory {torch.cuda.max_memory_allocated(place) / 2**30:.2f} GiB on {place}" if is_cuda else _process_memory()
    if not all_layers:
        return {"slide_embed": layers[0]}, seconds, memory
    # The names of Prov-GigaPath's pipeline.
    named = {f"layer_{i}_embed": layer for i, layer in enumerate(layers)}
    return named | {"last_layer_embed": layers[-1].clone()}, seconds, memory


def _process_memory() -> str:
    if sys.platform == "win32":
        return "peak memory not known on Windows"
    import resource  # POSIX only

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB of the process"


def _check_finite(embeddings: dict[str, Tensor], dtype: str) -> None:
    for name, embedding in embeddings.items():
        if (broken := embedding[~embedding.isfinite()]).numel():
            advice = "use bfloat16 or float32" if dtype == "float16" else "check the weights and the scale of the tile embeddings"
            refuse(f"{name} must be finite, got {broken[0].item()} with --dtype={dtype}; {advice}")


def _check_output(output: Path, inputs: list[Path], *, overwrite: bool) -> None:
    """Reject, before minutes of work, what could not be written after them."""
    if output.suffix.lower() not in OUTPUTS:
        refuse(f"--output must end in {' or '.join(OUTPUTS)}, got '{output}'")
    if not output.parent.is_dir() or output.is_dir() or not os.access(output.parent, os.W_OK | os.X_OK):
        refuse(f"--output must be a file in a folder that can be written, got '{output}'")
    if output.exists():
        if any(output.samefile(path) for path in inputs):
            refuse(f"--output must be another file than TILES and --weights, got '{output}'")
        if not overwrite:
            refuse(f"--output must not exist, got '{output}'; use --overwrite or another name")


def _save(embeddings: dict[str, Tensor], output: Path) -> None:
    buffer = io.BytesIO()
    if output.suffix.lower() == ".npz":
        np.savez(buffer, **{name: embedding.numpy() for name, embedding in embeddings.items()})  # type: ignore[arg-type]
    else:
        torch.save(embeddings, buffer)
    with writing(output), replaced(output) as file, buffer.getbuffer() as contents:
        file.write(contents)
