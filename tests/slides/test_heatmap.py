"""What the class token or a tile reads: the weights that the encoder itself uses, and the files of them."""

import csv
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from numpy.polynomial.legendre import leggauss

from flexdilated import attention_map
from flexdilated.slides import class_relevance, grid_cells, read_tiles, tile_relevance, write_table
from tests.commands import invoke
from tests.slides.encoder import DEPTH, EMBED, GRIDS, HEADS, TILE_SIZE, draw_slides, encoder_model, hidden_states, norm
from tests.slides.tools import SIDE, draw_tiles, write_lazyslide, write_trident
from tests.tolerances import EXACT, SINGLE

N = 53


@pytest.mark.parametrize("tile", [None, 31])
def test_relevance_is_the_rollout_over_its_value_under_equal_scores(tile: int | None) -> None:
    model = encoder_model()
    x, coords = draw_slides(1, N)
    states = hidden_states(model, x, coords)
    row = torch.zeros(2, 1 + N, dtype=torch.float64)
    row[:, 0 if tile is None else 1 + tile] = 1.0
    for layer in reversed(range(DEPTH)):
        block = model.encoder.layers[layer]
        h = norm(states[layer], block.self_attn_layer_norm)
        q, k = (p(h).unflatten(-1, (HEADS, -1)) for p in (block.self_attn.q_proj, block.self_attn.k_proj))
        for i, scores in enumerate((1.0, 0.0)):
            attention = attention_map(q * scores, k, model.pattern, queries=range(1 + N))[0].mean(dim=0)
            row[i] = (row[i] + row[i] @ attention) / 2
    found = tile_relevance(model, x[0], coords[0], tile=tile)
    torch.testing.assert_close(found, row[0, 1:] / row[1, 1:], **EXACT)
    assert not model.encoder.layers[0].self_attn.q_proj._forward_pre_hooks
    with pytest.raises(ValueError, match=r"tile must be in \[0, N=53\), got 53"):
        tile_relevance(model, x[0], coords[0], tile=N)
    with pytest.raises(ValueError, match="model must be in evaluation mode"):
        tile_relevance(model.train(), x[0], coords[0])


