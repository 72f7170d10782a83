"""The slide encoder's command: its output is the model's, whatever the file; and how it refuses."""

import builtins
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flexdilated.cli.encode_slide import EMBEDDINGS
from flexdilated.hub import gigapath
from flexdilated.hub.gigapath import ARCHITECTURES, LongNetViT, create_model
from tests.commands import invoke
from tests.tolerances import SINGLE, assert_twice_naive

EMBED, DEPTH, IN_CHANS, TILES = 64, 2, 7, 53
# Segments of 1024, 362, 128, 45 and 16 tokens at 1024 pixels of 256: most are ragged.
SIZES = {"tile_size": 256, "slide_ngrids": 29, "max_wsi_size": 1024}
needs_h5py = pytest.mark.skipif(importlib.util.find_spec("h5py") is None, reason="needs h5py, the extra 'slides'")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "tiny", (EMBED, DEPTH))


@pytest.fixture
def slide() -> tuple[Tensor, Tensor]:
    """A slide of 53 tiles on a grid with holes, `(N, C)` and `(N, 2)`."""
    cells = torch.randperm(29 * 29)[:TILES].sort().values
    return torch.randn(TILES, IN_CHANS), torch.stack([cells // 29, cells % 29], -1) * 256


def build(**options: Any) -> LongNetViT:
    return create_model(None, "tiny", IN_CHANS, **{**SIZES, **options}).eval()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = build()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    torch.save({"model": model.state_dict()}, tmp_path / "slide_encoder.pth")
    return tmp_path / "slide_encoder.pth"


def load(weights: Path, **options: Any) -> LongNetViT:
    model = build(**options)
    gigapath.load_weights(model, weights)
    return model


def write(path: Path, **arrays: Tensor) -> Path:
    if path.suffix == ".pt":
        torch.save(arrays, path)
    elif path.suffix == ".npz":
        np.savez(path, **{name: array.numpy() for name, array in arrays.items()})
    else:
        import h5py

        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                file[name] = array.numpy()
            file.create_group("more")
    return path


def run(tiles: object, *arguments: object) -> tuple[int, str, str]:
    sizes = [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()]
    fixed = ["--arch=tiny", f"--in-chans={IN_CHANS}", "--device=cpu", *sizes]
    return invoke("encode-slide", tiles, *fixed, *arguments)


def encode(tiles: Path, weights: Path, *arguments: object) -> dict[str, Tensor]:
    output = tiles.with_name("out.pt")
    code, _, err = run(tiles, f"--weights={weights}", f"--output={output}", "--overwrite", *arguments)
    assert (code, err) == (0, "")
    return torch.load(output, weights_only=True)


@torch.inference_mode()
def expect(model: LongNetViT, slide: tuple[Tensor, Tensor], *, all_layers: bool = False) -> list[Tensor]:
    return model(slide[0][None], slide[1][None], all_layer_embed=all_layers)


# -- what it writes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pt", ".npz", pytest.param(".h5", marks=needs_h5py)])
def test_encode_slide_writes_what_the_model_gives(tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path, suffix: str) -> None:
    tiles = write(tmp_path / f"a.b{suffix}", extra=torch.zeros(3), coords=slide[1], features=slide[0])
    code, out, err = run(tiles, f"--weights={weights}")
    assert (code, err) == (0, "")
    output = tmp_path / ("a.b.slide.npz" if suffix == ".npz" else "a.b.slide.pt")
    if suffix == ".npz":
        with np.load(output, allow_pickle=False) as archive:
            actual = {name: torch.from_numpy(archive[name]) for name in archive.files}
    else:
        actual = torch.load(output, weights_only=True)
    assert list(actual) == ["slide_embed"]
    torch.testing.assert_close(actual["slide_embed"], expect(load(weights), slide)[0], **SINGLE)
    parameters = sum(p.numel() for p in build().parameters())
    for text in (f"53 tiles of 7 elements, 'features' of '{tiles}'", f"{parameters:,} parameters of tiny", " s, peak memory "):
        assert text in out
    assert out.endswith(f"wrote slide_embed to '{output}'\n")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("key", EMBEDDINGS)
@pytest.mark.parametrize("batched", [False, True])
def test_encode_slide_accepts_every_key_and_shape(
    tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path, key: str, batched: bool
) -> None:
    x, coords = (value[None] if batched else value for value in slide)
    actual = encode(write(tmp_path / "a.pt", **{key: x, "coords": coords}), weights)
    torch.testing.assert_close(actual["slide_embed"], expect(load(weights), slide)[0], **SINGLE)


@pytest.mark.parametrize("dtype", ["uint16", ">i4", "uint64", "float32", ">f8"])
def test_encode_slide_accepts_every_dtype_of_coordinates(
    tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path, dtype: str
) -> None:
    np.savez(tmp_path / "a.npz", tile_embeds=slide[0].numpy().astype(">f8"), coords=slide[1].numpy().astype(dtype))
    actual = encode(tmp_path / "a.npz", weights)
    torch.testing.assert_close(actual["slide_embed"], expect(load(weights), slide)[0], **SINGLE)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--global-pool"], {"global_pool": True}),
        (["--cls"], {"global_pool": False}),
        (["--tile-size=512", "--max-wsi-size=2048", "--shared-cells"], {"tile_size": 512, "max_wsi_size": 2048}),
        (["--max-wsi-size=2048"], {"max_wsi_size": 2048}),  # the shortest segment is then the whole slide
        (["--slide-ngrids=31"], {"slide_ngrids": 31}),
    ],
)
def test_encode_slide_passes_every_option_on(
    tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path, arguments: list[str], options: dict[str, Any]
) -> None:
    actual = encode(write(tmp_path / "a.pt", features=slide[0], coords=slide[1]), weights, *arguments)["slide_embed"]
    torch.testing.assert_close(actual, expect(load(weights, **options), slide)[0], **SINGLE)
    is_default = options in ({"global_pool": False}, {"slide_ngrids": 31})
    assert torch.allclose(actual, expect(load(weights), slide)[0], **SINGLE) == is_default


