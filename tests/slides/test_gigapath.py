"""Prov-GigaPath's published encoders: the original's outputs, names and weights."""

import argparse
import pickle
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern
from flexdilated.slides import gigapath
from flexdilated.slides.gigapath import ARCHITECTURES, create_model
from tests.tolerances import SINGLE

GOLDEN_FILE = Path(__file__).parents[1] / "golden" / "gigapath.npz"
IN_CHANS = 7


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


@pytest.mark.slow
@torch.inference_mode()
def test_slide_encoder_equals_the_original() -> None:
    with torch.device("meta"):  # no initial values, which take longer than what is tested
        model = create_model(None, "gigapath_slide_enc12l768d", 1536, global_pool=True).eval()
    model.load_state_dict(golden_weights(model.state_dict()), assign=True)
    with np.load(GOLDEN_FILE) as golden:
        expected, seed = (torch.from_numpy(golden[f"n1069/{name}"]) for name in ("out", "seed"))
    torch.testing.assert_close(torch.cat(model(*golden_slide(1069, int(seed)))), expected, **SINGLE)


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
    assert model.encoder.dropout.p == 0.25
    assert [layer.dropout.path_p for layer in model.encoder.layers] == pytest.approx([0.1 * i / 11 for i in range(12)])
    assert model.encoder.layer_norm.eps == 1e-5


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
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
    with pytest.raises(ValueError, match=r"^pretrained must hold exactly the weights of the model, got others: ") as caught:
        create_model(file, "small", IN_CHANS)
    for name in ("cls_token", "norm.bias", "decoder.weight", "mask_token", "size mismatch for norm.weight"):
        assert name in str(caught.value)
    torch.save({"model": {f"other.{name}": value for name, value in small.items()}}, file)
    with pytest.raises(ValueError, match=r"got others: Error.* \[\.\.\.\]$") as caught:
        create_model(file, "small", IN_CHANS)
    assert len(str(caught.value)) < 600
    torch.save({"model": small}, file)
    with pytest.raises(ValueError, match=re.escape("size mismatch for patch_embed.proj.weight")):
        create_model(file, "small", IN_CHANS + 1)


@pytest.mark.parametrize("without", ["head.bias", "classes"])
def test_a_classifier_without_a_part_of_it_is_refused(small: dict[str, Tensor], without: str, tmp_path: Path) -> None:
    parts = {f"encoder.{name}": value for name, value in small.items()} | {
        "head.weight": torch.ones(2, 32),
        "head.bias": torch.ones(2),
    }
    torch.save({"model": {name: part for name, part in parts.items() if name != without}}, tmp_path / "c.pth")
    with pytest.raises((KeyError, ValueError), match=without):
        gigapath.read_checkpoint(tmp_path / "c.pth")


WITHOUT = "pretrained must hold a state dict of tensors under 'model', got {} in"


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"state_dict": {}, "args": 1}, ValueError, WITHOUT.format("['args', 'state_dict']")),
        ([1], ValueError, WITHOUT.format("list")),
        *(({"model": weights}, ValueError, WITHOUT.format("['model']")) for weights in (3, {"a": 1})),
        ({"args": argparse.Namespace(epochs=3)}, pickle.UnpicklingError, "argparse.Namespace"),
        ({"pattern": None}, TypeError, "pattern must be "),
        ({"pattern": {"segment_lengths": 5, "dilation_rates": 2}}, TypeError, "segment_lengths must be "),
    ],
    ids=str,
)
def test_create_model_refuses_a_file_without_a_model(
    small: dict[str, Tensor], content: object, error: type[Exception], message: str, tmp_path: Path
) -> None:
    is_more = isinstance(content, dict) and message[:4] != "pret"
    torch.save({"model": small, **content} if is_more else content, tmp_path / "weights.pth")
    with pytest.raises(error, match=re.escape(message)):
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


def test_architectures_have_torchscale_names_and_sizes() -> None:
    assert {name: tuple(sizes) for name, sizes in ARCHITECTURES.items() if "512" in name or "mlp2" in name} == {
        "LongNet_8_layers_256_dim_mlp2": (256, 8, 16, 2.0, 3),
        "LongNet_12_layers_256_dim_mlp2": (256, 12, 16, 2.0, 3),
        "LongNet_12_layers_512_dim": (512, 12, 8, 2.0, 3),
    }
    named = {name: sizes for name, sizes in ARCHITECTURES.items() if name.startswith("LongNet")}
    assert len(named) == 18
    for name, sizes in named.items():
        depth, embed_dim = (int(part) for part in name.split("_")[1:4:2])
        assert sizes[:2] == (embed_dim, depth)
    with torch.device("meta"):
        model = create_model(None, "LongNet_8_layers_256_dim_mlp2", 5)
    layer = model.encoder.layers[0]
    assert (len(model.encoder.layers), layer.self_attn.num_heads, layer.ffn.fc1.out_features) == (8, 16, 512)
    # torchscale pairs its segments with its rates, of which that configuration has three.
    assert model.pattern == DilatedPattern.torchscale((1024, 5792, 32768), (1, 2, 4))


def test_weights_belong_to_an_order_and_a_pattern(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ARCHITECTURES, "small", (32, 1))
    curved = create_model(None, "small", 5, order="hilbert")
    path = str(tmp_path / "weights.pth")
    torch.save({"model": curved.state_dict()}, path)
    with pytest.raises(ValueError, match="order must be that of the weights=None, got 'hilbert'; weights are trained in one order"):
        create_model(path, "small", 5, order="hilbert")
    pattern = DilatedPattern((7,), (1,))
    torch.save({"model": curved.state_dict(), "order": "hilbert", "pattern": pattern.to_dict()}, path)
    with pytest.raises(ValueError, match="order must be that of the weights='hilbert', got None"):
        create_model(path, "small", 5)
    with pytest.raises(ValueError, match=re.escape(f"pattern must be that of the weights={pattern}, got DilatedPattern(")):
        create_model(path, "small", 5, order="hilbert")
    loaded = create_model(path, "small", 5, order="hilbert", pattern=pattern)
    assert (loaded.order, loaded.pattern) == ("hilbert", pattern)
