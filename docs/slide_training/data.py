"""Slides to train on: yours, or made up ones, whose label far tiles tell and no mean of tiles."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.hub.slides import Reading, grid_cells, list_slides, read_tiles

IN_CHANS = 16
TILE = 256


class Slide(NamedTuple):
    """Embeddings `(N, C)`, corners `(N, 2)` in pixels, and a label."""

    x: Tensor
    coords: Tensor
    label: int


class Pack(NamedTuple):
    """Several slides as one call takes them: `(1, N, C)`, `(1, N, 2)`, borders `(S + 1,)`, labels `(S,)`."""

    x: Tensor
    coords: Tensor
    cu_seqlens: Tensor
    labels: Tensor


def read_slides(folder: Path, labels: Path | None = None, reading: Reading | None = None) -> tuple[list[Slide], list[str]]:
    """The slides of a folder as `encode-slides` reads them, and the names of their classes.

    Args:
        folder: Files of CLAM, TRIDENT, slide2vec, LazySlide, or plain ones.
        labels: A .csv of two columns, `slide` (the name: the path without its ending) and `label`; slides that it lacks are left
            out. Default: no labels, all slides.
        reading: Where coordinates lie, how large a tile is: as the options of `encode-slides`.
    """
    reading = Reading() if reading is None else reading
    paths = list_slides(folder, coords_folder=reading.coords_folder)
    label_of = dict.fromkeys(paths, "")
    if labels is not None:
        with labels.open(newline="") as file:
            label_of = {row["slide"]: row["label"] for row in csv.DictReader(file)}
    if missing := sorted(set(label_of) - set(paths)):
        raise ValueError(f"labels must be of slides in '{folder}', got {', '.join(missing[:3])}")
    classes = sorted(set(label_of.values()))
    slides = []
    for name, label in label_of.items():
        tiles = read_tiles(paths[name], coords_folder=reading.coords_folder, table=reading.table)
        cells = grid_cells(
            tiles,
            tile_size_level0=reading.tile_size_level0,
            magnification=reading.magnification,
            shared_cells=reading.shared_cells,
        )
        slides.append(Slide(tiles.x.float(), cells * TILE, classes.index(label)))
    return slides, classes


def make_slides(count: int, *, side: int = 12, seed: int = 0) -> list[Slide]:
    """Slides on a grid of `side` x `side` tiles with holes, whose rows follow one another.

    One tile in the lower half is marked. The label is whether it lies in the right half: embeddings say nothing of places, so a
    mean of them holds nothing of the label, and the tile lies far from the class token, which stands before the first row.
    """
    generator = torch.Generator().manual_seed(seed)
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side))  # row, column
    slides = []
    for _ in range(count):
        kept = cells[torch.rand(len(cells), generator=generator) < 0.8]
        x = 0.2 * torch.randn(len(kept), IN_CHANS, generator=generator)
        lower = (kept[:, 0] >= side // 2).nonzero()[:, 0]
        marked = int(lower[torch.randint(len(lower), (1,), generator=generator)])
        x[marked, 0] = 4.0
        slides.append(Slide(x, kept.flip(-1) * TILE, int(kept[marked, 1] >= side // 2)))
    return slides


def packs(slides: Sequence[Slide], token_budget: int) -> Iterator[Pack]:
    """The slides in their order, as many in a pack as the budget takes, and at least one."""
    pack: list[Slide] = []
    for slide in slides:
        if pack and sum(len(held.x) for held in pack) + len(slide.x) > token_budget:
            yield _packed(pack)
            pack = []
        pack.append(slide)
    if pack:
        yield _packed(pack)


def _packed(slides: Sequence[Slide]) -> Pack:
    borders = torch.tensor([0, *(len(slide.x) for slide in slides)]).cumsum(0)
    x, coords = torch.cat([slide.x for slide in slides])[None], torch.cat([slide.coords for slide in slides])[None]
    return Pack(x, coords, borders, torch.tensor([slide.label for slide in slides]))


def make_smooth_slides(count: int, *, side: int = 12, seed: int = 0) -> list[Slide]:
    """Slides whose tiles look like their neighbours: waves over the slide, and a little noise; there is no label."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    slides = []
    for _ in range(count):
        kept = cells[torch.rand(len(cells), generator=generator) < 0.8]
        waves = torch.randn(2, IN_CHANS, generator=generator) / side
        phases = 2 * torch.pi * torch.rand(IN_CHANS, generator=generator)
        x = (kept.float() @ (2 * torch.pi * waves) + phases).sin()
        slides.append(Slide(x + 0.05 * torch.randn(x.shape, generator=generator), kept.flip(-1) * TILE, 0))
    return slides
