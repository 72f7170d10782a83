"""`flexdilated slides encode`: its output is the model's, whatever the file; and what it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flexdilated.slides.gigapath import LongNetViT
from tests.commands import invoke
from tests.slides.tools import IN_CHANS, SIZE_OPTIONS, load
from tests.tolerances import SINGLE, assert_twice_naive

TILES = 53
Slide = tuple[Tensor, Tensor]
pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def slide(tmp_path: Path) -> tuple[Tensor, Tensor]:
    cells = torch.randperm(29 * 29)[:TILES].sort().values
    x, coords = torch.randn(TILES, IN_CHANS), torch.stack([cells // 29, cells % 29], -1) * 256
    torch.save({"features": x, "coords": coords}, tmp_path / "a.pt")
    return x, coords


def run(tiles: object, *arguments: object) -> tuple[int, str, str]:
    fixed = ["--arch=tiny", f"--in-chans={IN_CHANS}", "--device=cpu", "--tile-size-level0=256", *SIZE_OPTIONS]
    return invoke("slides", "encode", tiles, *fixed, *arguments)


@torch.inference_mode()
def expect(model: LongNetViT, slide: Slide, **options: Any) -> list[Tensor]:
    return model(slide[0][None], slide[1][None], **options)


@pytest.mark.parametrize(
    ("suffix", "arguments", "options"),
    [
        (".pt", ["--global-pool"], {"global_pool": True}),
        (".npz", ["--max-wsi-size=2048"], {"max_wsi_size": 2048}),  # the shortest segment is then the whole slide
        (".npz", ["--slide-ngrids=31"], {"slide_ngrids": 31}),
    ],
)
def test_encode_slide_writes_what_the_model_gives(
    tmp_path: Path, slide: Slide, weights: Path, suffix: str, arguments: list[str], options: dict[str, Any]
) -> None:
    np.savez(tmp_path / "a.npz", features=slide[0].numpy(), coords=slide[1].numpy())
    tiles, output = tmp_path / f"a{suffix}", tmp_path / f"a.slide{suffix}"
    code, out, err = run(tiles, f"--weights={weights}", *arguments)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"encoded 53 tiles of '{tiles}' by tiny, '{weights}'; cpu in float32",
        f"wrote slide_embed to '{output}'",
    ]
    found = dict(np.load(output)) if suffix == ".npz" else torch.load(output)
    assert list(found) == ["slide_embed"]
    torch.testing.assert_close(torch.as_tensor(found["slide_embed"]), expect(load(weights, **options), slide)[0], **SINGLE)


def test_encode_slide_writes_all_layers(tmp_path: Path, slide: Slide, weights: Path) -> None:
    assert run(tmp_path / "a.pt", f"--weights={weights}", "--all-layers")[0] == 0
    actual, expected = torch.load(tmp_path / "a.slide.pt"), expect(load(weights), slide, all_layer_embed=True)
    assert list(actual) == ["layer_0_embed", "layer_1_embed", "layer_2_embed", "last_layer_embed"]
    for embedding, layer in zip(actual.values(), [*expected, expected[-1]]):
        torch.testing.assert_close(embedding, layer, **SINGLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_encode_slide_computes_in_the_dtype(tmp_path: Path, slide: Slide, weights: Path, dtype: torch.dtype) -> None:
    assert run(tmp_path / "a.pt", f"--weights={weights}", f"--dtype={str(dtype).removeprefix('torch.')}")[0] == 0
    actual = torch.load(tmp_path / "a.slide.pt")["slide_embed"]
    naive = expect(load(weights).to(dtype), (slide[0].to(dtype), slide[1]))[0]
    assert actual.dtype == torch.float32
    assert_twice_naive(actual, naive, expect(load(weights).double(), (slide[0].double(), slide[1]))[0])
    assert not torch.allclose(actual, expect(load(weights), slide)[0], **SINGLE)


@pytest.mark.usefixtures("slide")
def test_random_weights_are_reported_and_the_same_each_time(tmp_path: Path) -> None:
    embeddings = []
    for _ in range(2):
        code, out, err = run(tmp_path / "a.pt", "--random", "--overwrite")
        assert code == 0
        assert err.startswith("WARNING: --random: the weights are RANDOM")
        assert "RANDOM weights" in out
        embeddings.append(torch.load(tmp_path / "a.slide.pt")["slide_embed"])
    assert torch.equal(*embeddings)


@pytest.mark.usefixtures("slide")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch=large"], "--arch must be one of gigapath_slide_enc12l768d, "),
        (["--max-wsi-size=255"], "--tile-size must be in [1, 63], a quarter of --max-wsi-size=255, got 256"),
        (["--random"], "--weights must name a checkpoint, or --random be given in its place, got both"),
        (["--output=/nowhere/a.pt"], "/nowhere/a.pt must be a file that can be read or written, got: No such file"),
        (["--output=a.txt"], "--output must end in .pt or .npz, got 'a.txt'"),
        (["--output={folder}/a.pt"], "--output must be another file than TILES, got '{folder}/a.pt'"),
        (["--weights={folder}/a.pt"], "--weights must be a whole checkpoint that fits --arch and the tile embeddings, got "),
        (["--in-chans=8"], "--weights must be a whole checkpoint that fits --arch and the tile embeddings, got "),
    ],
)
def test_encode_slide_refuses_in_one_line(tmp_path: Path, weights: Path, arguments: list[str], message: str) -> None:
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    named = [argument.format(folder=tmp_path) for argument in arguments]
    code, _, err = run(tmp_path / "a.pt", f"--weights={weights}", *named)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {message.format(folder=tmp_path)}"), err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
