"""All that is known of a pattern before anything is computed, in one value."""

from __future__ import annotations

from dataclasses import dataclass

from flexdilated.analysis.coverage import LayerBounds, bound_layers, count_uncovered, missing_residues
from flexdilated.analysis.lattice import checked
from flexdilated.analysis.pairs import Balance, balance, count_multiplicities, count_pairs
from flexdilated.analysis.reach import longest_reach
from flexdilated.analysis.tiles import BLOCK_SIZE, TileCount, count_tiles
from flexdilated.core.pattern import BACKWARD, FORWARD, DilatedPattern, at_least_one


@dataclass(frozen=True)
class Analysis:
    """What `analyse` found. `not_counted` says why a part is None, by its name."""

    pattern: DilatedPattern
    num_tokens: int
    num_heads: int
    is_causal: bool
    pairs: tuple[tuple[int, ...], ...]  # by branch and head, as `count_pairs`
    dense_pairs: int  # what dense attention scores over all heads
    multiplicities: tuple[dict[int, int], ...] | None  # by head, as `count_multiplicities`
    balance: Balance
    reach: tuple[int, ...]  # by head, as `longest_reach`
    missing_residues: tuple[tuple[int, ...], ...]  # by branch
    uncovered: int | None  # tokens that no head of any branch keeps
    layers: int | None  # as `layers_to_cover`: None is never, or not counted
    layer_bounds: LayerBounds | None  # where the number is not known exactly, what it lies between
    tiles: tuple[TileCount, ...] | None  # by head
    not_counted: dict[str, str]

    @property
    def total_pairs(self) -> int:
        """Over all branches and heads, as `DilatedPattern.count_pairs` counts."""
        return sum(map(sum, self.pairs))

    @property
    def distinct_pairs(self) -> int | None:
        """Over all heads, a pair that several branches join counted once."""
        return None if self.multiplicities is None else sum(sum(head.values()) for head in self.multiplicities)

    @property
    def duplicates(self) -> int | None:
        """Over all heads, what `total_pairs` counts more than once."""
        return None if self.distinct_pairs is None else self.total_pairs - self.distinct_pairs

    def flops(self, head_dim: int, *, with_backward: bool = False) -> int:
        """Floating-point operations over all heads, as `count_flops` counts them."""
        return (FORWARD + BACKWARD if with_backward else FORWARD) * at_least_one("head_dim", head_dim) * self.total_pairs


def analyse(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, *, is_causal: bool = False, block_size: int = BLOCK_SIZE
) -> Analysis:
    """Everything that integers tell of a pattern at a length: pairs, duplicates, balance, reach, coverage, tiles.

    In closed form: seconds for a thousand million tokens of LongNet's pattern. A part that would have to be counted segment by
    segment, and has too many, is None, and `not_counted` says why. Zero keys of `zero_padding` are not counted.

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N.
        num_heads: Heads H. Under grouped-query attention these are key/value heads.
        is_causal: Whether a query sees only keys at its own position and before.
        block_size: Tokens per side of FlexAttention's tiles.

    Raises:
        ValueError: If a number is below 1, or some branch would have no head.
        TypeError: If an argument has the wrong type.
    """
    num_tokens, num_heads = checked(pattern, num_tokens, num_heads, is_causal=is_causal)
    pairs = count_pairs(pattern, num_tokens, num_heads, is_causal=is_causal)
    not_counted: dict[str, str] = {}
    multiplicities = uncovered = bounds = tiles = None
    try:
        multiplicities = count_multiplicities(pattern, num_tokens, num_heads, is_causal=is_causal)
    except NotImplementedError as error:
        not_counted["multiplicities"] = str(error)
    try:
        uncovered = count_uncovered(pattern, num_tokens, num_heads)
    except NotImplementedError as error:
        not_counted["uncovered"] = str(error)
    try:
        bounds = bound_layers(pattern, num_tokens, num_heads, is_causal=is_causal)
        if bounds is not None and not bounds.is_exact:
            not_counted["layers"] = f"layers are between {bounds.least} and {bounds.most}; too many segments to say more"
    except NotImplementedError as error:
        not_counted["layers"] = str(error)
    try:
        tiles = count_tiles(pattern, num_tokens, num_heads, block_size=block_size, is_causal=is_causal)
    except NotImplementedError as error:
        not_counted["tiles"] = str(error)
    return Analysis(
        pattern=pattern,
        num_tokens=num_tokens,
        num_heads=num_heads,
        is_causal=is_causal,
        pairs=pairs,
        dense_pairs=num_heads * (num_tokens * (num_tokens + 1) // 2 if is_causal else num_tokens**2),
        multiplicities=multiplicities,
        balance=balance(pattern, num_tokens, num_heads, is_causal=is_causal),
        reach=longest_reach(pattern, num_tokens, num_heads),
        missing_residues=missing_residues(pattern, num_heads),
        uncovered=uncovered,
        layers=bounds.least if bounds is not None and bounds.is_exact else None,
        layer_bounds=None if bounds is None or bounds.is_exact else bounds,
        tiles=tiles,
        not_counted=not_counted,
    )
