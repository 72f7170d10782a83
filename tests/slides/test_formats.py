"""Every tool's files give the same tiles; what is wrong with a file is said."""

import errno
import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from flexdilated.slides import SlideError, grid_cells, list_slides, read_tiles, store
from flexdilated.slides.formats import files_beside
from tests.slides import tools

TILES = 53
has_zarr = all(importlib.util.find_spec(name) for name in ("zarr", "pyarrow"))
needs_zarr = pytest.mark.skipif(not has_zarr, reason="needs zarr and pyarrow, of the extra 'slides'")
TOOLS = [pytest.param(tool, marks=needs_zarr if tool == "lazyslide" else ()) for tool in tools.WRITERS]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_tool_gives_the_same_tiles(tmp_path: Path, tool: str, dtype: torch.dtype) -> None:
    x, coords = tools.draw_tiles(TILES, origin=(37, 411), dtype=dtype)
    path = tools.WRITERS[tool](tmp_path / "features", "TCGA-1.2", x, coords)
    side = tools.SIDE if tool in tools.NEEDS_SIZE else None
    found = read_tiles(path, coords_folder=tmp_path / "patches" if "clam" in tool else None, tile_size_level0=side)
    places = {tuple(place): row for row, place in enumerate(found.coords.tolist())}
    rows = [places[tuple(place)] for place in coords.tolist()]
    assert torch.equal(found.x[rows], x)
    assert found.coords.dtype == torch.int64
    assert found.tile_size_level0 == (tools.SIDE if tool in {*tools.SAYS_SIZE, "stamp"} else None)
    assert found.is_level0
    assert found.magnification == (20.0 if tool in tools.SAYS_MAGNIFICATION else None)
    assert list_slides(tmp_path / "features") == {"TCGA-1.2": path}


