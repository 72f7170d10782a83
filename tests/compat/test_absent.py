"""Names that are not here say what to use, in the error and in the docs."""

import re

import pytest

import flexdilated
from flexdilated import compat
from flexdilated.compat.arguments import ABSENT
from tests.compat.cases import MIGRATION


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_absent_name_says_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=f"^{name} is not in flexdilated.compat; use {re.escape(ABSENT[name])}$"):
        exec(f"from flexdilated.compat import {name}")


def test_what_absent_names_point_at_exists() -> None:
    for path in set(re.findall(r"flexdilated\.(\w+)", " ".join(ABSENT.values()))):
        assert hasattr(flexdilated, path)
    assert not set(ABSENT) & set(vars(compat))
    with pytest.raises(AttributeError, match=r"^module 'flexdilated.compat' has no attribute 'nothing'$"):
        compat.nothing  # noqa: B018


def test_absent_names_in_the_docs_are_those_of_the_module() -> None:
    section = MIGRATION.read_text().split("| use instead |")[1].split("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in section.splitlines()[2:]]
    assert [(name.strip("`"), use) for names, use in rows for name in names.split(", ")] == list(ABSENT.items())
