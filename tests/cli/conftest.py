"""A small slide encoder for the commands that encode slides."""

from pathlib import Path

import pytest
import torch

from flexdilated.slides.gigapath import ARCHITECTURES, Architecture, create_model
from tests.slides.tools import DEPTH, EMBED, IN_CHANS, SIZES


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "tiny", Architecture(EMBED, DEPTH))


@pytest.fixture
def weights(tmp_path: Path, tiny: None) -> Path:
    model = create_model(None, "tiny", IN_CHANS, **SIZES)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    torch.save({"model": model.state_dict()}, tmp_path / "slide_encoder.pth")
    return tmp_path / "slide_encoder.pth"
