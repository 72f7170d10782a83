"""The tiles of a slide as tools store them: CLAM, TRIDENT, slide2vec, LazySlide, STAMP, Mussel, slideflow."""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexdilated.core.hardware import dtype_name
from flexdilated.slides import spatialdata

# What embeddings are called: by Prov-GigaPath's pipeline, by CLAM and its descendants, by STAMP, by others.
EMBEDDINGS = ("tile_embeds", "features", "feats", "embeddings")
COORDINATES = "coords"
# Of coordinates in .h5, what is read. Texts other than `TEXTS` are not: HDF5 may loop for ever at the heap of a damaged file.
ATTRIBUTES = (
    *("patch_size", "patch_size_level0", "target_magnification", "level0_width", "level0_height"),  # TRIDENT's
    *("downsample", "level_dim", "patch_level", "custom_downsample"),  # CLAM's
    *("mpp", "native_mpp"),  # Mussel's: micrometres per pixel of a tile, and of level 0
)
FILE_ATTRIBUTES = ("tile_size_um", "tile_size_px", "tile_size", "unit", "patch_size_level0")  # of the file; STAMP's first
TEXTS = ("unit", "patch_size_level0")
MICROMETRES, PIXEL_UNITS = "um", ("px", "pixel", "pixels")  # the unit of STAMP's reader, and units that are written by hand
INDEX = ".index.npz"  # slideflow's file of the centres of tiles
SUFFIXES = (".pt", ".h5", ".npz")
STORE_SUFFIX = ".zarr"

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Half precision does not hold the pixels of a slide: float16 ends at 65504, bfloat16 is exact to 256.
PIXELS = (
    *(torch.float64, torch.float32, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)

# What arrays are pickled by, under the names of numpy 1 and 2.
_rebuilt: Any = np.empty(0).__reduce__()[0]
ARRAYS: list[Any] = [
    *((_rebuilt, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *(np.ndarray, np.dtype, *(type(np.dtype(name)) for name in ("f2", "f4", "f8", "i4", "i8"))),
]

# What torch.load, np.load and h5py raise on files that are damaged, or are something else.
DAMAGED = (
    *(OSError, RuntimeError, ValueError, EOFError, LookupError, AttributeError, TypeError, OverflowError, MemoryError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
)


class SlideError(ValueError):
    """What is wrong with one slide, in one line; the others go on."""


class Tiles(NamedTuple):
    """The tiles of a slide as stored.

    Args:
        x: Embeddings, `(N, C)`.
        coords: Upper left corners in pixels of level 0, `(N, 2)` int64.
        tile_size_level0: Side of a tile in those pixels, where the files say.
        magnification: At which the tiles were embedded, where the files say: 20 is half a micrometre per pixel.
        tile_ids: `(N,)` integers, where the tool gives tiles such.
        slide_size: Width and height of the slide in pixels of level 0, where the files say.
        is_level0: Whether coordinates are in pixels of level 0. False for STAMP's micrometres where the side of a tile at level 0
            was not given: coordinates and `tile_size_level0` are then pixels of the embedded tiles.
    """

    x: Tensor
    coords: Tensor
    tile_size_level0: float | None
    magnification: float | None
    tile_ids: Tensor | None = None
    slide_size: tuple[float, float] | None = None
    is_level0: bool = True


class _FileContent(NamedTuple):
    """What one file holds."""

    arrays: Mapping[str, Any]
    attributes: Mapping[str, Any]  # of the coordinates


def read_tiles(
    path: Path, *, coords_folder: Path | None = None, table: str | None = None, tile_size_level0: float | None = None
) -> Tiles:
    """The tiles of a slide.

    Args:
        path: A .pt, .npz or .h5 file, or a .zarr folder of LazySlide's.
        coords_folder: Where files of the same name hold coordinates: CLAM's `patches`, TRIDENT's, whose names end in `_patches`,
            slide2vec's `tiles`. What the file of the embeddings says as well must agree.
        table: Which table of a .zarr holds the embeddings. Default: the only one.
        tile_size_level0: Side of a tile in pixels of level 0. Needed to read slideflow's centres of tiles, and to convert STAMP's
            micrometres to pixels of level 0.

    Raises:
        SlideError: If a file is damaged, something is missing, or shapes and dtypes are wrong.
    """
    try:
        if path.suffix.lower() == STORE_SUFFIX:
            store = spatialdata.read(path, table)
            x, corners = _tensor("X", store.x, FLOATS), _tensor("coordinates", store.coords, PIXELS)
            tiles = _checked(x, corners, store.side, store.magnification)
            return tiles._replace(tile_ids=torch.from_numpy(store.tile_ids), slide_size=store.slide_size)
        content = _open(path)
        keys = [key for key in EMBEDDINGS if key in content.arrays]
        if len(keys) != 1:
            raise SlideError(f"must hold one of {', '.join(EMBEDDINGS)}, got {', '.join(map(str, content.arrays)) or 'nothing'}")
        x = _tensor(keys[0], content.arrays[keys[0]], FLOATS)
        coords, attributes = _coordinates(path, content, coords_folder, tile_size_level0)
        side, micrometres = _tile_side(attributes, tile_size_level0), _micrometres(attributes)
        if micrometres is not None:
            side = tile_size_level0 or _number(attributes.get("tile_size_px")) or micrometres
            coords = (coords.double() * (side / micrometres)).round()
        tiles = _checked(x, coords, side, _magnification(attributes))
        is_level0 = micrometres is None or tile_size_level0 is not None
        return tiles._replace(slide_size=_slide_size(attributes), is_level0=is_level0)
    except ImportError as error:
        python_hint = " under Python 3.11 or newer" if path.suffix.lower() == STORE_SUFFIX else ""  # as zarr needs it
        raise SlideError(f"needs {error.name}: pip install 'flexdilated[slides]'{python_hint}") from None
    except SlideError:
        raise
    except DAMAGED as error:
        raise SlideError(f"is damaged or no whole {path.suffix.lower()} file: {_first_line(error)}") from None


def files_beside(path: Path, coords_folder: Path | None = None) -> list[Path]:
    """What `read_tiles` takes of a slide beside its own file: coordinates and metadata, those that are there."""
    if path.suffix.lower() == STORE_SUFFIX:
        return []
    meta = _metadata_of(path)
    table = None
    if meta.is_file():
        with suppress(SlideError):
            table = _table_of(meta, _read_metadata(meta), coords_folder)
    index = path.with_name(path.stem + INDEX)
    return [file for file in (_beside(path, coords_folder), meta, table, index) if file is not None and file.is_file()]


def _load(path: Path) -> Any:
    """What torch.save wrote of tensors and, as TRIDENT does, of arrays; nothing else is unpickled."""
    try:
        with torch.serialization.safe_globals(ARRAYS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if match := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):  # torch's advice is to trust the file
            raise TypeError(f"it holds {match[1]}, where tensors must be") from None
        raise


def _open(path: Path) -> _FileContent:
    """A file's arrays and attributes; a bare tensor is embeddings."""
    names = (*EMBEDDINGS, COORDINATES, "tile_index", "x", "y", "arr_0")
    if path.suffix.lower() == ".pt":
        loaded = _load(path)
        if isinstance(loaded, (Tensor, np.ndarray)):
            return _FileContent({"features": loaded}, {})
        if not isinstance(loaded, dict):
            raise TypeError(f"it holds a {type(loaded).__name__} where a dict must be")
        return _FileContent(loaded, {})
    if path.suffix.lower() == ".npz":
        # np.load leaves a file that it opened itself open where it is damaged.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as archive:
            return _FileContent({key: archive[key] if key in names else None for key in archive.files}, {})
    import h5py  # an extra

    with h5py.File(path, "r") as file:
        if (elsewhere := stored_elsewhere(file)) is not None:
            raise SlideError(f"arrays must be stored in '{path.name}' itself, got {elsewhere}; copy them into the file")
        # A group, which is no array, has no shape.
        arrays = {key: file[key][()] if key in names and hasattr(file[key], "shape") else None for key in file}
        attributes = _attributes(file.attrs, FILE_ATTRIBUTES)
        return _FileContent(arrays, attributes | (_attributes(file[COORDINATES].attrs, ATTRIBUTES) if COORDINATES in file else {}))


def stored_elsewhere(file: Any) -> str | None:
    """What an open HDF5 file would read from other files, or None: a file from elsewhere could name any file of this machine."""
    import h5py  # an extra

    def describe_external(name: str, link: object) -> str | None:
        if isinstance(link, h5py.ExternalLink):
            return f"'{name}' as a link to '{link.filename}'"
        item = file[name] if isinstance(link, h5py.HardLink) else None
        if isinstance(item, h5py.Dataset) and (item.is_virtual or item.external):
            return f"'{name}' in external storage" if item.external else f"'{name}' as a virtual dataset"
        return None

    result: str | None = file.visititems_links(describe_external)
    return result


def _attributes(attributes: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {
        name: attributes[name]
        for name in names
        if name in attributes and (name in TEXTS or attributes.get_id(name).dtype != object)
    }


def _coordinates(
    path: Path, content: _FileContent, coords_folder: Path | None, tile_size_level0: float | None
) -> tuple[Tensor, dict[str, Any]]:
    """The coordinates and their attributes."""
    attributes = dict(content.attributes)
    own_coords = _tensor(COORDINATES, content.arrays[COORDINATES], PIXELS) if COORDINATES in content.arrays else None
    meta = _metadata_of(path)
    if own_coords is None and meta.is_file():
        return _of_slide2vec(meta, content, coords_folder)
    if own_coords is None and (index := path.with_name(path.stem + INDEX)).is_file():
        return _of_slideflow(index, tile_size_level0), {}
    beside = _beside(path, coords_folder)
    if beside is None:
        if own_coords is None:
            tried = "" if coords_folder is None else f", nor has '{coords_folder}' a file of that name"
            raise SlideError(f"holds no {COORDINATES}{tried}; give the folder of files that do, as CLAM's patches, as --coords")
        return own_coords, attributes
    content_beside = _open_beside(beside)
    if COORDINATES not in content_beside.arrays:
        raise SlideError(f"must have {COORDINATES} in '{beside}', got {', '.join(map(str, content_beside.arrays)) or 'nothing'}")
    coords = _tensor(COORDINATES, content_beside.arrays[COORDINATES], PIXELS)
    if own_coords is not None and not torch.equal(_squeezed(own_coords).double(), _squeezed(coords).double()):
        raise SlideError(f"must have the coordinates of '{beside}', got others")
    return coords, {**content_beside.attributes, **attributes}


def _open_beside(path: Path) -> _FileContent:
    """A file of coordinates beside that of the embeddings."""
    try:
        return _open(path)
    except DAMAGED as error:
        raise SlideError(f"must have a whole file of coordinates, got '{path}': {_first_line(error)}") from None


def _beside(path: Path, coords_folder: Path | None) -> Path | None:
    """The file of coordinates of a slide's name, or as TRIDENT calls it."""
    if coords_folder is None:
        return None
    names = [f"{path.stem}{of_trident}{suffix}" for of_trident in ("", "_patches") for suffix in SUFFIXES]
    return next((p for name in names if (p := coords_folder / name).is_file()), None)


def _metadata_of(path: Path) -> Path:
    """slide2vec's."""
    return path.with_name(f"{path.stem}.meta.json")


def _read_metadata(meta: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(meta.read_text()))
    except (ValueError, OSError, TypeError) as error:
        raise SlideError(f"must have whole metadata in '{meta.name}': {_first_line(error)}") from None


def _table_of(meta: Path, metadata: Mapping[str, Any], coords_folder: Path | None) -> Path:
    """slide2vec keeps coordinates in files of their own, which the embeddings' metadata name by the paths of the time."""
    table_path = Path(str(metadata.get("coordinates_npz_path") or f"{meta.name.removesuffix('.meta.json')}.coordinates.npz"))
    folders = [coords_folder, table_path.parent, *(meta.parent.parent / name for name in ("tiles", "coordinates")), meta.parent]
    table = next((p for folder in folders if folder is not None and (p := folder / table_path.name).is_file()), None)
    if table is None:
        raise SlideError(
            f"must have its coordinates where '{meta.name}' says, got no file '{table_path}'; give their folder as --coords"
        )
    return table


def _of_slide2vec(meta: Path, content: _FileContent, coords_folder: Path | None) -> tuple[Tensor, dict[str, Any]]:
    metadata = _read_metadata(meta)
    table = _table_of(meta, metadata, coords_folder)
    arrays = _open_beside(table).arrays
    coords = torch.stack([_tensor(axis, arrays.get(axis), PIXELS).reshape(-1).double() for axis in ("x", "y")], dim=-1)
    index = np.asarray(arrays.get("tile_index", np.arange(len(coords)))).reshape(-1)
    if len(index) != len(coords):
        raise SlideError(f"must have a tile_index for each of {len(coords)} tiles in '{table.name}', got {len(index)}")
    if "tile_index" in content.arrays:
        row_of = {int(tile): row for row, tile in enumerate(index)}
        rows = [row_of.get(int(tile)) for tile in np.asarray(content.arrays["tile_index"]).reshape(-1)]
        if None in rows:
            raise SlideError(f"must hold tiles that '{table.name}' lists, got tile_index {rows.index(None)}, which it does not")
        coords = coords[torch.tensor(rows, dtype=torch.int64)]
    spacing = _number(metadata.get("requested_spacing_um"))
    magnification = {} if spacing is None else {"target_magnification": 10.0 / spacing}
    return coords, {"patch_size_level0": metadata.get("tile_size_lv0"), **magnification}


def _of_slideflow(index: Path, tile_size_level0: float | None) -> Tensor:
    """Corners of tiles, of the centres that slideflow keeps: the corner plus half a side, rounded down."""
    centres = _tensor("arr_0", _open_beside(index).arrays.get("arr_0"), PIXELS)
    if tile_size_level0 is None:
        raise SlideError(f"has the centres of its tiles in '{index.name}', not their size; give it as --tile-size-level0")
    return centres - int(tile_size_level0 / 2)


def _values(value: object) -> set[float]:
    """The numbers of an attribute, which may be a text, an array, or TRIDENT's `'None'`."""
    try:
        return set(np.asarray(value, dtype=np.float64).reshape(-1).tolist())
    except (TypeError, ValueError):
        return set()


def _number(value: object) -> float | None:
    """A number above 0 of an attribute."""
    values = _values(value)
    return values.pop() if len(values) == 1 and 0 < min(values) < math.inf else None


def _micrometres(attributes: Mapping[str, Any]) -> float | None:
    """Side of a tile where coordinates are micrometres, as STAMP's are: version 2.0 calls it `tile_size` and names the unit."""
    unit, side = attributes.get("unit"), _number(attributes.get("tile_size_um"))
    if unit is None:
        return side
    text = unit.decode(errors="replace") if isinstance(unit, bytes) else str(unit)
    if text in PIXEL_UNITS:
        return None
    if text != MICROMETRES:
        raise SlideError(f"unit must be {MICROMETRES} or px, got {text!r}; write coordinates in pixels of level 0, without a unit")
    sizes = [attributes[name] for name in ("tile_size_um", "tile_size") if name in attributes]
    side = next((size for size in map(_number, sizes) if size is not None), None)
    if side is None:
        raise SlideError(
            f"tile_size_um must be a number above 0 beside the unit {MICROMETRES}, got {sizes[0] if sizes else 'none'}"
        )
    return side


def _magnification(attributes: Mapping[str, Any]) -> float | None:
    """The magnification of the tiles: TRIDENT's attribute, or from STAMP's or Mussel's micrometres per pixel."""
    spacing = _number(attributes.get("mpp")) if "native_mpp" in attributes else None
    micrometres, pixels = _micrometres(attributes), _number(attributes.get("tile_size_px"))
    if micrometres is not None and pixels is not None:
        spacing = micrometres / pixels
    return _number(attributes.get("target_magnification")) if spacing is None else 10.0 / spacing


def _downsample(attributes: Mapping[str, Any]) -> Any:
    """The downsampling factor of the patches: from CLAM; Mussel only names level 0."""
    at_level0 = np.array_equal(np.asarray(attributes.get("patch_level", -1)), 0)
    return attributes.get("downsample", 1.0 if at_level0 else None)


def _tile_side(attributes: Mapping[str, Any], side_option: float | None) -> float | None:
    """The tile width in pixels of level 0: TRIDENT's, or CLAM's width at its level times the downsampling factor.

    CLAM steps by the whole part of the downsample, which is 4.00003 for one slide and 4 for another. With `custom_downsample` a
    patch is that many times as wide, as TRIDENT reads it; some tools write the wide patch itself, so a side that is given counts.
    """
    attribute = attributes.get("patch_size_level0")
    side = _number(attribute)
    if side is not None:
        return side
    if side_option is None and attribute is not None and _values(attribute):
        raise SlideError(f"patch_size_level0 must be a number above 0, got {attribute}; give --tile-size-level0")
    size, downsample = _number(attributes.get("patch_size")), _downsample(attributes)
    step = _number(np.floor(downsample)) if isinstance(downsample, (np.ndarray, np.number, int, float)) else None
    custom = _number(attributes.get("custom_downsample")) or 1.0
    if size is None or step is None or (custom != 1.0 and side_option is not None):
        return None
    return size * step * custom


def _slide_size(attributes: Mapping[str, Any]) -> tuple[float, float] | None:
    """Width and height at level 0: TRIDENT's, or CLAM's at its level times the downsampling factor."""
    sizes: list[object] = [attributes.get(f"level0_{name}") for name in ("width", "height")]
    with suppress(TypeError, ValueError):
        if sizes == [None, None]:
            level = [np.asarray(value, np.float64) for value in (attributes.get("level_dim"), _downsample(attributes))]
            sizes = np.multiply(*level).tolist() if level[0].shape == (2,) else sizes
    width, height = (_number(size) for size in sizes)
    return None if width is None or height is None else (width, height)


def _tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """A dense tensor of one of the dtypes, of an array or tensor."""
    spelled = ", ".join(dtype_name(dtype) for dtype in dtypes)
    if isinstance(value, np.ndarray):
        try:
            value = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=False))
        except TypeError:
            raise SlideError(f"{name} must be of {spelled}, got {value.dtype}") from None
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        raise SlideError(f"{name} must be a dense array, got {'no array' if value is None else type(value).__name__}")
    if value.dtype not in dtypes:
        raise SlideError(f"{name} must be of {spelled}, got {dtype_name(value.dtype)}")
    return value.detach()


def _squeezed(x: Tensor) -> Tensor:
    return x[0] if x.dim() == 3 and x.shape[0] == 1 else x


def _checked(x: Tensor, coords: Tensor, side: float | None, magnification: float | None) -> Tiles:
    x, coords = _squeezed(x), _squeezed(coords)
    if x.dim() == 3:
        raise SlideError(f"embeddings must have shape (N, C), got {tuple(x.shape)}: regions of tiles, as hierarchical ones are")
    if x.numel() == 0 or coords.numel() == 0:
        raise SlideError(f"has no tiles: embeddings of shape {tuple(x.shape)}, coordinates of shape {tuple(coords.shape)}")
    if x.dim() != 2 or coords.dim() != 2 or coords.shape[1] != 2:
        raise SlideError(f"embeddings must be (N, C) and coordinates (N, 2), got {tuple(x.shape)} and {tuple(coords.shape)}")
    if len(x) != len(coords):
        raise SlideError(f"coordinates must be as many as embeddings={len(x)}, got {len(coords)}: one of the two is half written")
    if not bool(x.isfinite().all()):
        row = int((~x.isfinite()).any(dim=1).nonzero()[0])
        raise SlideError(f"embeddings must be finite, got {x[row][~x[row].isfinite()][0].item()} in tile {row}")
    if bool((unwritten := (x == 0).all(dim=1)).any()):
        rows = unwritten.nonzero()[:, 0].tolist()
        raise SlideError(f"embeddings must not be all 0, got {len(rows)} such tiles from tile {rows[0]} on, which nobody wrote")
    if coords.is_floating_point() and not bool((coords.isfinite() & (coords == coords.floor())).all()):
        raise SlideError("coordinates must be whole pixels, got others")
    return Tiles(x, coords.to(torch.int64), side, magnification)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
