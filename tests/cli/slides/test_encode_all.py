"""Many slides by one command: each has the embedding that it has alone, and a file of its own."""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from flexdilated.slides import encode
from flexdilated.slides.gigapath import LongNetViT, create_model
from tests.commands import invoke
from tests.slides import tools
from tests.tolerances import NAIVE_FACTOR, SINGLE

pytestmark = pytest.mark.usefixtures("tiny")
Slides = dict[str, tuple[Tensor, Tensor]]
COUNTS = {"a": 53, "b/c": 1, "d": 131, "e": 17, "f": 46}


@pytest.fixture
def slides(tmp_path: Path) -> Slides:
    drawn = {name: tools.draw_tiles(count, seed=i, origin=(37 * i, 5)) for i, (name, count) in enumerate(COUNTS.items())}
    for name, (x, coords) in drawn.items():
        tools.write_trident(tmp_path / "slides", name, x, coords)
    return drawn


def arguments(folder: Path, weights: Path | None = None, *more: object) -> list[str]:
    fixed = ["--arch=tiny", f"--in-chans={tools.IN_CHANS}", "--device=cpu", *tools.SIZE_OPTIONS]
    fixed += [f"--output={folder / 'out'}", f"--collect={folder / 'out.h5'}"]
    named = [] if weights is None else [f"--weights={weights}"]
    return ["slides", "encode-all", str(folder / "slides"), *fixed, *named, *map(str, more)]


def run(folder: Path, weights: Path | None = None, *more: object) -> tuple[int, str, str]:
    return invoke(*arguments(folder, weights, *more))


