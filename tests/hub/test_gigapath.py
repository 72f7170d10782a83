import argparse
import math
import pickle
import re
import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdilated import DilatedPattern, reference
from flexdilated.hub import gigapath
from flexdilated.hub.encoder import BranchDropout, LongNetEncoder
from flexdilated.hub.gigapath import ARCHITECTURES, LongNetViT, create_model, tile_positions
from tests.tolerances import EXACT, NAIVE_FACTOR, SINGLE

GOLDEN_FILE = Path(__file__).parents[1] / "golden" / "gigapath.npz"
IN_CHANS, EMBED, HEADS, DEPTH = 7, 24, 3, 3
# Segments of 1024, 362, 128, 45 and 16 tokens: at 53 tiles most are ragged, and 8 does not divide 45.
WSI_SIZE, TILE_SIZE, GRIDS = 1024, 256, 29
TILES = 53
PATTERN = DilatedPattern.torchscale((5, 11), (1, 2))


def encoder_model(**options: object) -> LongNetViT:
    """In float64 and evaluation mode, with biases and gains that differ from zeros and ones."""
    sizes = {"in_chans": IN_CHANS, "embed_dim": EMBED, "depth": DEPTH, "num_heads": HEADS}
    grid = {"slide_ngrids": GRIDS, "tile_size": TILE_SIZE, "max_wsi_size": WSI_SIZE}
    model = LongNetViT(**{**sizes, **grid, "norm_eps": 0.1, **options}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def draw_slides(batch: int = 1, num_tiles: int = TILES) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, num_tiles, IN_CHANS, dtype=torch.float64), torch.randint(GRIDS * TILE_SIZE, (batch, num_tiles, 2))


def position(column: int, row: int, embed_dim: int) -> list[float]:
    """MAE's sin-cos position of a cell, one number at a time; the row of the original's table is `column * slide_ngrids + row`."""
    quarter = embed_dim // 4
    frequencies = [1 / 10000 ** (i / quarter) for i in range(quarter)]
    return [f(cell * frequency) for cell in (row, column) for f in (math.sin, math.cos) for frequency in frequencies]


def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)


