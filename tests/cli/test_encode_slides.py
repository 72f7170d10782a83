"""Many slides by one command: each gives what it gives alone, whatever lies beside it; nothing is lost."""

import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from flexdilated.cli import slide_run
from flexdilated.hub import gigapath
from flexdilated.hub.gigapath import ARCHITECTURES, LongNetViT, create_model
from flexdilated.hub.slides import encode, lock, store
from tests.commands import invoke
from tests.hub.slides.tools import GRIDS, IN_CHANS, SIDE, WRITERS, draw_tiles, write_plain, write_trident
from tests.tolerances import NAIVE_FACTOR, SINGLE

EMBED, DEPTH = 64, 2
# Segments of 1024, 362, 128, 45 and 16 tokens.
SIZES = {"tile_size": 256, "slide_ngrids": GRIDS, "max_wsi_size": 1024}
COUNTS = {"a": 53, "b/c": 1, "d": 131, "e": 17, "f": 46}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "tiny", (EMBED, DEPTH))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = create_model(None, "tiny", IN_CHANS, **SIZES)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    torch.save({"model": model.state_dict()}, tmp_path / "slide_encoder.pth")
    return tmp_path / "slide_encoder.pth"


@pytest.fixture
def slides(tmp_path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Slides of some sizes in `tmp_path / "slides"`, as TRIDENT writes them."""
    drawn = {name: draw_tiles(count, seed=i, origin=(37 * i, 5)) for i, (name, count) in enumerate(COUNTS.items())}
    for name, (x, coords) in drawn.items():
        write_trident(tmp_path / "slides", name, x, coords)
    return drawn


def load(weights: Path, **options: Any) -> LongNetViT:
    model = create_model(None, "tiny", IN_CHANS, **{**SIZES, **options}).eval()
    gigapath.load_weights(model, weights)
    return model


def arguments(folder: Path, weights: Path | None = None, *more: object) -> list[str]:
    sizes = [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()]
    fixed = ["--arch=tiny", f"--in-chans={IN_CHANS}", "--device=cpu", *sizes, f"--output={folder / 'out.h5'}"]
    named = [] if weights is None else [f"--weights={weights}"]
    return ["encode-slides", str(folder / "slides"), *fixed, *named, *map(str, more)]


def run(folder: Path, weights: Path | None = None, *more: object) -> tuple[int, str, str]:
    return invoke(*arguments(folder, weights, *more))


def read(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        found: dict[str, Any] = {key: file[key][()] for key in ("embeddings", "num_tiles", "file_sizes")}
        found |= {key: [text.decode() for text in file[key][:]] for key in store.TEXTS}
        found["tiles"] = {name: {key: group[key][()] for key in group} for name, group in file.get("tiles", {}).items()}
        found["failed"] = dict(zip(*([text.decode() for text in file["failed"][key][:]] for key in ("names", "reasons"))))
        return {**found, **file.attrs, "provenance": json.loads(file.attrs["provenance"])}


@torch.inference_mode()
def alone(model: LongNetViT, slide: tuple[Tensor, Tensor], **options: Any) -> list[Tensor]:
    x, coords = slide
    return model(x[None], coords[None] // SIDE * 256, **options)


# -- what it writes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("pooling", ["--cls", "--global-pool"])
def test_each_slide_gives_what_it_gives_alone(
    tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path, budget: int, pooling: str
) -> None:
    code, out, err = run(tmp_path, weights, f"--token-budget={budget}", pooling)
    assert (code, err) == (0, "")
    assert f"encoded 5 slides of {sum(COUNTS.values())} tiles in" in out
    assert f"wrote 5 slides to '{tmp_path / 'out.h5'}'" in out
    found = read(tmp_path / "out.h5")
    assert found["names"] == list(COUNTS)
    assert found["num_tiles"].tolist() == list(COUNTS.values())
    assert found["files"] == [str(tmp_path / "slides" / f"{name}.h5") for name in COUNTS]
    assert (found["tiles"], found["failed"]) == ({}, {})
    model = load(weights, global_pool=pooling == "--global-pool")
    for embedding, slide in zip(found["embeddings"], slides.values()):
        torch.testing.assert_close(torch.from_numpy(embedding), alone(model, slide)[0][0], **SINGLE)
    assert {path.name for path in tmp_path.iterdir()} == {"out.h5", "slides", "slide_encoder.pth"}


def test_layers_and_tiles_are_those_of_the_model(tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path) -> None:
    assert run(tmp_path, weights, "--layers=all", "--tiles")[0] == 0
    found = read(tmp_path / "out.h5")
    model = load(weights)
    assert found["embeddings"].shape == (5, DEPTH + 1, EMBED)
    for (name, slide), embeddings in zip(slides.items(), found["embeddings"]):
        layers = torch.cat(alone(model, slide, all_layer_embed=True))
        torch.testing.assert_close(torch.from_numpy(embeddings), layers, **SINGLE)
        tiles = found["tiles"][name.replace("/", "%2F")]
        torch.testing.assert_close(
            torch.from_numpy(tiles["embeddings"]), alone(model, slide, return_tokens=True)[0][0, 1:], **SINGLE
        )
        assert np.array_equal(tiles["coords"], slide[1].numpy())


def test_low_precision_stays_near_what_is_computed_in_float32(
    tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path
) -> None:
    assert run(tmp_path, weights, "--store=float16", "--dtype=bfloat16", "--tiles")[0] == 0
    found = read(tmp_path / "out.h5")
    assert {found["embeddings"].dtype, found["tiles"]["a"]["embeddings"].dtype} == {np.dtype("float16")}
    model = load(weights)
    for embedding, slide in zip(found["embeddings"], slides.values()):
        bound = {"atol": NAIVE_FACTOR * 4 * torch.finfo(torch.bfloat16).eps, "rtol": 0.0}
        torch.testing.assert_close(torch.from_numpy(embedding).float(), alone(model, slide)[0][0], **bound)


def test_provenance_says_what_determines_the_numbers(tmp_path: Path, slides: object, weights: Path) -> None:
    assert run(tmp_path, weights)[0] == 0
    found = read(tmp_path / "out.h5")
    assert found["format"] == store.FORMAT
    settings, (versions,) = found["provenance"]["settings"], found["provenance"]["runs"]
    digest = subprocess.run(["sha256sum", weights], capture_output=True, text=True, check=True).stdout.split()[0]
    assert settings["weights"] == digest
    assert settings["pattern"] == load(weights).pattern.to_dict()
    assert {"arch", "order", "dtype", "store", "layers", "global_pool", "magnification"} <= set(settings)
    assert versions["torch"] == torch.__version__
    assert {"flexdilated", "begun", "python", "machine"} <= set(versions)
    assert (versions["folder"], versions["coords"]) == (str(tmp_path / "slides"), None)
    assert found["file_digests"] == [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in found["files"]]


def test_every_format_in_one_folder(tmp_path: Path, weights: Path) -> None:
    x, coords = draw_tiles(300)
    tools = [tool for tool in WRITERS if tool not in ("lazyslide", "clam", "clam_pt")]
    for tool in tools:
        WRITERS[tool](tmp_path / "slides", tool, x, coords)
    (tmp_path / "tiles").rename(tmp_path / "elsewhere")
    code, _, err = run(tmp_path, weights, f"--coords={tmp_path / 'elsewhere'}", f"--tile-size-level0={SIDE}")
    assert (code, err) == (0, "")
    embeddings = read(tmp_path / "out.h5")["embeddings"]
    assert len(embeddings) == len(tools)
    for embedding in embeddings:
        torch.testing.assert_close(torch.from_numpy(embedding), alone(load(weights), (x, coords))[0][0], **SINGLE)


def test_coordinates_are_found_in_the_folder_of_the_same_name(tmp_path: Path, weights: Path) -> None:
    """Two hospitals, each with a slide of one name: of as many tiles, at other places."""
    drawn = {}
    for site, seed in (("x", 1), ("y", 2)):
        x, coords = drawn[f"{site}/a"] = draw_tiles(53, seed=seed)
        path = WRITERS["clam_pt"](tmp_path / "made" / site / "features", "a", x, coords)
        for source, target in ((path, "slides"), (path.parent.parent / "patches" / "a.h5", "patches")):
            (tmp_path / target / site).mkdir(parents=True)
            source.rename(tmp_path / target / site / source.name)
    assert run(tmp_path, weights, f"--coords={tmp_path / 'patches'}")[0] == 0
    found = read(tmp_path / "out.h5")
    assert found["names"] == list(drawn)
    for embedding, slide in zip(found["embeddings"], drawn.values()):
        torch.testing.assert_close(torch.from_numpy(embedding), alone(load(weights), slide)[0][0], **SINGLE)


def test_the_folder_of_coordinates_holds_no_slides(tmp_path: Path, weights: Path) -> None:
    WRITERS["clam_pt"](tmp_path / "slides" / "pt_files", "a", *draw_tiles(53))
    code, _, err = run(tmp_path, weights, f"--coords={tmp_path / 'slides' / 'patches'}")
    assert (code, err) == (0, "")
    assert read(tmp_path / "out.h5")["names"] == ["pt_files/a"]


# -- bad slides ---------------------------------------------------------------------------------------------------------------


def test_bad_slides_are_named_and_the_rest_goes_on(tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path) -> None:
    folder = tmp_path / "slides"
    x, coords = draw_tiles(11)
    nan = x.clone()
    nan[3] = torch.nan
    write_trident(folder, "bad-nan", nan, coords)
    write_trident(folder, "bad-twice", x, coords.index_copy(0, torch.tensor([1]), coords[:1]))
    write_trident(folder, "bad-empty", x[:0], coords[:0])
    write_trident(folder, "bad-width", x[:, :5], coords)
    write_trident(folder, "bad-size", x, coords, patch_size_level0="None", patch_size="None")
    write_trident(folder, "bad-level", x, coords // 32)
    write_trident(folder, "bad-magnification", x, coords, target_magnification=40)
    write_trident(folder, "bad-cut", x, coords)
    cut = folder / "bad-cut.h5"
    cut.write_bytes(cut.read_bytes()[:1000])
    code, out, err = run(tmp_path, weights)
    assert code == 1
    reasons = {
        "bad-nan": "embeddings must be finite, got nan in tile 3",
        "bad-twice": "has 1 tiles at coordinates that another tile has too",
        "bad-empty": "has no tiles: embeddings of shape (0, 7)",
        "bad-width": "must have embeddings of --in-chans=7 elements, got 5",
        "bad-size": "does not say how large a tile is at level 0; give the folder of files that do, as CLAM's patches, as --coords",
        "bad-level": "would put 11 tiles in",
        "bad-magnification": "says that its tiles were embedded at magnification 40, --magnification is 20",
        "bad-cut": "is damaged or no whole .h5 file: ",
    }
    for name, reason in reasons.items():
        assert f"error: '{folder / name}.h5' {reason}" in err
    assert "wrote 5 slides" in out
    assert out.rstrip().endswith("8 failed")
    found = read(tmp_path / "out.h5")
    assert found["names"] == list(COUNTS)
    assert {name: found["failed"][name].startswith(reason) for name, reason in reasons.items()} == dict.fromkeys(reasons, True)
    # Repaired, they join the others, in the order of names.
    write_trident(folder, "bad-nan", x, coords)
    code, _, _ = run(tmp_path, weights, "--resume")
    assert code == 1
    again = read(tmp_path / "out.h5")
    assert again["names"] == ["a", "b/c", "bad-nan", "d", "e", "f"]
    assert np.array_equal(np.delete(again["embeddings"], 2, axis=0), found["embeddings"])
    assert len(again["provenance"]["runs"]) == 2
    assert "bad-nan" not in again["failed"]


def test_where_no_slide_can_be_encoded_nothing_is_written(tmp_path: Path, weights: Path) -> None:
    x, coords = draw_tiles(11)
    write_trident(tmp_path / "slides", "a", x[:0], coords[:0])
    code, _, err = run(tmp_path, weights)
    assert code == 1
    assert err.endswith("no slide could be encoded, and nothing is written\n")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_tile_size_that_leaves_cells_empty_is_asked_about(tmp_path: Path, weights: Path) -> None:
    write_plain(tmp_path / "slides", "a", *draw_tiles(300))
    code, _, err = run(tmp_path, weights, "--tile-size-level0=256", "--slide-ngrids=60")
    assert code == 0
    assert "note: " in err
    assert "neighbours are 512 apart: is a tile 256 pixels wide at level 0?" in err


def test_float16_that_overflows_is_named(tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path) -> None:
    checkpoint = torch.load(weights)
    checkpoint["model"]["norm.weight"] *= 1e6
    torch.save(checkpoint, weights)
    code, _, err = run(tmp_path, weights, "--store=float16")
    assert code == 1
    assert "a.h5' gives embeddings that are not finite, stored in float16; use another dtype" in err


def test_a_slide_that_overflows_leaves_its_neighbours_in_the_pack_alone(
    tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path
) -> None:
    x, coords = draw_tiles(23)
    write_trident(tmp_path / "slides", "c", x.double() * 1e300, coords)
    code, _, err = run(tmp_path, weights)
    assert code == 1
    assert "c.h5' gives embeddings that are not finite, computed in float32; use another dtype" in err
    found = read(tmp_path / "out.h5")
    assert found["names"] == list(COUNTS)
    for embedding, slide in zip(found["embeddings"], slides.values()):
        torch.testing.assert_close(torch.from_numpy(embedding), alone(load(weights), slide)[0][0], **SINGLE)


# -- interruptions ------------------------------------------------------------------------------------------------------------


def count_encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    whole = encode.encode_slides

    def counted(model: LongNetViT, slides: dict[str, Path], **options: Any) -> Iterator[object]:
        names.extend(slides)
        return whole(model, slides, **options)

    monkeypatch.setattr(encode, "encode_slides", counted)
    return names


def interrupt(folder: Path, weights: Path, *more: object) -> None:
    patch = pytest.MonkeyPatch()
    whole = encode.encode_slides

    def some(*args: Any, **options: Any) -> Iterator[object]:
        for i, result in enumerate(whole(*args, **options)):
            if i == 2:
                raise KeyboardInterrupt
            yield result

    patch.setattr(encode, "encode_slides", some)
    try:
        code, _, err = run(folder, weights, *more)
    finally:
        patch.undo()
    assert code == 130
    assert "what is done is kept: the same command with --resume goes on" in err


def test_resume_goes_on_where_a_run_was_interrupted(
    tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, weights, "--tiles")[0] == 0
    expected = read(tmp_path / "out.h5")
    (tmp_path / "out.h5").unlink()
    interrupt(tmp_path, weights, "--tiles")
    assert not (tmp_path / "out.h5").exists()
    code, _, err = run(tmp_path, weights, "--tiles")
    assert code == 2
    assert f"--output must not exist, got '{tmp_path / 'out.h5.parts'}'; use --resume, --overwrite or another name" in err
    code, _, err = run(tmp_path, weights, "--tiles", "--resume", "--layers=all")
    assert code == 2
    assert "--resume must come with the settings of" in err
    assert "which has layers 'last', now 'all'; use --overwrite or another name" in err
    names = count_encoded(monkeypatch)
    assert run(tmp_path, weights, "--tiles", "--resume")[0] == 0
    assert names == ["d", "e", "f"]
    found = read(tmp_path / "out.h5")
    assert found["names"] == expected["names"]
    np.testing.assert_allclose(found["embeddings"], expected["embeddings"], **SINGLE)
    assert set(found["tiles"]) == set(expected["tiles"])
    assert not (tmp_path / "out.h5.parts").exists()


def test_slides_that_the_folder_no_longer_holds_stay_behind_the_others(
    tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path
) -> None:
    assert run(tmp_path, weights, "--tiles")[0] == 0
    before = read(tmp_path / "out.h5")
    (tmp_path / "slides" / "a.h5").unlink()
    write_trident(tmp_path / "slides", "0", *draw_tiles(7))
    assert run(tmp_path, weights, "--tiles", "--resume")[0] == 0
    found = read(tmp_path / "out.h5")
    assert found["names"] == ["0", "b/c", "d", "e", "f", "a"]
    assert np.array_equal(found["embeddings"][1:], np.roll(before["embeddings"], -1, axis=0))
    assert set(found["tiles"]) == {"0", *before["tiles"]}


def test_an_overwriting_run_that_ends_while_it_tidies_up_has_written_its_output(
    tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, weights)[0] == 0
    interrupt(tmp_path, weights, "--overwrite")

    def remove(folder: Path) -> None:
        (folder / store.RUN).unlink()
        for part in folder.glob(store.PART):
            part.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_remove", remove)
        assert run(tmp_path, weights, "--resume")[0] == 130
    names = count_encoded(monkeypatch)
    assert run(tmp_path, weights, "--resume")[0] == 0
    assert names == []
    assert read(tmp_path / "out.h5")["names"] == list(COUNTS)


def test_a_part_that_was_damaged_is_encoded_again(
    tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(tmp_path, weights)
    (part,) = (tmp_path / "out.h5.parts").glob("part-*")
    part.write_bytes(part.read_bytes()[:100])
    names = count_encoded(monkeypatch)
    assert run(tmp_path, weights, "--resume")[0] == 0
    assert names == list(COUNTS)
    assert read(tmp_path / "out.h5")["names"] == list(COUNTS)


def test_overwrite_keeps_the_earlier_output_until_the_end(
    tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path
) -> None:
    assert run(tmp_path, weights)[0] == 0
    before = (tmp_path / "out.h5").read_bytes()
    code, _, err = run(tmp_path, weights)
    assert code == 2
    assert f"--output must not exist, got '{tmp_path / 'out.h5'}'; use --resume, --overwrite or another name" in err
    interrupt(tmp_path, weights, "--overwrite", "--layers=all")
    assert (tmp_path / "out.h5").read_bytes() == before
    assert run(tmp_path, weights, "--resume", "--layers=all")[0] == 0
    assert read(tmp_path / "out.h5")["embeddings"].shape == (5, DEPTH + 1, EMBED)


def test_a_slide_that_was_replaced_is_named_and_kept_as_it_was(
    tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path
) -> None:
    assert run(tmp_path, weights)[0] == 0
    before = read(tmp_path / "out.h5")
    write_trident(tmp_path / "slides", "a", *draw_tiles(211))
    code, _, err = run(tmp_path, weights, "--resume")
    assert code == 1
    assert (
        "a.h5' is not the file that was encoded under its name, or has other coordinates; use --overwrite or another output" in err
    )
    assert np.array_equal(read(tmp_path / "out.h5")["embeddings"], before["embeddings"])


def test_a_slide_is_known_by_what_its_file_holds_not_by_where_and_when(
    tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, weights)[0] == 0
    # Copied to another disk, as for a job of a cluster: the times are others, and the folder is given by a relative path.
    folder = tmp_path / "slides"
    (tmp_path / "scratch").mkdir()
    shutil.copytree(folder, tmp_path / "scratch" / "slides", copy_function=shutil.copyfile)
    monkeypatch.chdir(tmp_path / "scratch")
    names = count_encoded(monkeypatch)
    assert invoke(*arguments(tmp_path, weights, "--resume"))[0] == 0
    assert invoke("encode-slides", "slides", *arguments(tmp_path, weights, "--resume")[2:])[0] == 0
    assert names == []
    # The same path and size, other embeddings.
    x, coords = slides["a"]
    write_trident(folder, "a", x + 1, coords)
    code, _, err = run(tmp_path, weights, "--resume")
    assert code == 1
    assert (
        "a.h5' is not the file that was encoded under its name, or has other coordinates; use --overwrite or another output" in err
    )


def test_a_slide_whose_coordinates_have_changed_is_another(tmp_path: Path, weights: Path) -> None:
    """CLAM's `.pt` hold none: the patches beside them are a part of the slide."""
    for i, name in enumerate("ab"):
        WRITERS["clam_pt"](tmp_path / "slides", name, *draw_tiles(53, seed=i))
    assert run(tmp_path, weights, f"--coords={tmp_path / 'patches'}")[0] == 0
    assert len(set(read(tmp_path / "out.h5")["coords_digests"])) == 2
    (tmp_path / "patches").rename(tmp_path / "moved")
    assert run(tmp_path, weights, f"--coords={tmp_path / 'moved'}", "--resume")[0] == 0
    with h5py.File(tmp_path / "moved" / "b.h5", "r+") as file:
        file["coords"][3] += 1
    code, _, err = run(tmp_path, weights, f"--coords={tmp_path / 'moved'}", "--resume")
    assert code == 1
    assert err == (
        f"error: '{tmp_path / 'slides' / 'b.pt'}' is not the file that was encoded under its name, or has other coordinates; use "
        "--overwrite or another output\n"
    )


def test_a_long_run_leaves_more_parts_than_a_process_may_open(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, coords = draw_tiles(5)
    names = [f"s{i:02d}" for i in range(60)]
    for name in names:
        write_trident(tmp_path / "slides", name, x, coords)
    monkeypatch.setattr(slide_run, "PART_SECONDS", 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        code, _, err = run(tmp_path, weights, "--token-budget=1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (code, err) == (0, "")
    assert read(tmp_path / "out.h5")["names"] == names


def test_other_weights_are_other_settings(tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path) -> None:
    assert run(tmp_path, weights)[0] == 0
    other = create_model(None, "tiny", IN_CHANS, **SIZES)
    torch.save({"model": other.state_dict()}, weights)
    code, _, err = run(tmp_path, weights, "--resume")
    assert code == 2
    assert "which has weights '" in err


@pytest.mark.slow
def test_a_process_that_is_killed_loses_nothing_that_was_written(
    tmp_path: Path, slides: dict[str, tuple[Tensor, Tensor]], weights: Path
) -> None:
    """Killed where the second pack is to be written: the first one is whole, and every slide of it is found."""
    program = f"""
import os, signal, sys
from flexdilated.cli import app, slide_run
from flexdilated.hub.gigapath import ARCHITECTURES
from flexdilated.hub.slides import store
ARCHITECTURES["tiny"] = ({EMBED}, {DEPTH})
slide_run.PART_SECONDS = 0.0
written = store.write_part
def write_part(output, slides):
    if list(store.parts_folder(output).glob("part-*")):
        os.kill(os.getpid(), signal.SIGKILL)
    written(output, slides)
store.write_part = write_part
app({arguments(tmp_path, weights, "--token-budget=60")!r})
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    done = store.begin(
        tmp_path / "out.h5",
        json.loads((tmp_path / "out.h5.parts" / "run.json").read_text())["settings"],
        {},
        resume=True,
        overwrite=False,
    )
    assert list(done) == ["a", "b/c"]
    assert run(tmp_path, weights, "--resume")[0] == 0
    assert read(tmp_path / "out.h5")["names"] == list(COUNTS)


# -- the output ---------------------------------------------------------------------------------------------------------------


def test_two_runs_on_one_output_are_refused(tmp_path: Path, slides: object, weights: Path) -> None:
    with lock.locked(tmp_path / "out.h5"):
        code, _, err = run(tmp_path, weights)
    assert code == 2
    assert f"--output must not be written by two runs at once, got '{tmp_path / 'out.h5'}', which another one writes" in err
    assert run(tmp_path, weights)[0] == 0
    assert not list(tmp_path.glob(".*"))


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, slides: object, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(lock, "_lock", fail)
    code, _, err = run(tmp_path, weights)
    assert code == 2
    assert f"got '{tmp_path / 'out.h5'}': {os.strerror(errno.ENOSYS)}" in err
    assert "two runs" not in err


@pytest.mark.parametrize("when", ["part", "end"])
def test_a_full_disk_is_named_and_nothing_is_lost(
    tmp_path: Path, slides: object, weights: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a limit on the size of files, at which the kernel refuses as it does where the disk is full."""
    if when == "part":
        limit = 1000
    else:
        interrupt(tmp_path, weights, "--tiles")
        limit = max(path.stat().st_size for path in (tmp_path / "out.h5.parts").iterdir()) + 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        code, _, err = run(tmp_path, weights, "--tiles", *(["--resume"] if when == "end" else []))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert f"--output must be a file that can be written, got '{tmp_path / 'out.h5'}': {os.strerror(errno.EFBIG)}" in err
    assert not (tmp_path / "out.h5").exists()
    code, _, _ = run(tmp_path, weights, "--tiles", "--resume")
    assert code == 0
    assert read(tmp_path / "out.h5")["names"] == list(COUNTS)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--store=float64"], "--store must be one of float32, float16, got 'float64'"),
        (["--dtype=float64"], "--dtype must be one of float32, bfloat16, float16, got 'float64'"),
        (["--arch=huge"], "--arch must be one of gigapath_slide_enc12l768d, "),
        (["--in-chans=0"], "--in-chans must be at least 1, got 0"),
        (["--tile-size-level0=0"], "--tile-size-level0 must be above 0 and finite, got 0"),
        (["--magnification=inf"], "--magnification must be above 0 and finite, got inf"),
        (["--random"], "--weights must name a checkpoint, or --random be given in its place, got both"),
        (["--weights=none.pth"], "--weights must be a file that exists, got 'none.pth'"),
        (["--coords=none"], "--coords must be a folder that exists, got 'none'"),
        (["--resume", "--overwrite"], "--resume must come without --overwrite, got both"),
        (["--output=x.pt"], "--output must end in .h5, got 'x.pt'"),
        (["--output=none/x.h5"], "--output must be a file in a folder that can be written, got 'none/x.h5'"),
        (["--split-above=5"], "--split-above must come with several ranks of torchrun, got 5 and one process"),
        (["--order=hilbert"], "order must be that of the weights=None, got 'hilbert'"),
        (["--in-chans=8"], "--weights must be a whole checkpoint that fits --arch, --in-chans and --order, got "),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, slides: object, weights: Path, more: list[str], message: str) -> None:
    code, _, err = run(tmp_path, weights, *more)
    assert code == 2
    assert message in err
    assert not (tmp_path / "out.h5.parts").exists()


def test_an_output_that_is_a_link_stays_one(tmp_path: Path, slides: object, weights: Path) -> None:
    """The parts lie on the disk that the link leads to, and so does the lock."""
    (tmp_path / "large").mkdir()
    (tmp_path / "out.h5").symlink_to(tmp_path / "large" / "embeddings.h5")
    with lock.locked(tmp_path / "large" / "embeddings.h5"):
        code, _, err = run(tmp_path, weights)
    assert code == 2
    assert "--output must not be written by two runs at once" in err
    for more in ([], ["--resume"], ["--overwrite"]):
        assert run(tmp_path, weights, *more)[0] == 0
        assert (tmp_path / "out.h5").is_symlink()
        assert [path.name for path in (tmp_path / "large").iterdir()] == ["embeddings.h5"]
    assert read(tmp_path / "out.h5")["names"] == list(COUNTS)


def test_tiles_along_a_curve_are_not_split(tmp_path: Path, slides: object, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run(tmp_path, weights, "--split-above=50", "--order=hilbert")
    assert code == 2
    assert err == "error: --split-above must come with --order=file, got hilbert: a rank holds a part of the slide alone\n"


def test_an_output_among_the_slides_or_of_another_tool_is_refused(tmp_path: Path, slides: object, weights: Path) -> None:
    code, _, err = run(tmp_path, weights, f"--output={tmp_path / 'slides' / 'x.h5'}")
    assert code == 2
    assert "--output must lie outside FOLDER, whose files are slides, got" in err
    write_trident(tmp_path, "out", *draw_tiles(3))
    before = (tmp_path / "out.h5").read_bytes()
    code, _, err = run(tmp_path, weights, "--resume")
    assert code == 2
    assert "--output must be a file that encode-slides wrote, got" in err
    assert (tmp_path / "out.h5").read_bytes() == before
    code, _, err = run(tmp_path, None, "--resume", "--random")
    assert code == 2
    assert "--resume must come without --random, got both: the weights would be others than before" in err


def test_random_weights_are_said_to_mean_nothing(tmp_path: Path, slides: object) -> None:
    code, _, err = run(tmp_path, None, "--random")
    assert code == 0
    assert err.startswith("WARNING: --random: the weights are RANDOM")
