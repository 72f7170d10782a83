"""Seeds, the gpu marker and the hypothesis profile."""

import os
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

# Spawned ranks import tests by name, and importlib mode leaves the root out of sys.path. Last, so that an installed package wins.
sys.path.append(str(Path(__file__).parents[1]))

hypothesis.settings.register_profile("flexdilated", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("flexdilated")


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed that every test starts from."""
    torch.manual_seed(2307)
    return 2307


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file to train on."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 101)
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))
