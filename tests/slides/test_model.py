"""Prov-GigaPath's slide encoder: its formula, coordinates, padding, what it refuses."""

import math
import re

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from flexdilated.slides.gigapath import LongNetViT, tile_positions
from tests.slides.encoder import DEPTH, GRIDS, TILE_SIZE, TILES, draw_slides, encoder_model, hidden_states, norm, position
from tests.tolerances import EXACT, NAIVE_FACTOR


@pytest.mark.parametrize("global_pool", [False, True])
def test_slide_encoder_equals_its_formula(global_pool: bool) -> None:
    model = encoder_model(global_pool=global_pool)
    x, coords = draw_slides(2)
    states = hidden_states(model, x, coords)

    def pool(tokens: Tensor) -> Tensor:
        return norm(tokens[:, 1:].mean(1) if global_pool else tokens[:, 0], model.norm)

    layers = model(x, coords, all_layer_embed=True)
    assert len(layers) == DEPTH + 1
    for actual, state in zip(layers, states):
        torch.testing.assert_close(actual, pool(state), **EXACT)
    (out,) = model(x, coords)
    torch.testing.assert_close(out, pool(norm(states[-1], model.encoder.layer_norm)), **EXACT)
    for actual, state in zip(model(x, coords, True, return_tokens=True), states):
        torch.testing.assert_close(actual, state, **EXACT)
    (tokens,) = model(x, coords, return_tokens=True)
    torch.testing.assert_close(tokens, norm(states[-1], model.encoder.layer_norm), **EXACT)
    torch.testing.assert_close(model.pool(tokens), out, **EXACT)


def test_tile_positions_equal_their_formula() -> None:
    cells = torch.tensor([[[0, 0], [3, 11], [11, 3]], [[999, 0], [0, 999], [1_000_003, 997]]])
    expected = torch.tensor([[position(column, row, 20) for column, row in slide] for slide in cells.tolist()], dtype=torch.float64)
    actual = tile_positions(cells, 20)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=1e-7, rtol=0.0)  # float32's rounding of numbers up to 1


def test_slide_encoder_reaches_every_parameter() -> None:
    model = encoder_model().train()
    x, coords = draw_slides(2)
    model(x, coords)[0].square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    unused = {name for name, parameter in model.named_parameters() if not parameter.grad.any()}
    assert not {name for name in unused if not name.endswith("k_proj.bias")}  # a constant added to every score: gradient near 0


