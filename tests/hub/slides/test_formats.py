"""Every tool's files give the same tiles; what is wrong with a file is said."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from flexdilated.hub.slides import SlideError, list_slides, read_tiles
from flexdilated.hub.slides.formats import count_tiles
from tests.hub.slides.tools import (
    IN_CHANS,
    SAYS_MAGNIFICATION,
    SAYS_SIZE,
    SIDE,
    WRITERS,
    draw_tiles,
    write_lazyslide,
    write_plain,
    write_slide2vec,
    write_trident,
)

TILES = 53
has_zarr = all(importlib.util.find_spec(name) for name in ("zarr", "pyarrow"))
needs_zarr = pytest.mark.skipif(not has_zarr, reason="needs zarr and pyarrow, of the extra 'slides'")
TOOLS = [pytest.param(tool, marks=needs_zarr if tool == "lazyslide" else ()) for tool in WRITERS]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_tool_gives_the_same_tiles(tmp_path: Path, tool: str, dtype: torch.dtype) -> None:
    x, coords = draw_tiles(TILES, origin=(37, 411), dtype=dtype)
    path = WRITERS[tool](tmp_path / "features", "TCGA-1.2", x, coords)
    found = read_tiles(path, coords_folder=tmp_path / "patches" if "clam" in tool else None)
    places = {tuple(place): row for row, place in enumerate(found.coords.tolist())}
    rows = [places[tuple(place)] for place in coords.tolist()]
    assert torch.equal(found.x[rows], x)
    assert found.coords.dtype == torch.int64
    assert found.tile_size_level0 == (SIDE if tool in SAYS_SIZE else None)
    assert found.magnification == (20.0 if tool in SAYS_MAGNIFICATION else None)
    assert count_tiles(path) == TILES
    assert list_slides(tmp_path / "features") == {"TCGA-1.2": path}


def test_a_folder_gives_its_slides_in_the_order_of_their_names(tmp_path: Path) -> None:
    x, coords = draw_tiles(3)
    paths = [
        write_trident(tmp_path / "b", "x", x, coords),
        write_plain(tmp_path, "c", x, coords),
        write_plain(tmp_path, "a", x, coords, ".npz"),
    ]
    for other in (".hidden.pt", "notes.txt", "c.coordinates.npz", "c.slide.pt", "a.slide.npz"):
        (tmp_path / other).write_text("no slide")
    assert list_slides(tmp_path) == {"a": paths[2], "b/x": paths[0], "c": paths[1]}
    paths.append(write_plain(tmp_path, "a-1", x, coords))
    assert list(list_slides(tmp_path)) == ["a", "a-1", "b/x", "c"]
    write_trident(tmp_path, "c", x, coords)
    with pytest.raises(ValueError, match=r"FOLDER must hold one file of each slide, got '.*c\.h5' and '.*c\.pt'"):
        list_slides(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"FOLDER must hold slides, which end in \.pt, \.h5, \.npz, \.zarr, got none"):
        list_slides(tmp_path / "empty")


def test_links_are_followed_and_one_that_leads_nowhere_is_a_slide_that_cannot_be_read(tmp_path: Path) -> None:
    path = write_trident(tmp_path / "elsewhere", "a", *draw_tiles(3))
    folder = tmp_path / "slides"
    folder.mkdir()
    (folder / "a b é.h5").symlink_to(path)
    (folder / "more").symlink_to(path.parent)
    (folder / "gone.h5").symlink_to(tmp_path / "nowhere.h5")
    found = list_slides(folder)
    assert list(found) == ["a b é", "gone", "more/a"]
    assert torch.equal(read_tiles(found["a b é"]).x, read_tiles(found["more/a"]).x)
    with pytest.raises(SlideError, match=r"^is damaged or no whole \.h5 file: .*No such file"):
        read_tiles(found["gone"])
    (folder / "more" / "again").symlink_to(folder)
    with pytest.raises(ValueError, match=r"FOLDER must hold no link to a folder above it, got '.*again'"):
        list_slides(folder)


def test_a_name_that_the_output_cannot_hold_is_refused(tmp_path: Path) -> None:
    write_plain(tmp_path, "a", *draw_tiles(3)).rename(tmp_path / "a\udcff.pt")
    with pytest.raises(ValueError, match=re.escape(r"FOLDER must hold slides whose names are UTF-8, got b'")):
        list_slides(tmp_path)


def test_coordinates_of_trident_lie_in_files_whose_names_end_in_patches(tmp_path: Path) -> None:
    x, coords = draw_tiles(TILES)
    path = WRITERS["trident"](tmp_path / "features", "a", x, coords)
    patches = write_trident(tmp_path / "patches", "a_patches", x, coords)
    with h5py.File(patches, "r+") as file:
        del file["features"]
    path.unlink()
    path = path.with_suffix(".pt")
    torch.save(x, path)
    found = read_tiles(path, coords_folder=tmp_path / "patches")
    assert torch.equal(found.coords, coords)
    assert (found.tile_size_level0, found.magnification) == (SIDE, 20.0)
    for dtype in (np.float32, np.float16):  # TRIDENT saves arrays
        torch.save(x.numpy().astype(dtype), path)
        assert torch.equal(read_tiles(path, coords_folder=tmp_path / "patches").x, torch.from_numpy(x.numpy().astype(dtype)))
        assert count_tiles(path) == TILES
    torch.save({"features": Path("x")}, path)
    with pytest.raises(SlideError, match=r"^is damaged or no whole \.pt file: it holds pathlib\.\S+, where tensors must be"):
        read_tiles(path, coords_folder=tmp_path / "patches")


def test_the_size_of_the_slide_is_read(tmp_path: Path) -> None:
    x, coords = draw_tiles(TILES)
    assert read_tiles(write_trident(tmp_path, "a", x, coords)).slide_size is None  # the height is 'None'
    assert read_tiles(write_trident(tmp_path, "b", x, coords, level0_height=9999)).slide_size == (29 * SIDE, 9999)


def damage(path: Path, kept: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])


@pytest.mark.parametrize("tool", [tool for tool in WRITERS if tool != "lazyslide"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.97])
def test_a_file_that_was_cut_is_damaged(tmp_path: Path, tool: str, kept: float) -> None:
    path = WRITERS[tool](tmp_path / "features", "a", *draw_tiles(499))
    damage(path, kept)
    with pytest.raises(SlideError, match=rf"^is damaged or no whole \{path.suffix} file: \S"):
        read_tiles(path, coords_folder=tmp_path / "patches" if "clam" in tool else None)
    assert count_tiles(path) in (0, 499)  # a header may be whole


def test_a_dataset_without_elements_is_no_array(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["features"], file["coords"] = h5py.Empty("f4"), np.zeros((3, 2))
    with pytest.raises(SlideError, match="features must be a dense array, got Empty"):
        read_tiles(tmp_path / "a.h5")
    assert count_tiles(tmp_path / "a.h5") == 0


@needs_zarr
def test_a_store_that_lacks_a_part_is_damaged(tmp_path: Path) -> None:
    path = write_lazyslide(tmp_path, "a", *draw_tiles(TILES))
    (path / "shapes" / "tiles" / "shapes.parquet").write_bytes(b"PAR1")
    with pytest.raises(SlideError, match=r"^is damaged or no whole \.zarr file"):
        read_tiles(path)
    other = write_lazyslide(tmp_path, "b", *draw_tiles(TILES), width=128)
    with pytest.raises(SlideError, match="its tiles are no squares, 128 x 256"):
        read_tiles(other)
    with pytest.raises(SlideError, match="it has the tables of tiles gigapath_tiles; name one by --table, got uni_tiles"):
        read_tiles(other, table="uni_tiles")


def test_what_is_missing_or_wrong_is_said(tmp_path: Path) -> None:
    x, coords = draw_tiles(TILES)

    def refused(message: str, **arrays: object) -> None:
        np.savez(tmp_path / "a.npz", **{"features": x.numpy(), "coords": coords.numpy(), **arrays})
        with pytest.raises(SlideError, match=re.escape(message)):
            read_tiles(tmp_path / "a.npz")

    nan = x.clone()
    nan[11, 3] = torch.nan
    refused("embeddings must be finite, got nan in tile 11", features=nan.numpy())
    nan[11, 3] = -torch.inf
    refused("embeddings must be finite, got -inf in tile 11", features=nan.numpy())
    unwritten = x.clone()
    unwritten[47:] = 0
    refused("embeddings must not be all 0, got 6 such tiles from tile 47 on, which nobody wrote", features=unwritten.numpy())
    refused("coordinates must be as many as embeddings=53, got 52: one of the two is half written", coords=coords[:-1].numpy())
    refused("has no tiles: embeddings of shape (0, 7)", features=x[:0].numpy(), coords=coords[:0].numpy())
    refused("has no tiles: embeddings of shape (0,)", features=x[0, :0].numpy())
    refused("embeddings must have shape (N, C), got (2, 53, 7): regions of tiles", features=x.expand(2, TILES, IN_CHANS).numpy())
    refused("embeddings must be (N, C) and coordinates (N, 2), got (53, 7) and (53, 3)", coords=np.zeros((TILES, 3), np.int64))
    refused("coordinates must be whole pixels, got others", coords=coords.numpy() + 0.5)
    refused("features must be of float64, float32, bfloat16, float16, got int64", features=x.long().numpy())
    refused("must hold one of tile_embeds, features, embeddings, got features, coords, embeddings", embeddings=x.numpy())
    np.savez(tmp_path / "b.npz", features=x.numpy())
    with pytest.raises(SlideError, match="holds no coords; give the folder of files that do, as CLAM's patches, as --coords"):
        read_tiles(tmp_path / "b.npz")
    with pytest.raises(SlideError, match=f"holds no coords, nor has '{tmp_path}/x' a file of that name"):
        read_tiles(tmp_path / "b.npz", coords_folder=tmp_path / "x")


def test_coordinates_of_two_files_must_agree(tmp_path: Path) -> None:
    x, coords = draw_tiles(TILES)
    path = WRITERS["clam"](tmp_path / "features", "a", x, coords)
    with h5py.File(tmp_path / "patches" / "a.h5", "r+") as file:
        file["coords"][3] += 1
    with pytest.raises(SlideError, match=r"must have the coordinates of '.*patches/a\.h5', got others"):
        read_tiles(path, coords_folder=tmp_path / "patches")


def test_slide2vec_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    x, coords = draw_tiles(TILES)
    path = write_slide2vec(tmp_path / "embeddings", "a", x, coords, ".npz")
    np.savez(path, features=x.numpy(), tile_index=np.arange(TILES) + 1)
    with pytest.raises(SlideError, match=r"must hold tiles that 'a\.coordinates\.npz' lists, got tile_index 52"):
        read_tiles(path)
    (tmp_path / "tiles" / "a.coordinates.npz").unlink()
    with pytest.raises(SlideError, match=r"must have its coordinates where 'a\.meta\.json' says, got no file '/elsewhere/tiles/a"):
        read_tiles(path)
    path.with_name("a.meta.json").write_text("{")
    with pytest.raises(SlideError, match=r"must have whole metadata in 'a\.meta\.json'"):
        read_tiles(path)


def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_trident(tmp_path, "a", *draw_tiles(3))
    import_module: Callable[..., object] = __import__

    def fail(name: str, *args: object) -> object:
        if name == "h5py":
            raise ImportError(name, name=name)
        return import_module(name, *args)

    monkeypatch.setattr("builtins.__import__", fail)
    with pytest.raises(SlideError, match=re.escape("needs h5py: pip install 'flexdilated[slides]'")):
        read_tiles(path)
