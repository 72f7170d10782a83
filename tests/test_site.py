"""The site: every public name has an entry in the reference, and code that pages show stands alone."""

import ast
import builtins
import importlib
import re
from pathlib import Path

import pytest

import flexdilated
from docs import outputs
from tests.release.api import entries

ROOT = Path(flexdilated.__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
PUBLIC = (
    "flexdilated",
    "flexdilated.analysis",
    "flexdilated.compat",
    "flexdilated.decode",
    "flexdilated.distributed",
    "flexdilated.export",
    "flexdilated.hub.encoder",
    "flexdilated.slides.gigapath",
    "flexdilated.slides",
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
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.asname for node in imports for alias in node.names if alias.asname and not alias.asname.startswith("_")}


def named(path: str) -> object:
    """The object of a dotted name, or None where its library is not installed."""
    module, _, rest = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), rest)
    except ImportError:
        return None


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_an_entry_in_the_reference(module: str) -> None:
    listed = entries(REFERENCE)
    missing = {name for name in public_names(module) if f"{module}.{name}" not in listed}
    if missing:  # under the name of another module
        objects = [named(path) for path in listed]
        missing = {name for name in missing if not any(named(f"{module}.{name}") is each for each in objects if each is not None)}
    assert public_names(module)
    assert not missing


def shown_code(page: Path) -> str:
    """The Python that a reader of a page sees and copies: its cells without those that are hidden."""
    cells = re.findall(r"^```\{code-cell\} python\n((?::[^\n]*\n)*)(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return "\n".join(code for options, code in cells if "remove-" not in options)


def unbound(code: str) -> set[str]:
    """Names that are read and bound nowhere in the code."""
    read, bound = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound


def test_unbound_names_are_found() -> None:
    assert unbound("import a.b as c\ndef f(x, *, y=q): return x + y + z\n[w for w in f(c)]") == {"q", "z"}
    assert unbound("with f() as g: print(g)\nfor i in g: pass\ntry: i\nexcept E as e: print(e, h := 1)") == {"f", "E"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT / "docs")))
def test_code_that_a_page_shows_stands_alone(page: Path) -> None:
    """Who copies every cell that is shown has all imports and definitions, whatever the hidden cells do."""
    assert unbound(shown_code(page)) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT / "docs")))
def test_code_that_a_page_shows_fits_its_box(page: Path) -> None:
    """Beside both columns of links on a screen of 1,400 pixels; more would be hidden behind a bar."""
    assert [line for line in shown_code(page).splitlines() if len(line) > 100] == []


@pytest.mark.parametrize(
    ("block", "printed", "kept", "faults"),
    [
        ("", "", "", 0),
        ("", "4\n", "\n```text\n4\n```\n", 1),
        ("\n```text\n4\n```\n", "4\n", "\n```text\n4\n```\n", 0),
        ("\n```text\n5\n```\n", "4\n", "\n```text\n4\n```\n", 1),
        ("\n```text\n5\n```\n", "", "", 1),
        ("\n```text numbers\n1.5e-3 s, at 0x7f\n```\n", "20 s,  at 0x8\n", "\n```text numbers\n1.5e-3 s, at 0x7f\n```\n", 0),
        ("\n```text numbers\n2 s\n```\n", "2 h\n", "\n```text numbers\n2 h\n```\n", 1),
        ("\n```text varies\nCPU\n```\n", "GPU\n", "\n```text varies\nCPU\n```\n", 0),
        ("\n```text varies\nCPU\n```\n", "", "", 1),
    ],
)
def test_kept_outputs_are_compared_with_what_ran(block: str, printed: str, kept: str, faults: int) -> None:
    cell, text = "```{code-cell} python\n:tags: [remove-input]\nprint(f())\n```\n", "\nA sentence.\n"
    page, found = outputs.check(cell + block + text + cell, [printed, ""])
    assert (page, len(found)) == (cell + kept + text + cell, faults)
    source = [page]
    outputs.hide(None, "page", source)
    assert "```text" not in source[0]
    assert source[0].count("\n") == page.count("\n")
    assert outputs.check(page, [printed])[1] != []


def test_outputs_of_a_cell_are_what_it_printed_and_its_values_but_no_pictures() -> None:
    stream = {"output_type": "stream", "name": "stdout", "text": ["a \n", "b\n"]}
    noise = {"output_type": "stream", "name": "stderr", "text": "c\n"}
    values = [{"data": {"text/plain": ["2"]}}, {"data": {"text/plain": "<Figure>", "image/png": ""}}]
    assert outputs.printed({"outputs": [stream, noise, *values, {**stream, "text": "b\n"}]}) == "a\nb\n2\n"
