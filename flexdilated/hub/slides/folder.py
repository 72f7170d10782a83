"""Which files of a folder are slides."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from flexdilated.hub.slides.formats import COORDINATES, EMBEDDINGS, INDEX, STORE_SUFFIX, SUFFIXES

# Folders in which CLAM, Mussel and TRIDENT keep one slide in two formats, or as two encoders embedded it.
COPIES = re.compile(r"(h5|pt)(_files)?|features_.*")


def list_slides(
    folder: Path, *, coords_folder: Path | None = None, without_embeddings: list[Path] | None = None
) -> dict[str, Path]:
    """The slides in a folder and those below it, by name: the path without its ending, in the order of names.

    Links are followed; one that leads nowhere counts as a slide, which cannot be read. What tools write beside embeddings is left
    out: hidden files, the folder of coordinates, slide2vec's and slideflow's tables of them, embeddings that `encode-slide` put
    beside the tiles, and .h5 files of patches that hold coordinates alone.

    Args:
        folder: Where the slides are.
        coords_folder: A folder below it that holds coordinates.
        without_embeddings: Receives the .h5 files of patches that were left out.

    Raises:
        ValueError: If two files are of one slide, a name is no UTF-8 or leads back to a folder above, or there is none.
    """
    found: dict[str, Path] = {}
    slides: dict[str, Path] = {}  # by the name without folders that tell copies of one slide apart
    for path in sorted(_files(folder, (), None if coords_folder is None else coords_folder.resolve())):
        relative = path.relative_to(folder).with_suffix("")
        name = relative.as_posix()
        if _is_patches(path):
            if without_embeddings is not None:
                without_embeddings.append(path)
            continue
        slide = "/".join(part for i, part in enumerate(relative.parts, 1) if i == len(relative.parts) or not COPIES.fullmatch(part))
        if slide in slides:
            raise ValueError(
                f"FOLDER must hold one file of each slide, got '{slides[slide]}' and '{path}'; give the folder of one of them"
            )
        slides[slide] = path
        if any("\ud800" <= letter <= "\udfff" for letter in str(path.absolute())):  # as Python reads other bytes
            raise ValueError(f"FOLDER must hold slides whose names are UTF-8, got {os.fsencode(path.absolute())!r}")
        found[name] = path
    if not found:
        raise ValueError(f"FOLDER must hold slides, which end in {', '.join((*SUFFIXES, STORE_SUFFIX))}, got none in '{folder}'")
    return dict(sorted(found.items()))


def _files(folder: Path, above: tuple[Path, ...], left_out: Path | None) -> Iterator[Path]:
    above = (*above, folder.resolve())
    try:
        inside = list(folder.iterdir())
    except OSError as error:
        raise ValueError(f"FOLDER must hold folders that can be read, got '{folder}': {error.strerror}") from None
    for path in inside:
        suffix = path.suffix.lower()
        if path.name.startswith(".") or path.name.endswith((".parts", ".coordinates.npz", INDEX, ".slide.pt", ".slide.npz")):
            continue
        if suffix == STORE_SUFFIX or (suffix in SUFFIXES and not path.is_dir()):
            yield path
        elif path.is_dir():
            if (target := path.resolve()) in above:
                raise ValueError(f"FOLDER must hold no link to a folder above it, got '{path}'")
            if target != left_out:
                yield from _files(path, above, left_out)


def _is_patches(path: Path) -> bool:
    """Whether it is TRIDENT's or CLAM's file of patches, named or placed as such, which holds coordinates and no embeddings."""
    if path.suffix.lower() != ".h5" or not (path.parent.name == "patches" or path.stem.endswith("_patches")):
        return False
    try:
        import h5py  # an extra

        with h5py.File(path, "r") as file:
            return COORDINATES in file and not any(key in file for key in EMBEDDINGS)
    except (ImportError, OSError, RuntimeError):  # `read_tiles` says what is wrong with it
        return False
