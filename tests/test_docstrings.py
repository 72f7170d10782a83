"""The examples of public docstrings: each public name has one, and it prints what it says.

An example runs after `import torch`, `from flexdilated import *` and an import of its own name's module.
"""

import doctest
import inspect
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

import flexdilated
from flexdilated import DilatedKVCache, DilatedPattern, analysis, compat, distributed, masks, nn

# Public names without an example, and why.
RANKS = "needs several processes: docs/context-parallelism.md has an example"
INTERNAL = "for code of the package, which passes the name of its caller or reads fields"
EXEMPT = {
    "distributed.gather_tokens": RANKS,
    "distributed.shard_sequence": RANKS,
    "distributed.unshard_sequence": RANKS,
    "DilatedKVCache.expect": RANKS,
    "DilatedKVCache.forget_past": INTERNAL,
    "DilatedPattern.check_heads": INTERNAL,
    "DilatedPattern.first_token_without_head": INTERNAL,
    "DilatedPattern.head_runs": INTERNAL,
    "DilatedPattern.kept": INTERNAL,
    "DilatedPattern.kept_offsets": INTERNAL,
}
DRAWS = {"draw_attention_map", "draw_pattern"}


def public(module: ModuleType) -> dict[str, Any]:
    """The classes and functions that a module offers; constants and sub-modules have no docstring."""
    members = ((name, getattr(module, name)) for name in dir(module))
    return {name: x for name, x in members if not name.startswith("_") and isinstance(x, (type, FunctionType))}


MODULES = (flexdilated, nn, compat, analysis, masks, distributed)
NAMES: dict[str, tuple[Any, ModuleType]] = {
    f"{module.__name__.removeprefix('flexdilated').lstrip('.')}.{name}".lstrip("."): (x, module)
    for module in MODULES
    for name, x in public(module).items()
} | {
    f"{owner.__name__}.{name}": (getattr(owner, name), flexdilated)
    for owner in (DilatedPattern, DilatedKVCache)
    for name, x in vars(owner).items()
    if not name.startswith("_") and isinstance(x, (classmethod, FunctionType))
}


def examples(name: str) -> doctest.DocTest:
    x, module = NAMES[name]
    names = {"torch": torch, **public(flexdilated), **public(module)}
    return doctest.DocTestParser().get_doctest(inspect.cleandoc(x.__doc__ or ""), names, name, None, 0)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_docstring_of_a_public_name_has_an_example_that_runs(name: str) -> None:
    if name in DRAWS:
        pytest.importorskip("matplotlib")
    found = examples(name)
    assert bool(found.examples) != (name in EXEMPT)
    assert not found.examples or any(example.want for example in found.examples), "prints nothing"
    doctest.DebugRunner(optionflags=doctest.FAIL_FAST).run(found)


def test_the_first_lines_of_dilated_attention_show_a_call() -> None:
    first = inspect.cleandoc(flexdilated.dilated_attention.__doc__ or "").splitlines()[:10]
    assert any(line.startswith(">>>") and "dilated_attention(" in line for line in first)


def test_every_name_without_an_example_is_public() -> None:
    assert not EXEMPT.keys() - NAMES.keys()