def test_relevance_of_a_model_with_an_order_is_that_of_the_tiles_as_given() -> None:
    model = encoder_model(order="hilbert")
    cells = torch.randperm(GRIDS**2)[:N]
    x, coords = draw_slides(1, N)[0][0], torch.stack([cells % GRIDS, cells // GRIDS], dim=-1) * TILE_SIZE
    shuffled = torch.randperm(N)
    for tile in (None, 7):
        expected = tile_relevance(model, x, coords, tile=tile)
        other = None if tile is None else int((shuffled == tile).nonzero()[0, 0])
        actual = tile_relevance(model, x[shuffled], coords[shuffled], tile=other)
        torch.testing.assert_close(actual, expected[..., shuffled], **EXACT)


def test_relevance_for_a_class_adds_up_to_the_change_of_its_score() -> None:
    model, head = encoder_model(order="hilbert"), torch.nn.Linear(EMBED, 3).double()
    x, coords = (part[0] for part in draw_slides(1, N))

    def score(tiles: torch.Tensor) -> torch.Tensor:
        logits = head(model(tiles[None], coords[None])[0])[0]
        return logits[1] - (logits[0] + logits[2]) / 2

    found = class_relevance(model, head, x, coords, index=1)
    torch.testing.assert_close(found.sum(), (score(x) - score(0 * x)).detach(), atol=1e-4, rtol=1e-3)
    # The mean over more points, by differences of the score along each tile.
    tile, step, total = 7, 1e-5, 0.0
    along = torch.zeros_like(x)
    along[tile] = step * x[tile]
    with torch.no_grad():
        for t, weight in zip(*leggauss(16)):
            middle = (1 + t) / 2 * x
            total += weight / 2 * (score(middle + along) - score(middle - along)).item() / (2 * step)
    torch.testing.assert_close(found[tile].item(), total, atol=1e-4, rtol=1e-3)
    for layer in model.encoder.layers:
        assert "forward" not in vars(layer)
        assert layer.self_attn.attention.pattern == model.pattern
    with pytest.raises(ValueError, match=re.escape("index must be in [0, classes=3), of at least two classes, got 3")):
        class_relevance(model, head, x, coords, index=3)
    with pytest.raises(ValueError, match="model must be in evaluation mode"):
        class_relevance(model.train(), head, x, coords, index=1)


def test_tables_hold_every_tile(tmp_path: Path) -> None:
    coords = torch.tensor([[37, 411], [549, 411]])
    columns = {"layer 0, head 1": torch.tensor([0.25, 0.5]), "b": torch.tensor([1.0, 0.0])}
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
    with pytest.raises(ValueError, match=r"table must end in \.csv, \.geojson, got 'a\.txt'"):
        write_table(Path("a.txt"), coords, SIDE, columns)
    for more, message in (
        ({"b": torch.ones(3)}, "b must be (N,) finite numbers for N=2, got (3,)"),
        ({"b": torch.tensor([1.0, torch.nan])}, "b must be (N,) finite numbers for N=2, got (2,)"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            write_table(tmp_path / "a.geojson", coords, SIDE, {**columns, **more})
    with pytest.raises(ValueError, match=re.escape("tile_ids must be (N,) finite numbers for N=2, got (1,)")):
        write_table(tmp_path / "a.geojson", coords, SIDE, columns, tile_ids=torch.tensor([1]))
    assert len(json.loads((tmp_path / "a.geojson").read_text())["features"]) == 2


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from flexdilated.slides.gigapath import ARCHITECTURES, create_model

    monkeypatch.setitem(ARCHITECTURES, "tiny", (64, 2))
    torch.save({"model": create_model(None, "tiny", 7).state_dict()}, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


def run(weights: Path, *more: object) -> tuple[int, str, str]:
    tiles = write_trident(weights.parent, "slide", *draw_tiles(N))
    return invoke("slides", "map", tiles, f"--weights={weights}", "--arch=tiny", "--device=cpu", *more)


def test_map_slide_writes_tables(weights: Path) -> None:
    table = weights.with_name("map.geojson")
    code, out, err = run(weights, f"--output={table}", "--tile=5")
    assert (code, err) == (0, "")
    assert out == f"wrote 1 map of 53 tiles to '{table}'\n"
    assert list(json.loads(table.read_text())["features"][0]["properties"]["measurements"]) == ["relevance"]


needs_zarr = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("zarr", "pyarrow")), reason="needs zarr and pyarrow, of the extra 'slides'"
)


@needs_zarr
def test_a_tile_is_asked_for_by_the_id_that_lazyslide_gave_it(weights: Path) -> None:
    from flexdilated.slides.gigapath import create_model

    path, table = write_lazyslide(weights.parent, "slide", *draw_tiles(N)), weights.with_name("map.csv")
    fixed = ("slides", "map", path, f"--weights={weights}", "--arch=tiny", "--device=cpu", f"--output={table}")
    assert invoke(*fixed, "--tile=5")[0] == 0
    slide = read_tiles(path)
    assert slide.tile_ids is not None
    row = slide.tile_ids.tolist().index(5)
    assert row != 5
    expected = tile_relevance(create_model(str(weights), "tiny", 7).eval(), slide.x, grid_cells(slide) * 256, tile=row)
    with table.open(newline="") as file:
        found = {int(tile): float(value) for tile, _, _, value in list(csv.reader(file))[1:]}
    actual = torch.tensor([found[tile] for tile in slide.tile_ids.tolist()])
    torch.testing.assert_close(actual, expected, **SINGLE)
    code, _, err = invoke(*fixed, "--tile=99", "--overwrite")
    assert (code, err) == (2, "error: --tile must be a tile_id of the slide, got 99\n")


@pytest.mark.slow
def test_map_slide_lays_a_thumbnail_where_the_size_of_the_slide_is_known(weights: Path) -> None:
    from matplotlib.image import imsave

    picture, thumbnail = weights.with_name("map.png"), weights.with_name("thumbnail.png")
    imsave(thumbnail, torch.rand(29, 29, 3).numpy())
    code, _, err = run(weights, f"--output={picture}", f"--thumbnail={thumbnail}")
    assert code == 2
    assert "--thumbnail must come with --slide-size where the file does not say how large the slide is, as '" in err
    assert run(weights, f"--output={picture}", f"--thumbnail={thumbnail}", f"--slide-size={29 * SIDE},{29 * SIDE}")[0] == 0
    before = picture.read_bytes()
    assert before.startswith(b"\x89PNG")
    tiles = write_trident(weights.parent, "slide", *draw_tiles(N), level0_height=29 * SIDE)
    fixed = ("slides", "map", tiles, f"--weights={weights}", "--arch=tiny", "--device=cpu", f"--thumbnail={thumbnail}")
    assert invoke(*fixed, f"--output={picture}")[1:] == (
        "",
        f"error: --output must not exist, got '{picture}'; use --overwrite or another name\n",
    )
    fixed = (*fixed[:-1], "--overwrite", fixed[-1])
    assert invoke(*fixed, f"--output={picture}")[0] == 0
    assert picture.read_bytes() == before
    for text in (b"no picture", thumbnail.read_bytes()[:50]):
        broken = weights.with_name("broken.png")
        broken.write_bytes(text)
        code, _, err = invoke(*fixed[:-1], f"--thumbnail={broken}", f"--output={picture}")
        assert code == 2
        assert err.startswith("error: ")
        assert picture.read_bytes() == before
    code, _, err = invoke(*fixed, f"--output={thumbnail}")
    assert (code, err) == (2, f"error: --output must be another file than --thumbnail, got '{thumbnail}'\n")


def test_map_slide_takes_what_encode_slides_takes(weights: Path) -> None:
    from flexdilated.slides.gigapath import create_model

    model = create_model(None, "tiny", 7, tile_size=128, max_wsi_size=4096, slide_ngrids=60, order="hilbert").eval()
    torch.save({"model": model.state_dict(), "order": "hilbert", "pattern": model.pattern.to_dict()}, weights)
    x, coords = draw_tiles(N)
    table = weights.with_name("map.csv")
    coords = torch.cat([coords, coords[:1] + 3])
    tiles = write_trident(weights.parent, "slide", torch.cat([x, x[:1]]), coords)
    fixed = ("slides", "map", tiles, f"--weights={weights}", "--arch=tiny", "--device=cpu", f"--output={table}")
    sizes = ("--tile-size=128", "--max-wsi-size=4096", "--slide-ngrids=60", "--order=hilbert")
    code, _, err = invoke(*fixed, *sizes)
    assert code == 2
    assert "would put 54 tiles in 53 cells of 512 pixels" in err
    assert invoke(*fixed, *sizes, "--shared-cells")[0] == 0
    expected = tile_relevance(model, torch.cat([x, x[:1]]), coords // SIDE * 128)
    with table.open(newline="") as file:
        actual = torch.tensor([float(row[3]) for row in list(csv.reader(file))[1:]])
    torch.testing.assert_close(actual, expected, **SINGLE)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--output=a.jpg"], "--output must end in one of .png, .pdf, .svg, .csv, .geojson, got 'a.jpg'"),
        (["--output=a.png", "--tile=53"], "must be in [0, N=53), got 53"),
        (["--output=a.png", "--slide-size=5,5"], "--slide-size must be width,height and come with --thumbnail, got '5,5'"),
        (["--output=a.png", "--magnification=40"], "says that its tiles were embedded at magnification 20, --magnification is 40"),
    ],
)
def test_map_slide_refuses_what_it_cannot_draw(weights: Path, more: list[str], message: str) -> None:
    code, _, err = run(weights, *more)
    assert code == 2
    assert message in err
    assert not Path("a.png").exists()
