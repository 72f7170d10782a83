"""Slides written as each tool writes them: the same tiles in every format."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from flexdilated.slides import gigapath
from flexdilated.slides.gigapath import LongNetViT, create_model

IN_CHANS, GRIDS, SIDE = 7, 29, 512  # tiles of 256 pixels at magnification 20 of slides that were scanned at 40


def draw_tiles(
    num_tiles: int, seed: int = 0, origin: tuple[int, int] = (0, 0), dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Embeddings and corners at level 0 of tiles that do not overlap; their grid may begin anywhere."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randperm((GRIDS - 1) ** 2, generator=generator)[:num_tiles].sort().values
    corners = torch.stack([cells % (GRIDS - 1), cells // (GRIDS - 1)], dim=-1) * SIDE + torch.tensor(origin)
    return torch.randn(num_tiles, IN_CHANS, generator=generator).to(dtype), corners


def write_trident(folder: Path, name: str, x: Tensor, coords: Tensor, **attributes: object) -> Path:
    path = folder / f"{name}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        features = file.create_dataset("features", data=x.numpy())
        features.attrs.update({"name": name, "savetodir": str(folder), "encoder": "gigapath"})
        corners = file.create_dataset("coords", data=coords.numpy().astype(np.int64))
        said = {"patch_size": 256, "patch_size_level0": SIDE, "level0_magnification": 40, "target_magnification": 20, "overlap": 0}
        size = {"level0_width": GRIDS * SIDE, "level0_height": "None"}
        corners.attrs.update({**said, **size, "name": name, "savetodir": str(folder), **attributes})
    return path


def write_clam(folder: Path, name: str, x: Tensor, coords: Tensor) -> Path:
    """CLAM's features, which say nothing of their tiles, and `patches` beside the folder, which do."""
    path, patches = folder / f"{name}.h5", folder.parent / "patches" / f"{name}.h5"
    for file_path in (path, patches):
        file_path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(file_path, "w") as file:
            corners = file.create_dataset("coords", data=coords.numpy().astype(np.int32))
            if file_path == path:
                file["features"] = x.numpy()
                continue
            # Patches at level 1, which is about half as wide as level 0; CLAM steps by 2 all the same.
            level = {"patch_size": 256, "patch_level": 1, "downsample": (2.00003, 2.00001), "level_dim": (GRIDS * 256, GRIDS * 256)}
            corners.attrs.update({**level, "downsampled_level_dim": (GRIDS * 256, GRIDS * 256), "name": name, "save_path": "x"})
    return path


def write_clam_pt(folder: Path, name: str, x: Tensor, coords: Tensor) -> Path:
    path = write_clam(folder, name, x, coords)
    path.unlink()
    torch.save(x, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def write_slide2vec(folder: Path, name: str, x: Tensor, coords: Tensor, suffix: str = ".pt") -> Path:
    tables = folder.parent / "tiles"
    for place in (folder, tables):
        place.mkdir(parents=True, exist_ok=True)
    index = np.arange(len(x), dtype=np.int32)[::-1] if suffix == ".npz" else np.arange(len(x), dtype=np.int32)
    rows = index.argsort()  # the table lists tiles in an order of its own
    np.savez_compressed(
        tables / f"{name}.coordinates.npz",
        tile_index=np.arange(len(x), dtype=np.int32),
        x=coords[:, 0].numpy()[rows] if suffix == ".npz" else coords[:, 0].numpy(),
        y=coords[:, 1].numpy()[rows] if suffix == ".npz" else coords[:, 1].numpy(),
        tissue_fractions=np.ones(len(x), np.float32),
    )
    path = folder / f"{name}{suffix}"
    if suffix == ".pt":
        torch.save(x, path)
    else:
        np.savez_compressed(path, features=x.numpy(), tile_index=index)
    said = {"coordinates_npz_path": f"/elsewhere/tiles/{name}.coordinates.npz", "tile_size_lv0": SIDE, "requested_spacing_um": 0.5}
    (folder / f"{name}.meta.json").write_text(json.dumps({"feature_dim": x.shape[1], "num_tiles": len(x), **said}))
    return path


def write_plain(folder: Path, name: str, x: Tensor, coords: Tensor, suffix: str = ".pt", key: str = "tile_embeds") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{suffix}"
    if suffix == ".pt":
        torch.save({key: x, "coords": coords.float()}, path)
    elif suffix == ".npz":
        np.savez(path, **{key: x.numpy()[None], "coords": coords.numpy()[None]})
    else:
        with h5py.File(path, "w") as file:
            file[key], file["coords"] = x.numpy(), coords.numpy()
    return path


def write_lazyslide(folder: Path, name: str, x: Tensor, coords: Tensor, **spec: object) -> Path:
    import pyarrow
    import pyarrow.parquet
    import zarr

    path = folder / f"{name}.zarr"
    store = zarr.open_group(str(path), mode="w", zarr_format=3)
    size = {"height": 256, "width": 256, "stride_height": 256, "stride_width": 256, "mpp": 0.5}
    levels = {"ops_level": 0, "ops_downsample": 2.0, "base_level": 0, "base_downsample": SIDE / 256, "tissue_name": "tissues"}
    store.attrs.update(
        {"tile_spec": {"tiles": {**size, **levels, **spec}}, "slide_properties": {"mpp": 0.25, "magnification": 40.0}}
    )
    table = store.create_group("tables").create_group("gigapath_tiles")
    shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))  # a table has an order of its own
    table.create_array("X", data=x[shuffled].numpy())
    table.create_group("obs").create_array("tile_id", data=shuffled.numpy())
    shapes = path / "shapes" / "tiles"
    store.create_group("shapes").create_group("tiles")
    columns = {"tile_id": list(range(len(x))), "x": coords[:, 0].tolist(), "y": coords[:, 1].tolist(), "tissue_id": [0] * len(x)}
    pyarrow.parquet.write_table(pyarrow.table({**columns, "geometry": [b""] * len(x)}), shapes / "shapes.parquet")
    return path


