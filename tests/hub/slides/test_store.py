"""What a run leaves behind, wherever it ends, is taken up by one of the same settings alone; nothing whole is removed."""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path

import h5py
import pytest
import torch

from flexdilated.hub.slides import EncodedSlide, Source, store
from flexdilated.hub.slides.lock import StoreError
from flexdilated.hub.slides.source import is_same, source_of

MINE, THEIRS = {"weights": "mine"}, {"weights": "theirs"}
EMBED = 3


def slide(name: str, value: float) -> EncodedSlide:
    return EncodedSlide(name, Path(name), torch.full((EMBED,), value), torch.zeros(2, 2), Source(f"/{name}", 7, 11, "d", "c"))


def begin(output: Path, settings: dict[str, str], **options: bool) -> dict[str, Source]:
    return store.begin(output, settings, {"version": "1"}, **{"resume": False, "overwrite": False, **options})


def names(output: Path) -> list[str]:
    with h5py.File(output) as file:
        return [name.decode() for name in file["names"][:]]


def test_a_run_is_put_together_in_the_given_order(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    assert begin(output, MINE) == {}
    store.write_part(output, [slide("c", 3.0)])
    store.write_part(output, [slide("a", 1.0), slide("b", 2.0)])
    assert store.finish(output, "abc", []) == 3
    with h5py.File(output) as file:
        assert file["embeddings"][()].tolist() == [[value] * EMBED for value in (1.0, 2.0, 3.0)]
        assert file["coords_digests"][:].tolist() == [b"c"] * 3
    assert begin(output, MINE, resume=True) == {name: Source(f"/{name}", 7, 11, "d", "c") for name in "abc"}
    assert names(output) == ["a", "b", "c"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("calls", range(7))
def test_a_run_that_ends_while_it_tidies_up_leaves_nothing_that_others_take(
    tmp_path: Path, calls: int, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file was the last to be removed, and though the output has been moved away by then."""
    output = tmp_path / "out.h5"
    if overwrite:
        begin(output, THEIRS)
        store.write_part(output, [slide("old", 0.0)])
        store.finish(output, ["old"], [])
    begin(output, MINE, overwrite=overwrite)
    for name in "ab":
        store.write_part(output, [slide(name, 1.0)])
    unlink, done = Path.unlink, []

    def some(path: Path, missing_ok: bool = False) -> None:
        if len(done) == calls and path.exists():
            raise KeyboardInterrupt
        done.append(path)
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "unlink", some)
        store.finish(output, "ab", [])
    written = names(output) if output.exists() else []
    if written == ["a", "b"]:
        output.rename(tmp_path / "elsewhere.h5")
    done: dict[str, Source] = {}
    with suppress(StoreError):
        done = begin(output, THEIRS)
    assert done == {}
    with suppress(StoreError):
        done = begin(output, THEIRS, resume=True)
    assert set(done) <= {"old"}


def test_a_part_that_cannot_be_read_now_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.h5"
    begin(output, MINE)
    store.write_part(output, [slide("a", 1.0)])

    def fail(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(h5py, "File", fail)
        with pytest.raises(PermissionError):
            begin(output, MINE, resume=True)
    assert list(begin(output, MINE, resume=True)) == ["a"]


def test_a_part_of_another_version_is_not_removed(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    begin(output, MINE)
    store.write_part(output, [slide("a", 1.0)])
    (part,) = store.parts_folder(output).glob(store.PART)
    with h5py.File(part, "r+") as file:
        file.attrs["format"] = "flexdilated slides 1"
    with pytest.raises(StoreError, match="as 'flexdilated slides 1', not 'flexdilated slides 2'; use --overwrite or another name"):
        begin(output, MINE, resume=True)
    assert part.exists()


def test_what_says_whose_the_parts_are_must_be_whole(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    begin(output, MINE)
    run = store.parts_folder(output) / store.RUN
    for text in ("", "[1]", json.dumps(MINE)[:-2]):
        run.write_text(text)
        with pytest.raises(StoreError, match=r"--resume must find a whole '.*run\.json', got: .*; use --overwrite or another name"):
            begin(output, MINE, resume=True)
    assert begin(output, MINE, overwrite=True) == {}


def test_a_refused_run_leaves_nothing_beside_the_output(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    begin(output, MINE)
    store.write_part(output, [slide("a", 1.0)])
    store.finish(output, ["a"], [])
    with pytest.raises(StoreError, match="which has weights 'mine', now 'theirs'"):
        begin(output, THEIRS, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out.h5"]


def test_a_slide_is_all_the_files_that_it_is_read_from(tmp_path: Path) -> None:
    for name in ("a", "places", "more"):
        (tmp_path / name).write_text(name)
    file, places, more = (tmp_path / name for name in ("a", "places", "more"))
    alone, one, two = source_of(file), source_of(file, [places]), source_of(file, [places, more])
    assert alone.beside == ""
    assert len({alone.digest, one.digest, two.digest}) == 1
    for source, beside in ((alone, []), (one, [places]), (two, [places, more])):
        assert is_same(source, file, beside)
    assert not is_same(alone, file, [places])
    assert not is_same(two, file, [more, places])
    (tmp_path / "b").mkdir()
    moved = places.rename(tmp_path / "b" / "places")
    assert is_same(one, file, [moved])
    assert not is_same(one, file, [places])
    moved.write_text("paces")
    assert not is_same(one, file, [moved])
