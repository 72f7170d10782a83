"""Attention maps: which keys chosen queries attend to, all branches mixed, and their picture over tile coordinates."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import SupportsIndex

import torch
from torch import Tensor

from flexdilated.attention import _check, _check_dtypes
from flexdilated.hardware import without_autocast
from flexdilated.pattern import DilatedPattern, num_kept
from flexdilated.transforms import is_transformed

__all__ = ["attention_map", "draw_attention_map"]

PICTURE_FORMATS = (".png", ".pdf", ".svg")
MAX_PANELS = 64
UNSEEN = "#d9d9d9"  # a weight of exactly 0: no branch joins the tile with the query
INK = "#222222"


@torch.no_grad()
def attention_map(
    q: Tensor,
    k: Tensor,
    pattern: DilatedPattern,
    *,
    queries: SupportsIndex | Sequence[SupportsIndex] | Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """The exact weights with which chosen queries of `dilated_attention` read every key, all branches mixed.

    `weights[b, h, i, p]` is the factor of `v[b, p]` in `out[b, queries[i], h]`: `exp(score - lse)`, added up over the branches that
    join the pair, so `weights @ v == out`. A row sums to 1, less what zero keys take (`DilatedPattern.zero_padding`); the row of a
    query that no key reaches is 0. Memory and time grow with N times the number of queries, never with N squared. No gradient.
    Source: LongNet, arXiv 2307.02486, equations 9-10.

    Args:
        q: Queries of the whole sequence, `(B, N, H, D)`, float64, float32, bfloat16 or float16, as given to `dilated_attention`.
        k: Keys, `(B, N, Hkv, D)`, `H % Hkv == 0`.
        pattern: Which positions attend to which.
        queries: Positions in `[0, N)`: an integer (0 for a leading CLS token), a sequence, or a 1-D integer tensor; any order.
        is_causal: Whether a query sees only keys at its own position and before.
        scale: Multiplies `q @ k^T`. Default: `D ** -0.5`.
        key_padding_mask: `(B, N)` bool, True where a key is ignored.

    Returns:
        `(B, H, Q, N)`, Q positions in the order of `queries` (1 for an integer), float32, or float64 for float64 inputs.

    Raises:
        ValueError: If a shape is wrong, a position is outside the sequence, or k has fewer heads than the pattern groups.
        TypeError: If an argument has the wrong type or dtype.
        NotImplementedError: If it is called under torch.func or forward-mode differentiation.
    """
    if is_transformed(q, k):
        raise NotImplementedError(
            "attention_map must be called outside torch.func and forward-mode differentiation, got a call under one: its weights "
            "have no derivative"
        )
    _check(q, k, k, pattern, is_causal, scale, 0.0, key_padding_mask, None)
    _check_dtypes(q, k, k)
    pattern.check_heads(k.shape[2])
    num_tokens, kv_heads = q.shape[1], k.shape[2]
    positions = _positions(queries, num_tokens)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q = q.unflatten(2, (kv_heads, -1))  # (B, N, Hkv, group, D)

    mixed = torch.full((*q.shape[:1], *q.shape[2:4], len(positions), num_tokens), -math.inf, dtype=dtype, device=q.device)
    zero_keys = torch.zeros(kv_heads, len(positions), dtype=dtype)
    # Autocast would compute the scores in half precision.
    with without_autocast(q.device):
        for branch, (length, rate) in enumerate(pattern.branches):
            length = min(length, num_tokens)
            # Where the rate does not divide the segment, torchscale pads each one and reads its rows back as positions.
            padded = length + -length % rate if pattern.zero_padding else length
            for offset, start, step, count in pattern.head_runs(branch, kv_heads):
                heads = slice(start, start + step * (count - 1) + 1, step)
                for i, position in enumerate(positions):
                    segment, row = divmod(position, padded)
                    if row % rate != offset:
                        continue
                    first = segment * length
                    size = min(length, num_tokens - first)
                    # A row behind the segment's tokens is a query of zeros.
                    query = q[:, first + row, heads].to(dtype) * scale if row < size else q.new_zeros((), dtype=dtype)
                    seen = min(size, row + 1) if is_causal else size
                    keys = slice(first + offset, first + seen, rate)
                    query = query.expand(q.shape[0], count, *q.shape[3:])
                    scores = torch.einsum("bhgd,bnhd->bhgn", query, k[:, keys, heads].to(dtype))
                    if key_padding_mask is not None:
                        scores = scores.masked_fill(key_padding_mask[:, None, None, keys], -math.inf)
                    pairs = mixed[:, heads, :, i, keys]
                    pairs.copy_(torch.logaddexp(pairs, scores))
                    if pattern.zero_padding:
                        reach = row + 1 if is_causal else padded
                        zero_keys[heads, i] += num_kept(reach, rate, offset) - num_kept(seen, rate, offset)

    lse = torch.logaddexp(torch.logsumexp(mixed, dim=-1), zero_keys.to(q.device).log()[None, :, None])  # (B, Hkv, group, Q)
    # Rows without any key have scores and lse of -inf: their difference would be NaN.
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    return mixed.sub_(lse[..., None]).exp_().flatten(1, 2)


def draw_attention_map(
    weights: Tensor,
    coords: Tensor,
    path: str | Path,
    *,
    tile_size: float | None = None,
    titles: Sequence[str] | None = None,
    log_scale: bool = False,
) -> None:
    """Draw attention weights as coloured tiles at their places on a slide, with one colour bar, and write the picture.

    Dark to light is small to large in cividis, which colour-blind readers see alike; a weight of exactly 0 is grey. The y axis
    points down, as on a slide.

    Args:
        weights: `(N,)`, or `(P, N)` for P panels (say, heads) on one scale: one non-negative number per tile. Of the weights of
            `attention_map`, leave out the columns of tokens that are no tiles (`weights[0, :, 0, 1:]` behind a CLS token).
        coords: `(N, 2)`: x and y of the tiles' upper left corners, in any unit.
        path: Where to write: .png, .pdf or .svg.
        tile_size: Side of a tile in the unit of `coords`. Default: the median distance between neighbours in a row or column.
        titles: One text per panel.
        log_scale: Whether colours follow the logarithm of the weights.

    Raises:
        ValueError: If shapes do not match, a weight is negative or not finite, all weights are 0 under `log_scale`, or the file
            name has another ending.
        TypeError: If an argument has the wrong type.
    """
    panels, places = _check_drawing(weights, coords)
    path = Path(path)
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise ValueError(f"path must end in one of {PICTURE_FORMATS}, got {str(path)!r}")
    if titles is not None and (isinstance(titles, str) or len(titles) != len(panels)):
        raise ValueError(f"titles must hold one text per panel={len(panels)}, got {titles!r}")
    if tile_size is not None and not (math.isfinite(tile_size) and tile_size > 0.0):
        raise ValueError(f"tile_size must be above 0 and finite, got {tile_size}")
    largest = panels.max().item()
    if log_scale and largest == 0.0:
        raise ValueError("weights must not all be 0 under log_scale, got only zeros")
    side = _tile_side(places) if tile_size is None else float(tile_size)

    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if log_scale:
        smallest = panels[panels > 0].min().item()
        norm: Normalize = LogNorm(smallest, largest if largest > smallest else smallest * 10)
    else:
        norm = Normalize(0.0, largest if largest > 0.0 else 1.0)
    colors = colormaps["cividis"]

    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    low, high = places.min(dim=0).values, places.max(dim=0).values + side
    width, height = (high - low).tolist()
    shape = min(max(height / width, 0.25), 4.0)  # a strip of tiles still leaves room for its title
    inches = max(1.6, 5.0 / columns) / max(1.0, shape)
    figure = Figure(figsize=(columns * inches + 1.6, rows * (inches * shape + 0.35) + 0.7), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    corners = torch.tensor([[0.0, 0.0], [side, 0.0], [side, side], [0.0, side]], dtype=torch.float64)
    squares = list((places[:, None] + corners).numpy())  # N of (4, 2)
    has_unseen = bool((panels == 0).any())
    for i, axis in enumerate(axes):
        axis.set_axis_off()
        if i >= len(panels):
            continue
        values = panels[i].numpy()
        faces = colors(norm(values))
        faces[values == 0.0] = _rgba(UNSEEN)
        # Edges in the colour of the faces close the hairlines that antialiasing leaves between neighbours.
        axis.add_collection(PolyCollection(squares, facecolors=faces, edgecolors=faces, linewidths=0.2))
        axis.set_xlim(low[0].item(), high[0].item())
        axis.set_ylim(high[1].item(), low[1].item())
        axis.set_aspect("equal")
        if titles is not None:
            axis.set_title(titles[i], fontsize=8, color=INK)
    bar = figure.colorbar(ScalarMappable(norm, colors), ax=list(axes), shrink=0.8)
    bar.set_label("attention weight" + (", logarithmic" if log_scale else ""), color=INK)
    bar.ax.tick_params(labelsize=7, colors=INK)
    if has_unseen:
        figure.legend(
            handles=[Patch(facecolor=UNSEEN, edgecolor=INK, linewidth=0.5, label="weight 0")],
            loc="outside lower center",
            fontsize=7,
            frameon=False,
        )
    figure.savefig(path)


def _positions(queries: SupportsIndex | Sequence[SupportsIndex] | Tensor, num_tokens: int) -> list[int]:
    if isinstance(queries, Tensor):
        if queries.dtype == torch.bool or queries.is_floating_point() or queries.is_complex():
            raise TypeError(f"queries must hold integers, got {queries.dtype}")
        if queries.dim() > 1:
            raise ValueError(f"queries must be one position or a 1-D tensor of them, got shape {tuple(queries.shape)}")
        positions = queries.reshape(-1).tolist()
    else:
        single = hasattr(queries, "__index__")
        if not single and (isinstance(queries, (str, bytes)) or not isinstance(queries, Sequence)):
            raise TypeError(f"queries must be an integer, a sequence or a tensor of integers, got {queries!r}")
        values: Sequence[SupportsIndex] = [queries] if single else queries  # type: ignore[assignment, list-item]
        for value in values:
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"queries must hold integers, got {value!r}")
        positions = [operator.index(value) for value in values]
    if not positions:
        raise ValueError("queries must hold at least one position, got none")
    for i, position in enumerate(positions):
        if not 0 <= position < num_tokens:
            raise ValueError(f"queries[{i}] must be in [0, N={num_tokens}), got {position}")
    return positions


def _check_drawing(weights: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
    """Panels `(P, N)` and places `(N, 2)`, float64 on the CPU."""
    for name, x in (("weights", weights), ("coords", coords)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.is_complex() or x.dtype == torch.bool:
            raise TypeError(f"{name} must hold numbers, got {x.dtype}")
    if coords.dim() != 2 or coords.shape[1] != 2 or coords.shape[0] < 1:
        raise ValueError(f"coords must have shape (N, 2), one row per tile, got {tuple(coords.shape)}")
    if weights.dim() not in (1, 2) or weights.shape[-1] != coords.shape[0]:
        raise ValueError(
            f"weights must have shape (N,) or (P, N) with N=rows of coords={coords.shape[0]}, got {tuple(weights.shape)}; "
            "leave out the columns of tokens that are no tiles"
        )
    panels, places = (x.detach().to("cpu", torch.float64) for x in (weights, coords))
    panels = panels.reshape(-1, coords.shape[0])
    if not 1 <= len(panels) <= MAX_PANELS:
        raise ValueError(f"weights must have from 1 to {MAX_PANELS} panels, got {len(panels)}")
    if not bool((panels.isfinite() & (panels >= 0)).all()):
        raise ValueError("weights must be finite and at least 0, got others")
    if not bool(places.isfinite().all()):
        raise ValueError("coords must be finite, got others")
    return panels, places


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


def _rgba(color: str) -> tuple[float, float, float, float]:
    r, g, b = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return r, g, b, 1.0
