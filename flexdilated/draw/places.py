"""The positions of the cells of an attention map: tiles on a slide, patches in a grid, tokens along a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["Places", "check_numbers", "places_of"]

LINE, WORDS = 64, 8  # cells in a line of a strip; fewer where they hold words
MAX_CELLS = 4096  # of a strip: more tokens share cells
MAX_WORDS = 480


@dataclass(frozen=True)
class Places:
    """The positions of the cells."""

    corners: Tensor  # (cells, 2), the upper left ones
    size: tuple[float, float]
    is_strip: bool
    shared: int = 1  # tokens of a cell
    words: Sequence[str] | None = None
    lines: Sequence[int] = ()  # the first token of each line of a strip
    line: int = 1  # cells in one

    @property
    def extent(self) -> tuple[Tensor, Tensor]:
        low, high = self.corners.min(dim=0).values, self.corners.max(dim=0).values
        return low, high + torch.tensor(self.size, dtype=torch.float64)

    def gathered(self, panels: Tensor) -> Tensor:
        """The weights of the cells."""
        if self.shared == 1:
            return panels
        padded = torch.nn.functional.pad(panels, (0, -panels.shape[1] % self.shared))
        return padded.unflatten(1, (-1, self.shared)).sum(dim=2)


def places_of(
    panels: Tensor, coords: Tensor | None, grid: tuple[int, int] | None, words: Sequence[str] | None, tile_size: float | None
) -> Places:
    """The positions of the N tokens of the panels `(P, N)`, by `coords`, `grid` or `words`, or in lines without any of them."""
    num_tokens = panels.shape[1]
    given = [name for name, value in (("coords", coords), ("grid", grid), ("words", words)) if value is not None]
    if len(given) > 1:
        raise ValueError(f"{given[1]} must come without {given[0]}, got both")
    if tile_size is not None and coords is None:
        raise ValueError(f"tile_size must come with coords, got {tile_size}")
    if coords is not None:
        corners = _check_coords(coords, panels)
        if tile_size is not None and not (math.isfinite(tile_size) and tile_size > 0.0):
            raise ValueError(f"tile_size must be above 0 and finite, got {tile_size}")
        side = _tile_side(corners) if tile_size is None else float(tile_size)
        return Places(corners, (side, side), is_strip=False)
    if grid is not None:
        if len(grid) != 2 or min(grid) < 1 or grid[0] * grid[1] != num_tokens:
            raise ValueError(f"grid must be (rows, columns) of N={num_tokens} patches, got {grid}; leave out tokens that are none")
        return Places(_row_major(num_tokens, grid[1], 1.0), (1.0, 1.0), is_strip=False)
    if words is not None:
        if isinstance(words, str) or len(words) != num_tokens or num_tokens > MAX_WORDS:
            got = repr(words) if isinstance(words, str) else f"{len(words)}"
            raise ValueError(f"words must hold one text per token={num_tokens}, at most {MAX_WORDS}, got {got}")
        lines = range(0, num_tokens, WORDS)
        return Places(_row_major(num_tokens, WORDS, 0.5), (1.0, 0.5), is_strip=True, words=words, lines=lines, line=WORDS)
    shared = -(-num_tokens // MAX_CELLS)
    lines = range(0, num_tokens, LINE * shared)
    return Places(_row_major(-(-num_tokens // shared), LINE, 1.6), (1.0, 1.4), is_strip=True, shared=shared, lines=lines, line=LINE)


def _row_major(cells: int, columns: int, height: float) -> Tensor:
    at = torch.arange(cells)
    return torch.stack([(at % columns).double(), (at // columns) * height], dim=1)


def _check_coords(coords: Tensor, panels: Tensor) -> Tensor:
    """`(N, 2)`, float64 on the CPU."""
    if not isinstance(coords, Tensor):
        advice = "give texts as words=, the rows and columns of an image as grid=, a file as path="
        raise TypeError(f"coords must be a tensor, got {type(coords).__name__}; {advice}")
    check_numbers("coords", coords)
    if coords.dim() != 2 or coords.shape[1] != 2 or coords.shape[0] < 1:
        raise ValueError(f"coords must have shape (N, 2), one row per tile, got {tuple(coords.shape)}")
    if coords.shape[0] != panels.shape[1]:
        raise ValueError(
            f"weights must have shape (N,) or (P, N) with N=rows of coords={coords.shape[0]}, got N={panels.shape[1]}; "
            "leave out the columns of tokens that are no tiles"
        )
    corners = coords.detach().to("cpu", torch.float64)
    if not bool(corners.isfinite().all()):
        raise ValueError("coords must be finite, got others")
    return corners


def check_numbers(name: str, x: Tensor) -> None:
    """Raise unless `x` is a tensor of real numbers."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must hold numbers, got {x.dtype}")


def _tile_side(places: Tensor) -> float:
    """The median distance between neighbours in a row or column; for scattered places, what would fill their extent."""
    gaps = []
    for along, across in ((0, 1), (1, 0)):
        lines: dict[float, list[float]] = {}
        for place in places.tolist():
            lines.setdefault(place[across], []).append(place[along])
        for line in lines.values():
            ordered = sorted(set(line))
            gaps += [b - a for a, b in pairwise(ordered)]
    if gaps:
        return float(torch.tensor(gaps, dtype=torch.float64).median())
    extent = (places.max(dim=0).values - places.min(dim=0).values).max().item()
    return extent / math.sqrt(len(places)) if extent > 0.0 else 1.0
