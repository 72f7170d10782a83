"""The positions of the cells of an attention map: patches in a grid, tokens along a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Places", "places_of"]

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


def places_of(num_tokens: int, grid: tuple[int, int] | None, words: Sequence[str] | None) -> Places:
    """The positions of N tokens, by `grid` or `words`, or in lines without either."""
    if grid is not None and words is not None:
        raise ValueError("words must come without grid, got both")
    if grid is not None:
        if len(grid) != 2 or min(grid) < 1 or grid[0] * grid[1] != num_tokens:
            raise ValueError(f"grid must be (rows, columns) of N={num_tokens} patches, got {grid}; leave out tokens that are none")
        return Places(_row_major(num_tokens, grid[1], 1.0), (1.0, 1.0), is_strip=False)
    if words is not None:
        if len(words) != num_tokens or num_tokens > MAX_WORDS:
            raise ValueError(f"words must hold one text per token={num_tokens}, at most {MAX_WORDS}, got {len(words)}")
        lines = range(0, num_tokens, WORDS)
        return Places(_row_major(num_tokens, WORDS, 0.5), (1.0, 0.5), is_strip=True, words=words, lines=lines, line=WORDS)
    shared = -(-num_tokens // MAX_CELLS)
    lines = range(0, num_tokens, LINE * shared)
    return Places(_row_major(-(-num_tokens // shared), LINE, 1.6), (1.0, 1.4), is_strip=True, shared=shared, lines=lines, line=LINE)


def _row_major(cells: int, columns: int, height: float) -> Tensor:
    index = torch.arange(cells)
    return torch.stack([(index % columns).double(), (index // columns) * height], dim=1)