def read(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        found: dict[str, Any] = {key: file[key][()] for key in ("embeddings", "num_tiles")}
        found |= {key: [text.decode() for text in file[key][:]] for key in ("names", "files", "file_digests")}
        found["tiles"] = {name: {key: group[key][()] for key in group} for name, group in file.get("tiles", {}).items()}
        return {**found, **{key: json.loads(file.attrs[key]) for key in ("settings", "versions")}}


@torch.inference_mode()
def alone(model: LongNetViT, slide: tuple[Tensor, Tensor], **options: Any) -> list[Tensor]:
    x, coords = slide
    return model(x[None], coords[None] // tools.SIDE * 256, **options)


@pytest.mark.parametrize(("budget", "pooling"), [(60, "--global-pool"), (10_000, "--cls")])
def test_each_slide_gives_what_it_gives_alone(tmp_path: Path, slides: Slides, weights: Path, budget: int, pooling: str) -> None:
    code, out, err = run(tmp_path, weights, f"--token-budget={budget}", pooling)
    assert (code, err) == (0, "")
    assert f"wrote 5 slides of {sum(COUNTS.values())} tiles to '{tmp_path / 'out'}' in " in out
    assert f"collected 5 slides in '{tmp_path / 'out.h5'}'" in out
    found = read(tmp_path / "out.h5")
    assert found["names"] == list(COUNTS)
    assert found["num_tiles"].tolist() == list(COUNTS.values())
    assert found["files"] == [str(tmp_path / "slides" / f"{name}.h5") for name in COUNTS]
    assert found["tiles"] == {}
    model = tools.load(weights, global_pool=pooling == "--global-pool")
    for embedding, slide in zip(found["embeddings"], slides.values()):
        torch.testing.assert_close(torch.from_numpy(embedding), alone(model, slide)[0][0], **SINGLE)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.h5", "slides", "slide_encoder.pth"}
    files = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert files == [f"{name}.h5" for name in COUNTS]
    with h5py.File(tmp_path / "out" / "b" / "c.h5") as file:
        assert np.array_equal(file["embedding"], found["embeddings"][1])
        assert (file.attrs["name"], file.attrs["num_tiles"]) == ("b/c", 1)


def test_layers_and_tiles_are_those_of_the_model(tmp_path: Path, slides: Slides, weights: Path) -> None:
    assert run(tmp_path, weights, "--layers=all", "--tiles")[0] == 0
    found = read(tmp_path / "out.h5")
    model = tools.load(weights)
    assert found["embeddings"].shape == (5, tools.DEPTH + 1, tools.EMBED)
    for (name, slide), embeddings in zip(slides.items(), found["embeddings"]):
        layers = torch.cat(alone(model, slide, all_layer_embed=True))
        torch.testing.assert_close(torch.from_numpy(embeddings), layers, **SINGLE)
        tiles = found["tiles"][name.replace("/", "%2F")]
        torch.testing.assert_close(
            torch.from_numpy(tiles["embeddings"]), alone(model, slide, return_tokens=True)[0][0, 1:], **SINGLE
        )
        assert np.array_equal(tiles["coords"], slide[1].numpy())


def test_low_precision_stays_near_float32(tmp_path: Path, slides: Slides, weights: Path) -> None:
    assert run(tmp_path, weights, "--store=float16", "--dtype=bfloat16", "--tiles")[0] == 0
    found = read(tmp_path / "out.h5")
    assert {found["embeddings"].dtype, found["tiles"]["a"]["embeddings"].dtype} == {np.dtype("float16")}
    model = tools.load(weights)
    for embedding, slide in zip(found["embeddings"], slides.values()):
        bound = {"atol": NAIVE_FACTOR * 4 * torch.finfo(torch.bfloat16).eps, "rtol": 0.0}
        torch.testing.assert_close(torch.from_numpy(embedding).float(), alone(model, slide)[0][0], **bound)


def test_provenance_says_what_determines_the_numbers(tmp_path: Path, slides: object, weights: Path) -> None:
    assert run(tmp_path, weights)[0] == 0
    found = read(tmp_path / "out.h5")
    settings = found["settings"]
    digest = subprocess.run(["sha256sum", weights], capture_output=True, text=True, check=True).stdout.split()[0]
    assert settings["weights"] == digest
    assert settings["pattern"] == tools.load(weights).pattern.to_dict()
    assert {"arch", "order", "dtype", "store", "layers", "global_pool", "magnification"} <= set(settings)
    assert found["versions"]["torch"] == torch.__version__
    assert {"flexdilated", "python"} <= set(found["versions"])
    assert found["file_digests"] == [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in found["files"]]


def test_bad_slides_are_named_and_the_rest_goes_on(tmp_path: Path, slides: Slides, weights: Path) -> None:
    folder = tmp_path / "slides"
    x, coords = tools.draw_tiles(11)
    nan = x.clone()
    nan[3] = torch.nan
    tools.write_trident(folder, "bad-nan", nan, coords)
    tools.write_trident(folder, "bad-width", x[:, :5], coords)
    tools.write_trident(folder, "bad-level", x, coords // 32)
    tools.write_trident(folder, "bad-magnification", x, coords, target_magnification=40)
    tools.write_trident(folder, "bad-cut", x, coords)
    cut = folder / "bad-cut.h5"
    cut.write_bytes(cut.read_bytes()[:1000])
    code, out, err = run(tmp_path, weights)
    assert code == 1
    reasons = {
        "bad-nan": "embeddings must be finite, got nan in tile 3",
        "bad-width": "must have embeddings of 7 elements as the weights, got 5",
        "bad-level": "would put 11 tiles in",
        "bad-magnification": "says that its tiles were embedded at magnification 40, --magnification is 20",
        "bad-cut": "is damaged or no whole .h5 file: ",
    }
    for name, reason in reasons.items():
        assert f"error: '{folder / name}.h5' {reason}" in err
    assert "wrote 5 slides" in out
    assert ", 5 failed\n" in out
    found = read(tmp_path / "out.h5")
    assert found["names"] == list(COUNTS)
    # Repaired, they join the others, in the order of names.
    tools.write_trident(folder, "bad-nan", x, coords)
    code, _, _ = run(tmp_path, weights)
    assert code == 1
    again = read(tmp_path / "out.h5")
    assert again["names"] == ["a", "b/c", "bad-nan", "d", "e", "f"]
    assert np.array_equal(np.delete(again["embeddings"], 2, axis=0), found["embeddings"])


def test_a_tile_size_that_leaves_cells_empty_is_asked_about(tmp_path: Path, weights: Path) -> None:
    tools.write_plain(tmp_path / "slides", "a", *tools.draw_tiles(300))
    code, _, err = run(tmp_path, weights, "--tile-size-level0=256", "--slide-ngrids=60")
    assert code == 0
    assert "note: " in err
    assert "neighbours are 512 apart: is a tile 256 pixels wide at level 0?" in err


def test_a_slide_that_overflows_leaves_its_pack_alone(tmp_path: Path, slides: Slides, weights: Path) -> None:
    x, coords = tools.draw_tiles(23)
    tools.write_trident(tmp_path / "slides", "c", x.double() * 1e300, coords)
    code, _, err = run(tmp_path, weights)
    assert code == 1
    assert "c.h5' gives embeddings that are not finite, computed in float32; use another dtype" in err
    found = read(tmp_path / "out.h5")
    assert found["names"] == list(COUNTS)
    for embedding, slide in zip(found["embeddings"], slides.values()):
        torch.testing.assert_close(torch.from_numpy(embedding), alone(tools.load(weights), slide)[0][0], **SINGLE)


def test_slides_without_memory_are_named(tmp_path: Path, slides: object, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(LongNetViT, "hidden_states", fail)
    code, _, err = run(tmp_path, weights)
    assert code == 1
    assert "needs more memory than there is for the " in err
    assert "CUDA out of memory.; lower --token-budget" in err


def count_encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    whole = encode.encode_slides

    def counted(model: LongNetViT, slides: dict[str, Path], **options: Any) -> Iterator[object]:
        names.extend(slides)
        return whole(model, slides, **options)

    monkeypatch.setattr(encode, "encode_slides", counted)
    return names


def interrupt(folder: Path, weights: Path, *more: object) -> None:
    whole = encode.encode_slides

    def some(*args: Any, **options: Any) -> Iterator[object]:
        for i, result in enumerate(whole(*args, **options)):
            if i == 2:
                raise KeyboardInterrupt
            yield result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "encode_slides", some)
        code, _, err = run(folder, weights, *more)
    assert code == 130
    assert "slides that have a file are kept: the same command goes on" in err


def test_an_interrupted_run_goes_on(tmp_path: Path, slides: Slides, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "slides").symlink_to(tmp_path / "slides")
    assert run(tmp_path / "whole", weights, "--tiles")[0] == 0
    interrupt(tmp_path, weights, "--tiles")
    assert not (tmp_path / "out.h5").exists()
    names = count_encoded(monkeypatch)
    code, out, err = run(tmp_path, weights, "--tiles")
    assert (code, err, names) == (0, "", ["d", "e", "f"])
    assert re.search(r"wrote 3 slides of \d+ tiles to '.*out' in \d+\.\d s, 2 had files\n", out)
    expected, found = read(tmp_path / "whole" / "out.h5"), read(tmp_path / "out.h5")
    assert found["names"] == expected["names"]
    np.testing.assert_allclose(found["embeddings"], expected["embeddings"], **SINGLE)
    assert set(found["tiles"]) == set(expected["tiles"])
    names.clear()
    assert run(tmp_path, weights, "--tiles", "--overwrite")[0] == 0
    assert names == list(COUNTS)


def test_a_file_of_other_settings_is_an_error(tmp_path: Path, slides: object, weights: Path) -> None:
    assert run(tmp_path, weights)[0] == 0
    before = (tmp_path / "out" / "a.h5").read_bytes()
    code, _, err = run(tmp_path, weights, "--layers=all")
    assert code == 2
    place = f"got '{tmp_path / 'out' / 'a.h5'}' of layers 'last', now 'all'; use --overwrite or another folder"
    assert f"--output must hold slides of the same settings, {place}" in err
    digest = read(tmp_path / "out.h5")["settings"]["weights"]
    torch.save({"model": create_model(None, "tiny", tools.IN_CHANS, **tools.SIZES).state_dict()}, weights)
    code, _, err = run(tmp_path, weights)
    assert code == 2
    assert f"of weights '{digest}', now '{hashlib.sha256(weights.read_bytes()).hexdigest()}'" in err
    assert (tmp_path / "out" / "a.h5").read_bytes() == before
    for name in ("trident", "cut"):  # of another tool, and damaged
        folder = tmp_path / name
        (folder / "slides").mkdir(parents=True)
        tools.write_trident(folder / "slides", "a", *tools.draw_tiles(3))
        tools.write_trident(folder / "out", "a", *tools.draw_tiles(3))
        if name == "cut":
            (folder / "out" / "a.h5").write_bytes(before[:100])
        code, _, err = run(folder, weights)
        assert code == 2
        assert f"--output must hold files that `slides encode-all` wrote, got '{folder / 'out' / 'a.h5'}'" in err


def test_a_slide_is_known_by_what_its_files_hold(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, name in enumerate("ab"):
        tools.WRITERS["clam_pt"](tmp_path / "slides", name, *tools.draw_tiles(53, seed=i))
    assert run(tmp_path, weights, f"--coords={tmp_path / 'patches'}")[0] == 0
    assert len(set(read(tmp_path / "out.h5")["file_digests"])) == 2
    # Copied to another disk, as for a job of a cluster: the times are others, and the folder is given by a relative path.
    shutil.copytree(tmp_path / "slides", tmp_path / "scratch" / "slides", copy_function=shutil.copyfile)
    (tmp_path / "patches").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "scratch")
    moved = f"--coords={tmp_path / 'moved'}"
    names = count_encoded(monkeypatch)
    assert invoke("slides", "encode-all", "slides", *arguments(tmp_path, weights, moved)[3:])[0] == 0
    assert names == []
    with h5py.File(tmp_path / "moved" / "b.h5", "r+") as file:
        file["coords"][3] += 1
    torch.save(torch.ones(53, tools.IN_CHANS), tmp_path / "slides" / "a.pt")
    code, _, err = run(tmp_path, weights, moved)
    assert code == 1
    reason = f"is not the file, or has not the coordinates, of its file in '{tmp_path / 'out'}'; use --overwrite or another folder"
    first, second = (tmp_path / "slides" / f"{name}.pt" for name in "ab")
    assert err.splitlines() == [f"error: '{first}' {reason}", f"error: as '{first}', 1 more ('{second}'): {reason}"]


def test_one_error_of_many_slides_is_said_once_with_the_count(tmp_path: Path, weights: Path) -> None:
    for i in range(6):
        x, coords = tools.draw_tiles(11 + i)
        tools.write_trident(tmp_path / "slides", f"s{i}", x if i == 3 else x[:, :5], coords)
    code, out, err = run(tmp_path, weights)
    assert code == 1
    reason, (first, *others) = (
        "must have embeddings of 7 elements as the weights, got 5",
        [f"'{tmp_path / 'slides' / f's{i}.h5'}'" for i in (0, 1, 2, 4, 5)],
    )
    assert err.splitlines() == [f"error: {first} {reason}", f"error: as {first}, 4 more ({', '.join(others[:3])}, ...): {reason}"]
    assert ", 5 failed\n" in out


def test_a_full_disk_leaves_whole_files_alone(
    tmp_path: Path, slides: object, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def fill(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            synced.append(descriptor)
        if len(synced) == 3:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill)
        code, _, err = run(tmp_path, weights)
    assert code == 2
    assert f"--output must be a place that can be written, got '{tmp_path / 'out'}': No space left on device; the same " in err
    assert sorted(path.name for path in (tmp_path / "out").rglob("*.h5")) == ["a.h5", "c.h5"]
    assert run(tmp_path, weights)[0] == 0
    assert read(tmp_path / "out.h5")["names"] == list(COUNTS)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--collect=none/x.h5"], "--collect must be a place that can be written, got 'none/x.h5': "),
        *(
            ([f"--output={{folder}}/slides{name}"], "--output must be outside FOLDER, whose files are slides, got")
            for name in ("", "/x")
        ),
        (["--order=hilbert"], "order must be that of the weights=None, got 'hilbert'"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, slides: object, weights: Path, more: list[str], message: str) -> None:
    code, _, err = run(tmp_path, weights, *(each.format(folder=tmp_path) for each in more))
    assert code == 2
    assert message in err
    assert not (tmp_path / "out.h5").exists()