def test_encode_slide_grows_the_grid_with_slide_ngrids(tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path) -> None:
    far = slide[1].clone()
    far[5, 1] = 30 * 256
    actual = encode(write(tmp_path / "a.pt", features=slide[0], coords=far), weights, "--slide-ngrids=31")
    torch.testing.assert_close(actual["slide_embed"], expect(load(weights, slide_ngrids=31), (slide[0], far))[0], **SINGLE)


@needs_h5py
def test_encode_slide_places_tiles_by_their_side_at_level_0(tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path) -> None:
    """TRIDENT's file of a slide scanned at 40 and tiled at 20 says that its tiles of 256 pixels are 512 wide in its coordinates."""
    import h5py

    level0 = slide[1] * 2
    tiles = write(tmp_path / "a.h5", features=slide[0], coords=level0)
    with h5py.File(tiles, "r+") as file:
        file["coords"].attrs["patch_size_level0"] = 512
    expected = expect(load(weights), slide)[0]
    torch.testing.assert_close(encode(tiles, weights)["slide_embed"], expected, **SINGLE)
    plain = write(tmp_path / "a.pt", features=slide[0], coords=level0)
    torch.testing.assert_close(encode(plain, weights, "--tile-size-level0=512")["slide_embed"], expected, **SINGLE)
    assert_refuses(tiles, weights, f"--tile-size-level0 must be what '{tiles}' says=512, got 256", "--tile-size-level0=256")
    assert_refuses(plain, weights, "--tile-size-level0 must be above 0, got 0", "--tile-size-level0=0")


