"""The picture of a pattern, per head: how often a pair of a query and a key counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.analysis.lattice import checked
from flexdilated.core.branch import Near, Window
from flexdilated.core.keywords import takes_num_kv_heads
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.pattern_svg import WINDOW_COLOR
from flexdilated.draw.panels import APART, FUTURE, Panels, figure_of, head_panel, pattern_title, tick_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ColorBrewer's YlGnBu from its middle on: sequential, safe for colour-blind readers, readable in grey, and a single cell of its
# lightest colour still shows on white.
SCALE = ("#74c9bd", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")


MAX_HEADS = 64  # that can be seen in a picture
CELLS = 1024  # per side of a picture
Ends = tuple[Any, Any]  # the first, and the one after the last; arrays that broadcast
# Where a cell is many pairs, its colour is by joins per pair.
SHARES = (1 / 256, 1 / 64, 1 / 16, 1 / 4, 1)
SHARE_NAMES = ("up to 1/256", "up to 1/64", "up to 1/16", "up to 1/4", "up to 1", "more than 1")


@takes_num_kv_heads
def multiplicity(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, *, is_causal: bool = False) -> NDArray[np.int64]:
    """How often each (query, key) pair counts: `m` in `softmax(score + log m)`.

    A pair of the window or the global tokens counts once. Zero keys of `zero_padding` are not counted.

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N.
        num_kv_heads: Key/value heads, which may be fewer than query heads.
        is_causal: Whether a query sees only keys at its own position and before.

    Returns:
        `(H, N, N)`: head, query, key.
    """
    return cell_counts(pattern, num_tokens, num_kv_heads, 1, is_causal=is_causal).astype(np.int64)


def cell_counts(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, size: int, *, is_causal: bool) -> NDArray[np.float64]:
    """`(H, cells, cells)`: the sum of `multiplicity` over cells of `size` x `size` pairs, in closed form."""
    start = np.arange(0, num_tokens, size)
    end = np.minimum(start + size, num_tokens)
    segments, near = pattern.split("pictures")
    counts = np.zeros((num_kv_heads, len(start), len(start))) + _in_near(near, num_tokens, size, is_causal=is_causal)
    for branch, (length, rate) in enumerate(segments):
        w, r = min(length, num_tokens), min(rate, num_tokens)
        first, last = start // w, (end - 1) // w  # segments of a cell
        begun = near.global_tokens // w  # the segment of the first token that is not global
        for offset, head, step, heads in pattern.head_runs(branch, num_kv_heads):
            far = _Far(w, r, offset, near, is_causal)
            head_rows = far.rows(first, start, np.minimum(end, (first + 1) * w))
            tail_rows = far.rows(last, np.maximum(start, last * w), end)
            diagonal = far.pairs(head_rows, head_rows) + np.where(last > first, far.pairs(tail_rows, tail_rows), 0.0)
            diagonal += np.where((first < begun) & (begun < last), far.uncut(begun), 0.0)
            diagonal += np.maximum(last - 1 - np.maximum(first, begun), 0) * far.uncut(begun + 1)
            queries = head_rows[0][:, None], head_rows[1][:, None]
            later = np.tril(first[:, None] == last, -1) * far.pairs(queries, tail_rows)  # queries in a later cell than keys
            counts[head : head + step * heads : step] += np.diag(diagonal) + later + (0.0 if is_causal else later.T)
    return counts


class _Far(NamedTuple):
    """A branch of segments as one head keeps it, without near pairs. Kept rows of a segment are numbered."""

    length: int
    rate: int
    offset: int
    near: Near
    is_causal: bool

    def rows(self, segment: Any, begin: Any, end: Any) -> Ends:
        """The first row among tokens `begin ... end` of a segment that is no global token, and the row after the last."""
        tokens = (np.minimum(token - segment * self.length, self.length) for token in (self.near.global_tokens, begin, end))
        skipped, low, high = (np.maximum(0, -((self.offset - token) // self.rate)) for token in tokens)
        return np.maximum(low, skipped), np.maximum(np.maximum(low, skipped), high)

    def pairs(self, queries: Ends, keys: Ends) -> NDArray[np.float64]:
        """The pairs of rows of one segment that are far enough from each other."""
        apart = self.near.far_rows(self.rate)
        before = _up_to(-apart, queries, keys)
        if self.is_causal:
            return before
        return before + _up_to(1 << 40, queries, keys) - _up_to(max(apart, 1) - 1, queries, keys)

    def uncut(self, segment: int) -> NDArray[np.float64]:
        """The pairs of a segment that is not cut."""
        rows = self.rows(segment, segment * self.length, (segment + 1) * self.length)
        return self.pairs(rows, rows)


def _in_near(near: Near, num_tokens: int, size: int, *, is_causal: bool) -> NDArray[np.float64]:
    """`(cells, cells)`: the pairs that count once, those of the window and of the global tokens."""

    def within(start: int, low: int, high: int) -> NDArray[np.float64]:
        """The pairs of tokens from `start` on with `low <= key - query <= high`."""
        begin, end = (np.clip(np.arange(0, num_tokens, size) + step, start, max(start, num_tokens)) for step in (0, size))
        queries = begin[:, None], end[:, None]
        return _up_to(high, queries, (begin, end)) - _up_to(low - 1, queries, (begin, end))

    any_distance, num_global = Window(num_tokens).band(is_causal=is_causal), near.global_tokens
    counts = within(0, *any_distance) - within(num_global, *any_distance)
    return counts + within(num_global, *Window(near.window).band(is_causal=is_causal)) if near.window else counts


def _up_to(distance: int, queries: Ends, keys: Ends) -> NDArray[np.float64]:
    """How many pairs of a rectangle have `key - query <= distance`: `least + i` keys for its i-th query."""
    rows, columns = (np.asarray(end - begin, dtype=np.float64) for begin, end in (queries, keys))
    least = np.clip(distance + 1.0 + queries[0] - keys[0], -rows, columns)
    small, large = (np.clip(x, 0, columns) for x in (least, least + rows))
    inner: NDArray[np.float64] = (large * (large - 1) - small * (small - 1)) / 2
    return inner + columns * np.maximum(least + rows - columns, 0)


@takes_num_kv_heads
def draw(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, *, is_causal: bool = False, name: str | None = None
) -> Figure:
    """A matplotlib figure with one panel per head: query rows down, key columns across, coloured by `multiplicity`.

    >>> figure = draw_pattern(DilatedPattern((4, 16), (1, 2)), 16, 2)
    >>> len(figure.axes)
    2

    Outlined squares are the segments of each branch, magenta lines the edges of the window. Above 1,024 tokens a cell is a
    square of pairs, coloured by joins per pair.

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N.
        num_kv_heads: Key/value heads, at most 64.
        is_causal: Whether a query sees only keys at its own position and before.
        name: What the pattern is called in the title, besides its lengths and rates.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument has the wrong type.
    """
    num_tokens, num_kv_heads = checked(pattern, num_tokens, num_kv_heads, is_causal=is_causal)
    if num_kv_heads > MAX_HEADS:
        raise ValueError(f"num_kv_heads must be at most {MAX_HEADS}, got {num_kv_heads}")
    return figure_of(multiplicity_panels(pattern, num_tokens, num_kv_heads, is_causal=is_causal, name=name))


def multiplicity_panels(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, *, is_causal: bool, name: str | None = None, most: int = CELLS
) -> Panels:
    """The picture that `draw` makes a figure of, with at most so many cells per side."""
    size = -(-num_tokens // most)
    counts = cell_counts(pattern, num_tokens, num_kv_heads, size, is_causal=is_causal)
    levels, names = (counts.astype(np.int64), None) if size == 1 else (_shaded(counts, num_tokens, size, is_causal), SHARE_NAMES)
    near = pattern.split("pictures")[1]
    in_near = _in_near(near, num_tokens, size, is_causal=is_causal)
    cells = len(counts[0])
    future = np.triu(np.ones((cells, cells), dtype=bool), k=1) & is_causal
    colors = [FUTURE, *_colors(max(1, int(levels.max())) if names is None else len(names))]
    labels = [str(count) for count in range(len(colors) - 1)] if names is None else ["none", *names]
    if near:
        colors.append(WINDOW_COLOR)
        labels.append(" or ".join(["the window"] * (near.window > 0) + ["global tokens"] * (near.global_tokens > 0)) + " alone")
    panels, near_glyph = [], "w" if near.window else "g"
    for head in range(num_kv_heads):
        is_alone = (in_near > 0) & (counts[head] == in_near)
        cells_of_head = np.where(future, 0, np.where(is_alone, len(colors) - 1, levels[head] + 1))
        density = _density(counts[head : head + 1], num_tokens, is_causal)
        panels.append(
            head_panel(pattern, [head], num_kv_heads, cells_of_head, [density], shortest=1 if size == 1 else -(-num_tokens // 64))
        )
    density = _density(counts, num_tokens, is_causal) + (", each counted once" if size == 1 else "")
    return Panels(
        title=pattern_title(pattern, num_tokens, num_kv_heads, is_causal=is_causal, name=name, density=density),
        panels=panels,
        num_tokens=num_tokens,
        cell=size,
        tick=tick_step(min(pattern.segment_lengths, default=num_tokens), cells * size, 5 if size == 1 else 4),
        is_causal=is_causal,
        colors=colors,
        # Blank for the future, a dot for no branch, then the number of branches or the level of the share.
        glyphs=[" ", "·", *(near_glyph if c == WINDOW_COLOR else str(i) if i < 10 else "+" for i, c in enumerate(colors[2:], 1))],
        legend="branches that join query and key" if size == 1 else f"joins per pair, in cells of {size:,} x {size:,} pairs",
        labels={i + 1: label for i, label in enumerate(labels)} | ({0: "future"} if is_causal else {}),
        title_width=34 if pattern.heads == "grouped" else 24,
    )


def _shaded(counts: NDArray[np.float64], num_tokens: int, size: int, is_causal: bool) -> NDArray[np.int64]:
    """The level of each cell by its joins per pair: 0 without any, then one more than the limits in `SHARES` below it."""
    rows = np.minimum(size, num_tokens - np.arange(0, num_tokens, size)).astype(np.float64)
    pairs = rows[:, None] * rows
    if is_causal:
        np.fill_diagonal(pairs, rows * (rows + 1) / 2)
    return np.where(counts > 0, 1 + np.searchsorted(SHARES, counts / pairs), 0)


def _colors(levels: int) -> list[str]:
    """A colour for 0, 1, ... up to `levels`, at least 1; above six levels, neighbours share colours."""
    # One level alone is drawn in a middle blue; two and more span the scale.
    stops = [3] if levels == 1 else [round(i * (len(SCALE) - 1) / (levels - 1)) for i in range(levels)]
    return [APART, *(SCALE[stop] for stop in stops)]


def _density(counts: NDArray[np.float64], num_tokens: int, is_causal: bool) -> str:
    """The share of pairs that attend, of all pairs or of those that causality allows; where a cell is many pairs, the joins."""
    pairs = len(counts) * (num_tokens * (num_tokens + 1) // 2 if is_causal else num_tokens**2)
    kind = "causal" if is_causal else "all"
    if counts.shape[1] < num_tokens:
        return f"{100 * float(counts.sum()) / pairs:.3g} joins per 100 {kind} pairs"
    return f"{100 * np.count_nonzero(counts) / pairs:.1f} % of {kind} pairs"
