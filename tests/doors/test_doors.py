"""Every kind of branch through every door: a case equals the definition, or is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from tests.doors.cases import CASES, KINDS, PatternWithComet, Question, assert_near
from tests.doors.doors import DOORS, Door

CELLS = [(door, kind) for door in DOORS for kind in KINDS]
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp2:RuntimeWarning",  # of pairs that do not see each other, in Triton's interpreter
    "ignore:pattern with segments:UserWarning",  # of cases that lose tokens, or boundaries, on purpose
)


def ask(door: Door, case: Question, patch: pytest.MonkeyPatch) -> None:
    if door.lacks(case) is not None:
        return
    reason = door.accepts(case)
    if reason is not None:
        with pytest.raises((NotImplementedError, ValueError), match=reason):
            door.run(case, patch)
        return
    found = door.run(case, patch)
    if "out" in found:
        case = case if "lse" in found else replace(case, lse_gradient=False)
        assert_near(
            found, case, torch.float32 if case.dtype == torch.float64 and found["out"].dtype == torch.float32 else case.dtype
        )


@pytest.mark.parametrize(("door", "kind"), CELLS)
def test_a_case_equals_the_definition_or_is_refused_by_name(door: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in DOORS[door].asked():
        try:
            with monkeypatch.context() as patch:
                ask(DOORS[door], CASES[kind, variant], patch)
        except BaseException as error:
            error.add_note(f"variant: {variant}")
            raise


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("window", [None, 5])
def test_a_kind_that_no_code_knows_is_refused_by_its_name(door: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in DOORS[door].asked():
        case = replace(CASES["segments", variant], pattern=PatternWithComet((29,), (1,), window=window))
        if DOORS[door].lacks(case) is None and DOORS[door].accepts(case) is None:
            with pytest.raises((NotImplementedError, TorchDynamoException), match="got a branch of kind Comet: Comet"):
                DOORS[door].run(case, monkeypatch)