def test_encode_slide_refuses_coordinates_that_collapse_the_grid(
    tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path
) -> None:
    tiles = write(tmp_path / "a.pt", features=slide[0], coords=slide[1] // 256)
    assert_refuses(
        tiles, weights, "TILES would put 53 tiles in 1 cells of 256 pixels, where tiles in one cell cannot be told apart"
    )
    encode(tiles, weights, "--shared-cells")


def test_encode_slide_writes_all_layers(tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path) -> None:
    actual = encode(write(tmp_path / "a.pt", features=slide[0], coords=slide[1]), weights, "--all-layers")
    expected = expect(load(weights), slide, all_layers=True)
    assert list(actual) == ["layer_0_embed", "layer_1_embed", "layer_2_embed", "last_layer_embed"]
    for embedding, layer in zip(actual.values(), [*expected, expected[-1]]):
        torch.testing.assert_close(embedding, layer, **SINGLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encode_slide_computes_in_the_dtype_and_writes_float32(
    tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path, dtype: torch.dtype
) -> None:
    tiles, name = write(tmp_path / "a.pt", features=slide[0], coords=slide[1]), str(dtype).removeprefix("torch.")
    actual = encode(tiles, weights, f"--dtype={name}")["slide_embed"]
    naive = expect(load(weights).to(dtype), (slide[0].to(dtype), slide[1]))[0]
    assert actual.dtype == torch.float32
    assert_twice_naive(actual, naive, expect(load(weights).double(), (slide[0].double(), slide[1]))[0])
    assert not torch.allclose(actual, expect(load(weights), slide)[0], **SINGLE)


def test_encode_slide_with_random_weights_says_so(tmp_path: Path, slide: tuple[Tensor, Tensor]) -> None:
    code, out, err = run(write(tmp_path / "a.pt", features=slide[0], coords=slide[1]), "--random")
    assert code == 0
    assert err.startswith("WARNING: --random: the weights are RANDOM")
    assert "RANDOM weights" in out


# -- what it refuses ----------------------------------------------------------------------------------------------------------


def assert_refuses(tiles: Path, weights: Path, message: str, *arguments: object) -> None:
    before = set(tiles.parent.iterdir())
    code, _, err = run(tiles, f"--weights={weights}", *arguments)
    assert err.startswith(f"error: {message}"), err
    assert (code, err.count("\n")) == (2, 1)
    assert set(tiles.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coords": None}, "TILES must hold coords and one of tile_embeds, features, feats, embeddings, got features in '"),
        ({"features": None}, "TILES must hold coords and one of tile_embeds, features, feats, embeddings, got coords in '"),
        (
            {"tile_embeds": torch.zeros(2, 2)},
            "TILES must hold coords and one of tile_embeds, features, feats, embeddings, got features, co",
        ),
        ({"features": torch.zeros(TILES)}, "features must have shape (N, C) or (1, N, C) with N at least 1, got (53,)"),
        ({"features": torch.zeros(2, TILES, 7)}, "features must have shape (N, C) or (1, N, C) with N at least 1, got (2, 53, 7)"),
        ({"features": torch.zeros(0, 7)}, "features must have shape (N, C) or (1, N, C) with N at least 1, got (0, 7)"),
        ({"coords": torch.zeros(TILES, 3)}, "coords must have shape (N, 2) or (1, N, 2) with N at least 1, got (53, 3)"),
        ({"coords": torch.zeros(47, 2)}, "coords must hold one row for each of the 53 rows of features, got 47"),
        ({"features": torch.zeros(TILES, 11)}, "features must have --in-chans=7 elements per tile, as the weights expect, got 11"),
        ({"features": torch.zeros(TILES, 7).long()}, "features must be of float64, float32, bfloat16, float16, got int64"),
        ({"coords": torch.zeros(TILES, 2).half()}, "coords must be of float64, float32, int64, int32, "),
        ({"coords": torch.full((TILES, 2), 29 * 256)}, "coords must lie in [0, --slide-ngrids * --tile-size=7424), got 7424 at"),
        ({"coords": torch.full((TILES, 2), -1)}, "coords must lie in [0, --slide-ngrids * --tile-size=7424), got -1 at coords"),
        ({"coords": torch.full((TILES, 2), torch.nan)}, "coords must lie in [0, --slide-ngrids * --tile-size=7424), got nan at"),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".npz"])
def test_encode_slide_refuses_tiles(
    tmp_path: Path,
    slide: tuple[Tensor, Tensor],
    weights: Path,
    change: dict[str, Tensor | None],
    message: str,
    suffix: str,
) -> None:
    arrays = {"features": slide[0], "coords": slide[1], **change}
    tiles = write(tmp_path / f"a{suffix}", **{name: array for name, array in arrays.items() if array is not None})
    assert_refuses(tiles, weights, message)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_encode_slide_refuses_embeddings_that_are_not_finite(
    tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path, value: float
) -> None:
    slide[0][11, 3] = value
    tiles = write(tmp_path / "a.pt", embeddings=slide[0], coords=slide[1])
    assert_refuses(tiles, weights, f"embeddings must be finite, got {value} at embeddings[11, 3]\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype=float8"], "--dtype must be one of float32, bfloat16, float16, got 'float8'"),
        (["--arch=large"], "--arch must be one of gigapath_slide_enc12l768d, "),
        (["--tile-size=0"], "Invalid value for '--tile-size': "),
        (["--slide-ngrids=-1"], "Invalid value for '--slide-ngrids': "),
        (["--max-wsi-size=255"], "--tile-size must be in [1, 63], a quarter of --max-wsi-size=255, got 256"),
        (["--device=nothing"], "--device must be a device that torch can use here, got 'nothing'"),
        (["--random"], "--weights must name a checkpoint, or --random be given in its place, got both"),
        (["--output=/nowhere/a.pt"], "--output must be a file in a folder that can be written, got '/nowhere/a.pt'"),
        (["--output=a.txt"], "--output must end in .pt or .npz, got 'a.txt'"),
        (["--weights=/nowhere"], "--weights must be a file that exists, got '/nowhere'"),
    ],
)
def test_encode_slide_refuses_options(
    tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path, arguments: list[str], message: str
) -> None:
    assert_refuses(write(tmp_path / "a.pt", features=slide[0], coords=slide[1]), weights, message, *arguments)


