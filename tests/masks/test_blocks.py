"""Block lists against a look at all pairs, and what they cost over a million tokens."""

from itertools import product
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from flexdilated import DilatedPattern
from flexdilated.core.branch import Kept, Near
from flexdilated.masks import blocks as listing
from flexdilated.masks.blocks import BlockLists, Direction, HeadBranch, block_lists, head_branches, most_columns
from tests.cases import least_heads

ORDERS: tuple[Direction, ...] = ("any", "before", "after")
SIZES = (1, 2, 3, 5, 8, 16)

Branches = tuple[tuple[int, int, int] | Near, ...]  # length, rate, offset


def join(branches: Branches, num_tokens: int, order: Direction) -> Tensor:
    """(N, N): the pairs that a branch joins, by the definition."""
    p = torch.arange(num_tokens)
    joined = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for branch in branches:
        if isinstance(branch, Near):
            joined |= ((p[:, None] - p).abs() < branch.window) | (torch.minimum(p[:, None], p) < branch.global_tokens)
            continue
        w, r, o = branch
        kept = p % w % r == o
        joined |= kept[:, None] & kept & (p[:, None] // w == p // w)
    return {"any": joined, "before": joined.tril(), "after": joined.triu()}[order]


def look(pairs: Tensor, row_size: int, column_size: int) -> tuple[Tensor, Tensor]:
    """(rows, columns): which blocks hold some and which all of their pairs; there are none behind the last token."""
    rows, columns = -(-len(pairs) // row_size), -(-len(pairs) // column_size)
    padded = torch.zeros(rows * row_size, columns * column_size, dtype=torch.bool)
    padded[: len(pairs), : len(pairs)] = pairs
    blocks = padded.view(rows, row_size, columns, column_size).transpose(1, 2).flatten(2)
    full = blocks.all(dim=-1)
    return blocks.any(dim=-1) & ~full, full


def read(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """(rows, columns): the listed blocks, once the lists have the form that `BlockLists` documents."""
    assert counts.dtype == indices.dtype == torch.int32
    assert indices.shape == (len(counts), max(1, int(counts.max())))
    valid = torch.arange(indices.shape[1]) < counts[:, None]
    assert (indices.diff(dim=1)[valid[:, 1:]] > 0).all()
    assert (indices[~valid] == 0).all()
    listed = torch.zeros(len(counts), columns, dtype=torch.bool)
    listed[valid.nonzero()[:, 0], indices[valid].long()] = True
    return listed


def check(branches: tuple[HeadBranch, ...], num_tokens: int, sizes: tuple[int, int], order: Direction) -> Tensor:
    """The full blocks, once the lists of these branches hold what a look at all pairs finds."""
    return compare(block_lists(branches, num_tokens, *sizes, order), join(branches, num_tokens, order), sizes)


def compare(lists: BlockLists, pairs: Tensor, sizes: tuple[int, int]) -> Tensor:
    partial, full = look(pairs, *sizes)
    assert torch.equal(read(lists.partial_counts, lists.partial_indices, full.shape[1]), partial)
    assert torch.equal(read(lists.full_counts, lists.full_indices, full.shape[1]), full)
    return full


@st.composite
def patterns(draw: st.DrawFn) -> DilatedPattern:
    """One to four branches, short and long, with small rates and rates far larger than a block."""
    lengths = draw(st.lists(st.integers(1, 40) | st.integers(1, 300), min_size=1, max_size=4))
    return DilatedPattern(
        tuple(lengths),
        tuple(draw(st.integers(1, min(length, 4)) | st.integers(1, length)) for length in lengths),
        heads=draw(st.sampled_from(("all", "grouped"))),
        offsets=draw(st.sampled_from(("blocked", "interleaved"))),
        window=draw(st.none() | st.integers(1, 40) | st.integers(1, 300)),
        global_tokens=draw(st.just(0) | st.integers(0, 40) | st.integers(0, 300)),
    )


@pytest.mark.slow
@settings(max_examples=200)
@given(
    patterns(),
    st.integers(1, 200),
    st.integers(1, 7),
    st.integers(0, 6),
    st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)),
    st.sampled_from(ORDERS),
)
@example(DilatedPattern((300,), (1,)), 200, 1, 0, (16, 8), "any")  # one segment, its ragged last blocks never full
@example(DilatedPattern((97, 97), (29, 97)), 200, 5, 4, (8, 5), "before")  # rates larger than a block
def test_lists_hold_the_blocks_that_a_look_at_all_pairs_finds(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, head: int, sizes: tuple[int, int], order: Direction
) -> None:
    num_kv_heads = max(num_kv_heads, least_heads(pattern))
    head %= num_kv_heads
    segments, near = pattern.split("tests")
    branches: Branches = tuple(
        (w, r, pattern.offset(i, head, num_kv_heads))
        for i, (w, r) in enumerate(segments)
        if head in pattern.head_range(i, num_kv_heads)
    )
    branches += (near,) if near else ()
    found = head_branches(pattern, head, num_kv_heads, num_tokens)
    compare(block_lists(found, num_tokens, *sizes, order), join(branches, num_tokens, order), sizes)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [(8, 8), (3, 16), (16, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 9, 16, 17, 57, 300])
def test_near_pairs_alone_and_beside_segments(size: int, sizes: tuple[int, int], order: Direction) -> None:
    for segments, near in product(((), ((10, 1), (60, 3))), ((size, 0), (None, size), (size, 6))):
        pattern = DilatedPattern(*zip(*segments), window=near[0], global_tokens=near[1])
        branches = head_branches(pattern, 2, 3, 70)
        check(branches, 70, sizes, order)
        lists = block_lists(branches, 70, *sizes, order)
        assert int((lists.partial_counts + lists.full_counts).max()) <= most_columns(pattern, *sizes)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [(8, 8), (3, 16), (16, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("rate", [17, 53, 101])
def test_rates_larger_than_a_block_leave_blocks_out(rate: int, sizes: tuple[int, int], order: Direction) -> None:
    branches = (Kept(101, rate, 7), Kept(199, rate, 16))
    full = check(branches, 200, sizes, order)
    assert full.any() == (sizes == (1, 1))


def test_lists_are_made_on_the_cpu_whatever_the_default_device() -> None:
    branches = (Kept(13, 1, 0), Kept(29, 2, 1))
    with torch.device("meta"):
        lists = block_lists(branches, 29, 5, 3, "any")
    compare(lists, join(branches, 29, "any"), (5, 3))


@pytest.mark.parametrize("branches", [(), (Kept(13, 1, 0), Kept(29, 2, 1))], ids=["none", "two"])
def test_lists_that_do_not_tell_full_blocks_hold_all_as_partial(branches: tuple[Kept, ...]) -> None:
    lists = block_lists(branches, 29, 5, 3, "any", separate_full=False)
    partial, full = look(join(branches, 29, "any"), 5, 3)
    assert full.any() == bool(branches)
    assert torch.equal(read(lists.partial_counts, lists.partial_indices, 10), partial | full)
    assert not read(lists.full_counts, lists.full_indices, 10).any()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("length", "rate", "offset"), [(7, 2, 1), (48, 8, 3), (5, 5, 4)])
def test_a_branch_is_worked_on_by_the_segments_that_rows_touch(length: int, rate: int, offset: int, order: Direction) -> None:
    """As long as its rate is at most a block's columns: then a row has one run of each segment."""
    looked = []
    within = listing._within

    def counted(counts: Tensor) -> Tensor:
        looked.append(int(counts.sum()))
        return within(counts)

    with mock.patch.object(listing, "_within", counted):
        runs = listing._runs(Kept(length, rate, offset), 101, 16, 8, order)
    assert looked == [len({(t // 16, t // length) for t in range(101)})]
    assert len(runs[0]) == len({(t // 16, t // length) for t in range(101) if t % length % rate == offset})


def test_branches_of_a_head_are_distinct_and_cut_to_the_sequence() -> None:
    pattern = DilatedPattern((400, 7, 300, 7), (3, 1, 3, 1), offsets="interleaved")
    assert head_branches(pattern, 4, 5, 101) == (Kept(7, 1, 0), Kept(101, 3, 1))


@pytest.mark.parametrize("sizes", [(8, 1), (16, 16), (3, 8), (32, 5)], ids=str)
@pytest.mark.parametrize("lengths", [(96,), (100,), (7,), (64, 100), (5, 33, 96)], ids=str)
def test_no_row_joins_more_columns_than_is_known_beforehand(lengths: tuple[int, ...], sizes: tuple[int, int]) -> None:
    pattern = DilatedPattern(lengths, (1,) * len(lengths))
    lists = block_lists(head_branches(pattern, 0, 1, 400), 400, *sizes, "any")
    found, known = int((lists.partial_counts + lists.full_counts).max()), most_columns(pattern, *sizes)
    assert found <= known
    # A row lies in one segment, or reaches at most a whole one on either side.
    spans = [w if w % sizes[0] == 0 else 2 * w + sizes[0] for w in lengths]
    assert known <= sum(-(-span // sizes[1]) + 2 for span in spans)


# Borders at 65 and 95 leave of the block of tokens 80..95 and 64..79 the one pair (95, 64); 66 and 95 leave (95, 64) and (95, 65).
ONE_PAIR = (Kept(65, 1, 0), Kept(95, 1, 0)), (Kept(128, 31, 2),)
TWO_PAIRS = (Kept(66, 1, 0), Kept(95, 1, 0)), (Kept(128, 31, 2), Kept(128, 30, 5))


@pytest.mark.parametrize(("order", "corners"), [("any", ((5, 4), (4, 5))), ("before", ((5, 4),)), ("after", ((4, 5),))])
@pytest.mark.parametrize(("near", "dilated"), [ONE_PAIR, TWO_PAIRS], ids=["one_pair", "two_pairs"])
def test_a_dilated_branch_completes_a_block_of_16(
    near: tuple[Kept, ...], dilated: tuple[Kept, ...], order: Direction, corners: tuple[tuple[int, int], ...]
) -> None:
    pairs = join(near, 128, "any")[80:96, 64:80]
    assert (~pairs).sum() == len(dilated)
    without = check(near, 128, (16, 16), order)
    completed = check(near + dilated, 128, (16, 16), order)
    assert set(map(tuple, (completed & ~without).nonzero().tolist())) == set(corners)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=str)
def test_dilated_branches_alone_fill_a_tiny_block(sizes: tuple[int, int], order: Direction) -> None:
    branches = (Kept(13, 2, 0), Kept(13, 3, 0))  # 6 sees 8 by rate 2 and 9 by rate 3
    full = check(branches, 13, sizes, order)
    assert full[(6, 4) if sizes == (1, 2) else (4, 6)].item() == (order != ("before" if sizes == (1, 2) else "after"))


def looks(branches: tuple[Kept, ...], num_tokens: int, sizes: tuple[int, int], order: Direction) -> list[Tensor]:
    """What is asked of the definition while these lists are made: whole blocks as (blocks, rows, columns)."""
    asked = []
    joined = listing._joined

    def kept(*arguments: Any) -> Tensor:
        asked.append(joined(*arguments))
        return asked[-1]

    with mock.patch.object(listing, "_joined", kept):
        check(branches, num_tokens, sizes, order)
    return asked


@pytest.mark.parametrize(
    "branches",
    [(Kept(13, 1, 0), Kept(29, 1, 0)), (Kept(13, 3, 0), Kept(29, 4, 3)), (Kept(13, 1, 0), Kept(26, 1, 0), Kept(61, 2, 1))],
    ids=["rate_1", "dilated", "nested"],
)
def test_no_pair_is_looked_at_where_no_dilated_branch_can_complete_a_block(branches: tuple[Kept, ...]) -> None:
    assert not looks(branches, 61, (5, 7), "any")


@pytest.mark.parametrize("order", ORDERS)
def test_of_blocks_that_rate_1_leaves_those_with_all_four_corners_are_looked_at(order: Direction) -> None:
    near, dilated = (Kept(7, 1, 0), Kept(11, 1, 0)), (Kept(61, 2, 0), Kept(58, 3, 1))
    pairs = join(near + dilated, 187, order)
    corners = [pairs[i : i + 3 : 2, j : j + 4 : 3].all() for i in range(0, 186, 3) for j in range(0, 184, 4)]
    _, full = look(join(near, 187, order), 3, 4)
    expected = sum(bool(each) for each in corners) - int(full.sum())
    assert expected > 5
    assert sum(len(each) for each in looks(near + dilated, 187, (3, 4), order) if each.ndim == 3) == expected


@pytest.mark.parametrize(("order", "corners"), [("any", ((4, 3), (3, 4))), ("before", ((4, 3),)), ("after", ((3, 4),))])
def test_a_dilated_branch_completes_a_block_that_a_window_joins(order: Direction, corners: tuple[tuple[int, int], ...]) -> None:
    """The window leaves the pair (79, 48) of the block of tokens 64..79 and 48..63."""
    full = [check(branches, 128, (16, 16), order) for branches in ((Near(31),), (Kept(128, 31, 17), Near(31)))]
    assert set(map(tuple, (full[1] & ~full[0]).nonzero().tolist())) == set(corners)
