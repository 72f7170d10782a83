"""What the class token or a tile reads: the weights that the encoder itself uses, and the files of them."""

import csv
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdilated import attention_map
from flexdilated.hub.slides import tile_attention, write_table
from tests.commands import invoke
from tests.hub.slides.tools import SIDE, draw_tiles, write_trident
from tests.hub.test_slide_encoder import DEPTH, GRIDS, HEADS, TILE_SIZE, draw_slides, encoder_model, hidden_states, norm
from tests.tolerances import EXACT

N = 53


@pytest.mark.parametrize("tile", [None, 0, 31])
def test_weights_are_those_of_the_layers(tile: int | None) -> None:
    model = encoder_model()
    x, coords = draw_slides(1, N)
    states = hidden_states(model, x, coords)
    found = tile_attention(model, x[0], coords[0], layers=[0, 2], tile=tile)
    assert found.shape == (2, HEADS, N)
    for layer, actual in zip((0, 2), found):
        block = model.encoder.layers[layer]
        h = norm(states[layer], block.self_attn_layer_norm)
        q, k = (p(h).unflatten(-1, (HEADS, -1)) for p in (block.self_attn.q_proj, block.self_attn.k_proj))
        expected = attention_map(q, k, model.pattern, queries=0 if tile is None else 1 + tile)[0, :, 0, 1:]
        torch.testing.assert_close(actual, expected, **EXACT)
    last = tile_attention(model, x[0], coords[0], tile=tile)
    torch.testing.assert_close(last[0], found[1], **EXACT)
    assert not model.encoder.layers[0].self_attn.q_proj._forward_hooks


def test_weights_of_a_model_with_an_order_are_those_of_the_tiles_as_given() -> None:
    model = encoder_model(order="hilbert")
    cells = torch.randperm(GRIDS**2)[:N]
    x, coords = draw_slides(1, N)[0][0], torch.stack([cells % GRIDS, cells // GRIDS], dim=-1) * TILE_SIZE
    shuffled = torch.randperm(N)
    for tile in (None, 7):
        expected = tile_attention(model, x, coords, tile=tile)
        other = None if tile is None else int((shuffled == tile).nonzero()[0, 0])
        actual = tile_attention(model, x[shuffled], coords[shuffled], tile=other)
        torch.testing.assert_close(actual, expected[..., shuffled], **EXACT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [DEPTH]}, "layers must be ascending integers in [0, depth=3), got [3]"),
        ({"layers": [1, 0]}, "layers must be ascending integers in [0, depth=3), got [1, 0]"),
        ({"layers": []}, "layers must be ascending integers"),
        ({"tile": N}, "tile must be in [0, N=53), got 53"),
    ],
)
def test_layers_and_tiles_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    x, coords = draw_slides(1, N)
    with pytest.raises(ValueError, match=re.escape(message)):
        tile_attention(encoder_model(), x[0], coords[0], **options)
    with pytest.raises(ValueError, match="model must be in evaluation mode"):
        tile_attention(encoder_model().train(), x[0], coords[0])


def test_tables_hold_every_tile(tmp_path: Path) -> None:
    coords, columns = (
        torch.tensor([[37, 411], [549, 411]]),
        {"layer 0, head 1": torch.tensor([0.25, 0.5]), "b": torch.tensor([1.0, 0.0])},
    )
    write_table(tmp_path / "a.geojson", coords, SIDE, columns, tile_ids=torch.tensor([7, 3]))
    found = json.loads((tmp_path / "a.geojson").read_text())
    assert found["type"] == "FeatureCollection"
    first, second = found["features"]
    assert first["geometry"] == {"type": "Polygon", "coordinates": [[[37, 411], [549, 411], [549, 923], [37, 923], [37, 411]]]}
    assert first["properties"] == {"objectType": "tile", "name": "7", "measurements": {"layer 0, head 1": 0.25, "b": 1.0}}
    assert second["properties"]["measurements"] == {"layer 0, head 1": 0.5, "b": 0.0}
    write_table(tmp_path / "a.csv", coords, SIDE, columns)
    with (tmp_path / "a.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["tile_id", "x", "y", "layer 0, head 1", "b"],
            ["0", "37", "411", "0.25", "1.0"],
            ["1", "549", "411", "0.5", "0.0"],
        ]
    with pytest.raises(ValueError, match=r"table must end in \.csv, \.parquet, \.geojson, got 'a\.txt'"):
        write_table(Path("a.txt"), coords, SIDE, columns)
    if importlib.util.find_spec("pyarrow"):
        import pyarrow.parquet

        write_table(tmp_path / "a.parquet", coords, SIDE, columns)
        table = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pydict()
        assert table == {"tile_id": [0, 1], "x": [37, 549], "y": [411, 411], "layer 0, head 1": [0.25, 0.5], "b": [1.0, 0.0]}


