"""The tiles of a pattern: their numbers against brute force."""

import numpy as np
import pytest

from flexdilated import DilatedPattern
from flexdilated.draw.tiles import Cell, HeadTiles, Tally, all_heads, head_tiles
from flexdilated.masks import create_dilated_block_mask
from tests.draw.brute_force import brute_force

CASES = [
    (DilatedPattern((5, 11, 17), (1, 2, 3)), 43, 7, 4),
    (DilatedPattern((13, 29), (1, 7), offsets="interleaved"), 61, 5, 3),
    (DilatedPattern((5, 11, 17), (2, 3, 7), heads="grouped"), 47, 5, 7),
    (DilatedPattern((13, 13, 300, 500), (3, 3, 2, 2)), 41, 3, 5),  # branches that are the same, or are at this length
    (DilatedPattern((31,), (11,)), 7, 11, 2),  # heads that keep nothing
    (DilatedPattern((31,), (2,)), 1, 2, 128),
    (DilatedPattern((6, 12), (1, 2)), 37, 2, 1),
]


def of_head(found: list[HeadTiles], head: int) -> HeadTiles:
    (one,) = (of for of in found if head in of.heads)
    return one


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("pattern", "num_tokens", "num_kv_heads", "block_size"), CASES)
def test_numbers_and_cells_equal_a_look_at_every_pair_and_the_block_mask(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, block_size: int, is_causal: bool
) -> None:
    found = head_tiles(pattern, num_tokens, num_kv_heads, block_size, 1, is_causal=is_causal)
    assert sorted(head for of in found for head in of.heads) == list(range(num_kv_heads))
    mask = create_dilated_block_mask(
        pattern, num_kv_heads, seq_len=num_tokens, is_causal=is_causal, device="cpu", BLOCK_SIZE=block_size
    )
    for head in range(num_kv_heads):
        tally, visited, full = brute_force(pattern, num_tokens, num_kv_heads, head, block_size, is_causal)
        _, each, cells = of_head(found, head)
        assert each == tally
        assert (each.partial, each.full) == (mask.kv_num_blocks[0, head].sum(), mask.full_kv_num_blocks[0, head].sum())
        expected = np.where(full, Cell.FULL, np.where(visited, Cell.VISITED, Cell.NONE))
        if is_causal:
            expected[np.triu_indices(len(expected), k=1)] = Cell.FUTURE
        np.testing.assert_array_equal(cells, expected)
    assert all_heads(found).pairs == pattern.count_pairs(num_tokens, num_kv_heads, is_causal=is_causal)


@pytest.mark.parametrize(("group", "is_causal"), [(2, False), (2, True), (5, True), (100, False)])
def test_cells_say_how_many_of_their_tiles_are_visited(group: int, is_causal: bool) -> None:
    pattern, num_tokens, block_size = DilatedPattern((22, 97), (1, 11)), 197, 4
    _, visited, full = brute_force(pattern, num_tokens, 2, 1, block_size, is_causal)
    cells = of_head(head_tiles(pattern, num_tokens, 2, block_size, group, is_causal=is_causal), 1).cells
    present = np.tril(np.ones_like(visited)) if is_causal else np.ones_like(visited)
    size = -(-len(visited) // group)
    assert cells.shape == (size, size)
    for i, j in np.ndindex(size, size):
        part = np.s_[i * group : (i + 1) * group, j * group : (j + 1) * group]
        tiles, seen, whole = present[part].sum(), visited[part].sum(), full[part].sum()
        if tiles == 0:
            expected = Cell.FUTURE
        elif whole == tiles:
            expected = Cell.FULL
        elif seen == tiles:
            expected = Cell.VISITED
        elif seen == 0:
            expected = Cell.NONE
        else:
            expected = Cell.OVER_HALF if seen / tiles >= 0.5 else Cell.UNDER_HALF
        assert cells[i, j] == expected, (i, j)
    if group == 2:
        assert set(cells.flat) == set(Cell) - (set() if is_causal else {Cell.FUTURE})


def test_heads_with_the_same_tiles_are_one_entry() -> None:
    pattern = DilatedPattern((64, 128), (1, 2))
    (alone,) = head_tiles(pattern, 256, 4, 16, 1)
    assert alone.heads == (0, 1, 2, 3)
    first, second = head_tiles(DilatedPattern((15, 31), (1, 2)), 93, 4, 8, 1)
    assert (first.heads, second.heads) == ((0, 1), (2, 3))
    assert first.tally.pairs != second.tally.pairs


def test_waste_divides_pairs_in_visited_tiles_by_useful_pairs() -> None:
    tally = Tally(block_size=10, tiles=40, partial=6, full=3, packed=4, pairs=350)
    assert (tally.density, tally.waste_raw, tally.waste_packed) == ("22.5 %", "2.57", "1.14")
    assert tally._replace(pairs=1).waste_raw == "900"
    assert tally._replace(pairs=0).waste_packed == "-"
