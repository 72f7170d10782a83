"""The house: every file stands in the table of docs/structure.md, and imports only from lines above its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import flexdilated

ROOT = Path(flexdilated.__file__).parents[1]
PACKAGE = ROOT / "flexdilated"
STRUCTURE = ROOT / "docs" / "structure.md"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))
MOST_ENTRIES, MOST_LINES, MANY_LINES, MOST_ARGUMENTS, WIDE_FUNCTIONS = 22, 450, 300, 12, 21

pytestmark = pytest.mark.skipif(not STRUCTURE.exists(), reason="needs the sources beside their docs")


def table() -> list[str]:
    """The files of the table, in its order."""
    return re.findall(r"^\| `(flexdilated/[\w/]+\.py)`", STRUCTURE.read_text(), flags=re.MULTILINE)


def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def file_of(module: str) -> str | None:
    """The file of a module of the package, or None."""
    path = module.replace(".", "/")
    return next((name for name in (f"{path}.py", f"{path}/__init__.py") if (ROOT / name).exists()), None)


def imports(file: str) -> Iterator[tuple[str, str]]:
    """`(file, name)` of whatever is imported from the package, at the top or inside a function."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (found := file_of(alias.name)) and alias.name.split(".")[0] == "flexdilated":
                    yield found, ""
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "flexdilated":
            assert node.level == 0
            for alias in node.names:
                inner = file_of(f"{node.module}.{alias.name}")
                found = inner or file_of(node.module)
                assert found, f"{file} imports {node.module}.{alias.name}"
                yield found, "" if inner else alias.name


def test_every_file_has_one_line_in_the_table() -> None:
    assert sorted(table()) == [file for file in FILES if file not in ("flexdilated/__init__.py", "flexdilated/__main__.py")]
    assert len(set(table())) == len(table())


@pytest.mark.parametrize("file", table())
def test_a_file_imports_only_from_lines_above_its_own(file: str) -> None:
    order = table()
    above = set(order[: order.index(file)])
    below = {found for found, _ in imports(file)} - above - {"flexdilated/__init__.py"}
    assert not below


@pytest.mark.parametrize("file", FILES)
def test_no_private_name_crosses_files(file: str) -> None:
    private = [name for _, name in imports(file) if name.startswith("_") and not name.startswith("__")]
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if file_of(f"{node.module}.{alias.name}")
    }
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            private += [node.attr] if node.attr.startswith("_") and not node.attr.startswith("__") else []
    assert not private


def test_the_top_level_is_small() -> None:
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES


@pytest.mark.parametrize("file", FILES)
def test_a_long_file_says_why(file: str) -> None:
    lines = (ROOT / file).read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert len(lines) <= MANY_LINES or " Long: " in lines[0]


def test_few_functions_take_many_arguments() -> None:
    """Public signatures: everything behind them takes a Call. Kernels apart: what they are launched with has no structure."""
    wide = set()
    for file in FILES:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.FunctionDef) and not any("triton.jit" in ast.unparse(x) for x in node.decorator_list):
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len([name for name in names if name not in ("self", "cls")]) > MOST_ARGUMENTS:
                    assert not node.name.startswith("_") or node.name == "__init__", f"{file}: {node.name}"
                    wide.add((file, node.name, node.lineno))
    assert len(wide) <= WIDE_FUNCTIONS
