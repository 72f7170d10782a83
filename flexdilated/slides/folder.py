"""Which files of a folder are slides."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from flexdilated.slides.formats import INDEX, STORE_SUFFIX, SUFFIXES

# Folders in which CLAM, Mussel and TRIDENT keep one slide in two formats, or as two encoders embedded it.
COPIES = re.compile(r"(h5|pt)(_files)?|features_.*")
NO_SLIDES = (".parts", ".coordinates.npz", INDEX, ".slide.pt", ".slide.npz")


def list_slides(
    folder: Path, *, coords_folder: Path | None = None, without_embeddings: list[Path] | None = None
) -> dict[str, Path]:
    """The slides in a folder and those below it, by name: the path without its ending, in the order of names.

    Links are followed; one that leads nowhere counts as a slide, which cannot be read. What tools write beside embeddings is left
    out: hidden files, the folder of coordinates, slide2vec's and slideflow's tables of them, embeddings that `slides encode` put
    beside the tiles, and CLAM's and TRIDENT's files of coordinates: .h5 files in `patches`, or whose names end in `_patches`.

    Args:
        folder: Where the slides are.
        coords_folder: A folder below it that holds coordinates.
        without_embeddings: Receives the .h5 files of patches that were left out.

    Raises:
        ValueError: If two files are of one slide, a folder cannot be read or links to one above it, or there is no slide.
    """
    slides: dict[str, Path] = {}
    originals: dict[str, Path] = {}  # by the name without folders, which distinguish copies of one slide
    for path in sorted(_files(folder, coords_folder)):
        if path.suffix.lower() == ".h5" and (path.parent.name == "patches" or path.stem.endswith("_patches")):
            if without_embeddings is not None:
                without_embeddings.append(path)
            continue
        relative = path.relative_to(folder).with_suffix("")
        slide = "/".join((*(part for part in relative.parts[:-1] if not COPIES.fullmatch(part)), relative.name))
        if slide in originals:
            raise ValueError(
                f"FOLDER must hold one file of each slide, got '{originals[slide]}' and '{path}'; give the folder of one of them"
            )
        originals[slide] = slides[relative.as_posix()] = path
    if not slides:
        raise ValueError(f"FOLDER must hold slides, which end in {', '.join((*SUFFIXES, STORE_SUFFIX))}, got none in '{folder}'")
    return dict(sorted(slides.items()))


def _files(folder: Path, coords_folder: Path | None) -> Iterator[Path]:
    def fail(error: OSError) -> NoReturn:
        raise ValueError(f"FOLDER must hold folders that can be read, got '{error.filename}': {error.strerror}")

    for directory, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        stores = [name for name in folders if name.lower().endswith(STORE_SUFFIX)]
        yield from (
            Path(directory, name)
            for name in (*stores, *files)
            if not name.startswith(".") and not name.endswith(NO_SLIDES) and Path(name).suffix.lower() in (*SUFFIXES, STORE_SUFFIX)
        )
        inner = [name for name in folders if name not in stores and not name.startswith(".") and not name.endswith(NO_SLIDES)]
        ancestors = {parent.resolve() for parent in (Path(directory), *Path(directory).parents)}
        for name in inner:
            if Path(directory, name).resolve() in ancestors:
                raise ValueError(f"FOLDER must hold no link to a folder above it, got '{Path(directory, name)}'")
        folders[:] = [name for name in inner if coords_folder is None or Path(directory, name).resolve() != coords_folder.resolve()]
