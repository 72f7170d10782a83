"""What replaces files and folders: at any moment a power failure leaves the old or the new content."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import environment
from flexdilated import DilatedPattern, LongNetConfig, LongNetLM
from flexdilated.core import files
from flexdilated.training import checkpoint

OLD, NEW = 3, 5


class Disk:
    """Follows what a power failure may take: contents, names and renames that were not synced.

    A rename must find the content of its source synced. A removal must find every rename synced.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.synced: dict[Path, object] = {}
        self.unsynced: set[Path] = set()  # folders in which a name was replaced
        self.renamed: list[str] = []
        fsync, replace, rmtree = os.fsync, Path.replace, shutil.rmtree

        def recorded_fsync(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self.synced[path] = held(path)
            self.unsynced.discard(path)

        def recorded_replace(source: Path, target: Path) -> Path:
            for path in (source, *source.rglob("*")):
                assert self.synced.get(path) == held(path), f"{path} may be lost after the rename"
            self.renamed.append(target.name)
            self.unsynced.add(target.parent)
            return replace(source, target)

        def recorded_rmtree(path: Path) -> None:
            assert not self.unsynced, f"{path} is removed before its successor is on the disk"
            rmtree(path)

        patch.setattr(os, "fsync", recorded_fsync)
        patch.setattr(Path, "replace", recorded_replace)
        patch.setattr(shutil, "rmtree", recorded_rmtree)


def held(path: Path) -> object:
    return sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()


def write_file(folder: Path, value: int) -> None:
    with files.replaced(folder / "file") as file:
        file.write(b"%d" % value)


def write_report(folder: Path, value: int) -> None:
    environment.save({"value": value}, folder / "report.json")
    assert json.loads((folder / "report.json").read_text()) == {"value": value}


def write_checkpoint(folder: Path, value: int) -> None:
    checkpoint.save(folder, value, {"value": value}, {"x": torch.full((7,), value)})
    assert [path.name for path in folder.iterdir()] == [f"checkpoint-{value}"]
    state, tensors = checkpoint.read(folder / f"checkpoint-{value}")
    assert state == {"value": value}
    assert tensors["x"].tolist() == [value] * 7


def write_model(folder: Path, value: int) -> None:
    pattern = DilatedPattern((4,), (1,))
    LongNetLM(LongNetConfig(vocab_size=value, embed_dim=4, num_layers=1, num_heads=2, pattern=pattern)).save_pretrained(folder)
    assert LongNetLM.from_pretrained(folder).config.vocab_size == value


def write_slides(folder: Path, value: int) -> None:
    h5py = pytest.importorskip("h5py")
    from flexdilated.slides import store
    from flexdilated.slides.encode import EncodedSlide
    from flexdilated.slides.source import Source

    source = Source("a.h5", 2, 3, "digest")
    slide = EncodedSlide("a", Path("a.h5"), torch.full((7,), float(value)), torch.zeros(1, 2, dtype=torch.int64), source)
    store.write_slide(folder, slide, {}, {})
    store.collect(folder, ["a"], folder / "all.h5")
    with h5py.File(folder / "all.h5") as file:
        assert file["embeddings"][0].tolist() == [value] * 7


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (write_file, ["file"]),
        (write_report, ["report.json"]),
        (write_checkpoint, ["checkpoint-{}"]),
        (write_model, ["model.safetensors", "config.json"]),
        (write_slides, ["a.h5", "all.h5"]),
    ],
)
def test_a_power_failure_leaves_the_old_or_the_new_content(
    write: Callable[[Path, int], None], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    for value in (OLD, NEW):
        write(tmp_path, value)
        assert not disk.unsynced
    assert disk.renamed == [name.format(value) for value in (OLD, NEW) for name in names]


def test_a_file_that_a_killed_process_left_fails_no_later_one(tmp_path: Path) -> None:
    program = f"""
import os, pathlib
from flexdilated.core import files
os.getpid = lambda: 1
with files.replaced(pathlib.Path({str(tmp_path / "file")!r})) as file:
    file.write(b"{OLD}")
    file.flush()
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=100, check=False).returncode == 9
    (left,) = tmp_path.iterdir()
    with mock.patch.object(os, "getpid", return_value=1):
        write_file(tmp_path, NEW)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": str(NEW), left.name: str(OLD)}


@pytest.mark.parametrize("fails", [False, True])
def test_two_containers_with_equal_process_ids_write_one_file(fails: bool, tmp_path: Path) -> None:
    """The later one ends first, with or without an error."""
    with mock.patch.object(os, "getpid", return_value=1), files.replaced(tmp_path / "file") as file:
        file.write(b"%d" % NEW)
        with suppress(ZeroDivisionError), files.replaced(tmp_path / "file") as other:
            other.write(b"%d" % (OLD // (not fails)))
        assert (tmp_path / "file").exists() != fails
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": str(NEW)}


def test_a_file_that_cannot_be_synced_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path, OLD)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"Invalid argument: '.*/file'"):
        write_file(tmp_path, NEW)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"3"}


@pytest.mark.parametrize(("number", "is_raised"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_may_be_on_a_file_system_that_cannot_sync_folders(
    number: int, is_raised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, "of fsync")

    monkeypatch.setattr(os, "fsync", fail)
    if is_raised:
        with pytest.raises(OSError, match="of fsync"):
            files.sync(tmp_path)
    else:
        files.sync(tmp_path)