@pytest.mark.parametrize(
    ("attributes", "side"),
    [
        ({}, 256),
        ({"tile_size_um": None, "tile_size_px": None, "tile_size": tools.SIDE * 0.25}, tools.SIDE / 4),
    ],  # 2.1 and later, 2.0
)
def test_micrometres_of_stamp_have_cells(tmp_path: Path, attributes: dict[str, object], side: float) -> None:
    x, coords = tools.draw_tiles(TILES, origin=(36, 412))
    path = tools.write_stamp(tmp_path, "a", x, coords)
    with h5py.File(path, "r+") as file:
        for name, value in attributes.items():
            file.attrs.pop(name, None)
            if value is not None:
                file.attrs[name] = value
    found = read_tiles(path)
    assert (found.tile_size_level0, found.is_level0) == (side, False)
    assert torch.equal(grid_cells(found), coords // tools.SIDE)


def test_centres_of_slideflow_need_the_side_of_a_tile(tmp_path: Path) -> None:
    path = tools.write_slideflow(tmp_path, "a", *tools.draw_tiles(TILES))
    with pytest.raises(SlideError, match=r"has the centres of its tiles in 'a.index.npz', not their size; give it as"):
        read_tiles(path)
    assert files_beside(path) == [tmp_path / "a.index.npz"]
    (tmp_path / "a.index.npz").write_bytes(b"PK")
    with pytest.raises(SlideError, match=r"must have a whole file of coordinates, got '.*a\.index\.npz'"):
        read_tiles(path, tile_size_level0=tools.SIDE)


@pytest.mark.parametrize("given", [None, tools.SIDE])
def test_custom_downsample_widens_the_patches_of_clam(tmp_path: Path, given: int | None) -> None:
    size = tools.SIDE // 4
    path = tools.write_clam(tmp_path / "h5_files", "a", *tools.draw_tiles(TILES))
    with h5py.File(tmp_path / "patches" / "a.h5", "r+") as file:
        file["coords"].attrs.update({"patch_size": size, "custom_downsample": 2})
    found = read_tiles(path, coords_folder=tmp_path / "patches", tile_size_level0=given)
    assert found.tile_size_level0 == (4 * size if given is None else None)


def test_two_files_of_one_slide_are_refused(tmp_path: Path) -> None:
    x, coords = tools.draw_tiles(3)
    for number, (first, second) in enumerate([("h5_files/a.h5", "pt_files/a.pt"), ("features_b/a.h5", "features_c/a.h5")]):
        folder = tmp_path / str(number)
        for path in (first, second):
            tools.write_plain((folder / path).parent, "a", x, coords, Path(path).suffix)
        with pytest.raises(ValueError, match=rf"one file of each slide, got '.*{first}' and '.*{second}'; give the folder of"):
            list_slides(folder)
        assert list(list_slides((folder / first).parent)) == ["a"]
    for patient in ("p", "q"):  # other slides of one name
        tools.write_plain(tmp_path / "others" / patient / "h5_files", "1", x, coords, ".h5")
    assert list(list_slides(tmp_path / "others")) == ["p/h5_files/1", "q/h5_files/1"]


def test_patches_that_hold_coordinates_alone_are_left_out_and_counted(tmp_path: Path) -> None:
    x, coords = tools.draw_tiles(3)
    path = tools.write_trident(tmp_path / "features_a", "a", x, coords)
    tools.write_clam(tmp_path / "features_a", "b", x, coords)
    patches = [tmp_path / "features_a" / "a_patches.h5", tmp_path / "patches" / "b.h5"]
    patches[0].write_bytes(path.read_bytes())
    with h5py.File(patches[0], "r+") as file:
        del file["features"]
    left_out: list[Path] = []
    assert list(list_slides(tmp_path, without_embeddings=left_out)) == ["features_a/a", "features_a/b"]
    assert left_out == patches


def test_a_folder_gives_its_slides_in_the_order_of_their_names(tmp_path: Path) -> None:
    x, coords = tools.draw_tiles(3)
    paths = [
        tools.write_trident(tmp_path / "b", "x", x, coords),
        tools.write_plain(tmp_path, "c", x, coords),
        tools.write_plain(tmp_path, "a", x, coords, ".npz"),
    ]
    for other in (".hidden.pt", "notes.txt", "c.coordinates.npz", "c.slide.pt", "a.slide.npz"):
        (tmp_path / other).write_text("no slide")
    assert list_slides(tmp_path) == {"a": paths[2], "b/x": paths[0], "c": paths[1]}
    paths.append(tools.write_plain(tmp_path, "a-1", x, coords))
    assert list(list_slides(tmp_path)) == ["a", "a-1", "b/x", "c"]
    tools.write_trident(tmp_path, "c", x, coords)
    with pytest.raises(ValueError, match=r"FOLDER must hold one file of each slide, got '.*c\.h5' and '.*c\.pt'"):
        list_slides(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"FOLDER must hold slides, which end in \.pt, \.h5, \.npz, \.zarr, got none"):
        list_slides(tmp_path / "empty")


def test_links_are_followed_and_one_that_leads_nowhere_is_a_slide_that_cannot_be_read(tmp_path: Path) -> None:
    path = tools.write_trident(tmp_path / "elsewhere", "a", *tools.draw_tiles(3))
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


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools.write_plain(tmp_path, "a", *tools.draw_tiles(3))
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def fail(path: str) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(ValueError, match=r"FOLDER must hold folders that can be read, got '.*closed': Permission denied"):
        list_slides(tmp_path)


def test_coordinates_of_trident_lie_in_files_whose_names_end_in_patches(tmp_path: Path) -> None:
    x, coords = tools.draw_tiles(TILES)
    path = tools.WRITERS["trident"](tmp_path / "features", "a", x, coords)
    patches = tools.write_trident(tmp_path / "patches", "a_patches", x, coords)
    with h5py.File(patches, "r+") as file:
        del file["features"]
    path.unlink()
    path = path.with_suffix(".pt")
    torch.save(x, path)
    found = read_tiles(path, coords_folder=tmp_path / "patches")
    assert torch.equal(found.coords, coords)
    assert (found.tile_size_level0, found.magnification) == (tools.SIDE, 20.0)
    for dtype in (np.float32, np.float16):  # TRIDENT saves arrays
        torch.save(x.numpy().astype(dtype), path)
        assert torch.equal(read_tiles(path, coords_folder=tmp_path / "patches").x, torch.from_numpy(x.numpy().astype(dtype)))
    torch.save({"features": Path("x")}, path)
    with pytest.raises(SlideError, match=r"^is damaged or no whole \.pt file: it holds pathlib\.\S+, where tensors must be"):
        read_tiles(path, coords_folder=tmp_path / "patches")


def test_the_size_of_the_slide_is_read(tmp_path: Path) -> None:
    x, coords = tools.draw_tiles(TILES)
    assert read_tiles(tools.write_trident(tmp_path, "a", x, coords)).slide_size is None  # the height is 'None'
    assert read_tiles(tools.write_trident(tmp_path, "b", x, coords, level0_height=9999)).slide_size == (29 * tools.SIDE, 9999)
    path = tools.WRITERS["clam"](tmp_path / "features", "c", x, coords)
    assert read_tiles(path).slide_size is None
    found = read_tiles(path, coords_folder=tmp_path / "patches").slide_size
    assert found == pytest.approx((29 * tools.SIDE, 29 * tools.SIDE), rel=1e-4)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_files_of_a_slide_are_those_whose_change_changes_it(tmp_path: Path, tool: str) -> None:
    x, coords = tools.draw_tiles(TILES)
    path = tools.WRITERS[tool](tmp_path / "features", "a", x, coords)
    folder = tmp_path / "patches" if "clam" in tool else None
    expected = {
        "clam": ["patches/a.h5"],
        "slide2vec": ["features/a.meta.json", "tiles/a.coordinates.npz"],
        "slideflow": ["features/a.index.npz"],
    }
    assert files_beside(path, folder) == [tmp_path / n for n in expected.get(tool.removesuffix("_pt").removesuffix("_npz"), [])]
    assert files_beside(tmp_path / "none.h5", tmp_path) == []


def test_texts_beside_the_coordinates_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a damaged file HDF5 may look for one for ever, and the other slides would wait."""
    read: list[str] = []
    getitem = h5py.AttributeManager.__getitem__

    def recorded(self: h5py.AttributeManager, name: str) -> object:
        read.append(name)
        return getitem(self, name)

    path = tools.write_trident(tmp_path, "a", *tools.draw_tiles(3), level0_height=9999)
    monkeypatch.setattr(h5py.AttributeManager, "__getitem__", recorded)
    assert read_tiles(path).slide_size == (29 * tools.SIDE, 9999)
    numbers = ["level0_height", "level0_width", "patch_size", "patch_size_level0", "target_magnification"]
    assert sorted(read) == numbers
    read.clear()
    assert read_tiles(tools.write_trident(tmp_path, "b", *tools.draw_tiles(3))).slide_size is None  # the height is the text 'None'
    assert sorted(read) == numbers[1:]


SECRET = 7.0


def lead_elsewhere(file: Any, other: Path, how: str) -> None:
    if how == "link":
        file["features"] = h5py.ExternalLink(str(other), "features")
    elif how == "link through a group":
        file["features"], file["inner"] = h5py.SoftLink("/inner/features"), h5py.ExternalLink(str(other), "/")
    elif how == "link in a group":
        file.create_group("inner")["x"] = h5py.ExternalLink(str(other), "features")
        file["features"] = h5py.SoftLink("/inner/x")
    elif how == "external storage":
        file.create_dataset(
            "features", (3, tools.IN_CHANS), "f4", external=[(str(other.with_suffix(".raw")), 0, h5py.h5f.UNLIMITED)]
        )
    else:
        layout = h5py.VirtualLayout((3, tools.IN_CHANS), "f4")
        layout[:] = h5py.VirtualSource(str(other), "features", (3, tools.IN_CHANS))
        file.create_virtual_dataset("features", layout)


@pytest.mark.parametrize(
    ("how", "got"),
    [
        ("link", "'features' as a link to '.*/secret'"),
        ("link through a group", "'inner' as a link to '.*/secret'"),
        ("link in a group", "'inner/x' as a link to '.*/secret'"),
        ("external storage", "'features' in external storage"),
        ("virtual", "'features' as a virtual dataset"),
    ],
)
def test_arrays_of_other_files_are_refused(tmp_path: Path, how: str, got: str) -> None:
    values = np.full((3, tools.IN_CHANS), SECRET, np.float32)
    with h5py.File(tmp_path / "secret", "w") as file:
        file["features"] = values
    (tmp_path / "secret.raw").write_bytes(values.tobytes())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        lead_elsewhere(file, tmp_path / "secret", how)
        file["coords"] = tools.draw_tiles(3)[1].numpy()
        assert file["features"][0, 0] == SECRET  # HDF5 follows it
    with pytest.raises(SlideError, match=f"^arrays must be stored in 'a.h5' itself, got {got}; copy them into the file$"):
        read_tiles(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file.attrs["format"] = store.FORMAT
    with pytest.raises(store.StoreError, match=r"must hold files that `slides encode-all` wrote, got '.*a\.h5'"):
        store.collect(tmp_path, ["a"], tmp_path / "all.h5")


def damage(path: Path, kept: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])


@pytest.mark.parametrize("tool", [tool for tool in tools.WRITERS if tool != "lazyslide"])
@pytest.mark.parametrize("kept", [0.0, 0.97])
def test_a_file_that_was_cut_is_damaged(tmp_path: Path, tool: str, kept: float) -> None:
    path = tools.WRITERS[tool](tmp_path / "features", "a", *tools.draw_tiles(499))
    damage(path, kept)
    with pytest.raises(SlideError, match=rf"^is damaged or no whole \{path.suffix} file: \S"):
        read_tiles(path, coords_folder=tmp_path / "patches" if "clam" in tool else None)


@needs_zarr
def test_a_store_that_lacks_a_part_is_damaged(tmp_path: Path) -> None:
    path = tools.write_lazyslide(tmp_path, "a", *tools.draw_tiles(TILES))
    (path / "shapes" / "tiles" / "shapes.parquet").write_bytes(b"PAR1")
    with pytest.raises(SlideError, match=r"^is damaged or no whole \.zarr file"):
        read_tiles(path)
    other = tools.write_lazyslide(tmp_path, "b", *tools.draw_tiles(TILES), width=128)
    with pytest.raises(SlideError, match="its tiles are no squares, 128 x 256"):
        read_tiles(other)
    with pytest.raises(SlideError, match="it has the tables of tiles gigapath_tiles; name one by --table, got uni_tiles"):
        read_tiles(other, table="uni_tiles")


@needs_zarr
def test_places_of_a_store_that_are_no_whole_pixels_are_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tools.write_lazyslide(tmp_path, "a", *tools.draw_tiles(TILES))
    shapes = path / "shapes" / "tiles" / "shapes.parquet"
    places = pyarrow.parquet.read_table(shapes)
    for x in ([0.5] * TILES, [None] + [0] * (TILES - 1)):
        pyarrow.parquet.write_table(places.set_column(1, "x", pyarrow.array(x)), shapes)
        with pytest.raises(SlideError, match="coordinates must be whole pixels, got others"):
            read_tiles(path)


def test_what_is_missing_or_wrong_is_said(tmp_path: Path) -> None:
    x, coords = tools.draw_tiles(TILES)

    def refused(message: str, **arrays: object) -> None:
        np.savez(tmp_path / "a.npz", **{"features": x.numpy(), "coords": coords.numpy(), **arrays})
        with pytest.raises(SlideError, match=re.escape(message)):
            read_tiles(tmp_path / "a.npz")

    nan = x.clone()
    nan[11, 3] = torch.nan
    refused("embeddings must be finite, got nan in tile 11", features=nan.numpy())
    unwritten = x.clone()
    unwritten[47:] = 0
    refused("embeddings must not be all 0, got 6 such tiles from tile 47 on, which nobody wrote", features=unwritten.numpy())
    refused("coordinates must be as many as embeddings=53, got 52: one of the two is half written", coords=coords[:-1].numpy())
    refused("has no tiles: embeddings of shape (0, 7)", features=x[:0].numpy(), coords=coords[:0].numpy())
    refused("embeddings must have shape (N, C), got (2, 53, 7): regions", features=x.expand(2, TILES, tools.IN_CHANS).numpy())
    refused("embeddings must be (N, C) and coordinates (N, 2), got (53, 7) and (53, 3)", coords=np.zeros((TILES, 3), np.int64))
    refused("coordinates must be whole pixels, got others", coords=coords.numpy() + 0.5)
    refused("features must be of float64, float32, bfloat16, float16, got int64", features=x.long().numpy())
    refused("must hold one of tile_embeds, features, feats, embeddings, got features, coords, embeddings", embeddings=x.numpy())
    np.savez(tmp_path / "b.npz", features=x.numpy())
    with pytest.raises(SlideError, match="holds no coords; give the folder of files that do, as CLAM's patches, as --coords"):
        read_tiles(tmp_path / "b.npz")
    with pytest.raises(SlideError, match=f"holds no coords, nor has '{tmp_path}/x' a file of that name"):
        read_tiles(tmp_path / "b.npz", coords_folder=tmp_path / "x")


def test_coordinates_of_two_files_must_agree(tmp_path: Path) -> None:
    x, coords = tools.draw_tiles(TILES)
    path = tools.WRITERS["clam"](tmp_path / "features", "a", x, coords)
    with h5py.File(tmp_path / "patches" / "a.h5", "r+") as file:
        file["coords"][3] += 1
    with pytest.raises(SlideError, match=r"must have the coordinates of '.*patches/a\.h5', got others"):
        read_tiles(path, coords_folder=tmp_path / "patches")


def test_slide2vec_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    x, coords = tools.draw_tiles(TILES)
    path = tools.write_slide2vec(tmp_path / "embeddings", "a", x, coords, ".npz")
    np.savez(path, features=x.numpy(), tile_index=np.arange(TILES) + 1)
    with pytest.raises(SlideError, match=r"must hold tiles that 'a\.coordinates\.npz' lists, got tile_index 52"):
        read_tiles(path)
    (tmp_path / "tiles" / "a.coordinates.npz").unlink()
    with pytest.raises(SlideError, match=r"must have its coordinates where 'a\.meta\.json' says, got no file '/elsewhere/tiles/a"):
        read_tiles(path)
    for text in ("{", "[1]", "5"):
        path.with_name("a.meta.json").write_text(text)
        with pytest.raises(SlideError, match=r"must have whole metadata in 'a\.meta\.json'"):
            read_tiles(path)
        assert files_beside(path) == [path.with_name("a.meta.json")]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tile_index": np.arange(TILES + 1)}, "must have a tile_index for each of 53 tiles in 'a.coordinates.npz', got 54"),
        ({"tile_index": np.array(["a"] * TILES)}, "is damaged or no whole .npz file"),
        ({"x": np.arange(TILES) + 0.5}, "coordinates must be whole pixels, got others"),
        ({"x": np.array(["a"] * TILES)}, "x must be of float64, float32, int64"),
    ],
)
def test_wrong_tables_of_slide2vec_are_refused(tmp_path: Path, columns: dict[str, np.ndarray], message: str) -> None:
    path = tools.write_slide2vec(tmp_path / "embeddings", "a", *tools.draw_tiles(TILES), ".npz")
    table = tmp_path / "tiles" / "a.coordinates.npz"
    with np.load(table) as found:
        whole = dict(found)
    np.savez(table, **{**whole, **columns})
    with pytest.raises(SlideError, match=re.escape(message)):
        read_tiles(path)


@pytest.mark.parametrize("said", ["a half", [], -1.0, float("nan")])
def test_what_is_no_number_is_not_said(tmp_path: Path, said: object) -> None:
    path = tools.write_slide2vec(tmp_path / "embeddings", "a", *tools.draw_tiles(TILES))
    meta = path.with_name("a.meta.json")
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "requested_spacing_um": said}))
    assert read_tiles(path).magnification is None
    for side in ("x", "None", "", b"x"):
        path = tools.write_trident(tmp_path, "a", *tools.draw_tiles(3), patch_size_level0=side, downsample="y")
        assert read_tiles(path).tile_size_level0 is None


@pytest.mark.parametrize("side", [512, 512.0, "512", b"512", np.array([512, 512])])
@pytest.mark.parametrize("is_of_file", [False, True])
def test_a_side_is_read_as_a_number_or_text(tmp_path: Path, side: object, is_of_file: bool) -> None:
    path = tools.write_plain(tmp_path, "a", *tools.draw_tiles(3), ".h5", "features")
    with h5py.File(path, "r+") as file:
        (file if is_of_file else file["coords"]).attrs["patch_size_level0"] = side
    assert read_tiles(path).tile_size_level0 == 512


@pytest.mark.parametrize("side", [0, np.nan, "-512", np.array([512, 256])])
def test_a_side_that_no_tile_has_is_refused_unless_another_is_given(tmp_path: Path, side: object) -> None:
    path = tools.write_trident(tmp_path, "a", *tools.draw_tiles(3), patch_size_level0=side)
    message = f"patch_size_level0 must be a number above 0, got {side}; give --tile-size-level0"
    with pytest.raises(SlideError, match=f"^{re.escape(message)}$"):
        read_tiles(path)
    found = read_tiles(path, tile_size_level0=tools.SIDE)
    assert torch.equal(grid_cells(found, tile_size_level0=tools.SIDE), found.coords // tools.SIDE)


STATED_UM, STATED_PX = [[1536, 1536], [512, 1024]], [[384, 384], [128, 256]]  # at 0.25 micrometres a pixel


@pytest.mark.parametrize("unit", ["um", b"um", "px", "pixel", b"pixels", None])
@pytest.mark.parametrize("sizes", [{"tile_size_um": 128.0, "tile_size_px": 256}, {"tile_size": 128.0}, {"tile_size_px": 256}, {}])
def test_coordinates_are_read_in_the_unit_of_the_file(tmp_path: Path, unit: str | bytes | None, sizes: dict[str, object]) -> None:
    stated = np.array(STATED_PX)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["feats"], file["coords"] = torch.randn(2, tools.IN_CHANS).numpy(), stated
        file.attrs.update({**sizes, **({} if unit is None else {"unit": unit})})
    names_micrometres = unit in ("um", b"um") or (unit is None and "tile_size_um" in sizes)
    if unit in ("um", b"um") and not {"tile_size_um", "tile_size"} & set(sizes):
        with pytest.raises(SlideError, match=r"^tile_size_um must be a number above 0 beside the unit um, got none$"):
            read_tiles(tmp_path / "a.h5", tile_size_level0=tools.SIDE)
        return
    found = read_tiles(tmp_path / "a.h5", tile_size_level0=tools.SIDE)
    assert found.coords.tolist() == (STATED_UM if names_micrometres else STATED_PX)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"unit": "mm"}, "unit must be um or px, got 'mm'; write coordinates in pixels of level 0, without a unit"),
        ({"unit": b"\xff"}, "unit must be um or px, got '\\udcff'"),
        ({"tile_size_um": 0}, "tile_size_um must be a number above 0 beside the unit um, got 0"),
    ],
)
def test_an_unknown_unit_is_refused(tmp_path: Path, attributes: dict[str, object], message: str) -> None:
    path = tools.write_stamp(tmp_path, "a", *tools.draw_tiles(3), **attributes)
    with pytest.raises(SlideError, match=f"^{re.escape(message)}"):
        read_tiles(path)


def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tools.write_trident(tmp_path, "a", *tools.draw_tiles(3))
    import_module: Callable[..., object] = __import__

    def fail(name: str, *args: object) -> object:
        if name == "h5py":
            raise ImportError(name, name=name)
        return import_module(name, *args)

    monkeypatch.setattr("builtins.__import__", fail)
    with pytest.raises(SlideError, match=re.escape("needs h5py: pip install 'flexdilated[slides]'")):
        read_tiles(path)