def test_encode_slide_needs_weights(tmp_path: Path, slide: tuple[Tensor, Tensor]) -> None:
    message = "error: --weights must name a checkpoint, or --random be given in its place, got neither\n"
    assert run(write(tmp_path / "a.pt", features=slide[0], coords=slide[1])) == (2, "", message)


def test_encode_slide_refuses_files_that_are_none(tmp_path: Path, weights: Path) -> None:
    assert_refuses(tmp_path / "a.pt", weights, "TILES must be a file that exists, got '")
    (tmp_path / "a.csv").write_text("1,2")
    assert_refuses(tmp_path / "a.csv", weights, "TILES must end in .pt, .h5, .npz, got '")


@pytest.mark.parametrize("suffix", [".pt", ".npz", pytest.param(".h5", marks=needs_h5py)])
@pytest.mark.parametrize("kept", [0, 5, 0.5, 0.9])
def test_encode_slide_refuses_damaged_tiles(
    tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path, suffix: str, kept: float
) -> None:
    tiles = write(tmp_path / f"a{suffix}", features=slide[0], coords=slide[1])
    whole = tiles.read_bytes()
    tiles.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    assert_refuses(tiles, weights, f"TILES must be a whole {suffix} file without pickled objects, got '")


def test_encode_slide_unpickles_no_objects(tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path) -> None:
    message = "TILES must be a whole {} file without pickled objects, got '"
    torch.save({"features": slide[0], "coords": slide[1], "more": Path("x")}, tmp_path / "a.pt")
    assert_refuses(tmp_path / "a.pt", weights, message.format(".pt"))
    np.savez(tmp_path / "a.npz", features=np.array([{}], dtype=object), coords=slide[1].numpy())
    assert_refuses(tmp_path / "a.npz", weights, message.format(".npz"))
    torch.save(slide[0], tmp_path / "b.pt")
    assert_refuses(tmp_path / "b.pt", weights, "TILES must hold coords and one of")
    torch.save({"features": slide[0].tolist(), "coords": slide[1]}, tmp_path / "c.pt")
    assert_refuses(tmp_path / "c.pt", weights, "features must be a dense array, got list")


