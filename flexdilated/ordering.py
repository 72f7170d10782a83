"""Orders of 2-D tokens: Hilbert curve, serpentine and row-major, applied before segmentation and undone after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexdilated.core.integers import is_integer

__all__ = ["ORDERS", "Order", "coordinate_order", "grid_order", "reorder", "restore"]

Curve = Literal["hilbert", "serpentine", "row_major"]

#: The orders that can be asked for, by name.
ORDERS: tuple[Curve, ...] = ("hilbert", "serpentine", "row_major")

# Places on the curve are int64, with room for the sums on the way.
MAX_CELLS = 2**62

ONE_DIMENSIONAL = "1-D text is already in the order in which neighbours are near, and a curve would scatter them"


class Order(NamedTuple):
    """A permutation of N tokens and its inverse, each `(N,)` int64: `permutation[inverse] == inverse[permutation] == arange(N)`."""

    permutation: Tensor
    inverse: Tensor


def grid_order(grid: Sequence[int], *, order: Curve = "hilbert", device: torch.device | str | None = None) -> Order:
    """The order of the tokens of a full grid, which are numbered row by row.

    `"hilbert"`: a generalised Hilbert curve over a rectangle of any size: consecutive tokens are always neighbours in the grid,
    and any run of tokens is a compact patch. `"serpentine"`: every other row backwards; consecutive tokens are neighbours too.
    `"row_major"`: the tokens as they are.
    Source: the construction is that of a curve for rectangles which are no powers of two (J. Cerveny, "gilbert"), here evaluated
    for all tokens at once; the direction is chosen such that no diagonal step is left.

    Args:
        grid: `(height, width)`, each at least 1.
        order: One of `ORDERS`.
        device: Where the result lives.

    Returns:
        `Order(permutation, inverse)`: place `i` of the order holds token `permutation[i]`, token `t` is at place `inverse[t]`.

    Raises:
        ValueError: If the grid is not two integers of at least 1, or the order is unknown.
        TypeError: If a size is not an integer.
    """
    _check_order(order)
    height, width = check_grid(grid)
    tokens = torch.arange(height * width, device=device)
    return _with_inverse(_permutation(tokens // width, tokens % width, height, width, order))


def coordinate_order(coordinates: Tensor, *, order: Curve = "hilbert") -> Order:
    """The order of tokens at arbitrary integer coordinates: a grid with holes, the tiles of a slide.

    The curve runs over the bounding box of the coordinates and visits those that are there. Nothing of the size of the box is
    formed. Tokens at one place keep their given order. Coordinates in pixels serve as well as tile numbers, but steps are
    neighbouring tiles only for tile numbers: divide by the tile size. In `"serpentine"` every other row *that holds a token* runs
    backwards.

    Args:
        coordinates: `(N, 2)` integers, (row, column) of each token, of any sign.
        order: One of `ORDERS`.

    Returns:
        `Order(permutation, inverse)` on the device of the coordinates.

    Raises:
        ValueError: If the shape is not (N, 2), the bounding box has more than 2**62 cells, or the order is unknown.
        TypeError: If the coordinates are not a tensor of integers.
    """
    _check_order(order)
    if not isinstance(coordinates, Tensor):
        raise TypeError(f"coordinates must be a tensor, got {type(coordinates).__name__}")
    if coordinates.dim() != 2 or coordinates.shape[1] != 2:
        raise ValueError(f"coordinates must have shape (N, 2), got {tuple(coordinates.shape)}; {ONE_DIMENSIONAL}")
    if coordinates.dtype == torch.bool or coordinates.is_floating_point() or coordinates.is_complex():
        raise TypeError(f"coordinates must be integers, got {coordinates.dtype}")
    # The box is a matter of values: where a call is traced, an operator looks at them.
    permute = _along_coordinates if torch.compiler.is_compiling() else _along
    return _with_inverse(permute(coordinates, order))


def _along(coordinates: Tensor, order: str) -> Tensor:
    """The permutation of `coordinate_order`."""
    if not coordinates.shape[0]:
        return torch.empty(0, dtype=torch.int64, device=coordinates.device)
    coordinates = coordinates.long()
    lowest, highest = coordinates.amin(dim=0), coordinates.amax(dim=0)
    height, width = (b - a + 1 for a, b in zip(lowest.tolist(), highest.tolist()))
    if height * width > MAX_CELLS:
        raise ValueError(f"coordinates must span at most 2**62 cells, got {height} x {width}")
    rows, columns = (coordinates - lowest).unbind(dim=1)
    return _permutation(rows, columns, height, width, order)


def reorder(x: Tensor, order: Order | tuple[Tensor, Tensor]) -> Tensor:
    """The tokens of `x` along the order: `x[:, permutation]`.

    Args:
        x: `(B, N, ...)`.
        order: What `grid_order` or `coordinate_order` gives, on the device of x.

    Raises:
        ValueError: If `x` has not one token per place of the order.
    """
    permutation, _ = order
    return _select(x, permutation)


def restore(x: Tensor, order: Order | tuple[Tensor, Tensor]) -> Tensor:
    """The inverse of `reorder`: `x[:, inverse]`.

    Args:
        x: `(B, N, ...)`, tokens along the order.
        order: As in `reorder`.

    Raises:
        ValueError: If `x` has not one token per place of the order.
    """
    _, inverse = order
    return _select(x, inverse)


def check_grid(grid: Sequence[int]) -> tuple[int, int]:
    """`(height, width)` of a grid, or the reason why it is none."""
    if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 2:
        raise ValueError(f"grid must be (height, width), got {grid!r}; {ONE_DIMENSIONAL}")
    for name, size in zip(("height", "width"), grid):
        if not is_integer(size):
            raise TypeError(f"grid {name} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"grid {name} must be at least 1, got {size}")
    height, width = grid
    return height, width


def _check_order(order: Any) -> None:
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {order!r}")


def _select(x: Tensor, places: Tensor) -> Tensor:
    if x.dim() < 2 or x.shape[1] != places.shape[0]:
        raise ValueError(f"x must have shape (B, {len(places)}, ...), one token per place of the order, got {tuple(x.shape)}")
    return x.index_select(1, places)


def _permutation(rows: Tensor, columns: Tensor, height: int, width: int, order: str) -> Tensor:
    if order == "hilbert":
        return _along_hilbert(rows, columns, height, width).argsort(stable=True)
    if order == "serpentine":
        _, occupied = rows.unique(return_inverse=True)
        columns = torch.where(occupied % 2 == 1, width - 1 - columns, columns)
    return (rows * width + columns).argsort(stable=True)


# No CUDA graph can look at values.
@torch.library.custom_op("flexdilated::coordinate_order", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _along_coordinates(coordinates: Tensor, order: str) -> Tensor:
    return _along(coordinates, order)


@_along_coordinates.register_fake
def _(coordinates: Tensor, order: str) -> Tensor:
    return torch.empty_like(coordinates[:, 0], dtype=torch.int64).contiguous()


def _with_inverse(permutation: Tensor) -> Order:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.shape[0], device=permutation.device)
    return Order(permutation, inverse)


def _along_hilbert(rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:
    """The place of each cell on the curve, `(N,)`.

    A curve over a `long` x `wide` rectangle runs from one corner to the other end of the `long` axis. Every cell has its
    rectangle and its position in it. In each round the rectangles are divided and the cells in a later part move on by the
    cells of the parts before. A rectangle longer than 3/2 of its width is halved; any other is a U of three: up, along, down.
    """
    # Along an even axis there is a path of unit steps from corner to corner; along an odd one only if the other is odd as well.
    along_columns = width >= height if width % 2 == height % 2 else width % 2 == 0
    u, v = (columns, rows) if along_columns else (rows, columns)
    long, wide = (torch.full_like(u, size) for size in ((width, height) if along_columns else (height, width)))
    place = torch.zeros_like(u)
    while True:
        undivided = (long > 1) & (wide > 1)
        if not undivided.any():
            return place + u + v  # one of them is 0
        halved = undivided & (2 * long > 3 * wide)
        folded = undivided & ~halved
        half_long, half_wide = long // 2, wide // 2
        # Even parts keep their ends at the corners.
        even_long = half_long + ((half_long % 2 == 1) & (long > 2)).long()
        even_wide = half_wide + ((half_wide % 2 == 1) & (wide > 2)).long()

        second_half = halved & (u >= even_long)
        first_half = halved & ~second_half
        along = folded & (v >= even_wide)
        up = folded & ~along & (u < half_long)
        down = folded & ~along & ~up

        place = (
            place + second_half * (even_long * wide) + (along | down) * (half_long * even_wide) + down * (long * (wide - even_wide))
        )
        u, v = (
            torch.where(up, v, torch.where(down, even_wide - 1 - v, u - second_half * even_long)),
            torch.where(up, u, torch.where(down, long - 1 - u, v - along * even_wide)),
        )
        long, wide = (
            torch.where(first_half, even_long, torch.where(up | down, even_wide, long - second_half * even_long)),
            torch.where(up, half_long, torch.where(down, long - half_long, wide - along * even_wide)),
        )
