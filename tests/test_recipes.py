"""The recipes of the page `docs/recipes.md`, run as they are printed there: `nox -s tests_recipes` installs what they need."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import flexdilated

PAGE = Path(flexdilated.__file__).parents[1] / "docs" / "recipes.md"

pytestmark = [
    pytest.mark.skipif(not PAGE.exists(), reason="needs the docs beside the package"),
    pytest.mark.filterwarnings("ignore"),  # of the trainers, about workers, loggers and devices
    pytest.mark.slow,
]


def program(name: str) -> str:
    """The Python block of the page under the heading of a library."""
    block = re.search(rf"^## {name}\n.*?^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert block is not None
    assert len(block[1].splitlines()) <= 32
    return block[1]


def check(found: dict[str, Any]) -> None:
    """That the losses fell, and the file holds the trained weights."""
    losses, model = found["losses"], found["model"]
    assert len(losses) == 20
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    loaded = flexdilated.LongNetLM.from_pretrained("longnet")
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


@pytest.mark.parametrize(("library", "package"), [("Lightning", "lightning"), ("Accelerate", "accelerate")])
def test_recipe_trains_and_saves(library: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package, reason="needs what nox -s tests_recipes installs")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(compile(program(library), str(PAGE), "exec"), found)
    check(found)