def write_stamp(folder: Path, name: str, x: Tensor, coords: Tensor, **attributes: object) -> Path:
    """As `stamp.preprocessing.extract_` of version 2.1 and later: micrometres, of a slide of 0.25 per pixel."""
    path = folder / f"{name}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["coords"] = (coords.double() * 0.25).numpy().astype(np.float32)
        file["feats"] = x.numpy()
        said = {"stamp_version": "2.4.0", "extractor": "gigapath", "unit": "um", "tile_size_um": SIDE * 0.25, "tile_size_px": 256}
        file.attrs.update({**said, "code_hash": "01234567", **attributes})
    return path


def write_mussel(folder: Path, name: str, x: Tensor, coords: Tensor) -> Path:
    """As `mussel.utils.segment.segment_tissue` and `save_hdf5` of version 1.5: sizes in pixels of level 0, and no downsample."""
    path = folder / f"{name}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["features"] = x.numpy()
        corners = file.create_dataset("coords", data=coords.numpy())
        size = {"patch_size": SIDE, "step_size": SIDE, "patch_size_to_resize_to_for_desired_mpp": 256, "ref_patch_size": 512}
        spacing = {"patch_level": 0, "mpp": 0.5, "native_mpp": 0.25, "mpp_is_fallback": False}
        corners.attrs.update({**size, **spacing, "level_dim": (GRIDS * SIDE, GRIDS * SIDE), "name": name, "seg_model": "classic"})
    return path


def write_slideflow(folder: Path, name: str, x: Tensor, coords: Tensor) -> Path:
    """As `slideflow.DatasetFeatures.to_torch`: a tensor, and the centres of tiles in an index."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(x, folder / f"{name}.pt")
    np.savez(folder / f"{name}.index", (coords + SIDE // 2).numpy())
    return folder / f"{name}.pt"


WRITERS: dict[str, Callable[[Path, str, Tensor, Tensor], Path]] = {
    "trident": write_trident,
    "clam": write_clam,
    "clam_pt": write_clam_pt,
    "slide2vec": write_slide2vec,
    "slide2vec_npz": partial(write_slide2vec, suffix=".npz"),
    "lazyslide": write_lazyslide,
    "stamp": write_stamp,
    "mussel": write_mussel,
    "slideflow": write_slideflow,
    "pt": write_plain,
    "npz": partial(write_plain, suffix=".npz", key="embeddings"),
    "h5": partial(write_plain, suffix=".h5", key="features"),
}
NEEDS_SIZE = {"stamp", "slideflow"}  # to give pixels of level 0
# What says how large a tile is at level 0, and at which magnification it was embedded.
SAYS_SIZE = {"trident", "clam", "clam_pt", "slide2vec", "slide2vec_npz", "lazyslide", "mussel"}
SAYS_MAGNIFICATION = {"trident", "slide2vec", "slide2vec_npz", "lazyslide", "stamp", "mussel"}

EMBED, DEPTH = 64, 2
# Segments of 1024, 362, 128, 45 and 16 tokens at 1024 pixels of 256.
SIZES = {"tile_size": 256, "slide_ngrids": GRIDS, "max_wsi_size": 1024}
SIZE_OPTIONS = [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()]


def load(weights: Path, **options: Any) -> LongNetViT:
    model = create_model(None, "tiny", IN_CHANS, **{**SIZES, **options}).eval()
    gigapath.load_weights(model, weights)
    return model