@needs_h5py
def test_encode_slide_refuses_a_group_of_h5(tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["coords"] = slide[1].numpy()
        file.create_group("features")
    assert_refuses(tmp_path / "a.h5", weights, "features must be a dense array, got no array")


def test_encode_slide_names_the_extra_without_h5py(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_h5py(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "h5py":
            raise ModuleNotFoundError("No module named 'h5py'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_h5py)
    (tmp_path / "a.h5").write_bytes(b"\x89HDF")
    code, _, err = run(tmp_path / "a.h5", f"--weights={weights}")
    assert code == 2
    assert err == (f"error: TILES must be .pt or .npz where h5py is not installed, got '{tmp_path / 'a.h5'}'; pip install h5py\n")


def test_encode_slide_refuses_weights_that_do_not_fit(tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path) -> None:
    tiles = write(tmp_path / "a.pt", features=slide[0], coords=slide[1])
    message = "--weights must be a whole checkpoint that fits --arch and the tile embeddings, got '"
    whole = weights.read_bytes()
    for damaged in (b"", whole[:5], whole[: len(whole) // 2], whole[:-100], b"text " * 99, b"\x80\x02}q\x00."):
        weights.write_bytes(damaged)
        assert_refuses(tiles, weights, message)
    state = build().state_dict()
    torch.save(state, weights)
    assert_refuses(tiles, weights, message)
    del state["cls_token"]
    torch.save({"model": state}, weights)
    assert_refuses(tiles, weights, message)
    torch.save({"model": {**state, "cls_token": "text"}}, weights)
    assert_refuses(tiles, weights, message)


def test_encode_slide_overwrites_only_when_told_and_never_its_input(
    tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path
) -> None:
    tiles = write(tmp_path / "a.pt", features=slide[0], coords=slide[1])
    before = tiles.read_bytes()
    output = tmp_path / "b.pt"
    output.write_text("earlier")
    assert_refuses(tiles, weights, f"--output must not exist, got '{output}'; use --overwrite", f"--output={output}")
    assert output.read_text() == "earlier"
    same = "--output must be another file than TILES and --weights, got '"
    assert_refuses(tiles, weights, same, f"--output={tiles}", "--overwrite")
    assert tiles.read_bytes() == before
    folder = tmp_path / "folder.pt"
    folder.mkdir()
    assert_refuses(tiles, weights, "--output must be a file in a folder", f"--output={folder}", "--overwrite")
    assert run(tiles, f"--weights={weights}", f"--output={output}", "--overwrite")[0] == 0
    assert list(torch.load(output, weights_only=True)) == ["slide_embed"]


def test_encode_slide_leaves_nothing_when_writing_fails(
    tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    tiles = write(tmp_path / "a.pt", features=slide[0], coords=slide[1])
    output = tmp_path / "a.slide.pt"
    assert_refuses(tiles, weights, f"--output must be a file that can be written, got '{output}': No space left on device\n")


def test_encode_slide_refuses_a_result_that_is_not_finite(tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path) -> None:
    tiles = write(tmp_path / "a.pt", features=slide[0] * 1e5, coords=slide[1])  # float16 ends at 65504
    message = "slide_embed must be finite, got nan with --dtype=float16; use bfloat16 or float32\n"
    assert_refuses(tiles, weights, message, "--dtype=float16")


def test_encode_slide_says_that_memory_does_not_suffice(
    tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(LongNetViT, "forward", exhausted)
    tiles = write(tmp_path / "a.pt", features=slide[0], coords=slide[1])
    message = "--device=cpu must have the memory for 53 tiles in float32: CUDA out of memory.\n"
    assert_refuses(tiles, weights, message)


@pytest.mark.gpu
def test_encode_slide_on_cuda_equals_the_cpu(tmp_path: Path, slide: tuple[Tensor, Tensor], weights: Path) -> None:
    tiles = write(tmp_path / "a.pt", features=slide[0], coords=slide[1])
    code, out, _ = run(tiles, f"--weights={weights}", "--device=cuda")
    assert code == 0
    assert "GiB on cuda" in out
    actual = torch.load(tmp_path / "a.slide.pt", weights_only=True)["slide_embed"]
    torch.testing.assert_close(actual, expect(load(weights), slide)[0], **SINGLE)
