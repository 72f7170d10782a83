"""The blocks of a pattern that hold a joined pair, in closed form: what a BlockMask lists, without ever looking at pairs.

Rows are the blocks of one side (queries, say), columns those of the other. A branch joins a row block and a column block inside a
segment that both touch and where both hold a kept position. Segments and kept positions are arithmetic progressions, so every row's
columns come as a few runs of consecutive blocks, and the union over branches is a union of intervals. A window is one run per row,
and so are the global tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flexdilated.core.branch import NONE, Kept, Near
from flexdilated.core.pattern import DilatedPattern

Direction = Literal["any", "before", "after"]  # which columns a row may see: all positions, none after its own, none before
HeadBranch = Kept | Near  # a branch as one head runs it

PAIRS = 1 << 20  # looked at together, in the rare blocks that need it


class BlockLists(NamedTuple):
    """Per row block: how many column blocks it joins in part and in full, and which, ascending, padded with 0 on the right."""

    partial_counts: Tensor  # (rows,)
    partial_indices: Tensor  # (rows, most partial blocks of a row, at least 1)
    full_counts: Tensor
    full_indices: Tensor


def head_branches(pattern: DilatedPattern, head: int, num_kv_heads: int, seq_len: int) -> tuple[HeadBranch, ...]:
    """The distinct branches that a key/value head runs, cut to the sequence. A window as long as the sequence is a segment."""
    branches = {branch._replace(length=min(branch.length, seq_len)) for branch in pattern.kept(head, num_kv_heads, "block masks")}
    near = pattern.split("block masks")[1]
    if max(near) >= seq_len:
        return tuple(sorted({*branches, Kept(seq_len, 1, 0)}))
    return (*sorted(branches), *([near] if near else []))


def most_columns(pattern: DilatedPattern, row_size: int, column_size: int) -> int:
    """An upper bound on the blocks that a row joins, for sequences of any length."""
    segments, near = pattern.split("block masks")
    if near.global_tokens:  # some rows join all
        return 1 << 40
    spans = [length if length % row_size == 0 else 2 * length + row_size for length, _ in segments]
    spans += [row_size + 2 * (near.window - 1)] if near.window else []
    return sum(span // column_size + 2 for span in spans)


def block_lists(
    branches: tuple[HeadBranch, ...],
    seq_len: int,
    row_size: int,
    column_size: int,
    direction: Direction,
    *,
    separate_full: bool = True,
) -> BlockLists:
    """The blocks that the branches of one head join, int32 on the CPU.

    A block is full when it lies inside the sequence as a whole and all of its pairs are joined. Without `separate_full` every block
    is listed as partial.
    """
    rows = -(-seq_len // row_size)
    with _on_cpu():
        runs = [_runs(branch, seq_len, row_size, column_size, direction) for branch in branches]
        if not runs:
            no_counts, no_indices = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, 1, dtype=torch.int32)
            return BlockLists(no_counts, no_indices, no_counts, no_indices)
        row, first, last = (torch.cat(parts) for parts in zip(*runs))
        row, first, last = _union(row, first, last, seq_len)
        row, column = _expand(row, first, last)
        if not separate_full:
            return _listed(row, column, torch.zeros_like(row, dtype=torch.bool), rows)
        full_first, full_last = _full_columns(branches, seq_len, row_size, column_size, direction)
        full = (column >= full_first[row]) & (column <= full_last[row])
        full[
            list(
                _completed(
                    branches, seq_len, row_size, column_size=column_size, direction=direction, row=row, column=column, full=full
                )
            )
        ] = True
        return _listed(row, column, full, rows)


def band_lists(num_rows: int, num_columns: int, band: tuple[int, int], block_size: int, *, separate_full: bool) -> BlockLists:
    """The blocks of a band, as `block_lists`: row `l` joins the columns `l + band[0] ... l + band[1]`."""
    with _on_cpu():
        start = torch.arange(0, num_rows, block_size)
        end = (start + block_size).clamp(max=num_rows)
        first, last = (start + band[0]).clamp(min=0), (end - 1 + band[1]).clamp(max=num_columns - 1)
        full_first = _ceil_div((end - 1 + band[0]).clamp(min=0), block_size)
        full_last = (start + band[1] + 1).clamp(max=num_columns).div(block_size, rounding_mode="floor") - 1
        full_last[end - start < block_size] = -1
        nonempty = (last >= first).nonzero()[:, 0]
        row, column = _expand(nonempty, first[nonempty] // block_size, last[nonempty] // block_size)
        full = (column >= full_first[row]) & (column <= full_last[row]) & separate_full
        return _listed(row, column, full, len(start))


def _on_cpu() -> AbstractContextManager[object]:
    """On the CPU, whatever torch's default device is; the mode makes every operation slower, so only where it is needed."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _runs(branch: HeadBranch, seq_len: int, row_size: int, column_size: int, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """`(row block, first column block, last column block)` of one branch; every block of a run is joined."""
    starts = torch.arange(0, seq_len, row_size)
    ends = (starts + row_size).clamp(max=seq_len)
    if isinstance(branch, Near):
        return _near_runs(branch, starts, ends, seq_len, column_size, direction)
    length, rate, offset = branch
    first_segment = starts // length
    num_segments = (ends - 1) // length - first_segment + 1
    row = torch.repeat_interleave(num_segments)
    segment = first_segment[row] + _within(num_segments)

    lattice = segment * length + offset  # the first kept position of the segment, if the segment reaches it
    segment_end = ((segment + 1) * length).clamp(max=seq_len)
    row_start, row_end = torch.maximum(starts[row], segment * length), torch.minimum(ends[row], segment_end)
    first_kept = lattice + _ceil_div((row_start - lattice).clamp(min=0), rate) * rate
    last_kept = lattice + (row_end - 1 - lattice).div(rate, rounding_mode="floor") * rate
    column_first = first_kept if direction == "after" else lattice
    column_last = (
        last_kept if direction == "before" else lattice + (segment_end - 1 - lattice).div(rate, rounding_mode="floor") * rate
    )
    nonempty = first_kept < row_end
    row, column_first, column_last = row[nonempty], column_first[nonempty], column_last[nonempty]
    if rate <= column_size:  # no block between the first and the last is without a kept position
        return row, column_first // column_size, column_last // column_size
    num_kept = (column_last - column_first) // rate + 1
    entry = torch.repeat_interleave(num_kept)
    column = (column_first[entry] + _within(num_kept) * rate) // column_size
    return row[entry], column, column