def test_coordinates_are_cells_of_the_tile_size() -> None:
    model = encoder_model(tile_size=224, max_wsi_size=896)
    x, _ = draw_slides(1, 5)
    corners = torch.tensor([[[0, 0], [223, 224], [224, 223], [447, 448], [GRIDS * 224 - 1, 0]]])
    same_cells = torch.tensor([[[223.5, 0], [0, 447], [447, 0], [224.9, 671], [GRIDS * 224 - 224, 223]]])
    assert torch.equal(model(x, corners)[0], model(x, same_cells)[0])
    moved = corners.clone()
    moved[0, 1, 1] -= 1
    assert not torch.equal(model(x, corners)[0], model(x, moved)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coordinates_keep_their_cells_in_a_half_precision_model(dtype: torch.dtype) -> None:
    model = encoder_model(slide_ngrids=1000)
    x, coords = draw_slides()
    coords += 256_000 - GRIDS * TILE_SIZE  # beyond float16, and where bfloat16 counts in steps of 1024
    coords[0, 0] = 255_999
    single, half = model.float()(x.float(), coords)[0], model.to(dtype)(x.to(dtype), coords)[0]
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), single, atol=NAIVE_FACTOR * 4 * torch.finfo(dtype).eps, rtol=0.0)
    assert torch.equal(half, model(x.to(dtype), coords // TILE_SIZE * TILE_SIZE)[0])
    assert not torch.equal(half, model(x.to(dtype), coords - TILE_SIZE)[0])


@pytest.mark.parametrize("value", [-1, GRIDS * TILE_SIZE, math.nan, 1e30])
def test_coordinates_outside_the_grid_are_refused(value: float) -> None:
    model = encoder_model()
    x, coords = draw_slides(2, 5)
    coords = coords if isinstance(value, int) else coords.double()
    coords[1, 3, 0] = value
    message = f"coords must lie in [0, slide_ngrids * tile_size={GRIDS * TILE_SIZE}), got {value} at coords[1, 3, 0]"
    with pytest.raises(ValueError, match=re.escape(message)):
        model(x, coords)
    coords[1, 3, 0] = GRIDS * TILE_SIZE - 1
    model(x, coords)


@pytest.mark.parametrize("global_pool", [False, True])
def test_slides_with_padding_give_what_each_gives_alone(global_pool: bool) -> None:
    model = encoder_model(global_pool=global_pool)
    x, coords = draw_slides(4)
    mask = torch.arange(TILES) >= torch.tensor([[46], [TILES], [1], [17]])
    mask[3] = mask[3].flip(0)  # padding may stand anywhere
    padded = x.masked_fill(mask[..., None], math.nan)
    outside = coords.double().masked_fill(mask[..., None], math.nan)
    layers = model(padded, outside, True, padding_mask=mask)
    tokens = model(padded, outside, True, padding_mask=mask, return_tokens=True)
    (out,) = model(padded, outside, padding_mask=mask)
    assert len(layers) == len(tokens) == DEPTH + 1
    for b, kept in enumerate(~mask):
        alone = x[b, kept][None], coords[b, kept][None]
        torch.testing.assert_close(out[b], model(*alone)[0][0], **EXACT)
        for layer, expected in zip(layers, model(*alone, True)):
            torch.testing.assert_close(layer[b], expected[0], **EXACT)
        places = torch.cat([torch.tensor([True]), kept])
        for layer, expected in zip(tokens, model(*alone, True, return_tokens=True)):
            torch.testing.assert_close(layer[b, places], expected[0], **EXACT)
            assert not layer[b, ~places].any()
    for layer, expected in zip(tokens, layers):
        torch.testing.assert_close(model.pool(layer, mask), expected, **EXACT)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(1, 5, 6)}, ValueError, "x must have shape (B, N, in_chans=7) with B and N at least 1, got (1, 5, 6)"),
        ({"x": torch.zeros(1, 0, 7)}, ValueError, "x must have shape (B, N, in_chans=7) with B and N at least 1, got (1, 0, 7)"),
        ({"coords": torch.zeros(1, 4, 2)}, ValueError, "coords must have shape (B, N, 2)=(1, 5, 2), got (1, 4, 2)"),
        ({"coords": torch.zeros(1, 5, 2).half()}, TypeError, "coords must be integer, float32 or float64"),
        ({"padding_mask": torch.zeros(1, 5)}, TypeError, "padding_mask must be bool, True where there is no tile, got torch"),
        ({"padding_mask": torch.zeros(5).bool()}, ValueError, "padding_mask must have shape (B, N)=(1, 5), got (5,)"),
        ({"padding_mask": torch.ones(1, 5).bool()}, ValueError, "padding_mask must leave every slide a tile, got none for slide 0"),
    ],
)
def test_slide_encoder_refuses_what_it_cannot_encode(change: dict[str, object], error: type[Exception], message: str) -> None:
    x, coords = draw_slides(1, 5)
    with pytest.raises(error, match=re.escape(message)):
        encoder_model()(**{"x": x, "coords": coords, **change})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_chans": 0}, "in_chans must be an integer of at least 1, got 0"),
        ({"tile_size": 256.0}, "tile_size must be an integer of at least 1, got 256.0"),
        ({"max_wsi_size": True}, "max_wsi_size must be an integer of at least 1, got True"),
        ({"tile_size": 1025}, "tile_size must be in [1, 256], a quarter of max_wsi_size=1024, got 1025"),
        ({"embed_dim": 18}, "embed_dim must be a multiple of 4, got 18"),
        ({"num_heads": 5}, "num_heads must divide embed_dim=24, got 5"),
        ({"dropout": 1.0}, "dropout_p must be in [0, 1), got 1.0"),
        ({"drop_path_rate": -0.1}, "drop_path_rate must be in [0, 1), got -0.1"),
    ],
)
def test_slide_encoder_refuses_sizes_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        encoder_model(**options)


def test_slide_encoder_is_initialised_as_the_original() -> None:
    model = LongNetViT(in_chans=101, embed_dim=160, depth=2)
    for projection in (module for module in model.modules() if isinstance(module, nn.Linear)):
        limit = math.sqrt(6 / (projection.in_features + projection.out_features))
        assert 0.99 * limit < projection.weight.abs().max().item() <= limit
        assert not projection.bias.any()
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.2)  # 160 samples: the standard error is 6 %


@pytest.mark.slow
def test_compiles_as_one_graph_for_any_number_of_tiles() -> None:
    model = encoder_model(order="hilbert", depth=1)
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for count in (40, 57):
        x, coords = draw_slides(1, count)
        torch.testing.assert_close(compiled(x, coords)[0], model(x, coords)[0], **EXACT)
    with pytest.raises(RuntimeError, match=r"coords must lie in \[0, slide_ngrids \* tile_size="):
        compiled(x, coords + 10**9)
    assert graphs.frame_count <= 2  # one for the first number, one for all others
