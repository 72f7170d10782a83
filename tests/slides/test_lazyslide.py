"""Stores that LazySlide's own library wrote."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexdilated.slides import SlideError, grid_cells, read_tiles

wsidata = pytest.importorskip("wsidata", reason="needs wsidata, which nox -s tests_slides installs")
pytestmark = pytest.mark.filterwarnings("ignore")  # of its libraries

N, MPP = 53, 0.2526  # a scanner's 40, whose tiles at half a micrometre are 506.7 pixels wide


def write(path: Path) -> tuple[Any, np.ndarray, dict[str, np.ndarray]]:
    from wsidata.io import add_features, add_tiles
    from wsidata.reader.base import SlideProperties

    class Reader:
        file, name = "a.svs", "a slide that is not there"
        properties = SlideProperties(
            shape=[29_000, 31_000], n_level=1, level_shape=[[29_000, 31_000]], level_downsample=[1.0], mpp=MPP, magnification=40.0
        )

    store = wsidata.WSIData(reader=Reader(), slide_properties_source="slide")
    spec = wsidata.TileSpec.from_wsidata(store, tile_px=256, mpp=0.5)
    generator = np.random.default_rng(0)
    cells = generator.permutation(29 * 29)[:N]
    corners = np.stack([cells % 29, cells // 29], axis=-1) * spec.base_width + np.array([37, 411])
    add_tiles(store, "tiles", corners, spec, np.zeros(N, int))
    add_tiles(store, "few", corners[:7], spec, np.zeros(7, int))
    tables = {"gigapath_tiles": generator.standard_normal((N, 7)), "gigapath_few": generator.standard_normal((7, 7))}
    for name, features in tables.items():
        add_features(store, name, name.removeprefix("gigapath_"), features.astype(np.float32))
    store.write(path)
    return spec, corners, tables


def test_a_store_of_wsidata_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    spec, corners, tables = write(path)
    for name, features in tables.items():
        found = read_tiles(path, table=name)
        assert torch.equal(found.x, torch.from_numpy(features.astype(np.float32)))
        assert np.array_equal(found.coords.numpy(), corners[: len(features)])
        assert found.tile_size_level0 == spec.base_width
        assert found.magnification == 20.0
        assert found.slide_size == (31_000, 29_000)
        assert found.tile_ids is not None
        assert found.tile_ids.tolist() == list(range(len(features)))
        assert len(grid_cells(found, magnification=20.0).unique(dim=0)) == len(features)
    with pytest.raises(SlideError, match="it has the tables of tiles gigapath_few, gigapath_tiles; name one by --table, got None"):
        read_tiles(path)
