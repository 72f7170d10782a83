"""What the benchmarks of context parallelism measure is there."""

from __future__ import annotations

from benchmarks.test_context import PLANNING


def test_what_is_timed_as_planning_is_called_where_it_is_timed() -> None:
    for module, name in PLANNING:
        assert callable(getattr(module, name, None)), f"{module.__name__}.{name}"
