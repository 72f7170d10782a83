"""The site's reference: every public name has an entry."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import flexdilated

ROOT = Path(flexdilated.__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PUBLIC = (
    "flexdilated",
    "flexdilated.analysis",
    "flexdilated.compat",
    "flexdilated.decode",
    "flexdilated.distributed",
    "flexdilated.export",
    "flexdilated.hub.encoder",
    "flexdilated.hub.gigapath",
    "flexdilated.hub.slides",
    "flexdilated.hub.timm",
    "flexdilated.hub.torchscale",
    "flexdilated.hub.torchtitan",
    "flexdilated.hub.transformers",
    "flexdilated.masks",
    "flexdilated.nn",
    "flexdilated.ordering",
    "flexdilated.reference",
)

pytestmark = pytest.mark.skipif(not REFERENCE.exists(), reason="needs the sources beside their docs")


def public_names(module: str) -> set[str]:
    """What `__all__` lists, or else what a package imports for its users. Read, not imported: a hub's library may be missing."""
    path = ROOT / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname}


def entries() -> set[str]:
    """The dotted names that have an entry."""
    found = set()
    for page in REFERENCE.glob("*.md"):
        directives = re.findall(r"^\.\. (?:auto|py:)(\w+):: (\S+)\n((?:   .*\n)*)", page.read_text(), flags=re.MULTILINE)
        for kind, name, options in directives:
            members = re.search(r":members: (.+)", options) if kind == "module" else None
            found |= {f"{name}.{member}" for member in members[1].split(", ")} if members else {name}
    return found


def named(path: str) -> object:
    """The object of a dotted name, or None where its library is not installed."""
    module, _, rest = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), rest)
    except ImportError:
        return None


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_an_entry_in_the_reference(module: str) -> None:
    listed = entries()
    missing = {name for name in public_names(module) if f"{module}.{name}" not in listed}
    if missing:  # under the name of another module
        objects = [named(path) for path in listed]
        missing = {name for name in missing if not any(named(f"{module}.{name}") is each for each in objects if each is not None)}
    assert public_names(module)
    assert not missing
