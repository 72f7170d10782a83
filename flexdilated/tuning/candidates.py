"""What `flexdilated tune` checks and times: backends, and forms of the Triton kernels."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from flexdilated.backends.measured import PROVEN


class Candidate(NamedTuple):
    """A backend with its usual kernels, or a form of the Triton kernels in one direction.

    In this form `constants` of `backends/triton/launch.py` are on, and the constants of all other candidates are off.
    """

    name: str
    backend: str
    constants: tuple[str, ...] = ()
    direction: str | None = None  # the direction that the constants change

    @property
    def is_form(self) -> bool:
        return bool(self.constants)


CANDIDATES = (
    Candidate("triton", "triton"),
    Candidate("triton, longer tiles", "triton", ("LONG",), "forward"),
    Candidate("triton, products ahead of the softmax", "triton", ("AHEAD",), "forward"),
    Candidate("triton, host descriptors", "triton", ("HOSTS",), "forward"),
    Candidate("triton, one backward kernel", "triton", ("SUMS",), "backward"),
    Candidate("flash", "flash"),
    Candidate("flex", "flex"),  # compiles for minutes: only in `flexdilated tune --all`
)
FORMS = {constant for candidate in CANDIDATES for constant in candidate.constants}
SLOW = {candidate.name for candidate in CANDIDATES if candidate.backend not in PROVEN}


@contextmanager
def switched(plans: dict[Any, Any] | None = None, **constants: object) -> Iterator[None]:
    """Set constants of `backends/triton/launch.py` to other values inside the block, in all threads.

    `plans`: launches that were planned with these values. Raises NotImplementedError if there is no such constant.
    """
    launch: Any = importlib.import_module("flexdilated.backends.triton.launch")  # imports triton, which may not be installed
    missing = [name for name in constants if not hasattr(launch, name)]
    if missing:
        raise NotImplementedError(f"this checkout has no {', '.join(missing)}")
    values = {**constants, "PLANS": {} if plans is None else plans}
    before = {name: getattr(launch, name) for name in values}
    vars(launch).update(values)
    try:
        yield
    finally:
        vars(launch).update(before)


@contextmanager
def forced(backend: str, *constants: str, plans: dict[Any, Any] | None = None) -> Iterator[None]:
    """Run the Triton kernels in the form that has these constants, whatever this machine keeps."""
    if backend != "triton":
        yield
        return
    with switched(plans, **{name: name in constants for name in FORMS}):
        yield