def hidden_states(model: LongNetViT, x: Tensor, coords: Tensor) -> list[Tensor]:
    """The encoder written out, with attention as the dense definition computes it."""
    cells = [[position(c // TILE_SIZE, r // TILE_SIZE, EMBED) for c, r in slide] for slide in coords.tolist()]
    # Positions are held in float32, as in the original's table.
    x = x @ model.patch_embed.proj.weight.T + model.patch_embed.proj.bias + torch.tensor(cells, dtype=torch.float32)
    x = torch.cat([model.cls_token.expand(x.shape[0], 1, EMBED), x], dim=1)
    states = [x]
    for layer in model.encoder.layers:
        attention, h = layer.self_attn, norm(x, layer.self_attn_layer_norm)
        q, k, v = (p(h).unflatten(-1, (HEADS, -1)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        pattern = DilatedPattern.gigapath(WSI_SIZE, TILE_SIZE)
        h, _ = reference.dilated_attention(q, k, v, pattern, is_causal=False, scale=(EMBED // HEADS) ** -0.5)
        x = x + attention.out_proj(norm(h.flatten(2), attention.inner_attn_ln))
        h = F.gelu(layer.ffn.fc1(norm(x, layer.final_layer_norm)))
        x = x + layer.ffn.fc2(norm(h, layer.ffn.ffn_layernorm))
        states.append(x)
    return states


# -- against the original ------------------------------------------------------------------------------------------------------


def golden_weights(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    filled = {}
    for name, value in state_dict.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        random = torch.randn(value.shape, generator=generator) * 0.02
        filled[name] = random + 1 if name.endswith("weight") and value.dim() == 1 else random
    return filled


def golden_slide(num_tiles: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tiles = torch.randn(1, num_tiles, 1536, generator=generator)
    cells = torch.randperm(120 * 120, generator=generator)[:num_tiles].sort().values
    return tiles, torch.stack([cells // 120 + 30, cells % 120 + 400], -1)[None].float() * 256


@pytest.fixture(scope="module")
def published() -> LongNetViT:
    """The published configuration, with the weights of the golden file."""
    model = create_model(None, "gigapath_slide_enc12l768d", 1536, global_pool=True)
    model.load_state_dict(golden_weights(model.state_dict()))
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("num_tiles", [300, 1069])
def test_slide_encoder_equals_the_original(published: LongNetViT, num_tiles: int) -> None:
    with np.load(GOLDEN_FILE) as golden:
        out, layers, seed = (golden[f"n{num_tiles}/{key}"] for key in ("out", "layers", "seed"))
    x, coords = golden_slide(num_tiles, int(seed))
    with torch.inference_mode():
        (actual,) = published(x, coords)
        actual_layers = published(x, coords.long(), all_layer_embed=True)
    torch.testing.assert_close(actual, torch.from_numpy(out), **SINGLE)
    torch.testing.assert_close(torch.cat(actual_layers), torch.from_numpy(layers), **SINGLE)


def test_slide_encoder_has_the_names_of_the_published_weights() -> None:
    with torch.device("meta"):
        model = create_model("", "gigapath_slide_enc12l768d", 1536)
    modules = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj", "inner_attn_ln")]
    modules += ["self_attn_layer_norm", "final_layer_norm", "ffn.fc1", "ffn.fc2", "ffn.ffn_layernorm"]
    modules = [f"encoder.layers.{i}.{name}" for i in range(12) for name in modules]
    modules += ["encoder.layer_norm", "norm", "patch_embed.proj"]
    expected = {"cls_token", *(f"{name}.{part}" for name in modules for part in ("weight", "bias"))}
    assert len(expected) == 247
    assert set(model.state_dict()) == expected
    assert sum(parameter.numel() for parameter in model.parameters()) == 86_330_880
    assert model.encoder.layers[0].self_attn.head_dim == 48
    assert model.norm.eps == 1e-6
    assert model.encoder.layer_norm.eps == 1e-5


@pytest.mark.parametrize(("arch", "embed_dim", "depth"), [("24l1024d", 1024, 24), ("12l1536d", 1536, 12)])
def test_create_model_builds_the_other_sizes(arch: str, embed_dim: int, depth: int) -> None:
    with torch.device("meta"):
        model = create_model(None, f"gigapath_slide_enc{arch}", 1536)
    assert (model.embed_dim, len(model.encoder.layers)) == (embed_dim, depth)
    layer = model.encoder.layers[-1]
    assert (layer.self_attn.num_heads, layer.ffn.fc1.out_features) == (16, 4 * embed_dim)


# -- what it computes ----------------------------------------------------------------------------------------------------------


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


def test_slide_encoder_returns_the_tokens_that_it_pools() -> None:
    model = encoder_model(global_pool=True)
    x, coords = draw_slides(2)
    states = hidden_states(model, x, coords)
    for actual, state in zip(model(x, coords, True, return_tokens=True), states):
        torch.testing.assert_close(actual, state, **EXACT)
    (tokens,) = model(x, coords, return_tokens=True)
    torch.testing.assert_close(tokens, norm(states[-1], model.encoder.layer_norm), **EXACT)
    torch.testing.assert_close(model.pool(tokens), model(x, coords)[0], **EXACT)


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


# -- coordinates ---------------------------------------------------------------------------------------------------------------


def test_coordinates_give_the_same_in_every_dtype_that_holds_them() -> None:
    model = encoder_model()
    x, _ = draw_slides()
    coords = torch.randint(256, (1, TILES, 2))
    expected = model(x, coords)[0]
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.float32, torch.float64):
        assert torch.equal(model(x, coords.to(dtype))[0], expected)


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


@pytest.mark.parametrize("value", [-1, -0.5, GRIDS * TILE_SIZE, math.nan, math.inf, -math.inf, 1e30])
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


# -- batches and padding -------------------------------------------------------------------------------------------------------


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


def test_slides_without_padding_give_what_each_gives_alone() -> None:
    model = encoder_model()
    x, coords = draw_slides(3)
    (out,) = model(x, coords)
    (masked,) = model(x, coords, padding_mask=torch.zeros(3, TILES, dtype=torch.bool))
    assert torch.equal(out, masked)
    for b in range(3):
        torch.testing.assert_close(out[b : b + 1], model(x[b : b + 1], coords[b : b + 1])[0], **EXACT)


# -- what is refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(5, IN_CHANS)}, ValueError, "x must have shape (B, N, in_chans=7) with B and N at least 1, got (5, 7)"),
        ({"x": torch.zeros(1, 5, 6)}, ValueError, "x must have shape (B, N, in_chans=7) with B and N at least 1, got (1, 5, 6)"),
        ({"x": torch.zeros(1, 0, 7)}, ValueError, "x must have shape (B, N, in_chans=7) with B and N at least 1, got (1, 0, 7)"),
        ({"x": [[0.0]]}, TypeError, "x must be a tensor, got list"),
        (
            {"x": torch.zeros(1, 5, 7)},
            TypeError,
            "x must have the dtype of the model=torch.float64 outside autocast, got torch.float32",
        ),
        ({"coords": torch.zeros(1, 4, 2)}, ValueError, "coords must have shape (B, N, 2)=(1, 5, 2), got (1, 4, 2)"),
        ({"coords": None}, TypeError, "coords must be a tensor, got NoneType"),
        ({"coords": torch.zeros(1, 5, 2).half()}, TypeError, "coords must be integer, float32 or float64"),
        ({"coords": torch.zeros(1, 5, 2).bfloat16()}, TypeError, "whatever the dtype of the model, got torch.bfloat16"),
        ({"coords": torch.zeros(1, 5, 2).bool()}, TypeError, "got torch.bool"),
        (
            {"padding_mask": torch.zeros(1, 5)},
            TypeError,
            "padding_mask must be bool, True where there is no tile, got torch.float32",
        ),
        ({"padding_mask": torch.zeros(5).bool()}, ValueError, "padding_mask must have shape (B, N)=(1, 5), got (5,)"),
        ({"padding_mask": [True]}, TypeError, "padding_mask must be a tensor, got list"),
        ({"padding_mask": torch.ones(1, 5).bool()}, ValueError, "padding_mask must leave every slide a tile, got none for slide 0"),
        ({"coords": torch.zeros(1, 5, 2, device="meta")}, ValueError, "coords must be on the device of the model=cpu, got meta"),
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
        ({"depth": 0}, "depth must be an integer of at least 1, got 0"),
        ({"slide_ngrids": 0}, "slide_ngrids must be an integer of at least 1, got 0"),
        ({"tile_size": 256.0}, "tile_size must be an integer of at least 1, got 256.0"),
        ({"max_wsi_size": True}, "max_wsi_size must be an integer of at least 1, got True"),
        ({"tile_size": 1025}, "tile_size must be in [1, max_wsi_size=1024], got 1025"),
        ({"embed_dim": 18}, "embed_dim must be a multiple of 4, got 18"),
        ({"num_heads": 5}, "num_heads must divide embed_dim=24, got 5"),
        ({"dropout": 1.0}, "dropout must be in [0, 1), got 1.0"),
        ({"drop_path_rate": -0.1}, "drop_path_rate must be in [0, 1), got -0.1"),
    ],
)
def test_slide_encoder_refuses_sizes_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        encoder_model(**options)


# -- precision and training ----------------------------------------------------------------------------------------------------


def test_slide_encoder_takes_half_precision_embeddings_under_autocast() -> None:
    model = encoder_model().float()
    x, coords = draw_slides()
    expected = model(x.float(), coords)[0]
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(x.half(), coords)[0]
    torch.testing.assert_close(actual.float(), expected, atol=NAIVE_FACTOR * 4 * torch.finfo(torch.bfloat16).eps, rtol=0.0)


def test_slide_encoder_starts_in_training_mode_with_the_dropout_of_the_original() -> None:
    with torch.device("meta"):
        model = create_model(None, "gigapath_slide_enc12l768d", 1536)
    assert model.training
    assert model.encoder.dropout.p == 0.25
    assert [layer.dropout.p for layer in model.encoder.layers] == [0.25] * 12
    assert [layer.dropout.path_p for layer in model.encoder.layers] == pytest.approx([0.1 * i / 11 for i in range(12)])
    assert [layer.self_attn.attention.dropout_p for layer in model.encoder.layers] == [0.0] * 12


def test_create_model_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "small", (32, 2))
    options = {"global_pool": True, "slide_ngrids": 17, "tile_size": 64, "backend": "reference"}
    model = create_model(None, "small", 5, max_wsi_size=4096, dropout=0.5, drop_path_rate=0.3, **options)
    assert (model.global_pool, model.slide_ngrids, model.tile_size, model.in_chans) == (True, 17, 64, 5)
    assert model.encoder.layers[1].dropout.path_p == 0.3
    assert model.encoder.layers[1].dropout.p == model.encoder.dropout.p == 0.5
    attention = model.encoder.layers[0].self_attn.attention
    assert (attention.pattern, attention.backend) == (DilatedPattern.gigapath(4096, 64), "reference")


def test_slide_encoder_is_initialised_as_the_original() -> None:
    model = LongNetViT(in_chans=101, embed_dim=160, depth=2)
    for projection in (module for module in model.modules() if isinstance(module, nn.Linear)):
        limit = math.sqrt(6 / (projection.in_features + projection.out_features))
        assert 0.99 * limit < projection.weight.abs().max().item() <= limit
        assert not projection.bias.any()
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.2)  # 160 samples: the standard error is 6 %


def test_branch_dropout_drops_whole_samples_and_scales_the_rest() -> None:
    module = BranchDropout(0.0, 0.3)
    x = torch.randn(1009, 3, 5)
    assert torch.equal(module.eval()(x), x)
    y = module.train()(x)
    dropped = (y == 0).all(dim=(1, 2))
    assert dropped.float().mean().item() == pytest.approx(0.3, abs=0.05)  # the standard error is 0.014
    torch.testing.assert_close(y[~dropped], x[~dropped] / 0.7, **SINGLE)
    y = BranchDropout(0.4, 0.3)(x.abs() + 1)
    alive = y[(y != 0).any(dim=2).any(dim=1)]
    assert (alive == 0).float().mean().item() == pytest.approx(0.4, abs=0.03)
    torch.testing.assert_close(y.mean() / (x.abs() + 1).mean(), torch.tensor(1.0), atol=0.06, rtol=0.0)


# -- weights -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Weights of an architecture named `small`."""
    monkeypatch.setitem(ARCHITECTURES, "small", (32, 1))
    return create_model(None, "small", IN_CHANS).state_dict()


def test_create_model_loads_the_weights_of_a_file(small: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / gigapath.WEIGHTS_FILE
    torch.save({"model": small, "epoch": 3}, file)
    for pretrained in (file, str(file)):
        loaded = create_model(pretrained, "small", IN_CHANS).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in small.items())
    assert not torch.equal(create_model("", "small", IN_CHANS).cls_token, small["cls_token"])


def test_create_model_lists_the_weights_that_do_not_fit(small: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    weights = {name: value for name, value in small.items() if name not in ("cls_token", "norm.bias")}
    weights |= {"decoder.weight": torch.zeros(2), "mask_token": torch.zeros(3), "norm.weight": torch.ones(31)}
    torch.save({"model": weights}, file)
    message = (
        "pretrained must hold exactly the weights of the model, got missing: cls_token, norm.bias; "
        "unexpected: decoder.weight, mask_token; of another shape: norm.weight (31,) for (32,)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        create_model(file, "small", IN_CHANS)
    torch.save({"model": small}, file)
    with pytest.raises(ValueError, match=re.escape("of another shape: patch_embed.proj.weight (32, 7) for (32, 8)")):
        create_model(file, "small", IN_CHANS + 1)


@pytest.mark.parametrize(
    ("content", "found"), [({"state_dict": {}, "args": 1}, "['args', 'state_dict']"), ([1], "list"), ({"model": 3}, "['model']")]
)
def test_create_model_refuses_a_file_without_a_model(content: object, found: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=re.escape(f"pretrained must hold a state dict under 'model', got {found} in")):
        create_model(tmp_path / "weights.pth", "gigapath_slide_enc12l768d", 1536)


def test_create_model_runs_no_code_from_a_file(small: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({"model": small, "args": argparse.Namespace(epochs=3)}, tmp_path / "weights.pth")
    with pytest.raises(pickle.UnpicklingError, match=re.escape("argparse.Namespace")):
        create_model(tmp_path / "weights.pth", "small", IN_CHANS)


def test_create_model_refuses_what_it_cannot_find() -> None:
    with pytest.raises(
        ValueError, match=re.escape("download slide_encoder.pth from https://huggingface.co/prov-gigapath/prov-gigapath")
    ):
        create_model("hf_hub:prov-gigapath/prov-gigapath", "gigapath_slide_enc12l768d", 1536)
    with pytest.raises(
        FileNotFoundError, match=re.escape("pretrained must be the path of a file, None or '', no file at nowhere.pth")
    ):
        create_model("nowhere.pth", "gigapath_slide_enc12l768d", 1536)
    with pytest.raises(ValueError, match=re.escape("model_arch must be one of ['gigapath_slide_enc12l768d'")):
        create_model(None, "gigapath_slide_enc12l512d", 1536)


def test_import_of_the_package_leaves_published_models_out() -> None:
    models = ("encoder", "gigapath", "slide_encoder", "torchscale", "transformers")
    code = f"import sys, flexdilated; sys.exit(any(f'flexdilated.hub.{{name}}' in sys.modules for name in {models}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# -- the encoder by itself -----------------------------------------------------------------------------------------------------


def encoder(**options: object) -> LongNetEncoder:
    return LongNetEncoder(EMBED, 2, HEADS, PATTERN, **{"ffn_dim": 31, **options}).double().eval()


def test_encoder_of_packed_sequences_gives_what_each_gives_alone() -> None:
    module = encoder()
    x, borders = torch.randn(1, 23, EMBED, dtype=torch.float64), [0, 7, 20, 23]
    packed = module(x, cu_seqlens=torch.tensor(borders))
    alone = [module(x[:, a:b]) for a, b in pairwise(borders)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), **EXACT)


def test_encoder_passes_the_padding_mask_to_every_layer() -> None:
    module = encoder(layer_norm_eps=0.2)
    x = torch.randn(2, 23, EMBED, dtype=torch.float64)
    mask = torch.arange(23) >= torch.tensor([[19], [23]])
    expected = [x]
    for layer in module.layers:
        h = norm(expected[-1], layer.self_attn_layer_norm)
        y = expected[-1] + layer.self_attn(h, h, h, mask)[0]
        expected.append(y + layer.ffn(norm(y, layer.final_layer_norm)))
    for actual, state in zip(module.hidden_states(x, key_padding_mask=mask), expected, strict=True):
        torch.testing.assert_close(actual, state, **EXACT)
    torch.testing.assert_close(module(x, key_padding_mask=mask), norm(expected[-1], module.layer_norm), **EXACT)
    epsilons = {child.eps for child in module.modules() if isinstance(child, nn.LayerNorm)}
    assert epsilons == {0.2}


def test_encoder_initial_gains_are_those_of_sub_layer_norm() -> None:
    module = LongNetEncoder(96, 5, 3, PATTERN, ffn_dim=211)
    gamma = math.sqrt(math.log(10))
    for layer in module.layers:
        names = {"q_proj": 1.0, "k_proj": 1.0, "v_proj": gamma, "out_proj": gamma}
        gains = [(getattr(layer.self_attn, name), gain) for name, gain in names.items()]
        for projection, gain in [*gains, (layer.ffn.fc1, gamma), (layer.ffn.fc2, gamma)]:
            expected = gain * math.sqrt(2 / (projection.in_features + projection.out_features))
            assert projection.weight.std().item() == pytest.approx(expected, rel=0.05)


def test_encoder_compiles_as_one_graph() -> None:
    module = encoder()
    x = torch.randn(1, 23, EMBED, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(x), module(x), **EXACT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ffn_dim": 0}, "ffn_dim must be at least 1, got 0"),
        ({"dropout_p": 1.0}, "dropout_p must be in [0, 1), got 1.0"),
        ({"attention_dropout_p": 1.5}, "attention_dropout_p must be in [0, 1), got 1.5"),
        ({"drop_path_rate": 1.0}, "drop_path_rate must be in [0, 1), got 1.0"),
    ],
)
def test_encoder_refuses_options_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        encoder(**options)
    with pytest.raises(ValueError, match=re.escape("num_layers must be at least 1, got 0")):
        LongNetEncoder(EMBED, 0, HEADS, PATTERN)
