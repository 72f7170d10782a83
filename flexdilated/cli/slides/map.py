"""`flexdilated slides map`: how much each tile contributes to the class token, a tile or a class, as a picture or a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexdilated.cli.options import DeviceOption, Integers, device_named, integers, require_matplotlib
from flexdilated.cli.refusal import refuse
from flexdilated.cli.slides import shared

if TYPE_CHECKING:
    from flexdilated.slides.formats import Tiles


def map_slide(
    tiles: shared.SlideArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A picture (.png, .pdf, .svg), or a table (.geojson for QuPath, .csv).")
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    weights: shared.WeightsOption = None,
    tile: Annotated[
        int | None,
        typer.Option(
            min=0, help="Which tile asks: its row in the file, from 0 on, or LazySlide's tile_id.", show_default="the class token"
        ),
    ] = None,
    class_name: Annotated[
        str | None,
        typer.Option("--class", metavar="NAME", help="With a classifier's --weights: what speaks for this class, and against it."),
    ] = None,
    thumbnail: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A picture of the whole slide, to draw underneath.")
    ] = None,
    slide_size: Annotated[
        Integers | None,
        typer.Option(
            parser=integers,
            metavar="WIDTH,HEIGHT",
            help="Of the slide in pixels of level 0, with --thumbnail, where the file does not say it.",
        ),
    ] = None,
    coords: shared.CoordsOption = None,
    tile_size_level0: shared.TileSizeLevel0Option = None,
    magnification: shared.MagnificationOption = 20.0,
    shared_cells: shared.SharedCellsOption = False,
    table: shared.TableOption = None,
    arch: shared.ArchOption = None,
    tile_size: shared.TileSizeOption = 256,
    slide_ngrids: shared.SlideNgridsOption = 1000,
    max_wsi_size: shared.MaxWsiSizeOption = 262144,
    order: shared.OrderOption = "file",
    device: DeviceOption = "auto",
) -> None:
    """Draw how much of each tile of a slide reaches the class token, or a tile, through the attention of all layers.

    Attention is rolled out over the layers and divided by its value under equal scores, which removes what the order of tiles in
    the file does to it. With --class: how much each tile moves the score of a class, by integrated gradients.
    """
    import torch

    from flexdilated.draw.weights import PICTURE_FORMATS
    from flexdilated.slides.formats import SlideError
    from flexdilated.slides.grid import Reading
    from flexdilated.slides.heatmap import TABLES, class_relevance, tile_relevance, write_table
    from flexdilated.slides.picture import draw_slide_map

    suffix = output.suffix.lower()
    if suffix not in (*PICTURE_FORMATS, *TABLES):
        refuse(f"--output must end in one of {', '.join((*PICTURE_FORMATS, *TABLES))}, got '{output}'")
    if suffix in PICTURE_FORMATS:
        require_matplotlib()
    if slide_size is not None and (thumbnail is None or len(slide_size) != 2):
        refuse(f"--slide-size must be width,height and come with --thumbnail, got '{','.join(map(str, slide_size))}'")
    if thumbnail is not None and output.exists() and output.samefile(thumbnail):
        refuse(f"--output must be another file than --thumbnail, got '{output}'")
    if output.exists() and not overwrite:
        refuse(f"--output must not exist, got '{output}'; use --overwrite or another name")
    encoder_weights = shared.weights_of(weights, arch, None)
    classes = encoder_weights.checkpoint.classes if encoder_weights.checkpoint is not None else ()
    if class_name is not None and tile is not None:
        refuse(f"--class must come without --tile, got --tile {tile}")
    if class_name is not None and class_name not in classes:
        refuse(f"--class must be one of the classes in --weights, {', '.join(classes) or 'which hold none'}, got '{class_name}'")
    place = device_named(device)
    try:
        reading = Reading(coords, table, tile_size_level0, magnification, shared_cells)
        slide, cells = reading.read(tiles.name, tiles, slide_ngrids=slide_ngrids)
    except SlideError as error:
        refuse(f"'{tiles}' {error}")
    if not slide.is_level0 and (suffix in TABLES or thumbnail is not None):
        refuse(f"--tile-size-level0 must be given where the file holds micrometres, as '{tiles}' does, got none")
    size = slide.slide_size if slide_size is None else (slide_size[0], slide_size[1])
    if thumbnail is not None and size is None:
        refuse(f"--thumbnail must come with --slide-size where the file does not say how large the slide is, as '{tiles}' does not")
    sizes: dict[str, Any] = {"tile_size": tile_size, "slide_ngrids": slide_ngrids, "max_wsi_size": max_wsi_size}
    if slide.x.shape[1] != encoder_weights.in_chans:
        refuse(f"'{tiles}' must have embeddings of {encoder_weights.in_chans} elements as --weights, got {slide.x.shape[1]}")
    model = shared.encoder(encoder_weights, place, order=order, **sizes)
    side = slide.tile_size_level0 or tile_size_level0
    assert side is not None  # or the cells would have been refused
    x, corners = slide.x.float().to(place), (cells * model.tile_size).to(place)
    row = _row(slide, tile)
    if class_name is None or encoder_weights.checkpoint is None or encoder_weights.checkpoint.head is None:
        relevance = tile_relevance(model, x, corners, tile=row).cpu()
        panels, titles, label = relevance[None], ["relevance"], "relevance, 1: as the pattern alone"
        title, classified = f"what reaches {'the class token' if tile is None else f'tile {tile}'}", ""
    else:
        index, head = classes.index(class_name), encoder_weights.checkpoint.head.to(place)
        relevance = class_relevance(model, head, x, corners, index=index).cpu()
        panels = torch.stack([relevance, -relevance]).clamp(min=0.0)
        titles, label = [f"for {class_name}, else 0", f"against {class_name}, else 0"], "part of the score"
        with torch.inference_mode():
            probability = head(model(x[None], corners[None])[0]).softmax(-1)[0, index].item()
        title = f"what speaks for and against {class_name} (probability {probability:.1%})"
        classified = f"; probability of '{class_name}': {probability:.1%}"
    if suffix in TABLES:
        write_table(output, slide.coords, side, {"relevance": relevance}, tile_ids=slide.tile_ids)
    else:
        draw_slide_map(
            panels,
            slide.coords,
            output,
            tile_size=side,
            thumbnail=thumbnail,
            slide_size=None if thumbnail is None else size,
            query=row,
            title=f"{tiles.stem}: {title}",
            titles=titles,
            label=label,
        )
    typer.echo(f"wrote 1 map of {len(slide.coords):,} tiles to '{output}'{classified}")


def _row(slide: Tiles, tile: int | None) -> int | None:
    """The row of the tile that is asked for."""
    if tile is None or slide.tile_ids is None:
        return tile
    rows = (slide.tile_ids == tile).nonzero()[:, 0].tolist()
    if not rows:
        refuse(f"--tile must be a tile_id of the slide, got {tile}")
    return int(rows[0])
