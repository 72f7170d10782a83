"""Mutants: one small change of the integer core at a time, which the tests of that file must notice. `nox -s mutation` runs them.

A mutant is killed when a test fails under it, or when the tests take ten times the processor time that they take without it. What
survives stands in `survivors.json` with the reason why it computes the same; a survivor that does not is a hole in the tests. One
process imports torch and forks for every mutant, so that a mutant costs its tests and no more. Needs `os.fork`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.machinery
import json
import os
import random
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SURVIVORS = Path(__file__).with_name("survivors.json")
SEED = 20261122

# What is mutated, and the tests that must notice: the fastest first, since the first failure ends a run.
TESTS = {
    "flexdilated/pattern.py": ("tests/test_pattern.py",),
    "flexdilated/backends/pieces.py": ("tests/backends/test_pieces.py",),
    "flexdilated/backends/merge.py": ("tests/backends/test_merge.py",),
    "flexdilated/distributed/plan.py": ("tests/distributed/test_plan.py",),
    "flexdilated/distributed/spans.py": ("tests/distributed/test_plan.py",),
    "flexdilated/distributed/counts.py": ("tests/distributed/test_plan.py",),
    "flexdilated/masks/blocks.py": ("tests/masks/test_blocks.py", "tests/masks/test_masks.py"),
    "flexdilated/masks/functions.py": ("tests/masks/test_masks.py",),
    "flexdilated/masks/block_mask.py": ("tests/masks/test_blocks.py", "tests/masks/test_masks.py"),
}
TOO_LONG = "not compiled"  # of tests: minutes for every mutant

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
    """A change of the node at a place in the walk of a file's tree."""

    file: str
    place: int
    line: int
    text: str  # of that line: it stays where lines move
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
    """Every mutant of a file, in its order."""
    found = []
    place = 0
    source = (ROOT / file).read_text()
    lines = source.splitlines()
    for node in _walk(ast.parse(source)):
        for new in _changed(node):
            before, after = (" ".join(ast.unparse(each).split()) for each in (node, new))
            line = getattr(node, "lineno", 0)
            found.append(Mutant(file, place, line, lines[line - 1].strip(), f"{before}  ->  {after}"))
            place += 1
    return found


def mutated(mutant: Mutant) -> ast.Module:
    """The file's tree under a mutant."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    place = 0
    for node in list(_walk(tree)):
        for new in _changed(node):
            if place == mutant.place:
                target, replacement = node, ast.copy_location(new, node)
            place += 1

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return replacement if node is target else self.generic_visit(node)

    return ast.fix_missing_locations(Replace().visit(tree))


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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


def run(tests: Sequence[str], mutant: Mutant | None, limit: int) -> tuple[bool, float]:
    """Whether the tests pass under a mutant, and the processor seconds of that: in a process of its own, with what is imported."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            import pytest

            if mutant is not None:
                sys.meta_path.insert(0, _Loader(mutant))
            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "-k", TOO_LONG, *tests]))
        finally:
            os._exit(status)
    _, status, usage = os.wait4(child, 0)
    return status == 0, usage.ru_utime + usage.ru_stime


def _import_what_tests_share() -> None:
    """All but flexdilated, which every child imports anew."""
    import einops  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch.nn.attention.flex_attention

    with contextlib.suppress(ImportError):
        import torch.distributed.tensor  # noqa: F401


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(TESTS), help="the files to mutate")
    parser.add_argument("--sample", type=int, default=20, help="at most this many mutants of a file, drawn by the seed; 0: all")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--list", action="store_true", help="only count and name them")
    options = parser.parse_args()
    known = (
        {(each["file"], each["line"], each["change"]) for each in json.loads(SURVIVORS.read_text())}
        if SURVIVORS.exists()
        else set()
    )
    # pytest's plugins would warn that hypothesis is imported already. In CI hypothesis draws the same examples every time.
    os.environ.update(OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", CI="true")
    os.chdir(ROOT)
    if not options.list:
        _import_what_tests_share()
    total, killed, unexplained, seconds = 0, 0, [], 0.0
    for file in options.files:
        found = mutants(file)
        chosen = found
        if 0 < options.sample < len(found):
            chosen = sorted(random.Random(options.seed).sample(found, options.sample), key=lambda each: each.place)
        if options.list:
            print(f"{file}: {len(found)}", *(f"  {each.name}" for each in chosen), sep="\n")
            continue
        passed, base = run(TESTS[file], None, 3600)
        if not passed:
            print(f"{file}: its tests must pass without a mutant: {' '.join(TESTS[file])}")
            return 2
        limit = int(10 * base) + 10
        survived = []
        for mutant in chosen:
            alive, took = run(TESTS[file], mutant, limit)
            seconds += took
            if alive:
                survived.append(mutant)
                print(f"  {'explained' if mutant.key in known else 'SURVIVED'} {mutant.name}", flush=True)
        unexplained += [each for each in survived if each.key not in known]
        total, killed = total + len(chosen), killed + len(chosen) - len(survived)
        print(f"{file}: {len(chosen)} of {len(found)} mutants run, {len(survived)} alive; tests alone {base:.0f} s", flush=True)
    if not options.list:
        explained = total - killed - len(unexplained)
        counts = f"{killed} killed, {explained} explained, {len(unexplained)} not"
        print(f"{total} mutants: {counts}; {seconds:.0f} s of processor time")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
