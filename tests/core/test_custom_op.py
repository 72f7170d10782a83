"""The schema of an operator follows from the fields of its options."""

from collections.abc import Sequence
from typing import NamedTuple

from flexdilated.core.custom_op import schema_of


class Options(NamedTuple):
    lengths: Sequence[int]
    rank: int
    scale: float
    is_causal: bool
    name: str


def test_a_schema_is_made_of_the_fields() -> None:
    assert schema_of(Options) == "SymInt[] lengths, SymInt rank, float scale, bool is_causal, str name"
