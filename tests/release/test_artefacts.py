"""What earlier versions saved loads, and computes what it did: files of `save_artefacts.py`, one folder per version."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flexdilated import DilatedPattern, LongNetLM
from tests.release import save_artefacts
from tests.tolerances import SINGLE

ARTEFACTS = Path(__file__).parent / "artefacts"
VERSIONS = sorted(path for path in ARTEFACTS.iterdir() if path.is_dir())


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def saved(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def expected(saved: Path) -> dict[str, Tensor]:
    return load_file(saved / "expected.safetensors")


def test_there_are_artefacts_of_the_first_release_and_they_are_small() -> None:
    assert VERSIONS[0].name == "0.1.0"
    assert all(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) < 200_000 for path in VERSIONS)


@torch.no_grad()
def test_a_saved_language_model_gives_its_logits(saved: Path, expected: dict[str, Tensor]) -> None:
    model = LongNetLM.from_pretrained(saved / "longnet")
    assert model.config == save_artefacts.language_model().config
    torch.testing.assert_close(model(expected["tokens"]), expected["logits"], **SINGLE)


@torch.no_grad()
def test_a_state_dict_of_a_layer_gives_its_output(saved: Path, expected: dict[str, Tensor]) -> None:
    layer, x = save_artefacts.layer(), expected["x"]
    layer.load_state_dict(load_file(saved / "attention.safetensors"))
    torch.testing.assert_close(layer(x, x, x)[0], expected["attended"], **SINGLE)


@torch.no_grad()
def test_a_state_dict_of_a_slide_encoder_gives_its_embedding(saved: Path, expected: dict[str, Tensor]) -> None:
    model = save_artefacts.vision()
    model.load_state_dict(load_file(saved / "vision.safetensors"))
    torch.testing.assert_close(model(expected["tiles"], expected["coords"])[0], expected["embedded"], **SINGLE)


def test_a_pattern_is_what_it_was(saved: Path) -> None:
    values = json.loads((saved / "pattern.json").read_text())
    assert DilatedPattern.from_dict(values) == DilatedPattern.gigapath()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # of torch 2.9, on reading any program
def test_an_exported_program_gives_its_output(saved: Path, expected: dict[str, Tensor]) -> None:
    x = expected["x"]
    program = torch.export.load(saved / "attention.pt2").module()
    torch.testing.assert_close(program(x, x, x)[0], expected["attended"], **SINGLE)


@pytest.mark.slow
def test_a_checkpoint_goes_on(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "run", tmp_path / "run")
    (tmp_path / "run" / "dilated" / "model.safetensors").unlink()
    (tmp_path / "text.txt").write_bytes(save_artefacts.TEXT)
    code, _, error = save_artefacts.train(tmp_path / "run", tmp_path / "text.txt", "--resume")
    assert code == 0, error
    written, kept = (load_file(folder / "run" / "dilated" / "model.safetensors") for folder in (tmp_path, saved))
    assert written.keys() == kept.keys()
    assert all(torch.equal(written[name], kept[name]) for name in kept)
