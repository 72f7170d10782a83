"""Every argument's place in the table, its warning, and the docs' table."""

import warnings

import pytest

from flexdilated import compat
from flexdilated.compat import ARGUMENTS
from tests.compat.cases import BARE, FACTORIES, GIVEN, HILBERT, LAYERS, LENGTHS, MIGRATION, RATES, TRANSFORMERS, arguments, build


def test_every_argument_of_every_name_is_in_the_table_and_the_other_way_round() -> None:
    names = (*BARE, *LAYERS, HILBERT, *TRANSFORMERS, *FACTORIES)
    assert sorted(names) == sorted(set(compat.__all__) - {"ARGUMENTS", "Argument"})
    taken = set().union(*(arguments(name) for name in names)) - {"embed_dim", "num_heads"}
    assert taken == set(ARGUMENTS)
    assert set(GIVEN) == {name for name, argument in ARGUMENTS.items() if argument.warns != "never"}


@pytest.mark.parametrize("name", [*BARE, *LAYERS, HILBERT])
def test_arguments_without_effect_warn_once_by_name_and_others_never(name: str) -> None:
    build(name)  # warnings are errors here
    for argument in sorted(arguments(name) & set(GIVEN)):
        silent = ARGUMENTS[argument].warns == "without parameters" and name in LAYERS
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build(name, **{argument: GIVEN[argument]})
        expected = [] if silent else [f"{argument} has no effect: {ARGUMENTS[argument].meaning}"]
        assert [str(warning.message) for warning in caught] == expected
        assert all(warning.filename == build.__code__.co_filename for warning in caught)


def test_a_loop_that_builds_layers_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            compat.RingDilatedAttention(LENGTHS, RATES, use_tf32=True, block_size=7)
    assert len(caught) == 2


def test_table_in_the_docs_is_the_table_in_the_module() -> None:
    section = MIGRATION.read_text().split("| argument |")[1].split("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in section.splitlines()[2:]]
    assert rows == [(f"`{name}`", argument.meaning, argument.warns) for name, argument in ARGUMENTS.items()]
