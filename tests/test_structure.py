"""The layers of the package: which folder imports from which, and what stays small."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import flexdilated

ROOT = Path(flexdilated.__file__).parents[1]
PACKAGE = ROOT / "flexdilated"
STRUCTURE = ROOT / "docs" / "structure.md"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))
MOST_ROOMS, MOST_LINES, MOST_ARGUMENTS, WIDE_FUNCTIONS = 10, 450, 12, 21

pytestmark = pytest.mark.skipif(not STRUCTURE.exists(), reason="needs the sources beside their docs")


def layers() -> list[str]:
    """The folders and files of the table's first column, in its order."""
    rows = re.findall(r"^\| (`.*?) \|", STRUCTURE.read_text(), flags=re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([\w.]+)/?`", row)]


def layer_of(file: str) -> str:
    """The folder or file at the top of the package that holds a file."""
    return file.split("/")[1]


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


@cache
def file_of(module: str) -> str | None:
    """The file of a module of the package, or None."""
    path = module.replace(".", "/")
    return next((name for name in (f"{path}.py", f"{path}/__init__.py") if (ROOT / name).exists()), None)


@cache
def imports(file: str) -> list[tuple[str, str]]:
    """`(file, name)` of whatever is imported from the package, at the top or inside a function."""
    found = []
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            found += [(held, "") for alias in node.names if alias.name.startswith("flexdilated") and (held := file_of(alias.name))]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "flexdilated":
            assert node.level == 0
            for alias in node.names:
                inner = file_of(f"{node.module}.{alias.name}")
                held = inner or file_of(node.module)
                assert held, f"{file} imports {node.module}.{alias.name}"
                found.append((held, "" if inner else alias.name))
    return found


def test_every_folder_and_file_at_the_top_is_in_the_table() -> None:
    assert sorted(layers()) == sorted({layer_of(file) for file in FILES} - {"__init__.py", "__main__.py"})


def test_a_folder_imports_only_from_rows_above_its_own() -> None:
    order = {"__init__.py": len(layers()), "__main__.py": len(layers())} | {name: i for i, name in enumerate(layers())}
    wrong = [
        f"{file} imports {found}" for file in FILES for found, _ in imports(file) if order[layer_of(found)] > order[layer_of(file)]
    ]
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    TopologicalSorter({file: {found for found, _ in imports(file)} - {file} for file in FILES}).prepare()  # raises CycleError


def rooms(folder: str) -> dict[str, set[str]]:
    """The files and folders in a folder, without `__init__.py`, each with the others that it imports."""
    room_of = {file: file.removeprefix(f"{folder}/").split("/")[0] for file in FILES if file.startswith(f"{folder}/")}
    imported: dict[str, set[str]] = {room: set() for room in room_of.values() if room != "__init__.py"}
    for file, room in room_of.items():
        if room in imported:
            imported[room] |= {room_of[other] for other, _ in imports(file) if other in room_of} & imported.keys() - {room}
    return imported


@pytest.mark.parametrize("folder", sorted({file.rpartition("/")[0] for file in FILES}))
def test_no_rooms_of_a_folder_import_each_other_in_a_circle(folder: str) -> None:
    TopologicalSorter(rooms(folder)).prepare()


def test_backends_has_few_rooms() -> None:
    names = {path.name for path in (PACKAGE / "backends").iterdir() if not path.name.startswith("__")}
    assert names > rooms("flexdilated/backends").keys()
    assert len(names) <= MOST_ROOMS


def test_every_file_that_the_page_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)`", STRUCTURE.read_text())
    assert not [name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()]


@pytest.mark.parametrize("record", sorted((ROOT / "docs" / "adr").glob("*.md")), ids=lambda path: path.stem)
def test_a_decision_names_what_exists(record: Path) -> None:
    text, sources = record.read_text(), "\n".join((ROOT / file).read_text() for file in FILES)
    paths = [name for name in re.findall(r"`([\w./-]+)`", text) if "/" in name or re.search(r"\.(py|md|json|toml|js)$", name)]
    links = [link for link in re.findall(r"\]\(([^)#:]+)", text) if not (record.parent / link).exists()]
    classes = re.findall(r"`([A-Z]\w*[a-z]\w*)`", text)
    assert not [path for path in paths if not (ROOT / path).exists()] + links
    assert not [name for name in classes if not re.search(rf"\b{name}\b", sources)]


def test_no_private_name_crosses_files() -> None:
    assert not {file: names for file in FILES if (names := private_names_of_others(file))}


def private_names_of_others(file: str) -> list[str]:
    """Names with one leading underscore that a file takes from another file of the package."""
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if file_of(f"{node.module}.{alias.name}")
    }
    taken = [name for _, name in imports(file)]
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            taken.append(node.attr)
    return [name for name in taken if name.startswith("_") and not name.startswith("__")]


