"""The picture of a pattern, per head: how many branches join a query and a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flexdilated.analysis.lattice import checked
from flexdilated.core.pattern import DilatedPattern
from flexdilated.draw.panels import APART, FUTURE, Panels, figure_of, head_panel, pattern_title, tick_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "multiplicity", "multiplicity_panels"]

# ColorBrewer's YlGnBu from its middle on: sequential, safe for colour-blind readers, readable in grey, and a single cell of its
# lightest colour still shows on white.
SCALE = ("#74c9bd", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")


MAX_TOKENS, MAX_HEADS = 1024, 64  # that can be seen in a picture


def multiplicity(pattern: DilatedPattern, num_tokens: int, num_heads: int, *, is_causal: bool = False) -> NDArray[np.int64]:
    """How many branches join each (query, key) pair: `m` in `softmax(score + log m)`.

    Zero keys of `zero_padding` are not counted.

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N.
        num_heads: Heads H. Under grouped-query attention these are key/value heads.
        is_causal: Whether a query sees only keys at its own position and before.

    Returns:
        `(H, N, N)`: head, query, key.
    """
    position = np.arange(num_tokens)
    counts = np.zeros((num_heads, num_tokens, num_tokens), dtype=np.int64)
    for branch, (length, rate) in enumerate(pattern.branches):
        length, rate = min(length, num_tokens), min(rate, num_tokens)
        same_segment = position[:, None] // length == position // length
        for head in pattern.head_range(branch, num_heads):
            kept = position % length % rate == pattern.offset(branch, head, num_heads)
            counts[head] += same_segment & kept[:, None] & kept
    return np.tril(counts) if is_causal else counts


def draw(pattern: DilatedPattern, num_tokens: int, num_heads: int, *, is_causal: bool = False, name: str | None = None) -> Figure:
    """A matplotlib figure with one panel per head: query rows down, key columns across, coloured by `multiplicity`.

    The outlined squares on the diagonal are the segments of each branch. Every token has the same whole number of pixels.

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N.
        num_heads: Heads H.
        is_causal: Whether a query sees only keys at its own position and before.
        name: What the pattern is called in the title, besides its lengths and rates.

    Raises:
        ValueError: If num_tokens is not in [1, 1024] or num_heads not in [1, 64]: more cells are not seen. `draw_blocks` draws long
            sequences.
        TypeError: If an argument has the wrong type.
    """
    num_tokens, num_heads = checked(pattern, num_tokens, num_heads, is_causal=is_causal)
    for what, value, most in (("num_tokens", num_tokens, MAX_TOKENS), ("num_heads", num_heads, MAX_HEADS)):
        if not 1 <= value <= most:
            advice = "; divide all segment lengths and the tokens by one number, or use flexdilated.draw.blocks.draw_blocks"
            raise ValueError(f"{what} must be in [1, {most}], got {value}{advice if value > most else ''}")
    return figure_of(multiplicity_panels(pattern, num_tokens, num_heads, is_causal=is_causal, name=name))


def multiplicity_panels(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, *, is_causal: bool, name: str | None = None
) -> Panels:
    """The panels of `draw`."""
    counts = multiplicity(pattern, num_tokens, num_heads, is_causal=is_causal)
    future = np.triu(np.ones((num_tokens, num_tokens), dtype=bool), k=1) & is_causal
    colors = [FUTURE, *_colors(counts)]
    panels = []
    for head in range(num_heads):
        density = _density(counts[head : head + 1], is_causal)
        panels.append(head_panel(pattern, [head], num_heads, np.where(future, 0, counts[head] + 1), [density]))
    return Panels(
        title=pattern_title(pattern, num_tokens, num_heads, is_causal=is_causal, name=name, density=_density(counts, is_causal)),
        panels=panels,
        num_tokens=num_tokens,
        cell=1,
        has_grid=False,
        tick=tick_step(min(pattern.segment_lengths), num_tokens, 5),
        is_causal=is_causal,
        colors=colors,
        # Blank for the future, a dot for no branch, then the number of branches.
        glyphs=[" ", "·", *(str(count) if count < 10 else "+" for count in range(1, len(colors) - 1))],
        legend="branches that join query and key",
        labels={count + 1: str(count) for count in range(len(colors) - 1)} | ({0: "future"} if is_causal else {}),
        title_width=34 if pattern.heads == "grouped" else 24,
    )


def _colors(counts: NDArray[np.int64]) -> list[str]:
    """A colour for 0, 1, ... up to the largest count, at least 1."""
    levels = max(1, int(counts.max()))
    # One level alone is drawn in a middle blue; two and more span the scale.
    stops = [3.0] if levels == 1 else [i * (len(SCALE) - 1) / (levels - 1) for i in range(levels)]
    return [APART, *(_blend(SCALE[int(stop)], SCALE[min(int(stop) + 1, len(SCALE) - 1)], stop % 1) for stop in stops)]


def _blend(a: str, b: str, share: float) -> str:
    pairs = ((int(a[i : i + 2], 16), int(b[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in pairs)


def _density(counts: NDArray[np.int64], is_causal: bool) -> str:
    """The share of pairs that attend, of all pairs or of those that causality allows."""
    num_heads, num_tokens = counts.shape[:2]
    pairs = num_heads * (num_tokens * (num_tokens + 1) // 2 if is_causal else num_tokens**2)
    share = 100 * np.count_nonzero(counts) / pairs
    return f"{share:.1f} % of {'causal' if is_causal else 'all'} pairs"
