"""Orders of 2-D tokens: true permutations, unit steps, compact segments, and refusals."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flexdilated.ordering import ORDERS, Order, coordinate_order, grid_order, reorder, restore

GRIDS = [(1, 1), (1, 17), (17, 1), (5, 4), (7, 7), (8, 16), (13, 29), (53, 2)]


def cells(order: Order, width: int) -> Tensor:
    """(row, column) of each place."""
    return torch.stack((order.permutation // width, order.permutation % width), dim=1)


def steps(path: Tensor) -> Tensor:
    return path.diff(dim=0).abs().sum(dim=1)


def draw_holes(height: int, width: int, share: float) -> Tensor:
    """Coordinates of a grid with holes, in random order, one corner away from the origin."""
    everything = torch.cartesian_prod(torch.arange(height), torch.arange(width)) + torch.tensor([-3, 101])
    kept = everything[torch.rand(len(everything)) < share]
    return kept[torch.randperm(len(kept))]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_grid_order_is_a_permutation_with_its_inverse(grid: tuple[int, int], order: str) -> None:
    permutation, inverse = grid_order(grid, order=order)
    tokens = torch.arange(grid[0] * grid[1])
    assert permutation.dtype == inverse.dtype == torch.int64
    assert torch.equal(permutation.sort().values, tokens)
    assert torch.equal(permutation[inverse], tokens)
    assert torch.equal(inverse[permutation], tokens)


@pytest.mark.parametrize("order", ["hilbert", "serpentine"])
def test_consecutive_tokens_are_neighbours_on_every_grid(order: str) -> None:
    for height in range(1, 18):
        for width in range(1, 18):
            path = cells(grid_order((height, width), order=order), width)
            assert (steps(path) == 1).all(), (height, width)


def test_hilbert_of_a_power_of_two_divides_in_quadrants() -> None:
    """Each quarter of the classic curve is a quadrant, at every level."""
    path = cells(grid_order((16, 16)), 16)
    for size in (8, 4, 2):
        for run in path.view(-1, size * size, 2):
            corner = run.amin(dim=0)
            assert (corner % size == 0).all()
            assert (run.amax(dim=0) == corner + size - 1).all()


def test_orders_by_hand() -> None:
    assert grid_order((3, 3), order="serpentine").permutation.tolist() == [0, 1, 2, 5, 4, 3, 6, 7, 8]
    assert grid_order((3, 3), order="row_major").permutation.tolist() == list(range(9))
    assert grid_order((2, 2)).permutation.tolist() == [0, 2, 3, 1]
    coordinates = torch.tensor([[0, 0], [0, 5], [2, 0], [2, 5], [3, 0], [3, 5]])  # turns at every row that holds a token
    assert coordinate_order(coordinates, order="serpentine").permutation.tolist() == [0, 1, 3, 2, 4, 5]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_coordinate_order_visits_what_is_there_along_the_curve_of_the_grid(share: float, order: str) -> None:
    """The first and last row and column are kept, so that the bounding box is the grid."""
    height, width = 19, 23
    coordinates = torch.cat([draw_holes(height, width, share), torch.tensor([[-3, 101], [-3 + height - 1, 101 + width - 1]])])
    coordinates = coordinates.unique(dim=0)
    coordinates = coordinates[torch.randperm(len(coordinates))]
    permutation, inverse = coordinate_order(coordinates, order=order)
    assert torch.equal(permutation[inverse], torch.arange(len(coordinates)))
    numbers = (coordinates[:, 0] + 3) * width + coordinates[:, 1] - 101
    places = grid_order((height, width), order=order).inverse[numbers[permutation]]
    assert (places.diff() > 0).all()


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-99, 99)), max_size=40), st.sampled_from(ORDERS))
def test_coordinate_order_is_a_permutation_whatever_the_coordinates(points: list[tuple[int, int]], order: str) -> None:
    permutation, inverse = coordinate_order(torch.tensor(points, dtype=torch.int32).reshape(-1, 2), order=order)
    assert torch.equal(permutation.sort().values, torch.arange(len(points)))
    assert torch.equal(inverse[permutation], torch.arange(len(points)))


@pytest.mark.parametrize("order", ORDERS)
def test_tokens_at_one_place_keep_their_order(order: str) -> None:
    coordinates = torch.tensor([[0, 1], [0, 0], [0, 1], [0, 0], [0, 1]])
    assert coordinate_order(coordinates, order=order).permutation.tolist() == [1, 3, 0, 2, 4]


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)], ids=str)
def test_restore_undoes_reorder(shape: tuple[int, ...]) -> None:
    order = grid_order((7, 5))
    x = torch.randn(2, 35, *shape)
    along = reorder(x, order)
    assert torch.equal(along[:, 3], x[:, order.permutation[3]])
    assert not torch.equal(along, x)
    assert torch.equal(restore(along, order), x)
    assert torch.equal(reorder(restore(x, tuple(order)), tuple(order)), x)


UNKNOWN = r"order must be one of \('hilbert', 'serpentine', 'row_major'\), got 'peano'$"
FEW = r"x must have shape \(B, 15, \.\.\.\), one token per place of the order, got \("
FAR = torch.tensor([[0, 0], [2**40, 2**40]])
SHAPE = r"coordinates must have shape \(N, 2\), got "


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        *(
            (lambda grid=grid: grid_order(grid), error, f"grid {text}")
            for grid, error, text in (
                ((7,), ValueError, r"must be \(height, width\), got \(7,\); 1-D text is already in the order"),
                (7, ValueError, r"must be \(height, width\), got 7; 1-D text"),
                ("ab", ValueError, r"must be \(height, width\), got 'ab'; "),
                ((0, 3), ValueError, "height must be at least 1, got 0$"),
                ((3, -1), ValueError, "width must be at least 1, got -1$"),
                ((3.0, 2), TypeError, "height must be an integer, got 3.0$"),
                ((3, True), TypeError, "width must be an integer, got True$"),
            )
        ),
        (lambda: coordinate_order(torch.arange(7)), ValueError, SHAPE + r"\(7,\); 1-D text is already in the order"),
        (lambda: coordinate_order(torch.ones(7, 1).long()), ValueError, SHAPE + r"\(7, 1\); "),
        (lambda: coordinate_order(torch.ones(7, 2)), TypeError, "coordinates must be integers, got torch.float32$"),
        (lambda: coordinate_order(torch.ones(7, 2).bool()), TypeError, "coordinates must be integers, got torch.bool$"),
        (lambda: coordinate_order([[1, 2]]), TypeError, "coordinates must be a tensor, got list$"),
        (lambda: coordinate_order(FAR), ValueError, r"coordinates must span at most 2\*\*62 cells, got 10995\d+ x 10995"),
        (lambda: grid_order((3, 2), order="peano"), ValueError, UNKNOWN),
        (lambda: coordinate_order(torch.ones(3, 2).long(), order="peano"), ValueError, UNKNOWN),
        *(
            (lambda apply=apply, shape=shape: apply(torch.ones(shape), grid_order((3, 5))), ValueError, FEW)
            for apply in (reorder, restore)
            for shape in ((15,), (2, 14), (2, 16, 3))
        ),
    ],
)
def test_orders_reject(call: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"^{match}"):
        call()


class Places(torch.nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order

    def forward(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(coordinate_order(coordinates, order=self.order))  # type: ignore[return-value]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("strict", [False, True])
def test_coordinate_order_is_exported_for_any_number_of_tokens(order: str, strict: bool) -> None:
    sizes = {"coordinates": {0: torch.export.Dim("N", min=2, max=999)}}
    program = torch.export.export(Places(order), (torch.randint(9, (31, 2)),), dynamic_shapes=sizes, strict=strict).module()
    for count in (2, 31, 57):
        coordinates = torch.randint(-40, 40, (count, 2))
        for found, expected in zip(program(coordinates), coordinate_order(coordinates, order=order)):
            assert torch.equal(found, expected)


def test_the_operator_of_an_order_may_run_while_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinates = torch.randint(9, (31, 2))
    expected = coordinate_order(coordinates)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(coordinate_order(coordinates).permutation, expected.permutation)
