"""A layer over a sharded sequence."""

from typing import Any

from flexdilated import DilatedPattern
from flexdilated.analysis.strategies import Layer


def layer(**changes: Any) -> Layer:
    """A small one, with changes."""
    values: dict[str, Any] = {"pattern": DilatedPattern((7, 13, 31), (1, 2, 5)), "tokens": 61, "ranks": 3, "heads": 12}
    values |= {"kv_heads": 6, "head_dim": 5, "dtype": "float32", "batch": 2, "is_causal": False}
    return Layer(**(values | changes))