def _near_runs(
    near: Near, starts: Tensor, ends: Tensor, seq_len: int, column_size: int, direction: Direction
) -> tuple[Tensor, Tensor, Tensor]:
    """`_runs` of a window and of global tokens, for rows from `starts` to `ends`."""
    row = torch.arange(len(starts))
    runs = []
    if near.window:
        before, after = (0 if direction == opposite else near.window - 1 for opposite in ("after", "before"))
        runs.append((row, (starts - before).clamp(min=0), (ends - 1 + after).clamp(max=seq_len - 1)))
    if near.global_tokens:
        first, last = torch.zeros_like(row), torch.full_like(row, near.global_tokens - 1)
        if direction == "before":
            runs.append((row, first, torch.minimum(last, ends - 1)))
        else:  # rows of global tokens see all columns, or those after them
            is_global = starts < near.global_tokens
            first = starts if direction == "after" else first
            runs.append((row[is_global], first[is_global], torch.full_like(row[is_global], seq_len - 1)))
        if direction == "any":
            runs.append((row, torch.zeros_like(row), last))
    row, first, last = (torch.cat(parts) for parts in zip(*runs))
    return row, first // column_size, last // column_size


def _union(row: Tensor, first: Tensor, last: Tensor, pitch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge runs of blocks to disjoint runs in ascending order. Sorts numbers `row * pitch + column`."""
    start, order = torch.sort(row * pitch + first)
    end = torch.cummax((row * pitch + last)[order], dim=0).values
    is_first = torch.ones_like(start, dtype=torch.bool)
    is_first[1:] = start[1:] > end[:-1]
    is_last = torch.ones_like(is_first)
    is_last[:-1] = is_first[1:]
    start, end = start[is_first], end[is_last]
    return start // pitch, start % pitch, end % pitch


def _expand(row: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """`(row, column)` of the single blocks of runs."""
    sizes = last - first + 1
    run = torch.repeat_interleave(sizes)
    return row[run], first[run] + _within(sizes)


def _full_columns(
    branches: tuple[HeadBranch, ...], seq_len: int, row_size: int, column_size: int, direction: Direction
) -> tuple[Tensor, Tensor]:
    """First and last column block (none where last < first) that a window and branches of rate 1 join in full with each row block.

    Such a branch joins a pair if no boundary of its segments is between its positions; a window joins it if they are near enough.
    The widest pair of a block decides, once for columns below the row and once for columns above.
    """
    first_token = torch.arange(0, seq_len, row_size)
    last_token = first_token + row_size - 1
    lengths = [branch.length for branch in branches if isinstance(branch, Kept) and branch.rate == 1]
    sizes = [branch.window for branch in branches if isinstance(branch, Near) and branch.window]
    if not lengths and not sizes:
        return torch.ones_like(first_token), torch.zeros_like(first_token)
    down = [last_token // w * w for w in lengths] + [(last_token + 1 - size).clamp(min=0) for size in sizes]
    up = [(first_token // w + 1) * w for w in lengths] + [first_token + size for size in sizes]
    reach_down, reach_up = torch.stack(down).amin(dim=0), torch.stack(up).amax(dim=0).clamp(max=seq_len)
    if direction == "before":
        reach_up = torch.minimum(reach_up, first_token + 1)
    if direction == "after":
        reach_down = torch.maximum(reach_down, last_token)
    first, last = _ceil_div(reach_down, column_size), reach_up // column_size - 1
    return first, torch.where(last_token < seq_len, last, -1)


def _completed(
    branches: tuple[HeadBranch, ...],
    seq_len: int,
    row_size: int,
    column_size: int,
    direction: Direction,
    row: Tensor,
    column: Tensor,
    full: Tensor,
) -> Iterator[int]:
    """Blocks that become full only because a dilated branch or global tokens add the few pairs that others leave.

    Dilated branches join positions whose distance is a multiple of a rate. What branches of rate 1 leave of a block is nothing,
    or, when all borders of the longest are borders of the others, at least a row, a column or a pair of neighbours: too much for
    the dilated ones unless every distance in a whole run has one of their rates for a divisor. Only where neither argument settles
    it are blocks looked at. A window changes this only for blocks that it joins in part, and so do global tokens.
    """
    segments = [branch for branch in branches if isinstance(branch, Kept)]
    near = next((branch for branch in branches if isinstance(branch, Near)), NONE)
    lengths = sorted({branch.length for branch in segments if branch.rate == 1})
    rates = {branch.rate for branch in segments if branch.rate > 1}
    prime = [r for r in rates if not any(r % divisor == 0 for divisor in rates - {r})]
    run = min(row_size, column_size)
    is_settled = not prime or (all(lengths[-1] % w == 0 for w in lengths) and sum(ceil(run / r) for r in prime) < run)
    if is_settled and not near:
        return
    is_inside = ((row + 1) * row_size <= seq_len) & ((column + 1) * column_size <= seq_len) & ~full
    if is_settled:
        is_near = (row * row_size - (column + 1) * column_size + 1 < near.window) & (
            column * column_size - (row + 1) * row_size + 1 < near.window
        )
        is_near &= bool(prime)
        is_inside &= is_near | (row * row_size < near.global_tokens) | (column * column_size < near.global_tokens)
    candidates = is_inside.nonzero()[:, 0]
    # Check corners first, the most distant ones before the others: few blocks have them all.
    for i, j in ((-1, 0), (0, -1), (0, 0), (-1, -1)):
        x = row[candidates] * row_size + i % row_size
        y = column[candidates] * column_size + j % column_size
        candidates = candidates[_joined(branches, x, y, direction)]
    x, y = torch.arange(row_size)[:, None], torch.arange(column_size)
    for chunk in candidates.split(max(1, PAIRS // (row_size * column_size))):
        rows, columns = row[chunk, None, None] * row_size + x, column[chunk, None, None] * column_size + y
        yield from chunk[_joined(branches, rows, columns, direction).flatten(1).all(dim=1)].tolist()


def _joined(branches: tuple[HeadBranch, ...], x: Tensor, y: Tensor, direction: Direction) -> Tensor:
    """Whether pairs of positions are joined, by the definition."""
    joined = torch.zeros(torch.broadcast_shapes(x.shape, y.shape), dtype=torch.bool)
    for branch in branches:
        joined |= branch.joins(x, y)
    if direction == "before":
        return joined & (y <= x)
    return joined & (y >= x) if direction == "after" else joined


def _listed(row: Tensor, column: Tensor, full: Tensor, rows: int) -> BlockLists:
    """The lists of blocks that are sorted by row."""
    return BlockLists(*_pack(row[~full], column[~full], rows), *_pack(row[full], column[full], rows))


def _pack(row: Tensor, column: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Counts and left-aligned indices of blocks that are sorted by row."""
    counts = torch.bincount(row, minlength=rows)
    indices = torch.zeros(rows, max(1, int(counts.max())), dtype=torch.int32)
    indices[row, _within(counts)] = column.int()
    return counts.int(), indices


def _within(counts: Tensor) -> Tensor:
    """`0 .. n - 1` for every n of counts, one after another."""
    starts = torch.repeat_interleave(counts.cumsum(dim=0) - counts, counts)
    return torch.arange(len(starts)) - starts


def _ceil_div(a: Tensor, b: int) -> Tensor:
    return -(-a).div(b, rounding_mode="floor")
