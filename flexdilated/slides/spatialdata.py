"""LazySlide's store of a slide: a folder of Zarr arrays, with the tiles' places in a Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Stored(NamedTuple):
    """Embeddings `(N, C)`, corners `(N, 2)` at level 0 and ids `(N,)` of tiles; side, magnification, the slide's size."""

    x: NDArray[Any]
    coords: NDArray[Any]
    tile_ids: NDArray[np.int64]
    side: float | None
    magnification: float | None
    slide_size: tuple[float, float] | None


def read(path: Path, table: str | None) -> Stored:
    """The tiles of a table, in its order.

    The features of `tiles` lie in the table `NAME_tiles`.

    Raises:
        ImportError: If zarr or pyarrow is not installed.
        ValueError: If the store is none of LazySlide's, or has several tables and none is named.
    """
    import pyarrow.parquet as parquet  # an extra

    group, key, spec, properties = _opened(path, table)
    x = group["X"]
    if not hasattr(x, "shape"):
        raise ValueError(f"the table of {key} is sparse")
    places = parquet.read_table(path / "shapes" / key / "shapes.parquet", columns=["tile_id", "x", "y"])
    place_of = {tile: row for row, tile in enumerate(places["tile_id"].to_pylist())}
    tiles = np.asarray(group["obs/tile_id"][:]).tolist()
    if missing := [tile for tile in tiles if tile not in place_of]:
        raise ValueError(f"the tile {missing[0]} of the table has no place in the shapes {key}")
    corners = np.stack([places["x"].to_numpy(), places["y"].to_numpy()], axis=-1)
    coords = corners[[place_of[tile] for tile in tiles]].reshape(-1, 2)
    side, magnification = _geometry(spec, properties)
    height, width = properties.get("shape") or (None, None)
    slide_size = (float(width), float(height)) if width and height else None
    return Stored(np.asarray(x[:]), coords, np.asarray(tiles, np.int64), side, magnification, slide_size)


def _opened(path: Path, table: str | None) -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    """The table's group, the tiles that it is of, how they were cut, and what is known of the slide."""
    import zarr  # an extra

    store = zarr.open_group(str(path), mode="r")
    specs = dict(store.attrs.get("tile_spec") or {})
    if not specs:
        raise ValueError("it has no tile_spec, as LazySlide's stores have")
    tables = sorted(store["tables"].group_keys()) if "tables" in store else []
    key_of_table = {name: max((key for key in specs if name.endswith(f"_{key}")), key=len, default=None) for name in tables}
    candidates = {name: key for name, key in key_of_table.items() if key is not None}
    if table is None and len(candidates) == 1:
        table = next(iter(candidates))
    if table not in candidates:
        raise ValueError(f"it has the tables of tiles {', '.join(candidates) or 'none'}; name one by --table, got {table}")
    return store[f"tables/{table}"], candidates[table], specs[candidates[table]], dict(store.attrs.get("slide_properties") or {})


def _geometry(spec: dict[str, Any], properties: dict[str, Any]) -> tuple[float | None, float | None]:
    """Side at level 0, and magnification, of tiles that are `base_downsample` times as wide there as where they are embedded."""
    width, height, downsample = (float(spec.get(name) or 0) for name in ("width", "height", "base_downsample"))
    if width != height:
        raise ValueError(f"its tiles are no squares, {width:g} x {height:g}")
    side = float(int(width * downsample)) or None  # as wsidata rounds it
    mpp, magnification = spec.get("mpp"), properties.get("magnification")
    if mpp:
        return side, 10.0 / float(mpp)
    return side, float(magnification) / downsample if magnification and downsample else None
