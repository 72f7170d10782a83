"""Slides that are made up: a label that far tiles tell, and no mean of tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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
