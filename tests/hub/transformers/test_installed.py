"""What is said where the transformers library is missing or too old; the library is not needed for it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import flexdilated

ROOT = Path(flexdilated.__file__).parent


def load() -> ModuleType:
    """The module by its file: its package imports the library."""
    spec = importlib.util.spec_from_file_location("installed", ROOT / "hub" / "transformers" / "installed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers must be installed, 5\.12 or newer.*flexdilated\[transformers\]"):
        load().check_installed()


@pytest.mark.parametrize("version", ["4.57.1", "5.11.0"])
def test_an_old_library_is_told_what_works(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "transformers", with_version(version))
    with pytest.raises(ImportError, match=rf"transformers must be 5\.12 or newer, got {version}; use pip install -U"):
        load().check_installed()


@pytest.mark.parametrize("version", ["5.12.0", "5.23.0.dev0", "6.0"])
def test_versions_from_the_lowest_on_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "transformers", with_version(version))
    load().check_installed()


def with_version(version: str) -> ModuleType:
    module = ModuleType("transformers")
    module.__version__ = version  # type: ignore[attr-defined]
    return module


def test_pyproject_declares_the_lowest_version() -> None:
    project = ROOT.parent / "pyproject.toml"
    if not project.exists():
        pytest.skip("the sources are not here")
    lowest = ".".join(map(str, load().LOWEST))
    assert f'transformers = ["transformers>={lowest}"]' in project.read_text()
