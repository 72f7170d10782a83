"""Adapters without their library, or with a version that was never tried."""

import importlib
import importlib.metadata
import sys
from unittest import mock

import pytest

from flexdilated.hub.requires import require


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("version", ["0.3.0", "0.3", "0.3.9", "0.3.0+cpu", "0.3.1.dev2"])
def test_require_accepts_versions_between_its_bounds(version: str) -> None:
    with mock.patch.object(importlib.metadata, "version", return_value=version):
        require("torchtitan", at_least="0.3", below="0.4", extra="torchtitan")


@pytest.mark.parametrize("version", ["0.2.9", "0.4", "0.4.0rc1", "0.10", "1.3.0"])
def test_require_says_which_versions_work(version: str) -> None:
    with (
        mock.patch.object(importlib.metadata, "version", return_value=version),
        pytest.raises(
            ImportError, match=rf"^torchtitan must be >=0\.3\.0,<0\.4, got {version}; pip install 'flexdilated\[torchtitan\]'$"
        ),
    ):
        require("torchtitan", at_least="0.3.0", below="0.4", extra="torchtitan")


def test_adapter_without_its_library_says_what_to_install() -> None:
    name = "flexdilated.hub.torchtitan"
    with mock.patch.dict(sys.modules), mock.patch.object(importlib.metadata, "version", missing):
        sys.modules.pop(name, None)
        install = r"pip install 'flexdilated\[torchtitan\]' under Python 3\.11 or newer"
        with pytest.raises(ImportError, match=f"^torchtitan must be installed, got none; {install}$"):
            importlib.import_module(name)


def test_a_package_may_have_no_upper_bound() -> None:
    for version in ("5.12.0", "5.23.0.dev0", "6.0"):
        with mock.patch.object(importlib.metadata, "version", return_value=version):
            require("transformers", at_least="5.12", extra="transformers")
    with (
        mock.patch.object(importlib.metadata, "version", return_value="5.11.0"),
        pytest.raises(ImportError, match=r"^transformers must be >=5\.12, got 5\.11\.0; pip install 'flexdilated"),
    ):
        require("transformers", at_least="5.12", extra="transformers")
