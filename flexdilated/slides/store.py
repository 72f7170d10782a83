"""One `.h5` file per slide: written beside its final name and renamed; and all of them joined in one file."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flexdilated.core.files import replaced
from flexdilated.slides.encode import EncodedSlide
from flexdilated.slides.formats import stored_elsewhere
from flexdilated.slides.source import Source

FORMAT = "flexdilated slide 1"
SOURCE = ("file", "file_size", "file_time", "file_digest")  # attributes, as `Source` has them
COLUMNS = ("name", "file", "file_digest")  # of the joined file, a text per slide


class StoreError(ValueError):
    """Why a file of embeddings cannot be used, in one line."""


def file_of(output: Path, name: str) -> Path:
    """The file of the slide of this name, in the folder `output`."""
    return output / f"{name}.h5"


def write_slide(output: Path, slide: EncodedSlide, settings: Mapping[str, Any], versions: Mapping[str, Any]) -> None:
    """Write the file of a slide: `embedding`, and with tiles `tiles` `(N, embed_dim)` and `coords` `(N, 2)`.

    Its attributes hold the slide's name and source file, `settings` (weights, pattern, options) and `versions`, in JSON.

    Raises:
        OSError: If it cannot be written. What was there stays.
    """
    import h5py  # an extra

    buffer = io.BytesIO()  # h5py does not end well where the disk is full
    with h5py.File(buffer, "w") as file:
        file.attrs.update({"format": FORMAT, "name": slide.name, "num_tiles": len(slide.coords)})
        file.attrs.update(dict(zip(SOURCE, slide.source)))
        file.attrs.update({"settings": json.dumps(settings), "versions": json.dumps(versions)})
        file["embedding"] = slide.embedding.numpy()
        if slide.tiles is not None:
            file["tiles"], file["coords"] = slide.tiles.numpy(), slide.coords.numpy()
    path = file_of(output, slide.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as target:
        target.write(buffer.getvalue())


def read_source(path: Path, settings: Mapping[str, Any]) -> Source:
    """From which file the embedding in `path` was computed.

    Raises:
        StoreError: If it was computed with other settings, or `slides encode-all` did not write it.
        OSError: If it cannot be read.
    """
    with _opened(path) as file:
        stored_settings, current_settings = json.loads(file.attrs["settings"]), json.loads(json.dumps(settings))
        values = {
            key: (stored_settings.get(key), current_settings.get(key)) for key in sorted({*stored_settings, *current_settings})
        }
        changes = ", ".join(f"{key} {stored!r}, now {current!r}" for key, (stored, current) in values.items() if stored != current)
        if changes:
            raise StoreError(
                f"--output must hold slides of the same settings, got '{path}' of {changes}; use --overwrite or another folder"
            )
        source, size, time, digest = (file.attrs[key] for key in SOURCE)
        return Source(source, int(size), int(time), digest)


def collect(output: Path, names: list[str], path: Path) -> None:
    """Join the files of some slides, at least one, in the file `path`, in their order.

    It holds `embeddings` `(S, ...)`, `num_tiles` `(S,)`, the texts `names`, `files` and `file_digests`, where there are tiles a
    group `tiles/NAME` of `embeddings` and `coords` (a `/` in a name is `%2F`), and the attributes `settings` and `versions` of the
    first slide.

    Raises:
        StoreError: If `slides encode-all` did not write one of them.
        OSError: If a file cannot be read or written. What was there stays.
    """
    import h5py  # an extra

    rows: list[list[str]] = []
    sizes: list[int] = []
    with replaced(path) as partial, h5py.File(partial.name, "w") as joined:
        for i, name in enumerate(names):
            with _opened(file_of(output, name)) as file:
                if i == 0:
                    shape, dtype = file["embedding"].shape, file["embedding"].dtype
                    joined.create_dataset("embeddings", (len(names), *shape), dtype)
                    joined.attrs.update({key: file.attrs[key] for key in ("settings", "versions")})
                joined["embeddings"][i] = file["embedding"][()]
                rows.append([file.attrs[key] for key in COLUMNS])
                sizes.append(int(file.attrs["num_tiles"]))
                if "tiles" in file:
                    group = joined.require_group(f"tiles/{name.replace('%', '%25').replace('/', '%2F')}")
                    file.copy("tiles", group, name="embeddings")
                    file.copy("coords", group)
        joined["num_tiles"] = sizes
        for key, texts in zip(COLUMNS, zip(*rows)):
            joined.create_dataset(f"{key}s", data=list(texts), dtype=h5py.string_dtype())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import h5py  # an extra

    try:
        with h5py.File(path, "r") as file:
            if file.attrs.get("format") == FORMAT and stored_elsewhere(file) is None:
                yield file
                return
    except OSError as error:
        if error.errno is not None:
            raise
    raise StoreError(f"--output must hold files that `slides encode-all` wrote, got '{path}'; use --overwrite or another folder")
