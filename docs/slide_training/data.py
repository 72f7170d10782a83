"""Slides to train on: read from a folder, or synthetic ones whose label depends on tiles far from the class token."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.slides import Reading, SlideError, list_slides

IN_CHANS = 16
TILE = 256


class Slide(NamedTuple):
    """Embeddings `(N, C)`, upper left corners `(N, 2)` in pixels, a label and a patient."""

    x: Tensor
    coords: Tensor
    label: int
    patient: str


class Pack(NamedTuple):
    """Several slides for one call: `(1, N, C)`, `(1, N, 2)`, boundaries `(S + 1,)`, labels `(S,)`."""

    x: Tensor
    coords: Tensor
    cu_seqlens: Tensor
    labels: Tensor


def read_slides(folder: Path, labels: Path | None = None, reading: Reading | None = None) -> tuple[list[Slide], list[str]]:
    """The slides of a folder in any format of `slides encode-all`, in memory, and the names of their classes.

    A slide that cannot be read is reported on standard error and left out.

    Args:
        folder: Files of CLAM, TRIDENT, slide2vec, LazySlide, or plain ones.
        labels: A .csv with the columns `slide` (the path without its extension), `label` and, if patients have several slides,
            `patient`. Slides without a row are left out. Default: no labels, all slides.
        reading: Source of coordinates and size of a tile, as the options of `slides encode-all`.

    Raises:
        ValueError: If a label has no slide, or no slide can be read.
    """
    reading = Reading() if reading is None else reading
    paths = list_slides(folder, coords_folder=reading.coords_folder)
    rows = {name: {"label": ""} for name in paths} if labels is None else read_labels(labels)
    if missing := sorted(set(rows) - set(paths)):
        raise ValueError(f"labels must be of slides in '{folder}', got {', '.join(missing[:3])}")
    classes = sorted({row["label"] for row in rows.values()})
    slides: list[Slide] = []
    for name, row in rows.items():
        try:
            tiles, cells = reading.read(name, paths[name])
            if slides and tiles.x.shape[1] != slides[0].x.shape[1]:
                raise SlideError(f"must have as wide embeddings as the first slide={slides[0].x.shape[1]}, got {tiles.x.shape[1]}")
        except SlideError as error:
            print(f"error: '{paths[name]}' {error}", file=sys.stderr)
            continue
        slides.append(Slide(tiles.x.float(), cells * TILE, classes.index(row["label"]), row.get("patient") or name))
    if not slides:
        raise ValueError(f"no slide of '{folder}' can be read")
    return slides, classes


def read_labels(path: Path) -> dict[str, Mapping[str, str]]:
    """The rows of a .csv by slide; each has a label."""
    with path.open(newline="", encoding="utf-8-sig") as file:  # Excel begins files with a mark
        table = csv.DictReader(file)
        if not {"slide", "label"} <= set(table.fieldnames or ()):
            raise ValueError(f"labels must have the columns slide and label, got {', '.join(table.fieldnames or ()) or 'none'}")
        rows: dict[str, Mapping[str, str]] = {}
        for row in table:
            if row["slide"] in rows or not row["label"]:
                raise ValueError(f"labels must have one label for each slide, got line {table.line_num} of '{row['slide']}'")
            rows[row["slide"]] = row
    return rows


def split(slides: Sequence[Slide], seed: int = 0) -> tuple[list[Slide], list[Slide]]:
    """Slides to train on, and about a fifth of the slides held out at random. All slides of a patient are on one side.

    Slides of one patient are similar: splitting them would make the held-out accuracy too high.
    """
    patients = sorted({slide.patient for slide in slides})
    if len(patients) < 2:
        raise ValueError(f"slides must be of at least two patients, to train on one and hold out the other, got {len(patients)}")
    held_out: set[str] = set()
    count = 0
    for i in torch.randperm(len(patients), generator=torch.Generator().manual_seed(seed)).tolist()[:-1]:
        if 5 * count >= len(slides):
            break
        held_out.add(patients[i])
        count += sum(slide.patient == patients[i] for slide in slides)
    return [slide for slide in slides if slide.patient not in held_out], [slide for slide in slides if slide.patient in held_out]


def add_folder(parser: argparse.ArgumentParser) -> None:
    """The arguments of both scripts: a folder of slides, and how `slides encode-all` reads it."""
    parser.add_argument("folder", nargs="?", type=Path, help="slides, as for `slides encode-all`; default: synthetic slides")
    parser.add_argument("--tile-size-level0", type=float, help="side of a tile at level 0, if files lack it")
    parser.add_argument("--coords", type=Path, help="folder of coordinates, if files of embeddings lack them")
    parser.add_argument("--magnification", type=float, default=20.0, help="magnification of the embedded tiles")
    parser.add_argument("--shared-cells", action="store_true", help="allow tiles that overlap")
    parser.add_argument("--table", help="table of a .zarr that holds the embeddings")


def reading_of(options: argparse.Namespace) -> Reading:
    """The options of `add_folder` as a `Reading`."""
    return Reading(options.coords, options.table, options.tile_size_level0, options.magnification, options.shared_cells)


def make_slides(count: int, *, side: int = 12, seed: int = 0) -> list[Slide]:
    """Slides on a grid of `side` x `side` tiles with holes, in row-major order.

    One tile in the lower half is marked. The label is whether it is in the right half. Embeddings do not depend on places, so
    their mean has no information about the label. The tile is far from the class token, which is before the first row.
    """
    generator = torch.Generator().manual_seed(seed)
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side))  # row, column
    slides = []
    for i in range(count):
        kept = cells[torch.rand(len(cells), generator=generator) < 0.8]
        x = 0.2 * torch.randn(len(kept), IN_CHANS, generator=generator)
        lower = (kept[:, 0] >= side // 2).nonzero()[:, 0]
        marked = int(lower[torch.randint(len(lower), (1,), generator=generator)])
        x[marked, 0] = 4.0
        slides.append(Slide(x, kept.flip(-1) * TILE, int(kept[marked, 1] >= side // 2), str(i)))
    return slides


def packs(slides: Sequence[Slide], token_budget: int) -> Iterator[Pack]:
    """Packs of consecutive slides with at most `token_budget` tiles, or one slide."""
    pack: list[Slide] = []
    for slide in slides:
        if pack and sum(len(held.x) for held in pack) + len(slide.x) > token_budget:
            yield _packed(pack)
            pack = []
        pack.append(slide)
    if pack:
        yield _packed(pack)


def _packed(slides: Sequence[Slide]) -> Pack:
    cu_seqlens = torch.tensor([0, *(len(slide.x) for slide in slides)]).cumsum(0)
    x, coords = torch.cat([slide.x for slide in slides])[None], torch.cat([slide.coords for slide in slides])[None]
    return Pack(x, coords, cu_seqlens, torch.tensor([slide.label for slide in slides]))


def make_smooth_slides(count: int, *, side: int = 12, seed: int = 0) -> list[Slide]:
    """Slides without labels whose neighbouring tiles are similar: waves over the slide, and a little noise."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    slides = []
    for i in range(count):
        kept = cells[torch.rand(len(cells), generator=generator) < 0.8]
        waves = torch.randn(2, IN_CHANS, generator=generator) / side
        phases = 2 * torch.pi * torch.rand(IN_CHANS, generator=generator)
        x = (kept.float() @ (2 * torch.pi * waves) + phases).sin()
        slides.append(Slide(x + 0.05 * torch.randn(x.shape, generator=generator), kept.flip(-1) * TILE, 0, str(i)))
    return slides
