"""Mutants of a file: copies with one operator, number, condition or name changed, and a loader that gives one to its importers."""

from __future__ import annotations

import ast
import copy
import importlib.abc
import importlib.machinery
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMED = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "amin": "amax",
    "amax": "amin",
    "any": "all",
    "all": "any",
}


@dataclass(frozen=True)
class Mutant:
    """A change of the node at a place among all mutants of a file."""

    file: str
    place: int
    line: int
    span: tuple[int, int]  # the lines of its statement
    text: str  # of its own line: it stays where lines move
    change: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What a survivor is kept under."""
        return self.file, self.text, self.change

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """What computes: no annotations, decorators, messages of errors or words."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for node in value if isinstance(value, list) else [value]:
            words = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if (
                isinstance(node, ast.AST)
                and not words
                and not isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom))
            ):
                yield node
                yield from _walk(node)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """The node after every change that it may take."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare):
        for i, each in enumerate(new.ops):
            other = copy.deepcopy(new)
            other.ops[i] = COMPARED[type(each)]()
            yield other
    elif isinstance(new, (ast.BinOp, ast.AugAssign)) and type(new.op) in COMPUTED:
        new.op = COMPUTED[type(new.op)]()
        yield new
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, (ast.Not, ast.USub, ast.Invert)):
        yield new.operand
    elif isinstance(new, ast.IfExp):
        new.body, new.orelse = new.orelse, new.body
        yield new
    elif isinstance(new, ast.Constant) and type(new.value) is bool:
        yield ast.Constant(not new.value)
    elif isinstance(new, ast.Constant) and type(new.value) is int:
        yield ast.Constant(new.value + 1)
    elif isinstance(new, ast.Name) and new.id in NAMED and isinstance(new.ctx, ast.Load):
        new.id = NAMED[new.id]
        yield new
    elif isinstance(new, ast.Attribute) and new.attr in NAMED and isinstance(new.ctx, ast.Load):
        new.attr = NAMED[new.attr]
        yield new


def mutants(file: str) -> list[Mutant]:
    """Every mutant of a file, in its order. A change that its line, or one of the same text, has had before bears a number."""
    found: list[Mutant] = []
    source = (ROOT / file).read_text()
    lines, tree = source.splitlines(), ast.parse(source)
    spans = _spans(tree)
    times: Counter[tuple[str, str]] = Counter()
    for node in _walk(tree):
        for new in _changed(node):
            before, after = (" ".join(ast.unparse(each).split()) for each in (node, new))
            line = getattr(node, "lineno", 0)
            text, change = lines[line - 1].strip(), f"{before}  ->  {after}"
            times[text, change] += 1
            numbered = change if times[text, change] == 1 else f"{change}  #{times[text, change]}"
            found.append(Mutant(file, len(found), line, spans[node], text, numbered))
    return found


def unchanged(file: str) -> Mutant:
    """No mutant, for what must hold of it."""
    return Mutant(file, -1, 0, (0, 0), "", "")


def _spans(tree: ast.Module) -> dict[ast.AST, tuple[int, int]]:
    """First and last line of the statement around every node; of one that holds others, of what stands before them."""
    spans: dict[ast.AST, tuple[int, int]] = {}

    def visit(node: ast.AST, span: tuple[int, int]) -> None:
        if isinstance(node, ast.stmt):
            inner = [each.lineno for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
            span = node.lineno, max(node.lineno, min(inner) - 1) if inner else node.end_lineno or node.lineno
        spans[node] = span
        for each in ast.iter_child_nodes(node):
            visit(each, span)

    visit(tree, (1, 1))
    return spans


def mutated(mutant: Mutant) -> ast.Module:
    """The file's tree under a mutant."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    place, target, replacement = 0, None, None
    for node in list(_walk(tree)):
        for new in _changed(node):
            if place == mutant.place:
                target, replacement = node, ast.copy_location(new, node)
            place += 1

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return replacement if node is target else self.generic_visit(node)

    return ast.fix_missing_locations(Replace().visit(tree))


class Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module under a mutant; all others come from where they always do."""

    def __init__(self, mutant: Mutant) -> None:
        self.path = str(ROOT / mutant.file)
        self.module = mutant.file.removesuffix(".py").replace("/", ".")
        self.code = compile(mutated(mutant), self.path, "exec")

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=self.path)

    def exec_module(self, module: object) -> None:
        vars(module)["__file__"] = self.path
        exec(self.code, vars(module))