# -- the command --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from flexdilated.hub.gigapath import ARCHITECTURES, create_model

    monkeypatch.setitem(ARCHITECTURES, "tiny", (64, 2))
    torch.save({"model": create_model(None, "tiny", 7).state_dict()}, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


def run(weights: Path, *more: object) -> tuple[int, str, str]:
    tiles = write_trident(weights.parent, "slide", *draw_tiles(N))
    return invoke("map-slide", tiles, f"--weights={weights}", "--arch=tiny", "--device=cpu", *more)


def test_map_slide_writes_pictures_and_tables(weights: Path) -> None:
    picture, table = weights.with_name("map.png"), weights.with_name("map.geojson")
    code, out, err = run(weights, f"--output={picture}", "--head=0,3", "--layer=0,1", "--tile=5")
    assert (code, out, err) == (0, f"wrote 4 maps of 53 tiles to '{picture}'\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(weights, f"--output={table}", "--head=each", "--layer=0,1")[0] == 0
    features = json.loads(table.read_text())["features"]
    assert len(features) == N
    names = list(features[0]["properties"]["measurements"])
    assert names == [f"layer {layer}, head {head}" for layer in (0, 1) for head in range(16)]
    assert 0.5 < sum(feature["properties"]["measurements"]["layer 1, head 2"] for feature in features) < 1.0
    assert run(weights, f"--output={table}")[0] == 0
    assert list(json.loads(table.read_text())["features"][0]["properties"]["measurements"]) == ["layer 1, mean of heads"]


def test_map_slide_needs_weights(tmp_path: Path) -> None:
    tiles = write_trident(tmp_path, "slide", *draw_tiles(N))
    assert invoke("map-slide", tiles, "--output=a.png") == (2, "", "error: --weights must name a checkpoint, got none\n")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--output=a.jpg"], "--output must end in one of .png, .pdf, .svg, .csv, .parquet, .geojson, got 'a.jpg'"),
        (["--output=a.png", "--layer=2"], "layers must be ascending integers in [0, depth=2), got [2]"),
        (["--output=a.png", "--head=16"], "--head must be mean, each, or in [0, 16), got '16'"),
        (["--output=a.png", "--head=x"], "--head must be integers separated by commas, got 'x'"),
        (["--output=a.png", "--tile=53"], "must be in [0, N=53), got 53"),
        (["--output=a.png", "--thumbnail=none.png"], "--thumbnail must be a file that exists, got 'none.png'"),
        (["--output=a.png", "--slide-size=5,5"], "--slide-size must be width,height and come with --thumbnail, got '5,5'"),
        (["--output=a.png", "--tile-size-level0=100"], "slide.h5' says that a tile has 512 pixels at level 0"),
        (["--output=a.png", "--arch=huge"], "--arch must be one of "),
        (["--output=a.png", "--coords=x", "--weights=none"], "--weights must be a file that exists, got 'none'"),
    ],
)
def test_map_slide_refuses_what_it_cannot_draw(weights: Path, more: list[str], message: str) -> None:
    code, _, err = run(weights, *more)
    assert code == 2
    assert message in err
    assert not Path("a.png").exists()