def test_files_are_short() -> None:
    assert not [file for file in FILES if len((ROOT / file).read_text().splitlines()) > MOST_LINES]


def is_kernel(node: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(x) for x in node.decorator_list)


def test_few_functions_take_many_arguments() -> None:
    """Public signatures: everything behind them takes a Call. Kernels apart: what they are launched with has no structure."""
    wide = set()
    for file in FILES:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.FunctionDef) and not is_kernel(node):
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len([name for name in names if name not in ("self", "cls")]) > MOST_ARGUMENTS:
                    assert not node.name.startswith("_") or node.name == "__init__", f"{file}: {node.name}"
                    wide.add((file, node.name, node.lineno))
    assert len(wide) <= WIDE_FUNCTIONS


# Functions whose signatures are torch's or flash-attn's, and launches of kernels inside kernels (`triton.jit`), take their order.
FOREIGN = re.compile(r"aten\._|.*\._flash_attn_backward$|_\w+\.apply$")


def test_no_call_passes_more_than_six_values_by_position() -> None:
    long = []
    for file in FILES:
        kernels = [node for node in ast.walk(tree(file)) if isinstance(node, ast.FunctionDef) and is_kernel(node)]
        inside = {inner for kernel in kernels for inner in ast.walk(kernel)}
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call) and len(node.args) > 6 and node not in inside:
                name = ast.unparse(node.func)
                long += [] if FOREIGN.match(name) else [f"{file}:{node.lineno} {name}"]
    assert not long


def test_calls_are_built_by_keyword() -> None:
    built = [(file, node) for file in FILES for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
    named = [(file, node) for file, node in built if ast.unparse(node.func) in ("Call", "Piece")]
    assert len(named) > 5
    assert not [f"{file}:{node.lineno}" for file, node in named for value in node.args if not isinstance(value, ast.Starred)]


# Where `num_heads` means query heads; in `core` it is the old keyword, and a name in pinned schemas.
QUERY_HEADS = (
    *(f"flexdilated/{folder}/" for folder in ("backends/flex", "compat", "hub", "masks", "nn", "slides", "training")),
    *(f"flexdilated/{file}.py" for file in ("cli/refusal", "cli/train", "core/custom_op", "core/keywords", "reference")),
)


def test_num_heads_never_means_key_value_heads() -> None:
    named = [file for file in FILES if re.search(r"\bnum_heads\b", (ROOT / file).read_text())]
    assert not [file for file in named if not file.startswith(QUERY_HEADS)]
    assert not [place for place in QUERY_HEADS if not any(file.startswith(place) for file in named)]


def test_central_names_have_one_meaning() -> None:
    central = {"Plan", "Layout", "Rows", "Candidate", "Segments", "Call", "Case", "Kept", "Job"}
    made = [
        name.lstrip("_")
        for file in FILES
        for node in ast.walk(tree(file))
        for name in ([node.name] if isinstance(node, ast.ClassDef) else [ast.unparse(x) for x in getattr(node, "targets", ())])
    ]
    assert not [name for name in sorted(central) if made.count(name) > 1]


# Words that do not say what a value is.
PRONOUNS = {
    *("asked", "each", "every", "found", "given", "held", "kept", "one", "other", "others", "own", "rest", "second", "seen"),
    *("several", "some", "these", "those", "wanted", "what", "whole"),
}


def test_variables_are_nouns() -> None:
    named = [
        f"{name} in line {node.lineno} of {file}"
        for file in FILES
        for node in ast.walk(tree(file))
        for name in [node.arg if isinstance(node, ast.arg) else getattr(node, "id", "")]
        if name in PRONOUNS
        and not isinstance(getattr(node, "ctx", None), ast.Load)
        and not (name == "other" and isinstance(node, ast.arg))  # of __eq__
    ]
    assert not named
